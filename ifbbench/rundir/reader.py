"""The reader of run directories: files of JSON lines as tables, of finished, killed and thinned runs."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, wraps
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, get_args

import numpy as np
from msgspec import UNSET, Struct, UnsetType, to_builtins
from msgspec.structs import fields
from numpy.typing import ArrayLike, NDArray

from ifbbench.compressed import MAX_RATIO, content_path, is_compressed
from ifbbench.errors import InputError
from ifbbench.files import is_part
from ifbbench.rundir.checking import ExactLines, as_object, check_line, read_object
from ifbbench.rundir.drafts import stretches_of
from ifbbench.rundir.line_types import InflightLine, IterationDetails, RequestLine, SpanLine, documented_fields
from ifbbench.rundir.metrics import fullest_window
from ifbbench.rundir.rows import pieces_of_lines
from ifbbench.rundir.run_directory import OPEN_SPANS, find_iterations, find_lines
from ifbbench.settings.config import ENGINES
from ifbbench.settings.modes import BatchingType, Overlap

if TYPE_CHECKING:  # it takes a third of a second to import, and a run that prints its report reads no table
    import pandas as pd

Floats = NDArray[np.float64]

ITERATION_FIELDS = {"batch_manager": ("Iteration Counter", "ifbbench"), "trtllm": ("iter", "ifbbench")}
ITERATION_FIELDS["vllm"] = ITERATION_FIELDS["batch_manager"]
SPAN_FIELDS = ("request_id", "phase", "first_iteration", "last_iteration", "tokens")
REQUEST_FIELDS = ("request_id", "outcome")
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
SPAN_COLUMNS = SpanLine.__struct_fields__
CLIENT_SPAN_COLUMNS = ("start_s", "end_s")  # of a run against an endpoint
REQUEST_COLUMNS = tuple(
    field.name
    for field in fields(RequestLine)
    if field.name != "attribution_s" and UnsetType not in get_args(field.type)
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
        "paused",
        "phase",
        "cause",
        "chunks",
        "steps",
    }
)
# Columns of `iterations` that are unknown of the iterations that thinned statistics leave out.
UNKNOWN_WHERE_THINNED = (
    "host_ms",
    "device_ms",
    "tokens_recomputed",
    "padding_tokens",
    "context_pass_ms",
    "generation_pass_ms",
    "empty_generation_slots",
    "paused",
)

# The shortest line of an iteration, and the maximum number of iterations that a killed run lacks where it has spans.
SHORTEST_ITERATION_BYTES = 100
MAX_UNRECORDED = 1_000_000
Parsed = TypeVar("Parsed")
Asked = ParamSpec("Asked")
# Integers and, from the first other number on, floats take eight bytes each; anything else is an object.
_Column: TypeAlias = "list[Any] | array[Any]"


@dataclass(frozen=True)
class RunData:
    """One run directory. run: run.json. summary: summary.json, None where the run was killed.

    Tables are read when they are first used. Request ids are texts in them. without: columns of `iterations` that are
    checked and left out of the table, which takes half of the time of reading it.
    """

    path: Path
    run: dict[str, Any]
    summary: dict[str, Any] | None
    without: Collection[str] = ()

    @property
    def partial(self) -> bool:
        """Whether the run did not reach its end, so that figures cover only a part of it."""
        return self.summary is None or bool(self.run.get("partial") or self.summary.get("partial"))

    @property
    def name(self) -> str:
        """The run's name; its directory's where run.json has none."""
        return str(self.run.get("name") or self.path.resolve().name)

    @property
    def config(self) -> dict[str, Any]:
        """Setting name to resolved value."""
        return dict(self.run.get("config") or {})

    @property
    def decided_by(self) -> str | None:
        """What decided: the capacity policy, or the engine where that has a scheduler of its own."""
        config = self.config
        return config.get("policy") if config.get("engine", ENGINES[0]) == ENGINES[0] else config["engine"]

    @property
    def endpoint(self) -> dict[str, Any] | None:
        """The server of a run against an endpoint, which has no iterations; None of other runs."""
        return self.run.get("endpoint")

    @property
    def has_only_summary(self) -> bool:
        """Whether `--recording summary` left out iterations and spans; a client that measures a server records both."""
        return self.config.get("recording") == "summary" and self.endpoint is None

    @property
    def recorded_every(self) -> int:
        """One of how many iterations is recorded; more than 1 where statistics were thinned."""
        return int(self.config.get("iteration_stats_every") or 1)

    @property
    def num_micro_batches(self) -> int:
        """Parts that the requests were divided into; each ran in one of so many iterations."""
        return micro_batches_of(self.config)

    @cached_property
    def windows(self) -> list[str]:
        """The tokens of each of several attention windows; empty with one window, and where older versions recorded
        the sum of their blocks only."""
        names = [name.split(".") for name in map(str, self.iterations) if name.startswith(f"{KV_STATISTICS}.")]
        return list(dict.fromkeys(size for _, size, _ in names))

    def window_blocks(self, size: str) -> tuple[Floats, int]:
        """The blocks of an attention window that are in use, [iterations], and the size of its pool."""
        used, pool = (
            self.iterations[f"{KV_STATISTICS}.{size}.primary{which}NumBlocks"].to_numpy(dtype=float)
            for which in ("Used", "Max")
        )
        return used, int(np.nanmax(pool))

    def blocks_of_fullest(self) -> tuple[Floats, int, str]:
        """As `window_blocks` of the attention window that is fullest at its peak, and its tokens; of the whole cache,
        and an empty text, where there are not several windows."""
        if not self.windows:
            table = self.iterations
            pool = table["max_kv_cache_blocks"].max()
            used = table["used_kv_cache_blocks"].to_numpy(dtype=float)
            return used, 0 if np.isnan(pool) else int(pool), ""
        blocks = {size: self.window_blocks(size) for size in self.windows}
        size = fullest_window({size: (float(np.nanmax(used)), pool) for size, (used, pool) in blocks.items()})
        return *blocks[size], size

    @cached_property
    def iterations(self) -> pd.DataFrame:
        """A row an iteration, in order. Those that thinned statistics leave out are filled in: see `_filled`.

        Fields are in snake_case, those under "ifbbench" beside them; `pauses`: number of requests that were paused.
        """
        required = ITERATION_FIELDS[self.config.get("iteration_stats_format") or "batch_manager"]
        lines = _column_pieces(find_iterations(self.path), required, self.without)
        pieces = (_flat_iterations(piece, self.without) for piece in lines)
        recorded = _table_of(pieces, [name for name in ITERATION_COLUMNS if name not in self.without])
        if not recorded["iteration_counter"].is_monotonic_increasing:
            recorded = recorded.sort_values("iteration_counter", kind="stable", ignore_index=True)
        if len(recorded):
            last = int(recorded["iteration_counter"].iloc[-1])
            check_lines(find_iterations(self.path), last, len(recorded), self.recorded_every)
        return _filled(recorded, self.spans, self.num_micro_batches) if self.recorded_every > 1 else recorded

    @cached_property
    def spans(self) -> pd.DataFrame:
        """A row a span, by request and first iteration; of a killed run also those open when it was last flushed.

        Against an endpoint, the columns of iterations have seconds."""
        paths = (find_lines(self.path, "spans"), self.path / OPEN_SPANS)
        columns = (*SPAN_COLUMNS, *CLIENT_SPAN_COLUMNS) if self.endpoint else SPAN_COLUMNS
        table = _table_of(chain.from_iterable(_column_pieces(path, SPAN_FIELDS) for path in paths), columns)
        table["request_id"] = table["request_id"].astype(str)
        if self.endpoint:
            table["first_iteration"], table["last_iteration"] = table["start_s"], table["end_s"]
        # A span that was open at the flush may have been closed in it too.
        table = table.drop_duplicates(["request_id", "first_iteration"])
        if not self.endpoint and len(table):
            latest = table.iloc[int(table["last_iteration"].to_numpy().argmax())]
            self.check_span(paths[0], latest["request_id"], int(latest["last_iteration"]))
        return table.sort_values(["request_id", "first_iteration"], kind="stable", ignore_index=True)

    def check_span(self, path: Path, request_id: int | str, last: int) -> None:
        """InputError if a span in `path` ends with an iteration, `last`, which this run cannot have: tables have a row
        for each iteration, and would take all memory."""
        if last > self._max_iteration:
            raise InputError(
                f"{path}: a span of request {request_id} ends with iteration {last:,}; the run has fewer "
                f"than {self._max_iteration:,}. Restore the file, or run again."
            )

    @cached_property
    def _max_iteration(self) -> int:
        """More than the iterations of the run, by the size of their file. Of a killed run, spans may have come further
        than iterations."""
        path = find_iterations(self.path)
        size = path.stat().st_size if path.exists() else 0
        unpacked = size * MAX_RATIO if is_compressed(path) else size
        return MAX_UNRECORDED + self.recorded_every * (unpacked // SHORTEST_ITERATION_BYTES)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """A row a request, by index in the trace; each part of `attribution_s` is a column."""
        pieces = map(_flat_requests, _column_pieces(find_lines(self.path, "requests"), REQUEST_FIELDS))
        table = _table_of(pieces, REQUEST_COLUMNS)
        table["request_id"] = table["request_id"].astype(str)
        return table.sort_values("index", kind="stable", ignore_index=True)

    @property
    def completed(self) -> pd.DataFrame:
        """The requests that have all their tokens: latencies cover these."""
        return self.requests[self.requests["outcome"] == "completed"]


def once_a_run(compute: Callable[Asked, Parsed]) -> Callable[Asked, Parsed]:
    """A function or a method that makes something of a run, its last argument, which keeps it as it keeps its tables:
    several charts need the same."""

    @wraps(compute)
    def known(*args: Asked.args, **named: Asked.kwargs) -> Parsed:
        kept, name = vars(args[-1]), compute.__qualname__
        if name not in kept:
            kept[name] = compute(*args, **named)
        found: Parsed = kept[name]
        return found

    return known


def delivered_s(iterations: pd.DataFrame) -> Floats:
    """When the tokens of each iteration reached their clients, in seconds: at its end, or when a serving process had
    delivered them."""
    latency_ms = iterations["latency_ms"]
    if "delivery_ms" in iterations:
        latency_ms = latency_ms + iterations["delivery_ms"].fillna(0.0)
    return (iterations["start_s"] + latency_ms / 1000).to_numpy(dtype=float)


def check_lines(path: Path, last: int, lines: int, recorded_every: int) -> None:
    """InputError if the `lines` of iterations in `path` go to an iteration `last` that so few do not reach: one of
    `recorded_every` is there. Tables have a row for each iteration, and would take all memory."""
    if last > (lines + 1) * recorded_every:
        raise InputError(
            f"{path}: has iteration {last}, but {lines} lines; expected one for each. Restore the file, or run again."
        )


@once_a_run
def producing_spans(run: RunData) -> pd.DataFrame:
    """The spans that produced output tokens, by request and in order of time: one in each of their last iterations.

    Spans with several tokens in an iteration, which draft tokens make, are cut into parts for which that holds. Spans
    that end after the last iteration of the table are left out: a killed run may lack iterations."""
    has_iterations = run.spans["last_iteration"] <= run.iterations["iteration_counter"].max()
    spans: pd.DataFrame = run.spans[(run.spans["produced"].fillna(0) > 0) & has_iterations]
    is_step = (spans["phase"] == "generation").to_numpy()
    has_several = np.where(is_step, spans["steps"].notna(), spans["produced"] > 1)
    if not has_several.any():
        return spans
    columns = (spans[name].tolist() for name in ("first_iteration", "last_iteration", "steps", "produced"))
    parts = [
        [(first, last, produced)]
        if not several
        else [
            (one, other, other - one + 1)
            for one, other in (
                stretches_of(first, steps, int(produced)) if generates else [(last, last)] * int(produced)
            )
        ]
        for first, last, steps, produced, several, generates in zip(*columns, has_several, is_step, strict=True)
    ]
    cut = spans.loc[spans.index.repeat([len(of_one) for of_one in parts])].reset_index(drop=True)
    numbers = np.array([part for of_one in parts for part in of_one], np.int64).reshape(-1, 3)
    return cut.assign(first_iteration=numbers[:, 0], last_iteration=numbers[:, 1], produced=numbers[:, 2])


def micro_batches_of(config: Mapping[str, Any]) -> int:
    """Micro batches of a run with the resolved settings `config`; runs of former versions have one."""
    stages = 1 if config.get("type") == BatchingType.V1 else int(config.get("pp_size") or 1)
    return stages if stages > 1 else 2 if config.get("overlap") == Overlap.PARTITIONED else 1


def load_run(path: Path, without: Collection[str] = ()) -> RunData:
    """The one run directory at or below `path`, with its iterations `without` some columns. InputError if there are
    several or none, or (for a table: when it is first used) if a file is bad, with file and line."""
    found = find_runs(path)
    if len(found) > 1:
        names = ", ".join(str(item) for item in found[:3])
        raise InputError(f"{path}: holds {len(found)} runs; expected one. Name one of them: {names}, ….")
    summary = found[0] / "summary.json"
    figures = read_object(summary) if summary.exists() else None
    return RunData(found[0], read_object(found[0] / "run.json"), figures, without)


def find_runs(path: Path) -> list[Path]:
    """`path` itself if it is a run directory, otherwise all run directories below it, by name; InputError if none."""
    if (path / "run.json").is_file():
        return [path]
    found = sorted(file.parent for file in path.rglob("run.json") if not is_part(file.parent)) if path.is_dir() else []
    if not found:
        problem = "holds no run" if path.is_dir() else "is not a directory"
        raise InputError(
            f"{path}: {problem}; expected a directory with run.json, or one above such directories. "
            "`ifbbench run` writes them, by default below results/."
        )
    return found


def read_lines(path: Path, required: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects in `path`, one a line, each with the fields `required`: see `parsed_lines`."""
    return parsed_lines(path, lambda line_number, line: parse_line(path, line_number, line, required))


