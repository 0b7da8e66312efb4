"""vLLM's scheduler, recorded: `vllm serve MODEL --scheduler-cls ifbbench.live.vllm.RecordingScheduler`.

The classes derive from vLLM's own and change no decision. With IFBBENCH_RECORD=DIR in the server's environment they
note each iteration and each request for the process that writes the recording; without it, or where that is not
possible, they are vLLM's schedulers and no more. Held to vLLM 0.32; what they read of it is as old as version 0.15.
"""

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from ifbbench.live.channel import Channel
from ifbbench.live.events import Added, Begin, End, Ended, Head, Started, Step

RECORD, RECORD_TOKENS = "IFBBENCH_RECORD", "IFBBENCH_RECORD_TOKENS"
FIRST_VERSION, AFTER_LAST_VERSION = (0, 15), (0, 33)
_STOPPED = (RequestStatus.FINISHED_ABORTED,)
_COMPLETED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
_log = logging.getLogger("vllm.ifbbench")


@dataclass(slots=True)
class _Pending:
    """An iteration whose outputs have not come back: the fields of its Step. output: vLLM's SchedulerOutput."""

    output: Any
    begun_s: float
    submitted_s: float
    changes: list[Added | Ended]
    started: list[Started]
    preempted: list[tuple[str, str]]
    head: Head | None
    free_blocks: int

    @property
    def is_iteration(self) -> bool:
        """Whether anything was decided; else it is no iteration."""
        return bool(self.output.num_scheduled_tokens or self.preempted)


