"""The choice of tokens by a kernel, so that logits never leave the GPU nor wait for the host."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.execution.sampling import Int64Array, Sampler, uniform_numbers
from ifbbench.kernels.token_choice import choose_tokens


class KernelSampler(Sampler):
    """`Sampler` in one launch, whatever the rows ask for."""

    def choose(self, logits: Tensor, slots: Int64Array, positions: Int64Array) -> Tensor:
        """Token ids, int64 [rows], from logits [rows, vocabulary].

        slots: [rows], whose logits they are. positions: [rows], where each new token stands in its sequence.
        """
        uniforms = uniform_numbers(self._seeds[slots], positions - self._prompt_lengths[slots])
        columns = np.stack([self._temperatures[slots], self._top_k[slots], self._top_p[slots], uniforms])
        temperatures, top_k, top_p, uniform = _on_device(columns, logits.device).unbind()
        # A temperature may be too small for float32; it must not become that of a greedy row.
        smallest = torch.finfo(torch.float32).tiny
        temperatures = torch.where(temperatures > 0, temperatures.clamp(min=smallest), 0.0)
        return choose_tokens(logits, temperatures.float(), top_k.int(), top_p.float(), uniform)


def _on_device(columns: NDArray[np.float64], device: torch.device) -> Tensor:
    host = torch.from_numpy(columns)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
