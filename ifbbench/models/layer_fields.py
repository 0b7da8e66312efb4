"""What config.json of each family says of layers that are not Llama's: the fields of `ModelConfig` that differ.

Rules of the files are those of the families' classes in transformers 5.24.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from ifbbench.models.config import MAX_LAYERS, MAX_SIZE
from ifbbench.models.layers import LatentAttention, LayerKind, Mixer, Mlp, Routing, gated_delta_net, mamba, mamba_2
from ifbbench.settings.fields import choice, integers, text, unexpected


class Fields(Protocol):
    """The fields of a config.json, by Llama's names. InputError for missing and invalid ones."""

    values: Mapping[str, Any]

    def integer(self, name: str, default: int | None = None, maximum: int = MAX_SIZE) -> int: ...

    def number(self, name: str, default: float | None = None) -> float: ...

    def boolean(self, name: str) -> bool: ...


# By the letters of `hybrid_override_pattern` and the words of `layers_block_type`.
NEMOTRON_LAYERS = {
    "M": LayerKind(Mixer.RECURRENT, Mlp.NONE),
    "*": LayerKind(Mixer.ATTENTION, Mlp.NONE),
    "-": LayerKind(Mixer.NONE, Mlp.DENSE),
    "E": LayerKind(Mixer.NONE, Mlp.EXPERTS),
}
NEMOTRON_WORDS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip


def experts(fields: Fields) -> dict[str, Any]:
    """Every layer has experts of `intermediate_size`."""
    other_name = fields.values.get("num_local_experts")  # of transformers 5 for Qwen's
    return {
        "num_experts": fields.integer("num_experts", other_name),
        "experts_per_token": fields.integer("num_experts_per_tok"),
    }


def gpt_oss(fields: Fields) -> dict[str, Any]:
    """Every other layer has a window, the first one included."""
    count, window = _count(fields), fields.integer("sliding_window")
    kinds = fields.values.get("layer_types") or ["sliding_attention", "full_attention"] * count
    return experts(fields) | {
        "has_expert_bias": fields.boolean("mlp_bias"),
        "windows": tuple(window if kind == "sliding_attention" else None for kind in kinds[:count]),
    }


def gemma3(fields: Fields) -> dict[str, Any]:
    """The last of each `sliding_window_pattern` layers has no window. There are norms after attention and MLP, too."""
    count, window = _count(fields), fields.integer("sliding_window", 4096)
    period = fields.integer("sliding_window_pattern", 6)
    kinds = fields.values.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if (index + 1) % period == 0 else "sliding_attention" for index in range(count)]
    windows = tuple(None if kind == "full_attention" else window for kind in kinds)
    return {"windows": windows, "num_norms": 4}


def qwen_moe(fields: Fields) -> dict[str, Any]:
    """Experts in every `decoder_sparse_step`-th layer that is not one of `mlp_only_layers`."""
    step, given = fields.integer("decoder_sparse_step", 1), fields.values.get("mlp_only_layers")
    dense = set(integers(given, "mlp_only_layers", "layer", 0) if given else ())
    size = fields.integer("moe_intermediate_size")
    kinds = [Mlp.EXPERTS if index not in dense and (index + 1) % step == 0 else Mlp.DENSE for index in _layers(fields)]
    has_dense = Mlp.DENSE in kinds
    return experts(fields) | {
        "intermediate_size": fields.integer("intermediate_size") if has_dense else size,
        "expert_size": size,
        "layers": tuple(LayerKind(mlp=kind) for kind in kinds) if has_dense else (),
    }


