"""The check of result files when they are read, by the types that they are written from: files of run directories by
those of `schema`, summaries of repeats, and the cells of a sweep's table.

Anything may have changed them since. Runs of other versions have other fields, so any field may be missing, except for
those of REQUIRED, and unknown ones are left alone.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from msgspec import UNSET, Meta, Struct, UnsetType, ValidationError, convert, defstruct
from msgspec.json import Decoder
from msgspec.structs import fields

from ifbbench.compressed import check_regular
from ifbbench.errors import InputError
from ifbbench.rundir.line_types import ExecutorLine, InflightLine, IterationDetails, RequestLine, StaticLine
from ifbbench.rundir.schema import FILES
from ifbbench.rundir.summary_schema import Distribution, RepeatCounts, RequestCounts, RequestFigures, Summary
from ifbbench.settings.config import settings
from ifbbench.settings.fields import Setting, boolean, located, number
from ifbbench.settings.json_text import check_keys

# No figure is larger: the largest are floating-point operations per second.
LARGEST = 1e20
Amount = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Whole = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Id = int | str
Token = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
# Integers that are no counts.
KINDS = {"request_id": Id, "beneficiary": Id, "prompt_tokens": Token, "prefix_ids": Token, "stop_ids": Token}
# Keys that the figures of requests must have, and those of a line of iterations.
REQUIRED = frozenset({
    "requests", "request_throughput_per_s", "output_throughput_tokens_per_s", "total_throughput_tokens_per_s",
    "duration_s", "queue_time_s", "ttft_s", "tpot_s", "e2e_s", "itl_s", "total", "completed", "failed", "mean", "p50",
    "p99", "iterations", "pauses", "bound_by", "start_s", "latency_ms",
})  # fmt: skip
HAVE_REQUIRED = (RequestFigures, RequestCounts, RepeatCounts, Distribution, IterationDetails)
# Columns of a sweep's table that are neither settings nor figures.
TEXT_COLUMNS = ("error", "trace", "output")


_decode = Decoder().decode


def read_object(path: Path, of_repeats: bool = False) -> dict[str, Any]:
    """The content of run.json or summary.json, checked; InputError if the file is not one. of_repeats: the summary of
    a directory of repeats."""
    try:
        check_regular(path)
        text = path.read_bytes()
        values = as_object(text)
        with located(str(path), "Restore the file, or run again."):
            check_keys(text)
        check(values, _of_repeats() if of_repeats else _as_read(FILES[path.name][0]))
        if path.name == "run.json":
            _check_config(values.get("config"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{path}: {reason}; expected one JSON object as `ifbbench run` writes it. Restore the file, or run again."
        ) from error
    return values


def as_object(text: bytes) -> dict[str, Any]:
    """The JSON object in `text`; ValueError if there is none."""
    try:
        value: object = _decode(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, not an object")
    return value


def decode_request(line: bytes) -> Any:
    """A line of `requests.jsonl` as a struct, with UNSET in the fields that it lacks. ValueError if it lacks an
    important one, or may not be a line of a run with an engine: `check_line` decides then."""
    request = _request_decoder()(line)
    if UNSET in (request.request_id, request.outcome, request.arrival_s, request.ttft_s):
        raise ValueError
    if request.e2e_s is not None and request.ttft_s is None:
        raise ValueError
    return request


@cache
def _request_decoder() -> Callable[[bytes], Any]:
    return Decoder(_as_read(RequestLine)).decode


class ExactLines:
    """Decodes the lines of the file `name` to structs, where they have the fields that this version writes and no
    others: ten times faster than line by line. Most lines have no optional field, and a type without them is read
    faster still.

    without: names of fields that the structs lack; then lines may have others too.
    """

    def __init__(self, name: str, without: frozenset[str] = frozenset()) -> None:
        # A type that takes any other field would take those with optional ones for lines without them.
        kinds = [
            (kind, optional) for kind in FILES.get(name, ()) for optional in ((True,) if without else (False, True))
        ]
        self._decoders = [
            Decoder(_as_read(kind, _Form(exact=True, optional=optional, without=without))) for kind, optional in kinds
        ]
        self._checks_times = RequestLine in FILES.get(name, ())

    def decode(self, lines: memoryview) -> list[Any]:
        """A struct for each of `lines`, with UNSET in the optional fields that a line lacks. ValueError or
        RecursionError if a line is not exact; `check_line` decides whether it is valid."""
        for decoder in self._decoders:
            try:
                rows: list[Any] = decoder.decode_lines(lines)
            except (ValueError, RecursionError):
                continue
            if self._checks_times and any(row.ttft_s is None and row.e2e_s is not None for row in rows):
                break
            self._decoders.sort(key=lambda one: one is not decoder)  # the other lines are mostly of the same type
            return rows
        raise ValueError("not as this version writes it")


def check_line(name: str, values: Mapping[str, Any]) -> None:
    """ValueError if `values` is not a line of the file `name`."""
    kinds = FILES.get(name)
    if kinds is None:
        return
    if InflightLine in kinds:
        is_static = "Empty Generation Slots" in values
        kinds = (ExecutorLine if "iter" in values else StaticLine if is_static else InflightLine,)
    try:
        check(values, _as_read(kinds[0]))
    except ValueError:
        if len(kinds) == 1:
            raise
        _of_client(values, kinds)
    else:
        if kinds[0] is RequestLine and values.get("e2e_s") is not None and values.get("ttft_s") is None:
            raise ValueError("Object missing required field `ttft_s`, which a request with e2e_s has")


def _of_client(values: Mapping[str, Any], kinds: tuple[type[Struct], ...]) -> None:
    """`check_line` of a line that is not of a run with an engine: of one against an endpoint it has another type."""
    ours, client = kinds
    only_there = {item.encode_name for item in fields(client)} - {item.encode_name for item in fields(ours)}
    check(values, _as_read(client if only_there & values.keys() else ours))


def check(values: Mapping[str, Any], kind: type[Struct]) -> None:
    """ValueError, with the field and what is expected of it, if `values` is not of `kind`."""
    try:
        convert(values, kind)
    except ValidationError as error:
        raise ValueError(str(error)) from None


def check_summary(values: Mapping[str, Any]) -> None:
    """ValueError if `values` is not the summary of a run."""
    check(values, _as_read(Summary))


def cell(column: str, text: str) -> Any:
    """The value of a cell of a sweep's table, None if it is empty; InputError if `column` has no such values."""
    if not text:
        return None
    if (setting := _settings().get(column)) is not None:
        return setting.check(text)
    kind = str if column in TEXT_COLUMNS else figure_kind(column)
    if kind is bool:
        return boolean(text, column, from_text=True)
    if kind is float:
        value = number(text, column, -LARGEST, LARGEST, from_text=True, guards=True)
        return int(text) if text.strip("-").isdecimal() else value
    return text


