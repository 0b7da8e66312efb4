"""Confidence intervals of the figures of one run, and of means over repeats."""

from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest

from ifbbench.analysis.confidence import (
    BLOCKS,
    MEMORY,
    RunSample,
    half_width,
    half_width_of_difference,
    margins,
    student_t,
)


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


def test_the_interval_of_a_mean_is_that_of_the_logarithms_of_the_means_without_each_block():
    latencies = draw(1)
    run = RunSample(lines(latencies, gap_s=1.0))
    without = [fmean(latencies[:first] + latencies[first + 200 :]) for first in range(0, 1000, 200)]
    pseudo_values = [5 * log(fmean(latencies)) - 4 * log(one) for one in without]
    correlated = 1 / sqrt(1 - MEMORY * 5 / run.lengths)
    expected = student_t(0.95, 4) * stdev(pseudo_values) / sqrt(5) * correlated

    assert run.blocks == BLOCKS == 5
    margin = margins(run)["e2e_s.mean"]
    assert margin.is_log
    assert margin.half == pytest.approx(expected)
    assert margin.around(2.0) == pytest.approx((2 * exp(-expected), 2 * exp(expected)))


def test_a_figure_that_is_zero_has_an_interval_of_equal_halves():
    latencies = draw(10)
    rows = lines(latencies, 1.0)
    assert not margins(RunSample(rows))["queue_time_s.mean"].is_log
    for row in rows[:200]:
        row["queue_time_s"] = 1.0
    queued = margins(RunSample(rows))["queue_time_s.mean"]
    low, high = queued.around(0.2)
    assert not queued.is_log
    assert high - 0.2 == pytest.approx(0.2 - low) == pytest.approx(queued.half)


def test_the_end_of_a_run_counts_in_the_uncertainty_of_its_rate():
    """With the same arrivals on both sides, rates differ by when the last request ends, which is chance."""
    rows, later = lines([0.1] * 1000, 1.0), lines([0.1] * 1000, 1.0)
    later[-1]["end_s"] += 30.0
    low, high = margins(RunSample(later), RunSample(rows))["request_throughput_per_s"].around(1000 / 1029.1)
    assert low <= 1000 / 999.1 <= high


def test_what_two_runs_have_in_common_is_no_uncertainty():
    latencies = draw(2)
    one, other = RunSample(lines(latencies, 1.0)), RunSample(lines([value * 1.001 for value in latencies], 1.0))

    assert margins(other, one)["e2e_s.p50"].half < 1e-9 < margins(one)["e2e_s.p50"].half


@pytest.mark.parametrize("percentile", ["p50", "p90"])
def test_intervals_are_missed_as_often_as_they_say(percentile: str):
    """Times that queues depend on, of which neighbours are alike: 100 pairs of runs without a difference."""
    generator, said = np.random.default_rng(11), 0
    for _ in range(100):
        runs = []
        for _ in range(2):
            noise = generator.normal(size=1020)
            level = np.convolve(noise, np.ones(20) / sqrt(20), mode="valid")[:1000]
            runs.append(RunSample(lines(np.exp(level).tolist(), gap_s=1.0)))
        wholes = [one.left_out()[f"e2e_s.{percentile}"][0] for one in runs]
        low, high = margins(runs[1], runs[0])[f"e2e_s.{percentile}"].around(wholes[1])
        said += not low <= wholes[0] <= high
    assert 1 <= said <= 13  # 5 are expected


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
    assert margins(run) == margins(run, RunSample(lines(draw(4), 1.0))) == {}


def test_a_run_in_which_latencies_grow_with_its_length_is_too_short_however_long_it_is():
    for count in (1000, 20_000):
        assert RunSample(lines([0.5 * index for index in range(1, count)], 1.0)).too_short


def test_failed_requests_count_in_the_goodput_share_only():
    completed, failed = lines(draw(5), 1.0), lines([0.0] * 1000, 1.0, outcome="failed")
    mixed = [one if index % 4 else failed[index] for index, one in enumerate(completed)]
    for index, line in enumerate(mixed):
        line["slo_met"] = line["outcome"] == "completed" and index % 3 == 0
    share, without = RunSample(mixed).left_out()["goodput_share"]
    shares = [fmean(line["slo_met"] for line in mixed[:first] + mixed[first + 200 :]) for first in range(0, 1000, 200)]

    assert share == pytest.approx(fmean(line["slo_met"] for line in mixed))
    assert without == pytest.approx(shares)
    mean, _ = RunSample(mixed).left_out()["e2e_s.mean"]
    assert mean == pytest.approx(fmean(one["e2e_s"] for one in mixed if one["e2e_s"]), rel=0.01)


def test_only_the_requests_of_a_steady_state_count():
    run = RunSample(lines([100.0] * 500 + draw(6) + [100.0] * 500, 1.0), window=(601.0, 1499.0))

    assert run.left_out()["e2e_s.mean"][0] == pytest.approx(1.0, abs=0.1)


def test_a_percentile_with_few_values_above_it_has_no_interval():
    run, other = RunSample(lines(draw(7, 700), 1.0)), RunSample(lines(draw(8, 700), 1.0))
    larger = RunSample(lines(draw(7, 4001), 1.0))

    assert {"e2e_s.p95", "e2e_s.mean"} <= margins(run, other).keys()
    assert "e2e_s.p99" not in margins(run, other)
    # Alone, percentiles of few values vary by more upwards than downwards, so that 400 values are above them.
    assert "e2e_s.mean" in margins(run)
    assert not [name for name in margins(run) if name.endswith(("p50", "p90", "p95", "p99"))]
    assert "e2e_s.p90" in margins(larger)
    assert "e2e_s.p95" not in margins(larger)


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

    found = margins(RunSample(damaged), RunSample(whole))
    assert {"tpot_s.mean", "request_throughput_per_s"} <= set(found)
    assert np.isfinite([margin.half for margin in found.values()]).all()
