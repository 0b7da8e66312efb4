"""`ifbbench calibrate --from`: fit a hardware profile to what a server has logged, and say what that determines."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ifbbench.analysis.number_texts import count, percent, significant
from ifbbench.build.resolve import resolve_limits
from ifbbench.errors import InputError
from ifbbench.models.named_models import built_in_models, load_model_config
from ifbbench.report import plain_table
from ifbbench.settings.config import RunConfig
from ifbbench.settings.devices import SIMULATED
from ifbbench.settings.names import from_mapping
from ifbbench.simulated.hardware import CONSTANTS, SUFFIX, HardwareProfile, load_hardware, write_profile
from ifbbench.simulated.shard import Shard
from ifbbench.studies.calibration import Calibration, chart_beside, error_table, write_chart
from ifbbench.studies.determine import MAX_ERROR, Determined, Verdict, determine
from ifbbench.studies.fit import (
    HOST_CONSTANTS,
    FitError,
    Observation,
    Point,
    Predictor,
    constant,
    loop_errors,
    points_of,
    with_loop_times,
)
from ifbbench.studies.load_tests import LoadTests
from ifbbench.studies.log import Log
from ifbbench.studies.read_logs import RUN, read_logs

# Facts of a log that are settings; those of the log count where they are not given.
SETTINGS = ("model", "dtype", "kv_cache_dtype", "tp_size", "pp_size")
MIN_POINTS = 8
# Iterations of one kind that are fitted; more make the fit slower, and hardly better.
MAX_POINTS_OF_A_KIND = 300
RESCHEDULES = 3
ALL_REDUCES = ("network", "all_reduce_s", "one_shot", "one_shot_s", "one_shot_gpu_s")
MICROSECONDS = 1e6
LARGE_ERROR = 0.15
# Shares of a GPU's peaks above this are probably those of another device or model.
MAX_SHARE = 1.05


@dataclass(frozen=True, slots=True)
class LogCalibration:
    """A profile fitted to logs, what they determine, and what limits it, in sentences."""

    found: Calibration
    determined: Determined
    logs: Sequence[Log]
    warnings: Sequence[str]


def calibrate_from_logs(
    paths: Sequence[Path], given: Mapping[str, Any], output: Path | None = None, *, overwrite: bool = False
) -> LogCalibration:
    """Fit the constants of the device in `given` to the logs at `paths`, and write the profile and a chart beside it.

    given: the settings that were given; those that logs name are taken from them.
    output: LOG.toml in the working directory if None.

    InputError for a log that cannot be read or used, and for logs that do not fit together.
    """
    output = output or Path(f"{paths[0].stem}{SUFFIX}")
    chart = chart_beside(output, overwrite)
    fit = fit_logs(paths, given)
    result, profile = fit.determined, replace(fit.profile, name=output.stem)
    found = Calibration(output, profile, result.observations, result.predicted_s)
    names_of_logs = ", ".join(path.name for path in paths)
    write_profile(profile, output, f"Fitted by `ifbbench calibrate --from` to {names_of_logs}.")
    write_chart(found, chart)
    return LogCalibration(found, result, fit.logs, _warnings(fit.logs, result))


@dataclass(frozen=True, slots=True)
class LogFit:
    """Logs, the settings that describe what was measured, what they determine, and the fitted profile."""

    logs: Sequence[Log]
    config: RunConfig
    determined: Determined
    profile: HardwareProfile

    @property
    def time_ratio(self) -> float:
        """The time of all logged iterations over the predicted one. Constants fit the usual iteration, so that it is
        above 1 where some were disturbed."""
        points = _all_points(self.logs)
        observations = [point.observation(has_host, self.config.tp_size) for point, has_host in points]
        shard = Shard.of_config(load_model_config(self.config.model), self.config)
        predicted_s = Predictor(observations, shard, self.config.overlap is not None)(self.profile)
        logged_s = sum(sample.seconds for log in self.logs for sample, _ in log.samples)
        return float(logged_s / predicted_s.dot([point.samples for point, _ in points]))


def fit_logs(paths: Sequence[Path], given: Mapping[str, Any]) -> LogFit:
    """Fit the constants of the device in `given` to the logs at `paths`. Arguments and errors: as of
    `calibrate_from_logs`."""
    hardware = _base(given)
    logs, tests = read_logs(paths, given)
    config = _config(given, logs, hardware)
    result = _determined(logs, LoadTests(tests, config), config, hardware)
    title, about = f"{hardware.title}, as logged", _provenance(config, logs, hardware, result)
    return LogFit(logs, config, result, replace(result.profile, title=title, calibration=about))


def _determined(logs: Sequence[Log], load_tests: LoadTests, config: RunConfig, hardware: HardwareProfile) -> Determined:
    """What the logs determine, with `hardware` as start."""
    shard = Shard.of_config(load_model_config(config.model), config)
    points = _points(logs)
    # A point counts by its part of the logged time, because the times of iterations add up to what is predicted.
    usual_s = np.median([point.seconds * point.samples for point, _ in points] or [1.0])
    of_iterations = [
        point.observation(has_host, config.tp_size, weight=float(point.seconds * point.samples / usual_s))
        for point, has_host in points
    ]
    of_iterations += [replace(one, tp_size=config.tp_size) for log in logs for one in log.observations]
    observed = [*of_iterations, *load_tests.observations(config.device)]
    if len(observed) < MIN_POINTS:
        raise InputError(
            f"--from: {len(observed)} different measured times are too few to fit a profile to; expected at least "
            f"{MIN_POINTS}. Give a longer log, of more lengths and batch sizes."
        )
    loops = [point for point, _ in points if point.loop_s is not None]
    has_loops = len(loops) == len(observed)
    start = with_loop_times(loops, hardware) if has_loops else hardware
    names = _names(shard, hardware, observed, has_loops)
    result = determine(observed, start, shard, names, config.overlap is not None)
    for _ in range(RESCHEDULES if load_tests.depend_on_times else 0):
        # Which requests meet depends on the times: schedule again with the fitted constants.
        with TemporaryDirectory() as directory:
            fitted = Path(directory) / f"fitted{SUFFIX}"
            write_profile(result.profile, fitted, "")
            observed = [*of_iterations, *load_tests.observations(f"{SIMULATED}{fitted}")]
        result = determine(observed, start, shard, names, config.overlap is not None)
    return replace(result, verdicts=_with_loop(result, loop_errors(loops, start))) if has_loops else result


def _base(given: Mapping[str, Any]) -> HardwareProfile:
    """The profile that the fit starts from."""
    device = given.get("device")
    name = None if device is None else from_mapping({"device": device}).hardware
    if name is None:
        raise InputError(
            f"--device: {device or 'is missing'}; with --from, expected the profile of the GPU that was measured, or "
            "of one like it, as sim:h100-sxm (or --gpu h100-sxm). Its data sheet is kept, and the constants that the "
            "logs do not determine."
        )
    return load_hardware(name)


def _config(given: Mapping[str, Any], logs: Sequence[Log], hardware: HardwareProfile) -> RunConfig:
    """The settings that describe what was measured: those given, else those of the logs.

    InputError if logs contradict each other or what is given."""
    settings = dict(given)
    sources: dict[str, tuple[str, Log]] = {}
    for log in logs:
        for name, value in log.facts.items():
            is_setting = name in SETTINGS
            if name == "model" and log.format != RUN and value not in built_in_models():
                # The name of a checkpoint: only those of logs of one kind are compared.
                name, is_setting = f"model of the {log.format}", False
            if not is_setting and not name.startswith("model"):
                continue
            first, source = sources.setdefault(name, (value, log))
            if first != value:
                raise InputError(
                    f"--from: the logs are of different engines: {name} is {first} in {source.path} and "
                    f"{value} in {log.path}. Give those of one."
                )
            if is_setting and str(settings.setdefault(name, value)) != value:
                raise InputError(
                    f"{log.path}: {name} is {value}, but --{name} is {settings[name]}; give that of the "
                    "log, or another log."
                )
    overlaps = {log.overlaps for log in logs} - {None}
    if settings.get("overlap") or settings.get("enable_trt_overlap"):
        overlaps.add(True)
    if len(overlaps) > 1:
        raise InputError(
            "--from: iterations overlap in some of these logs, or in the settings, and not in others; "
            "expected the same in all."
        )
    settings["overlap"] = settings.get("overlap") or ("async" if overlaps == {True} else None)
    if "model" not in settings:
        raise InputError("--model: is missing; expected the model that was measured (llama-3.1-8b, a directory, …).")
    config = from_mapping(settings)
    model = load_model_config(config.model)
    longest = max(model.max_position_embeddings, config.max_seq_len or 0)
    return resolve_limits(config.with_values(max_seq_len=longest), longest, hardware.is_cpu)


def _points(logs: Sequence[Log]) -> list[tuple[Point, bool]]:
    """As `_all_points`; not too many of each kind."""
    by_kind: defaultdict[tuple[bool, str], list[tuple[Point, bool]]] = defaultdict(list)
    for point, has_host in _all_points(logs):
        by_kind[has_host, point.kind].append((point, has_host))
    chosen = []
    for of_kind in by_kind.values():
        # In the order of a hash, so that a part of them is a fair one.
        of_kind.sort(key=lambda one: hashlib.sha256(repr(one[0].work).encode()).digest())
        chosen += of_kind[:MAX_POINTS_OF_A_KIND]
    return chosen


def _all_points(logs: Sequence[Log]) -> list[tuple[Point, bool]]:
    """The iterations of all logs as points, and whether their seconds include the host's."""
    return [
        (point, has_host)
        for has_host in (True, False)
        for point in points_of(sample for log in logs for sample, includes in log.samples if includes is has_host)
    ]


