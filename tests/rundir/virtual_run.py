"""Runs of the batch manager on a virtual clock, recorded: quick, and the same to the last byte each time."""

import json
from collections.abc import Collection, Container, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ifbbench.engine.batch import NO_OUTPUTS, Batch, StepOutputs
from ifbbench.engine.loop import ExecutorFailed, TokenGenerationLoop
from ifbbench.engine.request import Request
from ifbbench.kv.interface import KvCache
from ifbbench.replay.client import ReplayClient
from ifbbench.rundir.recorder import Recorder
from ifbbench.schedulers.engines import make_loop
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.schedulers.tensorrt_llm.policies import CapacityDecision, LeftOut
from ifbbench.virtual_clock import VirtualClock
from ifbbench.workload.trace import Trace, TraceRequest
from tests.engine.engine import scheduler_of

NANOSECONDS_PER_TOKEN = 1_000_000
OWN_REASON = 'the "fairness" rule'


class OneAtATime:
    """A user's policy: only one request runs at a time, the others are left out for `OWN_REASON`."""

    def __init__(self, max_num_requests: int) -> None:
        pass

    def schedule(self, active: ActiveRequests, kv_cache: KvCache) -> CapacityDecision:
        if active.generation:
            admitted, others = [], active.context
        else:
            admitted, others = active.context[:1], active.context[1:]
        left_out = LeftOut(others[0], OWN_REASON) if others else None
        return CapacityDecision(admitted, left_out=left_out)


class TickingExecutor:
    """Answers without tokens; a batch takes a millisecond for each of its tokens. Those numbered in `fails_in` fail
    after that time; those in `stalls` take so many seconds more."""

    def __init__(
        self, clock: VirtualClock, fails_in: Container[int] = (), stalls: Mapping[int, float] = MappingProxyType({})
    ) -> None:
        self.clock = clock
        self.stalls = stalls
        self.fails_in = fails_in
        self.batches: list[Batch] = []
        self.collected = 0

    def submit(self, batch: Batch) -> None:
        self.batches.append(batch)

    def collect(self) -> StepOutputs:
        self.clock.advance(self.batches[self.collected].num_tokens * NANOSECONDS_PER_TOKEN)
        self.clock.advance(round(self.stalls.get(self.collected, 0.0) * 1e9))
        self.collected += 1
        if self.collected - 1 in self.fails_in:
            raise RuntimeError("the device gave up")
        return NO_OUTPUTS

    def close(self) -> None:
        self.batches.clear()


def limits(policy: str = "max_utilization", **changes: Any) -> BatchingConfig:
    values: dict[str, Any] = {
        "policy": policy,
        "max_batch_size": 4,
        "max_num_tokens": 64,
        "max_seq_len": 64,
        "max_input_len": 63,
        "tokens_per_block": 4,
        "num_blocks": 24,
        "chunk_unit": None,
    }
    return BatchingConfig(**(values | changes))


def trace_of(rows: list[tuple[float, int, int]]) -> Trace:
    """A trace of (arrival in s, prompt length, output length); ids start at 100, and 3 tokens more are reserved."""
    requests = [
        TraceRequest(100 + index, arrival, prompt, output + 3, output)
        for index, (arrival, prompt, output) in enumerate(rows)
    ]
    return Trace("virtual", requests, "0" * 64, "test")


class Interrupted(Exception):
    """The run was killed: its recorder has not been closed."""


def run(
    trace: Trace,
    config: BatchingConfig,
    directory: Path,
    stop_after: int | None = None,
    kill_after: int | None = None,
    stops: Mapping[int, Collection[int]] = MappingProxyType({}),
    fails_in: Container[int] = (),
    recording_format: str = "jsonl",
    iteration_stats_every: int = 1,
    stalls: Mapping[int, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """Run to the end, or for `stop_after` iterations; returns the summary. Raises Interrupted after `kill_after`.

    stops: ids of requests to stop once that many iterations were submitted. fails_in: batches that fail. stalls: see
    TickingExecutor."""
    clock = VirtualClock()
    client = ReplayClient(trace, clock, _request)
    directory.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(
        directory,
        {"name": "virtual", "config": {"iteration_stats_every": iteration_stats_every}},
        len(trace),
        config.batching_type,
        config.max_batch_size,
        client.arrival_s,
        recording_format,
        iteration_stats_every,
        clock,
    )
    manager: TokenGenerationLoop = make_loop(
        config,
        TickingExecutor(clock, fails_in, stalls),
        clock,
        client.get_requests,
        client.send_response,
        recorder,
        client.queued,
        lambda: stops.get(manager.iteration, ()),
    )
    while not client.done and manager.iteration != stop_after:
        if manager.iteration == kill_after:
            raise Interrupted
        if not _step(manager):
            client.wait()
    while client.done and _step(manager):
        """Collect the iterations in flight."""
    return recorder.close(partial=not client.done)


def _step(manager: TokenGenerationLoop) -> bool:
    try:
        was_busy = manager.step()
    except ExecutorFailed:
        was_busy = True
    scheduler_of(manager).kv_cache.check_consistency()
    return was_busy


def _request(index: int, row: TraceRequest) -> Request:
    return Request(row.request_id, row.prompt_len, row.max_new_tokens, output_len=row.output_len, index=index)


def lines(directory: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]
