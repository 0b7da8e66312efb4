"""The modules of a decoder that LoRA adapts: their names, sizes and order, and the share of each in tensor parallelism.

Names are those of PEFT, numbers those of TensorRT-LLM's `lora_config`.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from ifbbench.model.config import ModelConfig

if TYPE_CHECKING:  # simulated runs need the sizes only, without PyTorch
    from torch import Tensor

    TensorPair = tuple[Tensor, Tensor]


class LayerProduct(IntEnum):
    """The matrix products of a layer, in the order of the forward pass. Some are several modules side by side."""

    QUERY_KEY_VALUE = 0
    ATTENTION_OUTPUT = 1
    GATE_UP = 2
    DOWN = 3


@dataclass(frozen=True, slots=True)
class LoraModule:
    """One adapted matrix [outputs, inputs] of every layer.

    name: PEFT's. number: TensorRT-LLM's. offset: of its outputs in those of the product. splits_inputs: whether ranks
    share its inputs (and add up their outputs); otherwise they share its outputs.
    """

    name: str
    number: int
    product: LayerProduct
    inputs: int
    outputs: int
    offset: int = 0
    splits_inputs: bool = False

    @property
    def values_of_rank(self) -> int:
        """Values of both matrices of an adapter of rank 1."""
        return self.inputs + self.outputs


MODULES_OF_PRODUCT = {
    LayerProduct.QUERY_KEY_VALUE: (0, 1, 2),
    LayerProduct.ATTENTION_OUTPUT: (3,),
    LayerProduct.GATE_UP: (4, 5),
    LayerProduct.DOWN: (6,),
}


def lora_modules(config: ModelConfig, world: int = 1) -> tuple[LoraModule, ...]:
    """The modules of a layer of a Llama model, in the order of the forward pass; sizes are those of each of `world`
    ranks."""
    hidden, queries, ffn = config.hidden_size, config.query_size // world, config.intermediate_size // world
    keys = max(1, config.num_kv_heads // world) * config.head_dim
    return (
        LoraModule("q_proj", 1, LayerProduct.QUERY_KEY_VALUE, hidden, queries),
        LoraModule("k_proj", 2, LayerProduct.QUERY_KEY_VALUE, hidden, keys, queries),
        LoraModule("v_proj", 3, LayerProduct.QUERY_KEY_VALUE, hidden, keys, queries + keys),
        LoraModule("o_proj", 4, LayerProduct.ATTENTION_OUTPUT, queries, hidden, splits_inputs=True),
        LoraModule("gate_proj", 5, LayerProduct.GATE_UP, hidden, ffn),
        LoraModule("up_proj", 7, LayerProduct.GATE_UP, hidden, ffn, ffn),
        LoraModule("down_proj", 6, LayerProduct.DOWN, ffn, hidden, splits_inputs=True),
    )


def split(config: ModelConfig, module: int, lora_a: "Tensor", lora_b: "Tensor", rank: int, world: int) -> "TensorPair":
    """The share of `rank` in the matrices of an adapter for the module at this index of `lora_modules`.

    Split as the weight that they adapt: A by its inputs, or B by its outputs; the other one is whole. With more ranks
    than KV heads, several ranks have the same head."""
    local = lora_modules(config, world)[module]
    if local.splits_inputs:
        return lora_a[:, rank * local.inputs : (rank + 1) * local.inputs], lora_b
    first = rank * local.outputs
    if local.name in ("k_proj", "v_proj"):
        first = rank * config.num_kv_heads // world * config.head_dim
    return lora_a, lora_b[first : first + local.outputs]