def _names(shard: Shard, hardware: HardwareProfile, observed: Sequence[Observation], has_loops: bool) -> list[str]:
    """The constants to look for."""
    names = [
        "matmul",
        *(["matmul_fp8"] if shard.dtype == "fp8" else []),
        "memory",
        "context_attention",
        "generation_attention",
    ]
    names += () if has_loops else HOST_CONSTANTS
    names += ["context_s", "kernel_s", *(["launch_s"] if hardware.constants.launch_s else [])]
    if max(one.tp_size for one in observed) > 1:
        names += [name for name in CONSTANTS if name in ALL_REDUCES]
    return names


def _with_loop(result: Determined, errors: Mapping[str, float]) -> tuple[Verdict, ...]:
    """The verdicts, with the constants that were measured apart as the time of the loop. errors: their own."""
    found = []
    for name in HOST_CONSTANTS:
        error = errors.get(name, np.inf)
        is_known, reason = error <= MAX_ERROR, "the time of the loop hardly depends on the size of the batch"
        value = constant(result.profile, name)
        found.append(Verdict(name, value, error) if is_known else Verdict(name, value, None, reason))
    return (*result.verdicts, *found)


def _provenance(
    config: RunConfig, logs: Sequence[Log], hardware: HardwareProfile, result: Determined
) -> dict[str, Any]:
    """The table `calibration` of the profile. It has no date: equal logs give equal files."""
    held_out = result.held_out_error
    return {
        "model": config.model,
        "dtype": config.weight_dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "tp_size": config.tp_size,
        "pp_size": config.pp_size,
        "base": hardware.name,
        "median_error": result.fit_error.median,
        "p90_error": result.fit_error.p90,
        "worst_error": result.fit_error.worst,
        **({} if held_out is None else {"held_out_median_error": held_out.median, "held_out_p90_error": held_out.p90}),
        "points": len(result.observations),
        "iterations": sum(len(log.samples) for log in logs),
        "left_out": result.left_out,
        "determined": [verdict.name for verdict in result.verdicts if verdict.error is not None],
        "kept": [verdict.name for verdict in result.verdicts if verdict.error is None],
        "logs": [f"{log.path.name} ({log.format})" for log in logs],
        "sha256": [log.sha256 for log in logs],
    }


