"""The executor of a run with `--profile`, and the times that it measures."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ifbbench.clock import WallClock
from ifbbench.engine.batch import Batch, StepOutputs
from ifbbench.execution.model_executor import ModelExecutor, PreparedBatch


@dataclass(slots=True)
class StepTimes:
    """Times of one iteration, all its passes together, in seconds.

    prepare_s: packing on the host. launch_s: handing the batch to a GPU; 0 on a CPU. collect_s: waiting for outputs.
    device_s: the device is busy with the batch, a GPU from its first kernel to its last. flops, bytes: the least work
    that the batch needs.
    """

    prepare_s: float = 0.0
    launch_s: float = 0.0
    collect_s: float = 0.0
    device_s: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


class StepProfile:
    """Times of the iterations that the recorder has not taken yet. least_work(batch): its FLOPs and bytes."""

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


class TimedExecutor(ModelExecutor):
    """A `ModelExecutor` that adds its times to `profile`."""

    def __init__(self, *arguments: Any, profile: StepProfile, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._profile = profile
        self._clock = WallClock()

    def _prepare(self, batch: Batch) -> PreparedBatch:
        step, start_s = self._profile.begin(batch), self._clock.now()
        prepared = super()._prepare(batch)
        step.prepare_s += self._clock.now() - start_s
        return prepared

    def _launch(self, batch: PreparedBatch) -> Callable[[], StepOutputs]:
        step, started, start_s = self._profile.of(batch.iteration), self._event(), self._clock.now()
        wait = super()._launch(batch)
        took_s, ended = self._clock.now() - start_s, self._event()
        if ended is None:
            step.device_s += took_s
        else:
            step.launch_s += took_s

        def wait_and_time() -> StepOutputs:
            start_s = self._clock.now()
            outputs = wait()
            step.collect_s += self._clock.now() - start_s
            if started is not None and ended is not None:
                ended.synchronize()
                step.device_s += started.elapsed_time(ended) / 1000
            return outputs

        return wait_and_time

    def _event(self) -> torch.Event | None:
        """An event recorded now in the work of a GPU. None on a CPU, where the work is done when the call returns."""
        if self._model.device.type == "cpu":
            return None
        event = torch.Event(self._model.device, enable_timing=True)
        event.record()
        return event
