"""The client of a replay: which requests it hands out when, with concurrency and emulated static batches."""

from typing import Any

import numpy as np
import pytest

from ifbbench.engine.request import Request
from ifbbench.engine.responses import Response
from ifbbench.engine.sampling_params import OutputOptions
from ifbbench.replay.client import ReplayClient, StaticEmulation, make_client
from ifbbench.settings.config import RunConfig
from ifbbench.virtual_clock import VirtualClock
from ifbbench.workload.arrival_processes import Poisson
from ifbbench.workload.distributions import Stream, generator
from ifbbench.workload.trace import Trace, TraceRequest

ALL = -1


def make_request(index, row):
    options = OutputOptions(streaming=row.priority > 0.5)
    return Request(row.request_id, row.prompt_len, row.max_new_tokens, index=index, options=options)


def trace_at(*arrivals_s, streaming=False):
    rows = [
        TraceRequest(100 + index, arrival_s, 4, 4, 4, priority=0.9 if streaming else 0.5)
        for index, arrival_s in enumerate(arrivals_s)
    ]
    return Trace("made up", rows, "0" * 64, "test")


def tokens(*ids):
    return np.array(ids, np.int32)


class Engine:
    """Takes what it is handed and answers when `answer` is called; counts how often there was nothing to take."""

    def __init__(self, *arrivals_s, streaming=False, **options):
        self.clock: Any = VirtualClock()  # of any kind
        self.client = ReplayClient(trace_at(*arrivals_s, streaming=streaming), self.clock, make_request, **options)
        self.active: list[Request] = []
        self.looks = 0

    def take(self, count=ALL):
        """Ids, from 0, of the requests handed out now."""
        taken = self.client.get_requests(count)
        self.active += taken
        return [request.index for request in taken]

    def answer(self, count=ALL, error=None):
        """The final responses of the first `count` active requests."""
        count = len(self.active) if count < 0 else count
        for request in self.active[:count]:
            answer = () if error else (tokens(request.index),)
            self.client.send_response(Response(request, is_final=True, tokens=answer, error=error))
        del self.active[:count]

    def run(self, duration_s, at_most=ALL):
        """Each step takes up to `at_most` requests and answers them after `duration_s`; the moments and ids taken."""
        started = []
        while not self.client.done:
            now = self.clock.now()
            taken = self.take(at_most)
            if taken:
                started.append((now, taken))
                self.clock.advance(round(duration_s * 1e9))
                self.answer()
            else:
                self.looks += 1
                assert self.looks < 1000, "spins"
                self.client.wait()
        return started

    def arrivals(self):
        return [self.client.arrival_s(make_request(index, row)) for index, row in enumerate(self.client._trace)]


# Plain replay.


def test_requests_are_handed_out_at_their_time():
    assert Engine(0.0, 0.5, 0.5, 2.0).run(0.1) == [(0.0, [0]), (0.5, [1, 2]), (2.0, [3])]


def test_a_limit_leaves_the_others_queued():
    engine = Engine(0.0, 0.0, 0.0, 9.0)
    assert engine.client.queued() == 3
    assert engine.take(2) == [0, 1]
    assert (engine.client.queued(), engine.client.next_event_s) == (1, 0.0)
    assert engine.take(2) == [2]
    assert (engine.client.queued(), engine.client.next_event_s) == (0, 9.0)


@pytest.mark.parametrize("arrival_s", [1 / 3, 2 / 3, 0.1 + 0.2, 1e-10, 86_400 / 7])
def test_a_time_between_nanoseconds_is_waited_for_once(arrival_s):
    engine = Engine(arrival_s)
    ((taken_s, _),) = engine.run(0.1)
    assert engine.looks == 1
    assert arrival_s <= taken_s <= arrival_s + 2e-9
    assert engine.arrivals() == [arrival_s]


def test_wait_sleep_looks_at_intervals():
    engine = Engine(0.0, 0.26, wait_sleep_s=0.1)
    assert engine.run(0.05) == [(0.0, [0]), (0.35, [1])]
    assert engine.looks == 3


# Responses.


def test_errors_count_as_answers_and_leave_no_output():
    engine = Engine(0.0, 0.0)
    engine.take()
    engine.answer(1)
    engine.answer(1, error="too long")
    assert engine.client.done
    assert {key: value.tolist() for key, value in engine.client.outputs.items()} == {100: [0]}


