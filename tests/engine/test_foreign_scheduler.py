"""The border around a scheduler: the loop runs one that shares no rule with the built-in ones."""

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ifbbench.clock import Clock
from ifbbench.engine.arrays import NO_ROWS, Rows
from ifbbench.engine.batch import BatchLayout, StepInputs, StepOutputs
from ifbbench.engine.interfaces import NO_LIMIT, RequestSource, Scheduler
from ifbbench.engine.loop import TokenGenerationLoop
from ifbbench.engine.passes import NullExecutor
from ifbbench.engine.plan import ContextChunk, LeftOut, Plan
from ifbbench.engine.records import CacheState, InFlightIteration, IterationRecord
from ifbbench.engine.request import Request, RequestTable
from ifbbench.engine.responses import Response
from ifbbench.engine.stretch import Stretch
from ifbbench.errors import InputError, RunFailed
from ifbbench.replay.run import run_trace
from ifbbench.schedulers.engines import make_scheduler
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.settings.config import RunConfig
from ifbbench.virtual_clock import VirtualClock

SLOTS = 2


class LastComeFirstServed(Scheduler):
    """A scheduler of two slots without KV blocks, in which the newest request runs first and takes its prompt whole."""

    name, max_in_flight, num_micro_batches = "last_come", 1, 1

    def __init__(self, limits: BatchingConfig | None = None, clock: Clock | None = None) -> None:
        self.table = RequestTable(SLOTS)
        self.layout = BatchLayout((np.zeros((SLOTS, 1, 1), np.int32),), tokens_per_block=1)
        self._waiting: deque[Request] = deque()
        self._order = 0

    @property
    def waiting(self) -> Sequence[Request]:
        return self._waiting

    def admit(self, source: RequestSource) -> Sequence[Request]:
        for request in source.get(NO_LIMIT):
            if request.prompt_len > 100:
                source.refuse(request, "a prompt of more than 100 tokens")
            else:
                self._waiting.appendleft(request)
        entered = []
        while self._waiting and self.table.free_rows:
            self._order += 1
            self._waiting[0].enter(self.table, self._order)
            entered.append(self._waiting.popleft())
        return entered

    def find(self, request_id: int) -> Request | None:
        known = [*self._waiting, *self.table.requests.values()]
        return next((request for request in known if request.request_id == request_id), None)

    def remove(self, request: Request) -> None:
        if request.table is None:
            self._waiting.remove(request)
        else:
            request.leave()
            request.complete()

    def schedule(
        self, iteration: int, now_s: float, in_flight: Sequence[InFlightIteration], collect: Callable[[], None]
    ) -> Plan:
        context = [request for request in self.table.requests.values() if request.in_context]
        rows = [row for row, request in self.table.requests.items() if request.in_generation]
        blocked = tuple(LeftOut(request, "slots") for request in list(self._waiting)[:1])
        plan = Plan(context, np.array(rows, np.int64) if rows else NO_ROWS, blocked=blocked)
        plan.chunks = tuple(ContextChunk(request, 0, request.prompt_len) for request in context)
        return plan

    def allocate(self, plan: Plan) -> StepInputs:
        return StepInputs(self._positions(plan.rows))

    def advance(self, plan: Plan, iteration: int) -> int:
        for request in plan.context:
            request.set_chunk(request.prompt_len)
            request.advance_context()
            request.start_generation()
        self.table.generated[plan.rows] += 1
        return 0

    def update(self, iteration: InFlightIteration, outputs: Sequence[StepOutputs]) -> list[Request]:
        self.table.confirmed[iteration.output_rows] += 1
        done = self.table.confirmed[iteration.output_rows] == self.table.stop_after[iteration.output_rows]
        return [self.table.requests[row] for row in iteration.output_rows[done].tolist()]

    def lose(self, iteration: InFlightIteration) -> list[Request]:
        return list(self.table.requests.values())

    def cache_state(self) -> CacheState:
        return CacheState(None, None, None, None, None, None, SLOTS, len(self.table.requests), 0)

    def _positions(self, rows: Rows) -> Rows:
        return self.table.original_prompt_len[rows] + self.table.generated[rows] - 1


class Records:
    """Notes what the loop reports."""

    def __init__(self) -> None:
        self.records: list[IterationRecord] = []
        self.left_with: dict[int, str | None] = {}

    def iteration(self, record: IterationRecord) -> None:
        self.records.append(record)

    def stretch(self, stretch: Stretch) -> None:
        raise AssertionError("no plan repeats")

    def left(self, request: Request, error: str | None) -> None:
        self.left_with[request.request_id] = error


def test_the_loop_runs_another_scheduler() -> None:
    requests = [Request(number, prompt_len, 3, index=number) for number, prompt_len in enumerate((10, 20, 101, 30))]
    arriving, responses, seen = [requests], list[Response](), Records()
    scheduler: Scheduler = LastComeFirstServed()
    loop = TokenGenerationLoop(
        scheduler,
        NullExecutor(),
        VirtualClock(),
        lambda count: arriving.pop() if arriving else [],
        responses.append,
        seen,
    )
    while loop.step():
        pass
    assert [response.request.request_id for response in responses] == [2, 3, 1, 0]
    assert seen.left_with == {2: "a prompt of more than 100 tokens"}
    ran = [([chunk.length for chunk in one.context], one.num_generation) for one in seen.records]
    assert ran == [([30, 20], 0), ([], 2), ([], 2), ([10], 0), ([], 1), ([], 1)]
    assert [one.left_out.limit if one.left_out else None for one in seen.records] == ["slots"] * 3 + [None] * 3
    assert not scheduler.table.requests


