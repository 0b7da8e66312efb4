"""Recognising a trace file, and what holds for every format."""

import hashlib
import json
import tracemalloc

import pytest

from ifbbench.errors import InputError
from ifbbench.workload.formats import write_trace
from ifbbench.workload.load import bundled_path
from ifbbench.workload.reading import read_trace

ROW = '{"arrival_s": 0, "prompt_len": 1, "output_len": 1}\n'
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"

NOT_THERE_THEN = (
    ", after=None, think_s=0.0, added_in=None, added_with=0, stopped_in=None, also_after=(), has_next_turn=False"
    ", session_id=None"
)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        (
            "a.jsonl",
            '{"timestamp": 0, "input_length": 3}',
            "unknown trace format "
            "(rows with input_length, timestamp). The nearest format is mooncake; missing: output_length.",
        ),
        ("a.csv", "a,b\n1,2\n", "unknown trace format (rows with a, b)"),
        ("a.json", '{"rows": []}', "unknown trace format (rows with rows). Known formats: ifbbench, "),
        ("a.json", '{\n"rows": []}', "unknown trace format (an object with rows)"),
        (
            "a.json",
            '[{"conversations": []}]',
            "holds no request: conversations without an answer are left out, and all 1 are such.",
        ),
        ("a.json", '{"samples": 3}', "unknown trace format (no list of samples)"),
        ("a.json", "{\n\n!}", "unknown trace format (not valid JSON: Expecting property name enclosed"),
        ("a.jsonl", "", "holds no request: it has no rows."),
        ("a.jsonl", "\n\n", "holds no request: it has no rows."),
        ("a.csv", "", "holds no request: it has no rows."),
        ("a.csv", AZURE_HEADER, "holds no request: it has no rows."),
        ("a.json", '{"samples": []}', "holds no request: it has no rows."),
        ("a.json", "", "holds no request: it has no rows."),
    ],
)
def test_file_that_is_no_trace(tmp_path, name, content, complaint):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(InputError) as raised:
        read_trace(path)
    assert str(path) in str(raised.value)
    assert complaint in str(raised.value)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_binary_file(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"\x80\x04\xff\x00\xfe")
    with pytest.raises(InputError, match="not a text file in UTF-8"):
        read_trace(path)


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match=r"gone\.jsonl cannot be read: No such file"):
        read_trace(tmp_path / "gone.jsonl")


def test_all_rows_bad(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"arrival_s": -1}\n' * 3)
    with pytest.raises(InputError, match=r"all 3 rows are bad; the first: .*line 1: arrival_s"):
        read_trace(path, skip_bad_rows=True)


def test_reading_stops_at_the_last_row_needed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(ROW * 3 + "garbage\n" + ROW * 2)
    assert len(read_trace(path, max_num_samples=3)) == 3
    with pytest.raises(InputError, match="line 4"):
        read_trace(path, max_num_samples=4)
    trace = read_trace(path, max_num_samples=4, skip_bad_rows=True)
    assert [request.request_id for request in trace] == [0, 1, 2, 4]


def test_identity_is_of_the_whole_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(ROW * 3)
    trace = read_trace(path, max_num_samples=1)
    assert trace.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (trace.name, trace.source) == ("a", str(path))


def test_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(ROW, encoding="utf-8-sig")
    assert len(read_trace(path)) == 1


def test_first_row_without_arrival_is_a_bad_row_not_another_format(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt_len": 1}) + "\n" + ROW)
    with pytest.raises(InputError, match="line 1: arrival_s is missing"):
        read_trace(path)


TEXT = {"prompt": "x" * 5_000, "output_tokens": 3}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("texts.jsonl", (json.dumps(TEXT) + "\n") * 3_000),
        ("texts.json", json.dumps([TEXT] * 3_000)),
        ("long.csv", "prompt_len,output_len,other\n" + f"1,2,{'x' * 5_000}\n" * 3_000),
    ],
)
def test_a_file_is_streamed(tmp_path, name, content):
    """Reading and writing 15 MB takes memory for the numbers of the requests only."""
    (tmp_path / name).write_text(content)
    assert len(content) > 15_000_000
    tracemalloc.start()
    try:
        write_trace(read_trace(tmp_path / name), tmp_path / "copy.jsonl")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3_000_000
    assert len(read_trace(tmp_path / "copy.jsonl")) == 3_000


@pytest.mark.parametrize(
    ("name", "requests", "columns", "all_fields"),
    [
        ("traces/azure_conv_2023.csv", 19_366, "6d5d25058fa060ee", "bfbef0a3946170fe"),
        ("traces/mooncake_synthetic.jsonl", 3_993, "6e1a6413d168cb73", "742207df2c07a69a"),
        (None, 96, "0ec4940a7d6d5844", "fcdd728d06788766"),
    ],
)
def test_requests_of_recorded_traces_do_not_change(shared_dir, name, requests, columns, all_fields):
    """Digests of the requests as they were read before other formats were."""
    path = shared_dir / name if name else bundled_path("default")
    assert path is not None
    trace = read_trace(path)
    assert len(trace) == requests
    numbers, fields = hashlib.sha256(), hashlib.sha256()
    for column in ("request_id", "arrival_s", "prompt_len", "max_new_tokens", "output_len"):
        numbers.update(getattr(trace.requests, column).tobytes())
    for request in trace:
        # Of the fields that there were then.
        fields.update(repr(request).replace(NOT_THERE_THEN, "").encode())
    assert numbers.hexdigest()[:16] == columns
    assert fields.hexdigest()[:16] == all_fields
