"""The recorder: hears of every iteration and writes the run directory."""

from array import array
from collections.abc import Callable
from pathlib import Path
from time import gmtime, strftime
from typing import Any

import numpy as np

from ifbbench.batching.records import IterationRecord
from ifbbench.batching.request import Request
from ifbbench.recording.digest import ScheduleDigest
from ifbbench.recording.jsonl_writer import JsonLinesWriter, replace_lines
from ifbbench.recording.metrics import RunMetrics, bound_by
from ifbbench.recording.run_directory import OPEN_SPANS, write_json
from ifbbench.recording.spans import SpanTracker

FLUSH_INTERVAL_S = 1.0
TIMESTAMP_FORMAT = "%m-%d-%Y %H:%M:%S"


class Recorder:
    """An Observer that writes `iterations.jsonl`, `spans.jsonl` and `requests.jsonl` as the run goes, `summary.json` at
    its end, and `run.json` at both.

    directory: an empty run directory. description: what `run.json` says of the run. max_requests: the engine's limit of
    active requests. arrival_s(request): when the trace says that it comes, in seconds on the run's clock.
    """

    def __init__(
        self,
        directory: Path,
        description: dict[str, Any],
        total_requests: int,
        max_requests: int,
        arrival_s: Callable[[Request], float],
    ) -> None:
        self.directory = directory
        self.metrics = RunMetrics(total_requests)
        self._description = description
        self._max_requests = max_requests
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
        self._second = -1
        self._timestamp = ""

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

    def refused(self, request: Request, error: str) -> None:
        """Take in a request that was refused."""
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
        cache, context_tokens = record.cache, record.num_context_tokens
        left_out = record.left_out
        return {
            "Timestamp": self._format_timestamp(record.timestamp),
            "Iteration Counter": record.iteration,
            "Active Request Count": record.active,
            "Max Request Count": self._max_requests,
            "Max KV cache blocks": cache.max_blocks,
            "Free KV cache blocks": cache.max_blocks - cache.used_blocks,
            "Used KV cache blocks": cache.used_blocks,
            "Tokens per KV cache block": cache.tokens_per_block,
            "Allocated total KV cache blocks": cache.allocated_total,
            "Allocated new KV cache blocks": cache.allocated_total,
            "Reused KV cache blocks": 0,
            "Scheduled Requests": len(record.context) + record.num_generation,
            "Context Requests": len(record.context),
            "Generation Requests": record.num_generation,
            "Total Context Tokens": context_tokens,
            "MicroBatch ID": 0,
            "Paused Requests": len(record.paused),
            "ifbbench": {
                "start_s": record.start_s,
                "latency_ms": (record.end_s - record.start_s) * 1000,
                "host_ms": (record.submit_s - record.start_s) * 1000,
                "device_ms": (record.end_s - record.submit_s) * 1000,
                "queued": record.queued,
                "bound_by": bound_by(record),
                "first_left_out": left_out
                and {"request_id": left_out.request.request_id, "reason": left_out.limit.value},
                "paused": [
                    {"request_id": pause.victim.request_id, "for": pause.beneficiary.request_id}
                    for pause in record.paused
                ],
                "tokens_recomputed": record.recomputed,
                "budget_used": context_tokens + record.num_generation,
                "kv_fragmentation": round(cache.fragmentation, 6),
            },
        }

    def _format_timestamp(self, timestamp: float) -> str:
        """The timestamp in UTC, formatted once a second."""
        if int(timestamp) != self._second:
            self._second = int(timestamp)
            self._timestamp = strftime(TIMESTAMP_FORMAT, gmtime(self._second))
        return self._timestamp
