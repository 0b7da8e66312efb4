"""Drives a BatchManager over requests with arrivals, with executors that check what they are given."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ifbbench.batching.batch import Batch, Executor, StepOutputs
from ifbbench.batching.batching_config import BatchingConfig
from ifbbench.batching.manager import BatchManager
from ifbbench.batching.records import IterationRecord
from ifbbench.batching.request import Request
from ifbbench.batching.response import Response
from ifbbench.clock import VirtualClock

MAX_STEPS = 100_000


def token_of(request: Request, position: int) -> int:
    """The token at `position` of prompt and output: a fixed function, so that a resumed request repeats itself."""
    return (request.request_id * 7919 + position * 31) % 1009


def with_tokens(request: Request) -> Request:
    """Give `request` the prompt that `token_of` says."""
    request.prompt_tokens = np.array([token_of(request, place) for place in range(request.prompt_len)], np.int32)
    return request


class CheckingExecutor:
    """Makes the tokens of `token_of`, with a KV memory that holds (request, position) at each place of each block.

    Before each step it reads back every place that the step attends to, so a block given to two sequences, a place
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
            expected = [token_of(chunk.request, chunk.start + place) for place in range(chunk.length)]
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
        def place(position: int) -> tuple[int, int]:
            block, offset = divmod(position, self._tokens_per_block)
            return int(batch.block_tables[request.slot, 0, block]), offset

        for position in range(start, start + length):
            self._memory[place(position)] = (request.request_id, position)
            self.computed[request.request_id, position] += 1
        for position in range(start + length):
            assert self._memory[place(position)] == (request.request_id, position)


@dataclass
class Run:
    """What came out: all responses and iteration records, in order."""

    manager: BatchManager
    responses: list[Response] = field(default_factory=list)
    records: list[IterationRecord] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def completed(self) -> list[Request]:
        return [response.request for response in self.responses if response.error is None]


class _Client:
    """Hands out requests whose step has come, and notes what comes back: source, sink and observer at once."""

    def __init__(self, arrivals: Sequence[tuple[int, Request]]) -> None:
        self.waiting = sorted(arrivals, key=lambda arrival: arrival[0])
        self.now = 0
        self.responses: list[Response] = []
        self.records: list[IterationRecord] = []
        self.errors: dict[int, str] = {}

    def get_requests(self, count: int) -> list[Request]:
        arrived = [request for at, request in self.waiting[:count] if at <= self.now]
        del self.waiting[: len(arrived)]
        return arrived

    def iteration(self, record: IterationRecord) -> None:
        self.records.append(record)

    def left(self, request: Request, error: str | None) -> None:
        self.errors[request.request_id] = error or ""


def _check_nothing(manager: BatchManager, record: IterationRecord) -> None:
    """For runs whose outcome alone is of interest."""


def run(
    config: BatchingConfig,
    arrivals: Sequence[tuple[int, Request]],
    executor: Executor,
    check: Callable[[BatchManager, IterationRecord], None] = _check_nothing,
) -> Run:
    """Run all requests to their end; each arrives before the step that it names. `check` sees every iteration."""
    client = _Client(arrivals)
    manager = BatchManager(
        config, executor, VirtualClock(), client.get_requests, client.responses.append, observer=client
    )
    while manager.step() or client.waiting:
        client.now += 1
        assert client.now < MAX_STEPS, "the run does not come to its end"
        if len(client.records) == manager.iteration and client.records:
            check(manager, client.records[-1])
    return Run(manager, client.responses, client.records, client.errors)
