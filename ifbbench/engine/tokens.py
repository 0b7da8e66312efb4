"""Tokens as keys of blocks: what a block holds, in a form that can be compared, ordered and stored."""

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from itertools import repeat
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

BlockKey: TypeAlias = "bytes | tuple[int, ...]"


def block_ranges(num_tokens: int, tokens_per_block: int, with_partial: bool = True) -> list[tuple[int, int]]:
    """(start, stop) of the blocks that hold the first `num_tokens` tokens, with or without a last partial one."""
    stop = num_tokens if with_partial else num_tokens - num_tokens % tokens_per_block
    return [(start, min(start + tokens_per_block, stop)) for start in range(0, stop, tokens_per_block)]


class TokenIds:
    """Token ids of one request, each with an extra id (of a prompt-tuning table) if the request has them.

    The key of a block is the big-endian bytes of its ids: exact, hashed once, and compared at the speed of memory.
    Keys of one `kind` can be compared. They are ordered so that of all keys, the neighbours of a key have the longest
    common prefix with it.
    """

    def __init__(self, tokens: NDArray[np.int32], extra_ids: NDArray[np.int64] | None = None) -> None:
        """tokens, extra_ids: [length]."""
        self._has_extra_ids = extra_ids is not None
        self._bytes_per_token = 16 if self._has_extra_ids else 4
        self._bytes = bytearray()
        self.append(tokens, extra_ids)

    @property
    def kind(self) -> Hashable:
        return "token ids", self._has_extra_ids

    def __len__(self) -> int:
        return len(self._bytes) // self._bytes_per_token

    def append(self, tokens: NDArray[np.int32], extra_ids: NDArray[np.int64] | None = None) -> None:
        """Add tokens of the same request. Extra ids that are not given are 0."""
        if self._has_extra_ids:
            pairs = np.zeros((len(tokens), 2), ">i8")
            pairs[:, 0] = tokens
            if extra_ids is not None:
                pairs[:, 1] = extra_ids
            self._bytes += pairs.tobytes()
        else:
            self._bytes += np.ascontiguousarray(tokens, ">i4").tobytes()

    def key(self, start: int, stop: int) -> BlockKey:
        """The key of the tokens at positions `start` to `stop` - 1."""
        return bytes(self._bytes[start * self._bytes_per_token : stop * self._bytes_per_token])

    def block_keys(self, first: int, stop: int, tokens_per_block: int) -> list[BlockKey]:
        """The keys of the full blocks `first` to `stop` - 1."""
        size = tokens_per_block * self._bytes_per_token
        data = bytes(self._bytes[first * size : stop * size])
        return [data[start : start + size] for start in range(0, len(data), size)]

    def block_runs(self, first: int, stop: int, tokens_per_block: int) -> list[tuple[BlockKey, int]]:
        """The full blocks `first` to `stop` - 1, as runs of blocks that go on with the next symbols: the key of the
        first block of each, and how many they are. Token ids have no runs."""
        return [(key, 1) for key in self.block_keys(first, stop, tokens_per_block)]

    def num_tokens(self, key: BlockKey) -> int:
        """Number of tokens of a key."""
        return len(key) // self._bytes_per_token

    def split_key(self, key: BlockKey, count: int) -> tuple[BlockKey, BlockKey]:
        """The keys of the first `count` tokens of a key, and of the others."""
        end = count * self._bytes_per_token
        return key[:end], key[end:]

    def num_common_tokens(self, key: BlockKey, other: BlockKey) -> int:
        """Number of tokens of the longest common prefix of two keys."""
        low, high = 0, min(len(key), len(other)) // self._bytes_per_token
        while low < high:
            middle = (low + high + 1) // 2
            end = middle * self._bytes_per_token
            if key[:end] == other[:end]:
                low = middle
            else:
                high = middle - 1
        return low


