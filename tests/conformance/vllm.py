"""Replay of whole workloads through vLLM's scheduler: every step must be that of vLLM's own."""

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ifbbench.engine.arrays import Rows
from ifbbench.engine.batch import StepOutputs
from ifbbench.engine.drafts import DraftSettings
from ifbbench.engine.interfaces import RequestSource
from ifbbench.engine.passes import BatchBuilder
from ifbbench.engine.plan import Plan
from ifbbench.engine.records import NO_CACHE_STATE, InFlightIteration, IterationRecord
from ifbbench.engine.request import Request
from ifbbench.engine.sampling_params import StopConditions
from ifbbench.kv.sequence import ReuseRules
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.vllm.rules import TOGETHER, VllmRules
from ifbbench.schedulers.vllm.scheduler import VllmScheduler
from ifbbench.settings.modes import Overlap
from ifbbench.virtual_clock import VirtualClock
from tests.conformance.outcome import Case, Mismatch, expect_equal

END_TOKEN = 3


def limits_of(settings: Mapping[str, Any]) -> BatchingConfig:
    """The limits of a case's settings, which have vLLM's names."""
    blocks = settings["num_gpu_blocks"]
    return BatchingConfig(
        policy="guaranteed_no_evict",
        max_batch_size=settings["max_num_seqs"],
        max_num_tokens=settings["max_num_batched_tokens"],
        max_seq_len=settings["max_model_len"],
        max_input_len=settings["max_model_len"] - 1,
        tokens_per_block=settings["block_size"],
        num_blocks=blocks - 1,
        chunk_unit=1,
        overlap=Overlap.ASYNC if settings["async_scheduling"] else None,
        reuse=ReuseRules(settings["enable_prefix_caching"]),
        drafts=DraftSettings(settings["num_speculative_tokens"]),
        engine="vllm",
        vllm=VllmRules(
            is_priority=settings["scheduling_policy"] == "priority",
            max_scheduled_tokens=settings["max_num_scheduled_tokens"],
            max_active=settings["max_num_active_seqs"],
            long_prefill_threshold=settings["long_prefill_token_threshold"],
            is_threshold_adaptive=settings["long_prefill_token_threshold_adaptive"],
            reserves_full_prompt=settings["scheduler_reserve_full_isl"],
            watermark_blocks=int(settings["watermark"] * blocks),
            cuts_prompts=settings["enable_chunked_prefill"],
            windows=tuple(settings.get("windows", [None])),
            retention_interval=settings.get("prefix_cache_retention_interval", 0),
        ),
    )


