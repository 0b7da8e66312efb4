"""The modules of a decoder that LoRA adapts, the share of each in tensor parallelism, and their places in pages.

Names are those of PEFT, numbers those of TensorRT-LLM's `lora_config`.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from ifbbench.engine.arrays import IntArray
from ifbbench.kv.attention_window import ceil_div
from ifbbench.models.config import ModelConfig
from ifbbench.settings.config import RunConfig

if TYPE_CHECKING:  # simulated runs need the sizes only, without PyTorch
    from torch import Tensor

    TensorPair = tuple[Tensor, Tensor]

# PeftCacheConfig.optimal_adapter_size.
OPTIMAL_RANK = 8


class LayerProduct(IntEnum):
    """The matrix products of a layer, in the order of the forward pass. Some are several modules side by side."""

    QUERY_KEY_VALUE = 0
    ATTENTION_OUTPUT = 1
    GATE_UP = 2
    DOWN = 3


@dataclass(frozen=True, slots=True)
class LoraModule:
    """One adapted matrix [outputs, inputs] of every layer.

    name: name in PEFT.
    number: number in TensorRT-LLM.
    offset: offset of its outputs in those of the product.
    splits_inputs: whether ranks share its inputs (and add up their outputs); otherwise they share its outputs.
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


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the matrices of an adapter are in its pages.

    ranks: [layers, modules], 0 where the adapter changes nothing.
    page, slot: [layers, modules], where the pair of each module is: A, and behind it B.
    used: number of slots used of each page.
    values: number of values of all matrices.
    """

    ranks: IntArray
    page: IntArray
    slot: IntArray
    used: tuple[int, ...]
    values: int


class PageLayout:
    """Pages of adapters, as TensorRT-LLM's `PeftCacheManager` sizes them.

    A page has `slots` slots of `width` values: an adapter of rank OPTIMAL_RANK for all modules fills one page, and the
    pair of one module fits into a page at `max_rank`. The pair of a module takes whole slots, within a page.
    """

    def __init__(self, modules: tuple[LoraModule, ...], num_layers: int, max_rank: int) -> None:
        self.modules = modules
        self.num_layers = num_layers
        sizes = [module.values_of_rank for module in modules]
        self.width = min(sizes)
        of_layer = min(OPTIMAL_RANK, max_rank) * sum(ceil_div(size, self.width) for size in sizes)
        self.slots = max(num_layers * of_layer, ceil_div(max_rank * max(sizes), self.width))

    @property
    def page_values(self) -> int:
        return self.slots * self.width

    def place(self, ranks: IntArray) -> Placement:
        """The pairs of an adapter of these ranks, [layers, modules], one behind the other, layer by layer."""
        page, slot, used = np.zeros_like(ranks), np.zeros_like(ranks), [0]
        sizes = ranks * np.array([module.values_of_rank for module in self.modules])
        for layer, module in np.argwhere(ranks).tolist():
            slots = ceil_div(int(sizes[layer, module]), self.width)
            if used[-1] + slots > self.slots:
                used.append(0)
            page[layer, module], slot[layer, module] = len(used) - 1, used[-1]
            used[-1] += slots
        return Placement(ranks, page, slot, tuple(used), int(sizes.sum()))


def page_layout(config: RunConfig, model: ModelConfig) -> PageLayout:
    """The pages of adapters on each device under the settings of `config`."""
    modules, layers = lora_modules(model, config.tp_size), ceil_div(model.num_layers, config.pp_size)
    return PageLayout(modules, layers, config.max_lora_rank)


def pages_of_bytes(num_bytes: int, page_bytes: int) -> int:
    """Pages of a cache of this size; the last one may begin within it, as in TensorRT-LLM."""
    return ceil_div(num_bytes, page_bytes)


def device_pages(config: RunConfig, layout: PageLayout, free_bytes: int, value_bytes: int) -> int:
    """Pages of the device cache: `lora_num_device_mod_layers`, or a share of the memory that is free beside the
    weights."""
    if config.lora_num_device_mod_layers is not None:
        largest = max(module.values_of_rank for module in layout.modules)
        slots = config.lora_num_device_mod_layers * ceil_div(largest, layout.width)
        return ceil_div(slots, layout.slots)
    return pages_of_bytes(int((config.lora_device_mem_fraction or 0) * free_bytes), layout.page_values * value_bytes)
