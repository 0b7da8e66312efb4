"""Overload, bursts, steady state and fairness, on arrivals and latencies that are made up."""

import numpy as np
import pytest

from ifbbench.rundir.traffic import bursts, jain_index, queue_growth, steady_state


def one_server(arrival_s: np.ndarray, service_s: float, servers: int = 1) -> np.ndarray:
    """How long each request waits for one of `servers` that take `service_s` for a request."""
    free = [0.0] * servers
    waits = []
    for arrival in np.sort(arrival_s):
        start = max(arrival, min(free))
        free[free.index(min(free))] = start + service_s
        waits.append(start - arrival)
    return np.array(waits)


def poisson(rate: float, count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).exponential(1 / rate, count).cumsum()


@pytest.mark.parametrize("seed", range(20))
def test_overload_is_a_queue_that_grows(seed: int) -> None:
    arrivals = poisson(10.0, 500, seed)
    overloaded, growth = queue_growth(arrivals, one_server(arrivals, 0.2))
    assert overloaded
    assert growth == pytest.approx(5.0, abs=1.5)  # 10 requests/s arrive, 5 are served


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("load", [0.3, 0.8, 0.95])
def test_a_queue_that_empties_again_is_no_overload(seed: int, load: float) -> None:
    arrivals = poisson(10.0, 2_000, seed)
    assert queue_growth(arrivals, one_server(arrivals, load / 10)) == (False, 0.0)


@pytest.mark.parametrize("at", [0.0, 60.0, 119.0])
def test_a_burst_is_no_overload(at: float) -> None:
    arrivals = np.sort(np.concatenate([np.linspace(0, 120, 600), np.linspace(at, at + 1, 150)]))
    assert queue_growth(arrivals, one_server(arrivals, 0.1)) == (False, 0.0)


def test_all_at_once_and_closed_loops_are_no_overload() -> None:
    assert queue_growth(np.zeros(300), one_server(np.zeros(300), 0.1)) == (False, 0.0)
    # Eight requests at a time: the next one arrives when one is served.
    arrivals = np.concatenate([np.zeros(8), np.arange(1, 293) * 0.1])
    assert queue_growth(arrivals, one_server(arrivals, 0.1)) == (False, 0.0)


def test_the_burst_of_the_slow_requests_is_found() -> None:
    """5 requests/s, and at t = 860 s 270 within 10 s, of which all but the first wait for more than a second."""
    arrivals = np.sort(np.concatenate([np.arange(0, 1_800, 0.2), np.linspace(860, 870, 270)]))
    ttft_s = one_server(arrivals, 0.1) + 0.1
    found = bursts(arrivals, ttft_s)
    slow = arrivals[ttft_s > 1.0]
    assert found["slow_requests"] == len(slow) > 250
    (burst,) = found["bursts"]
    assert burst["slow_requests"] == len(slow)
    assert burst["start_s"] == slow[0] == pytest.approx(860, abs=1)
    assert burst["duration_s"] == slow[-1] - slow[0]
    inside = ((arrivals >= slow[0]) & (arrivals <= slow[-1])).sum()
    assert burst["requests"] == inside
    mean_rate = len(arrivals) / arrivals[-1]
    assert burst["rate_over_mean"] == pytest.approx(inside / burst["duration_s"] / mean_rate)


def test_slow_requests_without_a_burst() -> None:
    arrivals = poisson(10.0, 500, 1)
    found = bursts(arrivals, one_server(arrivals, 0.2))  # overload: the rate is the mean rate
    assert found["slow_requests"] > 400
    assert found["bursts"] == []
    assert bursts(arrivals, np.full(500, 0.1))["slow_requests"] == 0
    assert bursts(arrivals, np.full(500, 0.1), slow_s=0.05)["slow_requests"] == 500
    assert bursts(np.zeros(500), np.full(500, 2.0))["bursts"] == []  # all at once


def test_steady_state_is_between_ramp_up_and_drain() -> None:
    """Eight requests at a time, 2 s each; they start one after another in the first 1.75 s and end as they began."""
    starts = np.sort(np.concatenate([first + np.arange(0, 40, 2.0) for first in np.arange(8) * 0.25]))
    window = steady_state(starts, np.zeros(len(starts)), np.full(len(starts), 2.0))
    assert window is not None
    assert (window.start_s, window.end_s) == pytest.approx((1.75, 40.0))


def test_no_steady_state_while_the_load_keeps_growing() -> None:
    starts = np.sqrt(np.linspace(0, 100, 400))
    assert steady_state(starts, np.zeros(400), np.full(400, 3.0)) is None
    assert steady_state(np.zeros(3), np.zeros(3), np.ones(3)) is None  # too few requests


def test_all_at_once_has_a_steady_state_while_the_batch_is_full() -> None:
    waits = one_server(np.zeros(100), 1.0, servers=4)
    window = steady_state(np.zeros(100), waits, waits + 1.0)
    assert window is not None
    assert (window.start_s, window.end_s) == pytest.approx((0.0, 25.0))


def test_jain_index() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain_index([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([1.0, 2.0]) == pytest.approx(0.9)
    assert jain_index([0.0, 0.0]) is None
