"""Confidence intervals of the figures of one run, and of means over repeats."""

from math import sqrt
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest

from ifbbench.analysis.confidence import MEMORY, RunSample, half_width, half_width_of_difference, half_widths, student_t


def lines(latencies: list[float], gap_s: float, outcome: str = "completed") -> list[dict[str, Any]]:
    """Requests that arrive `gap_s` seconds apart; of failed ones only the arrival is known."""
    found = []
    for index, latency in enumerate(latencies):
        line: dict[str, Any] = dict.fromkeys(("queue_time_s", "ttft_s", "tpot_s", "e2e_s", "end_s"))
        line |= {
            "index": index,
            "arrival_s": index * gap_s,
            "outcome": outcome,
            "prompt_len": 10,
            "output_len": 5,
            "reused_tokens": 0,
        }
        if outcome == "completed":
            line |= {
                "queue_time_s": 0.0,
                "ttft_s": latency / 2,
                "tpot_s": latency / 8,
                "e2e_s": latency,
                "end_s": index * gap_s + latency,
            }
        found.append(line)
    return found


def draw(seed: int, count: int = 1000) -> list[float]:
    return np.random.default_rng(seed).exponential(1.0, count).tolist()


def test_the_interval_of_a_mean_is_that_of_the_means_of_blocks():
    latencies = draw(1)
    run = RunSample(lines(latencies, gap_s=1.0))
    means = [fmean(latencies[first : first + 100]) for first in range(0, 1000, 100)]
    correlated = 1 / sqrt(1 - MEMORY * 10 / run.lengths)
    expected = student_t(0.95, 9) * stdev(means) / sqrt(10) * correlated

    assert run.blocks == 10
    assert half_widths(run)["e2e_s.mean"] == pytest.approx(expected)


def test_what_two_runs_have_in_common_is_no_uncertainty():
    latencies = draw(2)
    one, other = RunSample(lines(latencies, 1.0)), RunSample(lines([value + 0.001 for value in latencies], 1.0))

    assert half_widths(other, one)["e2e_s.p50"] < 1e-9 < half_widths(one)["e2e_s.p50"]


@pytest.mark.parametrize(
    ("count", "gap_s", "reason"),
    [
        (1000, 0.04, "its arrivals last 39 times the mean latency, and 50 times are needed"),
        (99, 100.0, "it completed 99 requests, and 100 are needed"),
        (0, 1.0, "it completed 0 requests, and 100 are needed"),
    ],
)
def test_a_run_that_is_too_short_has_no_intervals_and_says_why(count, gap_s, reason):
    run = RunSample(lines(draw(3, count), gap_s))

    assert run.blocks == 0
    assert run.too_short == reason
    assert half_widths(run) == half_widths(run, RunSample(lines(draw(4), 1.0))) == {}


def test_a_run_in_which_latencies_grow_with_its_length_is_too_short_however_long_it_is():
    for count in (1000, 20_000):
        assert RunSample(lines([0.5 * index for index in range(1, count)], 1.0)).too_short


def test_failed_requests_count_in_the_goodput_share_only():
    completed, failed = lines(draw(5), 1.0), lines([0.0] * 1000, 1.0, outcome="failed")
    mixed = [one if index % 4 else failed[index] for index, one in enumerate(completed)]
    for index, line in enumerate(mixed):
        line["slo_met"] = line["outcome"] == "completed" and index % 3 == 0
    found = RunSample(mixed).pseudo_values(10)
    shares = [fmean(line["slo_met"] for line in mixed[first : first + 100]) for first in range(0, 1000, 100)]

    assert found["goodput_share"] == pytest.approx(shares)
    assert found["e2e_s.mean"].mean() == pytest.approx(fmean(one["e2e_s"] for one in mixed if one["e2e_s"]), rel=0.01)


def test_only_the_requests_of_a_steady_state_count():
    run = RunSample(lines([100.0] * 500 + draw(6) + [100.0] * 500, 1.0), window=(601.0, 1499.0))

    assert fmean(run.pseudo_values(5)["e2e_s.mean"]) == pytest.approx(1.0, abs=0.1)


def test_a_percentile_with_few_values_above_it_has_no_interval():
    run, other = RunSample(lines(draw(7, 700), 1.0)), RunSample(lines(draw(8, 700), 1.0))
    larger = RunSample(lines(draw(7, 4001), 1.0))

    assert {"e2e_s.p95", "e2e_s.mean"} <= half_widths(run, other).keys()
    assert "e2e_s.p99" not in half_widths(run, other)
    # Alone, percentiles of few values vary by more upwards than downwards, so that 400 values are above them.
    assert "e2e_s.mean" in half_widths(run)
    assert not [name for name in half_widths(run) if name.endswith(("p50", "p90", "p95", "p99"))]
    assert "e2e_s.p90" in half_widths(larger)
    assert "e2e_s.p95" not in half_widths(larger)


def test_the_interval_of_a_difference_of_means():
    # Welch's example of R: t.test(extra ~ group, data = sleep) has the interval -3.3654832 to 0.2054832.
    a = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    b = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    # The degrees of freedom, 17.776, are rounded down.
    assert half_width_of_difference(a, b) == pytest.approx(1.7854832 * student_t(0.95, 17) / 2.1028, rel=1e-4)
    # t.test(paired = TRUE): -2.4598858 to -0.7001142
    assert half_width([y - x for x, y in zip(a, b, strict=True)]) == pytest.approx(0.8798858, rel=1e-6)
    assert half_width([1.0]) is None
    assert half_width_of_difference([1.0], b) is None


@pytest.mark.parametrize("name", ["index", "arrival_s", "end_s", "e2e_s", "ttft_s", "output_len", "prompt_len"])
def test_a_line_that_lacks_a_field_spoils_only_what_needs_it(name):
    damaged, whole = lines(draw(8), 1.0), lines(draw(9), 1.0)
    del damaged[500][name]

    found = half_widths(RunSample(damaged), RunSample(whole))
    assert {"tpot_s.mean", "request_throughput_per_s"} <= set(found)
    assert np.isfinite([*found.values()]).all()
