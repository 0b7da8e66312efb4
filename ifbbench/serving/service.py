"""The service: hands the requests of an event loop to the batch manager's thread, and its responses back."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

import numpy as np

from ifbbench.api.batch_manager import BatchManager
from ifbbench.api.client import Tensors
from ifbbench.api.engine import Engine
from ifbbench.api.request import InferenceRequest, engine_request
from ifbbench.clock import NANOSECONDS, PacedClock, WallClock
from ifbbench.engine.admission import AdmissionLimits
from ifbbench.engine.batch import Batch, Executor, StepOutputs
from ifbbench.errors import IfbbenchError, InputError
from ifbbench.serving.statistics import LiveStatistics

# An idle batch manager looks so often whether it is to end.
IDLE_S = 0.05


class QueueFull(IfbbenchError):
    """As many requests wait as may."""


class ServiceEnded(IfbbenchError):
    """The batch manager has ended, or is about to."""


class Recording(Protocol):
    """Takes in the requests of the service, all in the batch manager's thread."""

    def arrived(self, request: InferenceRequest, arrival_s: float) -> None:
        """A request will be handed to the engine, or is withdrawn before."""
        ...

    def idle(self) -> None:
        """Nothing is active."""
        ...


@dataclass(slots=True)
class Tokens:
    """New output of a generation. log_probs: of each token, and generation_logits [tokens, vocabulary], if asked for.

    beams: of a finished beam search, the output of each beam and its log-probabilities, best first.
    """

    ids: list[int]
    log_probs: list[float]
    logits: Any
    beams: list[tuple[list[int], list[float]]]
    context_logits: Any = None


class Generation:
    """One request of the batch manager and what it has generated so far. Used in the event loop alone.

    changed: is set when there is something new; several generations may share it.
    """

    __slots__ = ("_new", "arrival_s", "changed", "error", "is_done", "num_outputs", "request")

    def __init__(self, request: InferenceRequest, arrival_s: float, changed: asyncio.Event) -> None:
        self.request = request
        self.arrival_s = arrival_s
        self.changed = changed
        self.is_done = False
        self.error = ""
        self.num_outputs = 0
        self._new: list[Tokens] = []

    def take(self) -> list[Tokens]:
        """What is new since the last call."""
        new, self._new = self._new, []
        return new

    def respond(self, tensors: Tensors, is_final: bool, error: str) -> None:
        """Take in a response of the batch manager."""
        if tensors:
            self._new.append(tokens_of(tensors, self.request))
            self.num_outputs += len(self._new[-1].ids)
        self.is_done, self.error = is_final, error
        self.changed.set()


def tokens_of(tensors: Tensors, request: InferenceRequest) -> Tokens:
    """The new tokens in the tensors of a response, of a request that excludes its input from them."""
    lengths = tensors["sequence_length"][0].tolist()
    ids, log_probs = tensors["output_ids"][0], tensors.get("output_log_probs")
    numbers = [[] if log_probs is None else log_probs[0, beam, :length].tolist() for beam, length in enumerate(lengths)]
    outputs = [(ids[beam, :length].tolist(), numbers[beam]) for beam, length in enumerate(lengths)]
    logits = tensors["generation_logits"][0] if request.return_generation_logits else None
    context = tensors["context_logits"][0] if request.return_context_logits else None
    return Tokens(*outputs[0], logits, outputs if request.beam_width > 1 else [], context)


class SyntheticTokens:
    """An executor that makes no tokens, with those of a sample text in their place: an Executor.

    sample: its token ids, repeated without end; each output begins with its first. num_slots: of the engine.
    """

    def __init__(self, executor: Executor, sample: Sequence[int], num_slots: int) -> None:
        self._executor = executor
        self._sample = np.array(sample, np.int32)
        # The length of the prompt of each slot's request.
        self._prompt_lens = np.zeros(num_slots, np.int64)
        self._outputs: deque[StepOutputs] = deque()

    def submit(self, batch: Batch) -> None:
        self._executor.submit(batch)
        done = [chunk.request for chunk in batch.context if chunk.is_last]
        for request in done:
            self._prompt_lens[request.slot] = request.original_prompt_len
        # A resumed request has its first tokens already.
        firsts = np.array([request.prompt_len - request.original_prompt_len for request in done], np.int64)
        places = np.concatenate([firsts, batch.positions + 1 - self._prompt_lens[batch.slots]])
        tokens = self._sample[places % len(self._sample)]
        # A synthetic token is certain, so that its log-probability is 0.
        self._outputs.append(StepOutputs(tokens, log_probs=np.zeros(len(tokens), np.float32)))

    def collect(self) -> StepOutputs:
        self._executor.collect()
        return self._outputs.popleft()

    def close(self) -> None:
        self._executor.close()


