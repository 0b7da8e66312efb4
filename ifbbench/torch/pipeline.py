"""The executor of a pipeline stage: runs its layers of each batch as soon as the stage before has sent its own.

With as many micro batches in flight as stages, every stage computes at the same time. The last stage chooses the tokens
and sends the outputs to all other ranks, which need them to schedule the requests' next iteration.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ifbbench.engine.batch import Batch, StepOutputs
from ifbbench.engine.pickling import dumps, loads
from ifbbench.errors import InputError
from ifbbench.kv.sizing import CacheLayout
from ifbbench.torch.model.part import ModelPart
from ifbbench.torch.model.tensors import to_device
from ifbbench.torch.model_executor import ModelExecutor
from ifbbench.torch.packing import Int64Array
from ifbbench.torch.prepared_batch import PreparedBatch


class StageExecutor(ModelExecutor):
    """A `ModelExecutor` of a stage. Batches run when they are submitted, on a CPU too: other stages wait for them."""

    runs_when_collected = False

    def submit(self, batch: Batch) -> None:
        torch.get_num_threads()  # see `ModelExecutor._run_now`
        super().submit(batch)

    def use_graphs(self, *arguments: object, **options: object) -> None:
        """Nothing: a pass that exchanges hidden states with other stages is not recorded."""

    def _outputs(self, batch: PreparedBatch, logits: Tensor) -> Callable[[], StepOutputs]:
        part, slots = self._part, batch.packed.output_slots
        if not part.is_last:
            return lambda: self._received(slots)
        wait = super()._outputs(batch, logits)

        def send() -> StepOutputs:
            outputs = wait()
            part.links.send_outputs(dumps(outputs))
            return outputs

        if logits.device.type == "cuda":
            return send
        outputs = send()
        return lambda: outputs

    def _received(self, slots: Int64Array) -> StepOutputs:
        outputs: StepOutputs = loads(self._part.links.receive_outputs())
        if self._part.is_first and outputs.tokens is not None:
            tokens = to_device(outputs.tokens.astype(np.int64), self._model.device)
            self._newest.index_copy_(0, self._on_device(slots), tokens)
        return outputs

    @property
    def _part(self) -> ModelPart:
        part = self._model.part
        assert part is not None
        return part


def layout_of_stage(layout: CacheLayout, part: ModelPart) -> CacheLayout:
    """The cache of the part's layers, counted from its first. InputError if it has none with one of the windows."""
    first = part.layers.start
    windows = tuple(
        replace(window, layers=tuple(layer - first for layer in window.layers if layer in part.layers))
        for window in layout.windows
    )
    if not all(window.layers for window in windows):
        raise InputError(
            f"--pp_size: stage {part.stage} has no layer with one of the attention windows. Choose fewer "
            "stages, or another --max_attention_window."
        )
    return replace(layout, windows=windows)
