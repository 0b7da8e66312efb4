"""Recordings of static batches, of two passes, and of overlap: every figure is computed by hand.

A batch takes a millisecond for each of its tokens.
"""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ifbbench.settings.modes import BatchingType
from tests.rundir.virtual_run import limits, lines, run, trace_of

INFLIGHT_TYPES = [BatchingType.INFLIGHT, BatchingType.INFLIGHT_FUSED]
STATIC = limits("guaranteed_no_evict", batching_type=BatchingType.V1)
OVERLAP = limits("guaranteed_no_evict", overlap="async")

# The first two make a batch of three steps: 16, 2 and 2 ms. The third comes while it runs.
STATIC_ROWS = [(0.0, 10, 3), (0.0, 6, 1), (0.005, 4, 2)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


def column(records: list[dict[str, Any]], name: str) -> list[Any]:
    return [record[name] for record in records]


# Static batches.


def test_members_of_a_static_batch_have_their_tokens_by_step_and_end_with_it(directory: Path) -> None:
    run(trace_of(STATIC_ROWS), STATIC, directory)
    requests = {request["index"]: request for request in lines(directory, "requests.jsonl")}
    first, second, third = (requests[index] for index in range(3))
    assert (first["ttft_s"], first["tpot_s"], first["e2e_s"]) == pytest.approx((0.016, 0.002, 0.020))
    assert (second["ttft_s"], second["e2e_s"]) == pytest.approx((0.016, 0.020))
    assert second["tpot_s"] is None
    # The third waits for the end of the batch, at 20 ms: 4 ms of context and 1 of generation.
    assert (third["queue_time_s"], third["ttft_s"], third["e2e_s"]) == pytest.approx((0.015, 0.019, 0.020))
    assert column([first, second, third], "output_len") == [3, 1, 2]


def test_waiting_for_the_batch_to_end_is_accounted_for(directory: Path) -> None:
    run(trace_of(STATIC_ROWS), STATIC, directory)
    spent = {request["index"]: request["attribution_s"] for request in lines(directory, "requests.jsonl")}
    nothing_before = {"waiting_iteration": 0.0}
    assert spent[0] == pytest.approx(nothing_before | {"context": 0.016, "generation": 0.004})
    assert spent[1] == pytest.approx(nothing_before | {"context": 0.016, "skipped": 0.004})
    assert spent[2] == pytest.approx(
        {"waiting_iteration": 0.011, "waiting_static_batch": 0.004, "context": 0.004, "generation": 0.001}
    )
    skipped = [span for span in lines(directory, "spans.jsonl") if span["phase"] == "skipped"]
    assert [(span["request_id"], span["first_iteration"], span["last_iteration"]) for span in skipped] == [(101, 1, 2)]


def test_statistics_and_padding_of_static_batches(directory: Path) -> None:
    summary = run(trace_of(STATIC_ROWS), STATIC, directory)
    batches, steps = lines(directory, "iterations.jsonl"), lines(directory, "steps.jsonl")
    assert column(steps, "Scheduled Requests") == [2, 2, 2, 1, 1]
    assert column(steps, "Context Requests") == [2, 0, 0, 1, 0]
    assert column(steps, "Total Context Tokens") == [16, 0, 0, 4, 0]
    assert column(steps, "Total Generation Tokens") == [2, 1, 1, 1, 1]
    assert column(steps, "Empty Generation Slots") == [0, 1, 1, 0, 0]
    assert "Generation Requests" not in steps[0]
    # A whole batch is one iteration of V1: its empty slots are requests x steps - tokens.
    assert column(batches, "Iteration Counter") == [0, 1]
    assert column(batches, "Scheduled Requests") == column(batches, "Context Requests") == [2, 1]
    assert column(batches, "Total Context Tokens") == [16, 4]
    assert column(batches, "Total Generation Tokens") == [4, 2]
    assert column(batches, "Empty Generation Slots") == [2 * 3 - 4, 0]
    own = column(batches, "ifbbench")
    assert [(one["first_step"], one["last_step"]) for one in own] == [(0, 2), (3, 4)]
    assert [one["latency_ms"] for one in own] == pytest.approx([20.0, 5.0])
    # Computed for nothing: 4 tokens to make the second prompt as long as the first, and 2 empty slots, of 29 in all.
    assert summary["padding_waste"] == pytest.approx(6 / 29)
    assert summary["requests"] == {"total": 3, "completed": 3, "failed": 0}


def test_in_flight_batching_wastes_nothing_on_padding(directory: Path) -> None:
    assert run(trace_of(STATIC_ROWS), limits("guaranteed_no_evict"), directory)["padding_waste"] == 0.0


def test_stopped_and_failed_members_of_a_static_batch_are_listed_as_such(directory: Path) -> None:
    rows = [(0.0, 10, 9), (0.0, 6, 1), (0.0, 6, 9), (0.0, 6, 9)]
    # Request 103 is stopped after the third iteration; the fifth fails for the two that still run.
    summary = run(trace_of(rows), STATIC, directory, stops={3: [103]}, fails_in={4})
    outcomes = {request["request_id"]: request["outcome"] for request in lines(directory, "requests.jsonl")}
    assert outcomes == {100: "failed", 101: "completed", 102: "failed", 103: "stopped"}
    assert summary["requests"] == {"total": 4, "completed": 1, "failed": 2}
    (completed,) = (request for request in lines(directory, "requests.jsonl") if request["outcome"] == "completed")
    assert completed["output_len"] == 1
    assert sum(completed["attribution_s"].values()) == pytest.approx(completed["e2e_s"])


# Two passes.


def test_both_passes_of_an_iteration_are_timed(directory: Path) -> None:
    config = limits("guaranteed_no_evict", batching_type=BatchingType.INFLIGHT)
    run(trace_of([(0.0, 10, 3), (0.005, 5, 2)]), config, directory)
    own = column(lines(directory, "iterations.jsonl"), "ifbbench")
    # The second iteration has a context of 5 tokens, and one generation step.
    assert own[1]["context_pass_ms"] == pytest.approx(5.0)
    assert own[1]["generation_pass_ms"] == pytest.approx(1.0)
    assert own[1]["device_ms"] == pytest.approx(6.0)
    for number in (0, 2):
        assert "context_pass_ms" not in own[number]
        assert "generation_pass_ms" not in own[number]


ROWS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.01, 0.2]), st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=10
).map(sorted)


