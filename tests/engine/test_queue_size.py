"""A maximum queue size: requests that find the queue full are refused, all others run as without it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ifbbench.engine.passes import NullExecutor
from ifbbench.engine.request import Request
from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig
from tests.engine.engine import Loop, assert_nothing_is_held, at_once, check_blocks, limits
from tests.library.client import Client
from tests.library.managers import check_nothing_leaked, manager_of, output_of, request_of

FULL = "the queue is full (max_queue_size {}); send the request again later"


def errors_of(size: int | None, arrivals: list[tuple[int, Request]], **changes: Any) -> list[str | None]:
    config = limits(max_queue_size=size, max_batch_size=2, **changes)
    result = Loop(config, arrivals, NullExecutor()).run(check_blocks, max_steps=1_000)
    assert_nothing_is_held(result.manager)
    return [result.final(request).error for _, request in arrivals]


@pytest.mark.parametrize("size", [0, 1, 3, 5])
def test_those_that_find_the_queue_full_are_refused(size):
    errors = errors_of(size, at_once(*(Request(index, 4, 4) for index in range(7))))
    served = min(7, 2 + size)
    assert errors == [None] * served + [FULL.format(size)] * (7 - served)


def test_of_requests_that_arrive_together_the_lowest_priority_is_refused():
    requests = [Request(index, 4, 4, priority=index / 10) for index in range(6)]
    assert errors_of(1, at_once(*requests)) == [FULL.format(1)] * 3 + [None] * 3


def test_a_request_that_waits_keeps_its_place():
    """Also if those that arrive later have a higher priority."""
    early = [Request(index, 4, 9, priority=0.5) for index in range(3)]
    late = [Request(3 + index, 4, 4, priority=0.9) for index in range(20)]
    errors = errors_of(1, [*at_once(*early), *((2, request) for request in late)])
    assert errors[:3] == [None] * 3
    assert FULL.format(1) in errors[3:]


def test_a_request_that_is_refused_for_another_reason_takes_no_place():
    requests = [Request(0, 4, 4), Request(1, 4, 4), Request(2, 500, 4), Request(3, 4, 4), Request(4, 4, 4)]
    errors = errors_of(1, at_once(*requests))
    assert errors[:2] == [None, None]
    assert "max_seq_len" in (errors[2] or "")
    assert errors[3:] == [None, FULL.format(1)]


@settings(max_examples=60)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=20),
    size=st.integers(0, 4),
)
def test_every_request_ends_once(arrivals, size):
    requests = [
        (arrival, Request(index, 4, length, priority=priority / 4))
        for index, (arrival, length, priority) in enumerate(sorted(arrivals))
    ]
    errors = errors_of(size, requests)
    assert all(error in (None, FULL.format(size)) for error in errors)
    assert sum(error is None for error in errors) >= min(len(requests), 2 + size)


def test_the_batch_manager_asks_for_all_requests_and_answers_those_beyond():
    client = Client(request_of(index) for index in range(9))
    manager = manager_of(client, start=False, max_batch_size=2, maxQueueSize=3)
    manager.close()
    assert set(client.asked) == {-1}
    assert [answer.error for answer in client.answers] == [""] * 5 + [FULL.format(3)] * 4
    assert [answer.finals for answer in client.answers] == [1] * 9
    assert client.answers[4].tokens == output_of(4, 5, 4)
    check_nothing_leaked(manager)


@pytest.mark.parametrize("device", ["sim:h100-sxm", "null"])
@pytest.mark.parametrize("more", [{}, {"concurrency": 4}])
def test_a_run_records_the_refusals(tmp_path: Path, device: str, more: dict[str, Any]):
    rows = [{"request_id": index, "arrival_s": 0.0, "prompt_len": 8, "output_len": 5} for index in range(12)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RunConfig(
        device=device, max_batch_size=2, max_queue_size=1, max_seq_len=64, output=str(tmp_path / "run"), **more
    )
    result = run_trace(str(trace), config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
    refused = [line["request_id"] for line in lines if line["error"] == FULL.format(1)]
    assert result.failed == len(refused) == 9
    assert sorted(line["request_id"] for line in lines if line["outcome"] == "completed") == [0, 1, 2]


def test_requests_of_a_simulated_run_find_room_again(tmp_path: Path):
    """Arrivals far apart are all served, though the queue holds none."""
    rows = [{"request_id": index, "arrival_s": 10.0 * index, "prompt_len": 8, "output_len": 5} for index in range(6)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RunConfig(device="sim:h100-sxm", max_batch_size=1, max_queue_size=0, output=str(tmp_path / "run"))
    assert run_trace(str(trace), config).failed == 0
