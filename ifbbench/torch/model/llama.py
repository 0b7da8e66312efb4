"""Decoders of the Llama family and GPT-2, and their attention over the KV cache with PyTorch or the C kernels.

One pass runs a mixed batch of context chunks and generation tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.models.config import ModelConfig
from ifbbench.models.lora_modules import LayerProduct
from ifbbench.torch.model.attention_plan import AttentionGroup, WindowPlan
from ifbbench.torch.model.kv_cache import KvStorage
from ifbbench.torch.model.layer_weights import LayerWeights
from ifbbench.torch.model.lora import BatchAdapters, adapted
from ifbbench.torch.model.operations import Angles, CpuOperations, Operations, RotaryEmbedding
from ifbbench.torch.model.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Inputs of the attention kernels in addition to queries, keys and values. All tensors are int32, on the device.

    num_context_rows: packed rows of the context chunks, which come before the generation tokens.
    tiles: [tiles, 5], tiles of the chunks (see `ifbbench.torch.kernels.context_attention.TILE_FIELDS`).
    block_tables: [sequences, blocks].
    table_rows, lengths: [generation tokens], row of the block tables, and number of keys including the token's own.
    cache_rows: [tokens], where keys and values are stored before attention; negative for those that are not stored.
    late_rows: [context rows], where those of the chunks are stored after their attention, because they overwrite keys
        that it reads; None if there are none.
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

    cache: storage of the layer's keys and values.
    cache_rows: [tokens], where those of the batch are stored; int64, for the kernels int32.
    plan: a `PagedBatch` for models that use the kernels.
    """

    cache: KvStorage
    cache_rows: Tensor
    plan: WindowPlan | PagedBatch


@dataclass(frozen=True, slots=True)
class VirtualTokens:
    """Tokens that bring their embedding with them (prompt tuning).

    rows: int64 [virtual tokens], packed rows.
    embeddings: float [virtual tokens, hidden].
    """

    rows: Tensor
    embeddings: Tensor


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """One iteration's packed batch on the device. All tensors are int64; positions for kernels may be int32.

    tokens, positions: [tokens], token ids and their positions in their sequences.
    output_rows: [outputs], packed rows to return logits of; a row may occur several times.
    layers: the attention inputs of each layer of the model; layers of the same attention window share them.
    virtual: None if all tokens are of the vocabulary.
    adapters: LoRA adapters of the rows, None if no request has one.
    """

    tokens: Tensor
    positions: Tensor
    output_rows: Tensor
    layers: tuple[LayerInputs, ...]
    virtual: VirtualTokens | None = None
    adapters: BatchAdapters | None = None


class LlamaModel:
    """Llama (Touvron et al., arXiv:2302.13971; grouped queries as in Llama 2 and 3), for inference only.

    Mistral is the same, Qwen 2.5 adds biases of query, key and value, Qwen 3 normalises heads of queries and keys.

    uses_kernels: whether batches must be planned for `ifbbench.torch.kernels` (`PagedBatch`).
    part: what of the model it computes; None if all.
    """

    uses_kernels = False

    def __init__(self, config: ModelConfig, weights: ModelWeights, operations: Operations | None = None) -> None:
        """config: shape of the part that `weights` are.
        operations: steps between matrix products (default: PyTorch's).
        """
        self.config = config
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.operations = operations or Operations()
        self._weights = weights
        self._rotary = RotaryEmbedding(config, self.device)
        self.part = part = weights.part
        # Adds up the results of products whose inputs the ranks share.
        self._sum: Callable[[Tensor], Tensor] = _unchanged if part is None or part.tp_size == 1 else part.links.sum

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Logits [outputs, vocabulary] of `inputs.output_rows`; no rows from a part that is not the last stage. Stores
        the batch's keys and values in the cache.

        Each weight is read once for all requests together.
        """
        hidden = self._embedded(inputs)
        angles = self.operations.angles(self._rotary, inputs.positions, hidden)
        part, adapters = self.part, inputs.adapters
        # All rows of a part whose hidden state goes to the next stage are needed.
        last = self.config.num_layers - 1 if part is None or part.is_last else None
        for index, layer in enumerate(self._weights.layers):
            attention = self._attention(index, layer, hidden, angles, inputs)
            if index == last:
                # The cache is complete. From here on only the rows of wanted logits are needed.
                attention = attention.index_select(0, inputs.output_rows)
                hidden = hidden.index_select(0, inputs.output_rows)
                adapters = adapters and adapters.of_outputs
            output = adapted(layer.attention_output, attention, adapters, index, LayerProduct.ATTENTION_OUTPUT)
            hidden = hidden + self._sum(output)
            hidden = hidden + self._mlp(index, layer, hidden, adapters)
        if part is not None and not part.is_last:
            part.links.send(hidden)
            return hidden[:0]
        return self._weights.lm_head(self._norm(hidden, self._weights.final_norm, self._weights.final_norm_bias))

    def _attention(
        self, index: int, layer: LayerWeights, hidden: Tensor, angles: Angles, inputs: ForwardInputs
    ) -> Tensor:
        config, normed = self.config, self._norm(hidden, layer.attention_norm, layer.attention_norm_bias)
        fused = adapted(layer.query_key_value, normed, inputs.adapters, index, LayerProduct.QUERY_KEY_VALUE)
        heads = fused.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        values = heads[:, config.num_heads + config.num_kv_heads :]
        rotated = self._positioned(layer, heads[:, : config.num_heads + config.num_kv_heads], angles)
        queries, keys = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        return attend(index, queries, keys, values, inputs.layers[index], self.operations)

    def _embedded(self, inputs: ForwardInputs) -> Tensor:
        """Input of the first layer, [tokens, hidden]."""
        embedding, part = self._weights.embedding, self.part
        hidden = embedding.index_select(0, inputs.tokens) if part is None else part.embedded(embedding, inputs.tokens)
        if (virtual := inputs.virtual) is not None and (part is None or part.is_first):
            hidden.index_copy_(0, virtual.rows, virtual.embeddings.to(hidden.dtype))
        return hidden

    def _positioned(self, layer: LayerWeights, heads: Tensor, angles: Angles) -> Tensor:
        """Query heads followed by key heads [tokens, heads, head size], normalised and rotated; may be changed in
        place."""
        self._normalise(layer, heads[:, : self.config.num_heads], heads[:, self.config.num_heads :])
        return self.operations.rotate(heads, angles)

    def _normalise(self, layer: LayerWeights, queries: Tensor, keys: Tensor) -> None:
        """Normalise each head of queries and keys [tokens, heads, head size] in place, in families that do so."""
        if layer.query_norm is not None and layer.key_norm is not None:
            queries.copy_(self._norm(queries, layer.query_norm))
            keys.copy_(self._norm(keys, layer.key_norm))

    def _mlp(self, index: int, layer: LayerWeights, hidden: Tensor, adapters: BatchAdapters | None) -> Tensor:
        normed = self._norm(hidden, layer.mlp_norm)
        activated = self.operations.swiglu(adapted(layer.gate_up, normed, adapters, index, LayerProduct.GATE_UP))
        return self._sum(adapted(layer.down, activated, adapters, index, LayerProduct.DOWN))

    def _norm(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`hidden` [..., size] normalised over the last dimension. bias: GPT-2's."""
        return self.operations.norm(hidden, weight, self.config.rms_norm_eps)


