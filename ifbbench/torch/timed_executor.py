"""The executor that measures where time is spent (`--profile`)."""

from collections.abc import Callable
from typing import Any

import torch

from ifbbench.clock import WallClock
from ifbbench.engine.batch import Batch, StepOutputs
from ifbbench.engine.step_profile import StepProfile
from ifbbench.torch.model_executor import ModelExecutor
from ifbbench.torch.prepared_batch import PreparedBatch


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
