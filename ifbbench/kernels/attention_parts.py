"""What the attention kernels have in common: which keys are seen, where a key lies, and a step of the online softmax.

What several queries in a row see together is the sink and a stretch that ends with the last one: numbered from 0, key
number j is position j if j < sink, else j + shift, with shift = max(0, first query's position + 1 − window size).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ifbbench.engine.kv_cache.attention_window import AttentionWindow

EVERYTHING = AttentionWindow(tokens_per_block=1)
# What the kernels call a window's numbers.
WINDOW_ARGUMENTS = ("window_size", "sink", "bubble", "capacity")
# And the strides of block tables [sequences, blocks].
TABLE_ARGUMENTS = ("table_stride", "entry_stride")


@triton.jit
def key_positions(numbers: tl.tensor, shift: tl.tensor, sink: tl.tensor) -> tl.tensor:
    """Position of each key number."""
    return numbers + tl.where(numbers < sink, 0, shift)


@triton.jit
def cache_offsets(
    positions: tl.tensor, is_real: tl.tensor, table: tl.tensor, entry_stride: tl.tensor, block_stride: tl.tensor,
    place_stride: tl.tensor, sink: tl.tensor, bubble: tl.tensor, capacity: tl.tensor, TOKENS_PER_BLOCK: tl.constexpr,
    IS_CYCLIC: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Where the keys of `positions` begin in the cache, in elements (int64: a cache may have more than 2³¹).

    Restates `AttentionWindow.places`, which a kernel cannot call."""
    places = positions + tl.where(positions >= sink, bubble, 0)
    if IS_CYCLIC:
        first = sink + bubble
        places = tl.where(places < capacity, places, first + (places - first) % (capacity - first))
    blocks = tl.load(table + places // TOKENS_PER_BLOCK * entry_stride, mask=is_real, other=0).to(tl.int64)
    return blocks * block_stride + (places % TOKENS_PER_BLOCK) * place_stride


@triton.jit
def in_window(
    positions: tl.tensor, query_positions: tl.tensor, window_size: tl.tensor, sink: tl.tensor
) -> tl.tensor:
    """Whether each query [rows] would see each key [keys], were it early enough: [rows, keys]."""
    recent = positions[None, :] > query_positions[:, None] - (window_size - sink)
    return (positions < sink)[None, :] | recent


@triton.jit
def as_operand(loaded: tl.tensor, model_type: tl.constexpr, UPCAST: tl.constexpr) -> tl.tensor:
    """What was loaded as a factor of `tl.dot`: in the model's type, also where the cache has a narrower one."""
    if UPCAST:
        return loaded.to(tl.float32)
    return loaded.to(model_type)


@triton.jit
def load_keys_and_values(
    keys: tl.tensor, values: tl.tensor, offsets: tl.tensor, is_real: tl.tensor, model_type: tl.constexpr,
    HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr, UPCAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Tiles [keys, WIDTH] of both, from the element offsets [keys]; zeros where `is_real` [keys] is false, for what
    lies there may be no number, and no weight, not even 0, would undo that."""
    dims = tl.arange(0, WIDTH)
    places = offsets[:, None] + dims[None, :]
    is_value = is_real[:, None] & (dims < HEAD_SIZE)[None, :]
    key_tile = as_operand(tl.load(keys + places, mask=is_value, other=0.0), model_type, UPCAST)
    value_tile = as_operand(tl.load(values + places, mask=is_value, other=0.0), model_type, UPCAST)
    return key_tile, value_tile


@triton.jit
def softmax_step(
    queries: tl.tensor, keys: tl.tensor, values: tl.tensor, visible: tl.tensor, scale: tl.tensor,
    maximum: tl.tensor, total: tl.tensor, result: tl.tensor, IS_MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Take one tile of keys in (Milakov and Gimelshein, arXiv:1805.02867; Dao, FlashAttention-2, arXiv:2307.08691).

    With scores x = queries · keysᵀ · scale, where `scale` holds log₂ e so that e^x is one `exp2`: the new maximum is
    m' = max(m, max x); the weights are w = 2^(x − m'), the total becomes total · 2^(m − m') + Σ w and the result
    result · 2^(m − m') + w · values, all in float32. A row that has seen nothing has m = −∞, total 0 and result 0.
    """
    # "ieee": float32 without the 10-bit mantissa of tf32; the other types do not look at it.
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if IS_MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
    # −∞ − (−∞) is no number; any finite anchor makes it 2^−∞ = 0.
    anchor = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) if IS_MASKED else new_maximum
    weights = tl.exp2(scores * scale - anchor[:, None])
    decay = tl.exp2(maximum - anchor)
    total = total * decay + tl.sum(weights, 1)
    result = tl.dot(weights.to(values.dtype), values, result * decay[:, None], input_precision="ieee")
    return new_maximum, total, result


def keys_seen(first_query: int, last_query: int, window: AttentionWindow, device: torch.device) -> Tensor:
    """Positions that queries at `first_query` to `last_query` see together, int64 [keys], ascending."""
    shift = max(0, first_query + 1 - window.size) if window.is_limited else 0
    numbers = torch.arange(last_query + 1 - shift, device=device)
    return torch.where(numbers < window.sink, numbers, numbers + shift)


def is_seen(keys: Tensor, queries: Tensor, window: AttentionWindow) -> Tensor:
    """Whether the query at each position [queries] sees the key at each position [keys]: [queries, keys]."""
    causal = keys <= queries[:, None]
    if not window.is_limited:
        return causal
    return causal & ((keys < window.sink) | (keys > queries[:, None] - (window.size - window.sink)))


def gather_cached(cache: Tensor, table: Tensor, positions: Tensor, window: AttentionWindow) -> Tensor:
    """What the cache [blocks, tokens per block, KV heads, head size] holds of `positions` [keys] of the sequence with
    the blocks `table` [blocks of a sequence]: [keys, KV heads, head size]."""
    places = torch.from_numpy(window.places(positions.cpu().numpy())).to(positions.device)
    size = cache.shape[1]
    return cache[table[places // size].long(), places % size]


def attend_reference(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    """softmax(queries · keysᵀ · scale, where visible) · values, in float32 at least: [queries, heads, head size].

    queries: [queries, heads, head size]. keys, values: [keys, KV heads, head size], of any type. visible: [queries,
    keys]. Query head h uses KV head h // (heads / KV heads).
    """
    wide = torch.promote_types(queries.dtype, torch.float32)
    group = queries.shape[1] // keys.shape[1]
    keys, values = (part.to(wide).repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.to(wide), keys) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(queries.dtype)
