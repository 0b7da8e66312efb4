"""Code shared by the attention kernels: visible keys, addresses of keys in the cache, and a step of the online softmax.

Several consecutive queries together see the sink and a range that ends with the last query: numbered from 0, key number
j is position j if j < sink, else j + shift, with shift = max(0, first query's position + 1 − window size).
"""

import triton
import triton.language as tl

# Kernel parameters that differ from batch to batch: specialised, each value that is 1 or divisible by 16 would compile
# another kernel. Those of `AttentionWindow.numbers`, and the strides of block tables [sequences, blocks].
WINDOW_ARGUMENTS = ("window_size", "sink", "bubble", "capacity")
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
) -> tl.tensor:
    """Offsets in the cache of the keys of `positions`, in elements (int64: a cache may have more than 2³¹).

    Restates `AttentionWindow.places`, which a kernel cannot call.
    """
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
    keys: tl.tensor, values: tl.tensor, offsets: tl.tensor, is_real: tl.tensor, model_type: tl.constexpr,
    HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr, UPCAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Tiles [keys, WIDTH] of both, from the element offsets [keys]; zeros where `is_real` [keys] is false, because the
    memory may hold a NaN, which even a weight of 0 does not remove."""
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
