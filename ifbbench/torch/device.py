"""A device: its free memory, the error when that runs out, and how fast it multiplies and copies."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ifbbench.clock import WallClock
from ifbbench.errors import InputError
from ifbbench.settings.fields import memory_size
from ifbbench.torch.host import available_host_bytes
from ifbbench.torch.model.linear import make_linear

# Texts of PyTorch, cuBLAS and the CUDA driver for exhausted memory, where they have no error class for it.
OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "DefaultCPUAllocator",
    "ALLOC_FAILED",
    "Storage size calculation overflowed",
)
REQUESTED_SIZE = re.compile(r"[Tt]ried to allocate ([\d.,]+) ?(\w+)")

# Measured speed: a matrix larger than caches, and small beside the memory that the KV cache leaves.
MATRIX_SIZE = {"cpu": 1024, "cuda": 4096}
COPIED_BYTES = 1 << 28
REPEATS = 10
# Operations between two readings of the clock, to make the start and the wait for a GPU negligible.
OPERATIONS_PER_REPEAT = {"cpu": 1, "cuda": 20}


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, or of the host."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_host_bytes()


class OutOfMemory(InputError):
    """The device has too little memory for the settings."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` or its cause is about memory. (A failure during the capture of a CUDA graph makes the end of the
    capture fail too.)"""
    cause = error.__cause__ or error.__context__
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or (isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY_TEXTS))
        or (cause is not None and is_out_of_memory(cause))
    )


@contextmanager
def needing_memory(doing: str, advice: str, device: torch.device) -> Iterator[None]:
    """Convert errors about memory to OutOfMemory.

    doing: what needs the memory.
    advice: what the user can do.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        found = REQUESTED_SIZE.search(str(error))
        asked = "more was asked for"
        if found:
            size = memory_size(int(found[1])) if found[2] == "bytes" else f"{found[1]} {found[2]}"
            asked = f"{size} more were asked for"
        raise OutOfMemory(
            f"{device} is out of memory while {doing}: {asked}, and {memory_size(free_bytes(device))} "
            f"are free; {advice}."
        ) from error


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a large square matrix product, as the model does its own."""
    size, generator = MATRIX_SIZE[device.type], torch.Generator(device).manual_seed(0)
    # Random, because a GPU multiplies equal numbers a tenth faster: they take less power.
    rows, weight = (torch.randn((size, size), device=device, generator=generator).to(dtype) for _ in range(2))
    product = make_linear(weight)
    with torch.inference_mode():
        return 2.0 * size**3 / _best_s(device, lambda: product(rows))


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes per second of a large copy, read and written."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.numel() / _best_s(device, lambda: target.copy_(source))


def _best_s(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of the fastest repeat, after one to warm up."""
    clock, times, count = WallClock(), list[float](), OPERATIONS_PER_REPEAT[device.type]
    for _ in range(1 + REPEATS):
        start_s = clock.now()
        for _ in range(count):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((clock.now() - start_s) / count)
    return min(times[1:])
