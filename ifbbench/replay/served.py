"""The client of a replay behind a serving process: requests reach the engine, and tokens their clients, later."""

from array import array
from bisect import bisect_left
from math import inf
from typing import Any

import numpy as np

from ifbbench.engine.records import IterationRecord, Stretch
from ifbbench.replay.client import ReplayClient, on_tick
from ifbbench.simulated.engines import Floats, ServingProcess


class ServedClient(ReplayClient):
    """A ReplayClient that hands out requests once `process` has accepted them, and takes responses once it has
    delivered them. Not with emulated static batches.

    Requests and iterations pass through the process in order of time, so that each must be reported to it before
    anything later is: iterations by `of_iteration` and `of_stretch` (it is the Delivery of a Recorder).
    """

    def __init__(self, *arguments: Any, process: ServingProcess, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._process = process
        # By the number of a request: its index, and, once the process has accepted it, when the engine gets it.
        self._indices = array("q")
        self._ready = array("d")
        self._num_ready = 0
        self._delivered_s = self._received_s = 0.0

    def of_iteration(self, record: IterationRecord) -> float:
        """When the tokens of an iteration reach their clients."""
        self._accept(record.end_s)
        outputs = record.num_generation + sum([chunk.is_last for chunk in record.context])
        self._delivered_s = self._process.deliver(record.end_s, outputs)
        return self._delivered_s

    def of_stretch(self, stretch: Stretch) -> Floats:
        """When the tokens of each iteration of a stretch reach their clients, [iterations]."""
        if len(stretch.turns) > 1:
            return np.array([self.of_iteration(record) for record in stretch.records()])
        end_s, outputs, parts, done = stretch.end_s, stretch.first.num_generation, [], 0
        while (received_s := self._next_received_s()) <= end_s[-1]:
            before = max(done, bisect_left(end_s, received_s))
            parts.append(self._process.deliver_many(np.array(end_s[done:before]), outputs))
            done = before
            self._accept(received_s)
        parts.append(self._process.deliver_many(np.array(end_s[done:]), outputs))
        delivered_s = np.concatenate(parts)
        self._delivered_s = float(delivered_s[-1])
        return delivered_s

    @property
    def next_event_s(self) -> float | None:
        """See ReplayClient. While nothing is active, so that no token comes before the next request."""
        if self.handed_out == len(self._ready):
            received_s = self._next_received_s()
            if received_s == inf:
                return None
            self._accept(received_s)
        return on_tick(self._ready[self.handed_out])

    def next_arrival_s(self, now_s: float) -> float | None:
        """See ReplayClient. Of a request that is not accepted yet, when it will be considered."""
        self._find_ready(now_s)
        if self._num_ready < len(self._ready):
            return self._ready[self._num_ready]
        received_s = self._next_received_s()
        return None if received_s == inf else received_s

    def queued(self) -> int:
        return self._due() - self.handed_out

    def _enter(self, number: int, index: int) -> None:
        self._indices.append(index)

    def _due(self) -> int:
        self._find_ready(self._clock.now())
        return self._num_ready

    def _answered_s(self) -> float:
        return self._delivered_s

    def _find_ready(self, now: float) -> None:
        """Let the engine have all requests that are ready."""
        self._accept(now)
        while self._num_ready < len(self._ready) and self._ready[self._num_ready] <= now:
            if self._queue is not None:
                self._queue.push(self._num_ready, self._indices[self._num_ready])
            self._num_ready += 1

    def _accept(self, now: float) -> None:
        """Let the process accept all requests that it has received."""
        while (received_s := self._next_received_s()) <= now:
            if len(self._ready) == self.submitted:
                self._submit_until(received_s)
            self._received_s = received_s
            prompt_len = self._trace.requests[self._indices[len(self._ready)]].prompt_len
            self._ready.append(self._process.accept(received_s, prompt_len))

    def _next_received_s(self) -> float:
        """When the process receives the next request; infinite if that takes a response."""
        number = len(self._ready)
        if number == self.submitted:
            return max(self._due_s, self._received_s)
        index = self._indices[number]
        return max(self._held_until_s.get(index, self._arrivals[index]), self._received_s)
