"""Attention of a mixed batch over the KV cache, with PyTorch's scaled dot product attention."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from ifbbench.model.attention_plan import AttentionGroup
from ifbbench.model.kv_cache import KvStorage

if TYPE_CHECKING:  # it imports Triton, which is not there everywhere
    from ifbbench.model.paged_batch import PagedBatch


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What a layer's attention needs beside queries, keys and values; the same for all layers of a window.

    cache: where the layer's keys and values are kept. cache_rows: int64 [tokens], where those of the batch go.
    groups_before: the attention calls that read the cache as it was before the batch. groups: those that come when the
    batch's own keys and values are in it. paged: what kernels need instead of all these groups, if it is they that run.
    """

    cache: KvStorage
    cache_rows: Tensor
    groups: tuple[AttentionGroup, ...]
    groups_before: tuple[AttentionGroup, ...] = ()
    paged: "PagedBatch | None" = None


def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, inputs: LayerInputs) -> Tensor:
    """Attention output [tokens, heads · head size] of the packed batch in one layer; writes its keys and values.

    queries: [tokens, heads, head size]; keys, values: [tokens, KV heads, head size].
    """
    num_tokens = queries.shape[0]
    # One row more than tokens: padded queries leave their results there.
    output = queries.new_empty((num_tokens + 1, *queries.shape[1:]))
    for group in inputs.groups_before:
        _attend_group(layer, queries, keys, values, inputs.cache, group, output)
    inputs.cache.write(layer, inputs.cache_rows, keys, values)
    for group in inputs.groups:
        _attend_group(layer, queries, keys, values, inputs.cache, group, output)
    return output[:num_tokens].flatten(1)


def _attend_group(
    layer: int, queries: Tensor, keys: Tensor, values: Tensor, cache: KvStorage, group: AttentionGroup, output: Tensor
) -> None:
    group_keys, group_values = _keys_and_values(layer, keys, values, cache, group)
    # enable_gqa: the CPU kernel reads shared KV heads in place, as fast as if they had been repeated.
    result = functional.scaled_dot_product_attention(
        _padded(queries, group.query_rows, group.num_spans), group_keys, group_values, attn_mask=group.mask,
        is_causal=group.mask is None, enable_gqa=queries.shape[1] != group_keys.shape[1],
    )
    output.index_copy_(0, group.output_rows, result.transpose(1, 2).flatten(0, 1))


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
