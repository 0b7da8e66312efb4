"""Outputs of a batch on their way from the device to the host."""

import torch
from torch import Tensor

from ifbbench.engine.arrays import IntArray
from ifbbench.engine.batch import BeamCandidates, StepOutputs


class OutputsInFlight:
    """Copies of a batch's outputs to the host, enqueued right behind the batch.

    Enqueued when collected, they would wait for the batches submitted in between.
    """

    def __init__(
        self,
        device: torch.device,
        context_logits: dict[int, Tensor],
        generation_logits: dict[int, Tensor],
        tokens: Tensor | None = None,
        log_probs: Tensor | None = None,
        candidates: tuple[Tensor, Tensor, Tensor] | None = None,
        accepted: IntArray | None = None,
        draft_s: float = 0.0,
    ) -> None:
        """The fields of `StepOutputs` as tensors on `device`. candidates: tokens, beams and scores."""
        self._accepted, self._draft_s = accepted, draft_s
        self._context_logits = {index: _to_host(part, torch.float32) for index, part in context_logits.items()}
        self._generation_logits = {index: _to_host(part, torch.float32) for index, part in generation_logits.items()}
        self._tokens = None if tokens is None else _to_host(tokens, torch.int32)
        self._log_probs = None if log_probs is None else _to_host(log_probs, torch.float32)
        self._candidates: tuple[Tensor, Tensor, Tensor] | None = None
        if candidates is not None:
            ids, beams, scores = candidates
            self._candidates = (
                _to_host(ids, torch.int32),
                _to_host(beams, torch.int32),
                _to_host(scores, torch.float32),
            )
        self._arrived = torch.Event(device) if device.type == "cuda" else None
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> StepOutputs:
        """The outputs, once they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        # Logits are copied: they are kept long, and views would keep pinned memory or the whole batch's logits alive.
        return StepOutputs(
            tokens=None if self._tokens is None else self._tokens.numpy(),
            candidates=self._candidates and BeamCandidates(*(part.numpy() for part in self._candidates)),
            log_probs=None if self._log_probs is None else self._log_probs.numpy(),
            context_logits={index: part.numpy().copy() for index, part in self._context_logits.items()},
            generation_logits={index: part.numpy().copy() for index, part in self._generation_logits.items()},
            accepted=self._accepted,
            draft_s=self._draft_s,
        )


def _to_host(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Converted on the device, because a copy that converts is synchronous. From CUDA into pinned memory."""
    return tensor.to(dtype).to("cpu", non_blocking=True)