def qwen3_next(fields: Fields) -> dict[str, Any]:
    """A gated delta net in all layers but every `full_attention_interval`-th, and a shared expert with a gate."""
    found, interval = qwen_moe(fields), fields.integer("full_attention_interval", 4)
    kinds = fields.values.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if (index + 1) % interval == 0 else "linear_attention" for index in _layers(fields)]
    mlps = found["layers"] or [LayerKind(mlp=Mlp.EXPERTS)] * _count(fields)
    mixers = [Mixer.ATTENTION if kind == "full_attention" else Mixer.RECURRENT for kind in kinds]
    return found | {
        "layers": tuple(LayerKind(mixer, kind.mlp) for mixer, kind in zip(mixers, mlps, strict=True)),
        "shared_expert_size": fields.integer("shared_expert_intermediate_size"),
        "has_shared_gate": True,
        "gated_attention": True,
        "recurrent": gated_delta_net(
            fields.integer("linear_num_key_heads"),
            fields.integer("linear_num_value_heads"),
            fields.integer("linear_key_head_dim"),
            fields.integer("linear_value_head_dim"),
            fields.integer("linear_conv_kernel_dim"),
        ),
    }


def deepseek(fields: Fields) -> dict[str, Any]:
    """Latent attention; experts from layer `first_k_dense_replace` on, in every `moe_layer_freq`-th."""
    is_compressed = fields.values.get("q_lora_rank") is not None
    latent = LatentAttention(
        fields.integer("q_lora_rank") if is_compressed else 0,
        fields.integer("kv_lora_rank"),
        fields.integer("qk_nope_head_dim"),
        fields.integer("qk_rope_head_dim"),
        fields.integer("v_head_dim"),
    )
    return _after_dense(fields) | {
        "latent": latent,
        "num_kv_heads": fields.integer("num_attention_heads"),
        "head_dim": latent.nope + latent.rope,
    }


def deepseek_v3(fields: Fields) -> dict[str, Any]:
    """The same, with how experts are chosen."""
    return deepseek(fields) | {
        "routing": Routing(
            fields.integer("n_group", 1),
            fields.integer("topk_group", 1),
            bool(fields.values.get("norm_topk_prob", True)),
            fields.number("routed_scaling_factor", 1.0),
        )
    }


def glm4_moe(fields: Fields) -> dict[str, Any]:
    """As DeepSeek's experts, with attention of Llama whose output has no bias."""
    return _after_dense(fields) | {
        "query_key_norm": fields.boolean("use_qk_norm"),
        "attention_output_bias": False,
    }


def minimax_m2(fields: Fields) -> dict[str, Any]:
    """Experts in every layer, and norms over all heads of queries and of keys."""
    head_dim = fields.integer("head_dim")
    heads = fields.integer("num_attention_heads") + fields.integer("num_key_value_heads")
    return experts(fields) | {
        "query_key_norm": True,
        "query_key_norm_size": heads * head_dim,
    }


def llama4(fields: Fields) -> dict[str, Any]:
    """Experts in every `interleave_moe_layer_step`-th layer, beside one shared expert of the same size. All layers but
    every fourth attend within chunks: no query sees more keys than a chunk has, so it counts as a window."""
    step, size = fields.integer("interleave_moe_layer_step", 1), fields.integer("intermediate_size")
    chunk, interval = fields.integer("attention_chunk_size", 8192), fields.integer("no_rope_layer_interval", 4)
    with_rope = fields.values.get("no_rope_layers") or [(index + 1) % interval for index in _layers(fields)]
    is_sparse = [(index + 1) % step == 0 for index in _layers(fields)]
    if fields.values.get("moe_layers"):
        moe_layers = integers(fields.values["moe_layers"], "moe_layers", "layer", 0)
        is_sparse = [index in moe_layers for index in _layers(fields)]
    return experts(fields) | {
        "intermediate_size": fields.integer("intermediate_size_mlp"),
        "expert_size": size,
        "shared_expert_size": size,
        "layers": tuple(LayerKind(mlp=Mlp.EXPERTS if sparse else Mlp.DENSE) for sparse in is_sparse),
        "windows": tuple(chunk if has_rope else None for has_rope in with_rope),
    }