def parsed_lines(path: Path, parse: Callable[[int, bytes], Parsed]) -> Iterator[Parsed]:
    """What `parse` makes of the number and the text of each line of `path`; compressed if the name says so.

    What a killed run was writing is left out: a last line without line end for which `parse` raises InputError, and the
    rest of a compressed file that was cut off. Every other bad line raises it. A missing file is an empty one: the run
    was killed before it wrote to it.
    """
    for line_number, lines, is_cut in pieces_of_lines(path):
        with suppress(InputError) if is_cut else nullcontext():
            for number, line in enumerate(bytes(lines).split(b"\n"), start=line_number):
                if line.strip():
                    yield parse(number, line)


def parse_line(path: Path, line_number: int, line: bytes, required: Sequence[str]) -> dict[str, Any]:
    """The JSON object in a line of `path`, checked; InputError if it is not one with the fields `required`."""
    try:
        row = as_object(line)
        for name in required:
            if name not in row:
                raise ValueError(f"field {name!r} is missing")
        check_line(content_path(path).name, row)
    except (ValueError, RecursionError) as error:
        expected = " with ".join(filter(None, ("a JSON object", ", ".join(required))))
        raise InputError(
            f"{path}, line {line_number}: {error}; expected {expected}. "
            "Restore the file, or remove the line to continue without it."
        ) from error
    return row


