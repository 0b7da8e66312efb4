"""Settings of LoRA adapters."""

from dataclasses import dataclass
from functools import partial

from ifbbench.settings.fields import declare

MAX_LORAS = 100_000

_lora = partial(declare, "lora")


@dataclass(frozen=True)
class LoraSettings:
    """Settings of LoRA adapters."""

    lora_dir: str | None = _lora(
        None,
        "Adapters: one in each subdirectory, or one, as PEFT saves them (adapter_config.json and "
        "adapter_model.safetensors) or as arrays of TensorRT-LLM. A number as name is the LoRA task id; else they are "
        "numbered from 0 by name.",
        elsewhere="lora_path lora_paths lora_modules lora_adapter",
    )
    num_loras: int | None = _lora(
        None,
        "Requests of a trace without LoRA tasks draw one of N adapters: of random ones, or of the first ones in "
        "--lora_dir.",
        minimum=1,
        maximum=MAX_LORAS,
        unit="adapters",
    )
    lora_rank: int | None = _lora(None, "Rank of random adapters. Default: 8.", minimum=1)
    max_lora_rank: int = _lora(64, "Maximum rank of an adapter.", minimum=1, aliases=("max_adapter_size",))
    lora_device_mem_fraction: float | None = _lora(
        None,
        "Share of the memory beside the weights for a cache of adapters on the device, also for adapters that "
        "requests bring. Default: 0.02, with adapters.",
        above=0.0,
        maximum=0.99,
        aliases=("device_cache_percent",),
        elsewhere="lora_cache_gpu_memory_fraction",
    )
    lora_num_device_mod_layers: int | None = _lora(
        None,
        "Size of this cache instead: rows of rank 1 of the largest module in one layer.",
        minimum=1,
        aliases=("num_device_module_layer",),
        elsewhere="max_loras max_loras_per_batch",
    )
    lora_host_cache_bytes: int | None = _lora(
        None,
        "Cache of adapters in host memory. Default, with adapters: for all of them, at least 1 GiB.",
        minimum=0,
        maximum=2**53,
        unit="bytes",
        elsewhere="lora_cache_host_memory_bytes max_cpu_loras",
    )