class Service:
    """A batch manager whose requests come from an event loop.

    Requests are handed out in order of arrival, each at the first iteration that starts after it. max_queue_size: of
    requests that wait for a batch slot. recording: takes in the traffic.

    To be made in the event loop. `submit` and `cancel` are called in it.
    """

    def __init__(
        self, engine: Engine, statistics: LiveStatistics, max_queue_size: int, recording: Recording | None = None
    ) -> None:
        self.engine = engine
        self.statistics = statistics
        # Of the recording, once it is complete.
        self.summary: dict[str, Any] | None = None
        self._recording = recording
        self._max_queue_size = max_queue_size
        self._limits = AdmissionLimits(engine.limits)
        self._loop = asyncio.get_running_loop()
        assert isinstance(engine.clock, WallClock | PacedClock)
        self._clock = engine.clock
        self._ids = count()
        self._live: dict[int, Generation] = {}
        self._is_closing = False
        # Shared with the batch manager's thread: requests that it has not fetched, under a lock; ids of those to stop;
        # responses, for which one callback in the event loop is scheduled at a time.
        self._lock = threading.Lock()
        self._queue: deque[Generation] = deque()
        self._withdrawn: deque[Generation] = deque()
        self._has_work = threading.Event()
        self._stopped: deque[int] = deque()
        self._responses: deque[tuple[int, Tensors, bool, str]] = deque()
        self._is_delivering = False
        self._clock.restart()
        self._manager = BatchManager.of_engine(
            engine, self._take, self._respond, self._poll, statistics, lambda: len(self._queue), self._wait
        )

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return self._manager.is_running and not self._is_closing

    @property
    def num_live(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._live)

    @property
    def num_queued(self) -> int:
        """Requests that wait for a batch slot."""
        return len(self._queue) + self.statistics.num_waiting

    def check(self, request: InferenceRequest) -> None:
        """InputError if the engine would refuse `request`."""
        problem = self._limits.refusal(engine_request(request, self.engine.limits.vocab_size))
        if problem is not None:
            raise InputError(problem)

    def submit(
        self, requests: Sequence[InferenceRequest], make: Callable[..., Generation] = Generation
    ) -> list[Generation]:
        """Hand over `requests`, which `check` has passed, with new ids. QueueFull if not all of them have room in the
        queue, ServiceEnded if the batch manager has ended. make: a generation, of the arguments of `Generation`."""
        if not self.is_running:
            raise ServiceEnded("the server is about to end, or its engine has failed")
        # A request that runs at once has waited for a moment, too.
        room = max(self._max_queue_size, 1) - self.num_queued
        if len(requests) > max(room, 0):
            raise QueueFull(f"{self.num_queued} requests wait, and --max_queue_size is {self._max_queue_size}; "
                            "try again later.")
        # A whole number of nanoseconds, as all times of a simulated device.
        arrival_s = round(self._clock.real_now() * NANOSECONDS) / NANOSECONDS
        changed = asyncio.Event()
        generations = [
            make(replace(request, request_id=next(self._ids)), arrival_s, changed) for request in requests
        ]
        self._live.update((one.request.request_id, one) for one in generations)
        with self._lock:
            self._queue.extend(generations)
        self._has_work.set()
        return generations

    def cancel(self, generations: Sequence[Generation]) -> None:
        """Stop those that have not ended."""
        for one in generations:
            if one.is_done:
                continue
            with self._lock:
                is_queued = one in self._queue
                if is_queued:
                    self._queue.remove(one)
            if is_queued:
                self._withdrawn.append(one)
            else:
                self._stopped.append(one.request.request_id)
        self._has_work.set()

    def fail_queued(self) -> None:
        """Where the batch manager has ended early: end what it did not fetch."""
        while not self._manager.is_running and self._queue:
            one = self._queue.popleft()
            del self._live[one.request.request_id]
            one.respond({}, True, "the engine has failed")

    async def close(self) -> None:
        """Stop what has not ended, and end the batch manager."""
        self._is_closing = True
        self.cancel(list(self._live.values()))
        self._has_work.set()
        await asyncio.get_running_loop().run_in_executor(None, self._manager.close)

    # In the batch manager's thread.

    def _take(self, max_requests: int) -> list[InferenceRequest]:
        """Up to so many requests that have arrived; a negative number means no limit."""
        self._end_withdrawn()
        now_s = self._clock.now()
        taken: list[Generation] = []
        with self._lock:
            while self._queue and self._queue[0].arrival_s <= now_s and len(taken) != max_requests:
                taken.append(self._queue.popleft())
        for one in taken:
            self._note_arrival(one)
        return [one.request for one in taken]

    def _end_withdrawn(self) -> None:
        """End the requests that were stopped in the queue."""
        while self._withdrawn:
            one = self._withdrawn.popleft()
            self._note_arrival(one)
            self.statistics.left(engine_request(one.request), None)
            self._respond(one.request.request_id, {}, True, "")

    def _note_arrival(self, one: Generation) -> None:
        self.statistics.arrived(one.request, one.arrival_s)
        if self._recording is not None:
            self._recording.arrived(one.request, one.arrival_s)

    def _respond(self, request_id: int, tensors: Tensors, is_final: bool, error: str) -> None:
        self._responses.append((request_id, tensors, is_final, error))
        if not self._is_delivering:
            self._is_delivering = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _poll(self) -> list[int]:
        self._end_withdrawn()
        return [self._stopped.popleft() for _ in range(len(self._stopped))]

    def _wait(self) -> None:
        """Wait until a request has arrived; for when none is active."""
        self._has_work.wait(IDLE_S)
        self._has_work.clear()
        if self._queue:
            self._clock.wait_until(self._first_arrival_s())
        elif self._recording is not None:
            self._recording.idle()

    def _first_arrival_s(self) -> float:
        with self._lock:
            return self._queue[0].arrival_s if self._queue else 0.0

    # In the event loop.

    def _deliver(self) -> None:
        self._is_delivering = False  # before the responses are read, so that none is left behind
        for request_id, tensors, is_final, error in self._drained():
            one = self._live.pop(request_id) if is_final else self._live[request_id]
            one.respond(tensors, is_final, error)

    def _drained(self) -> Iterator[tuple[int, Tensors, bool, str]]:
        while self._responses:
            yield self._responses.popleft()
