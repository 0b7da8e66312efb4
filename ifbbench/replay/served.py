"""The client of a replay behind a serving process: requests reach the engine, and tokens their clients, later."""

from array import array
from typing import Any

import numpy as np

from ifbbench.engine.records import IterationRecord, Stretch
from ifbbench.replay.client import ReplayClient, on_tick
from ifbbench.simulation.engines import Floats, ServingProcess


class ServedClient(ReplayClient):
    """A ReplayClient that hands out requests once `process` has accepted them, and takes responses once it has
    delivered them.

    Requests and iterations pass through the process in order of time, so that each must be reported to it before
    anything later is: iterations by `of_iteration` and `of_stretch` (it is the Delivery of a Recorder).
    """

    def __init__(self, *arguments: Any, process: ServingProcess, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._process = process
        # When the engine gets each request that the process has accepted.
        self._ready = array("d")
        self._delivered_s = 0.0

    def of_iteration(self, record: IterationRecord) -> float:
        """When the tokens of an iteration reach their clients."""
        self._accept(record.end_s)
        outputs = record.num_generation + sum([chunk.is_last for chunk in record.context])
        self._delivered_s = self._process.deliver(record.end_s, outputs)
        return self._delivered_s

    def of_stretch(self, stretch: Stretch) -> Floats:
        """The same for each iteration of a stretch, [iterations]."""
        end_s, outputs, parts, done = stretch.end_s, stretch.first.num_generation, [], 0
        while (arrival_s := self._next_to_accept_s(end_s[-1])) is not None:
            before = max(done, int(end_s.searchsorted(arrival_s)))
            parts.append(self._process.deliver_many(end_s[done:before], outputs))
            done = before
            self._accept(arrival_s)
        parts.append(self._process.deliver_many(end_s[done:], outputs))
        delivered_s = np.concatenate(parts)
        self._delivered_s = float(delivered_s[-1])
        return delivered_s

    @property
    def next_event_s(self) -> float | None:
        """See ReplayClient. While nothing is active, so that no token comes before the next request."""
        if self.handed_out == self._num_known:
            return None
        if self._oldest >= len(self._ready):
            self._accept(self._arrivals[self._oldest])
        return on_tick(self._ready[self._oldest])

    def next_arrival_s(self, now_s: float) -> float | None:
        """See ReplayClient. Of a request that is not accepted yet, when it will be considered."""
        arrived = self._arrived(now_s)
        if arrived < len(self._ready):
            return self._ready[arrived]
        return self._arrivals[arrived] if arrived < self._num_known else None

    def _arrived(self, now: float) -> int:
        self._accept(now)
        while self._num_arrived < len(self._ready) and self._ready[self._num_arrived] <= now:
            if self._queue is not None:
                self._queue.push(self._num_arrived)
            self._num_arrived += 1
        return self._num_arrived

    def _answered_s(self) -> float:
        return self._delivered_s

    def _accept(self, now: float) -> None:
        """Let the process accept all requests that have arrived."""
        while (arrival_s := self._next_to_accept_s(now)) is not None:
            prompt_len = self._trace.requests[len(self._ready)].prompt_len
            self._ready.append(self._process.accept(arrival_s, prompt_len))

    def _next_to_accept_s(self, now: float) -> float | None:
        """When the next request arrives, if that is at `now` or before."""
        index = len(self._ready)
        if index == self._num_known or self._arrivals[index] > now:
            return None
        return self._arrivals[index]
