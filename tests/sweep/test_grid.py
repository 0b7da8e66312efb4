"""What `--over` may say, and the points it makes."""

import pytest

from ifbbench.errors import InputError
from ifbbench.sweep.grid import Axis, grid, parse_axes, parse_axis, point_label


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("max_batch_size=8,16", Axis("max_batch_size", (8, 16))),
        ("max-batch-size = 8, 16", Axis("max_batch_size", (8, 16))),
        ("scheduler_policy=max_utilization", Axis("policy", ("max_utilization",))),
        ("enable_chunked_context=true,false", Axis("enable_chunked_context", (True, False))),
        ("time_scale=0,0.5", Axis("time_scale", (0.0, 0.5))),
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
    ],
)
def test_a_bad_axis_is_told_with_what_was_expected(text, words):
    with pytest.raises(InputError) as error:
        parse_axis(text)
    assert words in str(error.value)


def test_a_setting_has_one_axis():
    with pytest.raises(InputError, match="--over policy is given 2 times"):
        parse_axes(["policy=max_utilization", "scheduler_policy=guaranteed_no_evict"])


def test_a_sweep_needs_an_axis():
    with pytest.raises(InputError, match="at least one --over"):
        parse_axes([])


def test_several_axes_make_a_grid():
    points = grid([Axis("seed", (1, 2)), Axis("time_scale", (0.0, 1.0))])
    assert [tuple(point.values()) for point in points] == [(1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0)]


def test_labels_are_file_names_and_differ():
    assert point_label({"seed": 8, "skip_bad_rows": True}) == "seed=8,skip_bad_rows=true"
    labels = {point_label({"model": model}) for model in ("a/b", "a-b", "a,b", "a%2Fb")}
    assert len(labels) == 4
    assert not any("/" in label for label in labels)
