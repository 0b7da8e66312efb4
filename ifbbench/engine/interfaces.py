"""What the loop talks to: a scheduler, an executor, and an observer; and a capacity policy, which users may write.

Never compiled, because a class in Python cannot derive from a protocol that is.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ifbbench.engine.batch import AdapterUse, Batch, BatchLayout, BlockCopy, StepInputs, StepOutputs
from ifbbench.engine.plan import ContextChunk, Plan
from ifbbench.engine.records import CacheState, InFlightIteration, IterationRecord
from ifbbench.engine.request import Request, RequestTable
from ifbbench.engine.stretch import Growth, Positions, Stretch
from ifbbench.errors import IfbbenchError

# Asks `RequestSource.get` for all requests that have arrived.
NO_LIMIT = -1


class SchedulerStalled(IfbbenchError):
    """Requests are active, but the scheduler runs none of them, or more than fit."""


class EngineLost(IfbbenchError):
    """The process of an executor has ended, and with it the keys and values of all requests."""


class RequestSource(NamedTuple):
    """Where a scheduler takes requests from.

    get(n): at most n requests that have arrived, all of them for NO_LIMIT, the highest priorities first.
    refuse(request, error): answers one that can never run.
    next_priority(): the highest priority among requests that have arrived and were not taken, None if there are none;
        None where priorities decide nothing.
    """

    get: Callable[[int], list[Request]]
    refuse: Callable[[Request, str], None]
    next_priority: Callable[[], float | None] | None = None


class Scheduler(Protocol):
    """One engine's scheduler: owns its queue, its running set and its KV rules, and decides what each iteration runs.

    In each iteration the loop calls `admit` and `schedule`; then `allocate` for the batch, `advance` once it is
    submitted, and `update` once its outputs are there. Where the times of iterations are known in advance, it asks
    `horizon` for how many of them the plan is certain to repeat, with several micro batches in turn with the plans of
    the others (`cycle`), and `repeat` and `confirm` stand for so many of those calls; `used_blocks_after` looks ahead.
    A class that derives from this one needs none of these: then no plan repeats.

    name: name in messages.
    table: the running set.
    layout: what all batches have in common.
    max_in_flight: maximum number of iterations in flight.
    num_micro_batches: number of parts of the running set, which run in turn.
    """

    name: str
    table: RequestTable
    layout: BatchLayout
    max_in_flight: int
    num_micro_batches: int

    @property
    def waiting(self) -> Sequence[Request]:
        """The queue, in order."""
        ...

    def admit(self, source: RequestSource) -> Sequence[Request]:
        """Take requests from `source` into the queue, refuse those that can never run, and let others enter the running
        set; returns those that entered it."""
        ...

    def find(self, request_id: int) -> Request | None:
        """The waiting or running request with this id."""
        ...

    def remove(self, request: Request) -> None:
        """`request` ends, whatever it does: release all that it holds."""
        ...

    def schedule(
        self, iteration: int, now_s: float, in_flight: Sequence[InFlightIteration], collect: Callable[[], None]
    ) -> Plan:
        """Decide what `iteration` runs, pause what it pauses, and take the blocks of the prompts that it starts. A
        decision that depends on tokens in flight calls `collect`, which completes the oldest iteration in flight.
        SchedulerStalled if the prompts do not fit."""
        ...

    def allocate(self, plan: Plan) -> StepInputs:
        """Take what the generation requests of `plan` write to. SchedulerStalled if that does not fit."""
        ...

    def advance(self, plan: Plan, iteration: int) -> int:
        """Advance the requests of `plan` as far as is known without outputs; returns how many of their tokens had been
        computed before a pause."""
        ...

    def update(self, iteration: InFlightIteration, outputs: Sequence[StepOutputs]) -> list[Request]:
        """Take in the outputs of each pass of an iteration; returns the requests that are complete, in batch order."""
        ...

    def lose(self, iteration: InFlightIteration) -> list[Request]:
        """The executor failed in `iteration`, and what it wrote is unknown: returns its requests, which must end."""
        ...

    def horizon(self, plan: Plan) -> int:
        """For how many iterations, this one included, `plan` is certain to be decided again while no request arrives,
        and only the last one to be collected completes requests, or the one in flight those that `plan.num_ending`
        counts; 0 if the iteration needs a batch."""
        return 0

    def cycle(self, plan: Plan) -> Sequence[Plan]:
        """The plans that repeat, each once: `plan` and, with several micro batches, those of the others in turn."""
        return [plan]

    def positions(self, plan: Plan) -> tuple[Positions, AdapterUse | None]:
        """Positions of the generation requests of `plan`, and the adapters that it uses, which are on the device from
        now on, in its first iteration. SchedulerStalled if they do not fit."""
        raise SchedulerStalled(f"{self.name} repeats no plan")

    def repeat(self, plan: Plan, count: int) -> Growth:
        """`allocate` and `advance` for `count` iterations from `plan` on, at most those of `horizon`. If requests are
        ending, or the plan awaits what is in flight, there are two calls: for the first iteration, and for the others
        once that was collected."""
        raise SchedulerStalled(f"{self.name} repeats no plan")

    def confirm(self, count: int) -> list[Request]:
        """`update` for the oldest `count` iterations in flight, all of them repeated; returns the requests that are
        complete."""
        raise SchedulerStalled(f"{self.name} repeats no plan")

    def used_blocks_after(self, plan: Plan, count: int) -> int | None:
        """Blocks in use once `count` iterations of `plan`, fewer than those of `horizon`, have run and the next one is
        decided, without running them: `cache_state` after `repeat` of one at a time. None if only that tells."""
        return None

    def cache_state(self) -> CacheState:
        """The KV cache now, as records hold it."""
        ...

    def figures(self) -> dict[str, Any]:
        """Entries of `summary.json` that only this scheduler has."""
        return {}

    def truncate(self, conversation: Request, num_tokens: int) -> None:
        """Release the reusable blocks of a conversation after its first `num_tokens` tokens."""
        return None


@runtime_checkable
class KvScheduler(Protocol):
    """The methods that a scheduler has in addition if keys and values are sent and received (`Plan.receiving`)."""

    def keep(self, request: Request) -> None:
        """`request` is complete, and its keys and values are to be sent to another engine: it leaves the running set,
        and holds its blocks until `remove`."""
        ...

    def receive(self, requests: Sequence[Request]) -> None:
        """The keys and values that these requests of `Plan.receiving` waited for are in their blocks. The engine
        computes the last token of the prompt again (vLLM), or got the first output with them (`Plan.continued`)."""
        ...

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies of blocks that no batch has made yet, and that come before what is received."""
        ...


