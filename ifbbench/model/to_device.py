"""From arrays of the host to tensors on a device, in line with the device's work and without waiting for it."""

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Number = TypeVar("Number", bound=np.generic)


def to_device(array: NDArray[Number], device: torch.device) -> Tensor:
    """`array` on `device`; in the host's memory a view of it.

    To a GPU it goes through pinned memory: the driver may wait for all work in line before it copies from any other.
    PyTorch gives pinned memory to nobody else before the copy is done, so the array may change at once.
    """
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
