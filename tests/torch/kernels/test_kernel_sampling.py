"""What the sampler hands to the kernel: it arrives in one copy, and does not make Triton compile another kernel."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ifbbench.engine.sampling_params import SamplingParams, uniform_numbers
from ifbbench.torch.kernels import token_choice
from ifbbench.torch.sampling import KernelSampler


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_columns_of_any_length_begin_at_16_bytes(
    rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a batch of one request more or less would wait for the compiler."""
    handed: list[Tensor] = []

    def choose(logits: Tensor, *columns: Tensor) -> Tensor:
        handed.extend(columns)
        return torch.zeros(len(logits), dtype=torch.int64)

    monkeypatch.setattr(token_choice, "choose_tokens", choose)
    sampler = KernelSampler(8)
    for slot in range(8):
        sampler.assign(slot, SamplingParams(temperature=slot / 4, top_k=slot, top_p=0.5 + slot / 16, seed=slot), 5)
    slots = np.arange(rows) + 2
    sampler.choose(torch.zeros((rows, 9), device=device), slots, slots + 10)
    temperatures, top_k, top_p, uniforms = (column.cpu() for column in handed)
    assert temperatures.tolist() == [slot / 4 for slot in slots]
    assert top_k.tolist() == slots.tolist()
    assert top_p.tolist() == [0.5 + slot / 16 for slot in slots]
    assert uniforms.tolist() == uniform_numbers(slots.astype(np.uint64), slots + 5).tolist()
    assert [column.dtype for column in handed] == [torch.float32, torch.int32, torch.float32, torch.float64]
    assert all(column.is_contiguous() and column.data_ptr() % 16 == 0 for column in handed)
    assert len({column.untyped_storage().data_ptr() for column in handed}) == 1


def test_a_temperature_too_small_for_float32_is_not_greedy(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_choice, "choose_tokens", lambda logits, temperatures, *others: temperatures)
    sampler = KernelSampler(2)
    sampler.assign(0, SamplingParams(temperature=1e-300), 5)
    sampler.assign(1, SamplingParams(), 5)
    found = sampler.choose(torch.zeros((2, 9), device=device), np.array([0, 1]), np.array([9, 9])).tolist()
    assert found == [torch.finfo(torch.float32).tiny, 0.0]
