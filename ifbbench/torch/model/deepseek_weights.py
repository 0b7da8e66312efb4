"""The weights of a layer with latent attention, and with experts, of one rank."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ifbbench.models.config import ModelConfig
from ifbbench.models.layers import Mlp
from ifbbench.torch.model.layer_weights import LayerWeights, TensorSource
from ifbbench.torch.model.linear import MakeProduct, Product
from ifbbench.torch.model.part import ALL, ModelPart


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of one layer that this rank has.

    router: float32 [experts, hidden], all of them.
    bias: float32 [experts], added to scores where experts are chosen.
    first: number of the first of `experts`; each is the product of gate and up, and that of down.
    shared: the same of the experts that every token passes; None without them.
    """

    router: Tensor
    bias: Tensor
    first: int
    experts: tuple[tuple[Product, Product], ...]
    shared: tuple[Product, Product] | None


@dataclass(frozen=True, slots=True)
class DeepseekLayer(LayerWeights):
    """One decoder layer. `query_key_value` is the product to queries and latent vectors: compressed queries, the latent
    vector and the key that is rotated, side by side.

    query_up: product from compressed queries to those of the rank's heads; None if queries are not compressed.
    query_rank_norm: [query rank].
    latent_norm: [KV rank].
    key_up: [heads, nope, KV rank].
    value_up: [heads, KV rank, value].
    routed: None in layers with one MLP; the others have no `gate_up` and `down`.
    """

    query_up: Product | None = None
    query_rank_norm: Tensor | None = None
    latent_norm: Tensor | None = None
    key_up: Tensor | None = None
    value_up: Tensor | None = None
    routed: ExpertWeights | None = None


def deepseek_layer(
    config: ModelConfig, source: TensorSource, make_product: MakeProduct, index: int, part: ModelPart | None
) -> DeepseekLayer:
    """Layer `index` of the whole model, by the names of its files. config: of the whole model."""
    latent, hidden, prefix = config.latent, config.hidden_size, f"model.layers.{index}"
    assert latent is not None
    attention = f"{prefix}.self_attn"
    tp_size, tp_rank = (1, 0) if part is None else (part.tp_size, part.tp_rank)
    heads = config.num_heads // tp_size
    own = slice(tp_rank * heads, (tp_rank + 1) * heads)
    key_size = latent.nope + latent.rope

    def matrix(name: str, outputs: int, inputs: int, *own: slice) -> Tensor:
        return source(f"{name}.weight", (outputs, inputs), *own)

    def of_heads(name: str, size: int, inputs: int) -> Tensor:
        """[heads, size, inputs] of the rank's heads."""
        rows = slice(own.start * size, own.stop * size)
        return matrix(name, config.num_heads * size, inputs, rows).view(heads, size, inputs)

    def halves(rows: Tensor) -> Tensor:
        """`rows` [..., rope, inputs] with both values of each rotated pair in separate halves, as `RotaryEmbedding` has
        them."""
        return torch.cat([rows[..., 0::2, :], rows[..., 1::2, :]], dim=-2)

    def queries(name: str, inputs: int) -> Tensor:
        of_each = of_heads(name, key_size, inputs)
        of_each = torch.cat([of_each[:, : latent.nope], halves(of_each[:, latent.nope :])], dim=1)
        return of_each.reshape(heads * key_size, inputs)

    down = matrix(f"{attention}.kv_a_proj_with_mqa", latent.cached, hidden)
    down = torch.cat([down[: latent.kv_rank], halves(down[latent.kv_rank :])])
    query_up = query_rank_norm = None
    if latent.query_rank:
        first = matrix(f"{attention}.q_a_proj", latent.query_rank, hidden)
        query_up = make_product(queries(f"{attention}.q_b_proj", latent.query_rank), None)
        query_rank_norm = source(f"{attention}.q_a_layernorm.weight", (latent.query_rank,))
    else:
        first = queries(f"{attention}.q_proj", hidden)
    ups = of_heads(f"{attention}.kv_b_proj", latent.nope + latent.value, latent.kv_rank)
    values = slice(own.start * latent.value, own.stop * latent.value)
    output = matrix(f"{attention}.o_proj", hidden, config.num_heads * latent.value, ALL, values)

    def mlp(name: str, size: int, own: tuple[slice, ...]) -> tuple[Product, Product]:
        gate_up = torch.cat([matrix(f"{name}.{one}_proj", size, hidden, *own) for one in ("gate", "up")])
        down = matrix(f"{name}.down_proj", hidden, size, *((ALL, *own) if own else ()))
        return make_product(gate_up, None), make_product(down, None)

    def share(size: int, parts: int, number: int) -> tuple[slice, ...]:
        """The share of a rank in the values between the products of an MLP."""
        return () if parts == 1 else (slice(number * size // parts, (number + 1) * size // parts),)

    routed: ExpertWeights | None = None
    dense: tuple[Product, Product] = _no_product, _no_product
    kind = config.layers[index].mlp if config.layers else Mlp.EXPERTS
    if kind is Mlp.DENSE:
        dense = mlp(f"{prefix}.mlp", config.intermediate_size, share(config.intermediate_size, tp_size, tp_rank))
    else:
        ep_size = 1 if part is None else part.ep_size
        of_part = tp_size // ep_size  # ranks that share the same experts
        ep_rank, in_part = divmod(tp_rank, of_part)
        numbers = range(ep_rank * config.num_experts // ep_size, (ep_rank + 1) * config.num_experts // ep_size)
        size = config.size_of_expert
        shared = config.shared_expert_size
        routed = ExpertWeights(
            matrix(f"{prefix}.mlp.gate", config.num_experts, hidden).float(),
            source(f"{prefix}.mlp.gate.e_score_correction_bias", (config.num_experts,)).float(),
            numbers.start,
            tuple(mlp(f"{prefix}.mlp.experts.{one}", size, share(size, of_part, in_part)) for one in numbers),
            mlp(f"{prefix}.mlp.shared_experts", shared, share(shared, tp_size, tp_rank)) if shared else None,
        )
    return DeepseekLayer(
        attention_norm=source(f"{prefix}.input_layernorm.weight", (hidden,)),
        query_key_value=make_product(torch.cat([first, down]), None),
        attention_output=make_product(output, None),
        mlp_norm=source(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=dense[0],
        down=dense[1],
        query_up=query_up,
        query_rank_norm=query_rank_norm,
        latent_norm=source(f"{attention}.kv_a_layernorm.weight", (latent.kv_rank,)),
        key_up=ups[:, : latent.nope].contiguous(),
        value_up=ups[:, latent.nope :].transpose(1, 2).contiguous(),
        routed=routed,
    )


def _no_product(rows: Tensor) -> Tensor:
    raise AssertionError("a layer with experts has no MLP of its own")
