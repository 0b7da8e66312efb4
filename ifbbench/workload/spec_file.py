"""Workload specifications as YAML or TOML files."""

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ifbbench.errors import InputError
from ifbbench.workload.arrivals import KINDS as ARRIVAL_KINDS
from ifbbench.workload.arrivals import AllAtOnce, ArrivalProcess
from ifbbench.workload.distributions import KINDS as LENGTH_KINDS
from ifbbench.workload.distributions import LengthDistribution, Quantiles, require
from ifbbench.workload.durations import KINDS as DURATION_KINDS
from ifbbench.workload.durations import DurationDistribution
from ifbbench.workload.reserve import Reserve
from ifbbench.workload.sessions import Sessions
from ifbbench.workload.shared_prefix import SharedPrefix
from ifbbench.workload.spec import WorkloadSpec

SUFFIXES = (".yaml", ".yml", ".toml")
KEYS = ("name", "num_requests", "prompt_len", "output_len", "arrival", "reserve", "shared_prefix", "sessions")


def read_spec(path: Path) -> WorkloadSpec:
    """The specification in the file at `path`; InputError names the file and the key that is wrong."""
    try:
        return parse_spec(_load(path), default_name=path.stem)
    except InputError as error:
        raise InputError(f"{path}: {error}. See datasets/README.md for what a workload specification holds.") from None


def parse_spec(document: Any, default_name: str) -> WorkloadSpec:
    """The specification in a mapping with `num_requests`, `prompt_len`, `output_len` and optional others of `KEYS`."""
    values = _mapping(document, "the specification")
    _check_keys(values, KEYS, required=("num_requests", "prompt_len", "output_len"), where="the specification")
    count, name, reserve = values["num_requests"], values.get("name", default_name), values.get("reserve", "actual")
    require(type(count) is int, f"num_requests is {count!r}; expected an integer of at least 1")
    require(isinstance(name, str), f"name is {name!r}; expected a text")
    require(isinstance(reserve, str), f"reserve is {reserve!r}; expected a text")
    Reserve(reserve)
    return WorkloadSpec(
        name=name,
        num_requests=count,
        prompt_len=_length(values["prompt_len"], "prompt_len"),
        output_len=_length(values["output_len"], "output_len"),
        arrival=_arrival(values["arrival"]) if "arrival" in values else AllAtOnce(),
        reserve=reserve,
        shared_prefix=_shared_prefix(values["shared_prefix"]) if "shared_prefix" in values else None,
        sessions=_sessions(values["sessions"]) if "sessions" in values else None,
    )


def _load(path: Path) -> Any:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text) if path.suffix.lower() == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"not valid {path.suffix[1:].upper()}: {' '.join(str(error).split())}") from error


def _length(value: Any, where: str) -> LengthDistribution:
    kind, numbers = _choice(value, "distribution", LENGTH_KINDS, where)
    if kind == "quantiles":
        return _quantiles(numbers, where)
    distribution: LengthDistribution = _build(LENGTH_KINDS[kind], numbers, where)
    return distribution


def _arrival(value: Any) -> ArrivalProcess:
    kind, numbers = _choice(value, "process", ARRIVAL_KINDS, "arrival")
    process: ArrivalProcess = _build(ARRIVAL_KINDS[kind], numbers, "arrival")
    return process


def _shared_prefix(value: Any) -> SharedPrefix:
    where = "shared_prefix"
    values = dict(_mapping(value, where))
    length = values.pop("len", None)
    require(length is not None, f"{where} has no key 'len'; expected a number of tokens or a distribution")
    if not isinstance(length, dict):
        length = {"distribution": "fixed", "value": length}
    _check_numbers(values, where)
    prefix: SharedPrefix = _build(SharedPrefix, values | {"len": _length(length, f"{where}.len")}, where)
    return prefix


def _sessions(value: Any) -> Sessions:
    values, keys = _mapping(value, "sessions"), ("turns", "think_time")
    _check_keys(values, keys, keys, "sessions")
    kind, numbers = _choice(values["think_time"], "distribution", DURATION_KINDS, "sessions.think_time")
    think_time: DurationDistribution = _build(DURATION_KINDS[kind], numbers, "sessions.think_time")
    return Sessions(_length(values["turns"], "sessions.turns"), think_time)


def _choice(value: Any, tag: str, kinds: Mapping[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """The kind that `value[tag]` names, and the numbers beside it."""
    values = dict(_mapping(value, where))
    kind = values.pop(tag, None)
    require(isinstance(kind, str) and kind in kinds, f"{where}.{tag} is {kind!r}; expected one of {', '.join(kinds)}")
    _check_numbers(values, where)
    return str(kind), values


def _check_numbers(values: Mapping[str, Any], where: str) -> None:
    for key, number in values.items():
        plain = isinstance(number, int | float) and not isinstance(number, bool)
        require(plain and math.isfinite(number), f"{where}.{key} is {number!r}; expected a finite number")


def _build(kind: type, numbers: Mapping[str, Any], where: str) -> Any:
    """`kind` made from the numbers that its fields name, integers where it wants them."""
    known = dataclasses.fields(kind)
    required = [field.name for field in known if field.default is dataclasses.MISSING]
    _check_keys(numbers, [field.name for field in known], required, where)
    for field in known:
        value = numbers.get(field.name)
        is_whole = field.type is not int or value is None or type(value) is int
        require(is_whole, f"{where}.{field.name} is {value!r}; expected an integer")
    return _located(kind, numbers, where)


def _quantiles(numbers: Mapping[str, float], where: str) -> Quantiles:
    """From keys such as p0, p50, p99, p99.9 and p100."""
    points: list[tuple[float, float]] = []
    for key, length in numbers.items():
        try:
            points.append((float(key.removeprefix("p")), float(length)))
        except ValueError:
            raise InputError(f"{where}.{key} is not known; expected percentiles from p0 to p100") from None
    quantiles: Quantiles = _located(Quantiles, {"points": tuple(sorted(points))}, where)
    return quantiles


def _located(kind: type, values: Mapping[str, Any], where: str) -> Any:
    try:
        return kind(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    is_mapping = isinstance(value, dict) and all(isinstance(key, str) for key in value)
    require(is_mapping, f"{where} is {value!r:.60}; expected keys and values")
    checked: Mapping[str, Any] = value
    return checked


def _check_keys(values: Mapping[str, Any], known: Any, required: Any, where: str) -> None:
    for key in values:
        require(key in known, f"{where} has an unknown key {key!r}; expected {', '.join(known) or 'none'}")
    for key in required:
        require(key in values, f"{where} has no key {key!r}; expected {', '.join(required)}")
