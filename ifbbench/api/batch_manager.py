"""The batch manager of the TensorRT-LLM documentation: callbacks around the token generation loop, and a thread."""

import atexit
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ifbbench.api.client import (
    MAX_FAILURES,
    Callbacks,
    GetInferenceRequests,
    PollStopSignals,
    ReturnStats,
    SendResponse,
)
from ifbbench.api.engine import Engine, build_engine
from ifbbench.api.request import InferenceRequest, engine_request
from ifbbench.api.resolve import batching_config, cache_layout, resolve_limits
from ifbbench.clock import Clock, WallClock
from ifbbench.config import RunConfig
from ifbbench.engine.batch import Executor
from ifbbench.engine.config import BatchingConfig, BatchingType
from ifbbench.engine.kv_cache.interface import KvCache
from ifbbench.engine.manager import ExecutorFailed, TokenGenerationLoop
from ifbbench.engine.records import IterationStatistics, Observer
from ifbbench.engine.request import Request
from ifbbench.errors import IfbbenchError, InputError
from ifbbench.fields import integer
from ifbbench.model.config import ModelConfig
from ifbbench.settings import from_mapping, own_names, snake_case

# Interval at which an idle worker thread asks for requests.
IDLE_POLL_S = 0.001
# A program that ends without close() waits so long for the iteration in flight.
EXIT_TIMEOUT_S = 5.0

_log = logging.getLogger("ifbbench")


class BatchManagerFailed(IfbbenchError):
    """The loop has ended early; every request that it had fetched got an error response."""


