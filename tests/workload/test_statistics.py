"""A trace in figures."""

import json
from dataclasses import asdict
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ifbbench.workload.distributions import Histogram
from ifbbench.workload.prompts import with_prefix
from ifbbench.workload.reuse import tokens_seen_before
from ifbbench.workload.statistics import (
    histogram_lines,
    length_statistics,
    sparkline,
    trace_statistics,
)
from ifbbench.workload.trace import PREFIX_BLOCK, Trace, TraceRequest


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


# Tokens seen before: against comparing every two prompts, token by token.

# Few ids and lengths, so that prompts have much in common.
prefixes = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 2, PREFIX_BLOCK])), min_size=1, max_size=4)
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def named(runs):
    return with_prefix(TraceRequest(0, 0.0, sum(length for _, length in runs) + 3, 1, 1), runs)


def recorded(prompt):
    return TraceRequest(0, 0.0, len(prompt), 1, 1, prompt_tokens=tuple(prompt))


def one_by_one(prompts):
    def common(some, others):
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))

    return sum(
        max((common(prompt, earlier) for earlier in prompts[:index]), default=0) for index, prompt in enumerate(prompts)
    )


@given(st.lists(prefixes, max_size=8), st.lists(tokens, max_size=8))
def test_as_counted_one_by_one(with_ids, with_tokens):
    spelled = [[(number, offset) for number, length in runs for offset in range(length)] for runs in with_ids]
    requests = [*map(named, with_ids), *map(recorded, with_tokens)]
    expected = one_by_one(spelled) + one_by_one(with_tokens) if requests else None
    assert tokens_seen_before(requests) == expected


def test_unknown_tokens():
    lengths_only = TraceRequest(0, 0.0, 9, 1, 1)
    assert tokens_seen_before([lengths_only]) is None
    assert tokens_seen_before([lengths_only, recorded([1, 2]), lengths_only, recorded([1, 3])]) == 1
