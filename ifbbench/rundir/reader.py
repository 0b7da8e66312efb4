"""The reader of run directories: files of JSON lines as tables, of finished, killed and thinned runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, get_args

import numpy as np
from msgspec import UnsetType
from msgspec.structs import fields
from numpy.typing import ArrayLike, NDArray

from ifbbench.compressed import MAX_RATIO, is_compressed
from ifbbench.errors import InputError
from ifbbench.files import is_part
from ifbbench.rundir.checking import read_object
from ifbbench.rundir.columns import (
    KV_STATISTICS,
    Column,
    Columns,
    column_pieces,
    flat_requests,
    gathered,
    iteration_columns,
)
from ifbbench.rundir.drafts import stretches_of
from ifbbench.rundir.line_types import RequestLine, SpanLine
from ifbbench.rundir.metrics import fullest_window
from ifbbench.rundir.run_directory import OPEN_SPANS, find_iterations, find_lines
from ifbbench.settings.engines import ENGINES, SGLANG
from ifbbench.settings.modes import BatchingType, Overlap

if TYPE_CHECKING:  # it takes a third of a second to import, and a run that prints its report reads no table
    import pandas as pd

Floats = NDArray[np.float64]

SPAN_FIELDS = ("request_id", "phase", "first_iteration", "last_iteration", "tokens")
REQUEST_FIELDS = ("request_id", "outcome")
SPAN_COLUMNS = SpanLine.__struct_fields__
CLIENT_SPAN_COLUMNS = ("start_s", "end_s")  # of a run against an endpoint
REQUEST_COLUMNS = tuple(
    field.name
    for field in fields(RequestLine)
    if field.name != "attribution_s" and UnsetType not in get_args(field.type)
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


@dataclass(frozen=True)
class RunData:
    """One run directory.

    run: run.json.
    summary: summary.json, None where the run was killed.

    Tables are read when they are first used. Request ids are texts in them.

    without: columns of `iterations` that are not read, which takes half of the time of reading the table.
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
    def lacks_requests(self) -> bool:
        """Whether it was imported from a log that has no requests."""
        return bool(self.run.get("imported")) and not self.run["trace"]["requests"]

    @property
    def is_disaggregated(self) -> bool:
        """Whether it is the run of a fleet with prefill and decode apart."""
        return self.is_fleet and bool(self.config.get("prefill_replicas"))

    @property
    def is_fleet(self) -> bool:
        """Whether it is the run of several replicas, which have iterations and spans, in directories of their own."""
        return bool(self.config.get("router")) and self.config.get("replica") is None

    @property
    def has_only_summary(self) -> bool:
        """Whether iterations and spans are left out: by `--recording summary`, or because replicas have them. A client
        that measures a server records both."""
        return (self.config.get("recording") == "summary" and self.endpoint is None) or self.is_fleet

    @property
    def recorded_every(self) -> int:
        """One of how many iterations is recorded; more than 1 where statistics were thinned."""
        return int(self.config.get("iteration_stats_every") or 1)

    @property
    def num_micro_batches(self) -> int:
        """Parts that the requests were divided into; each ran in one of so many iterations."""
        return micro_batches_of(self.config)

    @property
    def requests_waiting(self) -> Floats:
        """How many requests wait in each iteration, [iterations]."""
        return self.iterations[waiting_field(self.config)].to_numpy(dtype=float)

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
        recorded = _table(iteration_columns(find_iterations(self.path), self.config, self.without))
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
        table = _table_of(chain.from_iterable(column_pieces(path, SPAN_FIELDS) for path in paths), columns)
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
        pieces = map(flat_requests, column_pieces(find_lines(self.path, "requests"), REQUEST_FIELDS))
        table = _table_of(pieces, REQUEST_COLUMNS)
        table["request_id"] = table["request_id"].astype(str)
        return table.sort_values("index", kind="stable", ignore_index=True)

    @property
    def completed(self) -> pd.DataFrame:
        """The requests that have all their tokens: latencies cover these."""
        return self.requests[self.requests["outcome"] == "completed"]


def _table_of(pieces: Iterable[Columns], columns: Iterable[str]) -> pd.DataFrame:
    """The columns of `pieces`; see `gathered`."""
    return _table(gathered(pieces, columns))


def _table(columns: Mapping[str, Column]) -> pd.DataFrame:
    import pandas as pd

    values = {name: column if isinstance(column, list) else np.asarray(column) for name, column in columns.items()}
    return pd.DataFrame(values, copy=False)


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


def waiting_field(config: Mapping[str, Any]) -> str:
    """The field of an iteration with the number of requests that wait. All of SGLang's are in its queue: those that
    generate, and stand aside while prompts run, do not wait."""
    return "queued" if config.get("engine") == SGLANG else "waiting"


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
