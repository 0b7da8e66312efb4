"""A fleet behind one address, and a router in front of servers: what clients get, and what is recorded."""

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.endpoint.server import metrics_of
from ifbbench.errors import InputError
from ifbbench.fleet.router import ReplicaState
from ifbbench.replay.run import run_trace
from ifbbench.serving.routing.asked import read_asked
from ifbbench.serving.routing.backends import kv_tokens_of, state_of
from ifbbench.serving.routing.config import RouterConfig
from ifbbench.serving.sessions import Sessions, session_key
from ifbbench.settings.config import RunConfig
from tests.endpoint.fake_endpoint import STREAM, Received, Writer, fake_endpoint
from tests.endpoint.test_endpoint import three_tokens
from tests.report.test_schema import check
from tests.serving.clients import SMALL_POOL, ServerProcess, Stream, server_process, stream_completion

MODEL = ("--device", "sim:h100-sxm", "--model", "llama-3.1-8b", "--engine", "vllm")
TINY = ("--device", "cpu", "--model", "tiny", "--max_seq_len", "256", "--cpu_threads", "1", *SMALL_POOL)
PROMPTS = [[5 + number, 6, 7, 8 * number, 9] for number in range(6)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def post(
    server: ServerProcess, body: dict[str, Any], path: str = "completions", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"{server.url}/v1/{path}", json.dumps(body).encode(), headers or {})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def greedy(server: ServerProcess) -> list[list[int]]:
    """The tokens of all PROMPTS, asked at the same time."""
    fields = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    async def ask_all() -> list[tuple[int, dict[str, Any]]]:
        asked = (asyncio.to_thread(post, server, {"prompt": prompt, **fields}) for prompt in PROMPTS)
        return await asyncio.gather(*asked)

    answers = asyncio.run(ask_all())
    assert [status for status, _ in answers] == [200] * len(PROMPTS)
    return [answer["choices"][0]["token_ids"] for _, answer in answers]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServerProcess]]:
    """Two servers, which the last test of this file kills."""
    with server_process(*MODEL) as first, server_process(*MODEL) as second:
        yield [first, second]


@contextmanager
def routed(servers: Sequence[ServerProcess], *options: str) -> Iterator[ServerProcess]:
    """A router in front of servers."""
    addresses = [word for one in servers for word in ("--backend", one.url)]
    with server_process("--router_only", *addresses, *options) as router:
        yield router


async def streams(server: ServerProcess, number: int, **fields: Any) -> list[Stream]:
    usage = {"stream_options": {"include_usage": True}}
    bodies = [{"prompt": [one, *range(100, 300)], "max_tokens": 40, **usage, **fields} for one in range(number)]
    return await asyncio.gather(*(stream_completion(server.port, body) for body in bodies))


