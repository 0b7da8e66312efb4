"""Mooncake's JSONL files."""

import json

import pytest

from ifbbench.errors import InputError
from ifbbench.workload.reading import read_trace
from ifbbench.workload.statistics import trace_statistics

GOOD = {"timestamp": 500, "input_length": 1100, "output_length": 6, "hash_ids": [0, 1, 2]}


def read(tmp_path, *rows, **options):
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_trace(path, **options)


def test_row(tmp_path):
    (request,) = read(tmp_path, GOOD)
    assert (request.request_id, request.arrival_s, request.prompt_len) == (0, 0.0, 1100)
    assert (request.max_new_tokens, request.output_len) == (6, 6)
    assert request.prefix_runs() == [(0, 512), (1, 512), (2, 76)]


def test_arrivals_count_from_the_first_row(tmp_path):
    trace = read(tmp_path, *(GOOD | {"timestamp": time_ms} for time_ms in (500, 1777, 700)))
    assert [request.arrival_s for request in trace] == [0, 0.2, 1.277]
    assert [request.request_id for request in trace] == [0, 2, 1]


def test_rows_with_arrivals_are_ifbbench_rows(tmp_path):
    (request,) = read(tmp_path, GOOD | {"arrival_s": 3, "prompt_len": 5, "output_len": 1})
    assert (request.arrival_s, request.prompt_len) == (3, 5)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"timestamp": None}, "timestamp is missing"),
        ({"timestamp": "now"}, "timestamp is 'now'"),
        ({"input_length": 0}, "input_length is 0"),
        ({"output_length": 1.5}, "output_length is 1.5"),
        ({"hash_ids": None}, "hash_ids is missing"),
        ({"hash_ids": [0, "a", 2]}, "hash_ids[1] is 'a'; expected an integer"),
        ({"hash_ids": [0, 1]}, "hash_ids has 2 ids; expected 3 for an input_length of 1100"),
        ({"input_length": 1024}, "hash_ids has 3 ids; expected 2 for an input_length of 1024"),
    ],
)
def test_bad_row(tmp_path, change, complaint):
    with pytest.raises(InputError) as raised:
        read(tmp_path, GOOD, GOOD | change)
    assert f"mooncake.jsonl, line 2: {complaint}" in str(raised.value)
    assert read(tmp_path, GOOD, GOOD | change, skip_bad_rows=True).skipped_rows == 1


def test_recorded_trace_has_its_published_figures(shared_dir):
    statistics = trace_statistics(read_trace(shared_dir / "traces" / "mooncake_synthetic.jsonl"))
    assert statistics.requests == 3_993
    assert statistics.span_s == pytest.approx(1_022, abs=0.5)
    assert statistics.request_rate_per_s == pytest.approx(3.91, abs=0.005)
    assert statistics.gap_cv == pytest.approx(1.01, abs=0.005)
    prompt, output = statistics.prompt_tokens, statistics.output_tokens
    assert [prompt.mean, prompt.p50, round(prompt.p99)] == pytest.approx([15_326, 11_587, 66_456], abs=1)
    assert [round(output.mean), output.p50, round(output.p99)] == [149, 69, 768]
    assert prompt.total == 61_194_628
    assert statistics.seen_before_share == pytest.approx(0.651, abs=0.0005)
