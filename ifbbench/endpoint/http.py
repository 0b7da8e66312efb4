"""HTTP/1.1 to an endpoint: one connection, which takes one request after another.

Made for thousands of streams on one core: a connection parses what it receives in the callback of the event loop, and
no task or queue stands between the socket and the reader of a stream.
"""

import asyncio
import json
from pathlib import Path
from typing import Any, Protocol

import httptools

from ifbbench.clock import Clock
from ifbbench.endpoint.loop import Alarm
from ifbbench.errors import IfbbenchError
from ifbbench.settings.fields import memory_size

MAX_ERROR_BODY = 64 * 1024
# The longest response that is not streamed, and the longest headers of one.
MAX_BODY = 64 * 1024 * 1024
MAX_HEADERS = 256 * 1024
REFUSED_FOR_NOW = (429, 502, 503, 504)


class RequestFailed(IfbbenchError):
    """A request without a complete answer.

    kind: a short name to count by, such as `timeout` or `http_429`.

    may_retry: whether another attempt may succeed.
    retry_after_s: when the server asks for it.
    """

    def __init__(self, kind: str, message: str, may_retry: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind, self.may_retry, self.retry_after_s = kind, may_retry, retry_after_s


def defect(error: BaseException) -> RequestFailed:
    """The failure of a request for an exception that is none of its own: a mistake in this program."""
    frame, where = error.__traceback__, ""
    while frame is not None:
        where = f" in {Path(frame.tb_frame.f_code.co_filename).name}, line {frame.tb_lineno}"
        frame = frame.tb_next
    return RequestFailed(
        "defect", f"a defect of ifbbench: {type(error).__name__}: {printable(str(error)[:300])}{where}"
    )


class Exchange:
    """A request and its response; a subclass takes the response.

    is_open: whether it has begun and not ended.
    sent_s, active_s: on the clock, when the request was written, and when something last arrived.
    body: what was not streamed.
    headers: headers of the answer, with names in small letters.
    """

    __slots__ = ("active_s", "body", "headers", "is_open", "sent_s", "status")

    def __init__(self) -> None:
        self.is_open = True
        self.sent_s: float | None = None
        self.active_s = 0.0
        self.reset()

    def reset(self) -> None:
        """Forget the response, before the request is sent, and after an interim response."""
        self.status, self.body = 0, b""
        self.headers: dict[bytes, bytes] = {}

    def on_part(self, part: bytes) -> None:
        """A part of the body of a response of status 200 has arrived. May raise RequestFailed."""
        self.body += part
        if len(self.body) > MAX_BODY:
            raise RequestFailed("endless", f"the response has more than {memory_size(MAX_BODY)}")

    def end(self, failure: RequestFailed | None) -> None:
        """The response, of any status, is complete, or there is none. May be called again, so that an exchange
        can be ended after any exception."""
        if self.is_open:
            self.is_open = False
            self.on_end(failure)

    def on_end(self, failure: RequestFailed | None) -> None:
        """What `end` calls once."""
        raise NotImplementedError

    def header(self, name: str) -> str:
        """The value of a header, empty if there is none."""
        return self.headers.get(name.encode(), b"").decode("latin-1")


class Pool(Protocol):
    """What a connection belongs to.

    all, idle: those that are open, and those of them that wait for a request.
    """

    clock: Clock
    alarm: Alarm
    all: "set[Connection]"
    idle: "list[Connection]"

    def resend(self, content: bytes, exchange: Exchange) -> None:
        """Send a request again, because its connection was closed before an answer began."""
        ...


class Connection(asyncio.Protocol):
    """One connection: takes one exchange after another."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._now, self._alarm = pool.clock.now, pool.alarm
        self._parser: Any = None
        self._is_until_close = self._is_complete = self._is_reused = self._can_stay = False
        self._content = b""
        self._num_header_bytes = 0
        self.transport: asyncio.Transport | None = None
        self.exchange: Exchange | None = None
        self.has_received = False

    def connection_made(self, transport: Any) -> None:  # that of uvloop is no subclass of asyncio.Transport
        self.transport = transport

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def send(self, exchange: Exchange, content: bytes) -> None:
        """Write a request. After an exception the connection is closed and has no exchange."""
        try:
            assert self.transport is not None
            exchange.reset()
            self.exchange, self._content, self._parser = exchange, content, httptools.HttpResponseParser(self)
            self.has_received = self._is_until_close = self._is_complete = False
            self._num_header_bytes = 0
            exchange.sent_s = exchange.active_s = self._now()
            self.transport.write(content)
        except Exception:
            self.exchange = None
            self.close()
            raise

    # Called by the event loop. An exception that is not expected ends the exchange, which would not end otherwise.

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        try:
            self._receive(data)
        except Exception as error:
            self._end_by_defect(exchange, error)

    def connection_lost(self, error: Exception | None) -> None:
        exchange = self.exchange
        try:
            self._lose(error)
        except Exception as problem:
            self._end_by_defect(exchange, problem)
        self.transport = self._parser = None  # both refer to this connection

    def _end_by_defect(self, exchange: Exchange | None, error: Exception) -> None:
        self.exchange = None
        try:
            self.close()
        finally:
            if exchange is not None:
                exchange.end(defect(error))

    def _receive(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:  # nothing was asked: the server ends the connection, or is out of step
            self.close()
            return
        now = exchange.active_s = self._now()
        self.has_received = True
        if now >= self._alarm.at_s:
            self._alarm.ring()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._is_complete:  # what follows the response is of no interest
                self.close()
            else:
                self.fail(_problem(error))
        if self._is_complete:
            self._complete()

    def _lose(self, error: Exception | None) -> None:
        self._pool.all.discard(self)
        exchange = self.exchange
        if exchange is None:
            return
        if self._is_until_close and error is None:
            self._complete()
        elif self._is_reused and not self.has_received:
            self.exchange = None
            self._pool.resend(self._content, exchange)
        else:
            how = f" ({error})" if error else ""
            self.fail(
                RequestFailed(
                    "closed_early",
                    f"the server closed the connection before its response was complete{how}",
                    may_retry=not self.has_received,
                )
            )

    def _complete(self) -> None:
        exchange, self.exchange = self.exchange, None
        if self._is_complete and self._can_stay and self.is_open:
            self._is_reused = True
            self._pool.idle.append(self)
        else:
            self.close()
        if exchange is not None:
            exchange.end(None)

    def fail(self, error: RequestFailed) -> None:
        """End the exchange with `error`, and the connection."""
        exchange, self.exchange = self.exchange, None
        self.close()
        if exchange is not None:
            exchange.end(error)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()
        self._pool.all.discard(self)

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise RequestFailed("malformed_http", "more data than the response")

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self.exchange is not None
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_bytes > MAX_HEADERS:
            raise RequestFailed("malformed_http", f"the headers have more than {memory_size(MAX_HEADERS)}")
        self.exchange.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        assert self.exchange is not None
        self.exchange.status = self._parser.get_status_code()
        headers = self.exchange.headers
        self._is_until_close = b"content-length" not in headers and b"transfer-encoding" not in headers

    def on_body(self, part: bytes) -> None:
        exchange = self.exchange
        assert exchange is not None
        if exchange.status == 200:
            exchange.on_part(part)
        elif len(exchange.body) < MAX_ERROR_BODY:
            exchange.body += part

    def on_message_complete(self) -> None:
        assert self.exchange is not None
        if 100 <= self.exchange.status < 200:  # an interim response, such as 103 Early Hints: the final one follows
            self.exchange.reset()
            self._is_until_close = False
        else:
            self._is_complete, self._can_stay = True, self._parser.should_keep_alive()


def _problem(error: Exception) -> RequestFailed:
    """Why a response cannot be read, by the parser's exception, which wraps one that was raised in what it calls."""
    cause = error.__context__
    if isinstance(cause, RequestFailed):
        return cause
    if isinstance(error, httptools.HttpParserCallbackError) and cause is not None:
        return defect(cause)
    return RequestFailed("malformed_http", f"the response is not valid HTTP ({error})")


def refusal(exchange: Exchange) -> RequestFailed:
    """What a response of another status than 200 says."""
    status, text = exchange.status, exchange.body.decode(errors="replace").strip()
    after, location = exchange.header("retry-after"), printable(exchange.header("location"))
    retry_after_s = float(after) if after.isascii() and after.isdigit() else None
    # The bytes of a compressed message say nothing.
    what = f"status {status}: {compression(exchange) or message_of(text) or 'no message'}"
    if 300 <= status < 400 and location:
        what = f"status {status}: redirects are not followed; the server redirects to {location}"
    return RequestFailed(f"http_{status}", what, status in REFUSED_FOR_NOW, retry_after_s)


def compression(exchange: Exchange) -> str:
    """What is to be said of a response that is compressed, which was not asked for; empty if it is not."""
    encoding = exchange.header("content-encoding")
    if encoding.lower() in ("", "identity"):
        return ""
    return (
        f"compressed ({printable(encoding)}), which was not asked for; turn compression off in the server or in "
        "the proxy before it"
    )


def message_of(text: str) -> str:
    """The message of an error in JSON, in the forms that servers use, else the beginning of the text; in characters
    that a terminal shows as they are."""
    try:
        found = json.loads(text)
        for key in ("error", "message", "detail"):
            if isinstance(found, dict) and key in found:
                found = found[key]
        shown = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    except (ValueError, RecursionError):  # no JSON, or too deep to be read
        shown = text
    return printable(shown[:300])


def printable(text: str) -> str:
    """`text` with control characters, and those that change the direction of writing, as escape sequences."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
