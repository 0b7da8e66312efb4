"""The server's connections: uvicorn's, with limits on what clients may send, how long they may take, and how many."""

import asyncio
import logging
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ifbbench.serving.answers import encode, error_object
from ifbbench.serving.config import ServerConfig
from ifbbench.settings.fields import memory_size

# Limits of one request: the number of headers, and all bytes of them and of its address.
MAX_HEADERS = 200
MAX_HEADER_BYTES = 64 * 1024
# How long the client of a refused request may go on sending before its connection is closed.
LINGER_S = 1.0
# Answered however many connections are open, so that a full server does not look like a dead one.
ALWAYS_ANSWERED = ("/health", "/ping", "/metrics", "/load")
REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class LimitedConnection(HttpToolsProtocol):
    """One connection.

    limits: `max_clients` and `receive_timeout`.
    """

    def __init__(self, *arguments: Any, limits: ServerConfig, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self._every_app = self.app
        self._num_headers = self._num_header_bytes = 0
        self._receiving: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_headers = self._num_header_bytes = 0
        if self._receiving is None:
            self._wait_for_headers()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        is_full = len(self.connections) > self._limits.max_clients
        path = self.url.partition(b"?")[0].decode("latin-1")
        self.app = _refuse_for_now if is_full and path not in ALWAYS_ANSWERED else self._every_app
        super().on_headers_complete()
        transport: Any = _TransportOfResponse(self, self.cycle)
        self.cycle.transport = transport

    def send_400_response(self, msg: str) -> None:
        """The answer to what is no request, after which the connection is closed."""
        if self._num_headers > MAX_HEADERS or self._num_header_bytes > MAX_HEADER_BYTES:
            size = memory_size(MAX_HEADER_BYTES)
            self._refuse(431, f"a request has at most {MAX_HEADERS} headers, of {size} in all.")
        else:
            self._refuse(400, "the request is not valid HTTP.")

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_headers > MAX_HEADERS or self._num_header_bytes > MAX_HEADER_BYTES:
            raise ValueError("too many headers")  # the parser makes an HttpParserError of it

    def _wait_for_headers(self) -> None:
        self._receiving = self.loop.call_later(self._limits.receive_timeout, self._give_up)

    def _stop_waiting(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _give_up(self) -> None:
        """The headers have not arrived in time; or none have, and the connection is idle."""
        if self._num_header_bytes:
            self._refuse(408, f"the headers did not arrive within {self._limits.receive_timeout:g} s.")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        content = encode({"error": error_object(message, "invalid_request_error", status)})
        head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        self.linger()

    def linger(self) -> None:
        """Close the connection soon, and ignore what arrives until then: a connection that is closed with data unread
        is reset, and then its client may not get the answer."""
        self._is_refused = True
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


class _TransportOfResponse:
    """What uvicorn writes a response to, and closes after it: the connection's transport."""

    def __init__(self, connection: LimitedConnection, cycle: RequestResponseCycle) -> None:
        self._connection, self._cycle = connection, cycle
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        if self._cycle.more_body:
            self._connection.linger()
        else:
            self._connection.transport.close()


async def _refuse_for_now(scope: Any, _receive: Any, send: Any) -> None:
    """The application in the place of the server's own while too many connections are open."""
    content = encode({"error": error_object("too many connections are open (--max_clients).", "server_error", 503)})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
        (b"connection", b"close"),
        (b"retry-after", b"1"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": content})


class BoundedRate(logging.Filter):
    """Passes a few records of each message in each period, and says how many it has left out since the last one.

    now: seconds of a clock."""

    def __init__(self, now: Any, each: int = 5, period_s: float = 10.0) -> None:
        super().__init__()
        self._now, self._each, self._period_s = now, each, period_s
        self._begun_s = float("-inf")
        self._seen: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        name = str(record.msg)
        if self._now() - self._begun_s >= self._period_s:
            left_out = self._seen[name] - self._each
            self._seen.clear()
            self._begun_s = self._now()
            if left_out > 0:
                record.msg = f"{record.getMessage()} ({left_out} more like this before)"
                record.args = ()
        self._seen[name] += 1
        return self._seen[name] <= self._each
