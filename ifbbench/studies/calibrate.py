"""`ifbbench calibrate`: measure a device, fit the cost model to it, and write its hardware profile and a chart."""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ifbbench.analysis.number_texts import percent, significant
from ifbbench.build.engine import Engine, build_engine, warm_up
from ifbbench.errors import InputError
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.report import plain_table
from ifbbench.rundir import run_directory
from ifbbench.settings.config import RunConfig
from ifbbench.simulated.cost_model import CostModel
from ifbbench.simulated.hardware import SUFFIX, HardwareProfile, load_hardware, write_profile
from ifbbench.simulated.shard import Shard
from ifbbench.studies.calibration import Calibration, chart_beside, error_table, write_chart
from ifbbench.studies.fit import FITTED_SHARES, FitError, Point, fit, points_of, predicted_s
from ifbbench.studies.measure import measure, scenarios
from ifbbench.torch.build import TORCH_DTYPES, choose_device
from ifbbench.torch.device import copy_bytes_per_s, matmul_flops_per_s
from ifbbench.torch.host import MAX_CPU_KV_BYTES, available_host_bytes

ROUNDS = 8
# See `scenarios`. A GPU does in a second what takes a CPU a minute.
CONTEXT_PASSES = {"cpu": 2, "cuda": 16}
# The built-in profile for each compute capability; a calibrated profile takes its architecture and interconnect.
PROFILE_OF_CAPABILITY = {
    (8, 0): "a100-80gb-sxm",
    (8, 6): "a10g",
    (8, 9): "l40s",
    (9, 0): "h100-sxm",
    (10, 0): "b200",
}
GIGA = 1e9
MICROSECONDS = 1e6
# A median error above this is reported as large.
LARGE_ERROR = 0.15
SHARE_NAMES = {
    "matmul": "Matrix products",
    "context_attention": "Attention of prompts",
    "memory": "Weights and activations",
    "generation_attention": "Attention of generation",
}


def calibrate(
    config: RunConfig,
    output: Path | None = None,
    *,
    overwrite: bool = False,
    quick: bool = False,
    progress: Progress = NO_PROGRESS,
    owns_process: bool = False,
) -> Calibration:
    """Measure the executor that `config` builds, and write its profile to `output` and a chart (.png) beside it.

    output: DEVICE-MODEL.toml in the working directory if None.
    quick: a few batches only, for a first impression.
    owns_process: see `build_engine`.

    InputError, before anything is measured, for a device that cannot be measured, settings that contradict each other,
    and an output that exists without `overwrite`.
    """
    if config.makes_no_tokens:
        raise InputError(f"--device: {config.device} computes nothing that could be measured; expected cpu or cuda.")
    if config.dtype not in (None, *TORCH_DTYPES):
        raise InputError(f"--dtype: {config.dtype} is not calibrated; expected one of {', '.join(TORCH_DTYPES)}.")
    output = output or Path(f"{choose_device(config).type}-{Path(config.model).name}{SUFFIX}")
    chart = chart_beside(output, overwrite)
    progress.stage("loading model")
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
    progress.stage("fitting")
    found = calibrated(engine, hardware, points_of(samples), output)
    write_profile(found.profile, output, f"Measured by `ifbbench calibrate --device {config.device}`.")
    write_chart(found, chart)
    return found


def calibrated(engine: Engine, hardware: HardwareProfile, points: Sequence[Point], path: Path) -> Calibration:
    """`hardware` with the constants that fit `points`, and a record of the errors."""
    config, shard = engine.config, Shard.of_config(engine.model, engine.config)
    fitted = fit(points, hardware, shard)
    seconds = predicted_s(points, CostModel(shard, fitted))
    error = FitError.of(points, seconds)
    about = {
        "model": config.model,
        "dtype": config.weight_dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "max_batch_size": engine.limits.max_batch_size,
        "max_num_tokens": engine.limits.max_num_tokens,
        "tokens_per_block": engine.limits.tokens_per_block,
        "median_error": error.median,
        "p90_error": error.p90,
        "worst_error": error.worst,
        "points": len(points),
        "iterations": sum(point.samples for point in points),
        "torch": run_directory.versions()["torch"],
    }
    return Calibration(path, replace(fitted, calibration=about), points, seconds)


def _measured_device(engine: Engine) -> HardwareProfile:
    """The device of `engine`: its peaks and memory as measured here, the rest from the built-in profile most like it.

    InputError for a GPU without such a profile."""
    device, dtype = torch.device(engine.device), engine.config.weight_dtype
    is_cpu = device.type == "cpu"
    base = load_hardware("cpu" if is_cpu else _profile_of(torch.cuda.get_device_capability(device)))
    return replace(
        base,
        title=run_directory.hardware()["cpu"] if is_cpu else torch.cuda.get_device_name(device),
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
    limits = engine.limits
    num_tokens = min(limits.token_budget, limits.max_batch_size * limits.max_input_len)
    activations = shard.activation_bytes(num_tokens, limits.max_batch_size)
    kv_memory = min(available_host_bytes(), MAX_CPU_KV_BYTES / config.kv_cache_free_gpu_mem_fraction)
    return shard.parameter_bytes + activations + math.ceil(kv_memory)


def print_calibration(found: Calibration, console: Console) -> None:
    """Print the constants of the profile and the errors of its predictions."""
    profile = found.profile
    console.print()
    console.print(f"[bold]{escape(profile.name)}[/bold]  {escape(profile.title)}", highlight=False)
    for table in (_constants_table(found), error_table(found)):
        console.print()
        console.print(table)
    console.print()
    if FitError.of(found.points, found.predicted_s).median > LARGE_ERROR:
        console.print(
            "These errors are large. Other programs may have disturbed the measurement; measure again when this "
            "machine is idle.\n",
            style="yellow",
            soft_wrap=True,
        )


def _constants_table(found: Calibration) -> Table:
    profile, constants = found.profile, found.profile.constants
    (flops_per_s,) = profile.peak_flops.values()
    table = plain_table("Constant", numbers=("reached", "of the peak"))
    for name in FITTED_SHARES:
        is_arithmetic = name in ("matmul", "context_attention")
        peak, unit = (flops_per_s, "GFLOP/s") if is_arithmetic else (profile.memory_bandwidth, "GB/s")
        share = getattr(constants, name)
        table.add_row(SHARE_NAMES[name], f"{significant(share * peak / GIGA)} {unit}", percent(share))
    times = {
        "Start of a kernel": constants.kernel_s,
        "Start of context": constants.context_s,
        "Host, each iteration": profile.host_iteration_s,
        "Host, each request": profile.host_request_s,
    }
    for label, seconds in times.items():
        table.add_row(label, f"{significant(seconds * MICROSECONDS)} µs", "")
    return table
