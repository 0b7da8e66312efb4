"""The shape of a decoder: its sizes, its architecture and how its rotary embedding is scaled."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ifbbench.errors import InputError
from ifbbench.models.layers import LatentAttention, LayerKind, Mixer, Mlp, Recurrent, Routing

LLAMA = "llama"
GPT2 = "gpt2"
DEFAULT_ROPE_THETA = 10_000.0
# Upper bounds of what model files say, far above any model: numbers beyond them would overflow or never end.
MAX_SIZE, MAX_LAYERS = 2**31 - 1, 10_000


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """Divides all rotary frequencies by `factor` (`rope_type` linear)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Divides the low rotary frequencies by `factor`, as Llama 3.1 does (`rope_type` llama3)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnRopeScaling:
    """YaRN (Peng et al., arXiv:2309.00071; `rope_type` yarn).

    Pairs that turn fewer than `beta_slow` times within the original positions have their frequency divided by `factor`,
    pairs that turn more than `beta_fast` times are unchanged. Cosines and sines are multiplied by `attention_factor`,
    and attention scores by `softmax_factor` (DeepSeek).
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    softmax_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class RopeFactors:
    """Divides each rotary frequency by a factor of its own, as GGUF files do; [head size / 2]."""

    factors: tuple[float, ...]


RopeScaling = Llama3RopeScaling | LinearRopeScaling | YarnRopeScaling | RopeFactors


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape. Names follow Hugging Face's `LlamaConfig`, shortened; sizes are in elements.

    attention_bias: whether query, key and value have biases.
    sliding_window: number of positions, its own included, that a query attends to in every layer; None if all.
    query_key_norm: whether each head of queries and keys is normalised before the rotary embedding (Qwen 3).
    architecture: LLAMA, or GPT2 with learned positions, LayerNorm, biases everywhere and an MLP without a gate.
        rms_norm_eps and activation apply to the norms and the MLP of either architecture.
    num_experts, experts_per_token: numbers of a mixture of experts; 0 if there is one MLP. Most such models run on
        simulated devices only.
    expert_size: intermediate size of each expert, 0 if it is `intermediate_size`.
    shared_expert_size: intermediate size of the experts that every token passes, together.
    has_shared_gate: whether the output of the shared experts is weighted.
    has_expert_bias: whether the experts have biases.
    layers: the kinds of the layers, none if all are the same.
    latent: shape of latent attention, for models that have it.
    routing: how tokens choose experts, for models whose experts are computed here, too.
    recurrent: shape of layers without attention.
    windows: attention window of each layer, None for all positions; empty if all have `sliding_window`.
    gated_attention: whether queries come with a gate of their output.
    gated_mlp: whether MLPs of the Llama family have a gate.
    num_norms: number of norms of a layer, 0 if one before each mixer and MLP.
    query_key_norm_size: weights of the norms of queries and keys, 0 if they are those of one head each.
    is_draft: a layer for multi-token prediction or an EAGLE head, with the product that joins a hidden state and the
        embedding of the next token.
    unquantized: parts of layers that a quantized checkpoint keeps in 16 bits.
    weights_of_scale: number of weights with one scale, of a checkpoint in 4 bits; 0 if it does not say.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = DEFAULT_ROPE_THETA
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    sliding_window: int | None = None
    attention_output_bias: bool = False
    query_key_norm: bool = False
    architecture: str = LLAMA
    activation: str = "silu"
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_expert_size: int = 0
    has_shared_gate: bool = False
    has_expert_bias: bool = False
    layers: tuple[LayerKind, ...] = ()
    latent: LatentAttention | None = None
    routing: Routing | None = None
    recurrent: Recurrent | None = None
    windows: tuple[int | None, ...] = ()
    gated_attention: bool = False
    gated_mlp: bool = True
    num_norms: int = 0
    query_key_norm_size: int = 0
    is_draft: bool = False
    unquantized: tuple[Mixer | Mlp, ...] = ()
    weights_of_scale: int = 0

    @classmethod
    def tiny(cls) -> "ModelConfig":
        """The built-in model of about 5 million parameters, for runs without a checkpoint."""
        return cls(
            vocab_size=4096,
            hidden_size=256,
            num_layers=4,
            num_heads=8,
            num_kv_heads=4,
            head_dim=32,
            intermediate_size=688,
            max_position_embeddings=16_384,
            eos_token_ids=(2,),
        )

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kinds(self) -> Mapping[LayerKind, int]:
        """How many layers there are of each kind."""
        if self.layers:
            return Counter(self.layers)
        return {LayerKind(mlp=Mlp.EXPERTS if self.num_experts else Mlp.DENSE): self.num_layers}

    def count(self, part: Mixer | Mlp) -> int:
        """How many layers have this mixer or MLP."""
        return sum(number for kind, number in self.kinds.items() if part in kind)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers with keys and values."""
        if not self.layers:
            return tuple(range(self.num_layers))
        return tuple(index for index, kind in enumerate(self.layers) if kind.mixer is Mixer.ATTENTION)

    def window_of(self, layer: int) -> int | None:
        """Number of positions, its own included, that a query attends to in this layer; None if all."""
        return self.windows[layer] if self.windows else self.sliding_window

    @property
    def size_of_expert(self) -> int:
        """Intermediate size of each routed expert."""
        return self.expert_size or self.intermediate_size

    @property
    def up_products(self) -> int:
        """Products of the hidden state in an MLP: gate and up, or up alone (GPT-2, Nemotron-H)."""
        return 1 if self.architecture == GPT2 or not self.gated_mlp else 2

    @property
    def gate_up_size(self) -> int:
        """Outputs per token of the first product of an MLP."""
        return self.up_products * self.intermediate_size

    @property
    def num_parameters(self) -> int:
        """Trained values in all weights; tied embeddings count once."""
        is_gpt2 = self.architecture == GPT2
        norm = (2 if is_gpt2 else 1) * self.hidden_size
        layers = sum(
            number * (self.matrix_parameters(kind) + self._vectors(kind, norm)) for kind, number in self.kinds.items()
        )
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        embeddings += is_gpt2 * self.max_position_embeddings * self.hidden_size
        return layers + embeddings + norm

    @property
    def active_parameters(self) -> int:
        """Trained values in the weights that one token uses."""
        expert = self.hidden_size * (self.up_products + 1) * self.size_of_expert
        expert += self.has_expert_bias * (self.up_products * self.size_of_expert + self.hidden_size)
        unused = self.count(Mlp.EXPERTS) * (self.num_experts - self.experts_per_token) * expert
        return self.num_parameters - unused

    def matrix_parameters(self, kind: LayerKind) -> int:
        """Trained values in the matrices of such a layer, the only weights that a quantised model has in few bits."""
        hidden, number = self.hidden_size, 0
        if kind.mixer is Mixer.ATTENTION:
            heads = (2 + self.gated_attention) * self.query_size + 2 * self.kv_size
            number += hidden * heads if self.latent is None else self.latent.matrices(hidden, self.num_heads)
        elif kind.mixer is Mixer.RECURRENT and self.recurrent is not None:
            number += self.recurrent.matrices(hidden)
        if kind.mlp is Mlp.DENSE:
            number += hidden * (self.gate_up_size + self.intermediate_size)
        elif kind.mlp is Mlp.EXPERTS:
            sizes = self.num_experts * self.size_of_expert + self.shared_expert_size
            number += hidden * ((self.up_products + 1) * sizes + self.num_experts)  # the last for the router
        return number

    def _vectors(self, kind: LayerKind, norm: int) -> int:
        """Trained values of such a layer that are in no matrix. norm: of one norm."""
        parts = (kind.mixer is not Mixer.NONE) + (kind.mlp is not Mlp.NONE)
        number = norm * (self.num_norms or parts)
        if kind.mixer is Mixer.ATTENTION:
            qkv_size = self.query_size + 2 * self.kv_size
            number += self.attention_bias * qkv_size + self.attention_output_bias * self.hidden_size
            number += self.query_key_norm * (self.query_key_norm_size or 2 * self.head_dim)
            number += 0 if self.latent is None else self.latent.vectors
        elif kind.mixer is Mixer.RECURRENT and self.recurrent is not None:
            number += self.recurrent.vectors
        if kind.mlp is Mlp.DENSE:
            number += self.mlp_bias * (self.gate_up_size + self.hidden_size)
        elif kind.mlp is Mlp.EXPERTS:
            biases = self.up_products * self.size_of_expert + self.hidden_size
            number += self.has_expert_bias * self.num_experts * biases + self.has_shared_gate * self.hidden_size
        return number

    @property
    def kv_values_per_layer(self) -> int:
        """Values that the cache has for one token in one layer with attention."""
        return 2 * self.kv_size if self.latent is None else self.latent.cached

    @property
    def cached_heads(self) -> tuple[int, int]:
        """Heads of keys in the cache, and the size of each. A latent vector is one head, of keys and of values."""
        return (self.num_kv_heads, self.head_dim) if self.latent is None else (1, self.latent.cached)

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of one token in the cache of all layers together."""
        return len(self.attention_layers) * self.kv_values_per_layer * bytes_per_value

    @property
    def draft_layer(self) -> "ModelConfig":
        """The layer for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2), of a model without one an
        EAGLE head (arXiv:2401.15077): one more layer like the last one. It shares embeddings and output layer with the
        model."""
        return dataclasses.replace(self, num_layers=1, layers=self.layers[-1:], windows=(), is_draft=True)


def check_split(model: ModelConfig, tp_size: int, pp_size: int, ep_size: int = 1, attention_dp_size: int = 1) -> None:
    """InputError if `tp_size` devices cannot share a layer evenly, or there are fewer layers than stages.

    ep_size: parts of the devices that share the experts.
    attention_dp_size: parts that have requests of their own.
    """
    for name, size in (("ep_size", ep_size), ("attention_dp_size", attention_dp_size)):
        if tp_size % size:
            raise InputError(
                f"--{name}: {size} parts of the {tp_size} devices of --tp_size; choose a divisor of these."
            )
    if ep_size > 1 and not model.num_experts:
        raise InputError(f"--ep_size: {ep_size} parts of the experts, but the model has none; leave it out.")
    heads_over, experts_over = tp_size // attention_dp_size, tp_size // ep_size
    mlps_over = heads_over if attention_dp_size > 1 else tp_size
    has_dense = model.count(Mlp.DENSE) > 0
    size = model.intermediate_size if has_dense else model.size_of_expert
    if model.num_heads % heads_over or size % (mlps_over if has_dense else experts_over):
        raise InputError(
            f"--tp_size: {tp_size} devices cannot share {model.num_heads} attention heads and an MLP of "
            f"{size} evenly; choose a divisor of both."
        )
    if model.num_experts and (model.size_of_expert % experts_over or model.num_experts < ep_size):
        raise InputError(
            f"--ep_size: {tp_size} devices in {ep_size} parts cannot share {model.num_experts} experts of "
            f"{model.size_of_expert}; choose a divisor of --tp_size with which they can."
        )
    if model.recurrent is not None and model.recurrent.num_heads % heads_over:
        raise InputError(
            f"--tp_size: {heads_over} devices cannot share {model.recurrent.num_heads} groups of heads in recurrent "
            "layers evenly; choose a divisor."
        )
    if pp_size > model.num_layers:
        raise InputError(
            f"--pp_size: {pp_size} stages are more than the model's {model.num_layers} layers; choose fewer."
        )


def check_ranks(model: ModelConfig, tp_size: int, pp_size: int, ep_size: int = 1) -> None:
    """`check_split`, and InputError if a rank's query heads do not share whole KV heads."""
    check_split(model, tp_size, pp_size, ep_size)
    if model.num_experts % ep_size:
        raise InputError(
            f"--ep_size: {ep_size} ranks cannot share {model.num_experts} experts evenly; choose a divisor."
        )
    kv_heads = model.num_kv_heads
    if kv_heads % tp_size and tp_size % kv_heads:
        raise InputError(
            f"--tp_size: {tp_size} ranks cannot share {kv_heads} KV heads evenly; choose a divisor or a "
            "multiple of their number."
        )
