"""What a run directory says agrees with itself and with what the engine did."""

import itertools
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rundir.virtual_run import OWN_REASON, limits, lines, run, trace_of

POLICIES = ("guaranteed_no_evict", "max_utilization", "static_batch")
ROWS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.01, 0.2, 5.0]), st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12
).map(sorted)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


def pressed_run(directory: Path) -> dict[str, Any]:
    """Four requests that together need more blocks than there are, and one in the queue."""
    return run(trace_of([(0.0, 10, 20), (0.0, 10, 20), (0.0, 10, 20), (0.0, 10, 20), (0.0, 6, 3)]), limits(), directory)


@settings(max_examples=60)
@given(
    rows=ROWS,
    policy=st.sampled_from(POLICIES),
    chunk_unit=st.sampled_from([None, 1, 4]),
    num_blocks=st.integers(16, 40),
    max_num_tokens=st.integers(44, 80),
)
def test_spans_tile_every_timeline(
    rows: list[Any], policy: str, chunk_unit: int | None, num_blocks: int, max_num_tokens: int
) -> None:
    config = limits(
        policy,
        chunk_unit=chunk_unit,
        num_blocks=num_blocks,
        max_num_tokens=max_num_tokens,
        max_input_len=min(63, max_num_tokens),
    )
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        summary = run(trace_of(rows), config, directory)
        requests, spans = lines(directory, "requests.jsonl"), lines(directory, "spans.jsonl")
        iterations = lines(directory, "iterations.jsonl")

    assert summary["requests"]["completed"] == len(rows)
    assert summary["partial"] is False
    for request in requests:
        own = sorted((s for s in spans if s["request_id"] == request["request_id"]), key=lambda s: s["first_iteration"])
        for before, after in itertools.pairwise(own):
            assert after["first_iteration"] == before["last_iteration"] + 1
        generated = sum(span["tokens"] for span in own if span["phase"] == "generation")
        prompts = sum(1 for span in own if span["phase"] in ("context", "recompute"))
        assert generated + 1 + request["pauses"] >= request["output_len"]
        assert prompts >= 1 + (request["pauses"] > 0)
        assert sum(request["attribution_s"].values()) == pytest.approx(request["e2e_s"], abs=1e-9)
        assert request["output_len"] == rows[request["index"]][2]
    _check_iterations_against_spans(iterations, spans)


def _check_iterations_against_spans(iterations: list[dict[str, Any]], spans: list[dict[str, Any]]) -> None:
    """Every count of every iteration follows from the spans."""
    phases = ("context", "generation", "waiting", "paused_now")
    counts: dict[str, Counter[int]] = {phase: Counter() for phase in phases}
    tokens: Counter[int] = Counter()
    for span in spans:
        first, last = span["first_iteration"], span["last_iteration"]
        if span["phase"] in ("context", "recompute"):
            for iteration, chunk in zip(range(first, last + 1), span["chunks"], strict=True):
                counts["context"][iteration] += 1
                tokens[iteration] += chunk
        elif span["phase"] == "generation":
            for iteration in range(first, last + 1):
                counts["generation"][iteration] += 1
        else:
            for iteration in range(first, last + 1):
                counts["waiting"][iteration] += 1
            if span["phase"] == "paused":
                counts["paused_now"][first] += 1
    for number, record in enumerate(iterations):
        assert record["Iteration Counter"] == number
        assert record["Context Requests"] == counts["context"][number]
        assert record["Generation Requests"] == counts["generation"][number]
        assert record["Total Context Tokens"] == tokens[number]
        assert record["Paused Requests"] == counts["paused_now"][number]
        assert record["ifbbench"]["waiting"] == counts["waiting"][number]
        assert record["ifbbench"]["queued"] <= record["ifbbench"]["waiting"]
        assert record["ifbbench"]["budget_used"] == tokens[number] + counts["generation"][number]
        assert record["Used KV cache blocks"] + record["Free KV cache blocks"] == record["Max KV cache blocks"]


