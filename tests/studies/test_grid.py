"""The points of a sweep: values and ranges of `--over`, grids, pairs and labels."""

import re

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.studies.grid import grid, parse_axes, parse_axis, point_label


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("max_batch_size=8,16", ("max_batch_size", [8, 16])),
        ("max-batch-size = 8, 16", ("max_batch_size", [8, 16])),
        ("scheduler_policy=max_utilization", ("policy", ["max_utilization"])),
        ("enable_chunked_context=true,false", ("enable_chunked_context", [True, False])),
        ("time_scale=0,0.5", ("time_scale", [0.0, 0.5])),
        ("max_num_tokens=512..4096:x2", ("max_num_tokens", [512, 1024, 2048, 4096])),
        ("max_num_tokens=512..5000:x2,300", ("max_num_tokens", [512, 1024, 2048, 4096, 300])),
        ("max_batch_size=8..32:+8", ("max_batch_size", [8, 16, 24, 32])),
        ("tp_size=1..4", ("tp_size", [1, 2, 3, 4])),
        ("request_rate=0.1..0.5:+0.1", ("request_rate", [0.1, 0.2, 0.3, 0.4, 0.5])),
        ("request_rate=1..3:*1.5", ("request_rate", [1.0, 1.5, 2.25])),
        ("slo=ttft=1s,tpot=50ms;ttft=2s", ("slo", ["ttft=1s,tpot=50ms", "ttft=2s"])),
        ("trace=a.csv,../b.csv", ("trace", ["a.csv", "../b.csv"])),
    ],
)
def test_an_axis(text, axis):
    assert parse_axis(text) == axis


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_batch_size", "KEY=V1,V2"),
        ("=8", "KEY=V1,V2"),
        ("max_batch_size=", "KEY=V1,V2"),
        ("max_batch_size=8,,16", "a value is empty"),
        ("max_batch_size=8,08", "08 is there twice"),
        ("max_batch_size=8,0", "at least 1"),
        ("policy=max_utilization,best", "'best'"),
        ("enable_chunked_context=perhaps", "true or false"),
        ("batch_size=8", "max_batch_size"),
        ("output=a,b", "output says where results go"),
        ("max_btch_size=8", "Did you mean max_batch_size"),
        ("traces=a", "Did you mean trace"),
        ("n_batch=8", "Did you mean max_num_tokens?"),
        ("max_batch_size=64..8:x2", "ends before it begins"),
        ("max_batch_size=8..64:x1", "a factor above 1"),
        ("request_rate=0..64:x2", "a first value above 0"),
        ("max_batch_size=8..64:+0", "a step above 0"),
        ("max_batch_size=8..64:2", "is not a range; expected FIRST..LAST:xFACTOR or FIRST..LAST:+STEP"),
        ("max_batch_size=8..x:+1", "is not a range"),
        ("max_batch_size=1..9999999", "has over 100,000 values"),
        ("max_batch_size=1..4:+0.5", "expected an integer"),
        ("max_batch_size=8..32:+8,16", "16 is there twice"),
    ],
)
def test_a_bad_axis_names_what_was_expected(text, words):
    with pytest.raises(InputError) as error:
        parse_axis(text)
    assert words in str(error.value)


def test_a_setting_has_one_axis():
    with pytest.raises(InputError, match="--over policy is given 2 times"):
        parse_axes(["policy=max_utilization", "scheduler_policy=guaranteed_no_evict"])


def test_a_sweep_needs_an_axis():
    done = CliRunner().invoke(main, ["sweep"])
    assert done.exit_code == 2
    assert "--over: what is swept is missing" in done.output


def test_several_axes_make_a_grid():
    points = grid({"seed": [1, 2], "time_scale": [0.0, 1.0]})
    assert [tuple(point.values()) for point in points] == [(1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0)]


def test_labels_are_file_names_and_differ():
    assert point_label({"seed": 8, "skip_bad_rows": True}) == "seed=8,skip_bad_rows=true"
    labels = {point_label({"model": model}) for model in ("a/b", "a-b", "a,b", "a%2Fb")}
    assert len(labels) == 4
    assert not any("/" in label for label in labels)


def test_a_label_of_many_settings_is_cut_off_and_differs():
    labels = {point_label({"trace": f"{'long/' * 80}{number}"}) for number in range(3)}
    assert len(labels) == 3
    assert max(map(len, labels)) < 255


def test_pairs():
    axes = parse_axes(["tp_size=1,2,2", "max_batch_size=8,8,16"], is_paired=True)
    assert grid(axes, is_paired=True) == [
        {"tp_size": 1, "max_batch_size": 8},
        {"tp_size": 2, "max_batch_size": 8},
        {"tp_size": 2, "max_batch_size": 16},
    ]


@pytest.mark.parametrize(
    ("over", "is_paired", "words"),
    [
        (["tp_size=1,2", "seed=1,2,3"], True, "tp_size has 2, seed has 3"),
        (["tp_size=1,1", "seed=1,1"], True, "the point tp_size=1,seed=1 is there twice"),
        (["seed=1..1000", "max_batch_size=1..1000"], False, "the grid has 1,000,000 points (1000 x 1000)"),
    ],
)
def test_a_bad_grid_names_what_was_expected(over, is_paired, words):
    with pytest.raises(InputError, match=re.escape(words)):
        grid(parse_axes(over, is_paired), is_paired)
