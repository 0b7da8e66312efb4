"""The choice of tokens by a kernel, so that logits never leave the GPU nor wait for the host."""

import numpy as np
import torch
from torch import Tensor

from ifbbench.execution.sampling import Int64Array, Sampler, uniform_numbers
from ifbbench.kernels.token_choice import choose_tokens
from ifbbench.model.tensors import to_device_together


class KernelSampler(Sampler):
    """`Sampler` in one copy and one launch, whatever the rows ask for."""

    def choose(self, logits: Tensor, slots: Int64Array, positions: Int64Array) -> Tensor:
        """Token ids, int64 [rows], from logits [rows, vocabulary].

        slots: [rows], whose logits they are. positions: [rows], where each new token stands in its sequence.
        """
        uniforms = uniform_numbers(self._seeds[slots], positions - self._prompt_lengths[slots])
        temperatures = self._temperatures[slots]
        # A temperature may be too small for float32; it must not become that of a greedy row.
        temperatures = np.where(temperatures > 0, np.maximum(temperatures, np.finfo(np.float32).tiny), 0.0)
        narrow = temperatures.astype(np.float32), self._top_p[slots].astype(np.float32)
        # Numbers of four bytes each, or of twice four, travel as if they were int32.
        columns = [values.view(np.int32) for values in (uniforms, *narrow)]
        uniform, temperature, top_p, top_k = to_device_together([*columns, self._top_k[slots]], logits.device)
        return choose_tokens(logits, temperature.view(torch.float32), top_k, top_p.view(torch.float32),
                             uniform.view(torch.float64))  # fmt: skip
