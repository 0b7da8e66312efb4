"""A server for tests of the client: answers each request with what a function of the test writes."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

STREAM = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Received:
    """A request as the server got it. connection: its number."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    connection: int


class Writer:
    """Writes a response; `close` ends the connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.is_closed = False

    @property
    def is_gone(self) -> bool:
        """Whether the client has closed the connection."""
        return self._writer.is_closing()

    async def raw(self, content: bytes | str) -> None:
        self._writer.write(content.encode() if isinstance(content, str) else content)
        await self._writer.drain()

    async def json(self, content: Any, status: int = 200, headers: str = "") -> None:
        body = json.dumps(content)
        await self.raw(
            f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{headers}"
            f"Content-Length: {len(body.encode())}\r\n\r\n{body}"
        )

    async def part(self, content: bytes | str) -> None:
        """A part of a chunked body."""
        data = content.encode() if isinstance(content, str) else content
        await self.raw(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def event(self, content: Any) -> None:
        await self.part(f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n")

    async def end(self) -> None:
        await self.raw("0\r\n\r\n")

    def close(self) -> None:
        self.is_closed = True
        self._writer.close()


Answer = Callable[[Received, Writer], Awaitable[None]]


@dataclass
class FakeEndpoint:
    """The running server. answer: of a POST; gets: answers of GET by path, (status, content); asked: how often GET read
    each path; got: the headers of each GET."""

    answer: Answer
    gets: dict[str, tuple[int, Any]]
    host: str = "127.0.0.1"
    port: int = 0
    received: list[Received] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    got: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, stream: asyncio.StreamWriter) -> None:
        self.connections += 1
        number, writer = self.connections, Writer(stream)
        try:
            while not writer.is_closed and (first := await reader.readline()):
                method, path, _ = first.decode().split()
                headers = {}
                while line := (await reader.readline()).decode().strip():
                    name, _, value = line.partition(":")
                    headers[name.lower()] = value.strip()
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                if method == "GET":
                    self.asked[path] += 1
                    self.got.append(headers)
                    status, found = self.gets.get(path, (404, {"detail": "Not Found"}))
                    if isinstance(found, str):
                        await writer.raw(f"HTTP/1.1 {status} X\r\nContent-Length: {len(found)}\r\n\r\n{found}")
                    else:
                        await writer.json(found, status)
                    continue
                request = Received(path, headers, json.loads(content), number)
                self.received.append(request)
                await self.answer(request, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            stream.close()


@contextmanager
def fake_endpoint(
    answer: Answer, models: tuple[str, ...] = ("mock",), host: str = "127.0.0.1", **gets: tuple[int, Any]
) -> Iterator[FakeEndpoint]:
    """A FakeEndpoint in a thread of its own. gets: more answers of GET, with __ for / in their paths."""
    listed = {"/v1/models": (200, {"data": [{"id": name} for name in models]})}
    server = FakeEndpoint(answer, listed | {"/" + path.replace("__", "/"): found for path, found in gets.items()}, host)
    started = threading.Event()
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        listener = await asyncio.start_server(server.handle, host, 0, backlog=4096)
        server.port = listener.sockets[0].getsockname()[1]
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        started.set()
        await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield server
    finally:
        loop, stop = loops[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        # An answer that never yields to the loop would cost all later tests of this process half of their time.
        assert not thread.is_alive(), "the answers of a server end when it is stopped"


def token(text: str = " a", **fields: Any) -> dict[str, Any]:
    """A chunk of a completion."""
    choice = {"index": 0, "text": text, "finish_reason": None, "logprobs": None}
    return {"id": "x", "object": "text_completion", "choices": [choice | fields]}


def usage(completion: int, prompt: int = 7, **fields: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **fields}}
