"""Executors around another one: one that records all calls, and one that fails."""

from collections import deque
from collections.abc import Container

from ifbbench.engine.batch import Batch, StepOutputs
from ifbbench.engine.interfaces import Executor
from ifbbench.engine.request import Request


class SpyExecutor:
    """Notes every call in `log`, as ("submit" or "collect", iteration), and every batch.

    A request must be as it was when its batch is collected: the spy fails the test if it was paused in between.
    """

    def __init__(self, executor: Executor) -> None:
        self.log: list[tuple[str, int]] = []
        self.batches: list[Batch] = []
        self.max_iterations_in_flight = 0
        self._executor = executor
        self._owners: dict[int, Request] = {}
        self._in_flight: deque[tuple[int, list[tuple[Request, int]]]] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def submit(self, batch: Batch) -> None:
        self._owners.update({chunk.request.slot: chunk.request for chunk in batch.context})
        requests = [chunk.request for chunk in batch.context] + [self._owners[slot] for slot in batch.slots.tolist()]
        self.log.append(("submit", batch.iteration))
        self.batches.append(batch)
        self._executor.submit(batch)
        self._in_flight.append((batch.iteration, [(request, request.pauses) for request in requests]))
        iterations = {iteration for iteration, _ in self._in_flight}
        self.max_iterations_in_flight = max(self.max_iterations_in_flight, len(iterations))

    def collect(self) -> StepOutputs:
        iteration, requests = self._in_flight.popleft()
        self.log.append(("collect", iteration))
        for request, pauses in requests:
            assert request.pauses == pauses, f"{request} was paused while its batch was in flight"
        return self._executor.collect()

    def close(self) -> None:
        self._executor.close()


class Broken(Exception):
    """The device gave up."""


class FailingExecutor:
    """Raises Broken in the calls of `submit` and `collect` with these numbers, each counted from 0.

    Batches that it loses still run in the executor behind it, and their outputs are dropped, so that a later batch
    finds the memory as it should be.
    """

    def __init__(self, executor: Executor, submits: Container[int] = (), collects: Container[int] = ()) -> None:
        self._executor = executor
        self._failing_submits = submits
        self._failing_collects = collects
        self._num_submits = self._num_collects = 0
        self._is_lost: deque[bool] = deque()

    def submit(self, batch: Batch) -> None:
        is_lost = self._num_submits in self._failing_submits
        self._num_submits += 1
        self._executor.submit(batch)
        self._is_lost.append(is_lost)
        if is_lost:
            raise Broken("submit")

    def collect(self) -> StepOutputs:
        while self._is_lost.popleft():
            self._executor.collect()
        outputs = self._executor.collect()
        self._num_collects += 1
        if self._num_collects - 1 in self._failing_collects:
            raise Broken("collect")
        return outputs

    def close(self) -> None:
        self._executor.close()
