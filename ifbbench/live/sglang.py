"""SGLang's scheduler, recorded: `IFBBENCH_RECORD=DIR python -m sglang.launch_server …`, where ifbbench is installed.

SGLang calls the functions of the entry point group `sglang.srt.plugins` in each of its processes, and `register` puts
hooks around methods of its scheduler. They change no decision: each calls SGLang's own method and notes what it did.
Held to SGLang 0.5.23.
"""

import logging
import multiprocessing
import os
import sys
import time
from array import array
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ifbbench.live.events import Added, Begin, Ended, Head, Preempted, Started
from ifbbench.live.notes import (
    COMPLETED,
    FAILED,
    RECORD,
    STOPPED,
    Notes,
    keeps_tokens,
    knows_version,
    note,
    open_notes,
)

VERSIONS = (0, 5, 23), (0, 5, 23)
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
POLICY = "sglang.srt.managers.schedule_policy.SchedulePolicy"
ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
TIMES = "sglang.srt.observability.req_time_stats.SchedulerReqTimeStats"
Original = Callable[..., Any]
_log = logging.getLogger("sglang.ifbbench")


def register() -> None:
    """Put the hooks into SGLang's registry; nothing where nothing is to be recorded."""
    if not os.environ.get(RECORD):
        return
    from sglang.version import __version__ as version

    is_main = multiprocessing.parent_process() is None  # one line in the log, not one of each process
    if not knows_version("SGLang", version, VERSIONS, _log if is_main else None):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in _Hooks(version).by_target().items():
        HookRegistry.register(target, hook, HookType.AROUND)