class SymbolicTokens:
    """Symbolic tokens (no ids recorded) of one request: runs of consecutive numbers, (first number, length) each.

    A trace that says "these 512 tokens are those of hash id 7" is a run of 512 numbers that belong to id 7 alone, so a
    prompt of 190,000 tokens is some hundreds of runs. The key of a block is the runs in it, one after the other. The
    methods are those of `TokenIds`.
    """

    kind: Hashable = "symbolic"

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        self._runs: list[tuple[int, int]] = []
        self._ends: list[int] = []
        for first, length in runs:
            self.append(first, length)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def append(self, first: int, length: int) -> None:
        """Add a run of `length` tokens. Adjacent runs are joined, because equal tokens must have equal keys."""
        if length <= 0:
            return
        if self._runs and sum(self._runs[-1]) == first:
            self._runs[-1] = (self._runs[-1][0], self._runs[-1][1] + length)
            self._ends[-1] += length
        else:
            self._ends.append(len(self) + length)
            self._runs.append((first, length))

    def key(self, start: int, stop: int) -> BlockKey:
        index = bisect_right(self._ends, start)
        if start < stop <= self._ends[index]:  # the usual case: within one run
            first, length = self._runs[index]
            return first + start - (self._ends[index] - length), stop - start
        parts: list[int] = []
        while start < stop:
            first, length = self._runs[index]
            end = self._ends[index]
            until = min(stop, end)
            parts += (first + start - (end - length), until - start)
            start, index = until, index + 1
        return tuple(parts)

    def block_keys(self, first: int, stop: int, tokens_per_block: int) -> list[BlockKey]:
        size, keys = tokens_per_block, list[BlockKey]()
        for key, count in self.block_runs(first, stop, size):
            if count == 1:
                keys.append(key)
            else:
                keys += zip(range(key[0], key[0] + count * size, size), repeat(size, count), strict=True)
        return keys

    def block_runs(self, first: int, stop: int, tokens_per_block: int) -> list[tuple[BlockKey, int]]:
        size, runs = tokens_per_block, list[tuple[BlockKey, int]]()
        start, last = first * size, stop * size
        index = bisect_right(self._ends, start)
        while start < last:
            number, length = self._runs[index]
            end = self._ends[index]
            number += start - (end - length)
            if within := (min(end, last) - start) // size:
                runs.append(((number, size), within))
            start += within * size
            if start < last and start != end:  # a block in several runs
                runs.append((self.key(start, start + size), 1))
                start += size
            while start < last and self._ends[index] <= start:
                index += 1
        return runs

    def num_tokens(self, key: BlockKey) -> int:
        return sum(key[1::2])

    def split_key(self, key: BlockKey, count: int) -> tuple[BlockKey, BlockKey]:
        tokens = SymbolicTokens(list(zip(key[::2], key[1::2], strict=True)))
        return tokens.key(0, count), tokens.key(count, len(tokens))

    def num_common_tokens(self, key: BlockKey, other: BlockKey) -> int:
        common = 0
        for first, length, other_first, other_length in zip(key[::2], key[1::2], other[::2], other[1::2], strict=False):
            if first != other_first:
                break
            common += min(length, other_length)
            if length != other_length:
                break
        return common


BlockTokens: TypeAlias = TokenIds | SymbolicTokens


class KnownTokens:
    """The tokens of a sequence, for lookup and storage. Blocks are shared only between equal identities."""

    def __init__(self, tokens: BlockTokens, identity: Hashable = None) -> None:
        self.tokens, self.identity = tokens, identity
        self._keys: list[BlockKey] = []

    def block_keys(self, count: int, tokens_per_block: int) -> list[BlockKey]:
        """The keys of the first `count` full blocks. They are made once, because a block is looked for, taken and
        stored under the same key, so `tokens_per_block` must be the same in each call."""
        keys = self._keys
        if len(keys) < count:
            keys += self.tokens.block_keys(len(keys), count, tokens_per_block)
        return keys[:count]
