"""Lines of the files of a run as columns: what tables, charts, exports and analyses of iterations are made of.

Lines are decoded to structs in large pieces, and each field of a piece is appended to its column at once.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, get_args

from msgspec import UNSET, Struct, UnsetType, to_builtins
from msgspec.structs import fields

from ifbbench.compressed import content_path
from ifbbench.errors import InputError
from ifbbench.rundir.checking import ExactLines
from ifbbench.rundir.line_types import InflightLine, IterationDetails, documented_fields
from ifbbench.rundir.rows import parse_line, pieces_of_lines
from ifbbench.settings.engines import LOGGED_ENGINES

ITERATION_FIELDS = {"batch_manager": ("Iteration Counter", "ifbbench"), "trtllm": ("iter", "ifbbench")}
ITERATION_FIELDS |= dict.fromkeys(LOGGED_ENGINES, ITERATION_FIELDS["batch_manager"])
# Columns that are in the tables of all runs; further ones where the lines have them.
ITERATION_COLUMNS = (
    *(
        field.name
        for line in (InflightLine, IterationDetails)
        for field in fields(line)
        if field.name not in ("ifbbench", "first_left_out") and UnsetType not in get_args(field.type)
    ),
    "first_left_out_request",
    "first_left_out_reason",
    "pauses",
)
# The prefix of columns of each of several attention windows.
KV_STATISTICS = "kv_cache_iteration_stats"
NOT_NUMBERS = frozenset(
    {
        "timestamp",
        "request_id",
        "outcome",
        "error",
        "bound_by",
        "first_left_out_request",
        "first_left_out_reason",
        "queue_head_request",
        "queue_head_reason",
        "paused",
        "phase",
        "cause",
        "chunks",
        "steps",
    }
)

# The values of consecutive lines by field, UNSET where a line lacks it.
Columns: TypeAlias = dict[str, list[Any]]


# Integers and, from the first other number on, floats take eight bytes each; anything else is an object.
Column: TypeAlias = "list[Any] | array[Any]"


def column_pieces(path: Path, required: Sequence[str], without: Collection[str] = ()) -> Iterator[Columns]:
    """The fields of the lines of `path`, which are checked as by `read_lines`; those `without` are neither checked nor
    read where lines are as this version writes them, which takes less time."""
    exact = ExactLines(content_path(path).name, frozenset(without))
    for line_number, lines, is_cut in pieces_of_lines(path):
        try:
            rows = exact.decode(lines)
        except (ValueError, RecursionError):
            numbered = enumerate(bytes(lines).split(b"\n"), start=line_number)
            try:
                rows = [parse_line(path, number, line, required) for number, line in numbered if line.strip()]
            except InputError:
                if is_cut:
                    return
                raise
        yield _columns_of(rows)


def _columns_of(rows: Sequence[Any]) -> Columns:
    """The fields of `rows`, which are structs of one type or dictionaries."""
    if rows and isinstance(rows[0], Struct):
        names = zip(rows[0].__struct_encode_fields__, rows[0].__struct_fields__, strict=True)
        columns = ((encoded, _values_of(name)(rows)) for encoded, name in names)
        return {name: values for name, values in columns if values[0] is not UNSET or values.count(UNSET) < len(values)}
    return {name: [row.get(name, UNSET) for row in rows] for name in dict.fromkeys(chain.from_iterable(rows))}


@cache
def _values_of(name: str) -> Callable[[Sequence[Any]], list[Any]]:
    """A function that lists an attribute of objects, in half the time of `map` with `attrgetter`."""
    listed: Callable[[Sequence[Any]], list[Any]] = eval(f"lambda rows: [row.{name} for row in rows]")
    return listed


def _columns_below(values: Sequence[Any] | None, prefix: str = "") -> Columns:
    """The fields of `values`, objects of which some may be None or UNSET, with `prefix` before their names."""
    objects = [value for value in values or () if value is not None and value is not UNSET]
    columns = _columns_of(objects)
    if values and len(objects) < len(values):
        positions = [position for position, value in enumerate(values) if value is not None and value is not UNSET]
        for name, found in columns.items():
            columns[name] = whole = [UNSET] * len(values)
            for position, value in zip(positions, found, strict=True):
                whole[position] = value
    return {prefix + name: found for name, found in columns.items()}


def flat_iterations(lines: Columns, without: Collection[str] = ()) -> Columns:
    """Documented fields in snake_case, whatever their form, and those of each nested object; none that is `without`."""
    details = _columns_below(lines["ifbbench"])
    groups = {name: _columns_below(values) for name, values in lines.items() if name.endswith("BatchingStats")}
    if "kvCacheStats" in lines:
        groups["kvCacheStats"] = _columns_below(lines["kvCacheStats"])
    left_out, queue_head, drafts, windows = (
        details.pop(name, None) for name in ("first_left_out", "queue_head", "spec_decoding", KV_STATISTICS)
    )
    flat = {name: values for name, values in documented_fields(lines | groups).items() if values is not None} | details
    flat |= _columns_below(drafts, "spec_decoding.")
    for size, of_size in _columns_below(windows).items():
        flat |= _columns_below(of_size, f"{KV_STATISTICS}.{size}.")
    flat |= _columns_below(left_out, "first_left_out_")
    flat["first_left_out_request"] = flat.pop("first_left_out_request_id", [])
    flat |= _queue_heads(queue_head)
    paused = details.get("paused") or [()] * len(lines["ifbbench"])
    # Nearly all lists are empty: these are one object, because the garbage collector looks at each again and again.
    nothing: list[Any] = []
    flat["paused"], flat["pauses"] = [nothing] * len(paused), [0] * len(paused)
    if any(paused):
        flat["paused"] = [to_builtins(list(pauses)) if pauses else nothing for pauses in paused]
        flat["pauses"] = [len(pauses or ()) for pauses in paused]
    return {name: values for name, values in flat.items() if name not in without}


def _queue_heads(values: Sequence[Any] | None) -> Columns:
    """What holds the queue where that is not what was left out first: the reason is "none" where nothing does."""
    if values is None:
        return {}
    found, nothing = _columns_below(values), [UNSET] * len(values)
    reasons = zip(values, found.get("reason", nothing), strict=True)
    return {
        "queue_head_request": found.get("request_id", nothing),
        "queue_head_reason": ["none" if head is None else reason for head, reason in reasons],
    }


def iteration_columns(path: Path, config: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Column]:
    """The columns of the iterations in `path`, of a run with the settings `config`: see `flat_iterations`."""
    pieces = (flat_iterations(piece, without) for piece in iteration_pieces(path, config, without))
    return gathered(pieces, [name for name in ITERATION_COLUMNS if name not in without])


def iteration_pieces(path: Path, config: Mapping[str, Any], without: Collection[str] = ()) -> Iterator[Columns]:
    """The fields of the lines of iterations in `path`, in one of the forms of `--iteration_stats_format`."""
    required = ITERATION_FIELDS[config.get("iteration_stats_format") or "batch_manager"]
    return column_pieces(path, required, {*without} - {"paused"})  # the number of pauses is always a column


def columns_of_line(row: Mapping[str, Any]) -> dict[str, Column]:
    """The columns of one iteration, of one element each."""
    return gathered([flat_iterations({name: [value] for name, value in row.items()})], ITERATION_COLUMNS)


def flat_requests(lines: Columns) -> Columns:
    """The fields of requests, and those of each part of `attribution_s`."""
    attribution = lines.pop("attribution_s", None)
    return lines | _columns_below(attribution, "attribution_s.")


def gathered(pieces: Iterable[Columns], columns: Iterable[str]) -> dict[str, Column]:
    """The columns of `pieces` one below the other, `columns` first, which are there even where no line has them.

    Files would not fit into memory as objects. Columns are numbers except for NOT_NUMBERS; the type of one that is not
    among `columns` is that of its first value. Nulls in numbers (times of a refused request, blocks of a contiguous
    cache) become NaN, which every mean leaves out.
    """
    table: dict[str, Column] = {name: [] if name in NOT_NUMBERS else array("q") for name in columns}
    texts: dict[str, str] = {}
    count = 0
    for piece in pieces:
        first_of_new = {
            name: position
            for name, values in piece.items()
            if name not in table
            and (position := next((at for at, value in enumerate(values) if value is not UNSET), None)) is not None
        }
        for name in sorted(first_of_new, key=first_of_new.__getitem__):  # in the order in which lines have them
            is_number = name not in NOT_NUMBERS and type(piece[name][first_of_new[name]]) in (int, float)
            table[name] = array("q") if is_number else []
        for name in table.keys() & piece.keys():
            table[name] = _extended(_padded(table[name], count), piece[name], texts)
        count += max(map(len, piece.values()), default=0)
    return {name: _padded(column, count) for name, column in table.items()}


def _extended(column: Column, values: list[Any], texts: dict[str, str]) -> Column:
    """`column` with `values` below it, which may need another type. texts: those that are there already, so that equal
    ones are one object."""
    if isinstance(column, list):
        if {*map(type, values)} == {str}:
            column.extend(map(texts.setdefault, values, values))
        else:
            values = [None if value is UNSET else value for value in values]
            column += [texts.setdefault(value, value) if type(value) is str else value for value in values]
        return column
    try:
        column += array(column.typecode, values)
    except (TypeError, OverflowError):
        column = column if column.typecode == "d" else array("d", column)
        column.extend(math.nan if value is None or value is UNSET else float(value) for value in values)
    return column


def _padded(column: Column, length: int) -> Column:
    """`column` with NaN or None in the rows that it lacks."""
    missing = length - len(column)
    if missing and not isinstance(column, list):
        column = column if column.typecode == "d" else array("d", column)
        column.extend([math.nan] * missing)
    elif missing:
        column.extend([None] * missing)
    return column
