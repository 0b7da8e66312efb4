"""One device's share of a model, and how its memory is divided among weights, activations and the KV cache."""

from dataclasses import dataclass

from ifbbench.errors import InputError
from ifbbench.models.config import ModelConfig, check_split
from ifbbench.models.lora_modules import device_pages, page_layout
from ifbbench.models.named_models import load_model_config
from ifbbench.settings.config import DTYPE_BYTES, RunConfig
from ifbbench.settings.fields import memory_size
from ifbbench.simulated.engines import load_overhead
from ifbbench.simulated.hardware import HardwareProfile

# Groups of 128 weights of 4 bits share a scale of 16 bits.
INT4_SCALE_BYTES = 2 / 128
# CUDA context, workspaces of libraries and captured graphs; and the buffers of collectives where there are any.
RUNTIME_BYTES = 1_000_000_000
COLLECTIVE_BYTES = 1_000_000_000
# A logit in 16 bits, and cast to 32.
LOGIT_BYTES = 6
TOKENS_TO_MEASURE = 1024


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of each of `tp_size` devices in one of `pp_size` pipeline stages.

    dtype: of the weights of the layers: float32, bf16, fp16, fp8 (activations too) or int4 (weights only). Embeddings
    and output layer stay in 16 bits beside fp8 and int4, as in quantised checkpoints.
    InputError if the model cannot be divided into that many parts.
    """

    model: ModelConfig
    dtype: str
    kv_cache_dtype: str
    tp_size: int = 1
    pp_size: int = 1

    def __post_init__(self) -> None:
        check_split(self.model, self.tp_size, self.pp_size)

    @classmethod
    def of_config(cls, model: ModelConfig, config: RunConfig) -> "Shard":
        """The share of each device under the settings of `config`."""
        dtype = config.weight_dtype
        return cls(model, dtype, config.kv_cache_dtype or dtype, config.tp_size, config.pp_size)

    # Data types and sizes of values.

    @property
    def compute_dtype(self) -> str:
        """Data type of activations, embeddings and the output layer."""
        return "bf16" if self.dtype in ("fp8", "int4") else self.dtype

    @property
    def compute_bytes(self) -> float:
        return DTYPE_BYTES[self.compute_dtype]

    @property
    def input_bytes(self) -> float:
        """Bytes of one input value of a matrix product."""
        return DTYPE_BYTES["fp8"] if self.dtype == "fp8" else self.compute_bytes

    @property
    def attention_dtype(self) -> str:
        """Data type in which context attention multiplies: 8 bits if both activations and KV cache have them."""
        return "fp8" if self.dtype == self.kv_cache_dtype == "fp8" else self.compute_dtype

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight in the matrices of a layer, its part of a scale included."""
        return DTYPE_BYTES[self.dtype] + (INT4_SCALE_BYTES if self.dtype == "int4" else 0)

    # Sizes of matrices, in values.

    @property
    def layers(self) -> int:
        """Layers of the longest pipeline stage."""
        return -(-self.model.num_layers // self.pp_size)

    @property
    def query_size(self) -> int:
        return self.model.query_size // self.tp_size

    @property
    def kv_size(self) -> int:
        """Keys (or values) of one token and layer. With more devices than KV heads, several devices keep each head."""
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
    def attention_weights(self) -> int:
        """Weights in the matrices of the attention of one layer."""
        return 2 * self.model.hidden_size * (self.query_size + self.kv_size)

    @property
    def mlp_weights(self) -> int:
        """Weights in the matrices of one MLP: of a layer, or of one expert."""
        return self.model.hidden_size * (self.gate_up_size + self.intermediate_size)

    @property
    def router_weights(self) -> int:
        """Weights of the product that chooses the experts of a layer; every device has them all."""
        return self.model.hidden_size * self.model.num_experts

    @property
    def layer_weights(self) -> int:
        """Weights in the matrices of one layer."""
        return self.attention_weights + self.router_weights + max(1, self.model.num_experts) * self.mlp_weights

    def experts_read(self, tokens: int) -> float:
        """The expected number of MLPs in a layer that `tokens` are routed to, if each expert is as likely: 1 without
        experts."""
        experts, chosen = self.model.num_experts, self.model.experts_per_token
        return experts * (1 - (1 - chosen / experts) ** tokens) if experts else 1.0

    @property
    def mlps_per_token(self) -> int:
        """MLPs that each token passes in a layer."""
        return self.model.experts_per_token if self.model.num_experts else 1

    # Memory, in bytes.

    @property
    def kv_bytes_per_token_and_layer(self) -> float:
        return 2 * self.kv_size * DTYPE_BYTES[self.kv_cache_dtype]

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token in all layers of a stage."""
        return self.layers * self.kv_bytes_per_token_and_layer

    @property
    def parameter_bytes(self) -> int:
        """Weights on the device with the most: the layers of a stage, and embeddings or output layer."""
        model = self.model
        unshared = Shard(model, self.dtype, self.kv_cache_dtype)
        tables = 1 if model.tie_word_embeddings else 2
        # Norms, biases and learned positions are in no matrix; every device has those of its layers.
        vectors = model.num_parameters - model.num_layers * unshared.layer_weights
        vectors -= tables * model.vocab_size * model.hidden_size
        if self.pp_size > 1:
            tables = 1
        return round(
            self.layers * self.layer_weights * self.weight_bytes
            + (tables * self.vocab_size * model.hidden_size + vectors * self.layers / model.num_layers)
            * self.compute_bytes
        )

    def activation_bytes(self, max_num_tokens: int, max_batch_size: int) -> int:
        """Peak of an iteration: hidden states and the intermediate values of MLP or attention, or the logits."""
        hidden = self.model.hidden_size
        mlp = 3 * hidden + self.gate_up_size + self.intermediate_size
        attention = 3 * hidden + 2 * self.query_size + 2 * self.kv_size
        logits = max_batch_size * self.model.vocab_size * LOGIT_BYTES
        return round(max(max_num_tokens * max(mlp, attention) * self.compute_bytes, logits))

    def kv_bytes_of_all_devices(self, kv_bytes: int) -> int:
        """KV cache of all devices together when each has `kv_bytes`. Heads that several devices keep count once."""
        if self.tp_size == self.pp_size == 1:
            return kv_bytes
        whole = Shard(self.model, self.dtype, self.kv_cache_dtype)
        return int(kv_bytes * whole.kv_bytes_per_token / self.kv_bytes_per_token)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one device, in bytes.

    runtime: taken before the model is loaded. activations: of the largest iteration. kv_cache: the fraction of the rest
    that keys and values get. adapters: the cache of LoRA adapters; beside_weights: what that is a share of.
    """

    total: int
    runtime: int
    weights: int
    activations: int
    kv_cache: int
    adapters: int = 0
    beside_weights: int = 0


def plan_memory(shard: Shard, hardware: HardwareProfile, config: RunConfig) -> MemoryPlan:
    """How the memory of each device is divided under the limits of `config`, which must be resolved.

    InputError if nothing is left for the KV cache."""
    runtime = 0 if hardware.is_cpu else RUNTIME_BYTES + COLLECTIVE_BYTES * (shard.tp_size * shard.pp_size > 1)
    weights = shard.parameter_bytes
    if config.draft_model is not None:
        weights += Shard.of_config(load_model_config(config.draft_model), config).parameter_bytes
    max_batch_size, left = config.max_batch_size or 1, hardware.memory_bytes - runtime - weights
    max_num_tokens = config.max_num_tokens
    if max_num_tokens is None:
        # At most all tokens that the KV cache has room for, which shares the memory with their activations.
        token_bytes = shard.activation_bytes(TOKENS_TO_MEASURE, 0) / TOKENS_TO_MEASURE
        share = config.kv_cache_free_gpu_mem_fraction
        in_cache = int(share * max(left, 0) / (shard.kv_bytes_per_token + share * token_bytes))
        max_num_tokens = min(in_cache, max_batch_size * (config.max_input_len or in_cache))
    activations = shard.activation_bytes(max_num_tokens, max_batch_size)
    overhead = None if config.engine_overhead is None else load_overhead(config.engine_overhead)
    left -= activations
    if left <= 0:
        raise InputError(
            f"the model does not fit: {hardware.name} has {memory_size(hardware.memory_bytes)}, and each device takes "
            f"{memory_size(weights)} for weights in {shard.dtype}, {memory_size(activations)} for activations of "
            f"--max_num_tokens {max_num_tokens} and {memory_size(runtime)} for the runtime. Raise --tp_size or "
            "--pp_size, or choose a smaller --dtype or another --device."
        )
    adapters, beside_weights = 0, left
    if config.uses_lora:
        layout, value_bytes = page_layout(config, shard.model), int(shard.compute_bytes)
        adapters = device_pages(config, layout, left, value_bytes) * layout.page_values * value_bytes
        left = max(0, left - adapters)
    kv_cache, share_of_all = int(config.kv_cache_free_gpu_mem_fraction * left), config.gpu_memory_utilization
    if share_of_all is None and overhead is not None and overhead.kv_share_of == "total":
        share_of_all = config.kv_cache_free_gpu_mem_fraction
    if share_of_all is not None:
        kv_cache = left - int((1 - share_of_all) * hardware.memory_bytes)
        if kv_cache <= 0:
            is_utilization = config.gpu_memory_utilization is not None
            given = "gpu_memory_utilization" if is_utilization else "kv_cache_free_gpu_mem_fraction"
            raise InputError(
                f"--{given}: {share_of_all} of all {memory_size(hardware.memory_bytes)} leaves none for the KV cache "
                f"beside weights of {memory_size(weights)} and activations of {memory_size(activations)}, which count "
                "too. Raise it, or --tp_size."
            )
    return MemoryPlan(hardware.memory_bytes, runtime, weights, activations, kv_cache, adapters, beside_weights)


def kv_memory_bytes(model: ModelConfig, hardware: HardwareProfile, config: RunConfig) -> int:
    """Bytes for the keys and values of all layers and heads, on all devices together, each counted once.

    config: with resolved limits. InputError if the weights do not fit.
    """
    hardware.check_dtype(config.weight_dtype)
    shard = Shard.of_config(model, config)
    return shard.kv_bytes_of_all_devices(plan_memory(shard, hardware, config).kv_cache)