def jamba(fields: Fields) -> dict[str, Any]:
    """Attention in one of `attn_layer_period` layers, Mamba in the others; experts in one of `expert_layer_period`."""

    def is_in(index: int, name: str, period: int, offset: int) -> bool:
        offset_found = fields.values.get(f"{name}_layer_offset", offset)
        return bool(index % fields.integer(f"{name}_layer_period", period) == offset_found)

    inner, state = (
        fields.integer("mamba_expand", 2) * fields.integer("hidden_size"),
        fields.integer("mamba_d_state", 16),
    )
    return experts(fields) | {
        "layers": tuple(
            LayerKind(
                Mixer.ATTENTION if is_in(index, "attn", 8, 4) else Mixer.RECURRENT,
                Mlp.EXPERTS if is_in(index, "expert", 2, 1) else Mlp.DENSE,
            )
            for index in _layers(fields)
        ),
        "recurrent": mamba(
            inner,
            state,
            fields.integer("mamba_d_conv", 4),
            fields.integer("mamba_dt_rank", -(-fields.integer("hidden_size") // 16)),
            fields.values.get("mamba_conv_bias", True),
            fields.values.get("mamba_proj_bias", False),
        ),
    }


def nemotron_h(fields: Fields) -> dict[str, Any]:
    """Layers of one part each, a mixer or an MLP without a gate, by a pattern."""
    pattern = fields.values.get("hybrid_override_pattern")
    if pattern is None:
        words = fields.values.get("layers_block_type")
        if not isinstance(words, list):
            raise unexpected("layers_block_type", words, "a list of the layers' kinds")
        pattern = [NEMOTRON_WORDS[choice(word, "layers_block_type", NEMOTRON_WORDS)] for word in words]
    else:
        pattern = text(pattern, "hybrid_override_pattern")
    kinds = tuple(NEMOTRON_LAYERS[choice(letter, "hybrid_override_pattern", NEMOTRON_LAYERS)] for letter in pattern)
    found: dict[str, Any] = {}
    if NEMOTRON_LAYERS["E"] in kinds:
        found = experts(fields) | {
            "expert_size": fields.integer("moe_intermediate_size"),
            "shared_expert_size": fields.integer("moe_shared_expert_intermediate_size"),
        }
    return found | {
        "layers": _checked(kinds, fields),
        "gated_mlp": False,
        "recurrent": mamba_2(
            fields.integer("mamba_num_heads"),
            fields.integer("mamba_head_dim"),
            fields.integer("n_groups"),
            fields.integer("ssm_state_size"),
            fields.integer("conv_kernel", 4),
            fields.values.get("use_conv_bias", True),
            4 if fields.values.get("mamba_ssm_cache_dtype", "float32") == "float32" else 2,
        ),
    }


def _after_dense(fields: Fields) -> dict[str, Any]:
    """First dense layers, then experts, of which some are shared, in every `moe_layer_freq`-th layer."""
    first, step = _number_or_0(fields, "first_k_dense_replace"), fields.integer("moe_layer_freq", 1)
    size = fields.integer("moe_intermediate_size")
    return experts(fields) | {
        "expert_size": size,
        "shared_expert_size": _number_or_0(fields, "n_shared_experts") * size,
        "layers": tuple(
            LayerKind(mlp=Mlp.EXPERTS if index >= first and index % step == 0 else Mlp.DENSE)
            for index in _layers(fields)
        ),
    }


def _number_or_0(fields: Fields, name: str) -> int:
    return fields.integer(name) if fields.values.get(name) else 0


def _count(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", maximum=MAX_LAYERS)


def _layers(fields: Fields) -> Iterable[int]:
    return range(_count(fields))


def _checked(kinds: Sequence[LayerKind], fields: Fields) -> tuple[LayerKind, ...]:
    count = fields.integer("num_hidden_layers", len(kinds), MAX_LAYERS)
    if len(kinds) != count:
        raise unexpected("num_hidden_layers", count, f"the {len(kinds)} layers of the pattern")
    return tuple(kinds)
