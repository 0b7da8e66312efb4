"""Transfer of arrays to devices."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ifbbench.torch.model.tensors import to_device


def test_arrays_are_not_copied_on_the_host() -> None:
    array = np.arange(3)
    assert to_device(array, torch.device("cpu")).data_ptr() == array.ctypes.data


def test_transfer_to_a_gpu_uses_pinned_memory_and_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated GPU."""
    pinned: list[list[int]] = []
    copies: list[tuple[Tensor, dict[str, Any]]] = []

    def pin_memory(host: Tensor) -> Tensor:
        pinned.append(host.tolist())
        return host.clone()

    def copy(host: Tensor, device: torch.device, **options: Any) -> Tensor:
        copies.append((host, options))
        return host

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "to", copy)
    array = np.arange(3)
    to_device(array, torch.device("cuda"))
    assert pinned == [[0, 1, 2]]
    ((host, options),) = copies
    assert host.data_ptr() != array.ctypes.data
    assert options == {"non_blocking": True}
