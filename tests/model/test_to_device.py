"""Arrays on their way to a device."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ifbbench.model.to_device import to_device


def test_on_the_host_nothing_is_copied() -> None:
    array = np.arange(3)
    assert to_device(array, torch.device("cpu")).data_ptr() == array.ctypes.data


def test_to_a_gpu_it_goes_through_pinned_memory_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU that is pretended."""
    pinned: list[list[int]] = []
    copies: list[tuple[Tensor, dict[str, Any]]] = []

    def pin_memory(host: Tensor) -> Tensor:
        pinned.append(host.tolist())
        return host.clone()

    def copy(host: Tensor, device: torch.device, **how: Any) -> Tensor:
        copies.append((host, how))
        return host

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "to", copy)
    array = np.arange(3)
    to_device(array, torch.device("cuda"))
    assert pinned == [[0, 1, 2]]
    ((host, how),) = copies
    assert host.data_ptr() != array.ctypes.data
    assert how == {"non_blocking": True}
