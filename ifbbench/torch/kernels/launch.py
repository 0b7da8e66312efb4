"""Code shared by the kernels: errors that name the kernel, tile sizes, and the steps that both attention kernels have.

Tile sizes are computed, not tuned at run time, so that a start is quick. They are bound on a multiprocessor by shared
memory (227 KiB on Hopper (9.0), 163 KiB on A100 (8.0), about 99 KiB on other chips of 8.x) and by the 255 registers of
a thread, of which the float32 result tile, rows × head size, takes most.

Several consecutive queries together see the sink and a range that ends with the last query: numbered from 0, key number
j is position j if j < sink, else j + shift, with shift = max(0, first query's position + 1 − window size).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
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
# Parameters of the attention kernels that differ from batch to batch: specialised, each value that is 1 or divisible by
# 16 would compile another kernel. Strides of block tables [sequences, blocks], and `AttentionWindow.numbers`.
NOT_SPECIALISED = ("table_stride", "entry_stride", "window_size", "sink", "bubble", "capacity")


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
        shapes = ", ".join(
            f"{name} {list(tensor.shape)} {tensor.dtype} on {tensor.device}".replace("torch.", "")
            for name, tensor in tensors.items()
        )
        raise KernelError(
            f"the kernel {kernel} failed ({type(error).__name__}: {error}); its tensors: {shapes}. "
            "Run with --device cpu, and report this message."
        ) from error


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
    """Sizes of the parts in which an attention kernel works.

    rows: queries times grouped heads of a program.
    keys: number of keys of a step.
    warps: number of warps of 32 threads.
    stages: number of tiles of keys and values that are loaded or computed at the same time.

    Rows and keys are powers of two of at least SMALLEST_DOT.
    """

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

    value_bytes: bytes of a value of a query.
    capability: capability of the GPU, such as (9, 0).

    128 rows × 128 float32 results are 64 KiB, a quarter of the registers; 8 warps hold them in 64 registers a thread
    and form the two groups of four warps, 64 rows each, of Hopper's matrix instruction. Keys and values of a stage take
    2 · keys · head size · bytes: 64 × 128 in 16 bits are 32 KiB, so three stages and the queries take 128 KiB; on
    sm_100 the results are in tensor memory. Before Hopper, and on sm_120, which has neither of these instructions and
    99 KiB, keys pass through registers on their way to the matrix units, so there are half as many. Float32 has no
    matrix unit of full precision: products are summed in registers, so tiles are small.

    With other choices the compiler spilled registers (`tests.torch.kernels.compile_only` shows them).
    """
    width = padded_size(head_size)
    has_group_products = capability[0] in (9, 10)
    if value_bytes == 4:
        return AttentionTiles(rows=32, keys=32 if width <= 64 else 16, warps=4 if width <= 64 else 8, stages=1)
    if width <= 64:
        return AttentionTiles(rows=128, keys=64, warps=8, stages=3)
    if width <= 128:
        return AttentionTiles(rows=128, keys=64 if has_group_products else 32, warps=8, stages=3)
    return AttentionTiles(rows=128 if has_group_products else 64, keys=32, warps=8, stages=2)


