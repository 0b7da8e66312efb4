"""Decoders of the Llama family and GPT-2. One pass runs a mixed batch of context chunks and generation tokens."""

from dataclasses import dataclass
from importlib.util import find_spec

from torch import Tensor
from torch.nn import functional

from ifbbench.model.attention import LayerInputs, attend
from ifbbench.model.config import GPT2, ModelConfig
from ifbbench.model.operations import Angles, Operations, RotaryEmbedding, operations_for
from ifbbench.model.weights import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """One iteration's packed batch on the device. All tensors are int64; positions for kernels may be int32.

    tokens, positions: [tokens], token ids and their positions in their sequences. output_rows: [outputs], packed rows
    to return logits of; a row may occur several times. layers: the attention inputs of each layer of the model; layers
    of the same attention window share them.
    """

    tokens: Tensor
    positions: Tensor
    output_rows: Tensor
    layers: tuple[LayerInputs, ...]


def make_model(config: ModelConfig, weights: ModelWeights) -> "LlamaModel":
    """The model of `config.architecture` in the fastest implementation for the device of `weights`: the C kernels on a
    CPU, Triton's on a GPU if Triton is installed."""
    device = weights.embedding.device
    operations = operations_for(device, weights.embedding.dtype)
    if config.architecture == GPT2:
        return Gpt2Model(config, weights, operations)
    if device.type != "cuda" or find_spec("triton") is None:
        return LlamaModel(config, weights, operations)
    from ifbbench.model.kernel_llama import KernelLlama

    return KernelLlama(config, weights)


class LlamaModel:
    """Llama (Touvron et al., arXiv:2302.13971; grouped queries as in Llama 2 and 3), for inference only.

    Mistral is the same, Qwen 2.5 adds biases of query, key and value, Qwen 3 normalises heads of queries and keys.
    uses_kernels: whether batches must be planned for `ifbbench.kernels` (`LayerInputs.paged`).
    """

    uses_kernels = False

    def __init__(self, config: ModelConfig, weights: ModelWeights, operations: Operations | None = None) -> None:
        """operations: the steps between matrix products (default: PyTorch's)."""
        self.config = config
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.operations = operations or Operations()
        self._weights = weights
        self._rotary = RotaryEmbedding(config, self.device)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Logits [outputs, vocabulary] of `inputs.output_rows`. Stores the batch's keys and values in the cache.

        Each weight is read once for all requests together.
        """
        hidden = self._embedded(inputs)
        angles = self.operations.angles(self._rotary, inputs.positions, hidden)
        last = self.config.num_layers - 1
        for index, layer in enumerate(self._weights.layers):
            attention = self._attention(index, layer, hidden, angles, inputs.layers[index])
            if index == last:
                # The cache is complete. From here on only the rows of wanted logits are needed.
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
        rotated = self._positioned(layer, heads[:, : config.num_heads + config.num_kv_heads], angles)
        queries, keys = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        return attend(index, queries, keys, values, inputs, self.operations)

    def _embedded(self, inputs: ForwardInputs) -> Tensor:
        """Input of the first layer, [tokens, hidden]."""
        return self._weights.embedding.index_select(0, inputs.tokens)

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

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        return layer.down(self.operations.swiglu(layer.gate_up(self._norm(hidden, layer.mlp_norm))))

    def _norm(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`hidden` [..., size] normalised over the last dimension. bias: GPT-2's."""
        return self.operations.norm(hidden, weight, self.config.rms_norm_eps)


class Gpt2Model(LlamaModel):
    """GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019), for inference only.

    Differences to Llama: learned positions instead of rotary embedding, LayerNorm, and an MLP without a gate.
    """

    def _embedded(self, inputs: ForwardInputs) -> Tensor:
        assert self._weights.position_embedding is not None
        return super()._embedded(inputs) + self._weights.position_embedding.index_select(0, inputs.positions)

    def _positioned(self, layer: LayerWeights, heads: Tensor, angles: Angles) -> Tensor:
        return heads

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        up = layer.gate_up(self._norm(hidden, layer.mlp_norm, layer.mlp_norm_bias))
        return layer.down(functional.gelu(up, approximate="none" if self.config.activation == "gelu" else "tanh"))

    def _norm(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.layer_norm(hidden, weight.shape, weight, bias, self.config.rms_norm_eps)
