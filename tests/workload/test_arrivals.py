"""Arrival processes: their rates, their gaps, the settings that choose one, sessions and the duration."""

import json
import logging
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ifbbench.errors import InputError
from ifbbench.settings.config import RunConfig
from ifbbench.workload.arrival_processes import (
    AllAtOnce,
    Constant,
    Gamma,
    OnOff,
    Poisson,
    Ramp,
    Schedule,
    chosen_process,
)
from ifbbench.workload.arrivals import predecessors, session_starts
from ifbbench.workload.distributions import Stream, generator
from ifbbench.workload.draw import draw_trace
from ifbbench.workload.load import load_trace
from ifbbench.workload.spec import parse_spec
from ifbbench.workload.trace import TraceRequest, columns_of

MANY = 40_000
STEPS = ((0.0, 10.0), (20.0, 0.0), (30.0, 40.0))
PROCESSES = [
    Ramp(1.0, 9.0, 10.0),
    Ramp(0.0, 5.0, 3.0),
    Ramp(9.0, 1.0, 10.0, "exponential"),
    Ramp(4.0, 4.0, 1.0, "exponential"),
    OnOff(20.0, 2.0, 3.0),
    OnOff(5.0, 0.3, 0.0, 0.5),
    Schedule(STEPS),
    Schedule(((0.0, 0.0), (2.0, 7.0)), 3.0),
]


def drawn(process, count=MANY, seed=1):
    return process.draw(generator(seed, Stream.ARRIVAL), count)


# Rates and gaps.


@pytest.mark.parametrize("process", PROCESSES)
@given(seed=st.integers(0, 2**40), count=st.integers(0, 60))
def test_a_longer_series_starts_with_the_shorter(process, seed, count):
    longer = drawn(process, 60, seed)
    assert drawn(process, count, seed).tolist() == longer[:count].tolist()
    assert (np.diff(longer) >= 0).all()
    assert np.isfinite(longer).all()


@pytest.mark.parametrize(
    ("process", "mean"),
    [
        (Constant(5.0), 5.0),
        (Poisson(5.0), 5.0),
        (Gamma(5.0, 3.0), 5.0),
        (Gamma(5.0, 0.2), 5.0),
        (OnOff(20.0, 2.0, 3.0), 8.0),
        (OnOff(20.0, 2.0, 3.0, 0.2), 8.0),
        (Ramp(1.0, 5.0, 1.0), 5.0),
        (Schedule(((0.0, 50.0), (1.0, 5.0))), 5.0),
        (Schedule(((0.0, 5.0),), 4.0), 5.0),
    ],
)
def test_the_mean_rate_is_the_rate_asked_for(process, mean):
    times = drawn(process)
    assert (len(times) - 1) / (times[-1] - times[0]) == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize(
    ("process", "expected"),
    [  # requests in [from, to) seconds: the integral of the rate
        (Ramp(0.0, 2000.0, 10.0), {(0, 5): 2500, (5, 10): 7500, (10, 12): 4000}),
        (Ramp(2000.0, 1000.0, 10.0), {(0, 5): 8750, (5, 10): 6250, (10, 12): 2000}),
        (Ramp(100.0, 1600.0, 8.0, "exponential"), {(0, 2): 288.54, (2, 4): 577.08, (6, 8): 2308.3, (8, 9): 1600}),
        (Ramp(1600.0, 100.0, 8.0, "exponential"), {(0, 2): 2308.3, (6, 8): 288.54, (8, 18): 1000}),
        (OnOff(1000.0, 2.0, 3.0), {(0, 2): 2000, (2, 5): 0, (5, 7): 2000, (7, 10): 0, (10, 11): 1000}),
        (Schedule(((0.0, 100.0), (20.0, 0.0), (30.0, 400.0))), {(0, 20): 2000, (20, 30): 0, (30, 40): 4000}),
        (Schedule(((0.0, 0.0), (5.0, 1000.0))), {(0, 5): 0, (5, 10): 5000}),
    ],
)
def test_the_rate_over_time(process, expected):
    times = drawn(process)
    for (start, end), requests in expected.items():
        count = int(((times >= start) & (times < end)).sum())
        assert abs(count - requests) <= 4 * requests**0.5, (start, end)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_the_gamma_distribution(burstiness):
    process = chosen_process(RunConfig(request_rate=8.0, burstiness=burstiness))
    gaps = np.diff(drawn(process))
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    for one in (Schedule(((0.0, 8.0),), burstiness), Ramp(8.0, 8.0, 1.0, burstiness=burstiness)):
        np.testing.assert_allclose(drawn(one, 100), drawn(process, 100), rtol=1e-9)