def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        pressed_run(tmp_path / name)
    for file in ("iterations.jsonl", "spans.jsonl", "requests.jsonl", "summary.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_digest_knows_the_schedule_and_not_the_time(tmp_path: Path) -> None:
    rows = [(0.0, 10, 20)] * 4
    base = run(trace_of(rows), limits(), tmp_path / "base")["schedule_digest"]
    later = run(trace_of([(7.0, *row[1:]) for row in rows]), limits(), tmp_path / "later")["schedule_digest"]
    other = run(trace_of(rows), limits("guaranteed_no_evict"), tmp_path / "other")["schedule_digest"]
    assert base == later
    assert base != other


def test_a_pause_says_for_whom_and_what_it_cost(directory: Path) -> None:
    summary = pressed_run(directory)
    assert summary["pauses"] > 0
    assert summary["recomputed_tokens"] > 0
    requests = lines(directory, "requests.jsonl")
    paused = [span for span in lines(directory, "spans.jsonl") if span["phase"] == "paused"]
    assert sum(request["pauses"] for request in requests) == len(paused) == summary["pauses"]
    assert sum(request["recomputed_tokens"] for request in requests) == summary["recomputed_tokens"]
    # The last to arrive makes room for one before it.
    assert all(span["cause"] < span["request_id"] for span in paused)
    listed = [entry for record in lines(directory, "iterations.jsonl") for entry in record["ifbbench"]["paused"]]
    assert sorted((e["request_id"], e["for"]) for e in listed) == sorted((s["request_id"], s["cause"]) for s in paused)


def test_what_bound_an_iteration_names_the_first_left_out(directory: Path) -> None:
    pressed_run(directory)
    for record in lines(directory, "iterations.jsonl"):
        own = record["ifbbench"]
        assert (own["first_left_out"] is None) == (own["bound_by"] == "none")
        if record["Paused Requests"]:
            assert own["bound_by"] == "kv_blocks"


def test_latencies_follow_from_the_iterations(directory: Path) -> None:
    """Two requests of known lengths, alone: every time is computed by hand. A token takes a millisecond."""
    run(trace_of([(0.0, 10, 3), (0.5, 5, 1)]), limits(), directory)
    first, second = lines(directory, "requests.jsonl")
    assert first["queue_time_s"] == 0.0
    assert first["ttft_s"] == pytest.approx(0.010)
    assert first["tpot_s"] == pytest.approx(0.001)
    assert first["e2e_s"] == pytest.approx(0.012)
    assert second["ttft_s"] == second["e2e_s"] == pytest.approx(0.005)
    assert second["tpot_s"] is None


def test_summary_is_the_sum_of_the_requests(directory: Path) -> None:
    summary = pressed_run(directory)
    requests = lines(directory, "requests.jsonl")
    ttft = [request["ttft_s"] for request in requests]
    assert summary["ttft_s"]["p90"] == pytest.approx(np.percentile(ttft, 90))
    assert summary["ttft_s"]["max"] == max(ttft)
    assert summary["output_tokens"] == sum(request["output_len"] for request in requests)
    span = max(request["end_s"] for request in requests) - min(request["arrival_s"] for request in requests)
    assert summary["output_throughput_tokens_per_s"] == pytest.approx(summary["output_tokens"] / span)
    assert sum(summary["bound_by"].values()) == pytest.approx(1.0)


def test_reasons_of_a_user_policy_are_recorded_under_their_own_names(directory: Path) -> None:
    """The policy admits one request at a time, for a reason that needs escaping in JSON."""
    policy = "tests.rundir.virtual_run:OneAtATime"
    summary = run(trace_of([(0.0, 10, 3), (0.0, 5, 2)]), limits(policy), directory)
    assert summary["requests"]["completed"] == 2
    assert list(summary["bound_by"]) == ["batch_size", "num_tokens", "kv_blocks", "none", OWN_REASON]
    assert summary["bound_by"][OWN_REASON] == pytest.approx(3 / 5)
    assert sum(summary["bound_by"].values()) == pytest.approx(1.0)
    iterations = lines(directory, "iterations.jsonl")
    assert [record["ifbbench"]["bound_by"] for record in iterations] == [OWN_REASON] * 3 + ["none"] * 2
    assert iterations[0]["ifbbench"]["first_left_out"] == {"request_id": 101, "reason": OWN_REASON}
    causes = [span["cause"] for span in lines(directory, "spans.jsonl") if span["phase"] == "waiting"]
    assert causes == [OWN_REASON]
    second = lines(directory, "requests.jsonl")[1]["attribution_s"]
    assert second[f"waiting_{OWN_REASON}"] == pytest.approx(0.012)


def test_a_run_that_stops_early_is_marked_partial(directory: Path) -> None:
    summary = run(trace_of([(0.0, 10, 20)] * 3), limits(), directory, stop_after=5)
    assert summary["partial"] is True
    assert summary["requests"] == {"total": 3, "completed": 0, "failed": 0}
    assert set(summary["ttft_s"].values()) == {None}
    spans = lines(directory, "spans.jsonl")
    assert {span["last_iteration"] for span in spans if span["phase"] == "generation"} == {4}


def test_a_refused_request_is_listed_with_its_error(directory: Path) -> None:
    summary = run(trace_of([(0.0, 63, 1), (0.0, 200, 4), (0.0, 4, 2)]), limits("guaranteed_no_evict"), directory)
    assert summary["requests"] == {"total": 3, "completed": 2, "failed": 1}
    failed = [request for request in lines(directory, "requests.jsonl") if request["outcome"] == "failed"]
    assert [request["index"] for request in failed] == [1]
    assert "max_seq_len" in failed[0]["error"]
    assert failed[0]["ttft_s"] is None
