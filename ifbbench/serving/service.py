"""The service: hands the requests of an event loop to the batch manager's thread, and its responses back."""

import asyncio
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

import numpy as np

from ifbbench.build.engine import Engine
from ifbbench.clock import NANOSECONDS, WallClock
from ifbbench.engine.arrays import FloatArray
from ifbbench.engine.batch import Batch, StepOutputs
from ifbbench.engine.interfaces import Executor
from ifbbench.errors import IfbbenchError, InputError
from ifbbench.replay.replica_processes import ProcessExecutor
from ifbbench.rundir.lines import IterationLines
from ifbbench.schedulers.refusals import AdmissionLimits
from ifbbench.serving.library.batch_manager import BatchManager
from ifbbench.serving.library.client import Tensors
from ifbbench.serving.library.request import InferenceRequest, engine_request
from ifbbench.serving.statistics import LiveStatistics
from ifbbench.virtual_clock import PacedClock

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
    """New output of a generation.

    log_probs: log-probability of each token, if asked for.
    generation_logits: [tokens, vocabulary], if asked for.

    beams: output of each beam of a finished beam search and its log-probabilities, best first.
    """

    ids: list[int]
    log_probs: list[float]
    logits: Any
    beams: list[tuple[list[int], list[float]]]


class Generation:
    """One request of the batch manager and what it has generated so far. Used in the event loop alone.

    changed: is set when there is something new; several generations may share it.
    reused_tokens: number of tokens of the prompt from the KV cache.
    restarts: how often it has begun again, so that all that was taken of it before does not count.
    context_logits: [tokens, vocabulary], logits of the prompt, with the final response, if asked for.
    """

    __slots__ = (
        "_new",
        "arrival_s",
        "changed",
        "context_logits",
        "error",
        "is_done",
        "num_outputs",
        "request",
        "restarts",
        "reused_tokens",
    )

    def __init__(self, request: InferenceRequest, arrival_s: float, changed: asyncio.Event) -> None:
        self.request = request
        self.arrival_s = arrival_s
        self.changed = changed
        self.is_done = False
        self.error = ""
        self.num_outputs = self.reused_tokens = self.restarts = 0
        self.context_logits: FloatArray | None = None
        self._new: list[Tokens] = []

    def take(self) -> list[Tokens]:
        """What is new since the last call."""
        new, self._new = self._new, []
        return new

    def restart(self, request: InferenceRequest, arrival_s: float) -> None:
        """It begins again, as another request."""
        self.request, self.arrival_s = request, arrival_s
        self.num_outputs = self.reused_tokens = 0
        self.restarts += 1
        self._new = []

    def respond(self, tensors: Tensors, is_final: bool, error: str) -> None:
        """Take in a response of the batch manager."""
        if tensors:
            self._new.append(tokens_of(tensors, self.request))
            self.num_outputs += len(self._new[-1].ids)
            self.reused_tokens = int(tensors["reused_tokens"][0, 0])
            if is_final and self.request.return_context_logits:
                self.context_logits = tensors["context_logits"][0]
        self.is_done, self.error = is_final, error
        self.changed.set()


def tokens_of(tensors: Tensors, request: InferenceRequest) -> Tokens:
    """The new tokens in the tensors of a response, of a request that excludes its input from them."""
    lengths = tensors["sequence_length"][0].tolist()
    ids, log_probs = tensors["output_ids"][0], tensors.get("output_log_probs")
    numbers = [[] if log_probs is None else log_probs[0, beam, :length].tolist() for beam, length in enumerate(lengths)]
    outputs = [(ids[beam, :length].tolist(), numbers[beam]) for beam, length in enumerate(lengths)]
    logits = tensors["generation_logits"][0] if request.return_generation_logits else None
    return Tokens(*outputs[0], logits, outputs if request.beam_width > 1 else [])


