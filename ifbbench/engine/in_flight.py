"""An iteration in flight, from its submission to its outputs."""

from collections import deque
from dataclasses import dataclass, field

from ifbbench.engine.arrays import Rows
from ifbbench.engine.batch import Batch
from ifbbench.engine.records import IterationRecord


@dataclass(slots=True)
class InFlightIteration:
    """One iteration from its submission to its outputs.

    batches: its passes. output_rows: [outputs], the table row of each output. dropped: rows with outputs to ignore,
    because the request has left or only pads the batch. num_submitted: passes that were not collected yet.
    is_repeated: one of `Scheduler.repeat`, which has no batch.
    """

    record: IterationRecord
    batches: tuple[Batch, ...]
    output_rows: Rows
    dropped: set[int] = field(default_factory=set)
    num_submitted: int = 0
    error: Exception | None = None
    is_repeated: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether it is the turn of a micro batch without requests."""
        return not self.batches and not self.is_repeated


def forget_empty_turns(in_flight: deque[InFlightIteration]) -> int:
    """Remove the latest of the iterations in flight, the oldest of which is the first, if they are turns of micro
    batches without requests; returns how many."""
    count = 0
    while in_flight and in_flight[-1].is_empty:
        in_flight.pop()
        count += 1
    return count
