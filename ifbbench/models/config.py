"""The shape of a decoder: its sizes, its architecture and how its rotary embedding is scaled."""

from dataclasses import dataclass

from ifbbench.errors import InputError

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
    pairs that turn more than `beta_fast` times are unchanged. Cosines and sines are multiplied by `attention_factor`.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class RopeFactors:
    """Divides each rotary frequency by a factor of its own, as GGUF files do; [head size / 2]."""

    factors: tuple[float, ...]


RopeScaling = Llama3RopeScaling | LinearRopeScaling | YarnRopeScaling | RopeFactors


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape. Names follow Hugging Face's `LlamaConfig`, shortened; sizes are in elements.

    sliding_window: number of positions, its own included, that a query attends to in every layer; None if all.
    attention_bias: biases of query, key and value. query_key_norm: each head of queries and keys is normalised before
    the rotary embedding (Qwen 3). architecture: LLAMA, or GPT2 with learned positions, LayerNorm, biases everywhere and
    an MLP without a gate. rms_norm_eps and activation apply to the norms and the MLP of either architecture.
    num_experts, experts_per_token: of a mixture of experts, whose MLPs have `intermediate_size` each; 0 if there is one
    MLP. Such models run on simulated devices only.
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
    def gate_up_size(self) -> int:
        """Outputs per token of the first product of an MLP: gate and up, or up alone (GPT-2)."""
        return (1 if self.architecture == GPT2 else 2) * self.intermediate_size

    @property
    def num_parameters(self) -> int:
        """Trained values in all weights; tied embeddings count once."""
        is_gpt2 = self.architecture == GPT2
        qkv_size = self.query_size + 2 * self.kv_size
        biases = self.attention_bias * qkv_size + self.attention_output_bias * self.hidden_size
        biases += self.mlp_bias * (self.gate_up_size + self.hidden_size) * max(1, self.num_experts)
        norm = (2 if is_gpt2 else 1) * self.hidden_size
        layer = self.layer_matrix_parameters + biases + 2 * norm + self.query_key_norm * 2 * self.head_dim
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        embeddings += is_gpt2 * self.max_position_embeddings * self.hidden_size
        return self.num_layers * layer + embeddings + norm

    @property
    def layer_matrix_parameters(self) -> int:
        """Trained values in the matrices of one layer, the only weights that `--dtype fp8` stores in eight bits."""
        attention = 2 * (self.query_size + self.kv_size)
        mlps = max(1, self.num_experts) * (self.gate_up_size + self.intermediate_size)
        return self.hidden_size * (attention + mlps + self.num_experts)  # the last for the router

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of one token's keys and values in all layers together."""
        return 2 * self.num_layers * self.kv_size * bytes_per_value


def check_split(model: ModelConfig, tp_size: int, pp_size: int) -> None:
    """InputError if `tp_size` devices cannot share a layer evenly, or there are fewer layers than stages."""
    if model.num_heads % tp_size or model.intermediate_size % tp_size:
        raise InputError(
            f"--tp_size: {tp_size} devices cannot share {model.num_heads} attention heads and an MLP of "
            f"{model.intermediate_size} evenly; choose a divisor of both."
        )
    if pp_size > model.num_layers:
        raise InputError(
            f"--pp_size: {pp_size} stages are more than the model's {model.num_layers} layers; choose fewer."
        )


def check_ranks(model: ModelConfig, tp_size: int, pp_size: int) -> None:
    """`check_split`, and InputError if a rank's query heads do not share whole KV heads."""
    check_split(model, tp_size, pp_size)
    kv_heads = model.num_kv_heads
    if kv_heads % tp_size and tp_size % kv_heads:
        raise InputError(
            f"--tp_size: {tp_size} ranks cannot share {kv_heads} KV heads evenly; choose a divisor or a "
            "multiple of their number."
        )
