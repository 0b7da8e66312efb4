"""Tensors made from host arrays, and zeroed memory in huge pages."""

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.settings.fields import memory_size

# Packed arrays start at multiples of 16 bytes: Triton compiles another kernel for an unaligned pointer.
ALIGNMENT = 4


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """`array` on `device`, copied in the order of the device's stream; a view of it if the device is the host.

    Copies to a GPU go through pinned memory, because the driver may synchronise before it copies pageable memory.
    PyTorch does not reuse the pinned memory before the copy is complete, so `array` may be changed at once.
    """
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def to_device_together(arrays: Sequence[NDArray[np.integer]], device: torch.device) -> list[Tensor]:
    """Flat arrays as int32 tensors on `device`, with one copy for all of them."""
    packed = packed_on_host(arrays, device).to(device, non_blocking=True)
    return unpacked(packed, [len(array) for array in arrays])


def packed_on_host(arrays: Sequence[NDArray[np.integer]], device: torch.device) -> Tensor:
    """Flat arrays as one int32 tensor in host memory, which is pinned if `device` is a GPU."""
    sizes = [aligned(len(array)) for array in arrays]
    host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    for array, piece in zip(arrays, torch.split(host, sizes), strict=True):
        piece.numpy()[: len(array)] = array
    return host


def unpacked(packed: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Views of the arrays of `lengths` in the result of `packed_on_host`."""
    pieces = torch.split(packed, [aligned(length) for length in lengths])
    return [piece[:length] for piece, length in zip(pieces, lengths, strict=True)]


def aligned(length: int) -> int:
    """`length` rounded up to a multiple of ALIGNMENT."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros on `device`; on a CPU in transparent huge pages where Linux grants them.

    Pages of 2 MiB instead of 4 KiB avoid most address translations. MemoryError if there is not enough memory.
    """
    count = torch.Size(shape).numel()
    if device.type != "cpu" or count == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, device=device, dtype=dtype)
    try:
        memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {memory_size(count * dtype.itemsize)}") from error
    memory.madvise(mmap.MADV_HUGEPAGE)
    # Written now, so that no page is allocated during a run.
    return torch.frombuffer(memory, dtype=dtype).view(shape).zero_()
