"""Limits of the server's connections: headers, time, idle clients, too many clients, and what is logged of them."""

import asyncio
import json
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from ifbbench.serving.connections import MAX_HEADER_BYTES, MAX_HEADERS, BoundedRate
from tests.serving.clients import ServerProcess, server_process
from tests.serving.test_reading import workers_of

MODEL = ["--device", "sim:h100-sxm", "--model", "llama-3.1-8b"]
GET = "GET /health HTTP/1.1\r\nHost: x\r\n"
POST = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process(*MODEL, "--receive_timeout", "2") as running:
        yield running


async def answer_to(port: int, content: str, is_ended: bool = True) -> bytes:
    """All that the server sends on a connection that `content` was written to, until it closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(content.encode())
        if is_ended:
            writer.write(b"\r\n")
        async with asyncio.timeout(300):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (GET + "X: y\r\n" * (MAX_HEADERS + 1), 431),
        (GET + "X: " + "y" * MAX_HEADER_BYTES + "\r\n", 431),
        (GET + "X" * MAX_HEADER_BYTES + ": y\r\n", 431),
        ("GET /" + "a" * MAX_HEADER_BYTES + " HTTP/1.1\r\n", 431),
        ("no HTTP at all\r\n", 400),
    ],
)
def test_what_is_no_request_is_refused_in_json(server: ServerProcess, content: str, status: int) -> None:
    found = asyncio.run(answer_to(server.port, content))
    assert found.startswith(f"HTTP/1.1 {status} ".encode())
    assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]["code"] == status


def test_slow_and_idle_connections_are_closed(server: ServerProcess) -> None:
    """Without --receive_timeout each of these would wait for ever."""

    async def several() -> tuple[bytes, bytes, bytes]:
        idle = answer_to(server.port, "", is_ended=False)
        headers = answer_to(server.port, GET, is_ended=False)
        body = answer_to(server.port, POST + 'Content-Length: 20\r\n\r\n{"pro', is_ended=False)
        return await asyncio.gather(idle, headers, body)

    idle, headers, body = asyncio.run(several())
    assert idle == b""
    assert headers.startswith(b"HTTP/1.1 408 ")
    assert body.startswith(b"HTTP/1.1 408 ")
    assert b"--receive_timeout" in body


def test_a_full_server_answers_whether_it_is_well() -> None:
    async def full(port: int) -> tuple[bytes, bytes]:
        others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        refused = await answer_to(port, "GET /v1/models HTTP/1.1\r\nConnection: close\r\nHost: x\r\n")
        well = await answer_to(port, GET + "Connection: close\r\n")
        for _, writer in others:
            writer.close()
        return refused, well

    # A server of its own, which closes no idle connection before the others are answered on a busy machine.
    with server_process(*MODEL, "--max_clients", "3") as server:
        refused, well = asyncio.run(full(server.port))
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"--max_clients" in refused
    assert well.startswith(b"HTTP/1.1 200 ")


def test_malformed_requests_are_logged_at_a_bounded_rate(server: ServerProcess) -> None:
    async def many() -> None:
        for _ in range(40):
            await answer_to(server.port, "nonsense\r\n")

    asyncio.run(many())
    status, printed = server.end()
    assert status == 0
    assert 1 <= printed.count("Invalid HTTP request") < 40


def test_records_that_were_left_out_are_counted() -> None:
    now = [0.0]
    bounded = BoundedRate(lambda: now[0], each=2, period_s=10.0)

    def logged(message: str) -> str | None:
        record = logging.LogRecord("x", logging.WARNING, "", 0, message, (), None)
        return record.getMessage() if bounded.filter(record) else None

    assert [logged("a") for _ in range(5)] == ["a", "a", None, None, None]
    assert logged("b") == "b"
    now[0] = 11.0
    assert logged("a") == "a (3 more like this before)"
    assert logged("a") == "a"


def test_bodies_that_are_not_read_when_the_drain_is_over_have_an_answer() -> None:
    """One does not arrive, and the process that reads the other one has stopped."""
    content = '{"prompt": "' + "a" * 300_000 + '"}'
    head = f"{POST}Connection: close\r\nContent-Length: {{}}\r\n\r\n"
    half, long = head.format(20) + '{"pro', head.format(len(content)) + content
    with server_process(*MODEL, "--drain_timeout", "0.5") as server:

        async def drained() -> list[bytes]:
            assert b" 400 " in await answer_to(server.port, long, is_ended=False)  # it starts the process
            (worker,) = workers_of(server.process.pid)
            os.kill(worker, signal.SIGSTOP)
            waiting = [asyncio.create_task(answer_to(server.port, sent, is_ended=False)) for sent in (half, long)]
            await asyncio.sleep(1.0)  # until both have been accepted, also on a busy machine
            server.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*waiting)

        found = asyncio.run(drained())
        rest, _ = server.process.communicate(timeout=300)
        assert not workers_of(server.process.pid)
    assert server.process.returncode == 0
    assert "Traceback" not in rest
    for answer in found:
        assert answer.startswith(b"HTTP/1.1 500 ")
        assert b"--drain_timeout" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].encode()


def test_every_request_has_an_answer_when_the_drain_is_over() -> None:
    """A stream gets an event with the error, another request a body with it, and one that waits, too."""
    options = ["--max_batch_size", "2", "--drain_timeout", "0.5"]
    with server_process(*MODEL, *options) as server:
        long = {"prompt": "a", "max_tokens": 100_000, "ignore_eos": True}

        async def drained() -> list[bytes]:
            def post(**fields: Any) -> Any:
                content = json.dumps(long | fields)
                head = f"{POST}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
                return asyncio.create_task(answer_to(server.port, head + content, is_ended=False))

            tasks = [post(stream=True), post(), post(stream=True), post()]
            while (load := await answer_to(server.port, GET.replace("health", "load") + "Connection: close\r\n")) and (
                not load.endswith(b'{"server_load":4}')
            ):
                await asyncio.sleep(0.02)
            server.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*tasks)

        found = asyncio.run(drained())
        rest, _ = server.process.communicate(timeout=300)
    assert server.process.returncode == 0
    assert "Traceback" not in rest
    for answer, is_stream in zip(found, (True, False, True, False), strict=True):
        assert b"--drain_timeout" in answer
        assert answer.startswith(b"HTTP/1.1 200 " if is_stream else b"HTTP/1.1 500 ")
        assert (b"data: [DONE]" in answer) == is_stream
