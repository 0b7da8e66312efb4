"""How fast a device multiplies and copies, measured in about a second."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ifbbench.clock import WallClock
from ifbbench.model.linear import make_linear

# Small beside what the engine's KV cache leaves free, and large beside caches.
MATRIX_SIZE = {"cpu": 1024, "cuda": 4096}
COPIED_BYTES = 1 << 28
REPEATS = 10
# In a row between two looks at the clock: what it takes to start and to wait for a GPU must not count for much.
IN_A_ROW = {"cpu": 1, "cuda": 20}


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """What large operations reach. flops_per_s: a square matrix product. bytes_per_s: a copy, read and written."""

    flops_per_s: float
    bytes_per_s: float

    @classmethod
    def measured(cls, device: torch.device, dtype: torch.dtype) -> "DeviceSpeed":
        """Of `device`, multiplying in `dtype`."""
        return cls(matmul_flops_per_s(device, dtype), copy_bytes_per_s(device))


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Of a large square matrix product, done as the model does its own."""
    size, generator = MATRIX_SIZE[device.type], torch.Generator(device).manual_seed(0)
    # Random: a GPU multiplies equal numbers a tenth faster, for they take less power.
    rows, weight = (torch.randn((size, size), device=device, generator=generator).to(dtype) for _ in range(2))
    product = make_linear(weight)
    with torch.inference_mode():
        return 2.0 * size**3 / _best_s(device, lambda: product(rows))


def copy_bytes_per_s(device: torch.device) -> float:
    """Of a large copy, read and written."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.numel() / _best_s(device, lambda: target.copy_(source))


def _best_s(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of the fastest of several times, after one that does not count."""
    clock, times, count = WallClock(), list[float](), IN_A_ROW[device.type]
    for _ in range(1 + REPEATS):
        start_s = clock.now()
        for _ in range(count):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((clock.now() - start_s) / count)
    return min(times[1:])