class _Hooks:
    """The hooks of this process, whose scheduler is recorded while its event loop runs."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._notes: _Notes | None = None

    def by_target(self) -> Mapping[str, Callable[..., Any]]:
        return {
            f"{SCHEDULER}.run_event_loop": self.run_event_loop,
            f"{SCHEDULER}._add_request_to_queue": self.add_request_to_queue,
            f"{SCHEDULER}.send_abort_output": self.send_abort_output,
            f"{SCHEDULER}.get_next_batch_to_run": self.get_next_batch_to_run,
            f"{SCHEDULER}._get_new_batch_prefill_raw": self.get_new_batch_prefill,
            f"{SCHEDULER}.process_batch_result": self.process_batch_result,
            f"{POLICY}.calc_priority": self.calc_priority,
            f"{ADDER}.budget_state": self.budget_state,
            f"{ADDER}.add_one_req": self.add_one_req,
            f"{ADDER}.preempt_to_schedule": self.preempt_to_schedule,
            f"{TIMES}.set_completion_time": self.set_completion_time,
        }

    def _note(self, what: Callable[..., None], *args: Any) -> None:
        self._notes = note(self._notes, _log, what, *args)

    def run_event_loop(self, original: Original, scheduler: Any) -> Any:
        make = partial(_new_notes, scheduler, self._version)
        self._notes = open_notes("SGLang", self._version, VERSIONS, _log, make)
        try:
            return original(scheduler)
        finally:
            self._note(_Notes.close)

    def add_request_to_queue(self, original: Original, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scheduler, req, *args, **kwargs)
        self._note(_Notes.queued, req)
        return result

    def send_abort_output(self, original: Original, scheduler: Any, abort_req: Any, req: Any) -> Any:
        result = original(scheduler, abort_req, req)
        self._note(_Notes.aborted, req, abort_req.finished_reason is None)
        return result

    def get_next_batch_to_run(self, original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        begun_s = time.monotonic()
        self._note(_Notes.begin_decision)
        plan = original(scheduler, *args, **kwargs)
        self._note(_Notes.decided_plan, plan, begun_s, time.monotonic())
        return plan

    def get_new_batch_prefill(self, original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        batch = kwargs["running_batch"] if "running_batch" in kwargs else args[1]
        was_full = batch.batch_is_full
        result = original(scheduler, *args, **kwargs)
        is_full = result[1].batch_is_full
        if self._notes is not None and (self._notes.is_trying or is_full != was_full):
            self._note(_Notes.tried_prefill, was_full, is_full)
        return result

    def process_batch_result(self, original: Original, scheduler: Any, batch: Any, result: Any) -> Any:
        done = original(scheduler, batch, result)
        # SGLang waits for the device in here, so the iteration has ended by now.
        self._note(_Notes.processed, batch, time.monotonic())
        return done

    def calc_priority(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        self._note(_Notes.begin_prefill)
        return original(*args, **kwargs)

    def budget_state(self, original: Original, adder: Any) -> Any:
        state = original(adder)
        self._note(_Notes.saw_budget, state.name)
        return state

    def add_one_req(self, original: Original, adder: Any, *args: Any, **kwargs: Any) -> Any:
        verdict = original(adder, *args, **kwargs)
        self._note(_Notes.judged, verdict.name)
        return verdict

    def set_completion_time(self, original: Original, times: Any, *args: Any, **kwargs: Any) -> Any:
        self._note(_Notes.some_ended)
        return original(times, *args, **kwargs)

    def preempt_to_schedule(self, original: Original, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        is_done = original(adder, req, *args, **kwargs)
        if is_done:
            self._note(_Notes.made_room, req, adder.preempt_list)
        return is_done


class _Notes(Notes):
    """What the hooks have noted of a scheduler.

    known: the requests in the engine by id.
    limit: why the head of the queue waits, by the latest prefill batch that was tried; None if none waited then.
    victims: requests that lost their pages in this decision, with the waiting request that took their place; None where
        decode steps needed their pages.
    is_trying: whether requests of the queue are tried in this decision.
    """

    def __init__(self, scheduler: Any, version: str, directory: Path) -> None:
        self.known: dict[str, Any] = {}
        self.limit: str | None = None
        self.victims: dict[str, str | None] = {}
        self._made_room: dict[str, str] = {}  # victims that are not in the queue yet
        self._scheduler, self._keeps_tokens = scheduler, keeps_tokens()
        self._decoding: list[Any] = []
        self._decoded: dict[str, int] = {}
        self._continuing: str | None = None  # the request whose prompt was cut before this decision
        self.is_trying, self._verdict, self._budget, self._num_looked_at, self._num_judged = False, "", "", 0, 0
        self._have_some_ended = False
        self._allocator, self._tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
        super().__init__(directory, _begin(scheduler, version))

    # Requests.

    def queued(self, req: Any) -> None:
        """A request has come, or is back in the queue without its pages."""
        queue = self._scheduler.waiting_queue
        if not queue or queue[-1] is not req:
            return  # it was refused
        if req.rid in self.known:
            self.victims[req.rid] = self._made_room.pop(req.rid, None)
            return
        self.known[req.rid] = req
        self.changes.append(_added(req, self.num_in_flight()))

    def aborted(self, req: Any, by_client: bool) -> None:
        """A request left without an output."""
        if self.known.pop(req.rid, None) is not None:
            self.victims.pop(req.rid, None)
            self.changes.append(self._ended(req, STOPPED if by_client else FAILED, 0))

    def _ended(self, req: Any, outcome: str, in_flight: int) -> Ended:
        tokens = array("q", req.origin_input_ids)
        tokens.extend(req.output_ids)
        size, count = self._scheduler.page_size, len(req.output_ids)
        if self._keeps_tokens:
            return Ended(req.rid, outcome, count, size, [], list(tokens), b"", in_flight)
        return Ended(req.rid, outcome, count, size, [], None, tokens.tobytes(), in_flight)

    # The decision for one iteration, in the order of the calls.

    def begin_decision(self) -> None:
        chunked = self._scheduler.chunked_req
        self._continuing = None if chunked is None else chunked.rid
        self.is_trying = False

    def begin_prefill(self) -> None:
        """The queue was put in order: requests of it are tried."""
        self.is_trying, self._verdict, self._num_looked_at, self._num_judged = True, "CONTINUE", 0, 0

    def saw_budget(self, state: str) -> None:
        """SGLang asks before it tries a request, and again when it has added one."""
        self._budget = state
        self._num_looked_at += 1

    def judged(self, verdict: str) -> None:
        """The answer for one request: whether further ones may be tried."""
        self._verdict = verdict
        self._num_judged += 1
        self._num_looked_at = self._num_judged

    def made_room(self, req: Any, preempted: list[Any]) -> None:
        for victim in preempted:
            self._made_room.setdefault(victim.rid, req.rid)

    def tried_prefill(self, was_full: bool, is_full: bool) -> None:
        if not self.is_trying:
            if is_full and not was_full:
                self.limit = "batch_size"
        elif self._verdict != "CONTINUE":
            self.limit = "kv_blocks" if self._verdict == "NO_TOKEN" else "num_tokens"
        elif self._num_looked_at == self._num_judged:  # each was added
            self.limit = None
        else:
            self.limit = "num_tokens" if self._budget == "OTHER" else "batch_size"

    def decided_plan(self, plan: Any, begun_s: float, submitted_s: float) -> None:
        """An iteration was decided. Victims of a decision without a batch are those of the next one."""
        batch, scheduler = plan.batch_to_run, self._scheduler
        if self.victims:
            self._take_victims(plan.running_batch.reqs)
        if batch is None:
            return
        tokens, started, held = dict[str, int](), list[Started](), None
        if batch.forward_mode.is_decode():
            if batch.reqs != self._decoding:  # most decode batches are as the one before
                self._take_ended(self._decoding)  # should SGLang have ended one without a word
                self._decoding = list(batch.reqs)
                self._decoded = dict.fromkeys([req.rid for req in batch.reqs], 1)
            tokens = self._decoded
        else:
            mixed = batch.decoding_reqs or ()
            prompts = batch.reqs[: len(batch.reqs) - len(mixed)]
            tokens = {req.rid: req.extend_len for req in prompts}
            tokens |= dict.fromkeys([req.rid for req in mixed], 1)
            started = [
                Started(req.rid, req.prefix_len, len(req.origin_input_ids) + len(req.output_ids))
                for req in prompts
                if req.rid != self._continuing
            ]
            held = plan.running_batch.reqs[0].rid if plan.running_batch.reqs else None
        queue = scheduler.waiting_queue
        head = Head(queue[0].rid, self.limit) if queue and self.limit is not None else None
        free = (self._allocator.available_size() + self._tree.evictable_size()) // scheduler.page_size
        self.decided(batch, begun_s, submitted_s, tokens, started, head, free, held)

    def _take_victims(self, running: list[Any]) -> None:
        """Note the requests that lost their pages, and for which one: decode steps go on for the request that would
        have been the last to lose its own."""
        kept = max(running, key=self._keeping, default=None)
        for victim, beneficiary in self.victims.items():
            if beneficiary is not None:
                self.preempted.append(Preempted(victim, beneficiary, "batch_size"))
            else:
                self.preempted.append(Preempted(victim, victim if kept is None else kept.rid))
        self.victims.clear()
        self._made_room.clear()

    def _keeping(self, req: Any) -> tuple[int, ...]:
        by_length = len(req.output_ids), -len(req.origin_input_ids)
        is_by_priority = self._scheduler.server_args.retraction_policy == "priority"
        return (req.priority or 0, *by_length) if is_by_priority else by_length

    # Its outputs.

    def processed(self, batch: Any, ended_s: float) -> None:
        """The outputs of the oldest iteration in flight were processed."""
        if not self.in_flight:
            return  # it was decided before the recording began
        pending = self.in_flight.popleft()
        if self._have_some_ended:  # to look at each request of each batch would cost as much as all other notes
            self._have_some_ended = False
            self._take_ended(batch.reqs)
        self.send(pending, ended_s, {})

    def some_ended(self) -> None:
        """SGLang has noted when some request ended."""
        self._have_some_ended = True

    def _take_ended(self, reqs: list[Any]) -> None:
        for req in [req for req in reqs if req.finished_reason is not None]:
            if self.known.pop(req.rid, None) is not None:
                self.ended.append(self._ended(req, _outcome(req), self.num_in_flight()))

    def present(self) -> list[Added]:
        waiting, found = {req.rid for req in self._scheduler.waiting_queue}, list[Added]()
        for rid, req in self.known.items():
            known, made, is_running = len(req.origin_input_ids) + len(req.output_ids), len(req.output_ids), True
            computed = known - 1 if made else req.prefix_len
            if rid in waiting:
                computed, is_running = 0, False
            left = req.sampling_params.max_new_tokens - made
            found.append(Added(rid, time.time(), known, left, -(req.priority or 0), 0, computed, is_running))
        return found


def _added(req: Any, in_flight: int) -> Added:
    """SGLang runs the largest priority first, and the events have the smallest first."""
    from sglang.srt.observability.req_time_stats import convert_time_to_realtime

    created = getattr(req.time_stats, "created_time", 0.0)
    arrival_s = convert_time_to_realtime(created) if created else time.time()
    prompt, maximum = len(req.origin_input_ids), req.sampling_params.max_new_tokens
    ignores_end = bool(req.sampling_params.ignore_eos)
    return Added(req.rid, arrival_s, prompt, maximum, -(req.priority or 0), in_flight, ignores_end=ignores_end)


def _outcome(req: Any) -> str:
    reason = req.finished_reason.to_json()
    if reason["type"] != "abort":
        return COMPLETED
    return STOPPED if reason.get("status_code") is None else FAILED


def _new_notes(scheduler: Any, version: str, directory: Path) -> _Notes | None:
    """The notes of a scheduler; None in all ranks but the first of those that decide the same. ValueError for what is
    not recorded."""
    from sglang.srt.runtime_context import get_parallel

    ranks = get_parallel()
    if ranks.attn_tp_rank or ranks.attn_cp_rank or ranks.pp_rank:
        return None
    cases = {
        "prefill and decode apart (--disaggregation-mode)": scheduler.disaggregation_mode.value != "null",
        "speculative decoding": not scheduler.spec_algorithm.is_none(),
        "a pipeline of stages (--pp-size)": ranks.pp_size > 1,
        "a diffusion model": scheduler.dllm_config is not None,
        "a model without generation": not scheduler.is_generation,
    }
    if (found := next((name for name, is_given in cases.items() if is_given), None)) is not None:
        raise ValueError(f"{found} is not recorded")
    return _Notes(scheduler, version, directory)


def _begin(scheduler: Any, version: str) -> Begin:
    given = scheduler.server_args
    has_priorities = scheduler.enable_priority_scheduling
    size = scheduler.token_to_kv_pool_allocator.size
    settings = {
        "model": given.model_path,
        "context-length": scheduler.model_config.context_len,
        "max-running-requests": scheduler.max_running_requests,
        "chunked-prefill-size": scheduler.chunked_prefill_size or -1,
        "max-prefill-tokens": scheduler.max_prefill_tokens,
        "prefill-max-requests": given.prefill_max_requests,
        "enable-mixed-chunk": scheduler.is_mixed_chunk,
        "schedule-policy": given.schedule_policy,
        "schedule-conservativeness": given.schedule_conservativeness,
        "enable-priority-scheduling": has_priorities,
        "disable-overlap-schedule": not scheduler.enable_overlap,
        "scheduler-recv-interval": given.scheduler_recv_interval,
        "disable-radix-cache": given.disable_radix_cache,
        "radix-eviction-policy": given.radix_eviction_policy,
        "page-size": scheduler.page_size,
        "max-total-tokens": size,
        "tp-size": given.tp_size,
        "pp-size": given.pp_size,
    }
    if has_priorities:
        settings |= {
            "retraction-policy": given.retraction_policy,
            "disable-priority-preemption": not scheduler.enable_priority_preemption,
            "priority-scheduling-preemption-threshold": scheduler.priority_scheduling_preemption_threshold,
        }
    facts = {
        "pid": os.getpid(),
        "python": sys.version.split()[0],
        "dtype": str(getattr(scheduler.model_config, "dtype", None)),
        "device": str(scheduler.device),
    }
    return Begin("sglang", version, settings, facts, time.monotonic(), time.time(), size // scheduler.page_size)
