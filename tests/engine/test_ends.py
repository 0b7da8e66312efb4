"""Ends that are known in advance are those that counters show."""

import random
from dataclasses import replace

import numpy as np
import pytest

from ifbbench.engine.request import Request, RequestTable
from ifbbench.schedulers.ends import Ends
from ifbbench.schedulers.queueing import steps_to_first_end
from ifbbench.settings.modes import Overlap
from tests.replay.test_fast_forward import config_of


@pytest.mark.parametrize("overlap", [None, Overlap.ASYNC])
def test_ends_are_those_of_the_counters(overlap: Overlap | None) -> None:
    """Requests join and leave at random, and each that has a token to schedule gets one in every iteration."""
    limits = replace(config_of(), overlap=overlap)
    draw, table = random.Random(1), RequestTable(limits.num_slots)
    ends, in_flight, num_added, num_ended = Ends(table, limits.is_async), list[set[Request]](), 0, 0
    for _ in range(600):
        for request in list(table.requests.values()):
            if draw.random() < 0.02:  # a client stops it
                _leave(ends, in_flight, request)
        running = [request for request in table.requests.values() if request.in_generation]
        if running:
            rows = np.array([request.slot for request in running], np.int64)
            assert max(ends.steps_to_first(limits.max_in_flight), 1) == steps_to_first_end(limits, table, rows)
            table.generated[rows] += 1
        ends.scheduled += 1
        if table.free_rows and draw.random() < 0.3:
            reserved = draw.randint(1, 12)
            request = Request(num_added, 5, reserved, output_len=draw.randint(1, reserved))
            request.enter(table, num_added)
            request.start_generation()
            table.confirmed[request.slot] = ends.collected - ends.scheduled + 1
            ends.add(num_added, request)
            running, num_added = [*running, request], num_added + 1
        in_flight.append(set(running))
        last = [one for one in running if one.num_generated >= table.reserved[one.slot]] if limits.is_async else []
        finished = ends.finish_scheduling()
        assert {one.request_id for one in finished} == {one.request_id for one in last}
        for request in finished:
            request.finish_scheduling()
        if len(in_flight) == limits.max_in_flight:
            collected = in_flight.pop(0)
            generating = np.array([one.slot for one in table.requests.values() if one.in_generation], np.int64)
            table.confirmed[generating] += 1  # `Ends` counts those of ending requests
            ends.collect(1)
            done = ends.completed()
            full = [one for one in collected if table.confirmed[one.slot] == table.stop_after[one.slot]]
            assert {one.request_id for one in done} == {one.request_id for one in full}
            num_ended += len(done)
            for request in done:
                _leave(ends, in_flight, request)
    assert num_ended > 100


def _leave(ends: Ends, in_flight: list[set[Request]], request: Request) -> None:
    ends.left(request)
    for requests in in_flight:
        requests.discard(request)
    request.leave()
    request.complete()
