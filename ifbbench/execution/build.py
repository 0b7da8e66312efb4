"""From settings to an executor: the device, the model on it, how much KV cache fits, and the executor itself."""

from dataclasses import dataclass
from functools import partial

import torch

from ifbbench.config import RunConfig
from ifbbench.engine.kv_cache.sizing import CacheLayout
from ifbbench.errors import InputError
from ifbbench.execution.data_types import KV_CACHE_DTYPES, check_data_types, compute_dtype, product_maker
from ifbbench.execution.device_memory import (
    LOWER_FOR_CONTIGUOUS_CACHE,
    LOWER_FOR_LARGEST_BATCH,
    LOWER_FOR_PAGED_CACHE,
    LOWER_FOR_WEIGHTS,
    free_bytes,
    needing_memory,
)
from ifbbench.execution.host_memory import MAX_CPU_KV_BYTES
from ifbbench.execution.model_executor import ModelExecutor
from ifbbench.execution.profiling import activation_bytes
from ifbbench.execution.step_profile import StepProfile
from ifbbench.execution.timed_executor import TimedExecutor
from ifbbench.model.config import ModelConfig, load_model_config
from ifbbench.model.llama import LlamaModel
from ifbbench.model.make_model import make_model
from ifbbench.model.model_path import weights_path
from ifbbench.model.weights import load_weights, random_weights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights on a device. dtype: what it computes in."""

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


def check_weights_fit(config: RunConfig, weight_bytes: int, device: torch.device) -> None:
    """InputError, before anything is loaded, if the weights take more than the device's free memory."""
    free = free_bytes(device)
    if weight_bytes > free:
        raise InputError(f"--model: the weights of {config.model} take {weight_bytes:,} bytes in "
                         f"{config.weight_dtype}, but {free:,} are free on {device}. Choose a smaller model or "
                         "--dtype, or --device sim:PROFILE.")


def load_model(config: RunConfig) -> LoadedModel:
    """The model that `config` names on its device. A built-in shape gets random weights from `config.seed`.

    InputError if the device's memory ends before all weights are there, or it does not have the data types asked for.
    """
    device, dtype = choose_device(config), compute_dtype(config)
    model_config, path = load_model_config(config.model), weights_path(config.model)
    check_data_types(config, model_config, device)
    make_product = product_maker(config)
    doing = f"loading the weights of {config.model} in {config.weight_dtype}"
    with torch.inference_mode(), needing_memory(doing, LOWER_FOR_WEIGHTS, device):
        if path is None:
            weights = random_weights(model_config, config.seed, device, dtype, make_product)
        else:
            weights = load_weights(model_config, path, device, dtype, make_product)
        return LoadedModel(model_config, make_model(model_config, weights), device, dtype)


def kv_memory(config: RunConfig, loaded: LoadedModel) -> int:
    """Bytes that keys and values may take: `kv_cache_free_gpu_mem_fraction` of the memory that is free now.

    On CUDA that is without what the largest batch takes while it runs; on a CPU at most 2 GiB. `config` has its limits
    resolved. InputError if that batch does not fit.
    """
    if loaded.device.type == "cuda":
        longest = min(config.max_num_tokens, loaded.config.max_position_embeddings)
        doing = f"finding out what the largest batch, {longest:,} tokens, takes"
        with needing_memory(doing, LOWER_FOR_LARGEST_BATCH, loaded.device):
            activations = activation_bytes(loaded.model, longest, config.tokens_per_block)
        return int(config.kv_cache_free_gpu_mem_fraction * max(0, free_bytes(loaded.device) - activations))
    return int(min(config.kv_cache_free_gpu_mem_fraction * free_bytes(loaded.device), MAX_CPU_KV_BYTES))


def make_executor(
    loaded: LoadedModel, num_slots: int, num_blocks: int, tokens_per_block: int, max_seq_len: int,
    *, layout: CacheLayout | None = None, kv_cache_dtype: str | None = None, profile: StepProfile | None = None,
) -> ModelExecutor:
    """An executor with a KV cache of `num_blocks` blocks for up to `num_slots` sequences at once.

    layout: the KV cache, if it is another than that. kv_cache_dtype: one of KV_CACHE_DTYPES, the model's if None.
    profile: to note times in, if they are wanted. InputError if memory does not have the cache.
    """
    make = ModelExecutor if profile is None else partial(TimedExecutor, profile=profile)
    is_contiguous = layout is not None and layout.is_contiguous
    places = f"{num_slots:,} sequences" if is_contiguous else f"{num_blocks:,} blocks"
    advice = LOWER_FOR_CONTIGUOUS_CACHE if is_contiguous else LOWER_FOR_PAGED_CACHE
    with needing_memory(f"making the KV cache of {places}", advice, loaded.device):
        return make(
            loaded.model, num_slots, num_blocks, tokens_per_block, max_seq_len, layout=layout,
            kv_cache_dtype=None if kv_cache_dtype is None else KV_CACHE_DTYPES[kv_cache_dtype],
        )  # fmt: skip
