"""Attention of a mixed batch over the KV cache, with PyTorch's scaled dot product attention."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ifbbench.engine.kv_cache.attention_window import AttentionWindow
from ifbbench.model.kv_cache import KvStorage
from ifbbench.model.operations import Operations, SpansInPlace


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """One attention call over `num_spans` spans, padded to the same numbers of queries and keys.

    query_rows: [spans · queries], packed row of each query; padding repeats the span's last.
    output_rows: [spans · queries], row of each result; padding goes to the row behind the batch's last.
    block_ids: [spans, blocks], blocks whose first `num_block_keys` places hold the keys; a slice if each span has one
    block and they are consecutive. None if keys are given one by one: those in the cache by `cache_rows` [spans, keys],
    followed by those of the batch itself by their packed rows `own_rows` [spans · keys]; None where there are none.
    mask: [spans, 1, queries, keys], true where a query sees a key; None if causality alone hides keys.
    """

    num_spans: int
    query_rows: Tensor
    output_rows: Tensor
    block_ids: Tensor | slice | None
    mask: Tensor | None
    num_block_keys: int = 0
    cache_rows: Tensor | None = None
    own_rows: Tensor | None = None

    @property
    def has_one_query(self) -> bool:
        """Whether each span has one query, as in the generation phase."""
        return self.mask is not None and len(self.query_rows) == self.num_spans


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Inputs of the attention kernels in addition to queries, keys and values. All tensors are int32, on the device.

    num_context_rows: packed rows of the context chunks, which come before the generation tokens. tiles: [tiles, 5], of
    the chunks (see `ifbbench.kernels.context_attention.plan_tiles`). block_tables: [sequences, blocks]. table_rows,
    lengths: [generation tokens], row of the block tables, and number of keys including the token's own. cache_rows:
    [tokens], where keys and values are stored before attention; negative: not stored. late_rows: [context rows], where
    those of the chunks are stored after their attention, because they overwrite keys that it reads; None if there are
    none.
    """

    window: AttentionWindow
    num_context_rows: int
    tiles: Tensor
    block_tables: Tensor
    table_rows: Tensor
    lengths: Tensor
    cache_rows: Tensor
    late_rows: Tensor | None
    num_splits: int


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Inputs of a layer's attention in addition to queries, keys and values; shared by all layers of a window.

    cache: storage of the layer's keys and values. cache_rows: int64 [tokens], where those of the batch are stored.
    groups_before: attention calls that read the cache before the batch is stored. in_place, groups: the calls after
    that. paged: the inputs of the attention kernels, which replace all of these.
    """

    cache: KvStorage
    cache_rows: Tensor
    groups: tuple[AttentionGroup, ...]
    groups_before: tuple[AttentionGroup, ...] = ()
    in_place: SpansInPlace | None = None
    paged: PagedBatch | None = None


def attend(
    layer: int, queries: Tensor, keys: Tensor, values: Tensor, inputs: LayerInputs, operations: Operations
) -> Tensor:
    """Attention output [tokens, heads · head size] of the packed batch in one layer; stores its keys and values.

    queries: [tokens, heads, head size]; keys, values: [tokens, KV heads, head size].
    """
    num_tokens = queries.shape[0]
    # One row more than tokens, for the results of padded queries.
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
        ).transpose(1, 2)
    output.index_copy_(0, group.output_rows, result.reshape(-1, *queries.shape[1:]))


def _attend_one_query(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention [spans, KV heads, query heads per KV head, head size] of one query per span.

    The query heads that share a KV head are passed as queries of one head, so that keys and values are read once.
    queries: [spans, heads, head size]; keys, values: [spans, KV heads, keys, head size].
    """
    shared = queries.view(queries.shape[0], keys.shape[1], -1, queries.shape[2])
    if queries.device.type == "cpu" and queries.dtype.itemsize == 2 and mask is not None:
        return _attend_in_16_bits(shared, keys, values, mask)
    return functional.scaled_dot_product_attention(shared, keys, values, attn_mask=mask)


def _attend_in_16_bits(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention as matrix products in 16 bits with the softmax in float32: on a CPU two to twenty times as fast as
    PyTorch's fused kernel, which converts every key to float32."""
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
