"""Attention of a mixed batch over the paged KV cache, with PyTorch's scaled dot product attention."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from ifbbench.model.attention_plan import AttentionGroup
from ifbbench.model.kv_cache import PagedKvCache


def attend(
    layer: int, queries: Tensor, keys: Tensor, values: Tensor, cache: PagedKvCache, groups: Sequence[AttentionGroup]
) -> Tensor:
    """Attention output [tokens, heads · head size] of the packed batch in one layer.

    queries: [tokens, heads, head size]; keys, values: [tokens, KV heads, head size], already in the cache.
    """
    num_tokens = queries.shape[0]
    # One row more than tokens: padded queries leave their results there.
    output = queries.new_empty((num_tokens + 1, *queries.shape[1:]))
    for group in groups:
        if group.block_ids is None:
            group_keys, group_values = _padded(keys, group), _padded(values, group)
        else:
            group_keys, group_values = cache.gather(layer, group.block_ids)
        # enable_gqa: the CPU kernel reads shared KV heads in place, as fast as if they had been repeated.
        result = functional.scaled_dot_product_attention(
            _padded(queries, group), group_keys, group_values, attn_mask=group.mask, is_causal=group.mask is None,
            enable_gqa=queries.shape[1] != group_keys.shape[1],
        )
        output.index_copy_(0, group.output_rows, result.transpose(1, 2).flatten(0, 1))
    return output[:num_tokens].flatten(1)


def _padded(heads: Tensor, group: AttentionGroup) -> Tensor:
    """[tokens, heads, head size] as [spans, heads, queries, head size]."""
    rows = heads.index_select(0, group.query_rows)
    return rows.view(group.num_spans, -1, *heads.shape[1:]).transpose(1, 2)
