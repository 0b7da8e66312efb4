"""What `why` says agrees with a slow, separate replay of the same requests: what bound each iteration, who waited for
whom, and why each pause happened."""

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from ifbbench.analysis.explain import iteration_facts, request_life
from ifbbench.analysis.findings import Findings
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.analysis.waiting import HeadsOfLine
from ifbbench.rundir.metrics import limit_waited_for
from tests.analysis.runs import simulate, write_requests
from tests.analysis.slow_replay import Decision, SlowReplay

SEEDS = [*range(15), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(15, 200))]


def draw_run(seed: int, folder: Path) -> RecordedRun:
    """Random requests under random settings, most of which do not suffice for them."""
    draw = random.Random(seed)
    now_s, rows = 0.0, []
    has_priorities = draw.random() < 0.4
    for index in range(draw.randint(8, 40)):
        now_s += draw.choice([0.0, draw.expovariate(draw.choice([5.0, 60.0, 400.0]))])
        output = draw.randint(1, 60)
        row: dict[str, Any] = {
            "request_id": 3 * index + 2,
            "arrival_s": now_s,
            "prompt_len": draw.randint(1, 300),
            "max_new_tokens": output + draw.choice([0, draw.randint(0, 60)]),
            "output_len": output,
        }
        if has_priorities:
            row["priority"] = draw.choice([0.1, 0.5, 0.5, 0.9])
        rows.append(json.dumps(row))
    (folder / "trace.jsonl").write_text("\n".join(rows) + "\n")
    settings: dict[str, Any] = {
        "policy": draw.choice(["guaranteed_no_evict", "max_utilization", "max_utilization", "static_batch"]),
        "type": draw.choice(["inflight_fused", "inflight_fused", "inflight"]),
        "max_batch_size": draw.choice([2, 4, 8, 64]),
        "max_num_tokens": draw.choice([70, 128, 400, 4_096]),
        "enable_chunked_context": draw.random() < 0.7,
        "context_chunking_policy": draw.choice(["first_come_first_served", "equal_progress"]),
        "tokens_per_block": draw.choice([4, 16, 32]),
        "max_tokens_in_paged_kvcache": draw.choice([512, 800, 1_500, 20_000]),
        "time_scale": draw.choice([1.0, 1.0, 0.0]),
        "max_seq_len": 512,
    }
    if draw.random() < 0.1:
        settings |= {"type": "v1", "policy": "guaranteed_no_evict", "enable_chunked_context": False}
    if not settings["enable_chunked_context"]:
        settings["max_num_tokens"] = max(settings["max_num_tokens"], 400)
    return simulate(folder, "run", folder / "trace.jsonl", **settings)


def replayed(run: RecordedRun) -> list[Decision]:
    lines = [json.loads(line) for line in (run.data.path / "trace.jsonl").read_text().splitlines()]
    rows = [row for row in lines if run.row_of[row["request_id"]]["outcome"] == "completed"]
    for row in rows:
        row["arrival_s"] = run.row_of[row["request_id"]]["arrival_s"]
    replay = SlowReplay(rows, run.config, run.data.run["num_kv_blocks"])
    decisions = list(replay.decisions(run.iterations.start_s.tolist()))
    assert not replay.queue
    assert not replay.active
    return decisions