def test_streamed_tokens_are_joined():
    engine = Engine(0.0, 0.0, streaming=True)
    engine.take()
    first, second = engine.active
    parts = [(first, False, (1, 2)), (second, False, (7,)), (first, False, ()), (first, True, (3,)), (second, True, ())]
    for request, is_final, ids in parts:
        assert not engine.client.done
        engine.client.send_response(Response(request, is_final, (tokens(*ids),)))
    assert engine.client.done
    assert {key: value.tolist() for key, value in engine.client.outputs.items()} == {100: [1, 2, 3], 101: [7]}


def test_a_streaming_request_that_fails_leaves_no_output():
    engine = Engine(0.0, streaming=True)
    engine.take()
    engine.client.send_response(Response(engine.active[0], False, (tokens(1),)))
    engine.answer(error="stopped")
    assert engine.client.done
    assert engine.client.outputs == {}


def test_nothing_is_kept_of_requests_whose_output_nobody_asks_for():
    engine = Engine(0.0, 0.0, streaming=True, keeps_outputs=False)
    engine.take()
    engine.client.send_response(Response(engine.active[0], False, (tokens(1),)))
    engine.answer(1)
    engine.answer(2)
    assert engine.client.done
    assert engine.client.outputs == {}


def test_outputs_are_kept_where_they_will_be_written():
    for path in (None, "responses.json"):
        client = make_client(RunConfig(responses_json=path), trace_at(0.0), VirtualClock(), make_request)
        (request,) = client.get_requests(ALL)
        client.send_response(Response(request, True, (tokens(1, 2),)))
        assert list(client.outputs) == ([] if path is None else [100])


def test_responses_without_tokens():
    engine = Engine(0.0)
    engine.take()
    engine.client.send_response(Response(engine.active[0], is_final=True))
    assert engine.client.done
    assert engine.client.outputs == {}


# Concurrency.


def test_concurrency_without_recorded_times():
    engine = Engine(0.0, 5.0, 6.0, 7.0, concurrency=2, keeps_arrivals=False)
    assert engine.take() == [0, 1]
    assert (engine.client.queued(), engine.client.next_event_s) == (0, None)
    engine.clock.advance(1_000_000_000)
    engine.answer(1)
    assert (engine.client.queued(), engine.client.next_event_s) == (1, 1.0)
    engine.clock.advance(500_000_000)
    assert engine.take() == [2]
    engine.answer(1)
    assert engine.take() == [3]
    engine.answer()
    assert engine.client.done
    assert engine.arrivals() == [0.0, 0.0, 1.0, 1.5]


def test_concurrency_waits_for_the_later_of_time_and_place():
    engine = Engine(0.0, 0.1, 0.2, 5.0, concurrency=1)
    assert engine.run(1.0) == [(0.0, [0]), (1.0, [1]), (2.0, [2]), (5.0, [3])]
    assert engine.arrivals() == [0.0, 0.1, 0.2, 5.0], "latencies count from the scheduled arrival"
    assert engine.client.arrivals()["lateness_s"]["max"] == 1.8


def test_a_waiting_request_takes_a_place():
    engine = Engine(0.0, 0.0, 0.0, concurrency=2, keeps_arrivals=False)
    assert engine.take(1) == [0]
    assert engine.client.queued() == 1
    engine.answer()
    assert engine.client.queued() == 2


def test_a_refused_request_frees_its_place():
    engine = Engine(0.0, 0.0, 0.0, concurrency=1, keeps_arrivals=False)
    for _ in range(3):
        assert len(engine.take()) == 1
        engine.answer(error="refused")
        engine.client.wait()
    assert engine.client.done
    assert engine.clock.now() == 0.0


def test_more_places_than_requests_change_nothing():
    assert Engine(0.0, 0.5, concurrency=9).run(0.1) == Engine(0.0, 0.5).run(0.1)


# Sessions.


