"""A Llama-family decoder that runs a mixed batch of context chunks and generation tokens in one packed pass."""

from dataclasses import dataclass

from torch import Tensor

from ifbbench.model.attention import LayerInputs, attend
from ifbbench.model.config import ModelConfig
from ifbbench.model.operations import Angles, Operations
from ifbbench.model.rotary import RotaryEmbedding
from ifbbench.model.weights import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """One iteration's packed batch on the device. All tensors are int64; for kernels, positions may be int32.

    tokens, positions: [tokens], the ids and their positions in their sequences. output_rows: [outputs], the packed rows
    whose logits are wanted; a row may come more than once. layers: for each layer of the model, where its keys and
    values go and which attention calls it makes; layers of one attention window have the same.
    """

    tokens: Tensor
    positions: Tensor
    output_rows: Tensor
    layers: tuple[LayerInputs, ...]


class LlamaModel:
    """Llama (Touvron et al., arXiv:2302.13971; grouped queries as in Llama 2 and 3), for inference only.

    Mistral is the same, Qwen 2.5 has biases on query, key and value, and Qwen 3 normalises heads of queries and keys.
    uses_kernels: whether its batches must be planned for the kernels of `ifbbench.kernels`.
    """

    uses_kernels = False

    def __init__(self, config: ModelConfig, weights: ModelWeights, operations: Operations | None = None) -> None:
        """operations: how the steps between matrix products are done, by PyTorch if not told."""
        self.config = config
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.operations = operations or Operations()
        self._weights = weights
        self._rotary = RotaryEmbedding(config, self.device)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Logits [outputs, vocabulary] of `inputs.output_rows`. Writes the batch's keys and values to the cache.

        Each weight is multiplied once, for all requests together.
        """
        hidden = self._embedded(inputs)
        angles = self.operations.angles(self._rotary, inputs.positions, hidden)
        last = self.config.num_layers - 1
        for index, layer in enumerate(self._weights.layers):
            attention = self._attention(index, layer, hidden, angles, inputs.layers[index])
            if index == last:
                # The cache is complete; from here on only the rows of wanted logits matter.
                attention = attention.index_select(0, inputs.output_rows)
                hidden = hidden.index_select(0, inputs.output_rows)
            hidden = hidden + layer.attention_output(attention)
            hidden = hidden + self._mlp(layer, hidden)
        return self._weights.lm_head(self._norm(hidden, self._weights.final_norm, self._weights.final_norm_bias))

    def _attention(
        self, index: int, layer: LayerWeights, hidden: Tensor, angles: Angles, inputs: LayerInputs
    ) -> Tensor:
        config = self.config
        fused = layer.query_key_value(self._norm(hidden, layer.attention_norm, layer.attention_norm_bias))
        heads = fused.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        values = heads[:, config.num_heads + config.num_kv_heads :]
        turned = self._positioned(layer, heads[:, : config.num_heads + config.num_kv_heads], angles)
        queries, keys = turned[:, : config.num_heads], turned[:, config.num_heads :]
        return attend(index, queries, keys, values, inputs, self.operations)

    def _embedded(self, inputs: ForwardInputs) -> Tensor:
        """What goes into the first layer, [tokens, hidden]."""
        return self._weights.embedding.index_select(0, inputs.tokens)

    def _positioned(self, layer: LayerWeights, heads: Tensor, angles: Angles) -> Tensor:
        """Query heads and behind them key heads [tokens, heads, head size], as attention takes them; they may be
        changed in place."""
        self._normalise(layer, heads[:, : self.config.num_heads], heads[:, self.config.num_heads :])
        return self.operations.rotate(heads, angles)

    def _normalise(self, layer: LayerWeights, queries: Tensor, keys: Tensor) -> None:
        """Queries and keys [tokens, heads, head size] by head, in place, in families that want it."""
        if layer.query_norm is not None and layer.key_norm is not None:
            queries.copy_(self._norm(queries, layer.query_norm))
            keys.copy_(self._norm(keys, layer.key_norm))

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        return layer.down(self.operations.swiglu(layer.gate_up(self._norm(hidden, layer.mlp_norm))))

    def _norm(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`hidden` [..., size] normalised over the last dimension. bias: for families whose norm has one."""
        return self.operations.norm(hidden, weight, self.config.rms_norm_eps)
