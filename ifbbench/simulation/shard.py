"""One device's share of a model: the sizes of its matrices, in the data types they are kept and computed in."""

from dataclasses import dataclass

from ifbbench.config import DTYPE_BYTES
from ifbbench.errors import InputError
from ifbbench.model.config import ModelConfig

# Groups of 128 weights of 4 bits share a scale of 16.
INT4_SCALE_BYTES = 2 / 128


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of each of `tp_size` devices in one of `pp_size` pipeline stages.

    dtype: of the layers' weights: float32, bf16, fp16, fp8 (activations too) or int4 (weights alone). Embeddings and
    output layer stay in 16 bits, as quantised checkpoints have them.
    """

    model: ModelConfig
    dtype: str
    kv_cache_dtype: str
    tp_size: int = 1
    pp_size: int = 1

    def __post_init__(self) -> None:
        model = self.model
        if model.num_heads % self.tp_size or model.intermediate_size % self.tp_size:
            raise InputError(
                f"--tp_size: {self.tp_size} devices cannot share {model.num_heads} attention heads and an MLP of "
                f"{model.intermediate_size} evenly; choose a divisor of both."
            )
        if self.pp_size > model.num_layers:
            raise InputError(
                f"--pp_size: {self.pp_size} stages are more than the model's {model.num_layers} layers; choose fewer."
            )

    @property
    def compute_dtype(self) -> str:
        """Of activations, embeddings and the output layer."""
        return "bf16" if self.dtype in ("fp8", "int4") else self.dtype

    @property
    def compute_bytes(self) -> float:
        return DTYPE_BYTES[self.compute_dtype]

    @property
    def input_bytes(self) -> float:
        """Of one value that goes into a matrix product."""
        return DTYPE_BYTES["fp8"] if self.dtype == "fp8" else self.compute_bytes

    @property
    def attention_dtype(self) -> str:
        """In which context attention multiplies: 8 bits where both activations and cache have them."""
        return "fp8" if self.dtype == self.kv_cache_dtype == "fp8" else self.compute_dtype

    @property
    def weight_bytes(self) -> float:
        """Of one weight in a layer's matrices, its part of a scale included."""
        return DTYPE_BYTES[self.dtype] + (INT4_SCALE_BYTES if self.dtype == "int4" else 0)

    @property
    def layers(self) -> int:
        """Of the longest pipeline stage."""
        return -(-self.model.num_layers // self.pp_size)

    @property
    def query_size(self) -> int:
        return self.model.query_size // self.tp_size

    @property
    def kv_size(self) -> int:
        """Keys (or values) of one token and layer. With more devices than KV heads, several keep the same head."""
        return max(1, -(-self.model.num_kv_heads // self.tp_size)) * self.model.head_dim

    @property
    def intermediate_size(self) -> int:
        return self.model.intermediate_size // self.tp_size

    @property
    def gate_up_size(self) -> int:
        return self.model.gate_up_size // self.tp_size

    @property
    def vocab_size(self) -> int:
        return -(-self.model.vocab_size // self.tp_size)

    @property
    def layer_weights(self) -> int:
        """Weights in one layer's matrices."""
        attention, mlp = 2 * self.query_size + 2 * self.kv_size, self.gate_up_size + self.intermediate_size
        return self.model.hidden_size * (attention + mlp)

    @property
    def kv_bytes_per_token_and_layer(self) -> float:
        return 2 * self.kv_size * DTYPE_BYTES[self.kv_cache_dtype]

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token in all layers of a stage."""
        return self.layers * self.kv_bytes_per_token_and_layer

    @property
    def parameter_bytes(self) -> int:
        """Memory of the weights on the device that has the most: a stage's layers, and embeddings or output layer."""
        hidden = self.model.hidden_size
        layers = self.layers * self.layer_weights * self.weight_bytes
        tables = 1 if self.model.tie_word_embeddings or self.pp_size > 1 else 2
        vectors = self._norms_and_biases * self.layers / self.model.num_layers
        return round(layers + (tables * self.vocab_size * hidden + vectors) * self.compute_bytes)

    @property
    def _norms_and_biases(self) -> int:
        """Parameters of the whole model that are in no matrix; every device has them all."""
        model = self.model
        matrices = model.num_layers * Shard(model, self.dtype, self.kv_cache_dtype).layer_weights
        tables = 1 if model.tie_word_embeddings else 2
        return model.num_parameters - matrices - tables * model.vocab_size * model.hidden_size
