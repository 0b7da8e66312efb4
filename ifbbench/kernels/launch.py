"""Launching kernels: tile sizes, the number of splits, and errors that name the kernel and its tensors.

Tile sizes are computed, not tuned at run time, so that a start is quick. They are bound on a multiprocessor by shared
memory (227 KiB on Hopper (9.0), 163 KiB on A100 (8.0), about 99 KiB on other chips of 8.x) and by the 255 registers of
a thread, of which the float32 result tile, rows × head size, takes most.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ifbbench.errors import IfbbenchError

# `tl.dot` takes at least 16 rows, columns and summands; the interpreter would accept fewer, a GPU does not.
SMALLEST_DOT = 16
# Whether Triton runs kernels in its interpreter, on the CPU. It decides when a kernel is defined.
IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
# Keys per split: a shorter split costs more in the reduction than it saves.
SMALLEST_SPLIT = 256
MAX_SPLITS = 64
# Programs of the generation kernel per multiprocessor; two, so that one computes while the other waits for memory.
PROGRAMS_PER_MULTIPROCESSOR = 2


class KernelError(IfbbenchError, RuntimeError):
    """A kernel could not be compiled or started; the message names the kernel and its tensors."""


@contextmanager
def launching(kernel: str, **tensors: Tensor) -> Iterator[None]:
    """Raise KernelError, with shapes and data types of `tensors`, for errors inside; out of memory is raised as it is,
    because a smaller batch avoids it."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{name} {list(tensor.shape)} {tensor.dtype} on {tensor.device}".replace("torch.", "")
                           for name, tensor in tensors.items())
        raise KernelError(f"the kernel {kernel} failed ({type(error).__name__}: {error}); its tensors: {shapes}. "
                          "Run with --device cpu, and report this message.") from error


def upcasts(*tensors: Tensor) -> bool:
    """Whether dot products must be computed in float32: the interpreter's results for bfloat16 are wrong."""
    return IS_INTERPRETED and any(tensor.dtype == torch.bfloat16 for tensor in tensors)


def padded_size(size: int) -> int:
    """The power of two that a tile of `size` values needs, at least SMALLEST_DOT."""
    return max(SMALLEST_DOT, int(triton.next_power_of_2(size)))


def warps_per_row(width: int) -> int:
    """Warps of a program that holds a row of `width` values: a thread has 16 values, more from rows of 8,192 on."""
    return max(1, min(16, width // 512))


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 for other devices."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """rows: queries times grouped heads of a program. keys: per step. warps: of 32 threads. stages: tiles of keys and
    values that are loaded or computed at the same time. Rows and keys are powers of two of at least SMALLEST_DOT."""

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def cached_stages(self) -> int:
        """Triton's `num_stages` for keys in the cache: loading their block ids first takes every other stage."""
        return 2 * self.stages - 1


def context_tiles(head_size: int, value_bytes: int, capability: tuple[int, int]) -> AttentionTiles:
    """Tiles for context chunks, which are bound by arithmetic: as many rows as the registers hold, because all of them
    use each loaded key.

    value_bytes: of a query. capability: of the GPU, such as (9, 0).

    128 rows × 128 float32 results are 64 KiB, a quarter of the registers; 8 warps hold them in 64 registers a thread
    and form the two groups of four warps, 64 rows each, of Hopper's matrix instruction. Keys and values of a stage take
    2 · keys · head size · bytes: 64 × 128 in 16 bits are 32 KiB, so three stages and the queries take 128 KiB. Before
    Hopper keys pass through registers on their way to the matrix units, so there are half as many. Float32 has no
    matrix unit of full precision: products are summed in registers, so tiles are small.

    With other choices the compiler spilled registers (`tests.kernels.compile_only` shows them).
    """
    width = padded_size(head_size)
    is_hopper = capability[0] >= 9
    if value_bytes == 4:
        return AttentionTiles(rows=32, keys=32 if width <= 64 else 16, warps=4 if width <= 64 else 8, stages=1)
    if width <= 64:
        return AttentionTiles(rows=128, keys=64, warps=8, stages=3)
    if width <= 128:
        return AttentionTiles(rows=128, keys=64 if is_hopper else 32, warps=8, stages=3)
    return AttentionTiles(rows=128 if is_hopper else 64, keys=32, warps=8, stages=2)


def generation_tiles(head_size: int, group: int, value_bytes: int) -> AttentionTiles:
    """Tiles for generation tokens, which are bound by memory: rows for the `group` heads that share a KV head, and
    enough loads in flight to hide the memory's latency.

    value_bytes: of a cached key. An H100 needs about 3.3 TB/s · 0.7 µs / 132 = 18 KB in flight per multiprocessor. Keys
    and values of a stage take 2 · keys · head size · bytes, here at most 32 KiB. One stage is computed while the next
    is loaded, and with 70 KiB per program, two or three share a multiprocessor of Hopper.
    """
    width = padded_size(head_size)
    keys = max(SMALLEST_DOT, min(128, 16_384 // (width * value_bytes)))
    return AttentionTiles(rows=padded_size(group), keys=keys, warps=4 if value_bytes < 4 else 8, stages=3)


def choose_num_splits(num_kv_heads: int, max_keys: int, total_keys: int, num_multiprocessors: int) -> int:
    """Number of parts that the keys of each sequence are split into, so that every multiprocessor has work.

    max_keys: of the longest sequence. total_keys: of all sequences. A part is at most as long as an equal share of all
    work: 64 equal sequences with 8 KV heads are not split, a single one gets a part per multiprocessor, and a very long
    one among many short ones does not keep the other multiprocessors waiting.
    """
    share = -(-total_keys * num_kv_heads // (num_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR))
    return max(1, min(MAX_SPLITS, -(-max_keys // max(share, SMALLEST_SPLIT))))
