"""Servers and networks that misbehave: each failure has a kind, none is silent, and the client stays quick."""

import asyncio
import gc
import json
import os
import random
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.clock import WallClock
from ifbbench.endpoint import http as endpoint_http
from ifbbench.endpoint import request as endpoint_request
from ifbbench.endpoint import run as endpoint
from ifbbench.endpoint.loop import Alarm, new_event_loop, undisturbed
from ifbbench.endpoint.request import EndpointRequest
from ifbbench.errors import InputError
from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig
from tests.endpoint.fake_endpoint import STREAM, Answer, Received, Writer, fake_endpoint, token
from tests.endpoint.test_endpoint import ROOT, closes_early, replay, rows, stream_of, three_tokens, trace


def raw(text: str) -> Answer:
    return lambda _, writer: writer.raw(text)


@pytest.mark.parametrize("interim", ["HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"])
def test_an_interim_response_is_not_the_answer(interim: str, tmp_path: Path) -> None:
    events = "".join(f"data: {json.dumps(one)}\n\n" for one in (token(), token(), token()))
    body = f"{events}data: [DONE]\n\n"
    # In one packet, so that the time of its arrival is that of both responses.
    with fake_endpoint(raw(f"{interim}{STREAM}{len(body):x}\r\n{body}\r\n0\r\n\r\n")) as server:
        summary = replay(server, tmp_path, count=4, concurrency=1)
        assert server.connections == 1
    assert summary["requests"]["completed"] == 4
    assert all(line["first_token_s"] > line["sent_s"] for line in rows(tmp_path))


async def endless_tokens(_: Received, writer: Writer) -> None:
    """A token now and then, without end."""
    await writer.raw(STREAM)
    while not writer.is_gone:
        await writer.event(token())
        await asyncio.sleep(0.02)


async def endless_event(_: Received, writer: Writer) -> None:
    """Lines of data without the blank line that ends their event."""
    await writer.raw(STREAM)
    while not writer.is_gone:
        await writer.part(b"data: x\n" * 10_000)


async def endless_line(_: Received, writer: Writer) -> None:
    await writer.raw(STREAM)
    while not writer.is_gone:
        await writer.part(b"data: " + b"x" * 100_000)


async def endless_headers(_: Received, writer: Writer) -> None:
    await writer.raw("HTTP/1.1 200 OK\r\n")
    while not writer.is_gone:
        await writer.raw(f"X-{'y' * 1000}: z\r\n")


async def endless_interim(_: Received, writer: Writer) -> None:
    while not writer.is_gone:
        await writer.raw("HTTP/1.1 102 Processing\r\n\r\n")
        await asyncio.sleep(0.02)


