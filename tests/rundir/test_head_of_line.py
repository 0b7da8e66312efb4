"""Waiting is charged to the limit that held the head of the line; the parts of a wait add up to it."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ifbbench.replay.run import run_trace
from ifbbench.rundir.metrics import HeadOfLine, limit_waited_for
from ifbbench.rundir.reader import load_run
from ifbbench.settings.config import RunConfig
from ifbbench.workload.trace import Trace, TraceRequest
from tests.rundir.virtual_run import limits, lines, run, trace_of

LIMITS = ["batch_size", "num_tokens", "kv_blocks", "none", "a reason of its own"]
CHANGES = st.lists(st.tuples(st.floats(0.001, 1e4), st.sampled_from(LIMITS)), min_size=1, max_size=30)


@given(changes=CHANGES, begin=st.floats(0, 1), end=st.floats(0, 1))
def test_parts_are_those_of_a_walk_over_all_changes(changes, begin, end):
    head, now, at = HeadOfLine(), 0.0, []
    for lasts, limit in changes:
        if limit != head.limit:
            head.change(limit, now)
        at.append((now, limit))
        now += lasts
    begin_s, end_s = sorted((begin * now, end * now))
    expected: dict[str, float] = {}
    for (start_s, limit), (until_s, _) in pairwise([*at, (now, "")]):
        if (part_s := min(until_s, end_s) - max(start_s, begin_s)) > 0:
            expected[limit] = expected.get(limit, 0.0) + part_s
    parts = head.split(begin_s, end_s)
    assert sum(parts.values()) == pytest.approx(end_s - begin_s, abs=1e-9)
    for limit in LIMITS:
        assert parts.get(limit, 0.0) == pytest.approx(expected.get(limit, 0.0), abs=1e-9)


def test_the_limit_of_each_part_of_an_attribution():
    assert limit_waited_for("waiting_head_of_line_kv_blocks") == "kv_blocks"
    assert limit_waited_for("waiting_num_tokens") == "num_tokens"
    assert limit_waited_for("waiting_iteration") == "none"
    assert limit_waited_for("generation") is None


def test_those_behind_the_head_wait_for_its_limit(tmp_path: Path) -> None:
    """The first request holds all 24 blocks. The second is left out for lack of blocks; the third waits behind it, and
    the fourth too, though it is still in the queue: a larger batch would not help it."""
    config = limits("guaranteed_no_evict", max_batch_size=3)
    trace = trace_of([(0.0, 40, 17), (0.0, 40, 2), (0.0, 40, 2), (0.0, 40, 2), (0.0, 4, 2)])
    summary = run(trace, config, tmp_path / "run")
    waited = {row["index"]: row["attribution_s"] for row in lines(tmp_path / "run", "requests.jsonl")}
    assert waited[1]["waiting_kv_blocks"] > 0.05
    assert waited[2]["waiting_head_of_line_kv_blocks"] > 0.05
    assert waited[3]["waiting_head_of_line_kv_blocks"] > 0.05
    assert summary["waiting_by_limit"]["kv_blocks"] > 0.15
    total_s = sum(seconds for row in waited.values() for name, seconds in row.items() if name.startswith("waiting"))
    assert sum(summary["waiting_by_limit"].values()) == pytest.approx(total_s)


def test_shares_by_time_weigh_long_iterations_more(tmp_path: Path) -> None:
    """A prompt that uses up the budget takes 64 ms, a step of generation one."""
    config = limits(max_num_tokens=64, num_blocks=100, max_seq_len=128)
    summary = run(trace_of([(0.0, 60, 40), (0.0, 60, 40)]), config, tmp_path / "run")
    rows = [json.loads(line)["ifbbench"] for line in (tmp_path / "run" / "iterations.jsonl").read_text().splitlines()]
    bound = [row["latency_ms"] for row in rows if row["bound_by"] == "num_tokens"]
    assert summary["bound_by"]["num_tokens"] == pytest.approx(len(bound) / len(rows))
    assert summary["bound_by_time"]["num_tokens"] == pytest.approx(sum(bound) / sum(row["latency_ms"] for row in rows))
    assert summary["bound_by_time"]["num_tokens"] > 5 * summary["bound_by"]["num_tokens"]
    assert sum(summary["bound_by_time"].values()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("reason", "settings"),
    [("static_batch", {"policy": "static_batch"}), ("reuse_delay", {"enable_kv_cache_reuse": True})],
)
def test_an_iteration_is_bound_by_the_reason_of_its_first_request_left_out(
    reason: str, settings: dict[str, Any], tmp_path: Path
):
    rows = [TraceRequest(index, 0.0, 40, 9, 9, prefix_ids=(1,), prefix_lens=(32,)) for index in range(5)]
    config = RunConfig(
        device="null",
        time_scale=0,
        max_batch_size=8,
        max_num_tokens=64,
        tokens_per_block=4,
        output=str(tmp_path / "run"),
        **settings,
    )
    run_trace(Trace("equal", rows, "0" * 64, "test"), config)
    found = load_run(tmp_path / "run")
    reasons = found.iterations["first_left_out_reason"].fillna("none")
    assert reason in set(reasons)
    assert list(found.iterations["bound_by"]) == list(reasons)
    assert found.summary is not None
    shares = {name: share for name, share in found.summary["bound_by"].items() if share}
    assert shares == pytest.approx(reasons.value_counts(normalize=True).to_dict())
