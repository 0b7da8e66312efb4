"""ifbbench's own format: valid rows, bad rows, and writing."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ifbbench.errors import InputError
from ifbbench.workload.formats import write_trace
from ifbbench.workload.reading import read_trace
from ifbbench.workload.trace import EPOCH_S, MAX_ID, MAX_LENGTH, TraceRequest

GOOD = {"arrival_s": 0.5, "prompt_len": 7, "max_new_tokens": 9, "output_len": 4}


def written(tmp_path, *rows):
    path = tmp_path / "some.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_minimal_row_gets_defaults(tmp_path):
    trace = read_trace(written(tmp_path, GOOD, {"arrival_s": 1, "prompt_tokens": [3, 1], "output_len": 2}))
    assert trace.requests[0] == TraceRequest(0, 0.5, 7, 9, 4)
    assert trace.requests[1] == TraceRequest(1, 1.0, 2, 2, 2, prompt_tokens=(3, 1))


def test_output_len_defaults_to_the_reservation(tmp_path):
    (request,) = read_trace(written(tmp_path, {"arrival_s": 0, "prompt_len": 1, "max_new_tokens": 6}))
    assert (request.max_new_tokens, request.output_len) == (6, 6)


def test_unknown_keys_blank_lines_and_nulls_are_tolerated(tmp_path):
    row = GOOD | {"colour": "green", "lora_task_id": None, "prompt_tokens": None}
    assert len(read_trace(written(tmp_path, "", row, "  "))) == 1


def test_rows_come_out_by_arrival_and_stably(tmp_path):
    arrivals = [3.0, 1.0, 3.0, 0.0, 1.0]
    trace = read_trace(written(tmp_path, *(GOOD | {"arrival_s": arrival} for arrival in arrivals)))
    assert [request.request_id for request in trace] == [3, 1, 4, 0, 2]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"arrival_s": -0.1}, "arrival_s is -0.1"),
        ({"arrival_s": float("nan")}, "arrival_s is nan"),
        ({"arrival_s": float("inf")}, "arrival_s is inf"),
        ({"arrival_s": 10**400}, "arrival_s is 1000"),
        ({"arrival_s": "soon"}, "arrival_s is 'soon'"),
        ({"arrival_s": True}, "arrival_s is True"),
        ({"arrival_s": None}, "arrival_s is missing"),
        ({"prompt_len": 0}, "prompt_len is 0"),
        ({"prompt_len": 2.5}, "prompt_len is 2.5"),
        ({"prompt_len": "7"}, "prompt_len is '7'"),
        ({"prompt_len": True}, "prompt_len is True"),
        ({"prompt_len": 2**31}, "prompt_len is 2147483648"),
        ({"prompt_len": None}, "prompt_len is missing"),
        ({"prompt_tokens": []}, "prompt_tokens is []"),
        ({"prompt_tokens": [1, -1]}, "prompt_tokens[1] is -1"),
        ({"prompt_tokens": [1, 2.0]}, "prompt_tokens[1] is 2.0"),
        ({"prompt_tokens": [1, 2]}, "prompt_len is 7; expected 2, the number of prompt_tokens"),
        ({"output_len": 0}, "output_len is 0"),
        ({"max_new_tokens": -3}, "max_new_tokens is -3"),
        ({"output_len": None, "max_new_tokens": None}, "output_len is missing"),
        ({"request_id": -1}, "request_id is -1"),
        ({"request_id": 0}, "request_id is 0, as in line 1"),
        ({"priority": 1.5}, "priority is 1.5"),
        ({"beam_width": 0}, "beam_width is 0"),
        ({"lora_task_id": "x"}, "lora_task_id is 'x'"),
        ({"stop_ids": [7, -1]}, "stop_ids[1] is -1"),
        ({"after": -1}, "after is -1"),
        ({"after": 0, "think_s": -0.5}, "think_s is -0.5"),
    ],
)
def test_bad_row_is_named_with_line_and_field(tmp_path, change, complaint):
    path = written(tmp_path, GOOD, GOOD | change)
    with pytest.raises(InputError) as raised:
        read_trace(path)
    message = str(raised.value)
    assert message.startswith(f"{path}, line 2: {complaint}")
    assert "--skip-bad-rows" in message
    trace = read_trace(path, skip_bad_rows=True)
    assert (len(trace), trace.skipped_rows) == (1, 1)


@pytest.mark.parametrize(("line", "complaint"), [("{oops", "not valid JSON"), ("[1]", "[1] is not valid; expected")])
@pytest.mark.parametrize("lines_before", [0, 1])
def test_line_that_is_no_object(tmp_path, line, complaint, lines_before):
    path = written(tmp_path, *[GOOD] * lines_before, line, GOOD)
    if line.startswith("[") and not lines_before:
        pytest.skip("a file that starts with a list is a JSON document")
    with pytest.raises(InputError) as raised:
        read_trace(path)
    assert f"line {lines_before + 1}: {complaint}" in str(raised.value)


lengths = st.integers(1, MAX_LENGTH)
requests_of_lengths = st.builds(
    TraceRequest,
    request_id=st.integers(0, MAX_ID),
    arrival_s=st.floats(0, EPOCH_S, exclude_max=True),
    prompt_len=lengths,
    max_new_tokens=lengths,
    output_len=lengths,
    priority=st.floats(0, 1),
    beam_width=st.integers(1, 8),
    lora_task_id=st.none() | st.integers(0, MAX_ID),
    stop_ids=st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple),
    request_class=st.none() | st.sampled_from(["chat", "code"]),
    after=st.none() | st.integers(0, 2**63 - 1),
    think_s=st.floats(0, allow_infinity=False, allow_nan=False),
)
requests_of_tokens = st.lists(st.integers(0, MAX_LENGTH), min_size=1, max_size=5).map(
    lambda tokens: TraceRequest(0, 0.0, len(tokens), 1, 1, prompt_tokens=tuple(tokens))
)
# Only a request that comes after another has a time to think.
requests = requests_of_tokens | requests_of_lengths.map(
    lambda request: request if request.after is not None else replace(request, think_s=0.0)
)


@given(st.lists(requests, min_size=1, max_size=8, unique_by=lambda request: request.request_id))
def test_what_is_written_is_read_back(tmp_path_factory, drawn):
    drawn.sort(key=lambda request: request.arrival_s)
    path = tmp_path_factory.mktemp("round") / "trip.jsonl"
    write_trace(drawn, path)
    assert list(read_trace(path)) == drawn


def test_writing_to_an_open_file_gives_the_same_text(tmp_path):
    drawn = [TraceRequest(0, 0.1, 5, 6, 7)]
    file = io.StringIO()
    write_trace(drawn, file)
    write_trace(drawn, tmp_path / "new" / "folder.jsonl")
    assert (tmp_path / "new" / "folder.jsonl").read_text() == file.getvalue()
    assert file.getvalue() == '{"request_id":0,"arrival_s":0.1,"prompt_len":5,"max_new_tokens":6,"output_len":7}\n'


def test_existing_file_is_replaced_only_when_told(tmp_path):
    path = written(tmp_path, GOOD)
    before = path.read_text()
    with pytest.raises(InputError, match=r"already exists.*--overwrite"):
        write_trace([], path)
    assert path.read_text() == before
    write_trace([], path, overwrite=True)
    assert path.read_text() == ""


def test_path_that_cannot_be_written(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        write_trace([], tmp_path, overwrite=True)
