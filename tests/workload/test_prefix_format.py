"""Prefix ids in ifbbench's own format: read, written, and cut."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ifbbench.errors import InputError
from ifbbench.settings.config import RunConfig
from ifbbench.workload.formats import write_trace
from ifbbench.workload.load import load_trace
from ifbbench.workload.prompts import MAX_PREFIX_ID, runs_of, with_prefix
from ifbbench.workload.reading import read_trace
from ifbbench.workload.trace import PREFIX_BLOCK, TraceRequest

GOOD = {"arrival_s": 0.5, "prompt_len": 1300, "output_len": 4}

ids = st.integers(0, MAX_PREFIX_ID)
runs = st.lists(st.tuples(ids, st.integers(1, PREFIX_BLOCK) | st.just(PREFIX_BLOCK)), min_size=1, max_size=6)


@st.composite
def requests(draw):
    named, own = draw(runs), draw(st.integers(0, 700))
    plain = TraceRequest(0, 0.0, sum(length for _, length in named) + own, 1, 1)
    return with_prefix(plain, named), named


def written(tmp_path, *rows):
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prefix_ids": [7, 8, 9]}, [(7, 512), (8, 512), (9, 276)]),
        ({"prefix_ids": [7, 7]}, [(7, 512), (7, 512)]),
        ({"prefix_ids": [7, 8], "prefix_lens": [3, 512]}, [(7, 3), (8, 512)]),
        ({"prefix_ids": None, "prefix_lens": None}, []),
    ],
)
def test_which_tokens_ids_name(tmp_path, fields, expected):
    (request,) = read_trace(written(tmp_path, GOOD | fields))
    assert request.prefix_runs() == expected
    assert request.prompt_len == 1300


@given(requests())
def test_runs_are_kept(drawn):
    request, named = drawn
    assert request.prefix_runs() == named


@given(requests())
def test_what_is_written_is_read_back(tmp_path_factory, drawn):
    path = tmp_path_factory.mktemp("round") / "trip.jsonl"
    write_trace([drawn[0]], path)
    assert list(read_trace(path)) == [drawn[0]]


@given(requests(), st.integers(1, 3000))
def test_a_shortened_prompt_keeps_its_first_tokens(drawn, longest):
    request, named = drawn

    def tokens(runs):
        return [(prefix_id, offset) for prefix_id, length in runs for offset in range(length)]

    cut = request.shortened(longest)
    assert cut.prompt_len == min(request.prompt_len, longest)
    assert tokens(cut.prefix_runs()) == tokens(named)[:longest]


def test_runs_of_a_text():
    assert runs_of([5, 6, 7], 1100) == [(5, 512), (6, 512), (7, 76)]
    assert runs_of([5, 6], 1024) == [(5, 512), (6, 512)]
    assert runs_of([5], 1) == [(5, 1)]


def test_max_prompt_len(tmp_path):
    path = written(tmp_path, GOOD | {"prefix_ids": [7, 8, 9]})
    (request,) = load_trace(path, RunConfig(max_prompt_len=600))
    assert request.prefix_runs() == [(7, 512), (8, 88)]
    write_trace([request], tmp_path / "again.jsonl")
    assert list(read_trace(tmp_path / "again.jsonl")) == [request]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prefix_ids": []}, "prefix_ids is []; expected a list of at least one prefix id"),
        ({"prefix_ids": 3}, "prefix_ids is 3"),
        ({"prefix_ids": [1, -1]}, "prefix_ids[1] is -1; expected an integer from 0 to"),
        ({"prefix_ids": [MAX_PREFIX_ID + 1]}, f"prefix_ids[0] is {MAX_PREFIX_ID + 1}"),
        ({"prefix_ids": [1, True]}, "prefix_ids[1] is True"),
        ({"prefix_ids": [1, 2, 3, 4]}, "prefix_ids has 4 ids; expected at most 3 for a prompt of 1300 tokens"),
        ({"prompt_len": None, "prompt_tokens": [1], "prefix_ids": [1]}, "prefix_ids is given beside prompt_tokens"),
        ({"prefix_lens": [1]}, "prefix_lens is given without prefix_ids"),
        ({"prefix_ids": [1, 2], "prefix_lens": [1]}, "prefix_lens has 1 numbers; expected 2"),
        ({"prefix_ids": [1, 2], "prefix_lens": [0, 1]}, "prefix_lens[0] is 0; expected an integer from 1 to 512"),
        ({"prefix_ids": [1, 2], "prefix_lens": [513, 1]}, "prefix_lens[0] is 513"),
        ({"prefix_ids": [1, 2, 3], "prefix_lens": [512] * 3}, "prefix_lens adds up to 1536; expected at most"),
    ],
)
def test_bad_row_is_named_with_line_and_field(tmp_path, fields, complaint):
    path = written(tmp_path, GOOD, GOOD | fields)
    with pytest.raises(InputError) as raised:
        read_trace(path)
    assert str(raised.value).startswith(f"{path}, line 2: {complaint}")
    assert read_trace(path, skip_bad_rows=True).skipped_rows == 1
