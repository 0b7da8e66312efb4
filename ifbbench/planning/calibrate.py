"""`ifbbench calibrate`: measure a device, fit the cost model to it, and write its hardware profile and a chart."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ifbbench.api.engine import Engine, build_engine, warm_up
from ifbbench.clock import NO_PROGRESS, Progress
from ifbbench.config import RunConfig
from ifbbench.errors import InputError
from ifbbench.execution.build import TORCH_DTYPES, choose_device
from ifbbench.execution.device import copy_bytes_per_s, matmul_flops_per_s
from ifbbench.execution.host import MAX_CPU_KV_BYTES, available_host_bytes
from ifbbench.planning.fit import FITTED_SHARES, FitError, Floats, Point, fit, points_of, predicted_s
from ifbbench.planning.measure import measure, scenarios
from ifbbench.recording import run_directory
from ifbbench.report import count, percent, plain_table, significant
from ifbbench.report.style import INK, MUTED, SERIES, styled, title
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
GIGA = 1e9
MICROSECONDS = 1e6
MILLISECONDS = 1000
# A median error above this is reported as large.
LARGE_ERROR = 0.15
COLOURS = {"context": SERIES[0], "generation": SERIES[1], "mixed": SERIES[2]}
SHARE_NAMES = {
    "matmul": "Matrix products", "context_attention": "Attention of prompts", "memory": "Weights and activations",
    "generation_attention": "Attention of generation",
}  # fmt: skip
# The band around the line of equal times, as a share of the time.
BAND = 0.1
MARGIN = 1.5
# Labelled ticks of each decade, for an axis of fewer decades than the key.
LABELS: tuple[tuple[float, tuple[int, ...]], ...] = ((2, (1, 2, 5)), (4, (1, 3)), (np.inf, (1,)))


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
    progress: Progress = NO_PROGRESS, owns_process: bool = False,
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
    config, shard = engine.config, Shard.of_config(engine.model, engine.config)
    fitted = fit(points, hardware, shard)
    seconds = predicted_s(points, CostModel(shard, fitted))
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
    device, dtype = torch.device(engine.device), engine.config.weight_dtype
    is_cpu = device.type == "cpu"
    base = load_hardware("cpu" if is_cpu else _profile_of(torch.cuda.get_device_capability(device)))
    return replace(
        base, title=run_directory.hardware()["cpu"] if is_cpu else torch.cuda.get_device_name(device),
        peak_flops={dtype: matmul_flops_per_s(device, TORCH_DTYPES[dtype])},
        memory_bytes=_memory_bytes(engine, device), memory_bandwidth=copy_bytes_per_s(device),
        cache_bytes=_cache_bytes(device) or base.cache_bytes,
    )  # fmt: skip


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


def print_calibration(found: Calibration, console: Console) -> None:
    """Print the constants of the profile and the errors of its predictions."""
    profile = found.profile
    console.print()
    console.print(f"[bold]{escape(profile.name)}[/bold]  {escape(profile.title)}", highlight=False)
    for table in (_constants_table(found), _error_table(found)):
        console.print()
        console.print(table)
    console.print()
    if FitError.of(found.points, found.predicted_s).median > LARGE_ERROR:
        console.print(
            "These errors are large. Other programs may have disturbed the measurement; measure again when this "
            "machine is idle.\n",
            style="yellow", soft_wrap=True,
        )  # fmt: skip


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


def _error_table(found: Calibration) -> Table:
    table = plain_table("Predicted against measured", numbers=("points", "median", "p90", "worst"))
    for kind in (*COLOURS, "all"):
        chosen = [index for index, point in enumerate(found.points) if kind in (point.kind, "all")]
        if not chosen:
            continue
        error = FitError.of([found.points[index] for index in chosen], found.predicted_s[chosen])
        table.add_row(
            kind, count(len(chosen)), percent(error.median), percent(error.p90), percent(error.worst),
            style="bold" if kind == "all" else None,
        )  # fmt: skip
    return table


def write_chart(found: Calibration, path: Path) -> None:
    """Draw predicted over measured time of each point, as a PNG file without a date: equal figures are equal files."""
    with styled():
        figure = Figure(figsize=(6.4, 6.2))
        axes = figure.subplots()
        measured = np.array([point.seconds for point in found.points]) * MILLISECONDS
        predicted = found.predicted_s * MILLISECONDS
        for kind, colour in COLOURS.items():
            chosen = np.array([point.kind == kind for point in found.points])
            axes.scatter(
                measured[chosen], predicted[chosen], s=16, color=colour, alpha=0.75, linewidths=0, zorder=3,
                label=f"{kind} ({int(chosen.sum())})",
            )  # fmt: skip
        both = np.concatenate([measured, predicted])
        _scale(axes, both.min() / MARGIN, both.max() * MARGIN)
        axes.legend(loc="upper left", handletextpad=0.3)
        error = FitError.of(found.points, found.predicted_s)
        about = found.profile.calibration
        subtitle = (
            f"model {about['model']} in {about['dtype']} · error median {percent(error.median)}, "
            f"p90 {percent(error.p90)}, worst {percent(error.worst)}"
        )
        title(axes, f"Predicted and measured iterations: {found.profile.name}", subtitle)
        figure.savefig(path, metadata={"Software": None})


def _scale(axes: Axes, low: float, high: float) -> None:
    """The same logarithmic scale on both axes, the line of equal times, and the band around it."""
    ends = np.array([low, high])
    axes.fill_between(ends, ends * (1 - BAND), ends * (1 + BAND), color=MUTED, alpha=0.13, linewidth=0)
    axes.plot(ends, ends, color=INK, linewidth=0.9)
    axes.annotate(f"within {percent(BAND)}", (high, high), xytext=(-12, -40), textcoords="offset points", color=MUTED,
                  fontsize=8, ha="right", rotation=45, rotation_mode="anchor")  # fmt: skip
    axes.set(xscale="log", yscale="log")
    decades = np.log10(high / low)
    labelled = next(ticks for limit, ticks in LABELS if decades < limit)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=labelled, numticks=100))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal", xlabel="measured (ms)", ylabel="predicted (ms)")
    axes.grid(visible=True, axis="both")
    axes.tick_params(which="minor", length=0)
