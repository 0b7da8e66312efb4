"""A defect in a callback of a connection: its request fails and is recorded, and the run goes on to its end."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httptools
import pytest

from ifbbench.endpoint import run as endpoint
from ifbbench.endpoint.answer import Answer as ClientAnswer
from ifbbench.endpoint.connections import Connections
from ifbbench.endpoint.http import Connection, Exchange
from ifbbench.endpoint.request import EndpointRequest
from ifbbench.errors import InputError
from ifbbench.replay.client import ReplayClient
from tests.endpoint.fake_endpoint import Received, Writer, fake_endpoint
from tests.endpoint.test_endpoint import closes_early, replay, rows, three_tokens


class Defect(Exception):
    """What no code expects."""


def raising_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int = 3) -> Callable[[], int]:
    """Make the `call`-th call of a method raise; returns what returns how often it was called."""
    original, calls = getattr(owner, name), [0]

    def wrapped(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise Defect("by a test")
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, wrapped)
    return lambda: calls[0]


async def ends_connections(_: Received, writer: Writer) -> None:
    """An answer that ends with its connection, without a length."""
    chunk = {"choices": [{"index": 0, "text": " a", "finish_reason": "length"}], "usage": {"completion_tokens": 3}}
    await writer.raw("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
    await writer.raw(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")
    writer.close()


async def keeps_none(request: Received, writer: Writer) -> None:
    """An answer after which the connection is closed without notice, so that it cannot be used again."""
    await three_tokens(request, writer)
    writer.close()


async def is_busy(_: Received, writer: Writer) -> None:
    await writer.json({"error": "busy"}, 429)


# Each callback of the event loop, of the parser and of a connection, and what is called in them.
CALLBACKS: list[tuple[Any, str, Any]] = [
    (Connection, "_receive", three_tokens),
    (Connection, "_lose", closes_early),
    (Connection, "_lose", ends_connections),
    (Connection, "_complete", three_tokens),
    (Connection, "_complete", ends_connections),
    (Connection, "fail", closes_early),
    (Connection, "on_message_begin", three_tokens),
    (Connection, "on_header", three_tokens),
    (Connection, "on_headers_complete", three_tokens),
    (Connection, "on_body", three_tokens),
    (Connection, "on_message_complete", three_tokens),
    (Connection, "send", three_tokens),
    (Connection, "close", closes_early),
    (Connections, "send", three_tokens),
    (Connections, "resend", keeps_none),
    (Connections, "_connect", keeps_none),
    (Exchange, "header", is_busy),
    (EndpointRequest, "on_part", three_tokens),
    (EndpointRequest, "_problem", three_tokens),
    (EndpointRequest, "_line", three_tokens),
    (ClientAnswer, "add", three_tokens),
    (ClientAnswer, "count", three_tokens),
    (httptools, "HttpResponseParser", three_tokens),
]


@pytest.mark.parametrize(("owner", "name", "answer"), CALLBACKS)
def test_a_defect_in_a_callback_fails_its_request(
    owner: Any, name: str, answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the request of it fails, or another, or none because nothing depends on it: all have ended, once, and the
    run does."""
    with fake_endpoint(answer) as server, monkeypatch.context() as patch:
        # After the request for the models and the warm-up.
        begun = endpoint._EndpointReplay._replay
        calls: list[Callable[[], int]] = []

        async def injected(run: Any) -> Any:
            calls.append(raising_once(patch, owner, name))
            return await begun(run)

        patch.setattr(endpoint._EndpointReplay, "_replay", injected)
        summary = replay(server, tmp_path, count=12, concurrency=2, endpoint_timeout=20)
    assert calls[0]() >= 3, "the exception was raised"
    lines = rows(tmp_path)
    assert len(lines) == len({line["index"] for line in lines}) == 12
    requests = summary["requests"]
    assert requests["completed"] + requests["failed"] == 12
    defects = [line for line in lines if line.get("kind") == "defect"]
    assert len(defects) <= 1
    for line in defects:
        assert "a defect of ifbbench: Defect: by a test in test_endpoint_defects.py" in line["error"]
    if name != "close":  # with which a request may have ended before
        assert len(defects) == 1, summary["endpoint"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (ReplayClient, "get_requests"),
        (ReplayClient, "send_response"),
        (endpoint._EndpointReplay, "_send"),
        (Exchange, "reset"),
    ],
)
def test_a_defect_beside_the_requests_ends_the_run(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raising_once(monkeypatch, owner, name)
    with fake_endpoint(three_tokens) as server, pytest.raises(Defect):
        replay(server, tmp_path, count=12, concurrency=2)
    assert (tmp_path / "run" / "summary.json").exists(), "what was done is kept"


def test_a_defect_in_a_callback_of_the_loop_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a callback that belongs to no request ends the run, which would wait for its effect for ever."""

    async def silent(_: Received, writer: Writer) -> None:
        while not writer.is_gone:
            await asyncio.sleep(0.02)

    monkeypatch.setattr(Connections, "_check_timeouts", lambda connections: SimpleNamespace().nothing)
    with fake_endpoint(silent) as server, pytest.raises(AttributeError, match="nothing"):
        replay(server, tmp_path, count=2, warm_up=0)


def test_a_connection_that_is_not_taken_in_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its callback belongs to no request yet."""
    raising_once(monkeypatch, Connection, "connection_made", 1)
    with fake_endpoint(three_tokens) as server, pytest.raises(Defect):
        replay(server, tmp_path)


def test_a_defect_in_the_warm_up_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raising_once(monkeypatch, EndpointRequest, "on_part", 1)
    with fake_endpoint(three_tokens) as server, pytest.raises(InputError, match=r"warm-up.*a defect of ifbbench"):
        replay(server, tmp_path, count=2, warm_up=1)
