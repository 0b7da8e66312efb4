"""What a user names, and the settings that change what is replayed."""

import json

import numpy as np
import pytest

from ifbbench.errors import InputError
from ifbbench.settings.config import RunConfig
from ifbbench.workload.formats import write_trace
from ifbbench.workload.load import bundled_names, load_trace
from ifbbench.workload.reading import read_trace
from ifbbench.workload.trace import Reserve, TraceRequest

REQUESTS = [
    TraceRequest(10, 1.0, 4, 30, 10, prompt_tokens=(1, 2, 3, 4)),
    TraceRequest(11, 2.5, 900, 20, 20),
    TraceRequest(12, 4.0, 2, 5, 1),
]


@pytest.fixture
def path(tmp_path):
    target = tmp_path / "mine.jsonl"
    write_trace(REQUESTS, target)
    return target


def column(trace, field):
    return [getattr(request, field) for request in trace]


def test_without_settings_the_trace_is_as_recorded(path):
    trace = load_trace(path, RunConfig())
    assert list(trace) == REQUESTS
    assert list(load_trace(str(path), RunConfig())) == REQUESTS


def test_default_is_small_enough_for_a_first_run():
    trace = load_trace(None, RunConfig())
    assert trace.name == "default"
    assert 48 <= len(trace) <= 128
    assert sum(column(trace, "output_len")) < 12_000
    assert max(column(trace, "prompt_len")) <= 400
    assert trace.requests[-1].arrival_s < 8
    assert sum(request.max_new_tokens > request.output_len for request in trace) > len(trace) / 2


@pytest.mark.parametrize("name", bundled_names())
def test_every_bundled_workload_loads_by_name(name):
    assert len(load_trace(name, RunConfig(max_num_samples=5))) == 5


def test_bundled_names_and_file_names():
    assert {"chat", "code", "default", "long-context"} <= set(bundled_names())
    assert list(load_trace("chat.yaml", RunConfig())) == list(load_trace("chat", RunConfig()))


def test_specification_is_drawn_with_the_seed_of_the_run():
    first, second = (load_trace("chat", RunConfig(seed=seed, max_num_samples=9)) for seed in (0, 1))
    assert column(first, "prompt_len") != column(second, "prompt_len")


def test_run_directory_is_replayed(path, tmp_path):
    path.rename(tmp_path / "trace.jsonl")
    assert list(load_trace(tmp_path, RunConfig())) == REQUESTS


@pytest.mark.parametrize(("name", "complaint"), [("", "is a directory without trace.jsonl"), ("no", "does not exist")])
def test_nothing_to_load(tmp_path, name, complaint):
    with pytest.raises(InputError, match=complaint) as raised:
        load_trace(tmp_path / name, RunConfig())
    assert "bundled datasets agent, batch-offline, chat, code" in str(raised.value)


def test_max_num_samples_and_skip_bad_rows_reach_the_reader(path):
    path.write_text("{}\n" + path.read_text())
    trace = load_trace(path, RunConfig(max_num_samples=2, skip_bad_rows=True))
    assert (column(trace, "request_id"), trace.skipped_rows) == ([10, 11], 1)


def test_max_prompt_len_keeps_the_first_tokens(path):
    trace = load_trace(path, RunConfig(max_prompt_len=3))
    assert column(trace, "prompt_len") == [3, 3, 2]
    assert trace.requests[0].prompt_tokens == (1, 2, 3)
    assert trace.requests[1].prompt_tokens is None


@pytest.mark.parametrize(
    ("reserve", "reserved", "outputs"),
    [
        ("trace", [30, 20, 5], [10, 20, 1]),
        ("actual", [10, 20, 1], [10, 20, 1]),
        ("factor:1.1", [11, 22, 2], [10, 20, 1]),
        ("factor:0.01", [1, 1, 1], [1, 1, 1]),
        ("fixed:12", [12, 12, 12], [10, 12, 1]),
    ],
)
def test_reserve(path, reserve, reserved, outputs):
    trace = load_trace(path, RunConfig(reserve=reserve))
    assert column(trace, "max_new_tokens") == reserved
    assert column(trace, "output_len") == outputs


@pytest.mark.parametrize(
    "text",
    [
        "",
        "all",
        "trace:1",
        "actual:",
        "factor",
        "factor:",
        "factor:0",
        "factor:-1",
        "factor:nan",
        "factor:inf",
        "factor:1/0",
        "fixed:0",
        "fixed:1.5",
        "fixed:x",
        "fixed:9999999999",
    ],
)
def test_reserve_that_is_none(text):
    with pytest.raises(InputError, match="expected trace, actual, factor:F"):
        Reserve(text)


@pytest.mark.parametrize(("scale", "expected"), [(1, [1, 2.5, 4]), (0.5, [0.5, 1.25, 2]), (0, [0, 0, 0])])
def test_time_scale(path, scale, expected):
    assert column(load_trace(path, RunConfig(time_scale=scale)), "arrival_s") == expected


def test_request_rate_replaces_arrivals_in_their_order(path):
    trace = load_trace(path, RunConfig(request_rate=4))
    assert column(trace, "arrival_s") == [0, 0.25, 0.5]
    assert column(trace, "request_id") == [10, 11, 12]


def test_exponential_gaps_follow_the_seed():
    def arrivals(seed):
        config = RunConfig(request_rate=20, enable_exp_delays=True, seed=seed)
        return column(load_trace("chat", config), "arrival_s")

    gaps = np.diff(arrivals(7))
    assert arrivals(7) == arrivals(7) != arrivals(8)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.15)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.15)


def test_new_arrivals_leave_the_lengths_alone():
    recorded, replaced = (load_trace("chat", RunConfig(request_rate=rate)) for rate in (None, 5))
    assert column(recorded, "prompt_len") == column(replaced, "prompt_len")
    assert column(recorded, "output_len") == column(replaced, "output_len")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"request_rate": 2, "time_scale": 0.5}, "--request_rate replaces"),
        ({"enable_exp_delays": True}, "--enable_exp_delays needs a rate"),
        ({"time_scale": float("inf")}, "--time_scale is inf"),
        ({"request_rate": float("inf")}, "--request_rate is inf"),
    ],
)
def test_settings_that_contradict_each_other(path, settings, complaint):
    with pytest.raises(InputError, match=complaint):
        load_trace(path, RunConfig(**settings))


def test_replayed_requests_written_and_read_again_are_the_same(path, tmp_path):
    trace = load_trace(path, RunConfig(time_scale=0.3, reserve="factor:1.7", max_prompt_len=3))
    write_trace(trace, tmp_path / "again.jsonl")
    assert list(read_trace(tmp_path / "again.jsonl")) == list(trace)
    assert json.loads((tmp_path / "again.jsonl").read_text().splitlines()[0])["prompt_tokens"] == [1, 2, 3]


def test_requests_at_the_start_are_left_out(path):
    trace = load_trace(path, RunConfig(skip_samples=1, max_num_samples=1, time_scale=2.0))
    assert column(trace, "request_id") == [11]
    assert column(load_trace(path, RunConfig(skip_samples=1)), "arrival_s") == [0.0, 1.5]
    assert list(load_trace(read_trace(path), RunConfig(skip_samples=1, max_num_samples=1))) == list(
        load_trace(path, RunConfig(skip_samples=1, max_num_samples=1))
    )
    with pytest.raises(InputError, match="--skip_samples 3: no request is left, the trace has 3"):
        load_trace(path, RunConfig(skip_samples=3))
