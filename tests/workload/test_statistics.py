"""A trace in figures."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ifbbench.workload.statistics import Histogram, histogram_lines, length_statistics, sparkline, trace_statistics
from ifbbench.workload.trace import Trace, TraceRequest


def trace_of(*arrivals_s):
    requests = [TraceRequest(index, time, 10 * (index + 1), 8, 2) for index, time in enumerate(arrivals_s)]
    return Trace("some", requests, "", "", skipped_rows=4)


def test_arrivals():
    statistics = trace_statistics(trace_of(5.0, 6.0, 9.0))
    assert (statistics.requests, statistics.skipped_rows, statistics.span_s) == (3, 4, 4.0)
    assert statistics.request_rate_per_s == 0.5
    assert statistics.gap_cv == pytest.approx(0.5)  # gaps of 1 and 3: deviation 1, mean 2
    assert statistics.rate_window_s == 0.1
    assert sum(statistics.rates_per_s) * 0.1 == pytest.approx(3)


@pytest.mark.parametrize("arrivals_s", [(0.0,), (2.0, 2.0)])
def test_no_span_is_no_rate(arrivals_s):
    statistics = trace_statistics(trace_of(*arrivals_s))
    assert statistics.request_rate_per_s is None
    assert statistics.gap_cv is None
    assert statistics.rates_per_s == ()
    assert json.loads(json.dumps(asdict(statistics)))["span_s"] == 0


def test_lengths():
    statistics = trace_statistics(trace_of(0.0, 1.0, 2.0))
    prompt = statistics.prompt_tokens
    assert (prompt.mean, prompt.min, prompt.p50, prompt.max, prompt.total) == (20, 10, 20, 30, 60)
    assert (prompt.p90, prompt.p99) == pytest.approx((28, 29.8))
    assert (statistics.output_tokens.mean, statistics.max_new_tokens.mean) == (2, 8)


@given(st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=50))
def test_histogram_counts_every_length_once(lengths):
    histogram = length_statistics(lengths).histogram
    assert sum(histogram.counts) == len(lengths)
    assert list(histogram.edges) == sorted(set(histogram.edges))
    assert (histogram.edges[0], histogram.edges[-1]) == (min(lengths), max(lengths) + 1)
    for low, high, count in zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False):
        assert count == sum(low <= length < high for length in lengths)


def test_histogram_lines():
    lines = histogram_lines(Histogram((1, 2, 10, 2000), (2, 4, 0)), width=4)
    assert lines == ["       1 ██   2", "     2-9 ████ 4", "10-1,999      0"]


@pytest.mark.parametrize(("values", "line"), [([0, 1, 4, 8], "▁▂▅█"), ([0, 0], "▁▁"), ([], "")])
def test_sparkline(values, line):
    assert sparkline(values) == line
