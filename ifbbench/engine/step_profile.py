"""Times of the iterations of a run with `--profile`. Imports no torch, because every run's recorder imports it."""

from collections.abc import Callable
from dataclasses import dataclass

from ifbbench.engine.batch import Batch


@dataclass(slots=True)
class StepTimes:
    """Times of one iteration, all its passes together, in seconds.

    prepare_s: packing on the host.
    launch_s: handing the batch to a GPU; 0 on a CPU.
    collect_s: waiting for outputs.
    device_s: the device works on the batch, a GPU from its first kernel to its last.
    flops, bytes: the least work that the batch needs.
    """

    prepare_s: float = 0.0
    launch_s: float = 0.0
    collect_s: float = 0.0
    device_s: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


class StepProfile:
    """Times of the iterations that the recorder has not taken yet.

    least_work(batch): returns the least FLOPs and bytes of a batch.
    """

    def __init__(self, least_work: Callable[[Batch], tuple[float, float]]) -> None:
        self._least_work = least_work
        self._steps: dict[int, StepTimes] = {}

    def begin(self, batch: Batch) -> StepTimes:
        """The times of the batch's iteration, to be added to; the batch's work is already added."""
        step = self._steps.setdefault(batch.iteration, StepTimes())
        flops, moved = self._least_work(batch)
        step.flops += flops
        step.bytes += moved
        return step

    def of(self, iteration: int) -> StepTimes:
        """The times of an iteration that has begun."""
        return self._steps[iteration]

    def take(self, iteration: int) -> StepTimes:
        """Remove and return the times of an iteration; zeros if it had no batch."""
        return self._steps.pop(iteration, StepTimes())

    def clear(self) -> None:
        """Remove all times."""
        self._steps.clear()
