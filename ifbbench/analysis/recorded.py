"""A recorded run: its timeline, its spans, and its requests in the order in which they are scheduled."""

from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec import convert
from msgspec.json import Decoder

from ifbbench.analysis.confidence import RunSample
from ifbbench.engine.plan import Limit
from ifbbench.errors import InputError
from ifbbench.rundir.columns import iteration_pieces
from ifbbench.rundir.reader import REQUEST_FIELDS, RunData, check_lines, load_run
from ifbbench.rundir.rows import Id, Span, TraceRow, read_lines, read_rows
from ifbbench.rundir.run_directory import OPEN_SPANS, find_iterations, find_lines
from ifbbench.rundir.timeline import UNUSED, Iterations, read_iteration, read_iterations

QUEUE = Limit.BATCH_SIZE.value  # the cause of waiting of a request that is not active yet


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
        cls,
        path: Path,
        or_endpoint: bool = False,
        or_empty: bool = False,
        or_summary: bool = False,
        or_fleet: bool = False,
    ) -> "RecordedRun":
        """The one run at or below `path`. InputError if there is none, if there are several, or if it has no iteration.

        or_endpoint: also a run against an endpoint, which never has one.
        or_empty: also one that ended, or was killed, before its first; `nothing_ran` says so.
        or_summary: also one of `--recording summary`, which has none.
        or_fleet: also that of a fleet, whose replicas have them.
        """
        run = cls(load_run(path))
        if (run.data.endpoint and or_endpoint) or (run.data.has_only_summary and or_summary):
            return run
        if run.data.is_fleet and or_fleet:
            return run
        if run.data.endpoint:
            raise InputError(
                f"{run.data.path}: a run against an endpoint has no iterations; `ifbbench report`, `why`, "
                "`compare`, `plot`, `plot --html` of it alone and `export` take it."
            )
        if run.nothing_ran and not (or_empty and not (run.data.summary or {}).get("iterations")):
            raise InputError(f"{run.data.path}: {run.nothing_ran}. Expected a run with an iteration.")
        return run

    @property
    def lacks_requests(self) -> bool:
        """Whether it was imported from a log that has no requests."""
        return self.data.lacks_requests

    @property
    def of_other_engine(self) -> bool:
        """Whether a real engine of another project ran it: its recording, or its log."""
        return "recorded" in self.data.run or "imported" in self.data.run

    @cached_property
    def nothing_ran(self) -> str:
        """That there is no iteration, and why; empty if there is one."""
        if any(iteration_pieces(find_iterations(self.data.path), self.config, UNUSED)):
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
        found = read_iterations(path, self.config)
        check_lines(path, int(found.number.max(initial=0)), len(found), self.data.recorded_every)
        return found

    def iteration(self, number: int) -> Iterations | None:
        """One iteration, as columns of one element, found without reading the others if the file is plain; None if it
        is not recorded."""
        return read_iteration(find_iterations(self.data.path), number)

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
