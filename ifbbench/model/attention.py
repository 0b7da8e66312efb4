"""Attention of a mixed batch over the KV cache, with PyTorch's scaled dot product attention."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from ifbbench.model.attention_plan import AttentionGroup, SpansInPlace
from ifbbench.model.kv_cache import KvStorage
from ifbbench.model.operations import Operations

if TYPE_CHECKING:  # it imports Triton, which is not there everywhere
    from ifbbench.model.paged_batch import PagedBatch


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What a layer's attention needs beside queries, keys and values; the same for all layers of a window.

    cache: where the layer's keys and values are kept. cache_rows: int64 [tokens], where those of the batch go.
    groups_before: the attention calls that read the cache as it was before the batch. groups: those that come when the
    batch's own keys and values are in it, beside what is read in place. paged: what kernels need instead of all these,
    if it is they that run.
    """

    cache: KvStorage
    cache_rows: Tensor
    groups: tuple[AttentionGroup, ...]
    groups_before: tuple[AttentionGroup, ...] = ()
    in_place: SpansInPlace | None = None
    paged: "PagedBatch | None" = None


def attend(
    layer: int, queries: Tensor, keys: Tensor, values: Tensor, inputs: LayerInputs, operations: Operations
) -> Tensor:
    """Attention output [tokens, heads · head size] of the packed batch in one layer; writes its keys and values.

    queries: [tokens, heads, head size]; keys, values: [tokens, KV heads, head size].
    """
    num_tokens = queries.shape[0]
    # One row more than tokens: padded queries leave their results there.
    output = queries.new_empty((num_tokens + 1, *queries.shape[1:]))
    for group in inputs.groups_before:
        _attend_group(layer, queries, keys, values, inputs.cache, group, output)
    if inputs.in_place is None:
        inputs.cache.write(layer, inputs.cache_rows, keys, values)
    else:
        blocks = inputs.cache.blocks(layer)
        operations.write(keys, values, *blocks, inputs.cache_rows)
        operations.attend(queries, *blocks, inputs.in_place, output)
    for group in inputs.groups:
        _attend_group(layer, queries, keys, values, inputs.cache, group, output)
    return output[:num_tokens].flatten(1)


def _attend_group(
    layer: int, queries: Tensor, keys: Tensor, values: Tensor, cache: KvStorage, group: AttentionGroup, output: Tensor
) -> None:
    group_keys, group_values = _keys_and_values(layer, keys, values, cache, group)
    if group.has_one_query:
        result = _attend_one_query(queries.index_select(0, group.query_rows), group_keys, group_values, group.mask)
    else:
        # enable_gqa: the CPU kernel reads shared KV heads in place, as fast as if they had been repeated.
        result = functional.scaled_dot_product_attention(
            _padded(queries, group.query_rows, group.num_spans), group_keys, group_values, attn_mask=group.mask,
            is_causal=group.mask is None, enable_gqa=queries.shape[1] != group_keys.shape[1],
        ).transpose(1, 2)  # fmt: skip
    output.index_copy_(0, group.output_rows, result.reshape(-1, *queries.shape[1:]))


def _attend_one_query(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention [spans, KV heads, heads that share one, head size] of one query a span.

    The query heads that share a KV head go in as if they were queries of one head, so that keys and values are read
    once. queries: [spans, heads, head size]; keys, values: [spans, KV heads, keys, head size].
    """
    shared = queries.view(queries.shape[0], keys.shape[1], -1, queries.shape[2])
    if queries.device.type == "cpu" and queries.dtype.itemsize == 2 and mask is not None:
        return _attend_in_halves(shared, keys, values, mask)
    return functional.scaled_dot_product_attention(shared, keys, values, attn_mask=mask)


def _attend_in_halves(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The same as products of matrices of 16-bit floats, with the softmax in float32: on a CPU two to twenty times as
    fast as PyTorch's fused kernel, which turns every key into float32."""
    scores = torch.matmul(queries, keys.contiguous().transpose(2, 3)).float().mul_(queries.shape[-1] ** -0.5)
    weights = scores.masked_fill_(~mask, -torch.inf).softmax(dim=-1).to(values.dtype)
    return torch.matmul(weights, values.contiguous())


def _keys_and_values(
    layer: int, keys: Tensor, values: Tensor, cache: KvStorage, group: AttentionGroup
) -> tuple[Tensor, Tensor]:
    """Each [spans, KV heads, keys, head size]."""
    if group.block_ids is not None:
        return cache.gather(layer, group.block_ids, group.num_block_keys)
    if group.own_rows is None:
        assert group.cache_rows is not None
        return cache.gather_rows(layer, group.cache_rows)
    own_keys = _padded(keys, group.own_rows, group.num_spans)
    own_values = _padded(values, group.own_rows, group.num_spans)
    if group.cache_rows is None:
        return own_keys, own_values
    cached_keys, cached_values = cache.gather_rows(layer, group.cache_rows)
    return torch.cat([cached_keys, own_keys], dim=2), torch.cat([cached_values, own_values], dim=2)


def _padded(heads: Tensor, rows: Tensor, num_spans: int) -> Tensor:
    """The `rows` [spans · tokens] of `heads` [rows, heads, head size] as [spans, heads, tokens, head size]."""
    return heads.index_select(0, rows).view(num_spans, -1, *heads.shape[1:]).transpose(1, 2)