@settings(max_examples=60)
@given(rows=ROWS, policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]), num_blocks=st.integers(16, 40))
def test_the_schedule_is_that_of_the_fused_type(rows: list[Any], policy: str, num_blocks: int) -> None:
    digests = []
    for batching_type in INFLIGHT_TYPES:
        with tempfile.TemporaryDirectory() as folder:
            config = limits(policy, num_blocks=num_blocks, batching_type=batching_type)
            digests.append(run(trace_of(rows), config, Path(folder) / "run")["schedule_digest"])
    assert digests[0] == digests[1]


# Overlap.


def test_with_overlap_times_are_those_of_the_collected_tokens(directory: Path) -> None:
    # 5 tokens are reserved and 2 produced: a third iteration, of 1 ms, is discarded.
    summary = run(trace_of([(0.0, 4, 2)]), OVERLAP, directory)
    (request,) = lines(directory, "requests.jsonl")
    assert (request["ttft_s"], request["tpot_s"], request["e2e_s"]) == pytest.approx((0.004, 0.001, 0.005))
    assert request["output_len"] == 2
    assert sum(request["attribution_s"].values()) == pytest.approx(0.005)
    iterations = lines(directory, "iterations.jsonl")
    assert column(iterations, "MicroBatch ID") == [0, 1, 0]
    assert column(iterations, "Generation Requests") == [0, 1, 1]
    assert summary["iterations"] == 3
    assert summary["output_tokens"] == 2
    own = column(iterations, "ifbbench")
    # Each begins before the one before has ended.
    ends = [entry["start_s"] + entry["latency_ms"] / 1000 for entry in own]
    assert all(entry["start_s"] < end for entry, end in zip(own[1:], ends, strict=False))
    spans = lines(directory, "spans.jsonl")
    assert [(span["phase"], span["first_iteration"], span["last_iteration"]) for span in spans] == [
        ("context", 0, 0),
        ("generation", 1, 1),
    ]