class _Notes:
    """What a recording scheduler has noted and not sent.

    new: requests added since the latest call of `schedule`. changes: those added or stopped since the latest iteration
    was decided. preempted: victim and beneficiary, in the iteration that is being scheduled. looked_up: the latest
    request whose prefix was looked for in the cache, and what was found. in_flight: iterations whose outputs have not
    come back, the oldest first. ended: requests that the outputs being processed have ended. num_lost: iterations that
    were not sent since the latest one that was.
    """

    def __init__(self, scheduler: Scheduler, directory: Path) -> None:
        self.new: list[Request] = []
        self.changes: list[Added | Ended] = []
        self.preempted: list[tuple[str, str]] = []
        self.looked_up: tuple[Request, Any, int] | None = None
        self.in_flight: deque[_Pending] = deque()
        self.ended: list[Ended] = []
        self.num_lost = 0
        self._unsent: list[Added | Ended] = []  # changes of the iterations that were lost
        self._scheduler = scheduler
        self._cache = scheduler.kv_cache_manager
        self._get_free_blocks = self._cache.block_pool.get_num_free_blocks
        self._is_updating = False
        self._keeps_tokens = os.environ.get(RECORD_TOKENS) == "1"
        self._hash_size = getattr(scheduler, "hash_block_size", scheduler.block_size)
        self._cache.get_computed_blocks = self._noting_lookups(self._cache.get_computed_blocks)
        self._channel = Channel(directory, _begin(scheduler))

    def _noting_lookups(self, look_up: Callable[[Request], Any]) -> Callable[[Request], Any]:
        def get_computed_blocks(request: Request) -> Any:
            found = look_up(request)
            self.looked_up = request, found[0], found[1]
            return found

        return get_computed_blocks

    # Requests.

    def added(self, request: Request) -> None:
        self.new.append(request)

    def freed(self, request: Request) -> None:
        """`request` has ended."""
        self._take_new()  # it may be one of them
        status = request.status
        outcome = "completed" if status in _COMPLETED else "stopped" if status in _STOPPED else "failed"
        ended = Ended(
            request.request_id,
            outcome,
            request.num_output_tokens,
            self._hash_size,
            request.block_hashes,
            list(request.all_token_ids) if self._keeps_tokens else None,
        )
        (self.ended if self._is_updating else self.changes).append(ended)

    def was_preempted(self, request: Request, caller: FrameType) -> None:
        """caller: of vLLM's method. The request that needs the blocks is not passed to it, but is a variable of
        `schedule`. To follow each allocation instead would cost as much as all other notes of an iteration."""
        beneficiary = getattr(caller.f_locals.get("request"), "request_id", request.request_id)
        self.preempted.append((request.request_id, beneficiary))

    # Iterations.

    def scheduled(self, output: Any, begun_s: float, submitted_s: float) -> None:
        """An iteration was decided; one without tokens is kept until the next one that has some."""
        self._take_new()
        scheduler, tokens = self._scheduler, output.num_scheduled_tokens
        self.in_flight.append(
            _Pending(
                output,
                begun_s,
                submitted_s,
                self.changes,
                [
                    Started(name, request.num_computed_tokens - tokens[name], request.num_tokens)
                    for name in _started(output)
                    if (request := scheduler.requests.get(name)) is not None
                ],
                self.preempted,
                self._head(output, bool(self.preempted)),
                self._get_free_blocks(),
            )
        )
        self.changes, self.preempted, self.looked_up = [], [], None

    def _take_new(self) -> None:
        if not self.new:
            return
        in_flight = sum(pending.is_iteration for pending in self.in_flight)
        self.changes += [
            Added(
                request.request_id,
                request.arrival_time,
                request.num_prompt_tokens,
                request.max_tokens,
                request.priority,
                in_flight,
            )
            for request in self.new
        ]
        self.new.clear()

    def begin_update(self) -> None:
        self._is_updating = True

    def updated(self, output: Any, model_output: Any, ended_s: float) -> None:
        """The outputs of an iteration were processed."""
        self._is_updating = False
        while self.in_flight:
            pending = self.in_flight.popleft()
            is_last = pending.output is output
            num_outputs = {}
            if is_last and output.scheduled_spec_decode_tokens:
                indices, sampled = model_output.req_id_to_index, model_output.sampled_token_ids
                num_outputs = {name: len(sampled[indices[name]]) for name in output.scheduled_spec_decode_tokens}
            if pending.is_iteration:
                self._send(pending, ended_s, num_outputs)
            else:
                following = self.in_flight[0].changes if self.in_flight else self.changes
                following[:0] = pending.changes
            if is_last:
                return

    def close(self) -> None:
        self._take_new()
        self._channel.close(End(self.changes))

    def abandon(self) -> None:
        self._channel.abandon()

    @property
    def is_open(self) -> bool:
        return self._channel.is_open

    def _send(self, pending: _Pending, ended_s: float, num_outputs: dict[str, int]) -> None:
        ended, self.ended = self.ended, []
        step = Step(
            pending.begun_s,
            pending.submitted_s,
            ended_s,
            [*self._unsent, *pending.changes],
            pending.output.num_scheduled_tokens,
            pending.started,
            pending.preempted,
            pending.head,
            pending.free_blocks,
            num_outputs,
            ended,
            self.num_lost,
            self._all_requests() if self.num_lost else [],
        )
        if self._channel.put(step):
            self.num_lost = 0
            self._unsent.clear()
        else:
            self.num_lost += 1
            self._unsent += [*pending.changes, *ended]

    def _all_requests(self) -> list[Added]:
        return [
            Added(
                request.request_id,
                request.arrival_time,
                request.num_tokens,
                request.max_tokens - request.num_output_tokens,
                request.priority,
                0,
                request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0),
                request.status == RequestStatus.RUNNING,
            )
            for request in self._scheduler.requests.values()
            if not request.is_finished()
        ]

    def _head(self, output: Any, has_preempted: bool) -> Head | None:
        """The first request that stays in the queue, but for those that the scheduler passes over."""
        scheduler = self._scheduler
        deferred = getattr(scheduler, "deferred_waiting", ())
        if deferred:
            head = next((request for request in scheduler.waiting if request not in deferred), None)
        else:
            head = scheduler.waiting.peek_request() if len(scheduler.waiting) else None
        if head is None:
            return None
        limit, used, config = None, output.total_num_scheduled_tokens, scheduler.scheduler_config
        if has_preempted:
            limit = "kv_blocks"
        elif len(scheduler.running) >= getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs):
            limit = "batch_size"
        elif used >= min(scheduler.max_num_scheduled_tokens, config.max_num_batched_tokens):
            limit = "num_tokens"
        if limit is not None or self.looked_up is None or self.looked_up[0] is not head:
            return Head(head.request_id, limit)
        _, blocks, hits = self.looked_up
        free_hits = sum(block.ref_cnt == 0 for group in blocks.blocks for block in group) if hits else 0
        cap, num_requests = config.long_prefill_token_threshold, sum(scheduler.get_request_counts())
        if num_requests <= 1:
            cap = 0
        elif cap and getattr(config, "long_prefill_token_threshold_adaptive", False):
            cap = max(cap, config.max_num_batched_tokens // num_requests)
        return Head(head.request_id, None, hits, free_hits, head.num_tokens, cap, not scheduler.running)


def _started(output: Any) -> list[str]:
    """The requests that did not run before this iteration, or not since they were pre-empted."""
    new = [data.req_id for data in output.scheduled_new_reqs]
    return new + list(output.scheduled_cached_reqs.resumed_req_ids)


def _begin(scheduler: Scheduler) -> Begin:
    config, scheduling, cache = scheduler.vllm_config, scheduler.scheduler_config, scheduler.cache_config
    model, parallel = config.model_config, config.parallel_config
    settings = {
        "model": model.model,
        "max-model-len": scheduler.max_model_len,
        "max-num-seqs": scheduler.max_num_running_reqs,
        "max-num-batched-tokens": scheduling.max_num_batched_tokens,
        "max-num-scheduled-tokens": scheduling.max_num_scheduled_tokens,
        "max-num-active-seqs": getattr(scheduling, "max_num_active_seqs", None),
        "scheduling-policy": str(scheduling.policy),
        "enable-chunked-prefill": scheduling.enable_chunked_prefill,
        "long-prefill-token-threshold": scheduling.long_prefill_token_threshold,
        "long-prefill-token-threshold-adaptive": getattr(scheduling, "long_prefill_token_threshold_adaptive", None),
        "scheduler-reserve-full-isl": getattr(scheduling, "scheduler_reserve_full_isl", None),
        "watermark": getattr(scheduling, "watermark", None),
        "async-scheduling": isinstance(scheduler, AsyncScheduler),
        "enable-prefix-caching": cache.enable_prefix_caching,
        "block-size": scheduler.block_size,
        "num-gpu-blocks-override": cache.num_gpu_blocks,
        "tensor-parallel-size": parallel.tensor_parallel_size,
        "pipeline-parallel-size": parallel.pipeline_parallel_size,
    }
    facts = {
        "pid": os.getpid(),
        "python": sys.version.split()[0],
        "dtype": str(model.dtype),
        "device": str(config.device_config.device_type),
    }
    num_blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1  # the null block
    return Begin("vllm", vllm.__version__, settings, facts, time.monotonic(), time.time(), num_blocks)


def _new_notes(scheduler: Scheduler) -> _Notes | None:
    """The notes of a scheduler that is to be recorded; None, and a line in the log, where it is not."""
    directory = os.environ.get(RECORD)
    if not directory:
        _log.warning("%s is not set: nothing is recorded. Give it the directory of the recording.", RECORD)
        return None
    version = tuple(int(part) for part in vllm.__version__.split(".")[:2] if part.isdigit())
    if not FIRST_VERSION <= version < AFTER_LAST_VERSION:
        _log.warning("nothing is recorded: vLLM %s is not known; expected 0.15 to 0.32.", vllm.__version__)
        return None
    try:
        return _Notes(scheduler, Path(directory))
    except Exception as error:
        _log.warning("nothing is recorded: %s", error)
        return None


class _Recorded:
    """The methods of vLLM's scheduler that are noted. A failure ends the recording, never the server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._notes: _Notes | None = _new_notes(self)

    def add_request(self, request: Request) -> None:
        is_new = request.request_id not in self.requests  # type: ignore[attr-defined]
        super().add_request(request)  # type: ignore[misc]
        if is_new:
            self._note(_Notes.added, request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        begun_s = time.monotonic()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._note(_Notes.scheduled, output, begun_s, time.monotonic())
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        ended_s = time.monotonic()
        self._note(_Notes.begin_update)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self._note(_Notes.updated, scheduler_output, model_runner_output, ended_s)
        return outputs

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        self._note(_Notes.was_preempted, request, sys._getframe(1))

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._note(_Notes.freed, request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[misc]
        self._note(_Notes.close)

    def _note(self, what: Callable[..., None], *args: Any) -> None:
        notes = self._notes
        if notes is None:
            return
        try:
            what(notes, *args)
            if not notes.is_open:
                self._notes = None
        except Exception:
            _log.exception("the recording ends; the server goes on without it")
            self._notes = None
            notes.abandon()


class RecordingScheduler(_Recorded, Scheduler):  # type: ignore[misc]
    """vLLM's `Scheduler`; with asynchronous scheduling, vLLM's `AsyncScheduler`."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if vllm_config.scheduler_config.async_scheduling:
            return RecordingAsyncScheduler(vllm_config, *args, **kwargs)
        return super().__new__(cls)


class RecordingAsyncScheduler(_Recorded, AsyncScheduler):  # type: ignore[misc]
    """vLLM's `AsyncScheduler`."""