# The values of consecutive lines by field, UNSET where a line lacks it.
Columns: TypeAlias = dict[str, list[Any]]


def _column_pieces(path: Path, required: Sequence[str], without: Collection[str] = ()) -> Iterator[Columns]:
    """The fields of the lines of `path`, which are checked as by `read_lines`, those `without` included."""
    exact = ExactLines(content_path(path).name)
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
        yield _columns_of(rows, without)


def _columns_of(rows: Sequence[Any], without: Collection[str] = ()) -> Columns:
    """The fields of `rows`, which are structs of one type or dictionaries; of structs, those that are not `without`."""
    if rows and isinstance(rows[0], Struct):
        names = zip(rows[0].__struct_encode_fields__, rows[0].__struct_fields__, strict=True)
        columns = ((encoded, list(map(attrgetter(name), rows))) for encoded, name in names if name not in without)
        return {name: values for name, values in columns if values[0] is not UNSET or values.count(UNSET) < len(values)}
    return {name: [row.get(name, UNSET) for row in rows] for name in dict.fromkeys(chain.from_iterable(rows))}


def _columns_below(values: Sequence[Any] | None, prefix: str = "", without: Collection[str] = ()) -> Columns:
    """The fields of `values`, objects of which some may be None or UNSET, with `prefix` before their names."""
    objects = [value for value in values or () if value is not None and value is not UNSET]
    columns = _columns_of(objects, without)
    if values and len(objects) < len(values):
        positions = [position for position, value in enumerate(values) if value is not None and value is not UNSET]
        for name, found in columns.items():
            columns[name] = whole = [UNSET] * len(values)
            for position, value in zip(positions, found, strict=True):
                whole[position] = value
    return {prefix + name: found for name, found in columns.items()}


