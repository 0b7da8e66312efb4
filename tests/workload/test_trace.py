"""Requests that are made when they are asked for are those that were written, in any order of asking."""

import gc
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ifbbench.errors import InputError
from ifbbench.settings.config import RunConfig
from ifbbench.workload.formats import write_trace
from ifbbench.workload.load import load_trace
from ifbbench.workload.prompts import check_vocabulary
from ifbbench.workload.reading import read_trace
from ifbbench.workload.trace import Reserve, TraceRequest, columns_of

lengths = st.integers(1, 2_000)
numbers_only = st.builds(
    TraceRequest,
    request_id=st.integers(0, 10_000),
    arrival_s=st.sampled_from([0.0, 0.25, 3.0, 7.5]),
    prompt_len=lengths,
    max_new_tokens=lengths,
    output_len=lengths,
)
with_more = st.one_of(
    st.builds(replace, numbers_only, priority=st.floats(0, 1), beam_width=st.integers(1, 4), stop_ids=st.just((3, 4))),
    st.builds(replace, numbers_only, request_class=st.sampled_from(["chat", "code"])),
    st.builds(
        lambda request, tokens: replace(request, prompt_len=len(tokens), prompt_tokens=tuple(tokens)),
        numbers_only,
        st.lists(st.integers(0, 99), min_size=1, max_size=6),
    ),
    st.builds(
        lambda request, lens: replace(
            request, prompt_len=sum(lens) + 1, prefix_ids=tuple(range(len(lens))), prefix_lens=tuple(lens)
        ),
        numbers_only,
        st.lists(st.integers(1, 511), min_size=1, max_size=3),
    ),
)
traces = st.lists(numbers_only | with_more, min_size=1, max_size=10, unique_by=lambda request: request.request_id)


@given(
    requests=traces,
    settings=st.fixed_dictionaries(
        {
            "time_scale": st.sampled_from([1.0, 0.3, 0.0]),
            "reserve": st.sampled_from(["trace", "actual", "factor:1.3"]),
            "max_prompt_len": st.sampled_from([None, 1, 3, 600]),
            "max_num_samples": st.sampled_from([None, 2]),
        }
    ),
    suffix=st.sampled_from(["jsonl", "jsonl.gz"]),
)
def test_a_trace_read_row_by_row_is_the_list_it_was_written_from(tmp_path_factory, requests, settings, suffix):
    path = tmp_path_factory.mktemp("trace") / f"some.{suffix}"
    write_trace(requests, path)
    config = RunConfig(**settings)
    loaded = load_trace(path, config)
    reserve = Reserve(config.reserve)
    expected = [
        replace(
            reserve.apply(request.shortened(config.max_prompt_len or request.prompt_len)),
            arrival_s=request.arrival_s * config.time_scale,
        )
        for request in sorted(requests[: config.max_num_samples], key=lambda request: request.arrival_s)
    ]
    assert list(loaded) == expected
    assert [loaded.requests[index] for index in reversed(range(len(loaded)))] == expected[::-1]
    assert loaded.requests[-1] == expected[-1]
    assert loaded.requests[:3] == expected[:3]
    assert columns_of(loaded.requests).max_beam_width >= max(request.beam_width for request in expected)
    with pytest.raises(IndexError):
        _ = loaded.requests[len(expected)]


@given(traces)
def test_columns_of_a_list_are_the_list(requests):
    columns = columns_of(requests)
    assert list(columns) == requests
    assert columns_of(columns) is columns
    assert columns.max_beam_width == max(request.beam_width for request in requests)
    assert columns.max_token == max((max(request.prompt_tokens or [-1]) for request in requests), default=-1)


@pytest.mark.parametrize("row", [{"prompt_tokens": list(range(500))}, {"prompt_len": 500}])
def test_a_trace_takes_few_bytes_a_request_whatever_its_prompts(tmp_path, row):
    path, count = tmp_path / "long.jsonl", 1_500
    line = json.dumps({"arrival_s": 0.5, **row, "output_len": 7}) + "\n"
    path.write_text(line * count)
    tracemalloc.start()
    try:
        trace = read_trace(path)
        for request in trace:
            assert request.prompt_len == 500
        gc.collect()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 60 * count + 50_000
    assert peak < 300 * count + 100_000


def test_ids_that_come_twice_in_any_order(tmp_path):
    path = tmp_path / "ids.jsonl"
    rows = [{"request_id": number, "arrival_s": 0, "prompt_len": 1, "output_len": 1} for number in (5, 2, 9, 2, 3, 9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match="line 4: request_id is 2, as in line 2; expected each id once"):
        read_trace(path)
    trace = read_trace(path, skip_bad_rows=True)
    assert ([request.request_id for request in trace], trace.skipped_rows) == ([5, 2, 9, 3], 2)


def test_a_file_that_changes_while_it_is_replayed(tmp_path):
    path = tmp_path / "moving.jsonl"
    row = json.dumps({"arrival_s": 0, "prompt_tokens": [1, 2, 3], "output_len": 1}) + "\n"
    path.write_text(row * 3)
    trace = read_trace(path)
    path.write_text("x" * 3 * len(row))
    with pytest.raises(InputError, match=r"moving\.jsonl was changed during the replay"):
        list(trace)


def test_a_vocabulary_is_checked_against_the_tokens_that_are_replayed(tmp_path):
    path = tmp_path / "tokens.jsonl"
    path.write_text(json.dumps({"arrival_s": 0, "prompt_tokens": [1, 2, 30], "output_len": 1}) + "\n")
    check_vocabulary(load_trace(path, RunConfig()), 31)
    with pytest.raises(InputError, match=r"prompt_tokens\[2\] is 30"):
        check_vocabulary(load_trace(path, RunConfig()), 30)
    check_vocabulary(load_trace(path, RunConfig(max_prompt_len=2)), 30)


@given(requests=traces)
def test_columns_know_the_class_of_each_request(requests):
    columns = columns_of(requests).by_arrival()
    assert [columns.class_at(index) for index in range(len(columns))] == [one.request_class for one in columns]