async def endless_comments(_: Received, writer: Writer) -> None:
    """Signs of life, and never a token."""
    await writer.raw(STREAM)
    while not writer.is_gone:
        await writer.part(b": ping\n\n")
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (endless_tokens, "too_long"),
        (endless_event, "endless"),
        (endless_line, "endless"),
        (endless_headers, "malformed_http"),
        (endless_interim, "too_long"),
        (endless_comments, "too_long"),
    ],
)
def test_an_answer_without_end_ends(answer: Answer, kind: str, tmp_path: Path) -> None:
    with fake_endpoint(answer) as server:
        # What has a limit of its own reaches it first, also on a busy machine.
        summary = replay(server, tmp_path, count=3, endpoint_max_time=1.0 if kind == "too_long" else 300.0)
    assert summary["requests"] == {"total": 3, "completed": 0, "failed": 3}
    assert summary["endpoint"]["errors"] == {kind: 3}
    result = CliRunner().invoke(main, ["report", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output


def test_a_duration_limits_the_answers(tmp_path: Path) -> None:
    with fake_endpoint(endless_tokens) as server:
        summary = replay(server, tmp_path, count=3, duration=0.5, endpoint_timeout=2.0)
    assert summary["endpoint"]["errors"] == {"too_long": 3}
    assert "2 s" in rows(tmp_path)[0]["error"]


def test_a_list_of_models_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_http, "MAX_BODY", 10_000)
    with fake_endpoint(three_tokens) as server:
        server.gets["/v1/models"] = (200, "x" * 20_000)
        with pytest.raises(InputError, match="the response has more than"):
            replay(server, tmp_path)


def test_what_a_server_says_cannot_control_the_terminal(tmp_path: Path) -> None:
    async def answer(_: Received, writer: Writer) -> None:
        await writer.json({"error": {"message": "\x1b[31mred \u202eleft é"}}, status=500)

    with fake_endpoint(answer) as server:
        replay(server, tmp_path)
    assert rows(tmp_path)[0]["error"] == "status 500: \\x1b[31mred \\u202eleft é"


@pytest.mark.parametrize(
    "message",
    ["[" * 50_000, "[" * 50_000 + "]" * 50_000, '{"error":' * 9_000 + "1" + "}" * 9_000],
    ids=["no end", "lists", "objects"],
)
def test_json_of_any_depth_is_read(message: str, tmp_path: Path) -> None:
    """What raises in a callback of a connection would leave a request that never ends."""
    assert endpoint_http.message_of(message) == message[:300]

    async def answer(_: Received, writer: Writer) -> None:
        while server.asked["/metrics"] < 2:  # the first ones have been read
            await asyncio.sleep(0.01)
        await writer.raw(f"HTTP/1.1 400 X\r\nContent-Length: {len(message)}\r\n\r\n{message}")

    with fake_endpoint(answer, metrics=(200, message)) as server:
        summary = replay(server, tmp_path, poll_metrics=True)
        assert summary["endpoint"]["errors"] == {"http_400": 3}
        assert summary["endpoint"]["metrics_errors"] >= 1
        server.gets["/v1/models"] = (200, message)
        with pytest.raises(InputError, match="the server lists no model"):
            replay(server, tmp_path, overwrite=True)


@pytest.mark.parametrize("encoding", ["gzip", "br"])
def test_a_compressed_answer_gets_a_hint(encoding: str, tmp_path: Path) -> None:
    head = STREAM.replace("\r\n\r\n", f"\r\nContent-Encoding: {encoding}\r\n\r\n")
    with fake_endpoint(raw(f"{head}3\r\n\x1f\x0b\x08\r\n0\r\n\r\n")) as server:
        summary = replay(server, tmp_path)
    assert summary["endpoint"]["errors"] == {"compressed": 3}
    assert f"compressed ({encoding})" in rows(tmp_path)[0]["error"]


def test_a_compressed_error_gets_the_same_hint(tmp_path: Path) -> None:
    answer = raw("HTTP/1.1 503 X\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\n\x1f\x0b\x08")
    with fake_endpoint(answer) as server:
        summary = replay(server, tmp_path)
    assert summary["endpoint"]["errors"] == {"http_503": 3}
    assert "status 503: compressed (gzip)" in rows(tmp_path)[0]["error"]


@pytest.mark.parametrize("encoding", ["identity", "Identity"])
def test_the_encoding_identity_is_no_compression(encoding: str, tmp_path: Path) -> None:
    head = STREAM.replace("\r\n\r\n", f"\r\nContent-Encoding: {encoding}\r\n\r\n")
    body = f"data: {json.dumps(token())}\n\ndata: [DONE]\n\n"
    with fake_endpoint(raw(f"{head}{len(body):x}\r\n{body}\r\n0\r\n\r\n")) as server:
        assert replay(server, tmp_path)["requests"]["completed"] == 3


@pytest.mark.parametrize("model", ["a\nb", "a\x1b[31m", "a\u202eb"])
def test_a_model_with_control_characters_is_refused(model: str, tmp_path: Path) -> None:
    with fake_endpoint(three_tokens, models=(model, "mock")) as server:
        with pytest.raises(InputError, match=r"control character|expected a text"):
            replay(server, tmp_path, model=model)
        assert not server.asked
        replay(server, tmp_path)
        assert server.received[-1].body["model"] == "mock", "the server's own list is no better"


@pytest.mark.parametrize("key", ["a\nX-Other: b", "a\x00", "schlüssel", "a "])
def test_a_key_that_no_header_can_have_is_refused(key: str, tmp_path: Path) -> None:
    with fake_endpoint(three_tokens) as server:
        with pytest.raises(InputError, match=r"--endpoint_api_key(: the key has| is .* expected a text)"):
            replay(server, tmp_path, endpoint_api_key=key)
        assert not server.asked


def test_only_the_host_of_the_endpoint_gets_the_key(tmp_path: Path) -> None:
    elsewhere = fake_endpoint(three_tokens, host="127.0.0.2", metrics=(200, "a 1\n"))
    with fake_endpoint(three_tokens) as server, elsewhere as other:
        settings: dict[str, Any] = {"metrics_url": f"{other.url}/metrics", "poll_metrics": True}
        summary = replay(server, tmp_path, endpoint_api_key="secret", **settings)
        assert summary["endpoint"]["metrics_samples"] >= 1
        assert {one.headers["authorization"] for one in server.received} == {"Bearer secret"}
        assert other.got
        assert not any("authorization" in headers for headers in other.got)
    assert "secret" not in "".join(path.read_text() for path in (tmp_path / "run").iterdir())


def test_values_that_look_like_secrets_are_sent_and_not_recorded(tmp_path: Path) -> None:
    body = {"api_key": "hush1", "nested": [{"accessToken": "shown", "auth_token": "hush2"}], "max_tokens": 3}
    with fake_endpoint(three_tokens) as server:
        replay(server, tmp_path, extra_body=json.dumps(body))
        assert server.received[-1].body["api_key"] == "hush1"
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert json.loads(run["config"]["extra_body"]) == {
        "api_key": "(not recorded)",
        "nested": [{"accessToken": "(not recorded)", "auth_token": "(not recorded)"}],
        "max_tokens": 3,
    }
    assert "hush" not in "".join(path.read_text() for path in (tmp_path / "run").iterdir())


@pytest.mark.parametrize("depth", [100, 600, 50_000])
def test_an_extra_body_that_is_too_deep_is_refused(depth: int) -> None:
    def text(levels: int) -> str:
        return '{"a":' + "[" * (levels - 1) + "]" * (levels - 1) + "}"

    with pytest.raises(InputError, match=r"^--extra_body: (not valid JSON|the value has more than 100 levels)"):
        RunConfig(endpoint="http://x", extra_body=text(depth + 1))
    RunConfig(endpoint="http://x", extra_body=text(100))


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (raw("HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\nx"), "malformed_http", "not valid"),
        (
            raw("HTTP/1.1 307 X\r\nLocation: https://other/v1\r\nContent-Length: 0\r\n\r\n"),
            "http_307",
            "redirects to https://other/v1",
        ),
        (raw("HTTP/1.1 204 X\r\n\r\n"), "http_204", "no message"),
        (raw(STREAM + "zz\r\ndata: x\r\n"), "malformed_http", "not valid HTTP"),
        (
            raw("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 0\r\n\r\n"),
            "closed_early",
            "before the answer was complete",
        ),
        (
            raw("HTTP/1.1 429 X\r\nContent-Length: 0\r\nRetry-After: Wed, 21 Oct 2099 07:28:00 GMT\r\n\r\n"),
            "http_429",
            "no message",
        ),
    ],
)
def test_unusual_responses_have_a_kind(answer: Answer, kind: str, words: str, tmp_path: Path) -> None:
    with fake_endpoint(answer) as server:
        summary = replay(server, tmp_path)
    assert summary["endpoint"]["errors"] == {kind: 3}
    assert all(words in line["error"] for line in rows(tmp_path)), rows(tmp_path)[0]["error"]


