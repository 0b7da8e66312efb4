"""What fits into a device's memory: weights, activations, and the KV cache in what is left."""

from dataclasses import dataclass

from ifbbench.config import RunConfig
from ifbbench.errors import InputError
from ifbbench.model.config import ModelConfig
from ifbbench.simulation.hardware import HardwareProfile
from ifbbench.simulation.shard import Shard

# CUDA context, libraries' workspaces and captured graphs; and the buffers of the collectives, where there are any.
RUNTIME_BYTES = 1_000_000_000
COLLECTIVE_BYTES = 1_000_000_000
# In 16 bits, and cast to 32.
LOGIT_BYTES = 6


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one device, in bytes.

    total: all of it. runtime: taken before the model. weights; activations: of the largest iteration. kv_cache: the
    share of what is left that keys and values get.
    """

    total: int
    runtime: int
    weights: int
    activations: int
    kv_cache: int


def plan_memory(
    shard: Shard, hardware: HardwareProfile, *, max_num_tokens: int, max_batch_size: int, kv_fraction: float
) -> MemoryPlan:
    """How the memory of each device is shared out. InputError if nothing is left for the KV cache."""
    runtime = 0 if hardware.is_cpu else RUNTIME_BYTES + COLLECTIVE_BYTES * (shard.tp_size * shard.pp_size > 1)
    activations = _activation_bytes(shard, max_num_tokens, max_batch_size)
    left = hardware.memory_bytes - runtime - shard.parameter_bytes - activations
    if left <= 0:
        raise InputError(
            f"the model does not fit: of the {hardware.memory_bytes:,} bytes of {hardware.name}, weights in "
            f"{shard.dtype} take {shard.parameter_bytes:,} on each device, activations of --max_num_tokens "
            f"{max_num_tokens} {activations:,} and the runtime {runtime:,}. Raise --tp_size or --pp_size, or choose a "
            "smaller --dtype or another --device."
        )
    return MemoryPlan(hardware.memory_bytes, runtime, shard.parameter_bytes, activations, int(kv_fraction * left))


def kv_memory_bytes(model: ModelConfig, hardware: HardwareProfile, config: RunConfig) -> int:
    """Bytes that the keys and values of all layers and heads may take, on all devices together, each kept once.

    config: with resolved limits. InputError if the weights do not fit.
    """
    hardware.check_dtype(config.weight_dtype)
    shard = shard_of(model, config)
    plan = plan_memory(
        shard, hardware, max_num_tokens=config.max_num_tokens, max_batch_size=config.max_batch_size or 1,
        kv_fraction=config.kv_cache_free_gpu_mem_fraction,
    )  # fmt: skip
    return kv_bytes_of_all_devices(shard, plan.kv_cache)


def kv_bytes_of_all_devices(shard: Shard, kv_bytes: int) -> int:
    """What the devices hold together when each has `kv_bytes` for keys and values. Heads that several devices keep
    count once."""
    if shard.tp_size == shard.pp_size == 1:
        return kv_bytes
    whole = Shard(shard.model, shard.dtype, shard.kv_cache_dtype)
    return int(kv_bytes * whole.kv_bytes_per_token / shard.kv_bytes_per_token)


def shard_of(model: ModelConfig, config: RunConfig) -> Shard:
    """Each device's share of `model` under `config` with resolved limits."""
    dtype = config.weight_dtype
    return Shard(model, dtype, config.kv_cache_dtype or dtype, config.tp_size, config.pp_size)


def _activation_bytes(shard: Shard, max_num_tokens: int, max_batch_size: int) -> int:
    """The most that lives at once: hidden states and what an MLP or attention makes of them, or the logits."""
    hidden = shard.model.hidden_size
    mlp = 3 * hidden + shard.gate_up_size + shard.intermediate_size
    attention = 3 * hidden + 2 * shard.query_size + 2 * shard.kv_size
    logits = max_batch_size * shard.model.vocab_size * LOGIT_BYTES
    return round(max(max_num_tokens * max(mlp, attention) * shard.compute_bytes, logits))