class Sessions(Engine):
    """An engine with a trace in which request k comes after `after[k]`, `think_s` seconds after its end."""

    def __init__(self, *after, think_s=2.0, **options):
        super().__init__(**options)
        rows = [TraceRequest(k, float(k), 4, 4, 4, after=before, think_s=think_s) for k, before in enumerate(after)]
        self.client = ReplayClient(Trace("sessions", rows, "0" * 64, ""), self.clock, make_request, **options)


def test_a_turn_arrives_after_the_answer_and_a_pause():
    engine = Sessions(None, 0, 1, None)
    assert engine.run(0.5) == [(0.0, [0]), (2.5, [1]), (3.0, [3]), (5.0, [2])]
    assert engine.arrivals() == [0.0, 2.5, 5.0, 3.0]
    figures = engine.client.arrivals()
    assert figures["requested_rate_per_s"] is None, "responses decide when turns arrive"
    assert figures["achieved_rate_per_s"] == 3 / 5


def test_several_turns_may_follow_one():
    assert Sessions(None, 0, 0).run(0.5) == [(0.0, [0]), (2.5, [1, 2])]


def test_a_turn_after_a_failed_one_is_offered():
    engine = Sessions(None, 0, think_s=0.0)
    engine.take()
    engine.answer(error="refused")
    assert engine.take() == [1]


def test_a_turn_waits_for_a_place():
    engine = Sessions(None, None, 0, concurrency=1)
    assert engine.run(4.0) == [(0.0, [0]), (4.0, [1]), (8.0, [2])]
    assert engine.arrivals() == [0.0, 1.0, 6.0]
    assert engine.client.arrivals()["lateness_s"]["max"] == 3.0


def test_in_a_closed_loop_a_turn_that_is_due_goes_before_a_new_session():
    engine = Sessions(None, 0, None, None, think_s=1.0, concurrency=1, keeps_arrivals=False)
    assert engine.run(4.0) == [(0.0, [0]), (4.0, [2]), (8.0, [1]), (12.0, [3])]
    assert engine.arrivals() == [0.0, 5.0, 4.0, 12.0]


def test_turns_are_handed_out_by_priority():
    rows = [
        TraceRequest(0, 0.0, 4, 4, 4),
        TraceRequest(1, 1.0, 4, 4, 4, after=0),
        TraceRequest(2, 0.0, 4, 4, 4),
        TraceRequest(3, 2.0, 4, 4, 4, after=0, priority=0.9),
    ]
    engine = Engine()
    engine.client = ReplayClient(Trace("t", rows, "0" * 64, ""), engine.clock, make_request)
    assert engine.take(1) == [0]
    engine.answer()
    assert (engine.take(1), engine.take()) == ([3], [2, 1])


def test_turns_in_emulated_batches():
    engine = Sessions(None, None, 0, 1, think_s=0.2, emulation=StaticEmulation(2, 5.0))
    assert engine.run(0.5) == [(1.0, [0, 1]), (1.7, [2, 3])]


# Duration.


def test_turns_and_requests_of_a_closed_loop_do_not_arrive_after_the_duration():
    assert Sessions(None, 0, 1, None, duration_s=2.9).run(0.5) == [(0.0, [0]), (2.5, [1])]
    engine = Engine(0.0, 0.0, 0.0, 0.0, 0.0, concurrency=2, keeps_arrivals=False, duration_s=1.5)
    assert engine.run(1.0) == [(0.0, [0, 1]), (1.0, [2, 3])]
    assert engine.client.submitted == 4


def test_a_request_that_arrived_in_time_may_start_late():
    engine = Engine(0.0, 0.5, 9.0, concurrency=1, duration_s=1.0)
    assert engine.run(5.0) == [(0.0, [0]), (5.0, [1])]
    assert engine.arrivals()[:2] == [0.0, 0.5]


# Real time.


class LateClock:
    """Real time, as far as the client knows: each wait ends `late_s` too late."""

    def __init__(self, late_s):
        self.late_s, self.seconds = late_s, 0.0

    def now(self):
        return self.seconds

    def wait_until(self, seconds):
        self.seconds = max(self.seconds, seconds + self.late_s)