def _flat_iterations(lines: Columns, without: Collection[str]) -> Columns:
    """Documented fields in snake_case, whatever their form, and those of each nested object; none that is `without`."""
    details = _columns_below(lines["ifbbench"], without={*without} - {"paused"})
    groups = {name: _columns_below(values) for name, values in lines.items() if name.endswith("BatchingStats")}
    if "kvCacheStats" in lines:
        groups["kvCacheStats"] = _columns_below(lines["kvCacheStats"])
    left_out, drafts, windows = (details.pop(name, None) for name in ("first_left_out", "spec_decoding", KV_STATISTICS))
    flat = {name: values for name, values in documented_fields(lines | groups).items() if values is not None} | details
    flat |= _columns_below(drafts, "spec_decoding.")
    for size, of_size in _columns_below(windows).items():
        flat |= _columns_below(of_size, f"{KV_STATISTICS}.{size}.")
    flat |= _columns_below(left_out, "first_left_out_")
    flat["first_left_out_request"] = flat.pop("first_left_out_request_id", [])
    paused = details.get("paused") or [()] * len(lines["ifbbench"])
    # Nearly all lists are empty: these are one object, because the garbage collector looks at each again and again.
    nothing: list[Any] = []
    flat["paused"], flat["pauses"] = [nothing] * len(paused), [0] * len(paused)
    if any(paused):
        flat["paused"] = [to_builtins(list(pauses)) if pauses else nothing for pauses in paused]
        flat["pauses"] = [len(pauses or ()) for pauses in paused]
    return {name: values for name, values in flat.items() if name not in without}


