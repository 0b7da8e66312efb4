"""The points of a sweep, from the values of `--over`: lists and ranges of settings, crossed or paired."""

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from math import prod
from typing import Any
from urllib.parse import quote

from ifbbench.errors import InputError
from ifbbench.schedulers.engines import find_scheduler
from ifbbench.schedulers.tensorrt_llm.policies import find_policy
from ifbbench.settings.config import settings
from ifbbench.settings.fields import Setting, as_text, did_you_mean
from ifbbench.settings.names import same_elsewhere, setting

TRACE = "trace"
"""The name under which traces are swept, which are no setting."""

Point = dict[str, Any]
"""The name of each swept setting to its value at one point."""

Axes = Mapping[str, Sequence[Any]]
"""The swept settings by name, and the values of each."""

MAX_POINTS = 100_000
# A name of a file has at most 255 bytes; the label of a point is one.
MAX_LABEL = 200
EXPECTED = "KEY=V1,V2,… such as max_batch_size=8,16,32, or a range: 8..64:x2 (8,16,32,64) or 8..32:+8 (8,16,24,32)"
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::([x*+])({_NUMBER}))?")


def parse_axis(text: str, is_paired: bool = False) -> tuple[str, list[Any]]:
    """The setting and its values in `KEY=V1,V2,…`, where KEY is a setting's name or alias, or `trace`, and a value may
    be a range. With a `;` among the values (it may also follow the last), that separates them, for values with commas.

    is_paired: a value may occur twice. InputError for another form, an unknown setting, one that cannot be swept, and a
    value that is empty, out of range or given twice.
    """
    key, equals, listed = (part.strip() for part in text.partition("="))
    if not key or not equals or not listed:
        raise InputError(f"--over {text}: expected {EXPECTED}.")
    swept = None if key == TRACE else _setting(key, text)
    if swept is not None and swept.group == "recording":
        raise InputError(f"--over {text}: {swept.name} says where results go; sweep a setting that changes them.")
    values: list[Any] = []
    for given in (part.strip() for part in listed.removesuffix(";").split(";" if ";" in listed else ",")):
        if not given:
            raise InputError(f"--over {text}: a value is empty; give one between all commas.")
        for value_text in _range(given, text) if swept is not None and swept.type in (int, float) else [given]:
            value = value_text if swept is None else swept.check(value_text)
            if swept is not None and swept.name == "policy":
                find_policy(value)
            if swept is not None and swept.name == "engine":
                find_scheduler(value)
            if value in values and not is_paired:
                raise InputError(f"--over {text}: {value_text} is there twice; give each value once.")
            values.append(value)
    return swept.name if swept is not None else TRACE, values


def axis_text(name: str, values: Any) -> str:
    """The text that `parse_axis` takes, of the values of a config file: one text, or a list."""
    if not isinstance(values, list | tuple):
        return f"{name}={values}"
    texts = [as_text(value) for value in values]
    return f"{name}={';'.join(texts)};" if any("," in text for text in texts) else f"{name}={','.join(texts)}"


def _setting(key: str, text: str) -> Setting:
    try:
        return setting(key)
    except InputError:
        swept = [item for item in settings() if item.group != "recording"]
        names = [TRACE, *(name for item in swept for name in (item.name, *item.aliases))]
        near = same_elsewhere(key.replace("-", "_"))
        hint = f" Did you mean {near}?" if near else did_you_mean(key, names, number_of_names=3)
        raise InputError(f"--over {text}: {key!r} is not a setting.{hint or ' See `ifbbench run --help`.'}") from None


def _range(given: str, text: str) -> list[str]:
    """The values of `FIRST..LAST:xFACTOR` or `FIRST..LAST:+STEP` (+1 if left out), exactly; `given` itself if it is no
    range. LAST is a value if a step meets it."""
    if ".." not in given:
        return [given]
    match = _RANGE.fullmatch(given)
    if match is None:
        raise InputError(f"--over {text}: {given!r} is not a range; expected FIRST..LAST:xFACTOR or FIRST..LAST:+STEP.")
    first, last = Decimal(match[1]), Decimal(match[2])
    grows, step = match[3] != "+" and match[3] is not None, Decimal(match[4] or 1)
    if first > last:
        raise InputError(f"--over {text}: the range {given} ends before it begins; give the smaller number first.")
    if (grows and (step <= 1 or first <= 0)) or (not grows and step <= 0):
        needed = "a factor above 1, and a first value above 0" if grows else "a step above 0"
        raise InputError(f"--over {text}: the range {given} has no end; expected {needed}.")
    values: list[str] = []
    while first <= last:
        values.append(f"{first.normalize():f}")
        first = first * step if grows else first + step
        if len(values) > MAX_POINTS:
            raise InputError(f"--over {text}: the range {given} has over {MAX_POINTS:,} values; give larger steps.")
    return values


def parse_axes(texts: Sequence[str], is_paired: bool = False) -> Axes:
    """The axes in order. InputError as in `parse_axis`, for two axes of one setting, for paired ones of different
    lengths and for too many points."""
    axes = [parse_axis(text, is_paired) for text in texts]
    names = [name for name, _ in axes]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"--over {name} is given {names.count(name)} times; list all its values in one --over.")
    lengths = [len(values) for _, values in axes]
    if is_paired and len(set(lengths)) > 1:
        found = ", ".join(f"{name} has {length}" for name, length in zip(names, lengths, strict=True))
        raise InputError(f"--zip pairs the values of all --over, of which there must be equally many: {found}.")
    if not is_paired and prod(lengths) > MAX_POINTS:
        raise InputError(
            f"the grid has {prod(lengths):,} points ({' x '.join(map(str, lengths))}); expected at most "
            f"{MAX_POINTS:,}. Leave values out, or pair them with --zip."
        )
    return dict(axes)


def grid(axes: Axes, is_paired: bool = False) -> list[Point]:
    """Every combination of values, the last axis changing fastest; if paired, the first values of all axes, the second
    ones, and so on. InputError if two points are equal."""
    combinations = zip(*axes.values(), strict=True) if is_paired else itertools.product(*axes.values())
    points = [dict(zip(axes, values, strict=True)) for values in combinations]
    labels: set[str] = set()
    for point in points:
        if (label := point_label(point)) in labels:
            raise InputError(f"--zip: the point {label} is there twice; give each once.")
        labels.add(label)
    return points


def point_label(point: Point) -> str:
    """`key=value[,…]`, unique for each point and valid as the name of a directory."""
    label = ",".join(f"{name}={quote(as_text(value), safe='')}" for name, value in point.items())
    if len(label) <= MAX_LABEL:
        return label
    return f"{label[:MAX_LABEL]}-{hashlib.sha256(label.encode()).hexdigest()[:12]}"
