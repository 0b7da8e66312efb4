"""An answer as it arrives: server-sent events, their chunks, and the number of tokens in each."""

from array import array
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from ifbbench.recording.client_side import ChunkTokens
from ifbbench.replay.endpoint_http import RequestFailed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_LINE = 64 * 1024 * 1024
# A chunk with text of which the stream does not say how many tokens it has, and one without text that may have one.
UNKNOWN, PERHAPS = -1, -2


class EventLines:
    """Divides a stream into server-sent events. A part of the stream may end anywhere, within a character too."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> list[bytes]:
        """The data of the events that are complete with `part`. RequestFailed for a line without end."""
        is_one_line = part.find(b"\n") == len(part) - 2 and part[-1:] == b"\n"
        if is_one_line and part[:6] == b"data: " and not (self._rest or self._data):
            return [part[6:-2]]  # one event, as most servers send it
        *lines, self._rest = (self._rest + part if self._rest else part).split(b"\n")
        if len(self._rest) > MAX_LINE:
            raise RequestFailed("malformed_stream", "a line of the stream has no end")
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

    chunk_s, chunk_tokens: of each chunk with output, when it arrived and the number of its tokens; UNKNOWN or PERHAPS
    where the stream does not say. prompt_tokens, output_tokens, cached_tokens: as the server reports them, None if it
    does not. ids: of the tokens, where the stream has them. is_ended: whether the server said that it is complete.
    """

    __slots__ = ("cached_tokens", "chunk_s", "chunk_tokens", "has_unknown", "ids", "is_ended", "num_counted",
                 "output_tokens", "prompt_tokens", "texts")  # fmt: skip

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

    def count(self, tokenizer: "Tokenizer | None") -> tuple[list[float], list[int], ChunkTokens]:
        """The time and the number of tokens of each chunk that has any, and how these are known."""
        tokens, source, total = list(self.chunk_tokens), ChunkTokens.STREAM, self.output_tokens
        if self.has_unknown or (total is not None and total != sum(tokens)):
            with_text = [number != PERHAPS and number != 0 for number in tokens]
            source = ChunkTokens.USAGE if total is not None else ChunkTokens.CHUNKS
            if total == len(tokens):
                tokens = [1] * len(tokens)
            elif total in (None, sum(with_text)) and tokenizer is None:
                tokens = [int(one) for one in with_text]
            elif tokenizer is not None:
                weights = _tokens_of(tokenizer, self.texts)
                tokens = weights if total is None else _divided(total, weights)
                source = ChunkTokens.TOKENIZER
            else:
                tokens = _divided(total or 0, [int(one) for one in with_text])
                source = ChunkTokens.EVENLY
        times = [time for time, number in zip(self.chunk_s, tokens, strict=True) if number > 0]
        return times, [number for number in tokens if number > 0], source


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