class Replay:
    """The engine's loop around one case: adds requests, schedules, and returns the tokens of the oldest batch."""

    def __init__(self, case: Case) -> None:
        self.scheduler = VllmScheduler(limits_of(case["settings"]), VirtualClock())
        self.requests: dict[str, Request] = {}
        self._names: dict[Request, str] = {}
        self._outputs: dict[Request, list[int]] = {}
        self._to_come = deque(case["requests"])
        self._aborts = deque(case["aborts"])
        # vLLM orders equal priorities by arrival and id.
        times = sorted({one["arrival_time"] for one in case["requests"]})
        self._ranks = {
            one["id"]: (1 + times.index(one["arrival_time"])) * TOGETHER + int(one["id"]) for one in case["requests"]
        }
        self._builder = BatchBuilder(self.scheduler.table, self.scheduler.layout)
        self._in_flight: deque[InFlightIteration] = deque()
        self._run_in = deque[list[Request]]()
        self._iteration = 0

    def add(self, step: int) -> None:
        """The requests that arrive before this step, then the aborts."""
        while self._to_come and self._to_come[0]["step"] <= step:
            given = self._to_come.popleft()
            request = Request(
                len(self.requests),
                len(given["prompt"]),
                given["max_tokens"],
                prompt_tokens=np.array(given["prompt"], np.int32),
                priority=-given["priority"],
                stop=StopConditions((END_TOKEN,)),
            )
            request.order = 0.0, self._ranks[given["id"]]
            self.requests[given["id"]] = request
            self._names[request] = given["id"]
            self._outputs[request] = given["outputs"]
            self.scheduler.admit(RequestSource(partial(_once, [request]), self._refused))
        while self._aborts and self._aborts[0][0] <= step:
            request = self.requests[self._aborts.popleft()[1]]
            if not request.has_left:
                self._remove(request)

    def schedule(self, has_batch: bool) -> dict[str, Any]:
        """Decide and submit one iteration; what the case calls its step. has_batch: whether vLLM ran one, which may be
        empty: then it is in flight too."""
        scheduler = self.scheduler
        plan = scheduler.schedule(self._iteration, 0.0, self._in_flight, lambda: None)
        lengths = {chunk.request.slot: chunk.length for chunk in plan.chunks}
        order = [scheduler.table.requests[row] for row in scheduler.scheduled_rows.tolist()]
        drafts = {request: request.step_tokens - 1 for request in order}
        tokens = {request: lengths.get(request.slot, 1) + drafts[request] for request in order}
        names = [(self._names[request], request) for request in order]
        computed = {request: scheduler.computed_by(request) + tokens[request] for request in order}
        if has_batch:
            rows = plan.output_rows()
            record = empty_record(self._iteration, plan)
            batches = self._builder.build(self._iteration, plan, scheduler.allocate(plan))
            self._in_flight.append(InFlightIteration(record, batches, rows))
            self._run_in.append([scheduler.table.requests[row] for row in rows.tolist()])
            scheduler.advance(plan, self._iteration)
            self._iteration += 1
        return {
            "scheduled": [[name, tokens[request], computed[request]] for name, request in names],
            "drafts": {name: drafts[request] for name, request in names if drafts[request]},
            "preempted": sorted(self._names[pause.victim] for pause in plan.paused),
            "running": [self._names[request] for request in scheduler.running],
            "waiting": [self._names[request] for request in scheduler.queue.requests],
            "free_blocks": scheduler.kv_cache.pool.num_free,
        }

    def collect(self, returned: Mapping[str, int], proposed: Mapping[str, int]) -> dict[str, Any]:
        """Return the oldest batch in flight, with the tokens that the case's model generates, those of requests that
        have left included. returned: how many of each request, which its drafts decide. proposed: drafts of the next
        iteration."""
        iteration, table = self._in_flight.popleft(), self.scheduler.table
        rows, requests = iteration.output_rows.tolist(), self._run_in.popleft()
        counts = [returned.get(self._names[request], 1) for request in requests]
        tokens = np.zeros((len(rows), max(counts, default=1)), np.int32)
        for index, (row, request, count) in enumerate(zip(rows, requests, counts, strict=True)):
            if row not in iteration.dropped:
                position = int(table.joined[row] + table.confirmed[row])
                found = self._outputs[request][position : position + count]
                tokens[index, : len(found)] = found
        has_drafts = any(batch.drafts is not None for batch in iteration.batches)
        accepted = np.array(counts, np.int32) - 1
        outputs = StepOutputs(tokens, accepted=accepted) if has_drafts else StepOutputs(tokens[:, 0])
        if self.scheduler.drafts is not None:
            self.scheduler.drafts.propose = lambda rows: self._propose(rows, proposed)  # type: ignore[method-assign]
        done = self.scheduler.update(iteration, [outputs] * len(iteration.batches))  # none of an empty iteration
        finished = sorted(self._names[request] for request in done)
        for request in done:
            self._remove(request)
        self.scheduler.kv_cache.check_consistency()
        names = [self._names[request] for request in requests]
        return {"returned": dict(zip(names, counts, strict=True)), "finished": finished}

    def _propose(self, rows: Rows, proposed: Mapping[str, int]) -> None:
        table = self.scheduler.table
        counts = [proposed.get(self._names[table.requests[row]], 0) for row in rows.tolist()]
        table.set_draft_tokens(rows, np.array(counts, np.int64))

    def _remove(self, request: Request) -> None:
        if request.table is not None:
            for iteration in self._in_flight:
                iteration.dropped.add(request.slot)
        self.scheduler.remove(request)

    def _refused(self, request: Request, error: str) -> None:
        raise Mismatch(f"request {self._names[request]} was refused: {error}")


def empty_record(iteration: int, plan: Plan) -> IterationRecord:
    """A record of which nothing is read but its draft tokens."""
    nothing: dict[str, Any] = {"activated": [], "held": [], "paused": [], "left_out": None, "blocked": ()}
    counts = ("micro_batch", "active", "queued", "num_context_tokens", "recomputed", "num_generation")
    nothing |= dict.fromkeys((*counts, "num_generation_tokens"), 0) | {"start_s": 0.0, "timestamp": 0.0}
    return IterationRecord(iteration=iteration, context=plan.chunks, cache=NO_CACHE_STATE, **nothing)


def _once(requests: list[Request], count: int) -> list[Request]:
    given = requests[:]
    requests.clear()
    return given


def replay(case: Case) -> None:
    """Replay a case; Mismatch names the first step that differs."""
    running = Replay(case)
    for expected in case["steps"]:
        step = expected["step"]
        running.add(step)
        found = running.schedule("scheduled" in expected)
        expect_equal(f"step {step}: scheduled", found["scheduled"], expected.get("scheduled", []))
        for name in ("drafts", "preempted", "running", "waiting", "free_blocks"):
            if name in expected:
                expect_equal(f"step {step}: {name}", found.get(name), expected[name])
        if "returned" in expected:
            found = running.collect(expected["returned"], expected.get("proposed", {}))
            expect_equal(f"step {step}: returned", found["returned"], expected["returned"])
            expect_equal(f"step {step}: finished", found["finished"], expected["finished"])
