"""The client of a replay behind a serving process: requests reach the engine, and tokens their clients, later."""

from array import array
from math import inf

from mypy_extensions import mypyc_attr

from ifbbench.engine.records import IterationRecord
from ifbbench.engine.stretch import Stretch
from ifbbench.replay.client import ReplayClient, on_tick
from ifbbench.simulated.serving_process import ServingProcess
from ifbbench.workload.trace import columns_of


@mypyc_attr(allow_interpreted_subclasses=True)
class ServedClient(ReplayClient):
    """A ReplayClient that hands out requests once a process has accepted them, and takes responses once it has
    delivered them. Not with emulated static batches.

    Requests and iterations pass through the process in order of time, so that each must be reported to it before
    anything later is: iterations by `of_iteration` and `of_stretch` (it is the Delivery of a Recorder).
    """

    def pass_through(self, process: ServingProcess) -> None:
        """Requests and tokens pass through `process`. Called once, before anything else."""
        self._process = process
        self._prompt_lens = columns_of(self._trace.requests).prompt_len
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

    def of_stretch(self, stretch: Stretch) -> list[float]:
        """When the tokens of each iteration of a stretch reach their clients, [iterations]."""
        if len(stretch.turns) > 1:
            return [self.of_iteration(record) for record in stretch.records()]
        outputs, delivered_s = stretch.first.num_generation, list[float]()
        for end_s in stretch.end_s:
            self._accept(end_s)
            delivered_s.append(self._process.deliver(end_s, outputs))
        self._delivered_s = delivered_s[-1]
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

    def accepted_s(self, number: int) -> float:
        """When the process had accepted the request with this number."""
        return self._ready[number]

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
            prompt_len = self._prompt_lens[self._indices[len(self._ready)]]
            self._ready.append(self._accept_one(received_s, prompt_len))

    def _accept_one(self, received_s: float, prompt_len: int) -> float:
        """When the process has accepted a request that it receives then."""
        return self._process.accept(received_s, prompt_len)

    def _next_received_s(self) -> float:
        """When the process receives the next request; infinite if that takes a response."""
        number = len(self._ready)
        if number == self.submitted:
            return max(self._due_s, self._received_s)
        index = self._indices[number]
        return max(self._held_until_s.get(index, self._arrivals[index]), self._received_s)
