"""The recorder: hears of every iteration and writes the run directory."""

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ifbbench.batching.records import IterationRecord
from ifbbench.batching.request import Request
from ifbbench.batching.statistics import IterationStatistics
from ifbbench.recording.digest import ScheduleDigest
from ifbbench.recording.jsonl_writer import JsonLinesWriter, replace_lines
from ifbbench.recording.metrics import RunMetrics, bound_by
from ifbbench.recording.run_directory import OPEN_SPANS, write_json
from ifbbench.recording.spans import SpanTracker

FLUSH_INTERVAL_S = 1.0


class Recorder:
    """An Observer that writes `iterations.jsonl`, `spans.jsonl` and `requests.jsonl` as the run goes, `summary.json` at
    its end, and `run.json` at both.

    directory: an empty run directory. description: what `run.json` says of the run. statistics: makes the batch
    manager's fields of an iteration. arrival_s(request): when the trace says that it comes, in seconds on the run's
    clock.
    """

    def __init__(
        self,
        directory: Path,
        description: dict[str, Any],
        total_requests: int,
        statistics: IterationStatistics,
        arrival_s: Callable[[Request], float],
    ) -> None:
        self.directory = directory
        self.metrics = RunMetrics(total_requests)
        self._description = description
        self._statistics = statistics
        self._arrival_s = arrival_s
        write_json(directory / "run.json", {**description, "schedule_digest": None, "partial": True})
        self._iterations = JsonLinesWriter(directory / "iterations.jsonl")
        self._spans = JsonLinesWriter(directory / "spans.jsonl")
        self._requests = JsonLinesWriter(directory / "requests.jsonl")
        self._tracker = SpanTracker(self._spans.write, arrival_s)
        self._digest = ScheduleDigest()
        self._starts = array("d")
        self._ends = array("d")
        self._flushed_s = 0.0

    def iteration(self, record: IterationRecord) -> None:
        """Take in one iteration."""
        self._starts.append(record.start_s)
        self._ends.append(record.end_s)
        self.metrics.add_iteration(record)
        self._digest.add(record)
        self._iterations.write(self._iteration_line(record))
        for life in self._tracker.add(record, self._starts):
            # Views, not copies; they end with this statement, before the arrays grow again.
            self._requests.write(
                self.metrics.add_request(life, np.frombuffer(self._starts), np.frombuffer(self._ends))
            )
        if record.end_s - self._flushed_s >= FLUSH_INTERVAL_S:
            self.flush()
            self._flushed_s = record.end_s

    def left(self, request: Request, error: str | None) -> None:
        """Take in a request that was refused, failed or was stopped."""
        self._tracker.drop(request, self.metrics.iterations)
        self._requests.write(self.metrics.add_failure(request, self._arrival_s(request), error))

    def flush(self) -> None:
        """Bring everything to the disk, so that a run killed now can be read up to here, open spans included."""
        for writer in self._writers:
            writer.flush()
        replace_lines(self.directory / OPEN_SPANS, self._tracker.open_records(self.metrics.iterations - 1))

    def close(self, partial: bool) -> dict[str, Any]:
        """End the recording; returns the summary. `partial`: the run did not get to its end."""
        self._tracker.close(self.metrics.iterations - 1)
        for writer in self._writers:
            writer.close()
        (self.directory / OPEN_SPANS).unlink(missing_ok=True)
        digest = self._digest.hexdigest()
        summary = self.metrics.summary(digest, partial)
        write_json(self.directory / "summary.json", summary)
        description = {**self._description, "schedule_digest": digest, "partial": partial}
        write_json(self.directory / "run.json", description)
        return summary

    @property
    def _writers(self) -> tuple[JsonLinesWriter, ...]:
        return self._iterations, self._spans, self._requests

    def _iteration_line(self, record: IterationRecord) -> dict[str, Any]:
        left_out = record.left_out
        return {
            **self._statistics.fields(record),
            "ifbbench": {
                "start_s": record.start_s,
                "latency_ms": (record.end_s - record.start_s) * 1000,
                "host_ms": (record.submit_s - record.start_s) * 1000,
                "device_ms": (record.end_s - record.submit_s) * 1000,
                **_pass_times(record),
                "queued": record.queued,
                "bound_by": bound_by(record),
                "first_left_out": left_out
                and {"request_id": left_out.request.request_id, "reason": left_out.limit.value},
                "paused": [
                    {"request_id": pause.victim.request_id, "for": pause.beneficiary.request_id}
                    for pause in record.paused
                ],
                "tokens_recomputed": record.recomputed,
                "budget_used": record.budget_used,
                **({"padding_tokens": record.padding} if record.padding else {}),
                "kv_fragmentation": round(record.cache.fragmentation, 6),
            },
        }


def _pass_times(record: IterationRecord) -> dict[str, float]:
    """Where the phases had a pass each: how long each took."""
    if record.context_end_s is None:
        return {}
    return {
        "context_pass_ms": (record.context_end_s - record.submit_s) * 1000,
        "generation_pass_ms": (record.end_s - record.context_end_s) * 1000,
    }
