"""The executor of a profiled run."""

from collections.abc import Callable

import torch

from ifbbench.clock import WallClock
from ifbbench.engine.batch import Batch, StepOutputs
from ifbbench.engine.kv_cache.sizing import CacheLayout
from ifbbench.execution.model_executor import ModelExecutor
from ifbbench.execution.prepared import PreparedBatch
from ifbbench.execution.step_profile import StepProfile
from ifbbench.model.llama import LlamaModel


class TimedExecutor(ModelExecutor):
    """A `ModelExecutor` that notes in `profile` where the time goes."""

    def __init__(
        self, model: LlamaModel, num_slots: int, num_blocks: int, tokens_per_block: int, max_seq_len: int | None = None,
        *, profile: StepProfile, layout: CacheLayout | None = None, kv_cache_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, num_slots, num_blocks, tokens_per_block, max_seq_len, layout=layout,
                         kv_cache_dtype=kv_cache_dtype)  # fmt: skip
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

        def wait_and_note() -> StepOutputs:
            start_s = self._clock.now()
            outputs = wait()
            step.collect_s += self._clock.now() - start_s
            if started is not None and ended is not None:
                ended.synchronize()
                step.device_s += started.elapsed_time(ended) / 1000
            return outputs

        return wait_and_note

    def _event(self) -> torch.Event | None:
        """A mark in a GPU's work, here and now. A CPU needs none: its work is done when the call returns."""
        if self._model.device.type == "cpu":
            return None
        event = torch.Event(self._model.device, enable_timing=True)
        event.record()
        return event