def _warnings(logs: Sequence[Log], result: Determined) -> list[str]:
    """What limits the use of the profile."""
    warnings = [f"{log.path}: {note}" for log in logs for note in log.notes]
    works = [work for one in result.observations for work, _ in one.steps]
    sizes = {work.generation_tokens for work in works if work.generation_tokens}
    if len(sizes) == 1:
        warnings.append(
            f"all iterations with generation have {sizes.pop():,} requests: how their time depends on the batch size "
            "is not determined. Add a log of other loads."
        )
    if not sizes:
        warnings.append("no iteration has generation requests: only prompts are described.")
    if not any(work.context_tokens for work in works):
        warnings.append("no iteration has context: TTFT is predicted with the constants of the base profile.")
    if result.left_out:
        warnings.append(
            f"{result.left_out:,} times are left out: they are several times as long or short as predicted "
            "(warm-up, compilation or a wait)."
        )
    for kind in sorted({one.kind for one in result.observations}):
        of_kind = [index for index, one in enumerate(result.observations) if one.kind == kind]
        error = FitError.of([result.observations[index] for index in of_kind], result.predicted_s[of_kind]).median
        if error > LARGE_ERROR:
            warnings.append(
                f"{kind}: the median error of {percent(error)} is large; the model does not describe these "
                "times, or other programs disturbed the server."
            )
    if not result.profile.is_cpu:
        shares = [item for item in result.verdicts if item.error is not None and not item.name.endswith("_s")]
        over = [item.name for item in shares if item.value > MAX_SHARE]
        if over:
            warnings.append(
                f"{', '.join(over)} above what the data sheet allows: is this the device, model, dtype and "
                "tp_size that was measured?"
            )
    return warnings


