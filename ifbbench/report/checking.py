"""The check of the files of a run directory when they are read, by the types of `schema` that they are written from.

Anything may have changed them since. Runs of other versions have other fields, so any field may be missing, except for
those of REQUIRED, and unknown ones are left alone.
"""

import inspect
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from msgspec import UNSET, Meta, Struct, UnsetType, ValidationError, convert, defstruct
from msgspec.json import Decoder
from msgspec.structs import fields

from ifbbench.config import settings
from ifbbench.errors import InputError
from ifbbench.recording.iteration_lines import ExecutorLine, InflightLine, IterationDetails, StaticLine
from ifbbench.report.schema import FILES
from ifbbench.report.summary_schema import Distribution, RequestCounts, RequestFigures

Number = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Id = int | str
KINDS = {"request_id": Id, "beneficiary": Id, "first_iteration": Count, "last_iteration": Count, "every": Count,
         "iteration_counter": Count, "iter": Count}  # fmt: skip
# Of the figures of requests, and of a line of iterations.
REQUIRED = frozenset({
    "requests", "request_throughput_per_s", "output_throughput_tokens_per_s", "total_throughput_tokens_per_s",
    "duration_s", "queue_time_s", "ttft_s", "tpot_s", "e2e_s", "itl_s", "total", "completed", "failed", "mean", "p50",
    "p99", "iterations", "pauses", "bound_by", "start_s", "latency_ms",
})  # fmt: skip
HAVE_REQUIRED = (RequestFigures, RequestCounts, Distribution, IterationDetails)


_decode = Decoder().decode


def read_object(path: Path) -> dict[str, Any]:
    """The content of run.json or summary.json, checked; InputError if the file is not one."""
    try:
        values = as_object(path.read_bytes())
        _convert(values, FILES[path.name][0])
        if path.name == "run.json":
            _check_config(values.get("config"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: {reason}; expected one JSON object as `ifbbench run` writes it. Restore the file, "
                         "or run again.") from error  # fmt: skip
    return values


def as_object(text: bytes) -> dict[str, Any]:
    """The JSON object in `text`; ValueError if there is none."""
    try:
        value: object = _decode(text)
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, not an object")
    return value


def check_line(name: str, values: Mapping[str, Any]) -> None:
    """ValueError if `values` is not a line of the file `name`."""
    kinds = FILES.get(name)
    if kinds is None:
        return
    if InflightLine in kinds:
        is_static = "Empty Generation Slots" in values
        kinds = (ExecutorLine if "iter" in values else StaticLine if is_static else InflightLine,)
    try:
        _convert(values, kinds[0])
    except ValueError:
        if len(kinds) == 1:
            raise
        _of_client(values, kinds)


def _of_client(values: Mapping[str, Any], kinds: tuple[type[Struct], ...]) -> None:
    """`check_line` of a line that is not of a run with an engine: of one against an endpoint it has another type."""
    ours, client = kinds
    only_there = {item.encode_name for item in fields(client)} - {item.encode_name for item in fields(ours)}
    _convert(values, client if only_there & values.keys() else ours)


def _convert(values: Mapping[str, Any], kind: type[Struct]) -> None:
    try:
        convert(values, _as_read(kind))
    except ValidationError as error:
        raise ValueError(str(error)) from None


def _check_config(config: Any) -> None:
    """The settings of run.json, resolved, or None where one has no meaning."""
    for item in settings():
        value = (config or {}).get(item.name)
        if value is not None:
            try:
                item.check(value)
            except InputError as error:
                raise ValueError(f"config.{error}") from None


@cache
def _as_read(kind: Any, name: str = "") -> Any:
    """The type that a value of `kind`, of the field `name`, may have when it is read."""
    if inspect.isclass(kind) and issubclass(kind, Struct):
        required = REQUIRED if issubclass(kind, HAVE_REQUIRED) else frozenset()
        parts = [(item.name, item.encode_name, _as_read(item.type, item.name)) for item in fields(kind)]
        members: list[Any] = [
            (one, of) if one in required and UnsetType not in get_args(of) else (one, of | UnsetType, UNSET)
            for one, _, of in parts
        ]
        return defstruct(kind.__name__, members, rename={one: encoded for one, encoded, _ in parts}, kw_only=True)
    if kind is int:
        return KINDS.get(name, Number)
    origin, arguments = get_origin(kind), get_args(kind)
    if not arguments or origin is Annotated:
        return kind
    inner = tuple(_as_read(argument, name) for argument in arguments)
    return Union[inner] if origin in (Union, UnionType) else origin[inner]  # noqa: UP007