@cache
def _settings() -> dict[str, Setting]:
    return {item.name: item for item in settings()}


@cache
def figure_kind(name: str) -> type | None:
    """The type of a figure by its dotted name in a table: bool, float (of integers too) or str; None of others."""
    name = re.sub(r"^confidence_interval_95\.(.*)\.(low|high)$", r"\1", name)
    return float if name in ("repeats.total", "repeats.completed") else _leaf(Summary, tuple(name.split(".")))


def _leaf(kind: Any, path: tuple[str, ...]) -> type | None:
    """The type at `path` below a type. A name in a dictionary may have dots, so that it takes several parts."""
    for one in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        below: list[type | None] = []
        if not path:
            below = [{bool: bool, str: str, int: float, float: float}.get(one)]
        elif inspect.isclass(one) and issubclass(one, Struct):
            below = [_leaf(item.type, path[1:]) for item in fields(one) if item.encode_name == path[0]]
        elif get_origin(one) is dict:
            below = [_leaf(get_args(one)[1], path[end:]) for end in range(1, len(path) + 1)]
        if (found := next(filter(None, below), None)) is not None:
            return found
    return None


@cache
def _of_repeats() -> type[Struct]:
    """The type of the summary of repeats: means in place of numbers, and intervals under the same names."""
    intervals = _as_read(Summary, _Form(figure=tuple[Amount, Amount]))
    members: list[Any] = [("repeats", _as_read(RepeatCounts)), ("confidence_interval_95", intervals)]
    return defstruct("Repeats", members, bases=(_as_read(Summary, _Form(figure=Amount)),), kw_only=True)


def _check_config(config: Any) -> None:
    """The settings of run.json, resolved, or None where one has no meaning."""
    for item in settings():
        value = (config or {}).get(item.name)
        if value is not None:
            try:
                item.check(value)
            except InputError as error:
                raise ValueError(f"config.{error}") from None


class _Form(NamedTuple):
    """How values are read.

    figure: what may be in the place of each number, which may also be None; nothing is required then.
    exact: whether all fields that are not optional are required and no others are allowed, so that nothing is lost;
        integers stay so where floats are expected.
    optional: whether there may be optional fields.
    without: names of fields that are left out, of any value.
    """

    figure: Any = None
    exact: bool = False
    optional: bool = True
    without: frozenset[str] = frozenset()


_AS_WRITTEN = _Form()


@cache
def _as_read(kind: Any, form: _Form = _AS_WRITTEN, name: str = "") -> Any:
    """The type that a value of `kind`, of the field `name`, may have when it is read."""
    if inspect.isclass(kind) and issubclass(kind, Struct):
        return _struct_as_read(kind, form)
    if form.figure is not None and kind in (int, float):
        return form.figure | None
    if kind is int:
        return KINDS.get(name, Count)
    if kind is float:
        return Amount | Whole if form.exact else Amount
    origin, arguments = get_origin(kind), get_args(kind)
    if not arguments or origin is Annotated:
        return kind
    inner = tuple(_as_read(argument, form, name) for argument in arguments)
    if form.exact and origin is list and inspect.isclass(arguments[0]) and issubclass(arguments[0], Struct):
        sequence: Any = tuple
        return sequence[inner[0], ...]  # all empty tuples are one object, which the garbage collector leaves alone
    return Union[inner] if origin in (Union, UnionType) else origin[inner]  # noqa: UP007


def _struct_as_read(kind: type[Struct], form: _Form) -> Any:
    """`_as_read` of a struct: one with the fields of `kind` that are read."""
    if form.exact:
        required = frozenset(item.name for item in fields(kind))
    else:
        required = REQUIRED if issubclass(kind, HAVE_REQUIRED) and form.figure is None else frozenset()
    members, names = list[Any](), dict[str, str]()
    for item in fields(kind):
        is_optional = UnsetType in get_args(item.type)
        if item.name in form.without or (is_optional and not form.optional):
            continue
        names[item.name], of = item.encode_name, _as_read(item.type, form, item.name)
        if form.figure is not None:
            of |= None
        is_required = item.name in required and UnsetType not in get_args(of)
        members.append((item.name, of) if is_required else (item.name, of | UnsetType, UNSET))
    return defstruct(
        kind.__name__,
        members,
        rename=names,
        kw_only=True,
        forbid_unknown_fields=form.exact and not form.without,
        gc=not form.exact,  # without references back there is nothing to collect, in millions of structs
    )
