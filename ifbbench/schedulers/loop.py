"""The loop over the scheduler of an engine."""

from collections.abc import Callable, Collection

from ifbbench.clock import Clock
from ifbbench.engine.interfaces import Executor, Observer
from ifbbench.engine.loop import NextChange, TokenGenerationLoop, is_predicted, no_stop_signals, nothing_queued
from ifbbench.engine.request import Request
from ifbbench.engine.responses import Response
from ifbbench.schedulers.tensorrt_llm.config import BatchingConfig
from ifbbench.schedulers.tensorrt_llm.scheduler import TensorRtLlmScheduler


def make_loop(
    limits: BatchingConfig,
    executor: Executor,
    clock: Clock,
    get_requests: Callable[[int], list[Request]],
    send_response: Callable[[Response], None],
    observer: Observer | None = None,
    queued: Callable[[], int] = nothing_queued,
    poll_stop_signals: Callable[[], Collection[int]] = no_stop_signals,
    next_change: NextChange | None = None,
    next_priority: Callable[[], float | None] | None = None,
) -> TokenGenerationLoop:
    """A loop over a new scheduler with these limits; the others are as for `TokenGenerationLoop`."""
    return TokenGenerationLoop(
        TensorRtLlmScheduler(limits, clock, is_predicted(executor, clock, next_change)),
        executor,
        clock,
        get_requests,
        send_response,
        observer,
        queued,
        poll_stop_signals,
        next_change,
        next_priority,
    )