def print_log_calibration(calibration: LogCalibration, console: Console) -> None:
    """Print what the logs determine, the errors, and what limits them."""
    result = calibration.determined
    profile = calibration.found.profile
    console.print()
    console.print(f"[bold]{escape(profile.name)}[/bold]  {escape(profile.title)}", highlight=False)
    for log in calibration.logs:
        console.print(f"{escape(str(log.path))}  {log.format}, {count(len(log.samples))} iterations", highlight=False)
    for table in (_verdict_table(calibration), error_table(calibration.found)):
        console.print()
        console.print(table)
    console.print()
    if result.held_out_error is None:
        console.print("Too few times to hold half of them out.")
    else:
        held_out = result.held_out_error
        console.print(
            f"Fitted to one half of the times, the other half is predicted with an error of {percent(held_out.median)} "
            f"(median), {percent(held_out.p90)} (p90).",
            highlight=False,
            soft_wrap=True,
        )
    for warning in calibration.warnings:
        console.print(f"Note: {escape(warning)}", style="yellow", highlight=False, soft_wrap=True)
    console.print()


def _verdict_table(calibration: LogCalibration) -> Table:
    table = plain_table("Constant", numbers=("value", "standard error"))
    table.add_column("verdict")
    for verdict in sorted(calibration.determined.verdicts, key=lambda one: one.error is None):
        is_time = verdict.name.endswith("_s")
        value = f"{significant(verdict.value * MICROSECONDS)} µs" if is_time else percent(verdict.value)
        if verdict.error is None:
            table.add_row(verdict.name, value, "", f"not determined (kept): {verdict.reason}", style="dim")
        else:
            table.add_row(verdict.name, value, f"± {percent(verdict.error)}", "determined")
    return table