def _flat_requests(lines: Columns) -> Columns:
    """The fields of requests, and those of each part of `attribution_s`."""
    attribution = lines.pop("attribution_s", None)
    return lines | _columns_below(attribution, "attribution_s.")


def _table_of(pieces: Iterable[Columns], columns: Sequence[str]) -> pd.DataFrame:
    """The columns of `pieces` one below the other, `columns` first, which are there even where no line has them.

    The table is made column by column, for files that would not fit into memory as objects. Columns are numbers except
    for NOT_NUMBERS; the type of one that is not among `columns` is that of its first value. Nulls in numbers (times of
    a refused request, blocks of a contiguous cache) become NaN, which every mean leaves out.
    """
    table: dict[str, _Column] = {name: [] if name in NOT_NUMBERS else array("q") for name in columns}
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
            is_number = type(piece[name][first_of_new[name]]) in (int, float)
            table[name] = array("q") if is_number else []
        for name in table.keys() & piece.keys():
            table[name] = _extended(_padded(table[name], count), piece[name], texts)
        count += max(map(len, piece.values()), default=0)
    padded = ((name, _padded(column, count)) for name, column in table.items())
    import pandas as pd

    values = {name: column if isinstance(column, list) else np.asarray(column) for name, column in padded}
    return pd.DataFrame(values, copy=False)


