"""gptManagerBenchmark's JSON."""

import json

import pytest

from ifbbench.errors import InputError
from ifbbench.workload.reading import read_trace
from ifbbench.workload.trace import TraceRequest


def read(tmp_path, document, **options):
    path = tmp_path / "dataset.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return read_trace(path, **options)


def test_document_with_metadata(tmp_path):
    samples = [{"input_ids": [5, 6], "output_len": 3, "task_id": -1}, {"input_ids": [7], "output_len": 1, "task_id": 4}]
    trace = read(tmp_path, {"metadata": {"workload_type": "x"}, "samples": samples})
    assert list(trace) == [
        TraceRequest(0, 0.0, 2, 3, 3, prompt_tokens=(5, 6)),
        TraceRequest(1, 0.0, 1, 1, 1, prompt_tokens=(7,), lora_task_id=4),
    ]


def test_bare_list_without_task_id(tmp_path):
    (request,) = read(tmp_path, [{"input_ids": [1], "output_len": 2}])
    assert request.lora_task_id is None


def test_delays_add_up(tmp_path):
    sample = {"input_ids": [1], "output_len": 1}
    trace = read(tmp_path, [sample | {"delay": delay} for delay in (0, 0.5, 0.25, 0)])
    assert [request.arrival_s for request in trace] == [0, 0.5, 0.75, 0.75]


def test_delay_of_a_skipped_sample_still_passes(tmp_path):
    samples = [{"input_ids": [1], "output_len": length, "delay": 1} for length in (1, 0, 1)]
    trace = read(tmp_path, samples, skip_bad_rows=True)
    assert [request.arrival_s for request in trace] == [1, 3]
    assert trace.skipped_rows == 1


def test_comments_are_left_out_but_not_in_texts(tmp_path):
    document = """// made by hand
    {"metadata": {"url": "http://host//path \\" // no comment"}, // a comment with "quotes"
     "samples": [{"input_ids": [1], // first
                  "output_len": 2}]}"""
    assert len(read(tmp_path, document)) == 1


@pytest.mark.parametrize(
    ("sample", "complaint"),
    [
        ({"output_len": 1}, "input_ids is missing"),
        ({"input_ids": "abc", "output_len": 1}, "input_ids is 'abc'"),
        ({"input_ids": [1], "output_len": 0}, "output_len is 0"),
        ({"input_ids": [1]}, "output_len is missing"),
        ({"input_ids": [1], "output_len": 1, "delay": -1}, "delay is -1"),
        ({"input_ids": [1], "output_len": 1, "task_id": -2}, "task_id is -2"),
        (17, "17 is not valid; expected a JSON object"),
    ],
)
def test_bad_sample(tmp_path, sample, complaint):
    with pytest.raises(InputError) as raised:
        read(tmp_path, [{"input_ids": [1], "output_len": 1}, sample])
    assert f"dataset.json, samples[1]: {complaint}" in str(raised.value)