class KvTransfers(Protocol):
    """Where an engine sends the keys and values of prompts, and where they come from: the other engines of a fleet with
    prefill and decode apart."""

    def kept(self, request: Request, now_s: float) -> None:
        """`request` (`Request.is_sent_on`) is complete, and its blocks are kept until they are sent."""
        ...

    def reserved(self, requests: Sequence[Request], now_s: float) -> None:
        """These requests have blocks for what other engines send."""
        ...

    def take_sent(self) -> Sequence[Request]:
        """Requests whose keys and values were sent since the last call: their blocks may be released."""
        ...

    def take_received(self) -> Sequence[Request]:
        """Requests whose keys and values have come since the last call."""
        ...

    def take_stopped(self) -> Sequence[int]:
        """Ids of requests that were sent to another engine since the last call: they end here."""
        ...


class Executor(Protocol):
    """Runs batches in the order of their submission. It never decides what runs.

    An executor keeps the newest token of each slot, so that generation requests are named by slot alone; a first chunk
    (or the first one after a resume) in a slot means that the slot has a new request. Several batches may be in flight.
    In each layer all keys and values of a batch are stored before attention reads any: a prompt may begin with a block
    that a generation request of the same batch fills (vLLM's scheduler).
    """

    def submit(self, batch: Batch) -> None:
        """Start one batch, to run after those submitted before. If it raises, it has started nothing."""
        ...

    def collect(self) -> StepOutputs:
        """Wait for the oldest batch in flight and return its outputs. If it raises, that batch is lost."""
        ...

    def close(self) -> None:
        """Release memory and threads."""
        ...


class IterationWork(NamedTuple):
    """What an iteration runs: context chunks, generation requests at these positions, and their adapters as in `Batch`,
    which are loaded before the first of several, as `loaded_tokens` are. Nothing if it is the turn of a micro batch
    without requests."""

    context: Sequence[ContextChunk]
    positions: Positions
    adapters: AdapterUse | None = None
    loaded_tokens: int = 0


class PredictedTimes(NamedTuple):
    """When iterations start and are submitted, [iterations], and when those in flight are collected, the oldest first;
    in nanoseconds on the run's clock. Turns of micro batches without requests before the first one have no meaningful
    time of collection."""

    start_ns: list[int]
    submit_ns: list[int]
    collect_ns: list[int]

    def collected_before(self, time_ns: int) -> int:
        """How many iterations are collected before `time_ns`."""
        return next((count for count, ns in enumerate(self.collect_ns) if ns >= time_ns), len(self.collect_ns))


@runtime_checkable
class PredictableExecutor(Protocol):
    """An executor on a virtual clock that knows in advance how long iterations take, and returns no tokens."""

    def run(
        self,
        turns: Sequence[IterationWork],
        steps: int,
        first: int,
        num_in_flight: int = 0,
        max_in_flight: int = 1,
        change_ns: int | None = None,
    ) -> PredictedTimes:
        """Run at most `steps` iterations, up to the one that starts at `change_ns` or later, and let their time pass.

        turns: the first iterations, which then repeat in turn, with the next chunks of the same lengths and the next
            positions.
        first: number of the first iteration.
        num_in_flight: number of iterations in flight before the first.
        max_in_flight: each iteration waits for the oldest of so many, itself included, so that fewer stay in flight.
        """
        ...

    def state(self) -> Any:
        """What `restore` takes: the device and the clock as they are now."""
        ...

    def restore(self, state: Any) -> None:
        """Be as when `state` was taken: what was run since then did not run."""
        ...


@runtime_checkable
class WarmingExecutor(Protocol):
    """An executor with work that can be done before the first iteration that needs it."""

    def warm_up(self, report_progress: Callable[[int, int], None], /) -> None:
        """Do that work. Some batches have run, and none is in flight. report_progress: takes done and total."""
        ...


class Delivery(Protocol):
    """When the tokens of iterations reach their clients, in seconds on the run's clock, where that is later than the
    end of the iteration."""

    def of_iteration(self, record: IterationRecord) -> float: ...

    def of_stretch(self, stretch: Stretch) -> Iterable[float]:
        """As `of_iteration`, for each iteration of `stretch`."""
        ...


class Observer(Protocol):
    """Is notified of each iteration after it has run, and of each request that ends without being complete."""

    def iteration(self, record: IterationRecord) -> None:
        return None

    def stretch(self, stretch: Stretch) -> None:
        """Several iterations at once."""
        return None

    def left(self, request: Request, error: str | None) -> None:
        """`request` was refused or failed for `error`, or was stopped by its client (None)."""
        return None


class Unobserved(Observer):
    """An observer that does nothing."""
