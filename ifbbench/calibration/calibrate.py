"""Calibration from end to end: measure, fit, and write the hardware profile with its chart."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ifbbench.api.engine import Engine, build_engine, warm_up
from ifbbench.api.progress import Progress
from ifbbench.calibration.device import measured_device
from ifbbench.calibration.fit import FitError, Floats, fit, predicted_s
from ifbbench.calibration.measure import Sample, run_scenario
from ifbbench.calibration.points import Point, points_of
from ifbbench.calibration.scenarios import Scenario, scenarios
from ifbbench.clock import WallClock
from ifbbench.config import RunConfig
from ifbbench.errors import InputError
from ifbbench.execution.build import choose_device
from ifbbench.execution.data_types import TORCH_DTYPES
from ifbbench.recording import environment
from ifbbench.simulation.cost_model import CostModel
from ifbbench.simulation.hardware import SUFFIX, HardwareProfile
from ifbbench.simulation.hardware_writer import write_profile

ROUNDS = 8
# No further round is begun after this time; on a quiet machine all rounds of the tiny model take less.
BUDGET_S = 150.0
# See `scenarios`; what a GPU does in a second takes a CPU a minute.
CONTEXT_PASSES = {"cpu": 2, "cuda": 16}


@dataclass(frozen=True, slots=True)
class Calibration:
    """A calibrated profile, its file, and the measured points that it was fitted to, with the seconds predicted for
    each."""

    path: Path
    profile: HardwareProfile
    points: Sequence[Point]
    predicted_s: Floats


def calibrate(
    config: RunConfig,
    output: Path | None = None,
    *,
    overwrite: bool = False,
    quick: bool = False,
    progress: Progress | None = None,
    owns_process: bool = False,
) -> Calibration:
    """Measure the executor that `config` builds, and write its profile to `output`, with a chart (.png) beside it.

    output: DEVICE-MODEL.toml in the working directory if None. quick: a few batches only, for a first impression.
    owns_process: see `build_engine`.
    InputError, before anything is measured, for a device that cannot be measured, settings that do not fit together,
    and an output that exists without `overwrite`.
    """
    if config.makes_no_tokens:
        raise InputError(f"--device: {config.device} computes nothing that could be measured; expected cpu or cuda.")
    if config.dtype not in (None, *TORCH_DTYPES):
        raise InputError(f"--dtype: {config.dtype} is not calibrated; expected one of {', '.join(TORCH_DTYPES)}.")
    output = output or Path(f"{choose_device(config).type}-{Path(config.model).name}{SUFFIX}")
    chart = chart_beside(output, overwrite)
    engine = build_engine(config, owns_process=owns_process)
    try:
        warm_up(engine, progress)
        workloads = scenarios(engine.limits, config.seed, passes=CONTEXT_PASSES[engine.device], quick=quick)
        if not workloads:
            raise InputError("no request is short enough to be measured; raise --max_seq_len or --max_num_tokens.")
        hardware = replace(measured_device(engine), name=output.stem)
        samples = measure(engine, workloads, 1 if quick else ROUNDS, progress)
    finally:
        engine.executor.close()
    found = calibrated(engine, hardware, points_of(samples), output)
    write_profile(found.profile, output, f"Measured by `ifbbench calibrate --device {config.device}`.")
    from ifbbench.calibration.chart import write_chart  # matplotlib takes its time to load

    write_chart(found, chart)
    return found


def chart_beside(output: Path, overwrite: bool) -> Path:
    """Where the chart goes. InputError if it or the profile exists, without `overwrite`, or cannot be written."""
    if output.suffix != SUFFIX:
        raise InputError(f"--output {output}: expected a file name that ends in {SUFFIX}.")
    if not output.parent.is_dir():
        raise InputError(f"--output {output}: {output.parent} is no directory; make it, or give another one.")
    chart = output.with_suffix(".png")
    for path in (output, chart):
        if path.exists() and not overwrite:
            raise InputError(f"--output {path}: already exists; add --overwrite, or give another file.")
    return chart


def measure(
    engine: Engine, workloads: Sequence[Scenario], rounds: int, progress: Progress | None = None
) -> list[Sample]:
    """The iterations of all workloads, several times over. Each round has an order of its own, so that what disturbs
    the machine for a while does not disturb the same workload every time."""
    generator, clock = random.Random(engine.config.seed), WallClock()
    total, samples = rounds * len(workloads), list[Sample]()
    for number in range(rounds):
        if number and clock.now() > BUDGET_S:
            break
        for place, workload in enumerate(generator.sample(workloads, len(workloads))):
            samples += run_scenario(engine, workload)
            if progress:
                progress.update(number * len(workloads) + place + 1, total, f"{len(samples):,} iterations")
    return samples


def calibrated(engine: Engine, hardware: HardwareProfile, points: Sequence[Point], path: Path) -> Calibration:
    """`hardware` with the constants that fit `points`, and a record of how well they do."""
    config = engine.config

    def make_cost_model(profile: HardwareProfile) -> CostModel:
        return CostModel(engine.model, profile, dtype=config.weight_dtype, kv_cache_dtype=config.kv_cache_dtype)

    fitted = fit(points, hardware, make_cost_model)
    seconds = predicted_s(points, make_cost_model(fitted))
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
        "torch": environment.versions()["torch"],
    }
    return Calibration(path, replace(fitted, calibration=about), points, seconds)
