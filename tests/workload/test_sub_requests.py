"""Sub-requests of an agent's turns: what is drawn, what a trace file holds, and when a replay sends what waits."""

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main as cli
from ifbbench.errors import InputError
from ifbbench.settings.config import RunConfig
from ifbbench.workload.arrival_processes import Poisson
from ifbbench.workload.distributions import ExponentialTime, Fixed, Geometric, Uniform
from ifbbench.workload.draw import draw_trace
from ifbbench.workload.formats import trace_lines
from ifbbench.workload.load import load_trace
from ifbbench.workload.spec import (
    CONVERSATION,
    FROM_ANSWER,
    Sessions,
    SharedPrefix,
    SubRequests,
    WorkloadSpec,
    parse_spec,
)

SUB_REQUESTS = SubRequests(Uniform(2, 4), Uniform(100, 900), Uniform(5, 60), share=0.5)
SESSIONS = Sessions(Geometric(4.0), ExponentialTime(2.0), FROM_ANSWER, SUB_REQUESTS)
SPEC = WorkloadSpec(
    "some",
    1_000,
    Uniform(50, 700),
    Uniform(5, 300),
    Poisson(0.5),
    shared_prefix=SharedPrefix(3, Fixed(700)),
    sessions=SESSIONS,
)


def drawn(spec=SPEC, count=None):
    """The requests by their ids."""
    return {request.request_id: request for request in draw_trace(spec, 5, "", count)}


def sub_requests(requests):
    """The sub-requests of each turn: those that come after it and that another request waits for, or would."""
    turns = {request.after: request for request in requests.values() if request.think_s > 0}
    found = defaultdict(list)
    for request in requests.values():
        if request.after is not None and request is not turns.get(request.after):
            found[request.after].append(request)
    return turns, found


@pytest.mark.parametrize("context", [None, CONVERSATION])
def test_a_turn_starts_several_requests_and_the_next_waits_for_all(context):
    spec = replace(SPEC, sessions=replace(SESSIONS, sub_requests=replace(SUB_REQUESTS, context=context)))
    requests = drawn(spec)
    assert sorted(requests) == list(range(1_000))
    turns, found = sub_requests(requests)
    complete = {parent: subs for parent, subs in found.items() if parent in turns}
    assert len(complete) > 50
    for parent, subs in complete.items():
        assert turns[parent].also_after == tuple(sorted(sub.request_id for sub in subs))
        assert 2 <= len(subs) <= 4
        for sub in subs:
            before = requests[parent]
            shared = 700 if context is None else before.prompt_len
            assert 100 <= sub.prompt_len - shared <= 900
            assert 5 <= sub.output_len <= 60
            assert sum(length for _, length in sub.prefix_runs()) == shared
            assert sub.prefix_runs() == before.prefix_runs()[: len(sub.prefix_runs())]
            assert (sub.arrival_s, sub.think_s, sub.also_after) == (before.arrival_s, 0.0, ())
    assert all(not turn.also_after for parent, turn in turns.items() if parent not in found)
    share = len(complete) / len(turns)
    assert share == pytest.approx(0.5, abs=0.1)


def test_turns_stay_the_same_and_a_longer_drawing_begins_with_a_shorter_one():
    without = drawn(replace(SPEC, sessions=replace(SESSIONS, sub_requests=None)))
    requests = drawn()
    _, found = sub_requests(requests)
    subs = {sub.request_id for several in found.values() for sub in several}
    kept = [requests[request_id] for request_id in sorted(requests) if request_id not in subs]
    same = [without[request_id] for request_id in range(len(kept))]
    assert [(one.prompt_len, one.output_len, one.think_s) for one in kept] == [
        (one.prompt_len, one.output_len, one.think_s) for one in same
    ]
    longer, shorter = drawn(), drawn(count=333)
    assert [longer[request_id] for request_id in range(333)] == [shorter[request_id] for request_id in range(333)]
    assert drawn(replace(SPEC, sessions=replace(SESSIONS, sub_requests=replace(SUB_REQUESTS, share=0.0)))) == without


def test_a_trace_file_holds_them(tmp_path):
    path = tmp_path / "trace.jsonl"
    trace = draw_trace(SPEC, 5, "", 200)
    path.write_text("".join(trace_lines(trace)))
    assert list(load_trace(path, RunConfig())) == list(trace)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"also_after": [0]}], r"also_after is given without after"),
        ([{"after": 0, "also_after": "1"}], r"also_after"),
        ([{"after": 0, "also_after": [1]}], r"requests 1, 1 wait for each other"),
        ([{"after": 0, "also_after": [2]}, {"after": 1}], r"requests .* wait for each other .*expected a first one"),
    ],
)
def test_bad_rows_are_refused(tmp_path, rows, message):
    path = tmp_path / "trace.jsonl"
    lengths = {"arrival_s": 0, "prompt_len": 4, "output_len": 2}
    path.write_text("".join(f"{json.dumps(lengths | row)}\n" for row in [{}, *rows]))
    result = CliRunner().invoke(cli, ["run", str(path), "--device", "null", "--output", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert re.search(message, result.output.replace("\n", " ")), result.output


def test_sub_requests_need_answers():
    lengths = {key: {"distribution": "fixed", "value": 3} for key in ("count", "prompt_len", "output_len")}
    sessions = {"turns": lengths["count"], "think_time": lengths["count"], "sub_requests": lengths}
    document = {"num_requests": 3, "prompt_len": lengths["count"], "output_len": lengths["count"]}
    with pytest.raises(InputError, match=r"expected sessions\.think_from answer"):
        parse_spec(document | {"sessions": sessions}, "mine")
    sessions |= {"think_from": "answer"}
    assert parse_spec(document | {"sessions": sessions}, "mine").sessions is not None
    with pytest.raises(
        InputError, match=r"sub_requests\.context is 'all'; expected one of system_prompt, conversation"
    ):
        parse_spec(document | {"sessions": sessions | {"sub_requests": lengths | {"context": "all"}}}, "mine")


@pytest.mark.parametrize(
    "fleet", [[], ["--replicas", "2", "--router", "session"], ["--replicas", "3", "--router", "least_requests"]]
)
def test_a_replay_sends_what_waits_after_the_last_answer(tmp_path: Path, fleet: list[str]):
    run = tmp_path / "run"
    device = ["--device", "sim:h100-sxm", "--model", "llama-3.1-8b", "--enable_kv_cache_reuse"]
    arguments = ["run", "sub-agents", "--max_num_samples", "60", *device, *fleet, "--output", str(run), "--quiet"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    requests = {request.request_id: request for request in load_trace("sub-agents", RunConfig(max_num_samples=60))}
    paths = sorted(run.glob("replica=*/requests.jsonl")) or [run / "requests.jsonl"]
    rows = {
        row["request_id"]: (number, row) for number, path in enumerate(paths) for row in map(json.loads, path.open())
    }
    assert sorted(rows) == sorted(requests)
    waiting = [request for request in requests.values() if request.also_after]
    assert len(waiting) > 2
    for request in requests.values():
        if request.after is None:
            continue
        others = [rows[other][1]["end_s"] for other in (request.after, *request.also_after)]
        assert rows[request.request_id][1]["arrival_s"] == pytest.approx(max(others) + request.think_s, abs=2e-6)
        if "session" in fleet:
            assert rows[request.request_id][0] == rows[request.after][0]
