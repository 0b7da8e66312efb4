"""GPT-2, in the packed pass of `llama.LlamaModel`."""

from torch import Tensor
from torch.nn import functional

from ifbbench.model.llama import ForwardInputs, LlamaModel
from ifbbench.model.operations import Angles
from ifbbench.model.weights import LayerWeights


class Gpt2Model(LlamaModel):
    """GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019), for inference only.

    What it has other than Llama: learned positions instead of rotary ones, LayerNorm, and an MLP without a gate.
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
