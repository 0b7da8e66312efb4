"""Engines by name: the scheduler of each, those of users included, and the loop over one."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from ifbbench.clock import Clock
from ifbbench.engine.interfaces import Executor, Scheduler
from ifbbench.engine.loop import NextChange, TokenGenerationLoop
from ifbbench.engine.predicted_loop import PredictedLoop, is_predicted
from ifbbench.errors import IfbbenchError, InputError
from ifbbench.schedulers.answers import Answers, SchedulerFailed
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.plugins import check_parameters, describe_failure, find_plugin
from ifbbench.settings.engines import ENGINES, SGLANG, TRTLLM, VLLM
from ifbbench.settings.fields import shown

ENTRY_POINT_GROUP = "ifbbench.engines"


def _tensorrt_llm() -> Callable[..., Scheduler]:
    from ifbbench.schedulers.tensorrt_llm.repetition import make_scheduler

    return make_scheduler


def _vllm() -> Callable[..., Scheduler]:
    from ifbbench.schedulers.vllm.scheduler import VllmScheduler

    return VllmScheduler


def _sglang() -> Callable[..., Scheduler]:
    from ifbbench.schedulers.sglang.scheduler import SglangScheduler

    return SglangScheduler


# A run imports the scheduler of its own engine: the modules of the others take as long as a short run.
BUILT_IN: dict[str, Callable[[], Callable[..., Scheduler]]] = {TRTLLM: _tensorrt_llm, VLLM: _vllm, SGLANG: _sglang}


def _tensorrt_llm_ranks() -> Callable[..., Scheduler]:
    from ifbbench.schedulers.tensorrt_llm.ranks import TensorRtLlmRanks

    return TensorRtLlmRanks


def _vllm_ranks() -> Callable[..., Scheduler]:
    from ifbbench.schedulers.vllm.ranks import VllmRanks

    return VllmRanks


def _sglang_ranks() -> Callable[..., Scheduler]:
    from ifbbench.schedulers.sglang.ranks import SglangRanks

    return SglangRanks


# With attention data parallelism, over a scheduler for each rank.
RANKS: dict[str, Callable[[], Callable[..., Scheduler]]] = {
    TRTLLM: _tensorrt_llm_ranks,
    VLLM: _vllm_ranks,
    SGLANG: _sglang_ranks,
}


def make_loop(
    limits: BatchingConfig,
    executor: Executor,
    clock: Clock,
    *client: Any,
    next_change: NextChange | None = None,
    loop_class: type[TokenGenerationLoop] | None = None,
    **more: Any,
) -> TokenGenerationLoop:
    """A loop over a new scheduler with these limits; the others are as for `TokenGenerationLoop`. loop_class: one that
    a caller steps in another way."""
    predicted = is_predicted(executor, clock, next_change)
    loop = loop_class or (PredictedLoop if predicted else TokenGenerationLoop)
    return loop(make_scheduler(limits, clock, predicted), executor, clock, *client, next_change=next_change, **more)


def make_scheduler(limits: BatchingConfig, clock: Clock, is_predicted: bool = False) -> Scheduler:
    """The scheduler of the engine that `limits` names.

    clock: the clock of the run.
    is_predicted: whether the loop knows in advance how long iterations take.

    InputError if a user's class cannot be made.
    """
    factory = find_scheduler(limits.engine)
    if limits.engine in BUILT_IN:
        if limits.attention_dp_size == 1:
            return factory(limits, clock, is_predicted)
        ranks = range(limits.attention_dp_size)
        return RANKS[limits.engine]()(limits, [factory(limits.of_rank(rank), clock, is_predicted) for rank in ranks])
    return _make(limits.engine, factory, limits, clock)


def check_scheduler(limits: BatchingConfig, clock: Clock) -> None:
    """InputError if the class of a user's engine cannot be made. A run asks before it begins a directory."""
    if limits.engine not in BUILT_IN:
        make_scheduler(limits, clock)


def find_scheduler(name: str) -> Callable[..., Scheduler]:
    """The class of the scheduler of the engine `name`: a built-in one, `package.module:ClassName` of an installed
    module or one in the current directory, or an entry point of the group `ifbbench.engines`.

    InputError if there is none of that name, or it is no scheduler."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    target = find_plugin("engine", name, ENTRY_POINT_GROUP, ENGINES)
    if not isinstance(target, type):
        raise InputError(
            f"--engine: {name!r} is of type {type(target).__name__}, not a class; expected one with the methods of "
            "ifbbench.engine.interfaces.Scheduler. Name the class."
        )
    if missing := [one for one in _methods() if not callable(getattr(target, one, None))]:
        raise InputError(
            f"--engine: {name!r} has no method {missing[0]!r}; expected those of ifbbench.engine.interfaces.Scheduler. "
            "Derive the class from it, and add the method."
        )
    check_parameters("engine", name, target, "limits and a clock", "limits", "clock")
    return target


def _methods() -> list[str]:
    """What the loop calls of a scheduler."""
    return [name for name, value in vars(Scheduler).items() if inspect.isfunction(value) and not name.startswith("_")]


def _make(name: str, target: Callable[..., Scheduler], limits: BatchingConfig, clock: Clock) -> Scheduler:
    try:
        scheduler = target(limits, clock)
        attributes = [one for one in Scheduler.__annotations__ if not hasattr(scheduler, one)]
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        raise InputError(
            f"--engine: {name!r} cannot be made: {describe_failure(error)}. Correct its __init__."
        ) from error
    if attributes:
        raise InputError(
            f"--engine: {name!r} has no attribute {attributes[0]!r} after its __init__; expected those of "
            "ifbbench.engine.interfaces.Scheduler. Set it there."
        )
    for one in ("max_in_flight", "num_micro_batches"):
        if not isinstance(value := getattr(scheduler, one), int) or value < 1:
            raise InputError(f"--engine: {name!r} has {one} {shown(value)}; expected an integer of at least 1.")
    return cast(Scheduler, _CheckedScheduler(name, scheduler))


class _CheckedScheduler:
    """A user's scheduler, with the same methods. SchedulerFailed if one of them raises, with file and line, or returns
    what it must not."""

    def __init__(self, name: str, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        answers = Answers(name, scheduler)
        for method in _methods():
            setattr(self, method, _checked(name, getattr(scheduler, method), method, answers))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def _checked(engine: str, method: Callable[..., Any], name: str, answers: Answers) -> Callable[..., Any]:
    @wraps(method)
    def call(*arguments: Any) -> Any:
        try:
            answer = method(*arguments)
        except (KeyboardInterrupt, IfbbenchError):
            raise
        except BaseException as error:  # it may raise anything, such as SystemExit
            raise SchedulerFailed(f"engine {engine} failed in {name}: {describe_failure(error)}") from error
        answers.check(name, answer, arguments)
        return answer

    return call
