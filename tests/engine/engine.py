"""Drives a TokenGenerationLoop over requests with arrivals, with executors that check what they are given."""

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from ifbbench.engine.batch import Batch, StepOutputs
from ifbbench.engine.interfaces import Executor
from ifbbench.engine.loop import ExecutorFailed, TokenGenerationLoop
from ifbbench.engine.records import IterationRecord
from ifbbench.engine.request import Request
from ifbbench.engine.responses import Response
from ifbbench.engine.stretch import Stretch
from ifbbench.kv.adapters import AdapterCache
from ifbbench.schedulers.engines import make_loop
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.tensorrt_llm.scheduler import TensorRtLlmScheduler
from ifbbench.virtual_clock import VirtualClock
from tests.engine.executors import Broken

MAX_STEPS = 100_000


def scheduler_of(loop: TokenGenerationLoop) -> TensorRtLlmScheduler:
    """The scheduler of a loop that `make_loop` has made."""
    assert isinstance(loop.scheduler, TensorRtLlmScheduler)
    return loop.scheduler


def adapters_of(loop: TokenGenerationLoop) -> AdapterCache:
    """The LoRA adapters of such a loop, which has a cache of them."""
    adapters = scheduler_of(loop).adapters
    assert adapters is not None
    return adapters


def token_of(request: Request, position: int) -> int:
    """The token at `position` of prompt and output: a fixed function, so that a resumed request repeats itself."""
    return (request.request_id * 7919 + position * 31) % 1009


def with_tokens(request: Request) -> Request:
    """Give `request` the prompt that `token_of` says."""
    request.prompt_tokens = np.array([token_of(request, index) for index in range(request.prompt_len)], np.int32)
    return request


