"""Histograms of lengths: from files, and measured."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ifbbench.errors import InputError
from ifbbench.workload.distributions import Histogram, Stream, generator
from ifbbench.workload.histograms import measured, read_histograms

BOTH = {"prompt_len": Histogram((1, 11, 21, 31), (5, 0, 2)), "output_len": Histogram((1, 11, 21, 31), (1, 0, 1.5))}


def test_csv(tmp_path):
    path = tmp_path / "h.csv"
    path.write_text("max,min,prompts,outputs,note\n10,1,5,1,short\n30,21,2,1.5,long\n")
    assert read_histograms(path) == BOTH


def test_json(tmp_path):
    path = tmp_path / "h.json"
    as_json = {name: {"edges": one.edges, "counts": one.counts} for name, one in BOTH.items()}
    path.write_text(json.dumps(as_json))
    assert read_histograms(path) == BOTH
    printed = {"prompt_tokens": "prompt_len", "output_tokens": "output_len"}  # as `dataset info --json` names them
    path.write_text(json.dumps({new: {"mean": 3, "histogram": as_json[old]} for new, old in printed.items()}))
    assert read_histograms(path) == BOTH


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("h.csv", "min,max,prompts\n1,2,3\n", "the header has no key 'outputs'"),
        ("h.csv", "", "the header has no key 'min'"),
        ("h.csv", "min,max,prompts,outputs\n", "there is no row"),
        ("h.csv", "min,max,prompts,outputs\n5,4,1,1\n", "line 2: max is '4'; expected an integer from 5"),
        ("h.csv", "min,max,prompts,outputs\n1,4,1,1\n4,9,1,1\n", "line 3: min is 4; expected more than the max"),
        ("h.csv", "min,max,prompts,outputs\n1,4,-1,1\n", "line 2: prompts is '-1'"),
        ("h.csv", "min,max,prompts,outputs\n1,4,0,1\n", "prompt_len: counts are all 0"),
        ("h.csv", "min,max,prompts,outputs\n1\n", "line 2: max is missing"),
        ("h.json", "[1]", "the histogram file is [1]; expected keys and values"),
        ("h.json", "{", "not a text file of such values"),
        ("h.json", "{}", "prompt_len is missing; expected keys and values"),
        ("h.json", '{"prompt_len": {"edges": [1, 2]}}', "prompt_len has no key 'counts'"),
        ("h.json", '{"prompt_len": {"edges": [2, 1], "counts": [1]}}', "prompt_len: edges are not ascending"),
        ("h.json", '{"prompt_len": {"edges": 3, "counts": [1]}}', "prompt_len: edges is 3; expected a list"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, name, content, complaint):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(InputError) as raised:
        read_histograms(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    assert complaint in message
    assert "Expected a .csv file with the columns" in message


def test_binary_and_missing_files(tmp_path):
    (tmp_path / "h.csv").write_bytes(b"\xff\x00")
    with pytest.raises(InputError, match="not a text file of such values"):
        read_histograms(tmp_path / "h.csv")
    with pytest.raises(InputError, match="cannot be read"):
        read_histograms(tmp_path / "no.csv")


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=80))
def test_what_is_drawn_lies_where_it_was_measured(lengths):
    drawn = measured(lengths, 200).draw(generator(0, Stream.INPUT_LENGTH), 200)
    assert min(lengths) <= drawn.min() <= drawn.max() <= max(lengths)


def test_a_measured_histogram_keeps_quantiles_and_mean():
    lengths = np.rint(np.random.default_rng(0).lognormal(5, 1.2, 20_000)).astype(int) + 1
    drawn = measured(lengths.tolist(), 200).draw(generator(0, Stream.INPUT_LENGTH), 20_000)
    assert drawn.mean() == pytest.approx(lengths.mean(), rel=0.04)
    marks = (10, 50, 90, 99)
    assert np.percentile(drawn, marks) == pytest.approx(np.percentile(lengths, marks), rel=0.07)
