"""The weights of one decoder layer, and where its tensors come from."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ifbbench.torch.model.linear import Product


class TensorSource(Protocol):
    """Makes or reads tensors, on their final device and in their final data type."""

    def __call__(self, name: str, shape: tuple[int, ...], *part: slice) -> Tensor:
        """The `part` of the tensor `name`, a slice for each of its first axes. shape: of the whole tensor."""
        ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Query, key and value are one product, gate and up another (GPT-2 has no gate, only up).

    query_norm, key_norm: [head size], where heads are normalised. The biases of norms are GPT-2's. With tensor
    parallelism, the results of attention_output and down are summed over the ranks.
    """

    attention_norm: Tensor
    query_key_value: Product
    attention_output: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    attention_norm_bias: Tensor | None = None
    mlp_norm_bias: Tensor | None = None