def _extended(column: _Column, values: list[Any], texts: dict[str, str]) -> _Column:
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


def _padded(column: _Column, length: int) -> _Column:
    """`column` with NaN or None in the rows that it lacks."""
    missing = length - len(column)
    if missing and not isinstance(column, list):
        column = column if column.typecode == "d" else array("d", column)
        column.extend([math.nan] * missing)
    elif missing:
        column.extend([None] * missing)
    return column


def _filled(iterations: pd.DataFrame, spans: pd.DataFrame, every: int) -> pd.DataFrame:
    """A row for each iteration, from the recorded ones of thinned statistics.

    The batch of the others comes from `spans`, exactly; their times are interpolated. No request was paused in
    them, and their limit was that of the iteration before, because others are always recorded. The KV cache and the
    queue keep their last recorded state, and UNKNOWN_WHERE_THINNED is empty. every: number of micro batches.
    """
    if iterations.empty:
        return iterations
    recorded = iterations["iteration_counter"].to_numpy(dtype=np.int64)
    last = int(max(recorded[-1], spans["last_iteration"].max() if len(spans) else 0))
    numbers = np.arange(recorded[0], last + 1)
    unknown = [name for name in UNKNOWN_WHERE_THINNED if name in iterations]
    known = iterations.set_index("iteration_counter")
    table = known.reindex(numbers, method="ffill")
    table.loc[~np.isin(numbers, recorded), unknown] = None
    table.loc[~np.isin(numbers, recorded), "pauses"] = 0
    start_s = np.interp(numbers, recorded, known["start_s"])
    end_s = np.interp(numbers, recorded, known["start_s"] + known["latency_ms"] / 1000)
    tokens_a_step = (table["budget_used"] - table["total_context_tokens"]) / table["generation_requests"]
    generating = spans[spans["phase"] == "generation"]
    steps = covering(generating["first_iteration"], generating["last_iteration"], last, every)
    requests, tokens, generation = (counts[recorded[0] :] for counts in (*_context(spans, last, every), steps))
    return table.assign(
        start_s=start_s,
        latency_ms=(end_s - start_s) * 1000,
        context_requests=requests,
        total_context_tokens=tokens,
        generation_requests=generation,
        scheduled_requests=requests + generation,
        # A step is as many tokens as a request has beams; requests of one run mostly have the same number.
        budget_used=tokens + generation * tokens_a_step.ffill().fillna(1.0).to_numpy(dtype=float),
    ).reset_index(names="iteration_counter")


def _context(spans: pd.DataFrame, last: int, every: int) -> tuple[Floats, Floats]:
    """Requests and tokens of the context phase in each iteration up to `last`."""
    with_chunks = spans[spans["phase"].isin(["context", "recompute"])]
    requests, tokens = np.zeros(last + 1), np.zeros(last + 1)
    for first, chunks in zip(with_chunks["first_iteration"].tolist(), with_chunks["chunks"], strict=True):
        requests[first : first + len(chunks) * every : every] += 1
        tokens[first : first + len(chunks) * every : every] += chunks
    return requests, tokens


def covering(first: ArrayLike, last: ArrayLike, end: int, every: int = 1) -> Floats:
    """How many of the stretches contain each iteration up to `end`: every so many iterations from `first` to `last`."""
    steps = np.zeros(end + 1 + every)
    np.add.at(steps, np.asarray(first, np.int64), 1)
    np.add.at(steps, np.asarray(last, np.int64) + every, -1)
    return np.asarray(cumulated(steps, every)[: end + 1], dtype=float)


def cumulated(changes: NDArray[Any], every: int) -> NDArray[Any]:
    """The sum of `changes` at each position and at every so many positions before it."""
    if every == 1:
        return changes.cumsum()
    whole = np.zeros(-(-len(changes) // every) * every, changes.dtype)
    whole[: len(changes)] = changes
    return whole.reshape(-1, every).cumsum(axis=0).ravel()[: len(changes)]
