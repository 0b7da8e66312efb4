"""One request on its way through the router: attempts at backends, and the answer as it comes."""

import asyncio
from collections.abc import Callable, Mapping

from ifbbench.endpoint.answer import Answer, EventLines
from ifbbench.endpoint.api import read_openai
from ifbbench.endpoint.http import MAX_BODY, REFUSED_FOR_NOW, Exchange, RequestFailed, refusal
from ifbbench.settings.fields import memory_size

EVENTS = "text/event-stream"
# Answers after which another server is tried: those that say so, and that of a server whose engine has failed.
TRIED_AGAIN = (*REFUSED_FOR_NOW, 500)
# Headers that are of one connection, and those that the router writes itself.
HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "expect",
        "accept-encoding",
    )
)


class Attempt(Exchange):
    """A request that was sent to a backend.

    parts: parts of its answer that were not taken yet, with their times.
    changed: is set when there is something new.
    failure: once it is done, why there is no answer.
    """

    __slots__ = ("_held_bytes", "_now", "changed", "failure", "is_done", "parts")

    def __init__(self, now: Callable[[], float]) -> None:
        self.parts: list[tuple[bytes, float]] = []
        self.changed = asyncio.Event()
        self.failure: RequestFailed | None = None
        self.is_done, self._held_bytes, self._now = False, 0, now
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.parts = []

    def on_part(self, part: bytes) -> None:
        self._held_bytes += len(part)
        if self._held_bytes > MAX_BODY:
            raise RequestFailed("endless", f"the client has not read {memory_size(MAX_BODY)} of its answer")
        self.parts.append((part, self.active_s))
        self.changed.set()

    def on_end(self, failure: RequestFailed | None) -> None:
        self.failure, self.is_done = failure, True
        self.changed.set()

    def take(self) -> list[tuple[bytes, float]]:
        """What is new."""
        parts, self.parts, self._held_bytes = self.parts, [], 0
        return parts

    @property
    def is_stream(self) -> bool:
        """Whether the answer comes as server-sent events."""
        return self.status == 200 and self.header("content-type").startswith(EVENTS)

    @property
    def was_refused(self) -> bool:
        """Whether another server may succeed."""
        return self.is_done and self.failure is None and self.status in TRIED_AGAIN

    def problem(self) -> RequestFailed | None:
        """Why there is no complete answer."""
        if self.failure is not None or self.status == 200:
            return self.failure
        return refusal(self)

    def response_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of the answer for the client."""
        return [(name, value) for name, value in self.headers.items() if name.decode("latin-1") not in HOP_BY_HOP]


def request_head(method: str, target: str, host: str, headers: Mapping[str, str], length: int) -> bytes:
    """The head of the request for a backend: that of the client, but for what is of one connection."""
    lines = [f"{method} {target} HTTP/1.1", f"host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers.items() if name.lower() not in HOP_BY_HOP]
    if length or method != "GET":
        lines.append(f"content-length: {length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


class Reading:
    """Reads along what passes through: the chunks of an answer, its usage, and errors in the stream."""

    def __init__(self) -> None:
        self.answer, self._events = Answer(), EventLines()
        self.failure: RequestFailed | None = None

    def feed(self, part: bytes, arrived_s: float) -> None:
        """A part of a stream has arrived."""
        try:
            for data in self._events.feed(part):
                read_openai(data, self.answer, arrived_s)
        except RequestFailed as error:
            self.failure = self.failure or error

    def whole(self, body: bytes, arrived_s: float) -> None:
        """An answer that came in one piece: one chunk with the tokens of its usage."""
        try:
            read_openai(body, self.answer, arrived_s)
        except RequestFailed as error:
            self.failure = error
        read, self.answer = self.answer, Answer()
        self.answer.prompt_tokens, self.answer.cached_tokens = read.prompt_tokens, read.cached_tokens
        self.answer.is_ended = True
        if read.output_tokens:
            self.answer.output_tokens = read.output_tokens
            self.answer.add(arrived_s, read.output_tokens, "")

    def problem(self) -> RequestFailed | None:
        """What is wrong with what has arrived, once all has."""
        if self.failure is None and not self.answer.is_ended:
            return RequestFailed("closed_early", "the stream ended before the answer was complete")
        return self.failure
