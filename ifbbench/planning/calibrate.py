"""`ifbbench calibrate`: measure a device, fit the cost model to it, and write its hardware profile and a chart."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ifbbench.api.engine import Engine, Progress, build_engine, warm_up
from ifbbench.config import RunConfig
from ifbbench.errors import InputError
from ifbbench.execution.build import TORCH_DTYPES, choose_device
from ifbbench.execution.device import copy_bytes_per_s, matmul_flops_per_s
from ifbbench.execution.host import MAX_CPU_KV_BYTES, available_host_bytes
from ifbbench.planning.fit import FitError, Floats, Point, fit, points_of, predicted_s
from ifbbench.planning.measure import measure, scenarios
from ifbbench.recording import run_directory
from ifbbench.simulation.cost_model import CostModel
from ifbbench.simulation.hardware import SUFFIX, HardwareProfile, load_hardware, write_profile
from ifbbench.simulation.shard import Shard

ROUNDS = 8
# See `scenarios`. A GPU does in a second what takes a CPU a minute.
CONTEXT_PASSES = {"cpu": 2, "cuda": 16}
# The built-in profile for each compute capability; a calibrated profile takes its architecture and interconnect.
PROFILE_OF_CAPABILITY = {
    (8, 0): "a100-80gb-sxm", (8, 6): "a10g", (8, 9): "l40s", (9, 0): "h100-sxm", (10, 0): "b200",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Calibration:
    """A calibrated profile, its file, the measured points that it was fitted to, and the seconds predicted for each,
    [points]."""

    path: Path
    profile: HardwareProfile
    points: Sequence[Point]
    predicted_s: Floats


def calibrate(
    config: RunConfig, output: Path | None = None, *, overwrite: bool = False, quick: bool = False,
    progress: Progress | None = None, owns_process: bool = False,
) -> Calibration:  # fmt: skip
    """Measure the executor that `config` builds, and write its profile to `output` and a chart (.png) beside it.

    output: DEVICE-MODEL.toml in the working directory if None. quick: a few batches only, for a first impression.
    owns_process: see `build_engine`.
    InputError, before anything is measured, for a device that cannot be measured, settings that contradict each other,
    and an output that exists without `overwrite`.
    """
    if config.makes_no_tokens:
        raise InputError(f"--device: {config.device} computes nothing that could be measured; expected cpu or cuda.")
    if config.dtype not in (None, *TORCH_DTYPES):
        raise InputError(f"--dtype: {config.dtype} is not calibrated; expected one of {', '.join(TORCH_DTYPES)}.")
    output = output or Path(f"{choose_device(config).type}-{Path(config.model).name}{SUFFIX}")
    chart = _chart_beside(output, overwrite)
    engine = build_engine(config, owns_process=owns_process)
    try:
        warm_up(engine, progress)
        workloads = scenarios(engine.limits, config.seed, passes=CONTEXT_PASSES[engine.device], quick=quick)
        if not workloads:
            raise InputError("no request is short enough to be measured; raise --max_seq_len or --max_num_tokens.")
        hardware = replace(_measured_device(engine), name=output.stem)
        samples = measure(engine, workloads, 1 if quick else ROUNDS, progress)
    finally:
        engine.executor.close()
    found = calibrated(engine, hardware, points_of(samples), output)
    write_profile(found.profile, output, f"Measured by `ifbbench calibrate --device {config.device}`.")
    # Imported here because matplotlib takes long to load.
    from ifbbench.planning.calibration_tables import write_chart

    write_chart(found, chart)
    return found


def _chart_beside(output: Path, overwrite: bool) -> Path:
    """The path of the chart. InputError if it or the profile exists, without `overwrite`, or cannot be written."""
    if output.suffix != SUFFIX:
        raise InputError(f"--output {output}: expected a file name that ends in {SUFFIX}.")
    if not output.parent.is_dir():
        raise InputError(f"--output {output}: {output.parent} is no directory; make it, or give another one.")
    chart = output.with_suffix(".png")
    for path in (output, chart):
        if path.exists() and not overwrite:
            raise InputError(f"--output {path}: already exists; add --overwrite, or give another file.")
    return chart


def calibrated(engine: Engine, hardware: HardwareProfile, points: Sequence[Point], path: Path) -> Calibration:
    """`hardware` with the constants that fit `points`, and a record of the errors."""
    config = engine.config

    def make_cost_model(profile: HardwareProfile) -> CostModel:
        return CostModel(engine.model, profile, dtype=config.weight_dtype, kv_cache_dtype=config.kv_cache_dtype)

    fitted = fit(points, hardware, make_cost_model)
    seconds = predicted_s(points, make_cost_model(fitted))
    error = FitError.of(points, seconds)
    about = {
        "model": config.model, "dtype": config.weight_dtype, "kv_cache_dtype": config.kv_cache_dtype,
        "max_batch_size": engine.limits.max_batch_size, "max_num_tokens": engine.limits.max_num_tokens,
        "tokens_per_block": engine.limits.tokens_per_block,
        "median_error": error.median, "p90_error": error.p90, "worst_error": error.worst,
        "points": len(points), "iterations": sum(point.samples for point in points),
        "torch": run_directory.versions()["torch"],
    }  # fmt: skip
    return Calibration(path, replace(fitted, calibration=about), points, seconds)


def _measured_device(engine: Engine) -> HardwareProfile:
    """The device of `engine`: its peaks and memory as measured here, the rest from the built-in profile most like it.

    InputError for a GPU without such a profile."""
    device = torch.device(engine.device)
    dtype = engine.config.weight_dtype
    base = load_hardware("cpu" if device.type == "cpu" else _profile_of(torch.cuda.get_device_capability(device)))
    return replace(
        base,
        title=run_directory.hardware()["cpu"] if device.type == "cpu" else torch.cuda.get_device_name(device),
        peak_flops={dtype: matmul_flops_per_s(device, TORCH_DTYPES[dtype])},
        memory_bytes=_memory_bytes(engine, device),
        memory_bandwidth=copy_bytes_per_s(device),
        cache_bytes=_cache_bytes(device) or base.cache_bytes,
    )


def _profile_of(capability: tuple[int, int]) -> str:
    if capability not in PROFILE_OF_CAPABILITY:
        known = ", ".join(f"{major}.{minor}" for major, minor in PROFILE_OF_CAPABILITY)
        raise InputError(
            f"--device: there is no hardware profile for a GPU of compute capability {capability[0]}.{capability[1]}; "
            f"expected one of {known}. Calibrate on such a GPU."
        )
    return PROFILE_OF_CAPABILITY[capability]


def _cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache; 0 if unknown."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
    return max(os.sysconf("SC_LEVEL3_CACHE_SIZE"), 0) if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names else 0


def _memory_bytes(engine: Engine, device: torch.device) -> int:
    """All memory of a GPU. For a CPU, the memory with which a simulated run has the KV cache of a real one."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    config, shard = engine.config, Shard.of_config(engine.model, engine.config)
    activations = shard.activation_bytes(config.max_num_tokens, engine.limits.max_batch_size)
    kv_memory = min(available_host_bytes(), MAX_CPU_KV_BYTES / config.kv_cache_free_gpu_mem_fraction)
    return shard.parameter_bytes + activations + math.ceil(kv_memory)