def test_a_request_of_another_scheduler_is_stopped() -> None:
    requests = [Request(number, 10, 50, index=number) for number in range(3)]
    arriving, responses = [requests], list[Response]()
    loop = TokenGenerationLoop(
        LastComeFirstServed(),
        NullExecutor(),
        VirtualClock(),
        lambda count: arriving.pop() if arriving else [],
        responses.append,
    )
    loop.step()
    loop.stop(0)  # waits
    loop.stop(2)  # runs
    loop.stop(7)  # is unknown
    assert [(response.request.request_id, response.is_final) for response in responses] == [(0, True), (2, True)]
    while loop.step():
        pass
    assert len(responses) == 3


HERE = "tests.engine.test_foreign_scheduler"


class Raises(LastComeFirstServed):
    def update(self, iteration: InFlightIteration, outputs: Sequence[StepOutputs]) -> list[Request]:
        raise ZeroDivisionError("of its own")


class IsAbsent(LastComeFirstServed):
    def __init__(self, limits: BatchingConfig, clock: Clock) -> None:
        raise ValueError("not here")


class HasNoTable(LastComeFirstServed):
    def __init__(self, limits: BatchingConfig, clock: Clock) -> None:
        pass


class TakesThree(LastComeFirstServed):
    def __init__(self, limits: BatchingConfig, clock: Clock, more: int) -> None:
        pass


class ReturnsNoPlan(LastComeFirstServed):
    def schedule(self, *arguments: Any) -> Any:
        return None


class RunsNoOne(LastComeFirstServed):
    def admit(self, source: RequestSource) -> Sequence[Request]:
        self._waiting.extend(source.get(NO_LIMIT))
        return []


class RunsARowTwice(LastComeFirstServed):
    def schedule(self, *arguments: Any) -> Plan:
        plan = super().schedule(*arguments)
        return replace(plan, rows=np.concatenate([plan.rows, plan.rows]))


class CutsNothing(LastComeFirstServed):
    def schedule(self, *arguments: Any) -> Plan:
        plan = super().schedule(*arguments)
        return replace(plan, chunks=tuple(ContextChunk(chunk.request, 0, 0) for chunk in plan.chunks))


class LeavesOutChunks(LastComeFirstServed):
    def schedule(self, *arguments: Any) -> Plan:
        return replace(super().schedule(*arguments), chunks=())


class CountsInWords(LastComeFirstServed):
    def advance(self, plan: Plan, iteration: int) -> Any:
        super().advance(plan, iteration)
        return "none"


class HasNoTurn(LastComeFirstServed):
    max_in_flight = 0


A_FUNCTION = max


def test_an_exception_of_a_users_scheduler_ends_the_run_with_its_line(tmp_path: Path) -> None:
    row = {"request_id": 0, "arrival_s": 0, "prompt_len": 8, "output_len": 4, "max_new_tokens": 4}
    (trace := tmp_path / "trace.jsonl").write_text(json.dumps(row))
    config = RunConfig(engine=f"{HERE}:Raises", device="null", output=str(tmp_path / "run"))
    with pytest.raises(
        RunFailed, match=r"engine .*Raises failed in update: ZeroDivisionError: of its own .*, line \d+"
    ):
        run_trace(str(trace), config)
    assert (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ReturnsNoPlan", r"schedule\(\) returned None; expected a Plan"),
        ("RunsNoOne", "runs nothing, in 10,001 decisions at 0.000 s, while 1 requests wait"),
        ("RunsARowTwice", "row 0 in `rows`; expected rows of requests that generate, each once"),
        ("CutsNothing", "a chunk of 0 tokens from 0 on of request 0; expected at least one, within its prompt of 8"),
        ("LeavesOutChunks", r"allocate\(\) left no chunk of request 0, which is in `context`"),
        ("CountsInWords", r"advance\(\) returned 'none'; expected a number of tokens"),
    ],
)
def test_an_answer_of_a_users_scheduler_that_cannot_be_ends_the_run(name: str, words: str, tmp_path: Path) -> None:
    row = {"request_id": 0, "arrival_s": 0, "prompt_len": 8, "output_len": 4, "max_new_tokens": 4}
    (trace := tmp_path / "trace.jsonl").write_text(json.dumps(row))
    config = RunConfig(engine=f"{HERE}:{name}", device="sim:h100-sxm", model="llama-3.1-8b")
    config = config.with_values(output=str(tmp_path / "run"))
    with pytest.raises(RunFailed, match=f"engine .*{name}.*{words}"):
        run_trace(str(trace), config)
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_class_that_cannot_be_made_leaves_no_directory(tmp_path: Path) -> None:
    config = RunConfig(engine=f"{HERE}:IsAbsent", device="sim:h100-sxm", model="llama-3.1-8b")
    with pytest.raises(InputError, match="cannot be made"):
        run_trace("documentation", config.with_values(output=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("trtlm", "is not an engine; expected a built-in one (trtllm, vllm, sglang)"),
        (f"{HERE}:Absent", "has no 'Absent'"),
        (f"{HERE}:A_FUNCTION", "not a class"),
        (f"{HERE}:Records", "has no method 'admit'"),
        (f"{HERE}:TakesThree", "expected __init__(self, limits, clock)"),
        (f"{HERE}:IsAbsent", "cannot be made: ValueError: not here"),
        (f"{HERE}:HasNoTable", "has no attribute 'table'"),
        (f"{HERE}:HasNoTurn", "has max_in_flight 0; expected an integer of at least 1"),
    ],
)
def test_what_is_no_scheduler_is_refused(name: str, words: str) -> None:
    limits = BatchingConfig("max_utilization", 8, 64, 128, 64, 16, 32, engine=name)
    with pytest.raises(InputError, match="--engine") as refused:
        make_scheduler(limits, VirtualClock())
    assert words in str(refused.value)
