"""The device itself: what it is called, how fast it multiplies and copies, and how much memory it has."""

import dataclasses
import math
import os

import torch

from ifbbench.api.engine import Engine
from ifbbench.errors import InputError
from ifbbench.execution.build import TORCH_DTYPES
from ifbbench.execution.device import copy_bytes_per_s, matmul_flops_per_s
from ifbbench.execution.host import MAX_CPU_KV_BYTES, available_host_bytes
from ifbbench.recording import environment
from ifbbench.simulation.hardware import HardwareProfile, load_hardware
from ifbbench.simulation.memory import plan_memory
from ifbbench.simulation.shard import Shard

# The built-in profile of each compute capability, whose architecture and interconnect a calibrated one takes over.
PROFILE_OF_CAPABILITY = {
    (8, 0): "a100-80gb-sxm", (8, 6): "a10g", (8, 9): "l40s", (9, 0): "h100-sxm", (10, 0): "b200",
}  # fmt: skip


def measured_device(engine: Engine) -> HardwareProfile:
    """The device that `engine` runs on: peaks and memory measured here, all else from the built-in profile that is like
    it. InputError for a GPU that none is like."""
    device = torch.device(engine.device)
    dtype = engine.config.weight_dtype
    base = load_hardware("cpu" if device.type == "cpu" else _like(torch.cuda.get_device_capability(device)))
    return dataclasses.replace(
        base,
        title=environment.hardware()["cpu"] if device.type == "cpu" else torch.cuda.get_device_name(device),
        peak_flops={dtype: matmul_flops_per_s(device, TORCH_DTYPES[dtype])},
        memory_bytes=_memory_bytes(engine, device, base),
        memory_bandwidth=copy_bytes_per_s(device),
        cache_bytes=_cache_bytes(device) or base.cache_bytes,
    )


def _like(capability: tuple[int, int]) -> str:
    if capability not in PROFILE_OF_CAPABILITY:
        known = ", ".join(f"{major}.{minor}" for major, minor in PROFILE_OF_CAPABILITY)
        raise InputError(
            f"--device: no hardware profile is like a GPU of compute capability {capability[0]}.{capability[1]}; "
            f"expected one of {known}. Calibrate on such a GPU."
        )
    return PROFILE_OF_CAPABILITY[capability]


def _cache_bytes(device: torch.device) -> int:
    """Of the last-level cache; 0 if the system does not say."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
    return max(os.sysconf("SC_LEVEL3_CACHE_SIZE"), 0) if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names else 0


def _memory_bytes(engine: Engine, device: torch.device, base: HardwareProfile) -> int:
    """All memory of a GPU. Of a CPU, so much that a simulated run with these settings has a real one's KV cache."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    config = engine.config
    fraction = config.kv_cache_free_gpu_mem_fraction
    kv_cache_dtype = config.kv_cache_dtype or config.weight_dtype
    plan = plan_memory(
        Shard(engine.model, config.weight_dtype, kv_cache_dtype), base, max_num_tokens=config.max_num_tokens,
        max_batch_size=engine.limits.max_batch_size, kv_fraction=fraction,
    )  # fmt: skip
    return plan.weights + plan.activations + math.ceil(min(available_host_bytes(), MAX_CPU_KV_BYTES / fraction))
