"""What a sweep runs: axes as given by `--over KEY=V1,V2`, and their grid of points, every value checked."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ifbbench.config import setting
from ifbbench.engine.policies import find_policy
from ifbbench.errors import InputError

Point = dict[str, Any]
"""Setting name to the value it has at one point of the grid."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting and the different values it takes."""

    name: str
    values: tuple[Any, ...]


def parse_axis(text: str) -> Axis:
    """The axis in `KEY=V1,V2,…`, KEY being a setting's name or alias.

    InputError if the text has another form, KEY is no setting or one that has no place in a sweep, or a value is
    empty, out of range or there twice.
    """
    key, equals, listed = (part.strip() for part in text.partition("="))
    if not key or not equals or not listed:
        raise InputError(f"--over {text}: expected KEY=V1,V2,… such as max_batch_size=8,16,32.")
    swept = setting(key)
    if swept.group == "recording":
        raise InputError(f"--over {text}: {swept.name} says where results go; sweep a setting that changes them.")
    values: list[Any] = []
    for value_text in (part.strip() for part in listed.split(",")):
        if not value_text:
            raise InputError(f"--over {text}: a value is empty; give one between all commas.")
        value = swept.check(value_text)
        if swept.name == "policy":
            find_policy(value)
        if value in values:
            raise InputError(f"--over {text}: {value_text} is there twice; give each value once.")
        values.append(value)
    return Axis(swept.name, tuple(values))


def parse_axes(texts: Sequence[str]) -> list[Axis]:
    """An axis for each text, in order; InputError as in `parse_axis`, and for a setting with two axes or none."""
    if not texts:
        raise InputError("A sweep needs at least one --over KEY=V1,V2,… such as max_batch_size=8,16,32.")
    axes = [parse_axis(text) for text in texts]
    names = [axis.name for axis in axes]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"--over {name} is given {names.count(name)} times; list all its values in one --over.")
    return axes


def grid(axes: Sequence[Axis]) -> list[Point]:
    """Every combination of values, the last axis changing fastest."""
    names = [axis.name for axis in axes]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))]


def point_label(point: Point) -> str:
    """`key=value[,…]`, usable as the name of a directory and different for different points."""
    return ",".join(f"{name}={_in_file_name(value)}" for name, value in point.items())


def _in_file_name(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return quote(text, safe="")
