"""An answer as it arrives: server-sent events, their chunks, and the number of tokens in each."""

from array import array
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ifbbench.rundir.client_side import MORE_THAN_ASKED, USAGE_CONTRADICTS, ChunkTokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The number of tokens of a chunk where the stream does not say it: of a chunk with text, of one without that may have a
# token, and of the last one without text, which may stand for the end token.
UNKNOWN, PERHAPS, PERHAPS_END = -1, -2, -3


class EventLines:
    """Divides a stream into server-sent events. A part of the stream may end anywhere, within a character too."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> list[bytes]:
        """The data of the events that are complete with `part`."""
        is_one_line = part.find(b"\n") == len(part) - 2 and part[-1:] == b"\n" and part[-3:-2] != b"\r"
        if is_one_line and part[:6] == b"data: " and not (self._rest or self._data):
            return [part[6:-2]]  # one event, as most servers send it
        *lines, self._rest = (self._rest + part if self._rest else part).split(b"\n")
        events = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if not line:
                if self._data:
                    events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        return events

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of an event that did not end."""
        return not self._data and not self._rest.strip()


class Answer:
    """What a client has received of one answer.

    chunk_s, chunk_tokens: when each chunk with output arrived, and the number of its tokens: UNKNOWN, PERHAPS or
        PERHAPS_END where the stream does not say.
    ids: token ids, where the stream has them.
    prompt_tokens, output_tokens, cached_tokens: as the server reports them, None if it does not.
    is_ended: whether the server said that it is complete.
    """

    __slots__ = (
        "cached_tokens",
        "chunk_s",
        "chunk_tokens",
        "has_unknown",
        "ids",
        "is_ended",
        "num_counted",
        "output_tokens",
        "prompt_tokens",
        "texts",
    )

    def __init__(self) -> None:
        self.chunk_s, self.chunk_tokens = array("d"), array("l")
        self.texts: list[str] = []
        self.ids: list[int] = []
        self.num_counted = 0
        self.has_unknown = False
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.is_ended = False

    def add(self, now_s: float, tokens: int, text: str) -> None:
        """A chunk arrives; tokens: UNKNOWN or PERHAPS if it does not say."""
        self.chunk_s.append(now_s)
        self.chunk_tokens.append(tokens)
        self.texts.append(text)
        if tokens < 0:
            self.has_unknown = True
        else:
            self.num_counted += tokens

    def count(self, tokenizer: "Tokenizer | None", asked: int) -> "CountedChunks":
        """The number of tokens of each chunk, at most `asked` in all."""
        tokens, source, is_contradicted = self._tokens(tokenizer)
        warnings = [USAGE_CONTRADICTS] if is_contradicted else []
        # The tokenizer may divide a text into more tokens than the model wrote.
        is_estimate = source is ChunkTokens.TOKENIZER and sum(tokens) != self.output_tokens
        excess = 0 if is_estimate else sum(tokens) - asked
        if excess > 0:
            warnings.append(MORE_THAN_ASKED)
            while excess > 0:
                cut = min(excess, tokens[-1])
                tokens[-1] -= cut
                excess -= cut
                if not tokens[-1]:
                    tokens.pop()
        with_tokens = [(time, number) for time, number in zip(self.chunk_s, tokens, strict=False) if number > 0]
        return CountedChunks([time for time, _ in with_tokens], [number for _, number in with_tokens], source, warnings)

    def _tokens(self, tokenizer: "Tokenizer | None") -> tuple[list[int], ChunkTokens, bool]:
        """The number of tokens of each chunk, how it is known, and whether the usage of the server contradicts it."""
        chunks, total = list(self.chunk_tokens), self.output_tokens
        has_text = UNKNOWN in chunks
        if has_text and tokenizer is not None:
            weights = _tokens_of(tokenizer, self.texts)
            if total is None or total < sum(number != 0 for number in weights):
                return weights, ChunkTokens.TOKENIZER, total is not None
            return _divided(total, weights), ChunkTokens.TOKENIZER, False
        # At least one token in each chunk with text, and none without.
        least = [1 if number == UNKNOWN else max(number, 0) for number in chunks]
        source = ChunkTokens.USAGE if has_text else ChunkTokens.STREAM
        missing = 0 if total is None else total - sum(least)
        for possible in ((), (PERHAPS_END,), (PERHAPS,), (PERHAPS, PERHAPS_END)):
            if missing == sum(number in possible for number in chunks):
                found = [1 if number in possible else of_chunk for number, of_chunk in zip(chunks, least, strict=True)]
                return found, source if total is not None or not has_text else ChunkTokens.CHUNKS, False
        if has_text and missing > 0:
            return _divided(total or 0, least), ChunkTokens.EVENLY, False
        return least, ChunkTokens.CHUNKS if has_text else ChunkTokens.STREAM, True


class CountedChunks(NamedTuple):
    """The chunks of an answer that have tokens: when each arrived, and its tokens; how they are known, and what is
    wrong with the answer (MORE_THAN_ASKED, USAGE_CONTRADICTS)."""

    times_s: list[float]
    tokens: list[int]
    source: ChunkTokens
    warnings: list[str]


def _divided(total: int, weights: Sequence[int]) -> list[int]:
    """`total` tokens over chunks in proportion to `weights`; the first chunk with a weight has at least one."""
    whole, ends = sum(weights) or 1, np.cumsum(weights).tolist()
    before = 0
    shares = []
    for end in ends:
        until = ceil(total * end / whole)
        shares.append(until - before)
        before = until
    return shares


def _tokens_of(tokenizer: "Tokenizer", texts: Sequence[str]) -> list[int]:
    """The number of tokens of the joined text that end in each of its parts."""
    offsets = tokenizer.encode("".join(texts), add_special_tokens=False).offsets
    edges = np.cumsum([0, *map(len, texts)])
    # A token that reaches over an edge arrives with the part that completes it.
    parts = np.searchsorted(edges, [end for _, end in offsets], side="left") - 1
    return [int(one) for one in np.bincount(np.clip(parts, 0, None), minlength=len(texts))]