def test_gaps_of_a_fifth_of_a_millisecond_are_kept():
    times = drawn(chosen_process(RunConfig(request_rate=5_000.0, enable_exp_delays=True)))
    assert np.diff(times).mean() == pytest.approx(0.0002, rel=0.02)
    assert len(set(times.tolist())) == MANY


# Settings.


@pytest.mark.parametrize(
    ("settings", "process"),
    [
        ({}, None),
        ({"arrival": "recorded"}, None),
        ({"arrival": "all_at_once"}, AllAtOnce()),
        ({"request_rate": 3}, Constant(3.0)),
        ({"request_rate": 3, "arrival": "constant"}, Constant(3.0)),
        ({"request_rate": 3, "enable_exp_delays": True}, Poisson(3.0)),
        ({"request_rate": 3, "arrival": "Poisson"}, Poisson(3.0)),
        ({"request_rate": 3, "burstiness": 0.25}, Gamma(3.0, 2.0)),
        ({"request_rate": 3, "arrival": "gamma:0.25"}, Gamma(3.0, 2.0)),
        ({"arrival": "ramp:1:10:60"}, Ramp(1.0, 10.0, 60.0)),
        ({"arrival": "ramp:1:10:60:exponential", "burstiness": 2}, Ramp(1.0, 10.0, 60.0, "exponential", 2.0)),
        ({"arrival": "on-off:20:2:3", "enable_exp_delays": True}, OnOff(20.0, 2.0, 3.0)),
    ],
)
def test_settings_choose_a_process(settings, process):
    assert chosen_process(RunConfig(**settings)) == process


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"enable_exp_delays": True}, ["--enable_exp_delays needs a rate", "--request_rate"]),
        ({"burstiness": 2.0}, ["--burstiness needs a rate"]),
        ({"burstiness": 2.0, "arrival": "recorded"}, ["--burstiness needs a rate"]),
        ({"arrival": "poisson"}, ["--arrival poisson needs a rate"]),
        ({"arrival": "poisson", "rate_schedule": "rates.csv"}, ["--arrival poisson needs --request_rate"]),
        ({"request_rate": 1.0, "rate_schedule": "rates.csv"}, ["--request_rate and --rate_schedule both say"]),
        ({"request_rate": 1.0, "arrival": "ramp:1:2:3"}, ["--request_rate and --arrival ramp both say"]),
        ({"request_rate": 1.0, "arrival": "recorded"}, ["--request_rate and --arrival recorded both say"]),
        ({"rate_schedule": "rates.csv", "arrival": "on_off:1:2:3"}, ["--rate_schedule and --arrival on_off both say"]),
        ({"request_rate": 1.0, "enable_exp_delays": True, "burstiness": 1.0}, ["--enable_exp_delays and --burstiness"]),
        ({"request_rate": 1.0, "arrival": "gamma:2", "burstiness": 1.0}, ["--burstiness and --arrival gamma both say"]),
        ({"request_rate": 1.0, "time_scale": 2.0}, ["--time_scale scales recorded", "--request_rate replaces"]),
        ({"arrival": "all_at_once", "time_scale": 2.0}, ["--time_scale scales", "--arrival all_at_once replaces"]),
        ({"arrival": "sometimes"}, ["--arrival is 'sometimes'", "ramp:FROM:TO:SECONDS"]),
        ({"arrival": "ramp:1:2"}, ["--arrival is 'ramp:1:2'"]),
        ({"arrival": "poisson:1:2"}, ["--arrival is 'poisson:1:2'"]),
        ({"arrival": "ramp:1:two:3"}, ["--arrival ramp:1:two:3", "'two'", "a finite number"]),
        ({"arrival": "ramp:1:0:3"}, ["end is 0.0", "above 0"]),
        ({"arrival": "ramp:0:1:3:exponential"}, ["start is 0", "exponential"]),
        ({"arrival": "ramp:1:2:3:steep"}, ["strategy is 'steep'", "linear, exponential"]),
        ({"arrival": "on_off:0:2:3"}, ["rate is 0.0"]),
        ({"arrival": "gamma:-1", "request_rate": 1.0}, ["burstiness is -1.0"]),
    ],
)
def test_settings_that_contradict_each_other(settings, words):
    with pytest.raises(InputError) as caught:
        chosen_process(RunConfig(**settings))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_rates_from_a_file(tmp_path):
    file = tmp_path / "rates.csv"
    file.write_text("start_s,rate\n0,10\n20, 0\n\n30,40\n")
    assert chosen_process(RunConfig(rate_schedule=str(file))) == Schedule(STEPS)
    assert chosen_process(RunConfig(rate_schedule=str(file), burstiness=0.5)) == Schedule(STEPS, 0.5)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the first line is ''; expected start_s,rate"),
        (b"0,10\n", "expected start_s,rate"),
        (b"start_s,rate\n", "rates is ()"),
        (b"start_s,rate\n0\n", "row 1 is ['0']; expected [start_s, rate]"),
        (b"start_s,rate\n0,1\n5,x\n", "row 2 rate is 'x'"),
        (b"start_s,rate\n0,1\n5,-1\n", "row 2 rate is '-1'"),
        (b"start_s,rate\n0,nan\n", "row 1 rate is 'nan'"),
        (b"start_s,rate\n3,1\n", "starts at 3 s; expected 0"),
        (b"start_s,rate\n0,1\n9,2\n5,2\n", "ascending"),
        (b"start_s,rate\n0,1\n9,0\n", "--duration 9"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_bad_file_of_rates(tmp_path, content, words):
    file = tmp_path / "rates.csv"
    file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        chosen_process(RunConfig(rate_schedule=str(file)))
    assert f"{file}: " in str(caught.value)
    assert words in str(caught.value)


def test_a_file_of_rates_that_does_not_exist(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        chosen_process(RunConfig(rate_schedule=str(tmp_path / "no.csv")))


@pytest.mark.parametrize(
    "arrival",
    [
        {"process": "ramp", "start": 1, "end": 10, "duration": 60},
        {"process": "ramp", "start": 1, "end": 10, "duration": 60, "strategy": "exponential", "burstiness": 2},
        {"process": "on_off", "rate": 10, "on": 1, "off": 2},
        {"process": "schedule", "rates": [[0, 10], [20, 0], [30, 40]]},
    ],
)
def test_a_specification_names_the_same_processes(arrival):
    fixed = {"distribution": "fixed", "value": 5}
    spec = parse_spec({"num_requests": 50, "prompt_len": fixed, "output_len": fixed, "arrival": arrival}, "some")
    times = [request.arrival_s for request in draw_trace(spec, 3, "")]
    assert times == np.round(drawn(spec.arrival, 50, 3), 6).tolist()
    assert json.loads(spec.canonical_text(3))["arrival"]["kind"] == arrival["process"]


# Duration.


@pytest.fixture
def trace(tmp_path):
    """Ten requests, a second apart."""
    rows = [{"request_id": index, "arrival_s": float(index), "prompt_len": 5, "output_len": 5} for index in range(10)]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_no_request_arrives_after_the_duration(trace):
    assert [request.arrival_s for request in load_trace(trace, RunConfig(duration=3.0))] == [0.0, 1.0, 2.0, 3.0]
    assert len(load_trace(trace, RunConfig(duration=3.0, time_scale=0.5))) == 7
    assert len(load_trace(trace, RunConfig(duration=0.5, request_rate=10.0))) == 6
    assert len(load_trace(trace, RunConfig(duration=3.0, concurrency=2))) == 10, "the client ends a closed loop"


def test_a_trace_that_ends_before_the_duration_is_not_repeated(trace, caplog):
    with caplog.at_level(logging.WARNING, "ifbbench"):
        assert len(load_trace(trace, RunConfig(duration=30.0))) == 10
    assert "it is not repeated" in caplog.text


def test_a_duration_without_requests(trace):
    trace.write_text(trace.read_text().split("\n", 1)[1])
    with pytest.raises(InputError, match="no request arrives by then, the first one at 1 s"):
        load_trace(trace, RunConfig(duration=0.5))


# Sessions.


def rows_after(*after):
    return columns_of(
        [TraceRequest(10 + index, float(index), 5, 5, 5, after=one, think_s=2.0) for index, one in enumerate(after)]
    )


def test_the_first_request_of_each_session():
    before = predecessors(rows_after(None, 10, 11, None, 13, 99, 12))
    assert before.tolist() == [-1, 0, 1, -1, 3, -1, 2], "the trace has no request 99"
    assert session_starts(before).tolist() == [0, 0, 0, 3, 3, 5, 0]


@pytest.mark.parametrize("after", [(10,), (11, 10), (None, 12, 13, 11)])
def test_requests_that_wait_for_each_other(after):
    with pytest.raises(InputError, match="in a circle"):
        session_starts(predecessors(rows_after(*after)))


def test_a_rate_is_that_of_sessions(trace):
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    for row in rows:
        if row["request_id"] % 2:
            row |= {"after": row["request_id"] - 1, "think_s": 4.0}
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_trace(trace, RunConfig(request_rate=10.0))
    firsts = [request.arrival_s for request in loaded if request.after is None]
    assert np.diff(firsts).tolist() == pytest.approx([0.1] * 4)
    assert all(request.think_s == 4.0 for request in loaded if request.after is not None)
    assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(loaded))
    scaled = load_trace(trace, RunConfig(time_scale=0.5))
    assert {request.think_s for request in scaled} == {0.0, 2.0}