def generation_tiles(head_size: int, group: int, value_bytes: int) -> AttentionTiles:
    """Tiles for generation tokens, which are bound by memory: rows for the `group` heads that share a KV head, and
    enough loads in flight to hide the memory's latency.

    value_bytes: bytes of a value of a cached key.

    An H100 needs about 3.3 TB/s · 0.7 µs / 132 = 18 KB in flight per multiprocessor. Keys and values of a stage take 2
    · keys · head size · bytes, here at most 32 KiB. One stage is computed while the next is loaded, and with 70 KiB per
    program, two or three share a multiprocessor of Hopper.
    """
    width = padded_size(head_size)
    keys = max(SMALLEST_DOT, min(128, 16_384 // (width * value_bytes)))
    return AttentionTiles(rows=padded_size(group), keys=keys, warps=4 if value_bytes < 4 else 8, stages=3)


def choose_num_splits(num_kv_heads: int, max_keys: int, total_keys: int, num_multiprocessors: int) -> int:
    """Number of parts that the keys of each sequence are split into, so that every multiprocessor has work.

    max_keys: number of keys of the longest sequence.
    total_keys: number of keys of all sequences.

    A part is at most as long as an equal share of all work: 64 equal sequences with 8 KV heads are not split, a single
    one gets a part per multiprocessor, and a very long one among many short ones does not keep the other
    multiprocessors waiting.
    """
    share = -(-total_keys * num_kv_heads // (num_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR))
    return max(1, min(MAX_SPLITS, -(-max_keys // max(share, SMALLEST_SPLIT))))


@triton.jit
def cache_offsets(
    positions: tl.tensor,
    is_real: tl.tensor,
    table: tl.tensor,
    entry_stride: tl.tensor,
    block_stride: tl.tensor,
    position_stride: tl.tensor,
    sink: tl.tensor,
    bubble: tl.tensor,
    capacity: tl.tensor,
    TOKENS_PER_BLOCK: tl.constexpr,
    IS_CYCLIC: tl.constexpr,
) -> tl.tensor:
    """Offsets in the cache of the keys of `positions`, in elements (int64: a cache may have more than 2³¹).

    Restates `AttentionWindow.cache_positions`, which a kernel cannot call.
    """
    stored = positions + tl.where(positions >= sink, bubble, 0)
    if IS_CYCLIC:
        first = sink + bubble
        stored = tl.where(stored < capacity, stored, first + (stored - first) % (capacity - first))
    blocks = tl.load(table + stored // TOKENS_PER_BLOCK * entry_stride, mask=is_real, other=0).to(tl.int64)
    return blocks * block_stride + (stored % TOKENS_PER_BLOCK) * position_stride


@triton.jit
def in_window(positions: tl.tensor, query_positions: tl.tensor, window_size: tl.tensor, sink: tl.tensor) -> tl.tensor:
    """Whether the window shows each query [rows] each key [keys], causality aside: [rows, keys]."""
    recent = positions[None, :] > query_positions[:, None] - (window_size - sink)
    return (positions < sink)[None, :] | recent


@triton.jit
def as_operand(loaded: tl.tensor, model_type: tl.constexpr, UPCAST: tl.constexpr) -> tl.tensor:
    """Loaded values as an operand of `tl.dot`: in the model's type, also if the cache has a narrower one."""
    if UPCAST:
        return loaded.to(tl.float32)
    return loaded.to(model_type)


@triton.jit
def load_keys_and_values(
    keys: tl.tensor,
    values: tl.tensor,
    offsets: tl.tensor,
    is_real: tl.tensor,
    model_type: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Tiles [keys, WIDTH] of both, from the element offsets [keys]; zeros where `is_real` [keys] is false, because the
    memory may hold a NaN, which even a weight of 0 does not remove."""
    dims = tl.arange(0, WIDTH)
    elements = offsets[:, None] + dims[None, :]
    is_value = is_real[:, None] & (dims < HEAD_SIZE)[None, :]
    key_tile = as_operand(tl.load(keys + elements, mask=is_value, other=0.0), model_type, UPCAST)
    value_tile = as_operand(tl.load(values + elements, mask=is_value, other=0.0), model_type, UPCAST)
    return key_tile, value_tile


@triton.jit
def softmax_step(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    visible: tl.tensor,
    scale: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    result: tl.tensor,
    IS_MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add one tile of keys (Milakov and Gimelshein, arXiv:1805.02867; Dao, FlashAttention-2, arXiv:2307.08691).

    With scores x = queries · keysᵀ · scale, where `scale` holds log₂ e so that e^x is one `exp2`: the new maximum is
    m' = max(m, max x); the weights are w = 2^(x − m'), the total becomes total · 2^(m − m') + Σ w and the result
    result · 2^(m − m') + w · values, all in float32. A row without keys has m = −∞, total 0 and result 0.
    """
    # "ieee": float32 without the 10-bit mantissa of tf32; other types ignore it.
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if IS_MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
    # −∞ − (−∞) is NaN; with any finite anchor the weight is 2^−∞ = 0.
    anchor = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) if IS_MASKED else new_maximum
    weights = tl.exp2(scores * scale - anchor[:, None])
    decay = tl.exp2(maximum - anchor)
    total = total * decay + tl.sum(weights, 1)
    result = tl.dot(weights.to(values.dtype), values, result * decay[:, None], input_precision="ieee")
    return new_maximum, total, result