def test_a_fleet_on_one_address_is_recorded_and_replayed(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    options = ("--replicas", "3", "--router", "least_requests", "--record", str(recorded))
    with server_process(*MODEL, *options) as server:
        found = asyncio.run(streams(server, 9))
        left = asyncio.run(stream_completion(server.port, {"prompt": [1, 2], "max_tokens": 5000}, leave_after=2))
        text = get(f"{server.url}/metrics")[1]
        iterations = json.loads(get(f"{server.url}/iterations")[1])
        status, output = server.end(signal.SIGINT)
    assert status == 0, output
    assert [one.tokens for one in found] == [40] * 9
    assert len(left.chunk_s) == 2
    sent = {name: value for name, value in metrics_of(text.encode())["values"].items() if "router_requests" in name}
    assert sum(sent.values()) == 10
    assert {one["replica"] for one in iterations} == {0, 1, 2}
    check(recorded)
    ended = {one["request_id"]: one for one in lines(recorded / "requests.jsonl")}
    assert sorted(ended) == list(range(10))
    assert Counter(one["replica"] for one in ended.values()) == {0: 4, 1: 3, 2: 3}
    assert all(len(one["offers"]["requests"]) == 3 for one in ended.values())
    for number in range(3):
        of_replica = lines(recorded / f"replica={number}" / "requests.jsonl")
        assert sorted(one["index"] for one in of_replica) == list(range(len(of_replica)))
        assert {one["request_id"] for one in of_replica} == {
            one["request_id"] for one in ended.values() if one["replica"] == number
        }
    assert [one["request_id"] for one in lines(recorded / "trace.jsonl")] == list(range(10))
    runner = CliRunner()
    replayed = tmp_path / "replayed"
    for command in (
        ["run", str(recorded), "--config", str(recorded), "--output", str(replayed), "--quiet"],
        ["report", str(recorded)],
        ["why", str(recorded)],
    ):
        result = runner.invoke(main, command)
        assert result.exit_code == 0, result.output
    again = {one["request_id"]: one for one in lines(replayed / "requests.jsonl")}
    if not json.loads((recorded / "summary.json").read_text())["replay_differs"]["host_delays"]:
        # The last request comes when the others end, which may be a moment later in a replay.
        together = range(9)
        assert [(again[key]["replica"], again[key]["offers"]) for key in together] == [
            (ended[key]["replica"], ended[key]["offers"]) for key in together
        ]


def test_a_replay_routes_sessions_as_the_server_did(tmp_path: Path) -> None:
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    names = ["a", "b", "", "a", "c", "b", "a", "", "c"]
    device = ("--device", "sim:h100-sxm", "--model", "llama-3.1-8b")
    with server_process(*device, "--replicas", "2", "--router", "session", "--record", str(recorded)) as server:
        for name in names:
            headers = {"x-session-id": name} if name else {}
            body = {"model": "llama-3.1-8b", "prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True}
            assert post(server, body, headers=headers)[0] == 200
        status, output = server.end(signal.SIGINT)
    assert status == 0, output
    # The third and the eighth request are sessions of their own.
    sessions = [row.get("session_id") for row in lines(recorded / "trace.jsonl")]
    assert sessions == [0, 1, None, 0, 3, 1, 0, None, 3]
    expected = [0, 1, 0, 0, 1, 1, 0, 0, 1]
    again = ["run", str(recorded), "--config", str(recorded), "--output", str(replayed), "--quiet"]
    result = CliRunner().invoke(main, again)
    assert result.exit_code == 0, result.output
    for directory in (recorded, replayed):
        rows = sorted(lines(directory / "requests.jsonl"), key=lambda row: row["index"])
        assert [row["replica"] for row in rows] == expected
    check(replayed)


def test_a_router_records_sessions(servers: list[ServerProcess], tmp_path: Path) -> None:
    """A replay of its recording sends each request to the same replica."""
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    names = ["a", "b", "", "a", "c", "b", "a", "", "c"]
    with routed(servers, "--router", "session", "--record", str(recorded)) as router:
        for name in names:
            headers = {"x-session-id": name} if name else {}
            body = {"model": "llama-3.1-8b", "prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True}
            assert post(router, body, headers=headers)[0] == 200
        assert router.end()[0] == 0
    check(recorded)
    assert [row.get("session_id") for row in lines(recorded / "trace.jsonl")] == [0, 1, None, 0, 3, 1, 0, None, 3]
    again = ["run", str(recorded), *MODEL, "--replicas", "2", "--router", "session", "--output", str(replayed)]
    result = CliRunner().invoke(main, [*again, "--quiet"])
    assert result.exit_code == 0, result.output
    for directory in (recorded, replayed):
        rows = sorted(lines(directory / "requests.jsonl"), key=lambda row: row["index"])
        assert [row["replica"] for row in rows] == [0, 1, 0, 0, 1, 1, 0, 0, 1]


@pytest.mark.parametrize("failure", ["status 500", "status 503", "an error event"])
def test_a_router_tries_another_server(failure: str, tmp_path: Path) -> None:
    """Before the client has a token: also after an error with which a stream begins."""

    async def fail(_: Received, writer: Writer) -> None:
        if failure == "an error event":
            await writer.raw(STREAM)
            await writer.event({"error": {"message": "the engine is dead"}})
            await writer.event("[DONE]")
            await writer.end()
        else:
            await writer.json({"error": {"message": "the engine is dead"}}, int(failure.split()[1]))

    recorded = tmp_path / "recorded"
    with fake_endpoint(fail) as broken, fake_endpoint(three_tokens) as good:
        addresses = ("--backend", broken.url, "--backend", good.url)
        with server_process("--router_only", *addresses, "--record", str(recorded)) as router:
            assert _raw(router.url) == _raw(good.url)
            assert router.end()[0] == 0
        with server_process("--router_only", "--backend", broken.url) as router:
            status, answer = post(router, {"prompt": [1], "max_tokens": 3, "stream": True})
            assert status >= 500
            assert "the engine is dead" in answer["error"]["message"]
    (line,) = lines(recorded / "requests.jsonl")
    assert line["replica"] == 1
    assert line["retries"] == ["server_error" if failure == "an error event" else f"http_{failure.split()[1]}"]


def test_replicas_that_compute_give_the_tokens_of_one_engine(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    fleet = ("--replicas", "2", "--router", "round_robin", "--record", str(recorded))
    with server_process(*TINY) as one, server_process(*TINY, *fleet) as two:
        alone = greedy(one)
        assert greedy(two) == alone
        through = tmp_path / "routed"
        with routed([one, two], "--router", "round_robin", "--record", str(through)) as router:
            assert greedy(router) == alone
            one.process.kill()
            one.process.wait()
            assert greedy(router) == alone
            assert json.loads(get(f"{router.url}/health")[1])["status"] == "ok"
            assert router.end()[0] == 0
        assert two.end()[0] == 0
    check_router_recording(through, tmp_path / "again")
    replicas = Counter(line["replica"] for line in lines(recorded / "requests.jsonl"))
    assert sum(replicas.values()) == 15  # 6, half of 6, and 6
    assert abs(replicas[0] - replicas[1]) <= 1


def check_router_recording(recorded: Path, again: Path) -> None:
    """Twelve requests to two servers, of which the first was killed after six: they can be explained and replayed."""
    check(recorded)
    rows = sorted(lines(recorded / "requests.jsonl"), key=lambda row: row["index"])
    assert Counter(row["replica"] for row in rows[:6]) == {0: 3, 1: 3}
    assert {row["replica"] for row in rows[6:]} == {1}
    assert any(row["retries"] for row in rows[6:])
    assert sorted(tuple(row["prompt_tokens"]) for row in lines(recorded / "trace.jsonl")) == sorted(
        tuple(prompt) for prompt in PROMPTS * 2
    )
    replay = ["run", str(recorded), "--device", "null", "--replicas", "2", "--router", "round_robin", "--quiet"]
    for words in (["report", str(recorded)], ["why", str(recorded)], [*replay, "--output", str(again)]):
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
    replayed = lines(again / "requests.jsonl")
    assert [row["output_len"] for row in replayed] == [12] * 12
    assert Counter(row["replica"] for row in replayed) == {0: 6, 1: 6}


def replica_processes(server: ServerProcess) -> list[int]:
    """The processes of the replicas of a server, in order."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return [int(one) for one in children if b"replica_processes" in Path(f"/proc/{one}/cmdline").read_bytes()]


LONG = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 240, "ignore_eos": True, "temperature": 0}


def test_a_replica_that_is_killed_while_it_streams(tmp_path: Path) -> None:
    """Streams of the other replica go on, and its own end with an error that says why. Answers that are not streamed
    go to the other replica, and the killed one gets no more requests."""
    recorded = tmp_path / "recorded"
    options = ("--replicas", "2", "--router", "round_robin", "--max_seq_len", "3200", "--record", str(recorded))
    with server_process(*TINY, *options) as server:
        alone, whole = greedy(server), post(server, LONG | {"return_token_ids": True})[1]
        assert post(server, LONG)[1]["choices"][0]["text"] == whole["choices"][0]["text"]  # at the other replica
        streams, answer = asyncio.run(_streams_while_one_is_killed(server))
        errors = [stream.error for stream in streams]
        assert errors[0] == errors[2] == ""
        assert [stream.tokens for stream in streams] == [240, errors[1] and 0, 240, errors[3] and 0]
        assert all("the process of replica 1 was killed by SIGKILL" in error for error in (errors[1], errors[3]))
        assert answer["choices"] == whole["choices"]
        assert answer["usage"] == whole["usage"]
        assert greedy(server) == alone
        assert json.loads(get(f"{server.url}/health")[1])["status"] == "ok"
        assert "ifbbench_router_retries_total 1.0" in get(f"{server.url}/metrics")[1]
        status, said = server.end()
    assert "the process of replica 1 was killed by SIGKILL" in said
    assert "Traceback" not in said
    ended = lines(recorded / "requests.jsonl")
    assert [line["replica"] for line in ended[-6:]] == [0] * 6
    assert sum(line["outcome"] == "failed" for line in ended) == 2
    assert status == 1
    check_failure(recorded, retried=1, lost=2)


def check_failure(recorded: Path, retried: int, lost: int) -> None:
    """The record says what became of the requests of replica 1, and can be replayed."""
    check(recorded)
    summary, ended = json.loads((recorded / "summary.json").read_text()), lines(recorded / "requests.jsonl")
    (failure,) = summary["fleet"]["events"]
    assert (failure["event"], failure["replica"]) == ("fail", 1)
    assert (failure["retried"], failure["lost"]) == (retried, lost)
    again = [line for line in ended if "retries" in line]
    assert [line["retries"] for line in again] == [1] * retried
    assert sum(line["lost_tokens"] for line in again) <= failure["lost_tokens"]
    for line in again:
        assert line["replica"] == 0
        assert line["attribution_s"]["router"] > 0
        assert sum(line["attribution_s"].values()) == pytest.approx(line["e2e_s"])
    assert summary["requests"] == {"total": len(ended), "completed": len(ended) - lost, "failed": lost}
    trace = lines(recorded / "trace.jsonl")
    assert sorted(line["index"] for line in ended) == list(range(len(trace)))
    assert [row["arrival_s"] for row in trace] == sorted(row["arrival_s"] for row in trace)
    for line in ended:
        assert trace[line["index"]]["request_id"] == line["request_id"]
        assert trace[line["index"]]["arrival_s"] == line["arrival_s"]
    for words in (["report"], ["why"]):
        result = CliRunner().invoke(main, [*words, str(recorded)])
        assert result.exit_code == 0, result.output
    assert "Replica 1 failed at" in result.output
    fleet = RunConfig(device="null", model="tiny", replicas=2, output=str(recorded.with_name("replayed")))
    assert run_trace(recorded / "trace.jsonl", fleet).summary["requests"]["completed"] == len(ended)


def test_requests_without_a_token_go_to_another_replica(tmp_path: Path) -> None:
    """A replica is killed before it has computed anything: streams, requests in its queue, several choices."""
    recorded = tmp_path / "recorded"
    options = ("--replicas", "2", "--router", "round_robin", "--max_batch_size", "2", "--record", str(recorded))
    with server_process(*TINY, *options) as server:
        alone = greedy(server)
        asyncio.run(_ask_while_one_stands_still(server, alone))
        assert server.end()[0] == 1
    check_failure(recorded, retried=5, lost=0)


async def _ask_while_one_stands_still(server: ServerProcess, alone: list[list[int]]) -> None:
    """Requests go in turn; the process of replica 1 is stopped, and then killed."""
    process = replica_processes(server)[1]
    os.kill(process, signal.SIGSTOP)
    fields = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    bodies: list[dict[str, Any]] = [{"prompt": prompt, **fields} for prompt in PROMPTS for _ in range(2)][:6]
    bodies[3] |= {"n": 3, "temperature": 0}
    asked = []
    for number, body in enumerate(bodies):
        asked.append(asyncio.create_task(asyncio.to_thread(post, server, body)))
        while _sent(server) < len(PROMPTS) + number + 1:
            await asyncio.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    answers = await asyncio.gather(*asked)
    for number, (status, answer) in enumerate(answers):
        assert status == 200
        assert [one["token_ids"] for one in answer["choices"]] == [alone[number // 2]] * bodies[number].get("n", 1)


def _sent(server: ServerProcess) -> float:
    """How many HTTP requests the router of a server has sent to its replicas."""
    values: dict[str, float] = metrics_of(get(f"{server.url}/metrics")[1].encode())["values"]
    return sum(value for name, value in values.items() if "router_requests" in name)


async def _streams_while_one_is_killed(server: ServerProcess) -> tuple[list[Stream], dict[str, Any]]:
    """Four streams, two on each replica, those of replica 1 longer. Once all have begun, its process is stopped, gets a
    request that is not streamed, and is killed."""
    begun = [asyncio.Event() for _ in range(4)]
    body = LONG | {"stream_options": {"include_usage": True}}
    tasks = []
    for number, one in enumerate(begun):
        asked = body | ({"max_tokens": 3000} if number % 2 else {})
        tasks.append(asyncio.create_task(stream_completion(server.port, asked, begun=one)))
        await one.wait()
    process = replica_processes(server)[1]
    os.kill(process, signal.SIGSTOP)
    assert (await asyncio.to_thread(post, server, LONG | {"max_tokens": 1}))[0] == 200  # at replica 0
    sent = _sent(server)
    answered = asyncio.create_task(asyncio.to_thread(post, server, LONG | {"return_token_ids": True}))
    while _sent(server) == sent:
        await asyncio.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    streams = list(await asyncio.gather(*tasks))
    return streams, (await answered)[1]


def test_a_router_passes_on_what_a_server_answers(servers: list[ServerProcess], tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    chat = {"messages": [{"role": "system", "content": "x" * 1000}, {"role": "user", "content": "Hello"}]}
    with routed(servers, "--router", "prefix_affinity", "--record", str(recorded)) as router:
        assert json.loads(get(f"{router.url}/v1/models")[1])["data"][0]["id"] == "llama-3.1-8b"
        bad = {"prompt": "a", "no_such_field": 1}
        assert post(router, bad) == post(servers[0], bad)
        answers = [post(router, {**chat, "max_tokens": 4}, "chat/completions") for _ in range(3)]
        assert _raw(router.url).endswith(b"data: [DONE]\n\n")
        assert router.end()[0] == 0
    assert [status for status, _ in answers] == [200] * 3
    assert [answer["usage"]["completion_tokens"] for _, answer in answers] == [4] * 3
    check(recorded)
    ended = {one["request_id"]: one for one in lines(recorded / "requests.jsonl")}
    assert ended[0]["kind"] == "http_400"
    chats = [ended[number] for number in (1, 2, 3)]
    assert len({one["replica"] for one in chats}) == 1  # they share a prefix
    first, *later = (one["offers"]["hit_tokens"][one["replica"]] for one in chats)
    assert first == 0
    assert min(later) >= 192
    trace = lines(recorded / "trace.jsonl")
    assert trace[1]["prefix_ids"] == trace[2]["prefix_ids"]
    assert "Hello" not in (recorded / "trace.jsonl").read_text()
    fleet = RunConfig(
        device="sim:h100-sxm",
        model="llama-3.1-8b",
        engine="vllm",
        enable_chunked_context=True,
        replicas=2,
        router="prefix_affinity",
        output=str(tmp_path / "replayed"),
    )
    assert run_trace(recorded / "trace.jsonl", fleet).summary["requests"]["completed"] == 5


def _raw(url: str) -> bytes:
    """The body of a streamed answer."""
    body = {"prompt": [1, 2], "max_tokens": 3, "stream": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        content: bytes = response.read()
    return content


def test_a_stream_passes_byte_for_byte() -> None:
    with fake_endpoint(three_tokens) as backend, server_process("--router_only", "--backend", backend.url) as router:
        assert _raw(router.url) == _raw(backend.url) != b""


def test_the_state_of_a_server_is_read_from_its_metrics() -> None:
    vllm = b"""vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0
"""
    sglang = b"""sglang:num_running_reqs{model_name="a"} 4.0
sglang:num_queue_reqs{model_name="a"} 1.0
sglang:token_usage{model_name="a"} 0.5
sglang:max_total_num_tokens{model_name="a"} 9000.0
"""
    assert state_of(metrics_of(vllm)["values"]) == ReplicaState(2, 3, 0.25)
    assert state_of(metrics_of(sglang)["values"]) == ReplicaState(1, 4, 0.5)
    assert kv_tokens_of(metrics_of(vllm)["values"]) == 1600
    assert kv_tokens_of(metrics_of(sglang)["values"]) == 9000
    assert state_of({"up": 1.0}) is None
    assert kv_tokens_of({"up": 1.0}) == 0


def test_what_a_router_reads_of_a_request() -> None:
    ids = read_asked(json.dumps({"prompt": list(range(200)), "max_tokens": 7, "model": "m"}).encode(), {}, 3)
    assert (ids.prompt_len, ids.max_tokens, ids.model) == (200, 7, "m")
    assert [length for _, length in ids.pieces] == [64, 64, 64, 8]
    text = read_asked(json.dumps({"prompt": "a" * 1024}).encode(), {}, 0)
    longer = read_asked(json.dumps({"prompt": "a" * 1024 + "b" * 256}).encode(), {}, 1)
    assert text.prompt_len == 256
    assert longer.pieces[:4] == text.pieces
    other = read_asked(json.dumps({"prompt": "b" + "a" * 1023}).encode(), {}, 2)
    assert not set(other.pieces) & set(text.pieces)
    for broken in (b"{", b"[1]", b'{"prompt": {"a": 1}, "messages": 3, "max_tokens": "x"}'):
        assert read_asked(broken, {}, 0).prompt_len == 1


def test_sessions_are_named_or_begin_alike() -> None:
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    later = [*first, {"role": "assistant", "content": "a"}, {"role": "user", "content": "more"}]
    assert session_key({}, first) == session_key({}, later) != session_key({}, [first[0], later[3]])
    assert session_key({"x-session-id": "a"}, first) == session_key({"x-session-id": "a"}, later)
    sessions = Sessions(maximum=2)
    assert [sessions.number(key) for key in (b"a", b"b", b"a", None, b"c", b"a", b"b")] == [0, 1, 0, 2, 3, 0, 4]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--router_only"], "add --backend URL"),
        (["--backend", "http://x"], "add --router_only"),
        (["--router_only", "--backend", "ftp://x"], "--backend ftp://x"),
        (["--router_only", "--backend", "x:1", "--model", "tiny"], "--model: --router_only runs no engine"),
        (
            ["--router_only", "--backend", "x:1", "--default_max_tokens", "7"],
            "--default_max_tokens: with --router_only",
        ),
        (["--router_only", "--backend", "x:1", "--router", "nothing"], "--router"),
        (["--replicas", "2", "--request_retries", "3", *MODEL], "--request_retries: no replica of this server"),
        (["--replicas", "2", "--router_state_age", "3"], "--router_state_age"),
        (["--router_state_age", "3"], "--router_state_age: is for a fleet"),
        (["--replicas", "2", "--device", "cuda", "--model", "tiny"], "--replicas: device cuda"),
    ],
)
def test_bad_settings_are_refused(options: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["serve", *options, "--port", "0"])
    assert result.exit_code == 2
    assert said in result.output


def test_addresses_may_be_given_several_times() -> None:
    assert RouterConfig(router_only=True, backend="a:1, b:2").addresses == ["a:1", "b:2"]
    many: Any = ["a:1", "b:2"]
    assert RouterConfig(router_only=True, backend=many).addresses == ["a:1", "b:2"]
    with pytest.raises(InputError, match="health_interval"):
        RouterConfig(health_interval=1.0)


def test_a_backend_that_is_killed_is_marked_and_its_requests_go_on(
    servers: list[ServerProcess], tmp_path: Path
) -> None:
    recorded = tmp_path / "recorded"
    options = ("--router", "least_requests", "--record", str(recorded), "--health_interval", "0.2")
    first, second = servers
    with routed(servers, *options) as router:

        async def run() -> tuple[list[Stream], list[Stream]]:
            begun = asyncio.Event()
            usage = {"stream_options": {"include_usage": True}}
            bodies = [{"prompt": [number, 5, 6], "max_tokens": 400, **usage} for number in range(8)]
            before = [asyncio.create_task(stream_completion(router.port, one, begun=begun)) for one in bodies]
            await begun.wait()
            await asyncio.sleep(0.2)
            first.process.kill()
            return await asyncio.gather(*before), await streams(router, 6)

        before, after = asyncio.run(run())
        assert [one.tokens for one in after] == [40] * 6
        broken = [one for one in before if one.error]
        assert broken
        assert all("backend failed" in one.error for one in broken)
        assert all(one.tokens == 400 for one in before if not one.error)
        second.process.kill()
        second.process.wait()
        status, answer = post(router, {"prompt": [1], "max_tokens": 2})
        assert status in (502, 503)
        assert "backend" in answer["error"]["message"]
        assert post(router, {"prompt": [1], "max_tokens": 2})[0] == 503
        assert get(f"{router.url}/health")[0] == 503
        assert router.end(signal.SIGINT)[0] == 0
    check(recorded)
    summary = json.loads((recorded / "summary.json").read_text())
    assert summary["requests"]["failed"] == len(broken) + 2
    assert [one["is_up"] for one in summary["endpoint"]["backends"]] == [False, False]
    ended = lines(recorded / "requests.jsonl")
    assert {one["replica"] for one in ended[-8:-2]} == {1}
    result = CliRunner().invoke(main, ["report", str(recorded)])
    assert "2 backends behind least_requests" in result.output
