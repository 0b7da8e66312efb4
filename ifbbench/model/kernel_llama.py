"""The Llama decoder with the kernels of `ifbbench.kernels`."""

import torch
from torch import Tensor

from ifbbench.kernels.context_attention import context_attention
from ifbbench.kernels.generation_attention import generation_attention
from ifbbench.kernels.rms_norm import add_rms_norm
from ifbbench.kernels.rotary_write import rotate_and_write
from ifbbench.kernels.swiglu import swiglu
from ifbbench.model.attention import LayerInputs
from ifbbench.model.config import ModelConfig
from ifbbench.model.llama import ForwardInputs, LlamaModel
from ifbbench.model.paged_batch import KernelShapes
from ifbbench.model.weights import LayerWeights, ModelWeights


class KernelLlama(LlamaModel):
    """`LlamaModel` for a GPU, with its own kernels between matrix products. It takes batches with
    `LayerInputs.paged`."""

    uses_kernels = True

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        super().__init__(config, weights)
        self.shapes = KernelShapes.of(config, self.device, self.dtype)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Logits [outputs, vocabulary] of `inputs.output_rows`. Writes the batch's keys and values to the cache."""
        weights, epsilon = self._weights, self.config.rms_norm_eps
        hidden = weights.embedding.index_select(0, inputs.tokens)
        normed = add_rms_norm(hidden, None, weights.layers[0].attention_norm, epsilon)
        next_norms = [layer.attention_norm for layer in weights.layers[1:]] + [weights.final_norm]
        for index, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            attention = self._kernel_attention(index, layer, normed, inputs.positions, inputs.layers[index])
            if index == self.config.num_layers - 1:
                # The cache is complete; from here on only the rows of wanted logits matter.
                attention = attention.index_select(0, inputs.output_rows)
                hidden = hidden.index_select(0, inputs.output_rows)
            normed = add_rms_norm(hidden, layer.attention_output(attention), layer.mlp_norm, epsilon)
            normed = add_rms_norm(hidden, layer.down(swiglu(layer.gate_up(normed))), next_norm, epsilon)
        return weights.lm_head(normed)

    def _kernel_attention(
        self, index: int, layer: LayerWeights, normed: Tensor, positions: Tensor, inputs: LayerInputs
    ) -> Tensor:
        """Attention output [tokens, heads · head size]."""
        config, batch = self.config, inputs.paged
        assert batch is not None, "a batch that was planned for PyTorch's attention"
        heads = layer.query_key_value(normed).view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        queries, keys, values = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        cache = inputs.cache.blocks(index)
        self._normalise(layer, queries, keys)
        angles = self._rotary.cos, self._rotary.sin
        rotate_and_write(heads, *angles, positions, batch.cache_rows, *cache)
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        context_attention(queries, keys, values, *cache, batch.block_tables, batch.tiles, output, self.shapes.context,
                          batch.window)  # fmt: skip
        first = batch.num_context_rows
        if batch.late_rows is not None:
            rotate_and_write(heads[:first], *angles, positions, batch.late_rows, *cache, rotates=False)
        generation_attention(queries[first:], *cache, batch.block_tables, batch.table_rows, batch.lengths,
                             output[first:], self.shapes.generation, batch.num_splits, batch.window)  # fmt: skip
        return output.flatten(1)