class CheckingExecutor:
    """Makes the tokens of `token_of`, with a KV memory that holds (request, position) in each slot of each block.

    Before each step it reads back every slot that the step attends to, so a block given to two sequences, a slot
    skipped or written late, or a wrong token in a chunk is found. `frames` names what ran, `computed` counts how often
    each position of each request was computed.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self.frames: list[tuple[list[tuple[int, int]], list[int]]] = []
        self.computed: Counter[tuple[int, int]] = Counter()
        self._tokens_per_block = tokens_per_block
        self._owners: dict[int, Request] = {}
        self._memory: dict[tuple[int, int], tuple[int, int]] = {}
        self._answers: deque[list[int]] = deque()

    def submit(self, batch: Batch) -> None:
        answer: list[int] = []
        for chunk in batch.context:
            self._owners[chunk.request.slot] = chunk.request
            expected = [token_of(chunk.request, chunk.start + index) for index in range(chunk.length)]
            assert chunk.tokens().tolist() == expected
            self._compute(chunk.request, chunk.start, chunk.length, batch)
            if chunk.is_last:
                answer.append(token_of(chunk.request, chunk.start + chunk.length))
        for slot, position in zip(batch.slots.tolist(), batch.positions.tolist(), strict=True):
            self._compute(self._owners[slot], position, 1, batch)
            answer.append(token_of(self._owners[slot], position + 1))
        context = [(chunk.request.request_id, chunk.length) for chunk in batch.context]
        self._answers.append(answer)
        self.frames.append((context, [self._owners[slot].request_id for slot in batch.slots.tolist()]))

    def collect(self) -> StepOutputs:
        return StepOutputs(np.array(self._answers.popleft(), np.int32))

    def close(self) -> None:
        self._memory.clear()

    def _compute(self, request: Request, start: int, length: int, batch: Batch) -> None:
        def address(position: int) -> tuple[int, int]:
            block, offset = divmod(position, self._tokens_per_block)
            return int(batch.block_tables[request.slot, 0, block]), offset

        for position in range(start, start + length):
            self._memory[address(position)] = (request.request_id, position)
            self.computed[request.request_id, position] += 1
        for position in range(start + length):
            assert self._memory[address(position)] == (request.request_id, position)


@dataclass
class Run:
    """What came out: all responses and iteration records, in order, and what went wrong.

    errors: by id, of those that left before their end, "" for the `stopped` ones. failures: raised by `step`.
    """

    manager: TokenGenerationLoop
    responses: list[Response] = field(default_factory=list)
    records: list[IterationRecord] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    stopped: list[Request] = field(default_factory=list)
    failures: list[ExecutorFailed] = field(default_factory=list)

    @property
    def completed(self) -> list[Request]:
        return [response.request for response in self.responses if response.error is None]

    def final(self, request: Request) -> Response:
        """The one final response of `request`, after which nothing more came."""
        own = [response for response in self.responses if response.request is request]
        assert [response.is_final for response in own] == [False] * (len(own) - 1) + [True]
        return own[-1]

    def pieces(self, request: Request) -> list[list[int]]:
        """The tokens of each response of `request`, in order; error responses have none."""
        own = [response for response in self.responses if response.request is request]
        return [tokens.tolist() for response in own if (tokens := response.output_tokens) is not None]

    def tokens(self, request: Request) -> list[int]:
        """All tokens that came back for `request`."""
        return [token for piece in self.pieces(request) for token in piece]


def output_of(request: Request, length: int) -> list[int]:
    """The first `length` output tokens that `request` has to get from a CheckingExecutor."""
    prompt = request.original_prompt_len
    return [token_of(request, prompt + index) for index in range(length)]


class _Client:
    """Hands out requests when their step has come, and records what comes back: source, sink and observer at once."""

    def __init__(self, arrivals: Sequence[tuple[int, Request]], stops: Mapping[int, Collection[int]]) -> None:
        self.waiting = sorted(arrivals, key=lambda arrival: arrival[0])
        self.stops = stops
        self.now = 0
        self.responses: list[Response] = []
        self.records: list[IterationRecord] = []
        self.errors: dict[int, str] = {}
        self.stopped: list[Request] = []

    def get_requests(self, count: int) -> list[Request]:
        arrived = [request for at, request in (self.waiting if count < 0 else self.waiting[:count]) if at <= self.now]
        del self.waiting[: len(arrived)]
        return arrived

    def poll_stop_signals(self) -> Collection[int]:
        return self.stops.get(self.now, ())

    def iteration(self, record: IterationRecord) -> None:
        assert record.iteration == len(self.records), "an iteration is missing from the records, or recorded twice"
        self.records.append(record)

    def stretch(self, stretch: Stretch) -> None:
        for record in stretch.records():
            self.iteration(record)

    def left(self, request: Request, error: str | None) -> None:
        self.errors[request.request_id] = error or ""
        if error is None:
            self.stopped.append(request)


class Loop:
    """A TokenGenerationLoop and its client, to step by hand or to run to the end.

    Each request arrives before the step that it names, counted from 0. stops: step -> ids of requests to stop in it.
    """

    def __init__(
        self,
        config: BatchingConfig,
        arrivals: Sequence[tuple[int, Request]],
        executor: Executor,
        stops: Mapping[int, Collection[int]] = MappingProxyType({}),
    ) -> None:
        self.client = _Client(arrivals, stops)
        self.manager = make_loop(
            config,
            executor,
            VirtualClock(),
            self.client.get_requests,
            self.client.responses.append,
            self.client,
            poll_stop_signals=self.client.poll_stop_signals,
        )
        client = self.client
        self.result = Run(self.manager, client.responses, client.records, client.errors, client.stopped)

    def step(self, count: int = 1) -> bool:
        """Do `count` steps; False if the last one had nothing to do."""
        was_busy = True
        for _ in range(count):
            try:
                was_busy = self.manager.step()
            finally:
                self.client.now += 1
        return was_busy

    def run(self, check: "Check | None" = None, survives: bool = False, max_steps: int = MAX_STEPS) -> Run:
        """Run until all requests have ended. `check` sees every iteration. survives: that the executor is Broken is
        noted, and does not end the run; what else it raises is a check of its own."""
        busy, checked = True, len(self.client.records)
        while busy or self.client.waiting:
            assert self.client.now < max_steps, "the run does not come to its end"
            try:
                busy = self.step()
            except ExecutorFailed as failure:
                if not survives or not isinstance(failure.__cause__, Broken):
                    raise
                self.result.failures.append(failure)
                busy = True
            for record in self.client.records[checked:]:
                checked += 1
                if check is not None:
                    check(self.manager, record)
        return self.result


Check = Callable[[TokenGenerationLoop, IterationRecord], None]


def run(
    config: BatchingConfig,
    arrivals: Sequence[tuple[int, Request]],
    executor: Executor,
    check: Check | None = None,
    stops: Mapping[int, Collection[int]] = MappingProxyType({}),
) -> Run:
    """Run all requests to their end; each arrives before the step that it names. `check` sees every iteration."""
    return Loop(config, arrivals, executor, stops).run(check)


def limits(**changes: Any) -> BatchingConfig:
    """A small engine: 4 requests and 12 tokens an iteration, blocks of 4 tokens, and enough of them."""
    small = BatchingConfig(
        policy="guaranteed_no_evict",
        max_batch_size=4,
        max_num_tokens=12,
        max_seq_len=40,
        max_input_len=12,
        tokens_per_block=4,
        num_blocks=100,
    )
    return dataclasses.replace(small, **changes)


def at_once(*requests: Request) -> list[tuple[int, Request]]:
    """All `requests` arrive, with their prompts, before the first step."""
    return [(0, with_tokens(request)) for request in requests]


def checked_run(config: BatchingConfig, *requests: Request) -> tuple[Run, CheckingExecutor]:
    """Run `requests`, which come at once, and the executor that checked every step."""
    executor = CheckingExecutor(config.tokens_per_block)
    return run(config, at_once(*requests), executor, check_blocks), executor


def check_blocks(manager: TokenGenerationLoop, record: IterationRecord) -> None:
    """A `check` for `run`: no block is owned by two, and none is lost."""
    scheduler_of(manager).kv_cache.check_consistency()


def assert_nothing_is_held(manager: TokenGenerationLoop) -> None:
    """No request, block or slot is left in the engine."""
    scheduler_of(manager).kv_cache.check_consistency()
    assert len(scheduler_of(manager).active) == 0
    assert scheduler_of(manager).kv_cache.free_blocks == scheduler_of(manager).config.num_blocks
    assert len(scheduler_of(manager).table.free_rows) == scheduler_of(manager).config.num_slots