@pytest.mark.parametrize(("header", "attempts"), [("", 9), ("Retry-After: 3600\r\n", 1)])
def test_no_pause_before_a_retry_is_longer_than_the_timeout(
    header: str, attempts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses_s: list[float] = []

    class Loop:
        """Notes pauses and does not make them."""

        def call_later(self, pause_s: float, begin: Callable[[], None]) -> None:
            pauses_s.append(pause_s)
            asyncio.get_running_loop().call_soon(begin)

    monkeypatch.setattr(endpoint_request, "asyncio", SimpleNamespace(get_running_loop=Loop))
    with fake_endpoint(raw(f"HTTP/1.1 503 X\r\nContent-Length: 0\r\n{header}\r\n")) as server:
        summary = replay(server, tmp_path, count=1, endpoint_retries=8, endpoint_timeout=20.0)
        assert len(server.received) == attempts
    assert summary["endpoint"]["errors"] == {"http_503": 1}
    assert len(pauses_s) == attempts - 1
    assert all(pause_s == min(pauses_s[0] * 2**place, 20.0) for place, pause_s in enumerate(pauses_s))


def test_data_after_a_response_does_not_harm_the_next_one(tmp_path: Path) -> None:
    body = f"data: {json.dumps(token())}\n\ndata: [DONE]\n\n"
    response = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    with fake_endpoint(raw(response + "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")) as server:
        summary = replay(server, tmp_path, count=8, concurrency=2)
    assert summary["requests"] == {"total": 8, "completed": 8, "failed": 0}


def test_garbage_of_any_kind_ends_every_request(tmp_path: Path) -> None:
    draw = random.Random(4)
    good = STREAM.encode() + b"".join(
        b"%x\r\n%b\r\n" % (len(part), part)
        for part in (f"data: {json.dumps(token(' a'))}\n\n".encode(), b"data: [DONE]\n\n", b"")
    )

    async def answer(_: Received, writer: Writer) -> None:
        content = bytearray(good)
        for _change in range(draw.randint(1, 6)):
            place = draw.randrange(len(content))
            content[place : place + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 4))
        with suppress(ConnectionError):
            await writer.raw(bytes(content))
        writer.close()

    with fake_endpoint(answer) as server:
        summary = replay(server, tmp_path, count=200, endpoint_timeout=5.0)
    done = summary["requests"]
    assert done["completed"] + done["failed"] == 200
    assert sum(summary["endpoint"]["errors"].values()) == done["failed"] > 50


