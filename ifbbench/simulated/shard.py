"""One device's share of a model, and how its memory is divided among weights, activations and the KV cache."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from ifbbench.errors import InputError
from ifbbench.models.config import ModelConfig, check_split
from ifbbench.models.layers import Mixer, Mlp
from ifbbench.models.lora_modules import device_pages, page_layout
from ifbbench.models.named_models import load_model_config
from ifbbench.settings.config import RunConfig
from ifbbench.settings.dtypes import DTYPE_BYTES
from ifbbench.settings.engines import SGLANG
from ifbbench.settings.fields import memory_size
from ifbbench.simulated.engines import load_overhead
from ifbbench.simulated.expert_load import ExpertLoad, load_shares
from ifbbench.simulated.hardware import HardwareProfile

# Bytes of scales for each weight: 16 bits for groups of 128 (int4, if a checkpoint has no other groups), a byte for 32
# or 16 (mxfp4, nvfp4), 32 bits for blocks of 128 by 128 (fp8_block).
INT4_SCALE_BYTES = 2
SCALE_BYTES = {"int4": INT4_SCALE_BYTES / 128, "mxfp4": 1 / 32, "nvfp4": 1 / 16, "fp8_block": 4 / 128**2}
# Weights that are multiplied by activations of 8 bits.
EIGHT_BITS = ("fp8", "fp8_block")
# CUDA context, workspaces of libraries and captured graphs; and the buffers of collectives where there are any.
RUNTIME_BYTES = 1_000_000_000
COLLECTIVE_BYTES = 1_000_000_000
# A logit in 16 bits, and cast to 32.
LOGIT_BYTES = 6
TOKENS_TO_MEASURE = 1024
# The share of the memory beside weights and activations that states of recurrent layers may take.
MAX_STATE_SHARE = 0.47

_log = logging.getLogger("ifbbench")


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of each of `tp_size` devices in one of `pp_size` pipeline stages.

    dtype: data type of the weights of the layers: float32, bf16, fp16, fp8 and fp8_block (activations too), int4, mxfp4
        or nvfp4. Embeddings and output layer stay in 16 bits beside those of fewer, as in quantised checkpoints.
    ep_size: number of parts of the devices that share the experts.
    attention_dp_size: number of parts that have requests of their own; then all weights but those of experts are
        divided within a part only.
    redundant_experts, expert_load: as in `ExpertLoad`, with the text of the setting.

    InputError if the model cannot be divided into that many parts.
    """

    model: ModelConfig
    dtype: str
    kv_cache_dtype: str
    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    attention_dp_size: int = 1
    redundant_experts: int = 0
    expert_load: str | None = None

    def __post_init__(self) -> None:
        check_split(self.model, self.tp_size, self.pp_size, self.ep_size, self.attention_dp_size)
        if self.model.num_experts:
            self.experts  # noqa: B018  raises for loads that do not fit the experts

    @classmethod
    def of_config(cls, model: ModelConfig, config: RunConfig) -> "Shard":
        """The share of each device under the settings of `config`."""
        dtype = config.weight_dtype
        return cls(
            model,
            dtype,
            config.kv_cache_dtype or dtype,
            config.tp_size,
            config.pp_size,
            config.ep_size,
            config.attention_dp_size,
            config.redundant_experts,
            config.expert_load,
        )

    # Data types and sizes of values.

    @property
    def compute_dtype(self) -> str:
        """Data type of activations, embeddings and the output layer."""
        return self.dtype if self.dtype in ("float32", "bf16", "fp16") else "bf16"

    @property
    def compute_bytes(self) -> float:
        return DTYPE_BYTES[self.compute_dtype]

    @property
    def input_bytes(self) -> float:
        """Bytes of one input value of a matrix product."""
        return DTYPE_BYTES["fp8"] if self.dtype in EIGHT_BITS else self.compute_bytes

    @property
    def attention_dtype(self) -> str:
        """Data type in which attention multiplies: 8 bits if both activations and KV cache have them."""
        has_both = self.kv_cache_dtype == "fp8" and self.dtype in (*EIGHT_BITS, "nvfp4")
        return "fp8" if has_both else self.compute_dtype

    def dtype_of(self, part: Mixer | Mlp) -> str:
        """Data type of the weights of a mixer or MLP.

        MXFP4 is that of experts only (gpt-oss), and NVFP4 leaves latent attention in 16 bits (nvidia/DeepSeek-R1-FP4).
        Beside these, parts keep 16 bits that the list of a quantized checkpoint names.
        """
        keeps = self.dtype == "mxfp4" and part is not Mlp.EXPERTS
        keeps |= self.dtype == "nvfp4" and part is Mixer.ATTENTION and self.model.latent is not None
        keeps |= part in self.model.unquantized
        return self.compute_dtype if keeps else self.dtype

    def weight_bytes_of(self, part: Mixer | Mlp) -> float:
        """Bytes of one weight in the matrices of a mixer or MLP, its part of a scale included."""
        dtype = self.dtype_of(part)
        if dtype == "int4" and self.model.weights_of_scale:
            return DTYPE_BYTES[dtype] + INT4_SCALE_BYTES / self.model.weights_of_scale
        return weight_bytes(dtype)

    # Sizes of matrices, in values.

    @property
    def layers(self) -> int:
        """Layers of the longest pipeline stage."""
        return -(-self.model.num_layers // self.pp_size)

    @property
    def attention_tp_size(self) -> int:
        """Devices that share attention, and the requests of a part."""
        return self.tp_size // self.attention_dp_size

    @property
    def heads(self) -> int:
        """Query heads of each device."""
        return self.model.num_heads // self.attention_tp_size

    @property
    def query_size(self) -> int:
        return self.model.query_size // self.attention_tp_size

    @property
    def kv_size(self) -> int:
        """Keys (or values) of one token and layer. With more devices than KV heads, several devices keep each head."""
        return max(1, -(-self.model.num_kv_heads // self.attention_tp_size)) * self.model.head_dim

    @property
    def intermediate_size(self) -> int:
        """The size of an MLP that every token passes; that of experts is `expert_size`."""
        return self.model.intermediate_size // self.attention_tp_size

    @property
    def gate_up_size(self) -> int:
        return self.model.gate_up_size // self.attention_tp_size

    @property
    def shared_expert_size(self) -> int:
        return self.model.shared_expert_size // self.attention_tp_size

    @property
    def expert_size(self) -> int:
        """Intermediate size of the share of a device in a routed expert."""
        return self.model.size_of_expert // (self.tp_size // self.ep_size)

    @property
    def expert_shape(self) -> tuple[int, int] | None:
        """Experts of each device, redundant ones left out, and their intermediate size there; None without experts."""
        return (self.model.num_experts // self.ep_size, self.expert_size) if self.model.num_experts else None

    @property
    def vocab_size(self) -> int:
        return -(-self.model.vocab_size // self.attention_tp_size)

    @property
    def experts(self) -> ExpertLoad:
        """The experts of a layer."""
        model = self.model
        shares = load_shares(self.expert_load, model.num_experts)
        return ExpertLoad(model.num_experts, model.experts_per_token, self.ep_size, self.redundant_experts, shares)

    def mixer_weights(self, mixer: Mixer) -> int:
        """Weights in the matrices of the mixer of one layer."""
        model = self.model
        if mixer is Mixer.ATTENTION and model.latent is not None:
            # Every device has the products with compressed queries and latent vectors.
            latent, hidden = model.latent, model.hidden_size
            shared = hidden * (latent.query_rank + latent.cached)
            return shared + (latent.matrices(hidden, model.num_heads) - shared) // self.attention_tp_size
        if mixer is Mixer.ATTENTION:
            return model.hidden_size * ((2 + model.gated_attention) * self.query_size + 2 * self.kv_size)
        if mixer is Mixer.RECURRENT and model.recurrent is not None:
            return model.recurrent.matrices(model.hidden_size) // self.attention_tp_size
        return 0

    @property
    def mlp_weights(self) -> int:
        """Weights in the matrices of an MLP that every token passes, without experts."""
        return self.model.hidden_size * (self.gate_up_size + self.intermediate_size)

    @property
    def expert_weights(self) -> int:
        """Weights in the matrices of one routed expert."""
        return self.model.hidden_size * (self.model.up_products + 1) * self.expert_size

    @property
    def shared_expert_weights(self) -> int:
        return self.model.hidden_size * (self.model.up_products + 1) * self.shared_expert_size

    @property
    def router_weights(self) -> int:
        """Weights of the product that chooses the experts of a layer; every device has them all."""
        return self.model.hidden_size * self.model.num_experts

    @property
    def layer_weights(self) -> float:
        """Weights in the matrices of a mean layer."""
        return self._per_layer(lambda part, weights: weights)

    @property
    def layer_bytes(self) -> float:
        """The same in bytes."""
        return self._per_layer(lambda part, weights: weights * self.weight_bytes_of(part))

    def _per_layer(self, size: Callable[[Mixer | Mlp, int], float]) -> float:
        """The sum of `size` of the parts of all layers and their weights, divided by the number of layers."""
        total, model = 0.0, self.model
        for kind, count in model.kinds.items():
            total += count * size(kind.mixer, self.mixer_weights(kind.mixer))
            if kind.mlp is Mlp.DENSE:
                total += count * size(kind.mlp, self.mlp_weights)
            elif kind.mlp is Mlp.EXPERTS:
                weights = self.experts.experts_per_part * self.expert_weights
                total += count * size(kind.mlp, weights + self.router_weights)
                total += count * size(Mlp.SHARED, self.shared_expert_weights)
        return total / model.num_layers

    # Memory, in bytes.

    @property
    def kv_bytes_per_token_and_layer(self) -> float:
        """Keys and values, or the latent vector, in a layer with attention. Every device has all of the latter."""
        values = 2 * self.kv_size if self.model.latent is None else self.model.latent.cached
        return values * DTYPE_BYTES[self.kv_cache_dtype]

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token in all layers of a stage."""
        with_attention = len(self.model.attention_layers)
        return self.layers * with_attention / self.model.num_layers * self.kv_bytes_per_token_and_layer

    @property
    def state_bytes_per_request(self) -> float:
        """The states of recurrent layers that each request in the running set has, in all layers of a stage."""
        model = self.model
        if model.recurrent is None:
            return 0.0
        of_layer = model.recurrent.bytes_per_request(self.compute_bytes) / self.attention_tp_size
        return self.layers * model.count(Mixer.RECURRENT) / model.num_layers * of_layer

    @property
    def parameter_bytes(self) -> int:
        """Weights on the device with the most: the layers of a stage, and embeddings or output layer."""
        model = self.model
        tables = 1 if model.tie_word_embeddings else 2
        # Norms, biases and learned positions are in no matrix; every device has those of its layers.
        vectors = model.num_parameters - sum(
            count * model.matrix_parameters(kind) for kind, count in model.kinds.items()
        )
        vectors -= tables * model.vocab_size * model.hidden_size
        if self.pp_size > 1:
            tables = 1
        return round(
            self.layers * self.layer_bytes
            + (tables * self.vocab_size * model.hidden_size + vectors * self.layers / model.num_layers)
            * self.compute_bytes
        )

    @property
    def draft_layer_bytes(self) -> int:
        """Weights of a layer for multi-token prediction, beside the tables that it shares with the model."""
        draft = replace(self, model=self.model.draft_layer, pp_size=1)
        joined = 2 * self.model.hidden_size**2 / self.attention_tp_size
        return round(draft.layer_bytes + joined * draft.weight_bytes_of(Mixer.ATTENTION))

    def activation_bytes(self, num_tokens: int, num_requests: int) -> int:
        """Peak of an iteration: hidden states and the intermediate values of MLP or attention, or the logits.

        num_tokens, num_requests: numbers for all parts of `attention_dp_size`, of which each has its share."""
        model, parts = self.model, self.attention_dp_size
        hidden, latent = model.hidden_size, model.latent
        mlp = 3 * hidden + max(
            self.gate_up_size + self.intermediate_size if model.count(Mlp.DENSE) else 0,
            (model.up_products + 1) * self.expert_size if model.num_experts else 0,
        )
        attention = 3 * hidden + 2 * self.query_size + 2 * self.kv_size
        if latent is not None:  # queries, and keys and values of all heads
            attention = 3 * hidden + self.heads * (2 * (latent.nope + latent.rope) + 2 * latent.value) + latent.cached
        logits = -(-num_requests // parts) * model.vocab_size * LOGIT_BYTES
        return round(max(-(-num_tokens // parts) * max(mlp, attention) * self.compute_bytes, logits))

    def kv_bytes_of_all_devices(self, kv_bytes: int) -> int:
        """KV cache of all devices together when each has `kv_bytes`. Heads that several devices keep count once."""
        if self.tp_size == self.pp_size == 1:
            return kv_bytes
        whole = Shard(self.model, self.dtype, self.kv_cache_dtype)
        return int(self.attention_dp_size * kv_bytes * whole.kv_bytes_per_token / self.kv_bytes_per_token)


def weight_bytes(dtype: str) -> float:
    """Bytes of one weight in the matrices of a layer, its part of a scale included."""
    return DTYPE_BYTES[dtype] + SCALE_BYTES.get(dtype, 0.0)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one device, in bytes.

    runtime: what is taken before the model is loaded.
    activations: activations of the largest iteration.
    kv_cache: the fraction of the rest that keys and values get.
    adapters: the cache of LoRA adapters.
    beside_weights: memory that `adapters` is a share of.
    states: states of recurrent layers, for `max_states` requests, None without such layers.
    """

    total: int
    runtime: int
    weights: int
    activations: int
    kv_cache: int
    adapters: int = 0
    beside_weights: int = 0
    states: int = 0
    max_states: int | None = None


def plan_memory(shard: Shard, hardware: HardwareProfile, config: RunConfig) -> MemoryPlan:
    """How the memory of each device is divided under the limits of `config`, which must be resolved.

    InputError if nothing is left for the KV cache."""
    runtime = 0 if hardware.is_cpu else RUNTIME_BYTES + COLLECTIVE_BYTES * (shard.tp_size * shard.pp_size > 1)
    weights = shard.parameter_bytes
    if config.draft_model is not None:
        weights += Shard.of_config(load_model_config(config.draft_model), config).parameter_bytes
    if config.draft_mtp is not None:
        weights += shard.draft_layer_bytes
    max_batch_size, left = config.max_batch_size or 1, hardware.memory_bytes - runtime - weights
    num_tokens = config.max_num_tokens
    if num_tokens is None:
        # At most all tokens that the KV cache has room for, which shares the memory with their activations.
        token_bytes = shard.activation_bytes(TOKENS_TO_MEASURE, 0) / TOKENS_TO_MEASURE
        share = config.kv_cache_free_gpu_mem_fraction
        in_cache = int(share * max(left, 0) / (shard.kv_bytes_per_token + share * token_bytes))
        num_tokens = min(in_cache, max_batch_size * (config.max_input_len or in_cache))
    activations = shard.activation_bytes(num_tokens, max_batch_size)
    overhead = None if config.engine_overhead is None else load_overhead(config.engine_overhead)
    left -= activations
    if left <= 0:
        raise InputError(
            f"the model does not fit: {hardware.name} has {memory_size(hardware.memory_bytes)}, and each device takes "
            f"{memory_size(weights)} for weights in {shard.dtype}, {memory_size(activations)} for activations of "
            f"--max_num_tokens {num_tokens} and {memory_size(runtime)} for the runtime. Raise --tp_size or "
            "--pp_size, or choose a smaller --dtype or another --device."
        )
    adapters, beside_weights = 0, left
    if config.uses_lora:
        layout, value_bytes = page_layout(config, shard.model), int(shard.compute_bytes)
        adapters = device_pages(config, layout, left, value_bytes) * layout.page_values * value_bytes
        left = max(0, left - adapters)
    states, max_states = 0, None
    if shard.state_bytes_per_request:
        # Keys and values get as much as states at least, close to SGLang's mamba_full_memory_ratio of 0.9.
        in_memory = int(MAX_STATE_SHARE * left / shard.state_bytes_per_request)
        max_states = min(requests_of_part(config), max(1, in_memory))
        states = round(max_states * shard.state_bytes_per_request)
        left -= states
    kv_cache, share_of_all = int(config.kv_cache_free_gpu_mem_fraction * left), config.gpu_memory_utilization
    if share_of_all is None and overhead is not None and overhead.kv_share_of == "total":
        share_of_all = config.kv_cache_free_gpu_mem_fraction
    if share_of_all is not None:
        # SGLang's share is of what is free before the model is loaded, and leaves the rest to activations.
        beside = (1 - share_of_all) * (hardware.memory_bytes - runtime) - activations
        if config.engine != SGLANG:
            beside = (1 - share_of_all) * hardware.memory_bytes
        kv_cache = left - int(beside)
        if kv_cache <= 0:
            is_utilization = config.gpu_memory_utilization is not None
            given = "gpu_memory_utilization" if is_utilization else "kv_cache_free_gpu_mem_fraction"
            raise InputError(
                f"--{given}: {share_of_all} of all {memory_size(hardware.memory_bytes)} leaves none for the KV cache "
                f"beside weights of {memory_size(weights)} and activations of {memory_size(activations)}, which count "
                "too. Raise it, or --tp_size."
            )
    return MemoryPlan(
        hardware.memory_bytes, runtime, weights, activations, kv_cache, adapters, beside_weights, states, max_states
    )


def requests_of_part(config: RunConfig) -> int:
    """Maximum number of requests in each part of the devices that has requests of its own."""
    return -(-(config.max_batch_size or 1) // config.attention_dp_size)


def as_states_allow(model: ModelConfig, hardware: HardwareProfile, config: RunConfig) -> RunConfig:
    """`config` with a maximum batch size for which memory has the states of recurrent layers, and without reuse: no
    state is kept at the end of a prefix.

    config: with resolved limits."""
    shard = Shard.of_config(model, config)
    if not shard.state_bytes_per_request:
        return config
    if config.enable_kv_cache_reuse:
        _log.warning("--enable_kv_cache_reuse: off, because recurrent layers keep no states of prefixes.")
        config = config.with_values(enable_kv_cache_reuse=False)
    states = plan_memory(shard, hardware, config).max_states
    batch = (states or 1) * shard.attention_dp_size
    if config.max_batch_size is None or batch >= config.max_batch_size:
        return config
    _log.warning(
        "--max_batch_size %d: memory has room for the states of %d requests, %s each on every device.",
        config.max_batch_size,
        batch,
        memory_size(shard.state_bytes_per_request),
    )
    return config.with_values(max_batch_size=batch)


def kv_memory_bytes(model: ModelConfig, hardware: HardwareProfile, config: RunConfig) -> int:
    """Bytes for the keys and values of all layers and heads, on all devices together, each counted once.

    config: with resolved limits. InputError if the weights do not fit.
    """
    hardware.check_dtype(config.weight_dtype)
    shard = Shard.of_config(model, config)
    return shard.kv_bytes_of_all_devices(plan_memory(shard, hardware, config).kv_cache)
