"""Recording of live traffic: a run directory like that of `ifbbench run`, with the traffic as its trace."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

from ifbbench.build.engine import Engine
from ifbbench.clock import NANOSECONDS, WallClock
from ifbbench.engine.interfaces import Observer
from ifbbench.engine.records import IterationRecord
from ifbbench.engine.request import Request
from ifbbench.engine.stretch import Stretch
from ifbbench.replay.single import describe
from ifbbench.rundir import run_directory
from ifbbench.rundir.recorder import FLUSH_INTERVAL_S, Recorder
from ifbbench.rundir.servers import parts_of
from ifbbench.rundir.traffic_trace import TrafficTrace
from ifbbench.serving.library.request import InferenceRequest
from ifbbench.virtual_clock import PacedClock
from ifbbench.workload.trace import Trace, TraceRequest

SOURCE = "live traffic"
Ended: TypeAlias = tuple[dict[str, Any], tuple[Any, ...]]


class TrafficRecording(Observer):
    """Writes the run directory of a server: an Observer.

    lengths_only: rows of the trace have no tokens.
    ended: once it is closed, the summary and the parts of its recorder.

    All is called in the batch manager's thread, `close` after its end.
    """

    def __init__(self, directory: Path, engine: Engine, *, overwrite: bool, lengths_only: bool) -> None:
        self.ended: Ended | None = None
        self._lengths_only = lengths_only
        self._num_arrived = self._stopped_before_output = 0
        self._engine_clock = engine.clock
        self._arrivals_s: dict[int, float] = {}
        self._flushed_s, self._is_flushed, self._clock = 0.0, True, WallClock()
        config = engine.config
        self._trace_path = directory / f"trace.{config.recording_format}"
        self._description = describe(Trace(directory.name, [], "", SOURCE), engine, engine.config)
        self._description["name"] = directory.name
        self._open = ExitStack()  # until the end, no other process records there
        self.directory = self._open.enter_context(run_directory.begun([directory], overwrite, self._begin))
        self._trace = TrafficTrace(self._trace_path)
        self._logged = config.iteration_stats_format
        self._recorder = Recorder(
            directory,
            self._description,
            0,
            engine.limits.batching_type,
            engine.limits.max_active,
            self._arrival_s,
            config.recording_format,
            config.iteration_stats_every,
            profile=engine.profile.steps if engine.profile else None,
            iteration_stats_format=config.iteration_stats_format,
        )

    def _begin(self, directory: Path, name: str) -> None:
        (directory / self._trace_path.name).touch()
        run_directory.write_begun(directory, self._description)

    def arrived(self, request: InferenceRequest, arrival_s: float) -> None:
        """A request will be handed to the engine, or was withdrawn before."""
        self._arrivals_s[request.request_id] = arrival_s
        self._num_arrived += 1

    def iteration(self, record: IterationRecord) -> None:
        self._recorder.iteration(record)
        for request in record.finished:
            self._write_row(request)
        self._is_flushed = False
        if self._clock.now() - self._flushed_s >= FLUSH_INTERVAL_S:
            self._flush()

    def stretch(self, stretch: Stretch) -> None:
        for record in stretch.records():
            self.iteration(record)

    def left(self, request: Request, error: str | None) -> None:
        self._recorder.left(request, error)
        self._stopped_before_output += error is None and not request.num_outputs
        self._write_row(request)

    def idle(self) -> None:
        """Nothing is active."""
        if not self._is_flushed:
            self._flush()

    def close(self, partial: bool, delivery_lag_s: dict[str, float]) -> dict[str, Any]:
        """End the recording; returns the summary.

        partial: whether the engine failed.
        delivery_lag_s: delay of deliveries, for the summary.
        """
        self._description["trace"] |= self._trace.close(self._num_arrived)
        self._recorder.metrics.total = self._num_arrived
        clock, more = self._engine_clock, dict[str, Any](delivery_lag_s=delivery_lag_s)
        if isinstance(clock, PacedClock):
            more["replay_differs"] = {
                "stopped_before_output": self._stopped_before_output,
                "host_delays": clock.num_skips,
                "host_delay_s": clock.skipped_ns / NANOSECONDS,
            }
        with self._open:
            summary = self._recorder.close(partial, lambda _: more)
        self.ended = summary, parts_of(self._recorder)
        if self._logged in run_directory.SERVER_LOGS:
            from ifbbench.report.outputs import write_server_log
            from ifbbench.rundir.reader import load_run

            write_server_log(
                self._logged, load_run(self.directory), self.directory / run_directory.SERVER_LOGS[self._logged]
            )
        return summary

    def _arrival_s(self, request: Request) -> float:
        return self._arrivals_s[request.request_id]

    def _flush(self) -> None:
        self._trace.flush()
        self._recorder.flush()
        self._flushed_s, self._is_flushed = self._clock.now(), True

    def _write_row(self, request: Request) -> None:
        """Write the trace's row of a request that has ended."""
        tokens, prompt_len = request.prompt_tokens, request.original_prompt_len
        requested = request.max_new_tokens + request.prompt_len - prompt_len
        has_tokens = tokens is not None and not self._lengths_only
        row = TraceRequest(
            request.request_id,
            self._arrivals_s.pop(request.request_id),
            prompt_len,
            requested,
            # A request that was stopped before its first token would have had one.
            max(request.num_outputs, 1),
            prompt_tokens=tuple(tokens[:prompt_len].tolist()) if has_tokens and tokens is not None else None,
            priority=request.priority,
            beam_width=request.beam_width,
            lora_task_id=request.lora_task_id,
        )
        self._trace.add(row)
