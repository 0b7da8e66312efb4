"""A recorded run as arrays: its iterations, its spans, and its requests in the order in which they are scheduled."""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import convert
from msgspec.json import Decoder
from numpy.typing import NDArray

from ifbbench.analysis.confidence import RunSample
from ifbbench.compressed import is_compressed
from ifbbench.engine.plan import Limit
from ifbbench.errors import InputError
from ifbbench.rundir.reader import REQUEST_FIELDS, RunData, check_lines, load_run, read_lines
from ifbbench.rundir.rows import AnyIterationRow, Id, Span, TraceRow, find_row, iteration_decoder, read_rows
from ifbbench.rundir.run_directory import OPEN_SPANS, find_iterations, find_lines

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

NO_REQUEST = -1
QUEUE = Limit.BATCH_SIZE.value  # the cause of waiting of a request that is not active yet


@dataclass(frozen=True)
class PauseEvent:
    """One pause: `victim` lost its KV blocks in an iteration to make room for `beneficiary`."""

    iteration: int
    victim: Id
    beneficiary: Id


@dataclass(frozen=True)
class Iterations:
    """The recorded iterations, one element each: every one, unless the statistics were thinned.

    number: the iteration's. start_s, end_s, host_s: seconds. delivered_s: when its tokens reached their clients.
    limit: position in `limits` of what bound it. left_out: position in `left_out_pairs` of the first request that was
    left out and the reason; NO_REQUEST if none. used_blocks: NaN for a cache without blocks. blocks_of_window: by the
    tokens of each of several attention windows, the blocks of it that are in use (NaN where a line lacks them), and all
    of them.
    """

    number: Integers
    start_s: Floats
    end_s: Floats
    delivered_s: Floats
    host_s: Floats
    limit: Integers
    limits: list[str]
    left_out: Integers
    left_out_pairs: list[tuple[Id, str]]
    queued: Integers
    waiting: Integers
    active: Integers
    budget_used: Integers
    used_blocks: Floats
    blocks_of_window: dict[str, tuple[Floats, int]]
    pauses: list[PauseEvent]

    def __len__(self) -> int:
        return len(self.number)

    def start_of(self, iteration: int) -> float:
        """When an iteration began (s); interpolated for one that was not recorded."""
        return self._interpolated(iteration, self.start_s)

    def end_of(self, iteration: int) -> float:
        """When an iteration ended (s); interpolated for one that was not recorded."""
        return self._interpolated(iteration, self.end_s)

    def _interpolated(self, iteration: int, times_s: Floats) -> float:
        """As np.interp, which converts all of `number` each time."""
        right = min(int(self.number.searchsorted(iteration)), len(self.number) - 1)
        after = int(self.number[right])
        if right == 0 or after <= iteration:
            return float(times_s[right])
        before = int(self.number[right - 1])
        share = (iteration - before) / (after - before)
        return float(times_s[right - 1] + share * (times_s[right] - times_s[right - 1]))

    def position(self, iteration: int) -> int:
        """The element of `iteration`, or of the last recorded one before it."""
        return max(int(np.searchsorted(self.number, iteration, side="right")) - 1, 0)