def test_a_server_that_goes_away_is_refused_connections(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    models = b'{"data": [{"id": "m"}]}'

    def serve() -> None:
        connection, _ = listener.accept()
        connection.recv(10_000)
        listener.close()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(models), models))
        connection.close()

    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=serve)
    thread.start()
    config = RunConfig(endpoint=url, warm_up=0, endpoint_retries=1, output=str(tmp_path / "run"))
    summary = run_trace(trace(tmp_path), config).summary
    thread.join()
    assert summary["endpoint"]["errors"] == {"connect": 3}
    assert summary["endpoint"]["retries"] == {"connect": 3}
    assert "refused" in rows(tmp_path)[0]["error"]


@pytest.mark.usefixtures("without_layout")
def test_a_run_without_an_answer_can_be_read(tmp_path: Path) -> None:
    with fake_endpoint(raw("HTTP/1.1 500 X\r\nContent-Length: 4\r\n\r\noops")) as server:
        replay(server, tmp_path)
    run = str(tmp_path / "run")
    for words in (["plot", run, "--html"], ["export", run, "--format", "perfetto"], ["why", run], ["report", run]):
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output


def test_ipv6(tmp_path: Path) -> None:
    if not socket.has_ipv6:
        pytest.skip("this system has no IPv6")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this system has no loopback of IPv6")
    with fake_endpoint(three_tokens, host="::1") as server:
        assert server.url.startswith("http://[::1]:")
        assert replay(server, tmp_path)["requests"]["completed"] == 3
        assert server.received[0].headers["host"] == f"[::1]:{server.port}"


def test_tls_to_a_server_without_it_is_refused(tmp_path: Path) -> None:
    with fake_endpoint(three_tokens) as server, pytest.raises(InputError, match=r"no (secure )?connection"):
        run_trace(trace(tmp_path), RunConfig(endpoint=f"https://127.0.0.1:{server.port}", output=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_the_limit_of_open_files(tmp_path: Path, monkeypatch) -> None:
    """More requests at a time than files are refused; connections that meet the limit fail with the remedy."""
    with fake_endpoint(stream_of(token(), pause_s=0.5)) as server:
        with monkeypatch.context() as patch:
            patch.setattr(endpoint, "allow_many_connections", lambda: 40)
            with pytest.raises(InputError, match="ulimit -n"):
                replay(server, tmp_path, count=60, concurrency=30)
        command = [
            sys.executable,
            "-m",
            "ifbbench",
            "run",
            trace(tmp_path, 80, arrival_s=0.0),
            "--endpoint",
            server.url,
            "--warm_up",
            "0",
            "--output",
            str(tmp_path / "run"),
        ]
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48)),
            timeout=300,
        )
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    errors = [line["error"] for line in rows(tmp_path) if line["error"]]
    assert errors
    assert all("ulimit -n" in error for error in errors)
    assert "Errors by kind: connect" in result.stdout


@pytest.mark.slow
def test_five_thousand_connections_at_a_time(tmp_path: Path) -> None:
    with fake_endpoint(stream_of(token(), token(), pause_s=3.0)) as server:
        summary = replay(server, tmp_path, count=5000, concurrency=5000, time_scale=0.0)
    assert summary["requests"] == {"total": 5000, "completed": 5000, "failed": 0}
    assert summary["endpoint"]["connections"] >= 5000


@pytest.mark.parametrize("answer", [three_tokens, closes_early, stream_of(token(), "{not json")])
def test_requests_that_have_ended_need_no_garbage_collection(answer: Answer, tmp_path: Path, monkeypatch) -> None:
    left: list[int] = []

    class Counting(undisturbed().__class__):  # type: ignore[misc]
        def __exit__(self, *error: Any) -> Any:
            left.append(sum(isinstance(one, EndpointRequest) for one in gc.get_objects()))
            return super().__exit__(*error)

    monkeypatch.setattr(endpoint, "undisturbed", lambda: Counting(undisturbed.__wrapped__, (), {}))  # type: ignore[attr-defined]
    with fake_endpoint(answer) as server:
        replay(server, tmp_path, count=30)
    assert left[0] <= 2


def test_an_alarm_rings_once_at_the_time_set_last(monkeypatch) -> None:
    async def ring(platform: str) -> tuple[list[float], float]:
        monkeypatch.setattr(sys, "platform", platform)
        clock = WallClock()
        rung: list[float] = []
        alarm = Alarm(asyncio.get_running_loop(), clock, lambda: rung.append(clock.now()))
        alarm.set(10.0)
        alarm.set(0.05)
        await asyncio.sleep(0.15)
        due_s = clock.now()
        alarm.set(due_s - 1)
        await asyncio.sleep(0.05)
        alarm.set(clock.now() + 0.01)
        alarm.set(inf)
        await asyncio.sleep(0.05)
        alarm.close()
        return rung, due_s

    for platform in sys.platform, "other":
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            (first_s, second_s), due_s = runner.run(ring(platform))
        assert first_s >= 0.05
        assert second_s >= due_s
