"""The batch manager of the TensorRT-LLM documentation: callbacks around the token generation loop, and a thread."""

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from ifbbench.build.engine import Engine, build_engine, loop_maker
from ifbbench.build.resolve import batching_config, cache_layout, resolve_limits
from ifbbench.clock import WallClock
from ifbbench.engine.interfaces import EngineLost, Executor, Observer
from ifbbench.engine.loop import ExecutorFailed, TokenGenerationLoop
from ifbbench.engine.request import Request
from ifbbench.errors import IfbbenchError, InputError
from ifbbench.files import OutputError
from ifbbench.kv.interface import KvCache
from ifbbench.models.config import ModelConfig
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.tensorrt_llm.scheduler import TensorRtLlmScheduler
from ifbbench.serving.library.client import (
    MAX_FAILURES,
    Callbacks,
    GetInferenceRequests,
    PollStopSignals,
    ReturnStats,
    SendResponse,
)
from ifbbench.serving.library.request import InferenceRequest, engine_request
from ifbbench.serving.library.worker import Worker
from ifbbench.settings.config import RunConfig
from ifbbench.settings.fields import integer
from ifbbench.settings.names import from_mapping, own_names, snake_case
from ifbbench.torch.ranks import RankFailed, cause_of

if TYPE_CHECKING:
    from ifbbench.build.ranks import RankLoop
    from ifbbench.torch.communicator import Communicator

# Interval at which an idle worker thread asks for requests.
IDLE_POLL_S = 0.001
NO_THREAD = -1

_log = logging.getLogger("ifbbench")


class BatchManagerFailed(IfbbenchError):
    """The loop has ended early; every request that it had fetched got an error response."""