class SyntheticTokens:
    """An executor that makes no tokens, with those of a sample text in their place: an Executor.

    sample: token ids of the text, repeated without end; each output begins with its first.
    num_slots: number of slots of the engine.
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
        positions = np.concatenate([firsts, batch.positions + 1 - self._prompt_lens[batch.slots]])
        if batch.drafts is not None:  # a step yields a token, and one more for each draft that is accepted
            positions = positions[:, None] + np.arange(1 + batch.drafts.counts.max())
        tokens = self._sample[positions % len(self._sample)]
        # A synthetic token is certain, so that its log-probability is 0.
        self._outputs.append(StepOutputs(tokens, log_probs=np.zeros(tokens.shape, np.float32)))

    def collect(self) -> StepOutputs:
        self._executor.collect()
        return self._outputs.popleft()

    def close(self) -> None:
        self._executor.close()


def _order(one: Generation) -> float:
    return -one.request.priority


class Service:
    """A batch manager whose requests come from an event loop.

    Requests are handed out by priority, then in order of arrival, each at the first iteration that starts after it.

    max_queue_size: maximum number of requests that wait for a batch slot.
    recording: takes in the traffic.
    ids: gives ids to its requests, which several services may have in common.
    max_requests: maximum number of requests that `submit` takes at a time.

    To be made in the event loop. `submit` and `cancel` are called in it.
    """

    def __init__(
        self,
        engine: Engine,
        statistics: LiveStatistics,
        max_queue_size: int,
        recording: Recording | None = None,
        ids: Iterator[int] | None = None,
    ) -> None:
        self.engine = engine
        self.statistics = statistics
        # The summary of the recording, once it is complete.
        self.summary: dict[str, Any] | None = None
        self._recording = recording
        self._max_queue_size = max_queue_size
        # A request that runs at once has waited for a moment, too.
        self.max_requests = max(max_queue_size, 1)
        self._limits = AdmissionLimits(engine.limits)
        self._loop = asyncio.get_running_loop()
        assert isinstance(engine.clock, WallClock | PacedClock)
        self._clock = engine.clock
        self._ids, self._numbers = ids or count(), count()
        self._live: dict[int, Generation] = {}
        self._is_closing = False
        # Shared with the batch manager's thread: requests that it has not fetched, the highest priority first, under a
        # lock; ids of those to stop; responses, for which one callback in the event loop is scheduled at a time.
        self._lock = threading.Lock()
        self._queue: list[Generation] = []
        # The earliest arrival of the next request: arrivals are in the order of `submit`, and after the latest fetch,
        # so that a replay fetches a request in the iteration that did here.
        self._earliest_ns = 0
        self._withdrawn: deque[Generation] = deque()
        self._has_work = threading.Event()
        self._stopped: deque[int] = deque()
        self._responses: deque[tuple[int, Tensors, bool, str]] = deque()
        self._is_delivering = False
        # When the engine had the first of the responses that are not delivered yet.
        self._responded_s = 0.0
        self._clock.restart()
        self._manager = BatchManager.of_engine(
            engine,
            self._take,
            self._respond,
            self._poll,
            statistics,
            lambda: len(self._queue),
            self._next_priority,
            self._wait,
        )

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return self._manager.is_running and not self._is_closing

    @property
    def has_failed(self) -> bool:
        """Whether the batch manager has ended early."""
        return not (self._manager.is_running or self._is_closing)

    @property
    def is_lost(self) -> bool:
        """Whether the process of the engine has ended, where it has one."""
        executor = self.engine.executor
        return isinstance(executor, ProcessExecutor) and executor.process.has_ended

    @property
    def num_live(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._live)

    @property
    def num_queued(self) -> int:
        """Requests that wait for a batch slot."""
        return len(self._queue) + self.statistics.num_waiting

    def align(self, other: "Service") -> None:
        """Have the time of `other`. Called before the first request."""
        mine, theirs = self._clock, other._clock
        if isinstance(mine, PacedClock):
            assert isinstance(theirs, PacedClock)
            mine.align(theirs)
        else:
            assert isinstance(theirs, WallClock)
            mine.align(theirs)

    def statistics_of(self, generation: Generation) -> LiveStatistics:
        """The statistics of the engine that has `generation`."""
        return self.statistics

    def latest_iterations(self) -> list[Any]:
        """The statistics of the latest iterations, oldest first, in the form of TensorRT-LLM's executor."""
        limits = self.engine.limits
        lines = IterationLines(limits.batching_type, limits.max_batch_size, as_executor=True)
        return [lines.record(record, limit) for record, limit in list(self.statistics.latest)]

    def check_length(self, prompt_len: int) -> None:
        """InputError if the engine would refuse a prompt of so many tokens, whatever else is asked for."""
        refusal = self._limits.refusal_by_size(prompt_len, max_new_tokens=1)
        if refusal is not None:
            raise InputError(refusal.text)

    def check(self, request: InferenceRequest) -> None:
        """InputError if the engine would refuse `request`."""
        problem = self._limits.refusal(engine_request(request, self.engine.limits.vocab_size))
        if problem is not None:
            raise InputError(problem)

    def real_now(self) -> float:
        """Real seconds since the start of the service."""
        return self._clock.real_now()

    def submit(
        self,
        requests: Sequence[InferenceRequest],
        make: Callable[..., Generation] = Generation,
        received_s: float | None = None,
        session: bytes | None = None,
        *,
        streams: bool = True,
    ) -> list[Generation]:
        """Hand over `requests`, which `check` has passed, with new ids. QueueFull if not all of them have room in the
        queue, ServiceEnded if the batch manager has ended.

        make: a generation, of the arguments of `Generation`.
        received_s: when they were received, by `real_now`; None for now.
        session, streams: what fleets need to know.
        """
        if not self.is_running:
            raise ServiceEnded("the server is about to end, or its engine has failed")
        if len(requests) > max(self.max_requests - self.num_queued, 0):
            self.statistics.refused += 1
            raise QueueFull(
                f"{self.num_queued} requests wait, and --max_queue_size is {self._max_queue_size}; try again later."
            )
        if received_s is None:
            received_s = self.real_now()
        changed = asyncio.Event()
        numbered = [replace(request, request_id=next(self._ids), index=next(self._numbers)) for request in requests]
        with self._lock:
            # A whole number of nanoseconds, as all times of a simulated device.
            self._earliest_ns = max(round(received_s * NANOSECONDS), self._earliest_ns)
            generations = [make(request, self._earliest_ns / NANOSECONDS, changed) for request in numbered]
            self._live.update((one.request.request_id, one) for one in generations)
            for one in generations:
                insort(self._queue, one, key=_order)
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

    def end_all(self, problem: str) -> None:
        """Stop all that has not ended, and answer it with the error `problem` at once."""
        self.cancel(list(self._live.values()))
        while self._live:
            _, one = self._live.popitem()
            one.respond({}, True, problem)

    def fail_queued(self) -> None:
        """Where the batch manager has ended early: end what it did not fetch."""
        while not self._manager.is_running and self._queue:
            one, error = self._queue.pop(0), "the engine has failed"
            self._note_arrival(one)  # the batch manager's thread has ended
            self.statistics.left(engine_request(one.request), error)
            if self._live.pop(one.request.request_id, None) is not None:
                one.respond({}, True, error)

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
        taken: list[Generation] = []
        now_s = self._clock.now()
        with self._lock:
            self._earliest_ns = max(self._earliest_ns, round(now_s * NANOSECONDS) + 1)
            while len(taken) != max_requests and (index := self._first_due(now_s)) is not None:
                taken.append(self._queue.pop(index))
        for one in taken:
            self._note_arrival(one)
        return [one.request for one in taken]

    def _first_due(self, now_s: float) -> int | None:
        """The place in the queue of the first request that has arrived. A simulated device's time may be behind."""
        return next((index for index, one in enumerate(self._queue) if one.arrival_s <= now_s), None)

    def _next_priority(self) -> float | None:
        if not self._queue:
            return None
        with self._lock:
            index = self._first_due(self._clock.now())
            return None if index is None else self._queue[index].request.priority

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
            self._is_delivering, self._responded_s = True, self._clock.now()
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
            return min((one.arrival_s for one in self._queue), default=0.0)

    # In the event loop.

    def _deliver(self) -> None:
        self.statistics.delivery_lag_s.add(self._clock.real_now() - self._responded_s)
        self._is_delivering = False  # before the responses are read, so that none is left behind
        for request_id, tensors, is_final, error in self._drained():
            one = self._live.get(request_id)
            if one is None:  # `end_all` has answered it
                continue
            if is_final:
                del self._live[request_id]
            one.respond(tensors, is_final, error)

    def _drained(self) -> Iterator[tuple[int, Tensors, bool, str]]:
        while self._responses:
            yield self._responses.popleft()
