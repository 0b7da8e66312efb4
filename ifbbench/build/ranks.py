"""One token generation loop in each rank, all with the same decisions.

Rank 0 reads the client and the clock, and sends every answer that its loop gets from them to the other ranks, once an
iteration, before it submits the batch. Their loops get the same answers in the same order, so that they decide the
same. Each batch is compared before it runs, and the digest of the schedule every `check_ranks` iterations.
"""

import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ifbbench.clock import Clock, WallClock
from ifbbench.engine.batch import Batch, StepOutputs
from ifbbench.engine.interfaces import Executor, Observer
from ifbbench.engine.loop import NextChange, TokenGenerationLoop, no_stop_signals, nothing_queued
from ifbbench.engine.pickling import dumps, loads
from ifbbench.engine.records import IterationRecord, ScheduleDigest
from ifbbench.engine.request import Request
from ifbbench.engine.responses import Response
from ifbbench.engine.stretch import Stretch
from ifbbench.schedulers.engines import make_scheduler
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.torch.communicator import Communicator
from ifbbench.torch.ranks import RankFailed

# Rank 0 sends something at least so often while it waits for requests, unless the time limit is shorter. Before that it
# waits until the others, which only receive then, have received the message before: one that hangs is found then.
KEEP_ALIVE_S = 0.2
NOTHING = b""


class RanksDiffer(RankFailed):
    """A rank decided otherwise than rank 0."""


def _difference(rank: int, iterations: str) -> RanksDiffer:
    return RanksDiffer(
        f"rank {rank} decided otherwise than rank 0 in {iterations}. All ranks must run the same "
        "version of ifbbench and of a user's policy, whose decisions must follow from its input alone."
    )


class LeadingClock(WallClock):
    """The clock of rank 0. While it waits, the other ranks are notified that it is alive."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self._communicator = communicator
        self._interval_s = min(KEEP_ALIVE_S, communicator.timeout_s / 4)

    def wait_until(self, seconds: float) -> None:
        while seconds - self.now() > self._interval_s:
            super().wait_until(self.now() + self._interval_s)
            self._communicator.wait_for_received()
            self._communicator.publish(NOTHING)
        super().wait_until(seconds)


class _Log:
    """Answers that a loop got, as (what, answer), in order. Rank 0 adds them, the others take them."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.iteration = 0
        # The failure of this rank's executor: the loop answers its requests and continues, but rank 0 does not know.
        self.failure: Exception | None = None
        self._entries: deque[tuple[str, Any]] = deque()
        self._sent = WallClock()

    def add(self, what: str, answer: Any = None) -> None:
        self._entries.append((what, answer))

    def send(self) -> None:
        """Send what was added since the last call."""
        self.communicator.publish(dumps(self._entries))
        self._entries.clear()
        self._sent.restart()

    def send_pending(self) -> None:
        """Send what was added, on rank 0, if anything."""
        if self._entries and self.communicator.rank == 0:
            self.send()

    def send_now_and_then(self) -> None:
        """The same if the last call was long ago: while no request is active, no batch is submitted."""
        if self._sent.now() > min(KEEP_ALIVE_S, self.communicator.timeout_s / 4):
            self.communicator.wait_for_received()
            self.send()

    def next(self) -> tuple[str, Any]:
        """The next answer, once it has arrived."""
        if self.failure is not None:
            raise self.failure
        while not self._entries:
            message = self.communicator.receive_message(0)
            if message != NOTHING:
                self._entries = loads(message)
        return self._entries.popleft()

    def take(self, what: str) -> Any:
        """The next answer, which must be to `what`."""
        found, answer = self.next()
        if found != what:
            raise _difference(self.communicator.rank, f"iteration {self.iteration}")
        return answer

    def exchange(self, what: str, own: Any) -> None:
        """Compare `own` with that of rank 0. RanksDiffer if it is another."""
        if self.communicator.rank == 0:
            self.add(what, own)
        elif self.take(what) != own:
            raise _difference(self.communicator.rank, f"iteration {self.iteration}")


