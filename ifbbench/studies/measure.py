"""What calibration runs, and how long its iterations take: small workloads with batches of all kinds and sizes."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from ifbbench.build.engine import Engine
from ifbbench.clock import Clock, WallClock
from ifbbench.engine.batch import Batch, StepOutputs
from ifbbench.engine.interfaces import Executor
from ifbbench.kv.attention_window import ceil_div
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.replay.client import ReplayClient
from ifbbench.replay.requests import request_maker
from ifbbench.rundir.recorder import Recorder
from ifbbench.schedulers.engines import make_loop
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.simulated.step_work import StepWork
from ifbbench.workload.trace import Trace, TraceRequest

PROMPT_LENS = (16, 64, 192, 512, 1024, 2048, 4096)
QUICK_PROMPT_LENS = (16, 192, 1024)
# Generation batches after the context batch of requests that start together.
GENERATION_STEPS = 8
CHUNK_BUDGETS = (128, 512, 1024)
CHUNKED_PROMPT_LEN = 2048
STREAM_REQUESTS = 24
QUICK_STREAM_REQUESTS = 12
STREAM_PROMPT_LENS = (16, 1024)
STREAM_OUTPUT_LENS = (4, 48)
# No further round starts after this time; on a quiet machine all rounds of the tiny model take less.
BUDGET_S = 150.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A workload of requests that all arrive at once.

    lengths: prompt and output length of each request, in tokens.
    concurrency: maximum of active requests, so that the others join while some generate; None for all.
    chunk_budget: tokens of an iteration with chunked context; None without it.
    """

    lengths: tuple[tuple[int, int], ...]
    concurrency: int | None = None
    chunk_budget: int | None = None

    def fits(self, limits: BatchingConfig) -> bool:
        """Whether no request is refused, or has to wait for a batch slot or blocks."""
        at_once = self.concurrency or len(self.lengths)
        longest = max(prompt_len + output_len for prompt_len, output_len in self.lengths)
        longest_pass = self.chunk_budget or max(prompt_len for prompt_len, _ in self.lengths)
        has_room = at_once * ceil_div(longest, limits.tokens_per_block) <= limits.num_blocks
        is_short = longest_pass <= limits.token_budget and longest <= limits.max_seq_len
        return at_once <= limits.max_batch_size and is_short and has_room


def scenarios(limits: BatchingConfig, seed: int, *, passes: int = 2, quick: bool = False) -> list[Scenario]:
    """The scenarios that fit `limits`: prompts that start together, prompts in chunks, and streams of requests that
    join while others generate.

    passes: iterations full of context tokens that a scenario may take; more make larger batches and longer sequences,
        but longer measurements.
    quick: only a few scenarios.
    """
    candidates = [
        *_together(limits, 1 if quick else passes, quick),
        *_chunked(limits, quick),
        *_streams(limits, seed, quick),
    ]
    return [scenario for scenario in candidates if scenario.fits(limits)]


def _together(limits: BatchingConfig, max_passes: int, quick: bool) -> Iterator[Scenario]:
    """From one request to a full batch, with prompts of unequal lengths around a mean, because attention over unequal
    lengths takes longer. The first requests generate until the last have finished their prompt."""
    for count in _batch_sizes(limits.max_batch_size, step=8 if quick else 2):
        for prompt_len in QUICK_PROMPT_LENS if quick else PROMPT_LENS:
            passes = ceil_div(count * prompt_len, limits.token_budget)
            if passes <= max_passes:
                # Equal distances from half the mean to one and a half of it.
                prompts = [round(prompt_len * (0.5 + (index + 0.5) / count)) for index in range(count)]
                yield Scenario(tuple((length, passes + GENERATION_STEPS) for length in prompts))


def _chunked(limits: BatchingConfig, quick: bool) -> Iterator[Scenario]:
    """A long prompt in chunks, alone and beside a request that generates."""
    for budget in CHUNK_BUDGETS[1:2] if quick else CHUNK_BUDGETS:
        longest = max(1, min(CHUNKED_PROMPT_LEN, limits.max_seq_len - 1 - GENERATION_STEPS))
        yield Scenario(((longest, 2),), chunk_budget=budget)
        yield Scenario(((64, 64), (longest, 2)), chunk_budget=budget)


