"""Drawn workloads: distributions, arrival processes, and streams that leave each other alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ifbbench.workload.arrival_processes import AllAtOnce, Constant, Gamma, Poisson
from ifbbench.workload.distributions import (
    ExponentialTime,
    Fixed,
    FixedTime,
    Geometric,
    LogNormal,
    LogNormalTime,
    Normal,
    Quantiles,
    Stream,
    Uniform,
    UniformTime,
    generator,
)
from ifbbench.workload.draw import draw_trace
from ifbbench.workload.spec import WorkloadSpec

MANY = 20_000
SPEC = WorkloadSpec("some", 200, LogNormal(100, 150), Uniform(5, 50), Gamma(4.0, 2.0), "factor:1.5")
DISTRIBUTIONS = [
    Fixed(7),
    Normal(50, 20),
    Uniform(3, 900),
    LogNormal(40, 90, 500),
    Geometric(3),
    Quantiles(((0, 1), (50, 20), (100, 300))),
]
TIMES = [FixedTime(2.5), UniformTime(1, 3), ExponentialTime(4), LogNormalTime(2, 5, 60)]
PROCESSES = [AllAtOnce(), Constant(3.0), Poisson(3.0), Gamma(3.0, 4.0)]


def column(trace, field):
    return [getattr(request, field) for request in trace]


def drawn(distribution, count=MANY, seed=1):
    return distribution.draw(generator(seed, Stream.INPUT_LENGTH), count)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@given(seed=st.integers(0, 2**40), count=st.integers(1, 60))
def test_a_longer_series_of_lengths_starts_with_the_shorter(distribution, seed, count):
    longer = drawn(distribution, 60, seed)
    assert drawn(distribution, count, seed).tolist() == longer[:count].tolist()
    assert longer.min() >= 1


@pytest.mark.parametrize("process", PROCESSES)
@given(seed=st.integers(0, 2**40), count=st.integers(1, 60))
def test_a_longer_series_of_arrivals_starts_with_the_shorter(process, seed, count):
    longer = process.draw(generator(seed, Stream.ARRIVAL), 60)
    assert process.draw(generator(seed, Stream.ARRIVAL), count).tolist() == longer[:count].tolist()
    assert longer[0] == 0
    assert (np.diff(longer) >= 0).all()


@pytest.mark.parametrize("times", TIMES)
@given(seed=st.integers(0, 2**40), count=st.integers(1, 60))
def test_a_longer_series_of_times_starts_with_the_shorter(times, seed, count):
    longer = times.draw(generator(seed, Stream.THINK_TIME), 60)
    assert times.draw(generator(seed, Stream.THINK_TIME), count).tolist() == longer[:count].tolist()
    assert longer.min() >= 0


@pytest.mark.parametrize(("times", "mean"), [*zip(TIMES, (2.5, 2, 4, 4.8), strict=True)])
def test_times_have_the_mean_asked_for(times, mean):
    assert times.draw(generator(3, Stream.THINK_TIME), MANY).mean() == pytest.approx(mean, rel=0.05)


def test_geometric_numbers():
    turns = drawn(Geometric(4))
    assert turns.mean() == pytest.approx(4, rel=0.03)
    assert (turns > 1).mean() == pytest.approx(0.75, abs=0.01)
    assert set(drawn(Geometric(1), 5).tolist()) == {1}


def test_normal_lengths():
    lengths = drawn(Normal(200, 20))
    assert lengths.mean() == pytest.approx(200, rel=0.01)
    assert lengths.std() == pytest.approx(20, rel=0.05)


def test_normal_lengths_are_rounded_and_at_least_one():
    assert set(drawn(Normal(7.6, 0), 5)) == {8}
    assert drawn(Normal(2, 10)).min() == 1


@pytest.mark.parametrize("distribution", [Normal(50, -0.0), ExponentialTime(-0.0), UniformTime(-0.0, -0.0)])
def test_a_negative_zero_is_zero(distribution):
    assert len(set(drawn(distribution).tolist())) == 1


def test_uniform_lengths_include_both_ends():
    assert set(drawn(Uniform(3, 6)).tolist()) == {3, 4, 5, 6}


def test_lognormal_has_its_median_and_mean():
    lengths = drawn(LogNormal(6909, 12035))
    assert np.median(lengths) == pytest.approx(6909, rel=0.05)
    assert lengths.mean() == pytest.approx(12035, rel=0.05)
    assert drawn(LogNormal(6909, 12035, 9000)).max() == 9000


def test_quantiles_are_met_with_straight_lines_between():
    lengths = drawn(Quantiles(((0, 100), (50, 200), (90, 1000), (100, 2000))))
    assert np.percentile(lengths, (25, 50, 70, 90, 95)) == pytest.approx([150, 200, 600, 1000, 1500], rel=0.04)
    assert lengths.min() >= 100
    assert lengths.max() <= 2000


@pytest.mark.parametrize(("process", "cv"), [(Constant(5.0), 0), (Poisson(5.0), 1), (Gamma(5.0, 3.0), 3)])
def test_gaps_have_the_rate_and_cv_asked_for(process, cv):
    gaps = np.diff(process.draw(generator(3, Stream.ARRIVAL), MANY))
    assert gaps.mean() == pytest.approx(0.2, rel=0.08)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08, abs=1e-9)


def test_all_at_once():
    assert set(column(draw_trace(replace(SPEC, arrival=AllAtOnce()), 0, ""), "arrival_s")) == {0.0}


STREAM_CHANGES: list[tuple[str, Any, set[str]]] = [
    ("prompt_len", Fixed(3), {"prompt_len"}),
    ("output_len", Fixed(10), {"output_len", "max_new_tokens"}),
    ("arrival", Poisson(1.0), {"arrival_s"}),
    ("reserve", "fixed:60", {"max_new_tokens"}),
]


@pytest.mark.parametrize(("field", "value", "moved"), STREAM_CHANGES)
def test_a_change_of_one_stream_leaves_the_others_alone(field, value, moved):
    before, after = draw_trace(SPEC, 5, ""), draw_trace(replace(SPEC, **{field: value}), 5, "")
    fields = ("request_id", "prompt_len", "output_len", "max_new_tokens", "arrival_s")
    assert {name for name in fields if column(before, name) != column(after, name)} == moved


def test_input_and_output_lengths_are_not_drawn_alike():
    trace = draw_trace(replace(SPEC, prompt_len=Uniform(1, 1000), output_len=Uniform(1, 1000)), 0, "")
    assert abs(np.corrcoef(column(trace, "prompt_len"), column(trace, "output_len"))[0, 1]) < 0.3


def test_first_requests_of_a_longer_workload():
    whole = draw_trace(SPEC, 5, "")
    assert list(draw_trace(SPEC, 5, "", max_num_samples=30)) == list(whole)[:30]
    assert list(draw_trace(replace(SPEC, num_requests=500), 5, ""))[:200] == list(whole)
    assert len(draw_trace(SPEC, 5, "", max_num_samples=900)) == 200


def test_seed_decides():
    assert list(draw_trace(SPEC, 5, "")) == list(draw_trace(SPEC, 5, ""))
    for name in ("prompt_len", "output_len", "arrival_s"):
        assert column(draw_trace(SPEC, 5, ""), name) != column(draw_trace(SPEC, 6, ""), name)


def test_identity_follows_what_is_drawn_not_its_name():
    identity = draw_trace(SPEC, 5, "").sha256
    assert draw_trace(replace(SPEC, name="other"), 5, "elsewhere", 3).sha256 == identity
    others = [replace(SPEC, **{field: value}) for field, value, _ in STREAM_CHANGES]
    assert len({identity, draw_trace(SPEC, 6, "").sha256, *(draw_trace(spec, 5, "").sha256 for spec in others)}) == 6
