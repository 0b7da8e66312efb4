"""What a user's scheduler returns is checked, so that a mistake is named where it was made, not where it is used."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ifbbench.engine.batch import StepInputs
from ifbbench.engine.interfaces import Scheduler, SchedulerStalled
from ifbbench.engine.plan import ContextChunk, LeftOut, Plan
from ifbbench.engine.records import CacheState
from ifbbench.engine.request import Request
from ifbbench.errors import IfbbenchError
from ifbbench.settings.fields import shown

# Decisions at one time to run nothing, after which a scheduler is taken to wait for ever.
MAX_IDLE = 10_000


class SchedulerFailed(IfbbenchError):
    """A method of a user's scheduler raised, or returned what it must not."""


class Answers:
    """The answers of one scheduler.

    name: name of its class, for messages.
    _idle: number of decisions to run nothing since the time `_idle_s`.
    """

    def __init__(self, name: str, scheduler: Scheduler) -> None:
        self._name, self._scheduler = name, scheduler
        self._idle, self._idle_s = 0, -math.inf
        self._checks: Mapping[str, Callable[..., str | None]] = {
            "admit": self._requests,
            "schedule": self._plan,
            "allocate": self._inputs,
            "advance": self._count,
            "update": self._listed,
            "lose": self._listed,
            "cache_state": self._state,
        }

    def check(self, method: str, answer: Any, arguments: Sequence[Any]) -> None:
        """SchedulerFailed if `method` must not return `answer` for these `arguments`; SchedulerStalled if nothing will
        ever run."""
        wrong = self._checks[method](answer, *arguments) if method in self._checks else None
        if wrong is not None:
            raise SchedulerFailed(f"engine {self._name}: {method}() {wrong}")

    def _requests(self, answer: Any, *_: Any) -> str | None:
        is_sequence = isinstance(answer, Sequence) and all(isinstance(one, Request) for one in answer)
        return None if is_sequence else f"returned {shown(answer)}; expected a sequence of requests."

    def _listed(self, answer: Any, *_: Any) -> str | None:
        is_list = isinstance(answer, list) and all(isinstance(one, Request) for one in answer)
        return None if is_list else f"returned {shown(answer)}; expected a list of requests."

    def _count(self, answer: Any, *_: Any) -> str | None:
        return None if isinstance(answer, int) else f"returned {shown(answer)}; expected a number of tokens."

    def _inputs(self, answer: Any, plan: Plan, *_: Any) -> str | None:
        if not isinstance(answer, StepInputs):
            return f"returned {shown(answer)}; expected StepInputs."
        return self._chunks(plan, "left")

    def _state(self, answer: Any, *_: Any) -> str | None:
        return None if isinstance(answer, CacheState) else f"returned {shown(answer)}; expected CacheState."

    def _plan(self, answer: Any, _iteration: int, now_s: float, in_flight: Sequence[Any], *_: Any) -> str | None:
        if not isinstance(answer, Plan):
            return f"returned {shown(answer)}; expected a Plan."
        if not all(isinstance(one, LeftOut) for one in answer.blocked):
            return f"returned {shown(answer.blocked)} as `blocked`; expected a tuple of LeftOut."
        self._see_idle(answer, now_s, in_flight)
        return self._rows(answer) or (self._chunks(answer, "returned") if answer.chunks else None)

    def _rows(self, plan: Plan) -> str | None:
        rows: Any = plan.rows
        if not (isinstance(rows, np.ndarray) and rows.dtype == np.int64 and rows.ndim == 1):
            return f"returned {shown(rows)} as `rows`; expected an array of int64 with one dimension."
        running, seen = self._scheduler.table.requests, set[int]()
        for row in rows.tolist():
            if row in seen or row not in running or not running[row].in_generation:
                return f"returned row {row} in `rows`; expected rows of requests that generate, each once."
            seen.add(row)
        return None

    def _chunks(self, plan: Plan, verb: str) -> str | None:
        """What is wrong with the chunks of `plan`, which the method returned or left as they are."""
        waiting = {request.slot: request for request in plan.context}
        for chunk in plan.chunks:
            if not isinstance(chunk, ContextChunk) or waiting.pop(chunk.request.slot, None) is not chunk.request:
                return f"{verb} {shown(chunk)} in `chunks`; expected one ContextChunk of each request of `context`."
            if chunk.start < 0 or chunk.length < 1 or chunk.start + chunk.length > chunk.request.prompt_len:
                return (
                    f"{verb} a chunk of {chunk.length} tokens from {chunk.start} on of request "
                    f"{chunk.request.request_id}; expected at least one, within its prompt of "
                    f"{chunk.request.prompt_len}."
                )
        for request in waiting.values():
            return f"{verb} no chunk of request {request.request_id}, which is in `context`; expected one of each."
        return None

    def _see_idle(self, plan: Plan, now_s: float, in_flight: Sequence[Any]) -> None:
        """SchedulerStalled after too many decisions at one time to run nothing, although requests wait."""
        is_idle = plan.does_nothing and not in_flight and not plan.awaits_stores
        if not is_idle or self._scheduler.table.requests or not len(self._scheduler.waiting):
            self._idle = 0
            return
        self._idle = self._idle + 1 if now_s == self._idle_s else 1
        self._idle_s = now_s
        if self._idle > MAX_IDLE:
            raise SchedulerStalled(
                f"engine {self._name} runs nothing, in {self._idle:,} decisions at {now_s:,.3f} s, while "
                f"{len(self._scheduler.waiting)} requests wait and none is active; let one enter, or refuse it"
            )