def _streams(limits: BatchingConfig, seed: int, quick: bool) -> Iterator[Scenario]:
    """Requests of all lengths; the next one starts when one ends."""
    generator = random.Random(seed)

    def between(low: int, high: int) -> int:
        """A length, uniform on a logarithmic scale."""
        return round(low * math.exp(math.log(high / low) * generator.random()))

    for at_once in _batch_sizes(limits.max_batch_size, step=8 if quick else 4)[1:]:
        count = QUICK_STREAM_REQUESTS if quick else STREAM_REQUESTS
        lengths = [(between(*STREAM_PROMPT_LENS), between(*STREAM_OUTPUT_LENS)) for _ in range(max(count, at_once))]
        yield Scenario(tuple(lengths), concurrency=at_once)


def _batch_sizes(largest: int, step: int) -> list[int]:
    """1, `step`, its square and so on, and `largest`."""
    sizes = [1]
    while sizes[-1] * step < largest:
        sizes.append(sizes[-1] * step)
    return [*sizes, largest] if largest > 1 else sizes


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured iteration.

    seconds: time from the end of the previous executor step to the end of this one.
    loop_s: the part before the executor: recording and responses of the previous iteration, scheduling and packing of
        this one; None if unknown.
    """

    work: StepWork
    seconds: float
    loop_s: float | None


class TimingExecutor:
    """Passes batches to another executor, and notes when each was submitted and when it was done."""

    def __init__(self, executor: Executor, clock: Clock) -> None:
        self._executor = executor
        self._clock = clock
        self._start_s = clock.now()
        self._submitted: list[tuple[Batch, float]] = []
        self._done_s: list[float] = []

    def submit(self, batch: Batch) -> None:
        """Start one batch."""
        self._submitted.append((batch, self._clock.now()))
        self._executor.submit(batch)

    def collect(self) -> StepOutputs:
        """Wait for the oldest batch in flight."""
        outputs = self._executor.collect()
        self._done_s.append(self._clock.now())
        return outputs

    def close(self) -> None:
        """Leave the other executor open for the next scenario."""

    def samples(self) -> list[Sample]:
        """One for each iteration; the first begins when this executor was made."""
        ends = pairwise([self._start_s, *self._done_s])
        return [
            Sample(StepWork.of_batch(batch), seconds=done_s - before_s, loop_s=submitted_s - before_s)
            for (batch, submitted_s), (before_s, done_s) in zip(self._submitted, ends, strict=True)
        ]


def run_scenario(engine: Engine, scenario: Scenario) -> list[Sample]:
    """Run `scenario` like `ifbbench run`, recording included, and return its iterations in order."""
    limits = engine.limits
    if scenario.chunk_budget is not None:
        limits = limits.with_chunks(scenario.chunk_budget)
    requests = [
        TraceRequest(index, 0.0, prompt_len, max_new_tokens=output_len, output_len=output_len)
        for index, (prompt_len, output_len) in enumerate(scenario.lengths)
    ]
    clock, trace = engine.clock, Trace("calibration", requests, sha256="", source="calibration")
    client = ReplayClient(
        trace, clock, request_maker(engine), concurrency=scenario.concurrency, keeps_arrivals=False, keeps_outputs=False
    )
    with TemporaryDirectory() as directory:
        recorder = Recorder(Path(directory), {}, len(trace), limits.batching_type, limits.max_active, client.arrival_s)
        executor = TimingExecutor(engine.executor, clock)
        manager = make_loop(limits, executor, clock, client.get_requests, client.send_response, recorder, client.queued)
        while manager.step():
            pass
        recorder.close(partial=False)
    return executor.samples()


def measure(
    engine: Engine, workloads: Sequence[Scenario], rounds: int, progress: Progress = NO_PROGRESS
) -> list[Sample]:
    """The iterations of all workloads, `rounds` times. The order differs between rounds, so that a disturbance of the
    machine does not affect the same workload every time."""
    generator, clock = random.Random(engine.config.seed), WallClock()
    total, samples = rounds * len(workloads), list[Sample]()
    progress.stage("measuring")
    for number in range(rounds):
        if number and clock.now() > BUDGET_S:
            break
        for index, workload in enumerate(generator.sample(workloads, len(workloads))):
            samples += run_scenario(engine, workload)
            progress.update(number * len(workloads) + index + 1, total, f"{len(samples):,} iterations")
    return samples