def test_a_late_submission_does_not_shift_the_next():
    process = Poisson(50.0)
    arrivals_s = process.draw(generator(0, Stream.ARRIVAL), 3_000).tolist()
    engine = Engine()
    engine.clock = LateClock(0.0003)
    engine.client = ReplayClient(trace_at(*arrivals_s), engine.clock, make_request)
    while not engine.client.done:
        engine.take()
        engine.answer()
        engine.client.wait()
    assert engine.arrivals() == arrivals_s, "latencies count from the schedule"
    figures = engine.client.arrivals()
    assert figures["requested_rate_per_s"] == pytest.approx(2_999 / (arrivals_s[-1] - arrivals_s[0]))
    assert figures["achieved_rate_per_s"] == pytest.approx(figures["requested_rate_per_s"], rel=1e-4)
    assert 0 < figures["lateness_s"]["mean"] <= figures["lateness_s"]["max"] < 0.0003 + 1e-9


def test_without_requests_there_are_no_rates():
    figures = Engine(0.0).client.arrivals()
    assert (figures["requested_rate_per_s"], figures["achieved_rate_per_s"]) == (None, None)
    assert set(figures["lateness_s"].values()) == {None}


# Emulated static batches.


def emulated(*arrivals_s, batch_size=2, timeout_s=0.5):
    return Engine(*arrivals_s, emulation=StaticEmulation(batch_size, timeout_s))


def test_a_batch_goes_when_it_is_full():
    engine = emulated(0.0, 0.2, 0.3, 0.4)
    assert engine.run(1.0) == [(0.2, [0, 1]), (1.2, [2, 3])]


def test_a_batch_goes_with_fewer_after_the_timeout():
    engine = emulated(0.0, 0.1, 9.0, batch_size=3)
    assert engine.client.next_event_s == 0.5
    assert engine.run(1.0) == [(0.5, [0, 1]), (9.0, [2])]


def test_the_last_batch_does_not_wait_for_more():
    assert emulated(0.0, 0.1, 0.2, timeout_s=50).run(1.0) == [(0.1, [0, 1]), (1.1, [2])]


def test_no_batch_goes_while_one_is_outstanding():
    engine = emulated(0.0, 0.0, 0.0, 0.0)
    assert engine.take() == [0, 1]
    engine.answer(1)
    assert (engine.take(), engine.client.queued(), engine.client.next_event_s) == ([], 2, None)
    engine.answer(1)
    assert engine.take() == [2, 3]


def test_a_batch_larger_than_the_engine_takes_at_once_stays_one_batch():
    engine = emulated(0.0, 0.0, 0.0, 0.0, batch_size=3)
    assert (engine.take(2), engine.client.next_event_s, engine.take(2), engine.take(2)) == ([0, 1], 0.0, [2], [])


def test_a_refused_batch_makes_way_for_the_next():
    engine = emulated(0.0, 0.0, 0.0)
    engine.take()
    engine.answer(error="refused")
    assert engine.client.next_event_s == 0.0
    assert engine.take() == [2]


@pytest.mark.parametrize("timeout_s", [0.0, 1 / 3, 1e-9, 7.0])
def test_emulation_never_spins(timeout_s):
    arrivals = [index / 7 for index in range(30)]
    engine = emulated(*arrivals, batch_size=4, timeout_s=timeout_s)
    started = engine.run(0.3)
    assert [index for _, batch in started for index in batch] == list(range(30))
    assert all(len(batch) <= 4 for _, batch in started)
    assert engine.looks <= 30


# From settings.


@pytest.mark.parametrize(
    ("settings", "handed_out", "next_event_s"),
    [
        ({}, 1, 3.0),
        ({"concurrency": 2}, 2, None),
        ({"concurrency": 2, "request_rate": 1.0}, 1, 3.0),
        ({"static_emulated_batch_size": 2, "static_emulated_timeout": 250}, 0, 0.25),
        ({"static_emulated_batch_size": 2}, 0, 0.5),
    ],
)
def test_the_client_is_made_from_settings(settings, handed_out, next_event_s):
    client = make_client(RunConfig(**settings), trace_at(0.0, 3.0, 4.0), VirtualClock(), make_request)
    assert len(client.get_requests(ALL)) == handed_out
    assert client.next_event_s == next_event_s


def test_wait_sleep_is_in_milliseconds():
    clock = VirtualClock()
    make_client(RunConfig(wait_sleep=25), trace_at(1.0), clock, make_request).wait()
    assert clock.now() == 0.025