class BatchManager:
    """In-flight batching behind four callbacks. A worker thread runs the token generation loop from construction to
    `close()` (or the end of a `with` block) and calls all callbacks; they should return soon.

    executor_or_model: a model ("tiny", or a directory with config.json and safetensors), or an Executor, which the
        caller closes. An executor needs `max_seq_len` and the cache's `max_tokens` among the optional parameters.
    model_type: "V1", "InflightBatching" or "InflightFusedBatching" (or v1, uifb, ifb).
    max_beam_width: of a request. All requests of an iteration have the same beam width.
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

    The process is not changed, except for PyTorch's number of threads if `cpu_threads` is given. A program that wants
    the CPU settings of the command line calls `use_threads(None)` and `keep_freed_memory()` of
    `ifbbench.execution.host`.

    Raises InputError if the parameters do not fit together. An exception of a callback is logged, and the loop
    continues; if a callback or the executor fails three times in a row, the loop ends, all requests get an error
    response, and `close()` raises BatchManagerFailed.
    """

    def __init__(
        self, executor_or_model: Executor | str | Path, model_type: str, max_beam_width: int, scheduler_policy: str,
        get_inference_requests: GetInferenceRequests, send_response: SendResponse,
        poll_stop_signals: PollStopSignals | None = None, return_batch_manager_stats: ReturnStats | None = None,
        optional_params: Mapping[str, Any] | None = None, *, start: bool = True,
    ) -> None:
        settings = _settings(model_type, max_beam_width, scheduler_policy, optional_params or {})
        limits, executor = _engine(executor_or_model, settings)
        statistics = IterationStatistics(limits.batching_type, limits.max_active)
        callbacks = Callbacks(
            get_inference_requests, send_response, poll_stop_signals, return_batch_manager_stats, statistics,
            may_stream=limits.batching_type is not BatchingType.V1, vocab_size=limits.vocab_size,
        )  # fmt: skip
        self._begin(limits, executor, callbacks, owns_executor=executor is not executor_or_model, start=start)

    @classmethod
    def of_engine(
        cls, engine: Engine, get_inference_requests: GetInferenceRequests, send_response: SendResponse,
        poll_stop_signals: PollStopSignals, observer: Observer, queued: Callable[[], int],
        wait_for_requests: Callable[[], object],
    ) -> "BatchManager":  # fmt: skip
        """A manager of an engine that exists, which the caller closes; on the engine's clock.

        observer: is notified of each iteration, and of each request that ends without being complete. queued: number of
        requests that have arrived and were not returned yet. wait_for_requests: is called while no request is active;
        returns when one has arrived, and soon after a call of `close()` or `abort()`."""
        limits = engine.limits
        statistics = IterationStatistics(limits.batching_type, limits.max_active)
        callbacks = Callbacks(
            get_inference_requests, send_response, poll_stop_signals, None, statistics,
            may_stream=limits.batching_type is not BatchingType.V1, vocab_size=limits.vocab_size, observer=observer,
        )  # fmt: skip
        manager = cls.__new__(cls)
        manager._begin(limits, engine.executor, callbacks, engine.clock, queued, wait_for_requests)
        return manager

    def _begin(
        self, limits: BatchingConfig, executor: Executor, callbacks: Callbacks, clock: Clock | None = None,
        queued: Callable[[], int] = lambda: 0, wait_for_requests: Callable[[], object] | None = None,
        *, owns_executor: bool = False, start: bool = True,
    ) -> None:  # fmt: skip
        self._owned_executor = executor if owns_executor else None
        self._callbacks = callbacks
        self._loop = TokenGenerationLoop(
            limits, executor, clock or WallClock(), callbacks.get_requests, callbacks.send, callbacks, queued,
            poll_stop_signals=callbacks.poll,
        )  # fmt: skip
        self._closing, self._aborting, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._wait_for_requests = wait_for_requests or partial(self._wake.wait, IDLE_POLL_S)
        self._failures = 0
        self._truncations: SimpleQueue[tuple[Request, int]] = SimpleQueue()
        self._in_step = self._ended = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if start:
            # A daemon thread does not keep a program running that forgets to close the manager.
            self._thread = threading.Thread(target=self._work, name="ifbbench-batch-manager", daemon=True)
            self._thread.start()
            # Python would stop it in the middle of an iteration, upon which PyTorch aborts the process.
            atexit.register(self._end_with_the_program)

    @property
    def config(self) -> BatchingConfig:
        """The limits of the engine."""
        return self._loop.config

    @property
    def kv_cache(self) -> KvCache:
        """The KV cache, read-only. With a worker thread, only after `close()`."""
        return self._loop.kv_cache

    @property
    def is_running(self) -> bool:
        """Whether the worker thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def step(self) -> bool:
        """One iteration of a manager without a thread; False when no request is active."""
        if self._thread is not None:
            raise RuntimeError("step() is called by the worker thread; make the manager with start=False to call it")
        if self._ended:
            raise RuntimeError("the batch manager has ended")
        try:
            worked = self._step()
        except Exception as error:
            self._fail(error)
            raise
        if self._aborting.is_set():
            self._work()
        return worked

    def truncate_blocks(self, conversation: InferenceRequest, num_tokens_to_keep: int) -> None:
        """Before the next iteration, release the reusable KV cache blocks of this conversation after its first tokens.

        Its input_ids are the whole conversation, answers included; blocks of longer conversations stay. A block that is
        partly kept stays. May be called from any thread. InputError if the request is invalid."""
        keep = integer(num_tokens_to_keep, "num_tokens_to_keep", 0)
        self._truncations.put((engine_request(conversation, self.config.vocab_size), keep))

    def close(self) -> None:
        """Wait until no request is active or offered, then end. Raises BatchManagerFailed if the loop has ended early.
        Called within a callback, it returns at once."""
        self._closing.set()
        self._finish()

    def abort(self) -> None:
        """End at once. Every request that was fetched and is not complete gets an error response."""
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
        if self._thread is None:
            if self._in_step:
                return
            if not self._ended:
                self._work()
        elif self._thread is threading.current_thread():
            return
        else:
            self._thread.join()
            atexit.unregister(self._end_with_the_program)
        if self._owned_executor is not None:
            self._owned_executor.close()
            self._owned_executor = None
        if self._error is not None:
            error, self._error = self._error, None
            raise BatchManagerFailed(f"the batch manager ended early: {error}") from error

    def _end_with_the_program(self) -> None:
        self._aborting.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(EXIT_TIMEOUT_S)

    def _work(self) -> None:
        """Run iterations until the manager is closed and no request is left."""
        try:
            while not self._aborting.is_set():
                # Read before the step, so that it sees requests made before the call of close().
                closing = self._closing.is_set()
                if self._step() or self._callbacks.expects_requests:
                    continue
                if closing:
                    return
                self._wait_for_requests()
            self._loop.abort("the batch manager was aborted")
        except BaseException as error:  # also SystemExit, which would end the thread silently
            self._fail(error)
        finally:
            self._ended = True

    def _fail(self, error: BaseException) -> None:
        _log.error("the batch manager ends: %s", error, exc_info=error)
        self._error = error
        self._ended = True
        self._loop.abort(f"the batch manager ended: {error}")

    def _step(self) -> bool:
        """Truncate conversations, run an iteration, and stop requests with a broken stream. Raises after repeated
        failures."""
        self._in_step = True
        try:
            while not self._truncations.empty():
                request, keep = self._truncations.get()
                if (known := request.reuse.known()) is not None:
                    self._loop.kv_cache.truncate(known, request.prompt_len, keep)
            iterations = self._callbacks.num_iterations
            try:
                worked = self._loop.step()
                if self._callbacks.num_iterations > iterations:
                    self._failures = 0
            except ExecutorFailed as error:
                self._failures += 1
                if self._failures >= MAX_FAILURES:
                    raise
                _log.exception("%s; its requests had an error response", error)
                worked = True
            for request_id, problem in self._callbacks.take_undelivered():
                self._loop.stop(request_id, problem)
            if self._callbacks.failure is not None:
                raise self._callbacks.failure
            return worked
        finally:
            self._in_step = False


def _settings(model_type: str, max_beam_width: int, policy: str, optional_params: Mapping[str, Any]) -> RunConfig:
    """The settings. Those of the KV cache may be nested, which go before others of their names. Arguments win."""
    flat: dict[str, Any] = {}
    nested: Mapping[str, Any] = {}
    for name, value in optional_params.items():
        if snake_case(name) != "kv_cache_config":
            flat[name] = value
        elif value is not None:
            if not isinstance(value, Mapping):
                raise InputError(f"{name}: expected a mapping of its settings, not {type(value).__name__}.")
            nested = value
    named = {"type": model_type, "max_beam_width": max_beam_width, "policy": policy}
    return from_mapping({**own_names(flat), **own_names(nested), **named})


def _engine(executor_or_model: Executor | str | Path, settings: RunConfig) -> tuple[BatchingConfig, Executor]:
    if isinstance(executor_or_model, str | Path):
        # No recorder would take the times of a profile.
        settings = settings.with_values(model=str(executor_or_model), profile=False)
        engine = build_engine(settings, settings.max_beam_width or 1)
        return engine.limits, engine.executor
    for name in ("max_seq_len", "max_tokens_in_paged_kvcache"):
        if getattr(settings, name) is None:
            raise InputError(f"{name}: expected among the optional parameters; an executor does not report its size.")
    resolved = resolve_limits(settings, settings.max_seq_len or 0, on_cpu=True)
    # The size of the cache is given, so the layers of the model do not matter.
    layout = cache_layout(resolved, ModelConfig.tiny(), memory_bytes=None)
    return batching_config(resolved, layout, vocab_size=None), executor_or_model
