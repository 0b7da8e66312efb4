"""HTTP/1.1 to an endpoint: connections that are kept open and reused.

Made for thousands of streams on one core: a connection parses what it receives in the callback of the event loop, and
no task or queue stands between the socket and the reader of a stream.
"""

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from ifbbench.clock import Clock
from ifbbench.errors import IfbbenchError, InputError

# So often it is checked whether the server has been silent for too long.
TIMEOUT_CHECK_S = 0.25
MAX_ERROR_BODY = 64 * 1024
REFUSED_FOR_NOW = (429, 502, 503, 504)


class RequestFailed(IfbbenchError):
    """A request without a complete answer. kind: a short name to count by, such as `timeout` or `http_429`.

    may_retry: whether another attempt may succeed. retry_after_s: when the server asks for it.
    """

    def __init__(
        self, kind: str, message: str, may_retry: bool = False, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind, self.may_retry, self.retry_after_s = kind, may_retry, retry_after_s


@dataclass(frozen=True)
class Address:
    """Where an endpoint is. prefix: what all paths begin with."""

    host: str
    port: int
    prefix: str
    is_secure: bool

    @classmethod
    def of(cls, url: str, name: str = "--endpoint") -> "Address":
        """That of a URL; a /v1 at its end is left out. InputError if it is no URL of HTTP."""
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise InputError(f"{name} {url}: is no URL ({error}); expected http://HOST:PORT.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise InputError(f"{name} {url}: expected http://HOST:PORT or https://HOST, without user and query.")
        is_secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_secure else 80), prefix, is_secure)

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_secure else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"http{'s' if self.is_secure else ''}://{self.host_header}{self.prefix}"


@dataclass(slots=True)
class Exchange:
    """A request and its response.

    on_part(bytes): takes the body of a response of status 200 as it arrives, and may raise RequestFailed. sent_s,
    active_s: on the clock, when the request was written, and when something last arrived. body: what `on_part` did not
    get. done: is set when the response is complete, or fails with RequestFailed.
    """

    on_part: Callable[[bytes], None] | None = None
    sent_s: float | None = None
    active_s: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    done: "asyncio.Future[None] | None" = None