class Gpt2Model(LlamaModel):
    """GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019), for inference only.

    Differences to Llama: learned positions instead of rotary embedding, LayerNorm, and an MLP without a gate.
    """

    def _embedded(self, inputs: ForwardInputs) -> Tensor:
        assert self._weights.position_embedding is not None
        hidden, part = super()._embedded(inputs), self.part
        if part is not None and not part.is_first:
            return hidden
        return hidden + self._weights.position_embedding.index_select(0, inputs.positions)

    def _positioned(self, layer: LayerWeights, heads: Tensor, angles: Angles) -> Tensor:
        return heads

    def _mlp(self, index: int, layer: LayerWeights, hidden: Tensor, adapters: BatchAdapters | None) -> Tensor:
        up = layer.gate_up(self._norm(hidden, layer.mlp_norm, layer.mlp_norm_bias))
        activated = functional.gelu(up, approximate="none" if self.config.activation == "gelu" else "tanh")
        return self._sum(layer.down(activated))

    def _norm(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.layer_norm(hidden, weight.shape, weight, bias, self.config.rms_norm_eps)


def _unchanged(rows: Tensor) -> Tensor:
    return rows


def attend(
    layer: int, queries: Tensor, keys: Tensor, values: Tensor, inputs: LayerInputs, operations: Operations
) -> Tensor:
    """Attention output [tokens, heads · head size] of the packed batch in one layer; stores its keys and values.

    queries: [tokens, heads, head size].
    keys, values: [tokens, KV heads, head size].
    """
    num_tokens, plan = queries.shape[0], inputs.plan
    assert isinstance(plan, WindowPlan), "a batch planned for the kernels"
    # One row more than tokens, for the results of padded queries.
    output = queries.new_empty((num_tokens + 1, *queries.shape[1:]))
    for group in plan.before:
        _attend_group(layer, queries, keys, values, inputs.cache, group, output)
    if plan.in_place is None:
        inputs.cache.write(layer, inputs.cache_rows, keys, values)
    else:
        assert isinstance(operations, CpuOperations)
        blocks = inputs.cache.blocks(layer)
        operations.write(keys, values, *blocks, inputs.cache_rows)
        operations.attend(queries, *blocks, plan.in_place, output)
    for group in plan.after:
        _attend_group(layer, queries, keys, values, inputs.cache, group, output)
    return output[:num_tokens].flatten(1)


def _attend_group(
    layer: int, queries: Tensor, keys: Tensor, values: Tensor, cache: KvStorage, group: AttentionGroup, output: Tensor
) -> None:
    group_keys, group_values = _keys_and_values(layer, keys, values, cache, group)
    if group.mask is not None and len(group.query_rows) == group.num_spans:
        result = _attend_one_query(queries.index_select(0, group.query_rows), group_keys, group_values, group.mask)
    else:
        # enable_gqa: the CPU kernel reads shared KV heads in place, as fast as if they had been repeated.
        result = functional.scaled_dot_product_attention(
            _padded(queries, group.query_rows, group.num_spans),
            group_keys,
            group_values,
            attn_mask=group.mask,
            is_causal=group.mask is None,
            enable_gqa=queries.shape[1] != group_keys.shape[1],
        ).transpose(1, 2)
    output.index_copy_(0, group.output_rows, result.reshape(-1, *queries.shape[1:]))


def _attend_one_query(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention [spans, KV heads, query heads per KV head, head size] of one query per span.

    The query heads that share a KV head are passed as queries of one head, so that keys and values are read once.

    queries: [spans, heads, head size].
    keys, values: [spans, KV heads, keys, head size].
    """
    shared = queries.view(queries.shape[0], keys.shape[1], -1, queries.shape[2])
    if queries.device.type != "cpu" or queries.dtype.itemsize != 2:
        return functional.scaled_dot_product_attention(shared, keys, values, attn_mask=mask)
    # Matrix products in 16 bits with the softmax in float32: on a CPU two to twenty times as fast as PyTorch's fused
    # kernel, which converts every key to float32.
    scores = torch.matmul(shared, keys.contiguous().transpose(2, 3)).float().mul_(queries.shape[-1] ** -0.5)
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
