"""vLLM's scheduler, recorded: `vllm serve MODEL --scheduler-cls ifbbench.live.vllm.RecordingScheduler`.

The classes derive from vLLM's own and change no decision. With IFBBENCH_RECORD=DIR in the server's environment they
note each iteration and each request for the process that writes the recording; without it, or where that is not
possible, they are vLLM's schedulers and no more. Held to vLLM 0.32; what they read of it is as old as version 0.15.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from ifbbench.live.events import Added, Begin, Ended, Head, Preempted, Started
from ifbbench.live.notes import COMPLETED, FAILED, STOPPED, Notes, keeps_tokens, note, open_notes

VERSIONS = (0, 15), (0, 32)
_STOPPED = (RequestStatus.FINISHED_ABORTED,)
_COMPLETED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
_log = logging.getLogger("vllm.ifbbench")


class _Notes(Notes):
    """What a recording scheduler has noted.

    new: requests added since the latest call of `schedule`.
    looked_up: the latest request whose prefix was looked for in the cache, and what was found.
    """

    def __init__(self, scheduler: Scheduler, directory: Path) -> None:
        self.new: list[Request] = []
        self.looked_up: tuple[Request, Any, int] | None = None
        self._scheduler = scheduler
        self._cache = scheduler.kv_cache_manager
        self._get_free_blocks = self._cache.block_pool.get_num_free_blocks
        self._is_updating = False
        self._keeps_tokens = keeps_tokens()
        self._hash_size = getattr(scheduler, "hash_block_size", scheduler.block_size)
        self._cache.get_computed_blocks = self._noting_lookups(self._cache.get_computed_blocks)
        super().__init__(directory, _begin(scheduler))

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
        outcome = COMPLETED if status in _COMPLETED else STOPPED if status in _STOPPED else FAILED
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
        """caller: what calls vLLM's method. The request that needs the blocks is not passed to it, but is a variable of
        `schedule`. To follow each allocation instead would cost as much as all other notes of an iteration."""
        beneficiary = getattr(caller.f_locals.get("request"), "request_id", request.request_id)
        self.preempted.append(Preempted(request.request_id, beneficiary))

    # Iterations.

    def scheduled(self, output: Any, begun_s: float, submitted_s: float) -> None:
        """An iteration was decided; one without tokens is kept until the next one that has some."""
        self._take_new()
        scheduler, tokens = self._scheduler, output.num_scheduled_tokens
        started = [
            Started(name, request.num_computed_tokens - tokens[name], request.num_tokens)
            for name in _started(output)
            if (request := scheduler.requests.get(name)) is not None
        ]
        head = self._head(output, bool(self.preempted))
        self.decided(output, begun_s, submitted_s, tokens, started, head, self._get_free_blocks())
        self.looked_up = None

    def _take_new(self) -> None:
        if not self.new:
            return
        in_flight = self.num_in_flight()
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
            self.send(pending, ended_s, num_outputs)
            if is_last:
                return

    def close(self) -> None:
        self._take_new()
        super().close()

    def present(self) -> list[Added]:
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
        if num_requests <= 1 and hasattr(config, "long_prefill_token_threshold_adaptive"):
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
    # Versions that do not have a setting do as its last value here says.
    settings = {
        "model": model.model,
        "max-model-len": scheduler.max_model_len,
        "max-num-seqs": scheduler.max_num_running_reqs,
        "max-num-batched-tokens": scheduling.max_num_batched_tokens,
        "max-num-scheduled-tokens": getattr(scheduling, "max_num_scheduled_tokens", None),
        "max-num-active-seqs": getattr(scheduling, "max_num_active_seqs", None),
        "scheduling-policy": str(scheduling.policy),
        "enable-chunked-prefill": scheduling.enable_chunked_prefill,
        "long-prefill-token-threshold": scheduling.long_prefill_token_threshold,
        "long-prefill-token-threshold-adaptive": getattr(scheduling, "long_prefill_token_threshold_adaptive", False),
        "scheduler-reserve-full-isl": getattr(scheduling, "scheduler_reserve_full_isl", False),
        "watermark": getattr(scheduling, "watermark", 0.0),
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


class _Recorded:
    """The methods of vLLM's scheduler that are noted. A failure ends the recording, never the server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        make = partial(_Notes, self)
        self._notes: _Notes | None = open_notes("vLLM", vllm.__version__, VERSIONS, _log, make)

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
        self._notes = note(self._notes, _log, what, *args)


class RecordingScheduler(_Recorded, Scheduler):  # type: ignore[misc]
    """vLLM's `Scheduler`; with asynchronous scheduling, vLLM's `AsyncScheduler`."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if vllm_config.scheduler_config.async_scheduling:
            return RecordingAsyncScheduler(vllm_config, *args, **kwargs)
        return super().__new__(cls)


class RecordingAsyncScheduler(_Recorded, AsyncScheduler):  # type: ignore[misc]
    """vLLM's `AsyncScheduler`."""