@settings(max_examples=80)
@given(
    rows=ROWS,
    policy=st.sampled_from(["guaranteed_no_evict", "max_utilization", "static_batch"]),
    batching_type=st.sampled_from(INFLIGHT_TYPES),
    chunk_unit=st.sampled_from([None, 4]),
    num_blocks=st.integers(16, 40),
    stops=st.dictionaries(st.integers(1, 40), st.lists(st.integers(100, 110), max_size=3), max_size=4),
    fails_in=st.sets(st.integers(0, 40), max_size=2),
)
def test_with_overlap_every_timeline_adds_up_with_stops_and_failures(
    rows: list[Any],
    policy: str,
    batching_type: BatchingType,
    chunk_unit: int | None,
    num_blocks: int,
    stops: dict[int, list[int]],
    fails_in: set[int],
) -> None:
    config = limits(policy, batching_type=batching_type, overlap="async", chunk_unit=chunk_unit, num_blocks=num_blocks)
    with tempfile.TemporaryDirectory() as folder:
        summary = run(trace_of(rows), config, Path(folder) / "run", stops=stops, fails_in=fails_in)
        requests = lines(Path(folder) / "run", "requests.jsonl")
        iterations = lines(Path(folder) / "run", "iterations.jsonl")
    assert column(iterations, "Iteration Counter") == list(range(len(iterations)))
    assert sorted(request["index"] for request in requests) == list(range(len(rows)))
    for request in requests:
        if request["outcome"] == "completed":
            assert request["output_len"] == rows[request["index"]][2]
            assert sum(request["attribution_s"].values()) == pytest.approx(request["e2e_s"], abs=1e-9)
        else:
            assert request["output_len"] <= rows[request["index"]][2]
    assert summary["partial"] is False


def test_a_paused_request_that_is_stopped_while_its_iteration_is_in_flight_is_recorded(directory: Path) -> None:
    config = limits("max_utilization", overlap="async", num_blocks=7)
    rows = [(0.0, 4, 17), (0.0, 4, 17)]
    # Blocks for 28 tokens: both have 12 cached after 9 iterations; for the 13th there is one block left.
    summary = run(trace_of(rows), config, directory, stops={10: [101]})
    outcomes = {request["request_id"]: request for request in lines(directory, "requests.jsonl")}
    assert summary["pauses"] == outcomes[101]["pauses"] == 1
    assert outcomes[101]["outcome"] == "stopped"
    assert outcomes[100]["outcome"] == "completed"


@pytest.mark.parametrize("overlap", [None, "partitioned", "async"])
def test_a_stopped_request_keeps_the_length_it_asked_for_though_it_was_paused(
    directory: Path, overlap: str | None
) -> None:
    config = limits("max_utilization", overlap=overlap, num_blocks=7)
    # Before it resumes. Two micro batches take twice as many iterations, and look a step further ahead.
    stop = 18 if overlap == "partitioned" else 12
    run(trace_of([(0.0, 4, 17), (0.0, 4, 17)]), config, directory, stops={stop: [101]})
    outcomes = {request["request_id"]: request for request in lines(directory, "requests.jsonl")}
    assert outcomes[101]["pauses"] == 1
    assert outcomes[101]["outcome"] == "stopped"
    assert outcomes[101]["max_new_tokens"] == 17 + 3


def test_a_failed_iteration_makes_no_token(directory: Path) -> None:
    # The context, then two steps; the third fails.
    run(trace_of([(0.0, 4, 9)]), limits("guaranteed_no_evict"), directory, fails_in={3})
    (request,) = lines(directory, "requests.jsonl")
    assert (request["outcome"], request["output_len"]) == ("failed", 3)
    assert sum(span["produced"] for span in lines(directory, "spans.jsonl") if "produced" in span) == 3
