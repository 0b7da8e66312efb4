"""What others may implement for the engine: policies, executors, and observers of a run.

Never compiled, because a class in Python cannot derive from a protocol that is.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ifbbench.engine.active import ActiveRequests
    from ifbbench.engine.batch import Batch, ContextChunk, Positions, StepOutputs
    from ifbbench.engine.records import IterationRecord, Stretch
    from ifbbench.engine.request import Request
    from ifbbench.kv.adapters import AdapterUse
    from ifbbench.kv.interface import KvCache
    from ifbbench.schedulers.tensorrt_llm.policies.policy import CapacityDecision


class CapacityPolicy(Protocol):
    """A capacity scheduler policy: reads the active requests and the cache, and changes neither.

    A class may declare `may_pause = False`, if it never pauses, and `is_steady = True`, if its decision stays the same
    while nothing happens but that the generation requests, which all fit, generate tokens. It is not asked then.
    """

    def schedule(self, active: "ActiveRequests", kv_cache: "KvCache") -> "CapacityDecision":
        """Decide for one iteration. Called before blocks of the iteration are allocated or released."""
        ...


class Executor(Protocol):
    """Runs batches in the order of their submission. It never decides what runs.

    An executor keeps the newest token of each slot, so that generation requests are named by slot alone; a first chunk
    (or the first one after a resume) in a slot means that the slot has a new request. Several batches may be in flight.
    """

    def submit(self, batch: "Batch") -> None:
        """Start one batch, to run after those submitted before. If it raises, it has started nothing."""
        ...

    def collect(self) -> "StepOutputs":
        """Wait for the oldest batch in flight and return its outputs. If it raises, that batch is lost."""
        ...

    def close(self) -> None:
        """Release memory and threads."""
        ...


@runtime_checkable
class PredictableExecutor(Protocol):
    """An executor on a virtual clock that can compute in advance how long iterations take, and returns no tokens."""

    def step_times(
        self,
        context: "Sequence[ContextChunk]",
        positions: "Positions",
        steps: int,
        within_ns: int | None = None,
        adapters: "AdapterUse | None" = None,
    ) -> tuple[int, list[int]]:
        """Of the next `steps` iterations: the host's time in each, and the device's, [steps]; both in nanoseconds.

        context: chunks of the first; each further iteration runs the next chunks of the same lengths. positions:
        of the generation requests, in the first. within_ns: iterations that start later than that, from
        now on, may be left out. adapters: as in `Batch`, all on the device."""
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

    def of_iteration(self, record: "IterationRecord") -> float: ...

    def of_stretch(self, stretch: "Stretch") -> Iterable[float]:
        """[iterations]."""
        ...


class Observer(Protocol):
    """Is notified of each iteration after it has run, and of each request that ends without being complete."""

    def iteration(self, record: "IterationRecord") -> None:
        return None

    def stretch(self, stretch: "Stretch") -> None:
        """Several iterations at once."""
        return None

    def left(self, request: "Request", error: str | None) -> None:
        """`request` was refused or failed for `error`, or was stopped by its client (None)."""
        return None


class Unobserved(Observer):
    """An observer that does nothing."""
