"""Data types by the names of settings, and which device can have which."""

import torch

from ifbbench.config import RunConfig
from ifbbench.errors import InputError
from ifbbench.model.config import ModelConfig
from ifbbench.model.linear import FP8_MULTIPLE, Fp8Linear, MakeProduct, make_linear

TORCH_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What keys and values may be stored as; fp8 is e4m3, without scales.
KV_CACHE_DTYPES = TORCH_DTYPES | {"fp8": torch.float8_e4m3fn}
# The first GPUs whose matrix units, and whose Triton, know eight-bit floats: Ada, then Hopper.
FIRST_CAPABILITY_WITH_FP8 = (8, 9)


def compute_dtype(config: RunConfig) -> torch.dtype:
    """What activations, embeddings, norms and the output layer are in: beside eight-bit weights, bfloat16."""
    return torch.bfloat16 if config.weight_dtype == "fp8" else TORCH_DTYPES[config.weight_dtype]


def product_maker(config: RunConfig) -> MakeProduct:
    """What makes products of the layers' weights."""
    return Fp8Linear if config.weight_dtype == "fp8" else make_linear


def check_data_types(config: RunConfig, model: ModelConfig, device: torch.device) -> None:
    """InputError if `device` does not have the data types of weights or KV cache, or fp8 products not the model's
    sizes."""
    asked = [name for name in ("dtype", "kv_cache_dtype") if getattr(config, name) == "fp8"]
    if not asked or (device.type != "cuda" and asked == ["kv_cache_dtype"]):
        return
    needed = ".".join(map(str, FIRST_CAPABILITY_WITH_FP8))
    if device.type != "cuda":
        raise InputError(f"--dtype: fp8 weights need a GPU of compute capability {needed} or higher, and this run is "
                         f"on {device}; choose float32, bf16 or fp16, or --device sim:PROFILE.")
    found = torch.cuda.get_device_capability(device)
    if found < FIRST_CAPABILITY_WITH_FP8:
        raise InputError(f"--{asked[0]}: fp8 needs a GPU of compute capability {needed} or higher; "
                         f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}. Choose bf16 or fp16.")
    sizes = (model.hidden_size, model.query_size, model.kv_size, model.intermediate_size)
    if "dtype" in asked and any(size % FP8_MULTIPLE for size in sizes):
        raise InputError(f"--dtype: fp8 weights need sizes that are multiples of {FP8_MULTIPLE}; model {config.model} "
                         f"has hidden, query, KV and feed-forward sizes of {', '.join(map(str, sizes))}. Choose bf16.")
