"""Requests become active as in TensorRT-LLM's executor loop (engine.md §2), whatever their priorities."""

import random
from array import array

import pytest

from ifbbench.engine.interfaces import RequestSource
from ifbbench.engine.request import Request, RequestTable
from ifbbench.engine.responses import Response
from ifbbench.replay.client import ReplayClient, StaticEmulation
from ifbbench.schedulers.limits import LOOK_AHEAD, BatchingConfig
from ifbbench.schedulers.refusals import AdmissionLimits
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.schedulers.tensorrt_llm.admission import Admission
from ifbbench.virtual_clock import VirtualClock
from ifbbench.workload.trace import Trace, TraceRequest, columns_of


def make_request(index: int, row: TraceRequest) -> Request:
    return Request(row.request_id, row.prompt_len, row.max_new_tokens, index=index, priority=row.priority)


def trace_of(priorities: list[float], arrivals_s: list[float] | None = None) -> Trace:
    times = arrivals_s or [0.0] * len(priorities)
    rows = [
        TraceRequest(index, time, 4, 4, 4, priority=priority)
        for index, (time, priority) in enumerate(zip(times, priorities, strict=True))
    ]
    return Trace("made up", rows, "0" * 64, "test")


def admitted_by_the_rule(waiting: list[TraceRequest], active: list[TraceRequest], max_active: int) -> list[int]:
    """§2 literally, over one queue of all that have arrived; moves requests from `waiting` to `active`."""
    admitted = []
    waiting.sort(key=lambda row: (-row.priority, row.request_id))
    while waiting and len(active) < max_active + LOOK_AHEAD:
        last = min(active, key=lambda row: (row.priority, -len(active)), default=None)
        if len(active) >= max_active and (last is None or waiting[0].priority <= last.priority):
            break
        active.append(waiting.pop(0))
        admitted.append(active[-1].request_id)
    return admitted


@pytest.mark.parametrize("seed", range(200))
def test_no_look_ahead_hides_a_higher_priority(seed: int) -> None:
    draw = random.Random(seed)
    choices = draw.choice([[0.5, 0.9], [0.1, 0.5, 0.9], [offset / 20 for offset in range(21)]])
    count, max_active = draw.randint(10, 60), draw.randint(1, 4)
    arrivals = sorted(draw.choice([0.0, draw.uniform(0, 30)]) for _ in range(count))
    trace = trace_of([draw.choice(choices) for _ in range(count)], arrivals)
    clock = VirtualClock()
    client = ReplayClient(trace, clock, make_request)
    active = ActiveRequests(RequestTable(max_active + LOOK_AHEAD))
    admission = Admission(
        AdmissionLimits(BatchingConfig("guaranteed_no_evict", max_active, 8, 100, 99, 32, 100)),
        max_active,
    )
    source = RequestSource(client.get_requests, lambda request, error: pytest.fail(error), client.next_priority)
    arrived = 0
    waiting: list[TraceRequest] = []
    running: list[TraceRequest] = []
    while not client.done:
        while arrived < count and trace.requests[arrived].arrival_s <= clock.now():
            waiting.append(trace.requests[arrived])
            arrived += 1
        expected = admitted_by_the_rule(waiting, running, max_active)
        assert [request.request_id for request in admission.admit(active, source)] == expected
        assert client.queued() + len(admission.waiting) == len(waiting)
        for request in list(active.by_slot.values()):
            if draw.random() < 0.3:
                running.remove(trace.requests[request.request_id])
                active.remove(request)
                admission.forget(request)
                client.send_response(Response(request, is_final=True))
        clock.advance(draw.randint(0, 10**9))


def handed_out(client: ReplayClient, count: int) -> list[int]:
    return [request.index for request in client.get_requests(count)]


def test_equal_priorities_keep_the_order_of_arrival() -> None:
    client = ReplayClient(trace_of([0.5, 0.9, 0.5, 0.9]), VirtualClock(), make_request)
    assert (client.next_priority(), client.queued()) == (0.9, 4)
    assert handed_out(client, 3) == [1, 3, 0]
    assert (client.next_priority(), client.queued(), client.next_event_s) == (0.5, 1, 0.0)
    assert handed_out(client, -1) == [2]
    assert (client.next_priority(), client.next_event_s) == (None, None)


def test_a_trace_without_priorities_has_no_queue_by_priority() -> None:
    client = ReplayClient(trace_of([0.5, 0.5]), VirtualClock(), make_request)
    assert client.next_priority() is None
    assert handed_out(client, 1) == [0]
    assert client.next_priority() is None


def test_emulated_batches_are_taken_by_priority_and_wait_for_the_oldest() -> None:
    clock = VirtualClock()
    trace = trace_of([0.1, 0.5, 0.9, 0.9], [0.0, 0.1, 0.2, 9.0])
    client = ReplayClient(trace, clock, make_request, emulation=StaticEmulation(2, 0.5))
    clock.advance(10**8)
    first = client.get_requests(-1)
    assert [request.index for request in first] == [1, 0]
    clock.advance(10**8)
    for request in first:
        client.send_response(Response(request, is_final=True))
    assert client.next_event_s == pytest.approx(0.7)
    clock.wait_until(9.0)
    assert handed_out(client, -1) == [2, 3]


def test_columns_of_priorities_follow_their_requests() -> None:
    columns = columns_of(trace_of([0.5, 0.5, 0.9, 0.5], [3.0, 2.0, 1.0, 0.0]))
    assert columns.priority == array("d", [0.5, 0.5, 0.9, 0.5])
    assert columns.by_arrival().priority == array("d", [0.5, 0.9, 0.5, 0.5])
    assert columns_of(trace_of([0.5, 0.5])).priority is None
