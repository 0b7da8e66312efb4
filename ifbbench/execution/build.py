"""From settings to an executor: the device, the model on it, how much KV cache fits, and the executor itself."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ifbbench.config import RunConfig
from ifbbench.errors import InputError
from ifbbench.execution.model_executor import ModelExecutor
from ifbbench.model.config import TINY, ModelConfig, load_model_config
from ifbbench.model.llama import LlamaModel
from ifbbench.model.weights import load_weights, random_weights

TORCH_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# On a CPU the KV cache shares memory with all else, and runs there are small.
MAX_CPU_KV_BYTES = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights on a device."""

    config: ModelConfig
    model: LlamaModel
    device: torch.device
    dtype: torch.dtype


def choose_device(config: RunConfig) -> torch.device:
    """The device that `config.device` means; InputError if it is cuda and there is none, or null, which is none."""
    if config.device == "null":
        raise InputError("--device: null runs no model; expected auto, cpu or cuda here.")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device: 'cuda' was asked for, but PyTorch finds no CUDA device here. Use --device cpu, or "
                         "check the driver and that PyTorch is a CUDA build.")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def load_model(config: RunConfig) -> LoadedModel:
    """The model that `config` names on its device: `tiny` with weights from `config.seed`, or a directory's."""
    device = choose_device(config)
    dtype = TORCH_DTYPES[config.dtype]
    model_config = load_model_config(config.model)
    with torch.inference_mode():
        if config.model == TINY:
            weights = random_weights(model_config, config.seed, device, dtype)
        else:
            weights = load_weights(model_config, Path(config.model), device, dtype)
        return LoadedModel(model_config, LlamaModel(model_config, weights), device, dtype)


def kv_bytes_per_token(config: RunConfig, model_config: ModelConfig) -> int:
    """Bytes of KV cache that one token takes with the run's data type."""
    return model_config.kv_bytes_per_token(TORCH_DTYPES[config.dtype].itemsize)


def default_kv_tokens(config: RunConfig, model_config: ModelConfig, device: torch.device) -> int:
    """How many tokens of KV cache fit: `kv_cache_free_gpu_mem_fraction` of the memory that is free now.

    On a CPU at most 2 GiB of it. Load the model first, for its weights count.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        budget = config.kv_cache_free_gpu_mem_fraction * free
    else:
        budget = min(config.kv_cache_free_gpu_mem_fraction * _available_host_bytes(), MAX_CPU_KV_BYTES)
    return int(budget) // kv_bytes_per_token(config, model_config)


def make_executor(
    loaded: LoadedModel, num_slots: int, num_blocks: int, tokens_per_block: int, max_seq_len: int
) -> ModelExecutor:
    """An executor with a KV cache of `num_blocks` blocks for up to `num_slots` sequences at once."""
    return ModelExecutor(loaded.model, num_slots, num_blocks, tokens_per_block, max_seq_len)


def _available_host_bytes() -> int:
    """Memory that can be taken without swapping; half of all memory where the system does not tell."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text(encoding="ascii").splitlines() if meminfo.exists() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