class _Connection(asyncio.Protocol):
    """One connection: takes one exchange after another."""

    def __init__(self, pool: "Connections") -> None:
        self._pool = pool
        self._parser: Any = None
        self._is_until_close = False
        self.transport: asyncio.Transport | None = None
        self.exchange: Exchange | None = None
        self.num_exchanges = 0
        self.has_received = False

    def connection_made(self, transport: Any) -> None:  # that of uvloop is no subclass of asyncio.Transport
        self.transport = transport

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def send(self, exchange: Exchange, content: bytes) -> None:
        assert self.transport is not None
        self.exchange, self._parser = exchange, httptools.HttpResponseParser(self)
        self.num_exchanges += 1
        self.has_received = self._is_until_close = False
        exchange.sent_s = exchange.active_s = self._pool.clock.now()
        self.transport.write(content)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:  # nothing was asked: the server ends the connection, or is out of step
            self.close()
            return
        exchange.active_s = self._pool.clock.now()
        self.has_received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            # A RequestFailed of the reader is wrapped by the parser.
            cause = error.__context__
            problem = RequestFailed("malformed_http", f"the response is not valid HTTP ({error})")
            self.fail(cause if isinstance(cause, RequestFailed) else problem)

    def connection_lost(self, error: Exception | None) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        if self._is_until_close and error is None:
            self.exchange = None
            _finish(exchange, None)
            return
        if not self.has_received and self.num_exchanges > 1:
            self.fail(StaleConnection())
            return
        how = f" ({error})" if error else ""
        self.fail(RequestFailed("closed_early", f"the server closed the connection before its response was "
                                f"complete{how}", may_retry=not self.has_received))  # fmt: skip

    def fail(self, error: RequestFailed) -> None:
        """End the exchange with `error`, and the connection."""
        exchange, self.exchange = self.exchange, None
        self.close()
        if exchange is not None:
            _finish(exchange, error)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self.exchange is not None
        self.exchange.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self.exchange is not None
        self.exchange.status = self._parser.get_status_code()
        headers = self.exchange.headers
        self._is_until_close = "content-length" not in headers and "transfer-encoding" not in headers

    def on_body(self, part: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        if exchange.status == 200 and exchange.on_part is not None:
            exchange.on_part(part)
        elif len(exchange.body) < MAX_ERROR_BODY or exchange.on_part is None:
            exchange.body += part

    def on_message_complete(self) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return
        if self._parser.should_keep_alive() and self.is_open:
            self._pool.idle.append(self)
        else:
            self.close()
        _finish(exchange, None)


class StaleConnection(RequestFailed):
    """An idle connection that the server closed when it was used again: nothing of the request was answered."""

    def __init__(self) -> None:
        super().__init__("closed_early", "the server closed an idle connection", may_retry=True)


def _finish(exchange: Exchange, error: RequestFailed | None) -> None:
    assert exchange.done is not None
    if exchange.done.done():
        return
    if error is None:
        exchange.done.set_result(None)
    else:
        exchange.done.set_exception(error)


class Connections:
    """The connections to one address, reused for later requests.

    headers: of every request. timeout_s: the longest time without a byte from the server, also to connect. opened:
    number of connections that were made; resent: requests that were sent again because an idle connection was closed.
    """

    def __init__(self, address: Address, headers: Mapping[str, str], timeout_s: float, clock: Clock) -> None:
        self.address = address
        self.clock = clock
        self.idle: list[_Connection] = []
        self.opened = self.resent = 0
        self._timeout_s = timeout_s
        self._open: set[_Connection] = set()
        # Where the first connection went, so that the name is looked up once.
        self._peer: tuple[str, int] | None = None
        self._tls = ssl.create_default_context() if address.is_secure else None
        self._headers = headers
        lines = {"Host": address.host_header, "Accept": "*/*", "User-Agent": "ifbbench", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._loop = asyncio.get_running_loop()
        self._check = self._loop.call_later(TIMEOUT_CHECK_S, self._check_timeouts)

    def to(self, address: Address) -> "Connections":
        """Connections to another address, with the same key and clock."""
        return Connections(address, self._headers, self._timeout_s, self.clock)

    async def post(self, path: str, content: bytes, exchange: Exchange) -> None:
        """Send a JSON body; ends when the response is complete. RequestFailed if that fails, or for another status than
        200."""
        head = f"POST {self.address.prefix}{path} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n"
        await self._run(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content, exchange)
        if exchange.status != 200:
            raise refusal(exchange)

    async def get(self, path: str) -> Exchange:
        """A response of any status with its body. RequestFailed if there is none."""
        exchange = Exchange()
        await self._run(f"GET {self.address.prefix}{path} HTTP/1.1\r\n{self._head}\r\n".encode(), exchange)
        return exchange

    def close(self) -> None:
        """Close all connections; requests that have not ended fail."""
        self._check.cancel()
        for connection in list(self._open):
            connection.fail(RequestFailed("interrupted", "the run ended before the response was complete"))
        self._open.clear()
        self.idle.clear()

    async def _run(self, content: bytes, exchange: Exchange) -> None:
        while True:
            connection = await self._connection()
            exchange.done = self._loop.create_future()
            connection.send(exchange, content)
            try:
                await exchange.done
            except StaleConnection:
                self.resent += 1
                continue
            except asyncio.CancelledError:
                connection.close()
                raise
            finally:
                if not connection.is_open:
                    self._open.discard(connection)
            return

    async def _connection(self) -> _Connection:
        """An idle connection, or a new one. RequestFailed if there is none to be had."""
        while self.idle:
            if (connection := self.idle.pop()).is_open:
                return connection
            self._open.discard(connection)
        host, port = self._peer or (self.address.host, self.address.port)
        try:
            async with asyncio.timeout(self._timeout_s):
                _, made = await self._loop.create_connection(
                    lambda: _Connection(self), host, port, ssl=self._tls,
                    server_hostname=self.address.host if self._tls else None,
                )  # fmt: skip
        except TimeoutError:
            raise RequestFailed("connect", f"no connection within {self._timeout_s:g} s", may_retry=True) from None
        except (OSError, ssl.SSLError) as error:
            reason = error.strerror or str(error)
            raise RequestFailed("connect", f"no connection: {reason}", may_retry=True) from None
        self.opened += 1
        self._open.add(made)
        if made.transport is not None and self._peer is None:
            self._peer = made.transport.get_extra_info("peername")[:2]
        return made

    def _check_timeouts(self) -> None:
        latest_s = self.clock.now() - self._timeout_s
        late = [one for one in self._open if one.exchange is not None and one.exchange.active_s < latest_s]
        for one in late:
            one.fail(RequestFailed("timeout", f"nothing arrived for {self._timeout_s:g} s (--endpoint_timeout)"))
        self._check = self._loop.call_later(TIMEOUT_CHECK_S, self._check_timeouts)


def refusal(exchange: Exchange) -> RequestFailed:
    """What a response of another status than 200 says."""
    status, text = exchange.status, bytes(exchange.body).decode(errors="replace").strip()
    after = exchange.headers.get("retry-after", "")
    retry_after_s = float(after) if after.isascii() and after.isdigit() else None
    what = f"status {status}: {message_of(text) or 'no message'}"
    return RequestFailed(f"http_{status}", what, status in REFUSED_FOR_NOW, retry_after_s)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """That of uvloop, which is twice as fast, where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def allow_many_connections() -> None:
    """Raise the limit of open files, often 1,024, to what the process may have."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def message_of(text: str) -> str:
    """The message of an error in JSON, in the forms that servers use; else the beginning of the text."""
    try:
        found = json.loads(text)
    except ValueError:
        return text[:300]
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return (found if isinstance(found, str) else json.dumps(found, ensure_ascii=False))[:300]
