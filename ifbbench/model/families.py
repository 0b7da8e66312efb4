"""What each family of decoders has of its own, by the `model_type` of its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field

LLAMA = "llama"
GPT2 = "gpt2"

# Fields that must be absent or have this value, in every family: what they ask for otherwise is not built.
ALWAYS_EXPECTED: Mapping[str, object] = {"quantization_config": None, "partial_rotary_factor": 1.0}


@dataclass(frozen=True, slots=True)
class Family:
    """How the config.json of a family is read.

    architecture: LLAMA or GPT2, whose layers the family has. attention_bias: whether query, key and value have biases,
    None if the field `attention_bias` says so (of the attention's output then too). query_key_norm: whether heads of
    queries and keys are normalised. has_window: whether `sliding_window` counts. activations: known values of the
    activation's field. names: Llama's names of fields to the family's own. defaults: values of fields that the family's
    files leave out. expected: fields that must be absent or have this value.
    """

    architecture: str = LLAMA
    attention_bias: bool | None = None
    query_key_norm: bool = False
    has_window: bool = False
    activations: tuple[str, ...] = ("silu",)
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    expected: Mapping[str, object] = field(default_factory=dict)


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(has_window=True),
    # Their windows begin at a layer of their own; no published model uses them.
    "qwen2": Family(attention_bias=True, expected={"use_sliding_window": False}),
    "qwen3": Family(query_key_norm=True, defaults={"head_dim": 128}, expected={"use_sliding_window": False}),
    "gpt2": Family(
        architecture=GPT2,
        attention_bias=True,
        activations=("gelu_new", "gelu_pytorch_tanh", "gelu"),
        names={
            "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions", "intermediate_size": "n_inner",
            "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function",
        },
        defaults={"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        expected={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ),
}  # fmt: skip
