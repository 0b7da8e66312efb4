"""Where the time of iterations goes, noted batch by batch."""

from collections.abc import Callable
from dataclasses import dataclass

from ifbbench.engine.batch import Batch


@dataclass(slots=True)
class StepTimes:
    """Of all passes of an iteration together; times in seconds.

    prepare_s: the host packs the batch. launch_s: it hands the batch to a GPU; 0 on a CPU. collect_s: it waits for the
    outputs. device_s: the device is busy with the batch, a GPU from its first kernel to its last. flops, bytes: what
    the batch asks of the device at the least.
    """

    prepare_s: float = 0.0
    launch_s: float = 0.0
    collect_s: float = 0.0
    device_s: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


class StepProfile:
    """The times of iterations that nobody has taken yet. least_work(batch): its FLOPs and bytes."""

    def __init__(self, least_work: Callable[[Batch], tuple[float, float]]) -> None:
        self._least_work = least_work
        self._steps: dict[int, StepTimes] = {}

    def begin(self, batch: Batch) -> StepTimes:
        """The times of the batch's iteration, to add to; its work is in them from now on."""
        step = self._steps.setdefault(batch.iteration, StepTimes())
        flops, moved = self._least_work(batch)
        step.flops += flops
        step.bytes += moved
        return step

    def of(self, iteration: int) -> StepTimes:
        """The times of an iteration that has begun."""
        return self._steps[iteration]

    def take(self, iteration: int) -> StepTimes:
        """The same, to be forgotten here; zeros if the iteration had no batch."""
        return self._steps.pop(iteration, StepTimes())

    def clear(self) -> None:
        """Forget all."""
        self._steps.clear()