class BatchManager:
    """In-flight batching behind four callbacks. A worker thread runs the token generation loop from construction to
    `close()` (or the end of a `with` block) and calls all callbacks; they should return soon. A manager that is deleted
    without `close()` ends as by `abort()`. In a forked process there is no such thread, and calls raise RuntimeError.

    executor_or_model: a model ("tiny", or a directory with config.json and safetensors), or an Executor, which the
        caller closes. An executor needs `max_seq_len` and the cache's `max_tokens` among the optional parameters.
    model_type: "V1", "InflightBatching" or "InflightFusedBatching" (or v1, uifb, ifb).
    max_beam_width: maximum beam width of a request. All requests of an iteration have the same beam width.
    scheduler_policy: "guaranteed_no_evict", "max_utilization", "static_batch" or "package.module:ClassName".
    get_inference_requests(max_requests): returns a list of at most so many `InferenceRequest`; negative means no limit.
        Called at the start of each iteration, again if requests were refused, and every millisecond when idle.
    send_response(request_id, tensors, is_final, error): see `response_tensors`. Each request object gets exactly one
        final response, after all resources of the request are released. A non-empty error is always final.
    poll_stop_signals(): returns ids of requests to stop, at the end of each iteration. Their final response has the
        tokens so far. Unknown ids are ignored.
    return_batch_manager_stats(json): called with the iteration's statistics, at its end, while a request is active.
    optional_params: settings of `ifbbench run` by name (enable_trt_overlap or enableTrtOverlap, max_batch_size, …), and
        `kv_cache_config` (`kvCacheConfig`), a mapping of max_tokens, free_gpu_memory_fraction and so on.
    start: False makes no thread; the caller calls `step()`.
    communicator: connects the ranks that share the model. Every rank makes a manager with the same arguments. Callbacks
        are called on rank 0 only; the managers of other ranks end when its own does, and their `close()` waits for
        that.

    The process is not changed, except for PyTorch's number of threads if `cpu_threads` is given. A program that wants
    the CPU settings of the command line calls `use_threads(None)` and `keep_freed_memory()` of
    `ifbbench.torch.host`.

    Raises InputError if the parameters do not fit together. An exception of a callback is logged, and the loop
    continues; if a callback or the executor fails three times in a row, the loop ends, all requests get an error
    response, and `close()` raises BatchManagerFailed.
    """

    def __init__(
        self,
        executor_or_model: Executor | str | Path,
        model_type: str,
        max_beam_width: int,
        scheduler_policy: str,
        get_inference_requests: GetInferenceRequests,
        send_response: SendResponse,
        poll_stop_signals: PollStopSignals | None = None,
        return_batch_manager_stats: ReturnStats | None = None,
        optional_params: Mapping[str, Any] | None = None,
        *,
        start: bool = True,
        communicator: "Communicator | None" = None,
    ) -> None:
        settings = _settings(model_type, max_beam_width, scheduler_policy, optional_params)
        if communicator is not None:
            settings = _of_ranks(settings, communicator)
        limits, executor = _engine(executor_or_model, settings, communicator)
        callbacks = Callbacks(
            get_inference_requests, send_response, poll_stop_signals, return_batch_manager_stats, limits
        )
        self._communicator = communicator
        loop = loop_maker(settings, communicator)(
            limits,
            executor,
            WallClock(),
            callbacks.get_requests,
            callbacks.send,
            callbacks,
            poll_stop_signals=callbacks.poll,
        )
        self._begin(callbacks, loop, None if executor is executor_or_model else executor, start=start)

    @classmethod
    def of_engine(
        cls,
        engine: Engine,
        get_inference_requests: GetInferenceRequests,
        send_response: SendResponse,
        poll_stop_signals: PollStopSignals,
        observer: Observer,
        queued: Callable[[], int],
        next_priority: Callable[[], float | None],
        wait_for_requests: Callable[[], object],
    ) -> "BatchManager":
        """A manager of an engine that exists, which the caller closes; on the engine's clock. That of rank 0 where the
        engine has a communicator.

        observer: is notified of each iteration, and of each request that ends without being complete.
        queued: number of requests that have arrived and were not returned yet.
        next_priority: the highest priority among them, None if there are none; they are returned by priority.
        wait_for_requests: is called while no request is active; returns when one has arrived, and soon after a call of
            `close()` or `abort()`.
        """
        limits = engine.limits
        callbacks = Callbacks(get_inference_requests, send_response, poll_stop_signals, None, limits, observer)
        manager = cls.__new__(cls)
        manager._communicator = engine.communicator
        loop = loop_maker(engine.config, engine.communicator)(
            limits,
            engine.executor,
            engine.clock,
            callbacks.get_requests,
            callbacks.send,
            callbacks,
            queued,
            callbacks.poll,
            next_priority=next_priority,
            # Requests may arrive at any time. The other ranks expect an answer to each question that a loop can ask.
            next_change=None if engine.communicator is None else lambda now_s: now_s,
        )
        manager._begin(callbacks, loop, wait_for_requests=wait_for_requests)
        return manager

    def _begin(
        self,
        callbacks: Callbacks,
        loop: TokenGenerationLoop,
        owned_executor: Executor | None = None,
        wait_for_requests: Callable[[], object] | None = None,
        *,
        start: bool = True,
    ) -> None:
        self._callbacks, self._loop, self._owned_executor = callbacks, loop, owned_executor
        self._closing, self._aborting, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._wait_for_requests = wait_for_requests or partial(self._wake.wait, IDLE_POLL_S)
        self._failures = 0
        self._truncations: SimpleQueue[tuple[Request, int]] = SimpleQueue()
        # Held while iterations run in a thread of the caller, with the id of that thread.
        self._step_lock, self._stepping_thread = threading.Lock(), NO_THREAD
        self._ended = False
        self._error: BaseException | None = None
        self._worker: Worker | None = None
        if start:
            wait = self._wait_for_requests
            self._worker = Worker(self._turn, wait, self._fail, loop, owned_executor, self._aborting, self._wake)

    @property
    def _scheduler(self) -> TensorRtLlmScheduler:
        return cast(TensorRtLlmScheduler, self._loop.scheduler)

    @property
    def config(self) -> BatchingConfig:
        """The limits of the engine."""
        return self._scheduler.config

    @property
    def kv_cache(self) -> KvCache:
        """The KV cache, read-only. With a worker thread, only after `close()`."""
        return self._scheduler.kv_cache

    @property
    def _ranks(self) -> "RankLoop":
        """The loop, with a communicator."""
        return cast("RankLoop", self._loop)

    @property
    def is_running(self) -> bool:
        """Whether the worker thread is alive."""
        return self._worker is not None and self._worker.is_alive

    def step(self) -> bool:
        """One iteration of a manager without a thread; False when no request is active. RuntimeError while another
        iteration runs: in one of its callbacks, and in another thread."""
        self._check_process()
        if self._worker is not None:
            raise RuntimeError("step() is called by the worker thread; make the manager with start=False to call it")
        if self._ended:
            raise RuntimeError("the batch manager has ended")
        if self._communicator is not None and self._communicator.rank:
            raise RuntimeError("step() is for rank 0; the manager of another rank does the same in close()")
        if not self._step_lock.acquire(blocking=False):
            where = "one of its callbacks" if self._is_stepping else "another thread"
            raise RuntimeError(f"step() is called in {where} while an iteration runs; call it when that has ended")
        try:
            self._stepping_thread = threading.get_ident()
            try:
                worked = self._step()
            except BaseException as error:
                self._fail(error)
                if not isinstance(error, Exception):
                    self._error = None  # close() does not interrupt the program again
                raise
            if self._aborting.is_set():
                self._work()
            return worked
        finally:
            self._stepping_thread = NO_THREAD
            self._step_lock.release()

    def truncate_blocks(self, conversation: InferenceRequest, num_tokens_to_keep: int) -> None:
        """Before the next iteration, release the reusable KV cache blocks of this conversation after its first tokens.

        Its input_ids are the whole conversation, answers included; blocks of longer conversations stay. A block that is
        partly kept stays. May be called from any thread. InputError if the request is invalid."""
        self._check_process()
        keep = integer(num_tokens_to_keep, "num_tokens_to_keep", 0)
        self._truncations.put((engine_request(conversation, self.config.vocab_size), keep))

    def close(self) -> None:
        """Wait until no request is active or offered, then end. Raises BatchManagerFailed if the loop has ended early.
        Called within a callback, it returns at once. If Ctrl-C interrupts it, the worker thread runs on: call it, or
        `abort()`, again."""
        self._check_process()
        self._closing.set()
        self._finish()

    def abort(self) -> None:
        """End at once. Every request that was fetched and is not complete gets an error response."""
        self._check_process()
        self._aborting.set()
        self._finish()

    def __enter__(self) -> "BatchManager":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    # The worker thread.

    def _finish(self) -> None:
        self._wake.set()
        if self._worker is None:
            if self._is_stepping:
                return
            with self._step_lock:
                self._stepping_thread = threading.get_ident()
                try:
                    if not self._ended:
                        self._work()
                finally:
                    self._stepping_thread = NO_THREAD
        elif self._worker.is_current:
            return
        else:
            self._worker.join()
        if self._owned_executor is not None:
            self._owned_executor.close()
            self._owned_executor = None
        if self._error is not None:
            error, self._error = self._error, None
            if self._worker is None and not isinstance(error, Exception):
                raise error  # Ctrl-C, or SystemExit of a callback, in the caller's own thread
            raise BatchManagerFailed(f"the batch manager ended early: {_reason(error)}") from error

    @property
    def _is_stepping(self) -> bool:
        """Whether the caller is in a callback of an iteration that its thread runs."""
        return self._stepping_thread == threading.get_ident()

    def _check_process(self) -> None:
        if self._worker is not None and self._worker.is_forked:
            raise RuntimeError("the batch manager runs in the process that this one is forked from; make another here")

    def _work(self) -> None:
        """Run iterations until the manager is closed and no request is left."""
        while (worked := self._turn()) is not None:
            if not worked:
                self._wait_for_requests()

    def _turn(self) -> bool | None:
        """One iteration: whether it had anything to do, or None if it was the last one."""
        try:
            if self._communicator is not None and self._communicator.rank:
                self._ranks.follow()
                self._ended = True
                return None
            if self._aborting.is_set():
                self._loop.abort("the batch manager was aborted")
            else:
                # Read before the step, so that it sees requests made before the call of close().
                closing = self._closing.is_set()
                worked = self._step() or self._callbacks.expects_requests
                if worked or not closing:
                    return worked
            if self._communicator is not None:
                self._ranks.end_others()
        except BaseException as error:  # also SystemExit, which would end the thread silently
            self._fail(error)
        self._ended = True
        return None

    def _fail(self, error: BaseException) -> None:
        # No traceback for a rank that failed, or a full disk of what the observer writes.
        is_foreseen = isinstance(cause_of(error), RankFailed) or isinstance(error, OutputError | OSError)
        is_foreseen |= isinstance(error.__cause__, EngineLost)
        _log.error("the batch manager ends: %s", _reason(error), exc_info=None if is_foreseen else error)
        self._error = error
        self._ended = True
        if self._communicator is not None:
            self._ranks.fail(error)
        self._loop.abort(f"the batch manager ended: {_reason(error)}")

    def _step(self) -> bool:
        """Truncate conversations, run an iteration, and stop requests with a broken stream. Raises after repeated
        failures."""
        while not self._truncations.empty():
            self._loop.truncate_blocks(*self._truncations.get())
        iterations = self._callbacks.num_iterations
        try:
            worked = self._loop.step()
            if self._callbacks.num_iterations > iterations:
                self._failures = 0
        except ExecutorFailed as error:
            self._failures += 1
            is_lost = isinstance(error.__cause__, EngineLost)
            if self._failures >= MAX_FAILURES or is_lost or self._communicator is not None:  # other ranks have gone on
                raise
            _log.exception("%s; its requests had an error response", error)
            worked = True
        for request_id, problem in self._callbacks.take_undelivered():
            self._loop.stop(request_id, problem)
        if self._callbacks.failure is not None:
            raise self._callbacks.failure
        return worked