class _Numbered(dict[Any, int]):
    """Numbers keys from 0 in the order in which they are first looked up."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


def read_iterations(path: Path) -> Iterations:
    """All recorded iterations of the file at `path`."""
    limits, pairs = _Numbered(), _Numbered()
    pieces: list[tuple[NDArray[Any], ...]] = []
    pauses: list[PauseEvent] = []
    pools, used_of_window = dict[str, int](), dict[str, list[Floats]]()
    for rows in read_rows(path, iteration_decoder(path)):
        details = [row.details for row in rows]
        left_out = [one.first_left_out for one in details]
        start_s, latency_ms = np.array([one.start_s for one in details]), np.array([one.latency_ms for one in details])
        delivered_ms = latency_ms + np.array([one.delivery_ms for one in details])
        pieces.append(
            (
                np.array([row.number for row in rows]),
                start_s,
                start_s + latency_ms / 1000,
                start_s + delivered_ms / 1000,
                np.array([one.host_ms for one in details]) / 1000,
                np.array([limits[one.bound_by] for one in details]),
                np.array([NO_REQUEST if one is None else pairs[one.request_id, one.reason] for one in left_out]),
                np.array([one.queued for one in details]),
                np.array([one.waiting for one in details]),
                np.array([row.active for row in rows]),
                np.array([one.budget_used for one in details]),
                np.array([row.used_blocks for row in rows], np.float64),
            )
        )
        for size in details[0].windows:
            of_rows = [one.windows.get(size) for one in details]
            pools[size] = max(one.blocks for one in of_rows if one is not None)
            used = np.array([np.nan if one is None else one.used for one in of_rows])
            used_of_window.setdefault(size, []).append(used)
        for row in rows:
            for pause in row.details.paused:
                pauses.append(PauseEvent(row.number, pause.request_id, pause.beneficiary))
    columns = [np.concatenate(parts) for parts in zip(*pieces, strict=True)] or [np.empty(0)] * 12
    number, start_s, end_s, delivered_s, host_s, limit, first, queued, waiting, active, budget, used = columns
    of_window = {size: (np.concatenate(parts), pools[size]) for size, parts in used_of_window.items()}
    return Iterations(
        number,
        start_s,
        end_s,
        delivered_s,
        host_s,
        limit,
        list(limits),
        first,
        list(pairs),
        queued,
        waiting,
        active,
        budget,
        used,
        of_window,
        pauses,
    )


class _TraceRows(dict[Id, TraceRow]):
    """The requests of a trace. InputError for one that other files of the run have and the trace lacks."""

    def __init__(self, path: Path, rows: dict[Id, TraceRow]) -> None:
        super().__init__(rows)
        self._path = path

    def __missing__(self, request_id: Id) -> TraceRow:
        raise InputError(f"{self._path}: request {request_id} of the run is missing. Restore the file, or run again.")


class RecordedRun:
    """A run directory, for analyses. Everything is read when it is first used.

    data: the same run as tables.
    """

    def __init__(self, data: RunData) -> None:
        self.data = data

    @classmethod
    def load(
        cls, path: Path, or_endpoint: bool = False, or_empty: bool = False, or_summary: bool = False
    ) -> "RecordedRun":
        """The one run at or below `path`. InputError if there is none, if there are several, or if it has no iteration.
        or_endpoint: also a run against an endpoint, which never has one. or_empty: also one that ended, or was killed,
        before its first; `nothing_ran` says so. or_summary: also one of `--recording summary`, which has none."""
        run = cls(load_run(path))
        if (run.data.endpoint and or_endpoint) or (run.data.has_only_summary and or_summary):
            return run
        if run.data.endpoint:
            raise InputError(
                f"{run.data.path}: a run against an endpoint has no iterations; `ifbbench report`, `why`, "
                "`compare`, `plot`, `plot --html` of it alone and `export` take it."
            )
        if run.nothing_ran and not (or_empty and not (run.data.summary or {}).get("iterations")):
            raise InputError(f"{run.data.path}: {run.nothing_ran}. Expected a run with an iteration.")
        return run

    @cached_property
    def nothing_ran(self) -> str:
        """That there is no iteration, and why; empty if there is one."""
        path = find_iterations(self.data.path)
        if next(chain.from_iterable(read_rows(path, iteration_decoder(path))), None) is not None:
            return ""
        failed = sum(row["outcome"] == "failed" for row in self.row_of.values())
        why = f"{failed} requests failed; `ifbbench report {self.data.path}` says why" if failed else ""
        return f"no iteration is recorded ({why or 'no request ran yet'})"

    @property
    def path(self) -> Path:
        return self.data.path

    @property
    def config(self) -> dict[str, Any]:
        return self.data.config

    @cached_property
    def iterations(self) -> Iterations:
        path = find_iterations(self.data.path)
        found = read_iterations(path)
        check_lines(path, int(found.number.max(initial=0)), len(found), self.data.recorded_every)
        return found

    def row_at(self, number: int) -> AnyIterationRow | None:
        """The line of one iteration, found without reading the others if the file is plain; None if it is not
        recorded."""
        path = find_iterations(self.data.path)
        if not is_compressed(path):
            return find_row(path, iteration_decoder(path), number)
        rows = chain.from_iterable(read_rows(path, iteration_decoder(path)))
        return next((row for row in rows if row.number == number), None)

    @cached_property
    def spans(self) -> dict[Id, list[Span]]:
        """The spans of each request, in order of time; of a killed run also those open when it was last flushed."""
        spans: dict[Id, list[Span]] = {}
        for path in (find_lines(self.data.path, "spans"), self.data.path / OPEN_SPANS):
            for span in chain.from_iterable(read_rows(path, Decoder(Span))):
                if span.last < span.first or span.produced > max(span.tokens, 0):
                    raise InputError(
                        f"{path}: a span of request {span.request_id} goes from iteration {span.first} to "
                        f"{span.last}, and makes {span.produced} of {span.tokens} tokens; expected a last "
                        "iteration after the first, and no more tokens than it runs. Run again."
                    )
                self.data.check_span(path, span.request_id, span.last)
                spans.setdefault(span.request_id, []).append(span)
        for of_request in spans.values():
            of_request.sort(key=lambda span: span.first)
            # A span that was open at the flush may have been closed in it too.
            firsts = [span.first for span in of_request]
            of_request[:] = [span for index, span in enumerate(of_request) if span.first not in firsts[:index]]
        return spans

    @cached_property
    def trace(self) -> "dict[Id, TraceRow]":
        """The requests as replayed, in order of arrival. InputError if the file is missing.

        A server writes the row of a request when the request ends. Those that the file of a killed one lacks are made
        from the other files."""
        path = find_lines(self.data.path, "trace")
        if not path.exists():
            raise InputError(f"{path}: missing; expected the requests as replayed. Restore the file, or run again.")
        rows = {row.request_id: row for row in chain.from_iterable(read_rows(path, Decoder(TraceRow)))}
        if self.data.partial and (missing := (self.row_of.keys() | self.spans.keys()) - rows.keys()):
            found = (*rows.values(), *map(self._row_without_trace, missing))
            rows = {row.request_id: row for row in sorted(found, key=lambda row: (row.arrival_s, str(row.request_id)))}
        return _TraceRows(path, rows)

    def _row_without_trace(self, request_id: Id) -> TraceRow:
        """The row of a request that the trace lacks, from its line of `requests.jsonl`; if it has not ended, from its
        spans, which do not have the length of its prompt."""
        if (line := self.row_of.get(request_id)) is not None:
            return convert({name: line[name] for name in TraceRow.__struct_fields__ if name in line}, TraceRow)
        spans = self.spans[request_id]
        arrival_s = self.iterations.start_of(spans[0].first) if len(self.iterations) else 0.0
        return TraceRow(request_id, arrival_s, max_new_tokens=max(sum(span.produced for span in spans), 1))

    @cached_property
    def rank(self) -> dict[Id, int]:
        """The place of each request in the order in which requests are scheduled: by priority, then arrival."""
        order = sorted(self.trace.values(), key=lambda row: -row.priority)  # stable: equal ones by arrival
        return {row.request_id: index for index, row in enumerate(order)}

    @cached_property
    def row_of(self) -> dict[Id, dict[str, Any]]:
        """The line of `requests.jsonl` of each request that ended."""
        lines = read_lines(find_lines(self.data.path, "requests"), REQUEST_FIELDS)
        return {line["request_id"]: line for line in lines}

    @cached_property
    def sample(self) -> RunSample:
        """The requests that the figures of the run cover."""
        window = (self.data.summary or {}).get("steady_state")
        return RunSample(self.row_of.values(), (window["start_s"], window["end_s"]) if window else None)

    def arrival_s(self, request_id: Id) -> float:
        """When a request arrived, on the clock of the run."""
        recorded = self.row_of.get(request_id, {}).get("arrival_s")
        return float(self.trace[request_id].arrival_s if recorded is None else recorded)

    def known_id(self, text: str) -> Id:
        """The request id that a user wrote as `text`; InputError if the run has no such request."""
        found = next((one for one in self.trace if str(one) == text), None)
        if found is None:
            some = ", ".join(str(one) for one in list(self.trace)[:3])
            raise InputError(f"request {text} is not in {self.data.path}; expected an id of its trace, such as {some}.")
        return found
