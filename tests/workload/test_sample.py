"""Parts of traces."""

import numpy as np
import pytest

from ifbbench.errors import InputError
from ifbbench.workload.sample import Sample, Selection
from ifbbench.workload.trace import Trace, TraceRequest


def trace(count=1000, gap_s=0.5):
    requests = [TraceRequest(10 + i, i * gap_s, 1 + i * 7 % 501, 4, 4) for i in range(count)]
    return Trace("some", requests, "", "")


def sample(selection, seed=0, of=None):
    return list(Sample(of or trace(), selection, seed))


def ids(requests):
    return [request.request_id for request in requests]


def test_window():
    kept = sample(Selection(from_s=10, to_s=20))
    assert ids(kept) == list(range(30, 50))
    assert [request.arrival_s for request in kept] == [index * 0.5 for index in range(20)]


def test_every():
    kept = sample(Selection(every=10, preserve_rate=False))
    assert ids(kept) == list(range(10, 1010, 10))
    assert kept[1].arrival_s == 5.0
    assert sample(Selection(every=10))[1].arrival_s == 0.5


def test_random_requests_keep_order_and_rate():
    kept = sample(Selection(num_requests=200))
    assert len(set(ids(kept))) == 200
    assert ids(kept) == sorted(ids(kept))
    assert 200 / kept[-1].arrival_s == pytest.approx(2.0, rel=0.05)
    assert 200 / sample(Selection(num_requests=200, preserve_rate=False))[-1].arrival_s == pytest.approx(0.4, rel=0.05)
    assert ids(kept) != ids(sample(Selection(num_requests=200), seed=1))
    assert kept == sample(Selection(num_requests=200))


def test_all_when_more_are_asked_for():
    assert sample(Selection(num_requests=5000)) == list(trace())


def test_stratified_samples_have_the_lengths_of_the_trace():
    whole = np.array([request.prompt_len for request in trace()])
    marks = (10, 50, 90)
    for seed in range(5):
        kept = [request.prompt_len for request in sample(Selection(num_requests=50, stratified=True), seed)]
        assert len(kept) == 50
        assert np.percentile(kept, marks) == pytest.approx(np.percentile(whole, marks), abs=501 / 50 * 2)


def test_a_turn_without_the_one_before_is_a_first_turn():
    requests = [TraceRequest(i, float(i), 5, 1, 1, after=None if i == 0 else i - 1, think_s=2.0) for i in range(6)]
    of = Trace("some", requests, "", "")
    assert [(r.after, r.think_s) for r in sample(Selection(from_s=2), of=of)] == [(None, 0), (2, 2), (3, 2), (4, 2)]
    assert [r.after for r in sample(Selection(every=2), of=of)] == [None] * 3


def test_empty_window():
    with pytest.raises(InputError, match=r"no request arrives from 900 s to 901 s; the trace ends at 499\.5 s"):
        sample(Selection(from_s=900, to_s=901))