def _reason(error: BaseException) -> str:
    """The message of an exception; its name where it has none that a reader understands (SystemExit, Ctrl-C)."""
    return str(error) if isinstance(error, Exception) else type(error).__name__


def _of_ranks(settings: RunConfig, communicator: "Communicator") -> RunConfig:
    """`settings` with the sizes of `communicator`. InputError if they name others."""
    sizes = {"tp_size": communicator.tp_size, "pp_size": communicator.pp_size}
    for name, size in sizes.items():
        if getattr(settings, name) not in (1, size):
            raise InputError(f"{name}: {getattr(settings, name)} is not the communicator's {size}; leave it out.")
    return settings.with_values(**sizes)


def _settings(model_type: str, max_beam_width: int, policy: str, optional_params: Any) -> RunConfig:
    """The settings. Those of the KV cache may be nested, which go before others of their names. Arguments win."""
    flat: dict[str, Any] = {}
    nested: Mapping[str, Any] = {}
    for name, value in _mapping("optional_params", optional_params).items():
        if snake_case(str(name)) != "kv_cache_config":
            flat[name] = value
        else:
            nested = _mapping(name, value)
    named = {"type": model_type, "max_beam_width": max_beam_width, "policy": policy}
    return from_mapping({**own_names(flat), **own_names(nested), **named})


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    """`value`, settings by name; None is an empty one."""
    if value is not None and not isinstance(value, Mapping):
        raise InputError(f"{name}: expected a mapping of its settings, not {type(value).__name__}.")
    return value or {}


def _engine(
    executor_or_model: Executor | str | Path, settings: RunConfig, communicator: "Communicator | None"
) -> tuple[BatchingConfig, Executor]:
    if isinstance(executor_or_model, str | Path):
        # No recorder would take the times of a profile.
        settings = settings.with_values(model=str(executor_or_model), profile=False)
        engine = build_engine(settings, settings.max_beam_width or 1, communicator=communicator)
        return engine.limits, engine.executor
    for name in ("max_seq_len", "max_tokens_in_paged_kvcache"):
        if getattr(settings, name) is None:
            raise InputError(f"{name}: expected among the optional parameters; an executor does not report its size.")
    resolved = resolve_limits(settings, settings.max_seq_len or 0, on_cpu=True)
    # The size of the cache is given, so the layers of the model do not matter.
    layout = cache_layout(resolved, ModelConfig.tiny(), memory_bytes=None)
    return batching_config(resolved, layout, vocab_size=None), executor_or_model
