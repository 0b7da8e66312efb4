"""Measures iterations as a run has them: the same loop, the same recording, and the executor timed by itself."""

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from ifbbench.api.engine import Engine
from ifbbench.calibration.scenarios import Scenario
from ifbbench.clock import Clock
from ifbbench.engine.batch import Batch, Executor, StepOutputs
from ifbbench.engine.manager import BatchManager
from ifbbench.engine.statistics import IterationStatistics
from ifbbench.recording.recorder import Recorder
from ifbbench.replay.client import ReplayClient
from ifbbench.replay.requests import request_maker
from ifbbench.simulation.step_work import StepWork


@dataclass(frozen=True, slots=True)
class Sample:
    """One iteration as measured.

    executor_s: seconds in the executor. loop_s: seconds of the loop around it, from the end of the executor's work
    before to that of this iteration: recording and responses of the one before, scheduling and packing of this one.
    """

    work: StepWork
    executor_s: float
    loop_s: float

    @property
    def seconds(self) -> float:
        """Of the whole iteration."""
        return self.executor_s + self.loop_s


class StopWatch:
    """An executor that hands everything on to another one, and notes when each batch came and when it was done."""

    def __init__(self, executor: Executor, clock: Clock) -> None:
        self.batches: list[Batch] = []
        self.submitted_s: list[float] = []
        self.done_s: list[float] = []
        self._executor = executor
        self._clock = clock
        self._start_s = clock.now()

    def submit(self, batch: Batch) -> None:
        """Start one batch."""
        self.batches.append(batch)
        self.submitted_s.append(self._clock.now())
        self._executor.submit(batch)

    def collect(self) -> StepOutputs:
        """Wait for the oldest batch under way."""
        outputs = self._executor.collect()
        self.done_s.append(self._clock.now())
        return outputs

    def close(self) -> None:
        """The executor behind it stays open, for the next scenario."""

    def samples(self) -> list[Sample]:
        """One for each iteration, the first from when this watch was made."""
        ends = pairwise([self._start_s, *self.done_s])
        return [
            Sample(StepWork.of_batch(batch), executor_s=done_s - submitted_s, loop_s=submitted_s - before_s)
            for batch, submitted_s, (before_s, done_s) in zip(self.batches, self.submitted_s, ends, strict=True)
        ]


def run_scenario(engine: Engine, scenario: Scenario) -> list[Sample]:
    """Run `scenario` as a run would, recording included, and return its iterations in order."""
    limits = engine.limits
    if scenario.chunk_budget is not None:
        limits = replace(
            limits, max_num_tokens=scenario.chunk_budget, chunk_unit=limits.tokens_per_block,
            max_input_len=limits.max_seq_len - 1,
        )  # fmt: skip
    clock, trace = engine.clock, scenario.trace()
    client = ReplayClient(
        trace, clock, request_maker(engine), concurrency=scenario.concurrency, keeps_arrivals=False, keeps_outputs=False
    )
    statistics = IterationStatistics(limits.batching_type, limits.max_batch_size)
    with TemporaryDirectory() as directory:
        recorder = Recorder(Path(directory), {}, len(trace), statistics, client.arrival_s)
        watch = StopWatch(engine.executor, clock)
        manager = BatchManager(
            limits, watch, clock, client.get_requests, client.send_response, recorder, client.queued
        )
        while manager.step():
            pass
        recorder.close(partial=False)
    return watch.samples()
