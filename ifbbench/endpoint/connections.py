"""The connections to an endpoint: opened when needed or ahead, kept open, and reused."""

import asyncio
import errno
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from ifbbench.clock import Clock
from ifbbench.endpoint.http import Connection, Exchange, RequestFailed, defect
from ifbbench.endpoint.loop import Alarm
from ifbbench.errors import InputError

# So often it is checked whether the server has been silent for too long.
TIMEOUT_CHECK_S = 0.25
# Connections that are opened at the same time before a run; servers keep a queue of at least 128 as a rule.
OPENED_AT_ONCE = 64


@dataclass(frozen=True)
class Address:
    """Where an endpoint is.

    prefix: what all paths begin with.
    """

    host: str
    port: int
    prefix: str
    is_secure: bool

    @classmethod
    def of(cls, url: str, name: str = "--endpoint") -> "Address":
        """The address of a URL; a /v1 at its end is left out. InputError if it is no URL of HTTP."""
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text)
            port = parts.port
            (parts.hostname or "").encode("idna")
        except ValueError as error:  # also UnicodeError
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


class _Get(Exchange):
    """Its response is awaited."""

    __slots__ = ("ended",)

    def __init__(self) -> None:
        super().__init__()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_end(self, failure: RequestFailed | None) -> None:
        if self.ended.done():  # nothing waits for it any more
            return
        if failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(failure)


class Connections:
    """The connections to one address, reused for later requests.

    headers: headers of every request.
    timeout_s: the longest time without a byte from the server, also to connect, unless connect_timeout_s is given.
    max_time_s: the longest time from sending a request to the end of its response.
    alarm: rings in time while data arrives.
    opened: number of connections that were made.
    resent: requests that were sent again because an idle connection was closed.
    all, idle: those that are open, and those of them that wait for a request.
    """

    def __init__(
        self,
        address: Address,
        headers: Mapping[str, str],
        timeout_s: float,
        max_time_s: float,
        clock: Clock,
        alarm: Alarm,
        *,
        connect_timeout_s: float | None = None,
    ) -> None:
        self.address = address
        self.clock, self.alarm = clock, alarm
        self.idle: list[Connection] = []
        self.opened = self.resent = 0
        self._timeout_s, self._max_time_s = timeout_s, max_time_s
        self._connect_timeout_s = connect_timeout_s or timeout_s
        self.all: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        # Where the first connection went, so that the name is looked up once.
        self._peer: tuple[str, int] | None = None
        self._tls = ssl.create_default_context() if address.is_secure else None
        self._headers = headers
        lines = {"Host": address.host_header, "Accept": "*/*", "User-Agent": "ifbbench", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._loop = asyncio.get_running_loop()
        self._check = self._loop.call_later(TIMEOUT_CHECK_S, self._check_timeouts)

    def to(self, address: Address) -> "Connections":
        """Connections to another address, with the same clock and alarm. Only the same host gets the key."""
        is_same = address.host == self.address.host and address.is_secure >= self.address.is_secure
        headers = self._headers if is_same else {}
        return Connections(address, headers, self._timeout_s, self._max_time_s, self.clock, self.alarm)

    def head(self, path: str) -> bytes:
        """What the request of a JSON body begins with; the length and the body follow."""
        return (
            f"POST {self.address.prefix}{path} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n"
            "Content-Length: "
        ).encode()

    def send(self, content: bytes, exchange: Exchange) -> None:
        """Write a request to an idle connection, or to a new one."""
        while self.idle:
            if (connection := self.idle.pop()).is_open:
                connection.send(exchange, content)
                return
        task = self._loop.create_task(self._send_on_new(content, exchange))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def get(self, path: str) -> Exchange:
        """A response of any status with its body. RequestFailed if there is none."""
        exchange = _Get()
        self.send(f"GET {self.address.prefix}{path} HTTP/1.1\r\n{self._head}\r\n".encode(), exchange)
        await exchange.ended
        return exchange

    async def open(self, number: int) -> None:
        """Have `number` idle connections, or as many as the server and the system allow."""
        missing = iter(range(len(self.all), number))

        async def some() -> None:
            for _ in missing:
                self.idle.append(await self._connect())

        await asyncio.gather(*(some() for _ in range(OPENED_AT_ONCE)), return_exceptions=True)

    def close(self) -> None:
        """Close all connections; requests that have not ended fail."""
        self._check.cancel()
        for task in self._opening:
            task.cancel()
        for connection in list(self.all):
            connection.fail(RequestFailed("interrupted", "the run ended before the response was complete"))

    def abandon(self, exchange: Exchange) -> None:
        """This response is not wanted any more: its connection is closed, so that the server can stop."""
        exchange.is_open = False
        for connection in list(self.all):
            if connection.exchange is exchange:
                connection.exchange = None
                connection.close()

    def resend(self, content: bytes, exchange: Exchange) -> None:
        """A request found its idle connection closed by the server."""
        self.resent += 1
        self.send(content, exchange)

    async def _send_on_new(self, content: bytes, exchange: Exchange) -> None:
        try:
            connection = await self._connect()
            if exchange.is_open:
                connection.send(exchange, content)
            else:  # it was abandoned meanwhile
                self.idle.append(connection)
        except RequestFailed as error:
            exchange.end(error)
        except Exception as error:  # nothing else would end the exchange
            exchange.end(defect(error))

    async def _connect(self) -> Connection:
        """A new connection. RequestFailed if there is none to be had."""
        host, port = self._peer or (self.address.host, self.address.port)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, made = await self._loop.create_connection(
                    lambda: Connection(self),
                    host,
                    port,
                    ssl=self._tls,
                    server_hostname=self.address.host if self._tls else None,
                )
        except TimeoutError:
            reason = f"no connection within {self._connect_timeout_s:g} s"
            raise RequestFailed("connect", reason, may_retry=True) from None
        except ssl.SSLError as error:
            raise RequestFailed("tls", f"no secure connection: {error.reason or error}") from None
        except OSError as error:
            remedy = "; raise the limit with ulimit -n" if error.errno == errno.EMFILE else ""
            reason = f"no connection: {error.strerror or error}{remedy}"
            raise RequestFailed("connect", reason, may_retry=True) from None
        self.opened += 1
        self.all.add(made)
        if made.transport is not None and self._peer is None:
            self._peer = made.transport.get_extra_info("peername")[:2]
        return made

    def _check_timeouts(self) -> None:
        self._check = self._loop.call_later(TIMEOUT_CHECK_S, self._check_timeouts)
        now_s = self.clock.now()
        for one in list(self.all):
            if one.exchange is None or one.exchange.sent_s is None:
                continue
            if one.exchange.active_s < now_s - self._timeout_s:
                one.fail(RequestFailed("timeout", f"nothing arrived for {self._timeout_s:g} s (--endpoint_timeout)"))
            elif one.exchange.sent_s < now_s - self._max_time_s:
                one.fail(
                    RequestFailed(
                        "too_long", f"the answer was not complete after {self._max_time_s:g} s (--endpoint_max_time)"
                    )
                )
