"""Sequences with keys and values in a paged cache that is NaN elsewhere, and the expected attention."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.torch.model.attention_plan import QuerySpans

SPARE_BLOCKS = 2


@dataclass(frozen=True)
class Heads:
    """Query heads, KV heads and head size."""

    queries: int = 2
    keys: int = 1
    size: int = 32


@dataclass
class Scene:
    """Sequences with `cached` tokens each and `new` ones in the batch.

    Packed tensors [tokens, heads, head size] are views of one with queries, keys and values side by side; its last row
    is NaN. The caches [blocks, tokens per block, KV heads, head size] are NaN where no token is stored; blocks are
    assigned in random order, and table entries beyond a sequence's blocks refer to a block that is all NaN.
    is_written: the new tokens are in the cache too.
    """

    cached: list[int]
    new: list[int]
    heads: Heads
    rule: AttentionWindow
    dtype: torch.dtype
    device: torch.device
    is_written: bool = False
    cache_dtype: torch.dtype | None = None
    seed: int = 0
    expected: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        num_tokens, heads = sum(self.new), self.heads
        fused = torch.full((num_tokens + 1, heads.queries + 2 * heads.keys, heads.size), torch.nan, dtype=self.dtype)
        self._assign_blocks()
        cache_shape = (self.num_blocks, self.rule.tokens_per_block, heads.keys, heads.size)
        caches = [torch.full(cache_shape, torch.nan, dtype=self.cache_dtype or self.dtype) for _ in range(2)]
        expected, row = [], 0
        for index, (cached, new) in enumerate(zip(self.cached, self.new, strict=True)):
            queries = self._draw(new, heads.queries, self.dtype)
            keys, values = (self._draw(cached + new, heads.keys, cache.dtype).to(self.dtype) for cache in caches)
            fused[row : row + new] = torch.cat([queries, keys[cached:], values[cached:]], dim=1)
            for cache, part in zip(caches, (keys, values), strict=True):
                self._store(cache, index, part[: cached + new * self.is_written])
            expected.append(self._attention(queries, keys, values, cached))
            row += new
        self.fused = fused.to(self.device)
        self.queries, self.keys, self.values = self.fused.split([heads.queries, heads.keys, heads.keys], dim=1)
        self.key_cache, self.value_cache = (cache.to(self.device) for cache in caches)
        self.block_tables = torch.from_numpy(self.tables).to(self.device)
        self.expected = torch.cat(expected) if expected else torch.empty(0)

    @property
    def spans(self) -> QuerySpans:
        """The chunks."""
        lengths, starts = np.array(self.new, np.int64), np.array(self.cached, np.int64)
        return QuerySpans(np.cumsum(lengths) - lengths, lengths, starts, np.arange(len(lengths)))

    def poisoned_output(self) -> Tensor:
        """[tokens + 1, heads, head size] of NaN."""
        return torch.full_like(self.queries, torch.nan, memory_format=torch.contiguous_format)

    def _draw(self, tokens: int, heads: int, dtype: torch.dtype) -> Tensor:
        return torch.randn((tokens, heads, self.heads.size), generator=self.generator).to(dtype)

    def _assign_blocks(self) -> None:
        random = np.random.default_rng(self.seed)
        rule, size = self.rule, self.rule.tokens_per_block
        ends = [cached + new for cached, new in zip(self.cached, self.new, strict=True)]
        needed = [int(rule.cache_positions(np.arange(end)).max(initial=-1)) + 1 for end in ends]
        counts = [-(-positions // size) for positions in needed]
        self.num_blocks = sum(counts) + SPARE_BLOCKS
        shuffled = random.permutation(self.num_blocks - 1).tolist()
        unused = self.num_blocks - 1
        self.tables = np.full((len(ends), max(counts, default=0) + 1), unused, np.int32)
        for row, count in enumerate(counts):
            self.tables[row, :count] = [shuffled.pop() for _ in range(count)]

    def _store(self, cache: Tensor, sequence: int, tokens: Tensor) -> None:
        """Later tokens overwrite earlier ones at the same cache position."""
        rows = self.rule.cache_rows(self.tables, np.full(len(tokens), sequence), np.arange(len(tokens)))
        flat = cache.view(-1, *cache.shape[2:])
        for row, token in zip(rows.tolist(), tokens, strict=True):
            flat[row] = token.to(cache.dtype)

    def _attention(self, queries: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        group = self.heads.queries // self.heads.keys
        keys, values = (part.double().repeat_interleave(group, dim=1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) / self.heads.size**0.5
        positions = np.arange(len(keys))
        visible = np.zeros((len(queries), len(keys)), np.bool_)
        for step in range(len(queries)):
            position = np.int64(start + step)
            visible[step] = self.rule.sees(positions, position) & (positions <= position)
        weights = scores.masked_fill(~torch.from_numpy(visible), -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values)