class _StepClock:
    """`clock`, whose next reading may be given: that of rank 0, by which all ranks decide. Other readings are for
    records only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.next_s: float | None = None

    def now(self) -> float:
        now, self.next_s = self.next_s, None
        return self._clock.now() if now is None else now

    def timestamp(self) -> float:
        return self._clock.timestamp()

    def wait_until(self, seconds: float) -> None:
        self._clock.wait_until(seconds)

    def restart(self) -> None:
        self._clock.restart()


class _StepTime(WallClock):
    """The time of the step that a rank repeats, which is that of rank 0: what is decided by it is the same in all."""

    def __init__(self) -> None:
        super().__init__()
        self.step_s = 0.0

    def now(self) -> float:
        return self.step_s


class _ComparedExecutor:
    """`executor`, with each batch compared with that of rank 0 before it is submitted."""

    def __init__(self, log: _Log, executor: Executor) -> None:
        self._log = log
        self._executor = executor

    def submit(self, batch: Batch) -> None:
        self._log.iteration = batch.iteration
        chunks = [(chunk.request.index, chunk.start, chunk.length) for chunk in batch.context]
        rows = zlib.crc32(batch.positions.tobytes(), zlib.crc32(batch.slots.tobytes()))
        with self._noting_failures():
            self._log.exchange("batch", (batch.iteration, chunks, rows))
            if self._log.communicator.rank == 0:
                self._log.send()
            self._executor.submit(batch)

    def collect(self) -> StepOutputs:
        with self._noting_failures():
            # After another iteration was collected, the other ranks wait for its digest, and rank 0 for their results.
            self._log.send_pending()
            return self._executor.collect()

    def close(self) -> None:
        self._executor.close()

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._log.failure = error
            raise


class _DigestObserver:
    """`observer`, with the digest of the schedule compared every `interval` iterations."""

    def __init__(self, log: _Log, observer: Observer | None, interval: int) -> None:
        self.digest = ScheduleDigest()
        self._log = log
        self._observer = observer
        self._interval = interval
        self._count = 0

    def iteration(self, record: IterationRecord) -> None:
        if self._observer is not None:
            self._observer.iteration(record)
        self.digest.add(record)
        self._count += 1
        if self._count % self._interval == 0:
            self._log.iteration = record.iteration
            self._log.exchange("digest", self.digest.hexdigest())

    def stretch(self, stretch: Stretch) -> None:
        raise NotImplementedError("iterations are advanced together on simulated devices only")

    def left(self, request: Request, error: str | None) -> None:
        if self._observer is not None:
            self._observer.left(request, error)


def _ignored(response: Response) -> None:
    """The client gets it from rank 0."""


class RankLoop(TokenGenerationLoop):
    """The loop of one rank. That of rank 0 is used as any other, and `end_others` ends the others; those `follow`."""

    def __init__(
        self,
        communicator: Communicator,
        check_interval: int,
        config: BatchingConfig,
        executor: Executor,
        clock: Clock,
        get_requests: Callable[[int], list[Request]] = lambda count: [],
        send_response: Callable[[Response], None] = _ignored,
        observer: Observer | None = None,
        queued: Callable[[], int] = nothing_queued,
        poll_stop_signals: Callable[[], Collection[int]] = no_stop_signals,
        next_change: NextChange | None = None,
        next_priority: Callable[[], float | None] | None = None,
        is_open_loop: bool = False,
    ) -> None:
        """As `TokenGenerationLoop`; functions other than rank 0's are not called. check_interval: iterations between
        comparisons of digests."""
        log = self._log = _Log(communicator)
        self._digests = _DigestObserver(log, None if communicator.rank else observer, check_interval)
        self._step_clock = _StepClock(clock)
        self._step_time = _StepTime()
        self._num_fetched = 0
        self._in_step = False

        def logged(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def answer(*arguments: Any) -> Any:
                if communicator.rank:
                    return log.take(what)
                value = function(*arguments)
                log.add(what, value)
                return value

            return answer

        def requests(count: int) -> list[Request]:
            if communicator.rank:
                return list(map(loads, log.take("requests")))
            fetched = get_requests(count)
            for request in fetched:
                if request.index < 0:  # the digest names requests by it
                    request.index = self._num_fetched
                self._num_fetched += 1
            # Now, before the loop changes them.
            log.add("requests", [dumps(request) for request in fetched])
            return fetched

        super().__init__(
            make_scheduler(config, self._step_time),
            _ComparedExecutor(log, executor),
            self._step_clock,
            requests,
            _ignored if communicator.rank else send_response,
            self._digests,
            queued,
            logged("stop signals", lambda: tuple(poll_stop_signals())),
            next_change=next_change and logged("next change", next_change),
            next_priority=next_priority and logged("next priority", next_priority),
            is_open_loop=is_open_loop,
        )

    # Rank 0. What is done between steps is repeated by the other ranks.

    def step(self) -> bool:
        if self._log.communicator.rank == 0:
            self._log.send_now_and_then()
            self._step_time.step_s = self._step_clock.now()
            self._log.add("step", self._step_time.step_s)
        self._step_clock.next_s = self._step_time.step_s
        self._in_step = True
        try:
            return super().step()
        finally:
            self._in_step = False

    def stop(self, request_id: int, error: str | None = None) -> None:
        if self._log.communicator.rank == 0 and not self._in_step:
            self._log.add("stop", (request_id, error))
        super().stop(request_id, error)

    def truncate_blocks(self, conversation: Request, num_tokens: int) -> None:
        if self._log.communicator.rank == 0:
            self._log.add("truncate", (dumps(conversation), num_tokens))
        super().truncate_blocks(conversation, num_tokens)

    def fail(self, error: BaseException) -> None:
        """Notify the other ranks that rank 0 ends early."""
        if self._log.communicator.rank == 0:
            with suppress(RankFailed):
                self._log.add("failed", f"rank 0 ended early: {error}")
                self._log.send()
        self._log.communicator.close()

    def end_others(self) -> None:
        """End the other ranks' loops. RanksDiffer if the whole schedule of one is another."""
        communicator = self._log.communicator
        self._log.add("end")
        self._log.send()
        for rank in range(1, communicator.world_size):
            if communicator.receive_message(rank).decode() != self._digests.digest.hexdigest():
                raise _difference(rank, f"the {self.iteration} iterations before the end")

    # Other ranks.

    def follow(self) -> None:
        """Do what rank 0 does, until it ends. RanksDiffer if that is not possible, ExecutorFailed as `step`."""
        while True:
            match self._log.next():
                case "step", step_s:
                    self._step_time.step_s = step_s
                    self.step()
                case "stop", (request_id, error):
                    self.stop(request_id, error)
                case "truncate", (conversation, num_tokens):
                    self.truncate_blocks(loads(conversation), num_tokens)
                case "failed", error:
                    raise RankFailed(error)
                case "end", _:
                    self._log.communicator.answer(self._digests.digest.hexdigest().encode())
                    return
                case _:
                    raise _difference(self._log.communicator.rank, f"iteration {self.iteration}")
