"""The engine of a simulated device: no tensors, a cost model and a virtual clock."""

from ifbbench.api.cache_layout import cache_layout, windows_of_layers
from ifbbench.api.engine import Engine, with_cache_size
from ifbbench.api.resolve import batching_config, resolve_limits
from ifbbench.clock import VirtualClock
from ifbbench.config import RunConfig
from ifbbench.model.config import ModelConfig
from ifbbench.simulation.cost_model import CostModel
from ifbbench.simulation.executor import SimulatedExecutor
from ifbbench.simulation.hardware import load_hardware
from ifbbench.simulation.shard import kv_memory_bytes


def simulated_engine(config: RunConfig, model: ModelConfig, beam_width: int) -> Engine:
    """`model` on the hardware that `config.device` names. InputError if it is unknown, or the model does not fit."""
    hardware = load_hardware(config.hardware or "")
    # Nothing is computed, so the model's positions are no limit to what is asked for.
    longest = max(model.max_position_embeddings, config.max_seq_len or 0)
    resolved = resolve_limits(config, longest, hardware.is_cpu, beam_width)
    memory_bytes = kv_memory_bytes(model, hardware, resolved)
    layout = cache_layout(resolved, model, memory_bytes)
    limits = batching_config(resolved, layout, vocab_size=None)
    clock = VirtualClock()
    cost_model = CostModel(
        model, hardware, dtype=resolved.weight_dtype, kv_cache_dtype=resolved.kv_cache_dtype or resolved.weight_dtype,
        tp_size=resolved.tp_size, pp_size=resolved.pp_size,
    )  # fmt: skip
    executor = SimulatedExecutor(cost_model, clock, windows_of_layers(layout, model))
    return Engine(
        executor, clock, with_cache_size(resolved, limits), limits, model, config.device, makes_tokens=False
    )  # fmt: skip
