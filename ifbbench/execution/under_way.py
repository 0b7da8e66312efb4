"""What a submitted batch yields, on its way from the device to the host."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ifbbench.engine.batch import BeamCandidates, StepOutputs
from ifbbench.engine.request_table import FloatArray


@dataclass(frozen=True, slots=True)
class DeviceOutputs:
    """`StepOutputs` as tensors. candidates: tokens, beams and scores."""

    tokens: Tensor | None
    candidates: tuple[Tensor, Tensor, Tensor] | None = None
    log_probs: Tensor | None = None
    context_logits: dict[int, Tensor] = field(default_factory=dict)
    generation_logits: dict[int, Tensor] = field(default_factory=dict)


class OutputsUnderWay:
    """Copies to the host, put in line behind the batch's own work.

    Asking for them later would put them behind the batches submitted since, and the host would wait for those too.
    """

    def __init__(self, outputs: DeviceOutputs, device: torch.device) -> None:
        self._tokens = None if outputs.tokens is None else _to_host(outputs.tokens, torch.int32)
        self._candidates = outputs.candidates and _candidates_to_host(*outputs.candidates)
        self._log_probs = None if outputs.log_probs is None else _to_host(outputs.log_probs, torch.float32)
        self._context_logits = _all_to_host(outputs.context_logits)
        self._generation_logits = _all_to_host(outputs.generation_logits)
        self._arrived = torch.Event(device) if device.type == "cuda" else None
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> StepOutputs:
        """The outputs, once they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return StepOutputs(
            tokens=None if self._tokens is None else self._tokens.numpy(),
            candidates=self._candidates and BeamCandidates(*(tensor.numpy() for tensor in self._candidates)),
            log_probs=None if self._log_probs is None else self._log_probs.numpy(),
            context_logits=_as_arrays(self._context_logits),
            generation_logits=_as_arrays(self._generation_logits),
        )


def _to_host(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Converted where it is, for a copy that converts would wait. From CUDA into pinned memory."""
    return tensor.to(dtype).to("cpu", non_blocking=True)


def _candidates_to_host(tokens: Tensor, beams: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _to_host(tokens, torch.int32), _to_host(beams, torch.int32), _to_host(scores, torch.float32)


def _all_to_host(tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    return {index: _to_host(tensor, torch.float32) for index, tensor in tensors.items()}


def _as_arrays(tensors: dict[int, Tensor]) -> dict[int, FloatArray]:
    """Copies: they are kept long, and would else keep pinned memory, or the logits of a whole batch, with them."""
    return {index: tensor.numpy().copy() for index, tensor in tensors.items()}