@pytest.fixture(scope="module", params=SEEDS)
def run(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[RecordedRun, list[Decision]]:
    recorded = draw_run(request.param, tmp_path_factory.mktemp("runs"))
    return recorded, replayed(recorded)


def test_iterations(run: tuple[RecordedRun, list[Decision]]) -> None:
    recorded, decisions = run
    for number, decision in enumerate(decisions):
        facts = iteration_facts(recorded, number)
        assert dict(facts.contexts + facts.recomputes) == decision.chunks, number
        assert sorted(facts.generating) == sorted(decision.generating), number
        assert facts.left_out == decision.left_out, number
        assert facts.bound_by == ("none" if decision.left_out is None else decision.left_out[1]), number
        assert facts.paused == [(victim, other) for victim, other, *_ in decision.paused], number
        assert facts.used["kv_blocks"] == decision.blocks_used, number


def test_pauses(run: tuple[RecordedRun, list[Decision]]) -> None:
    recorded, decisions = run
    expected = [(number, *pause) for number, decision in enumerate(decisions) for pause in decision.paused]
    entries = Findings(recorded).ledger.entries
    found = [(one.iteration, one.victim, one.beneficiary, one.limit, one.blocks_freed) for one in entries]
    if recorded.iterations.active.max() <= recorded.config["max_batch_size"]:
        assert found == expected
    else:  # requests of higher priority made room by the batch size; the limit of only one pause is recorded
        assert [(*one[:3], one[4]) for one in found] == [(*one[:3], one[4]) for one in expected]
    again: dict[int | str, int] = {}
    for decision in decisions:
        for request_id, tokens in decision.again.items():
            again[request_id] = again.get(request_id, 0) + tokens
    for entry in entries:
        again[entry.victim] -= entry.tokens_recomputed
    assert not any(again.values())


def test_who_waits_for_what_and_behind_whom(run: tuple[RecordedRun, list[Decision]]) -> None:
    recorded, decisions = run
    if recorded.iterations.active.max() > recorded.config["max_batch_size"]:
        pytest.skip("spans do not tell a request in the queue from an active one that a full batch left out")
    heads = Findings(recorded).heads
    found: list[dict[Any, Any]] = [{} for _ in decisions]
    for request_id in recorded.row_of:
        for stretch in request_life(recorded, heads, request_id).stretches:
            if stretch.phase == "waiting":
                for number in range(stretch.first, stretch.last + 1):
                    found[number][request_id] = (stretch.limit, stretch.behind)
    for number, decision in enumerate(decisions):
        # Of several paused requests, spans do not tell which one did not fit and which one the token budget left out.
        paused = {
            one
            for one, spans in recorded.spans.items()
            if any(span.phase == "paused" and span.first <= number <= span.last for span in spans)
        }
        expected = (decision.waiting, decision.waiting_or)
        assert named(found[number], paused) in [named(one, paused) for one in expected], number


def named(waiting: dict[Any, Any], paused: set[Any]) -> dict[Any, Any]:
    """`waiting` with one name for all paused requests, where there are several."""
    if len(paused) < 2:
        return waiting
    return {one: (limit, "paused" if behind in paused else behind) for one, (limit, behind) in waiting.items()}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("seed", range(3))
def test_a_queue_with_a_named_head_waits_for_what_held_it_at_each_time(engine: str, seed: int, tmp_path: Path) -> None:
    """The record of each request and `why` agree with the limits that iterations name, in runs with two of them."""
    trace = write_requests(tmp_path / "trace.jsonl", seed, count=150, rate=60.0)
    run = simulate(tmp_path, "run", trace, engine=engine, max_batch_size=9)
    in_requests = json.loads((tmp_path / "run/summary.json").read_text())["waiting_by_limit"]
    in_why = Findings(run).all_waiting_s
    assert min(in_why["batch_size"], in_why["kv_blocks"]) > 10
    assert {limit: seconds for limit, seconds in in_requests.items() if seconds} == pytest.approx(in_why)


@pytest.mark.parametrize("rate", [5.0, 60.0])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_each_request_waits_for_the_same_in_its_row_and_in_why(engine: str, rate: float, tmp_path: Path) -> None:
    """Also one that nothing held, because it came while an iteration was decided: it waits for the next one."""
    trace = write_requests(tmp_path / "trace.jsonl", 4, count=60, rate=rate)
    run = simulate(tmp_path, "run", trace, engine=engine, max_batch_size=9)
    heads, found = HeadsOfLine(run), set[str]()
    for request_id, row in run.row_of.items():
        in_row, in_why = defaultdict[str, float](float), defaultdict[str, float](float)
        for part, seconds in row["attribution_s"].items():
            if (limit := limit_waited_for(part)) is not None:
                in_row[limit] += seconds
        for stretch in request_life(run, heads, request_id).stretches:
            if stretch.phase in ("arrival", "waiting"):
                in_why[stretch.limit or "none"] += stretch.duration_s
        assert dict(in_why) == pytest.approx({limit: spent for limit, spent in in_row.items() if spent}, abs=1e-9)
        found |= in_why.keys()
    assert found >= ({"none"} if rate < 10 else {"none", "kv_blocks"})


@pytest.mark.parametrize("engine", ["trtllm", "vllm", "sglang"])
def test_a_request_that_the_client_holds_back_is_not_in_the_queue(engine: str, tmp_path: Path) -> None:
    trace = write_requests(tmp_path / "trace.jsonl", 4, count=60, rate=60.0)
    run = simulate(tmp_path, "run", trace, engine=engine, max_batch_size=4, concurrency=6, request_rate=60)
    heads, held_s = HeadsOfLine(run), 0.0
    assert "concurrency" not in {head.limit for of_stretch in heads.stretches[1] for head in of_stretch}
    for request_id, row in run.row_of.items():
        spent_s = defaultdict[str, float](float)
        for stretch in request_life(run, heads, request_id).stretches:
            if stretch.phase == "waiting":
                spent_s[stretch.limit or "none"] += stretch.duration_s
        attributed_s = row["attribution_s"].get("waiting_concurrency", 0.0)
        assert spent_s["concurrency"] == pytest.approx(attributed_s, abs=1e-9)
        held_s += attributed_s
    assert held_s > 10


def test_a_head_that_enters_before_its_iteration_is_recorded_keeps_the_limit_that_held_it(tmp_path: Path) -> None:
    """With overlap, an iteration is recorded when the next one was decided, which lets the head of the queue run."""
    trace = tmp_path / "trace.jsonl"
    rows = [{"prompt_len": length, "output_len": 4, "arrival_s": 0.0} for length in (100, 20)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = simulate(tmp_path, "run", trace, engine="vllm", max_batch_size=9, max_num_tokens=64)
    waiting = [span for span in run.spans[1] if span.phase == "waiting"]
    assert [(span.first, span.last, span.waits_for) for span in waiting] == [(0, 0, "num_tokens")]
    assert "waiting_num_tokens" in run.row_of[1]["attribution_s"]
