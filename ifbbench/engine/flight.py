"""An iteration under way: what was submitted, and what becomes of its outputs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.batch import NO_OUTPUTS, Batch, Executor, StepOutputs
from ifbbench.engine.records import IterationRecord


@dataclass(slots=True)
class Flight:
    """One iteration from its submission to its outputs.

    batches: its passes. output_rows: [outputs], the table row of each output. dropped: rows whose request has left (or
    is only padding), so that their outputs mean nothing. under_way: passes that the executor has and was not asked for.
    """

    record: IterationRecord
    batches: tuple[Batch, ...]
    output_rows: NDArray[np.int64]
    dropped: set[int] = field(default_factory=set)
    under_way: int = 0
    error: Exception | None = None

    def submit(self, executor: Executor) -> None:
        """Hand all passes to the executor; an error is kept for `collect`'s caller to find."""
        try:
            for batch in self.batches:
                executor.submit(batch)
                self.under_way += 1
        except Exception as error:
            self.error = error

    def collect(self, executor: Executor, now: Callable[[], float]) -> StepOutputs:
        """The outputs of all passes; on an error, which is kept, none."""
        if self.under_way == len(self.batches) == 1:
            return self._collect_one(executor)
        outputs = []
        for number in range(self.under_way):
            try:
                outputs.append(executor.collect())
            except Exception as error:
                self.error = self.error or error
            if number == 0 and len(self.batches) > 1:
                self.record.context_end_s = now()
        self.under_way = 0
        return NO_OUTPUTS if self.error else _joined(outputs, self.batches)

    def _collect_one(self, executor: Executor) -> StepOutputs:
        self.under_way = 0
        try:
            outputs = executor.collect()
        except Exception as error:
            self.error = self.error or error
        return NO_OUTPUTS if self.error else outputs

    def rows(self) -> Iterator[int]:
        """Table rows of the requests that ran and are still there."""
        slots = [chunk.request.slot for batch in self.batches for chunk in batch.context]
        slots += [int(slot) for batch in self.batches for slot in batch.slots]
        return (slot for slot in slots if slot not in self.dropped)


def _joined(outputs: list[StepOutputs], batches: tuple[Batch, ...]) -> StepOutputs:
    """Outputs of a context pass and a generation pass as if they had been one."""
    if len(outputs) < 2:
        return outputs[0] if outputs else NO_OUTPUTS
    context, generation = outputs
    return context.joined_with(generation, offset=sum(chunk.is_last for chunk in batches[0].context))
