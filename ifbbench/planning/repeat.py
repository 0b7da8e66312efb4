"""`ifbbench run --repeat N`: the same run with N seeds, the mean of each figure and its confidence interval."""

from collections.abc import Callable, Mapping, Sequence
from math import cos, pi, sin, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ifbbench.config import RunConfig
from ifbbench.errors import InputError
from ifbbench.planning.sweep import (
    ERROR_COLUMN,
    OnPoint,
    Row,
    RunPoint,
    prepare_directory,
    remove_runs,
    run_one,
    write_table,
)
from ifbbench.recording.run_directory import REPEATS_FILE, RESULTS, write_json
from ifbbench.replay.run import RunResult
from ifbbench.workload.load import load_trace

CONFIDENCE = 0.95


def run_repeats(source: str | None, base: RunConfig, count: int, run_point: RunPoint, on_point: OnPoint) -> RunResult:
    """Run `count` times, with the seeds `base.seed`, `base.seed` + 1, …, into the directories repeat-1, repeat-2, …

    `repeats.csv` and `summary.json` are written after each repeat, from those that ended; one that failed is in the
    table with its error. The result counts the repeats that failed or had failed requests. InputError, before anything
    is written, if the trace or the settings are bad or results would be overwritten.
    """
    trace = load_trace(source, base)
    for name in ("output_csv", "responses_json"):
        if getattr(base, name) is not None:
            raise InputError(f"--{name} names one file, but --repeat makes many runs; leave out one of the two.")
    directory = Path(base.output) if base.output else RESULTS / f"repeat-{trace.name}"
    if (directory / "run.json").exists():
        raise InputError(f"{directory} is a run; choose another --output for {count} repeats.")
    prepare_directory(directory, base.overwrite)
    remove_runs(directory.glob("repeat-*"))
    for name in (REPEATS_FILE, "summary.json"):
        (directory / name).unlink(missing_ok=True)
    rows: list[Row] = []
    summaries: list[dict[str, Any]] = []
    refusals: list[InputError] = []
    failed = 0

    def noted(source: str | None, config: RunConfig) -> RunResult:
        try:
            result = run_point(source, config)
        except InputError as error:
            refusals.append(error)
            raise
        summaries.append(result.summary)
        return result

    for number in range(1, count + 1):
        config = base.with_values(seed=base.seed + number - 1, output=str(directory / f"repeat-{number}"))
        try:
            row, is_failed = run_one(source, config, ["seed"], noted)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"{len(rows)} of {count} repeats are kept in {directory}.")
            raise
        if number == 1 and refusals:  # bad settings are bad with every seed
            if not any(directory.iterdir()):
                directory.rmdir()
            raise refusals[0]
        rows.append(row)
        failed += is_failed
        write_table(directory / REPEATS_FILE, rows)
        write_json(directory / "summary.json", summary_of(summaries, count))
        on_point(number, count, f"repeat-{number}", row[ERROR_COLUMN])
    return RunResult(directory, summary_of(summaries, count), failed)


def summary_of(summaries: Sequence[Mapping[str, Any]], count: int) -> dict[str, Any]:
    """The summary of `count` repeats, of which `summaries` ended: the mean of each figure under its name, and under
    `confidence_interval_95` its limits [low, high], None with fewer than two values. Figures that are not numbers are
    kept where all repeats agree."""
    return {
        "repeats": {"total": count, "completed": len(summaries)},
        **_combined(summaries, fmean),
        "confidence_interval_95": _combined(summaries, _interval),
    }


def _combined(tables: Sequence[Mapping[str, Any]], combine: Callable[[Sequence[float]], Any]) -> dict[str, Any]:
    combined: dict[str, Any] = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [value for table in tables if (value := table.get(name)) is not None]
        if values and all(isinstance(value, Mapping) for value in values):
            combined[name] = _combined(values, combine)
        elif values and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            combined[name] = combine(values)
        elif combine is fmean:
            combined[name] = values[0] if values and all(value == values[0] for value in values) else None
    return combined


def _interval(values: Sequence[float]) -> list[float] | None:
    """The limits of the confidence interval of the mean of `values`, by Student's t distribution."""
    if len(values) < 2:
        return None
    half_width = student_t(CONFIDENCE, len(values) - 1) * stdev(values) / sqrt(len(values))
    return [fmean(values) - half_width, fmean(values) + half_width]


def student_t(confidence: float, degrees: int) -> float:
    """The t that a value of Student's t distribution stays within, on both sides, with probability `confidence`."""
    low, high = 0.0, pi / 2  # of the angle atan(t / sqrt(degrees))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return sqrt(degrees) * sin(low) / cos(low)


def _within(angle: float, degrees: int) -> float:
    """The probability that Student's t stays within sqrt(degrees) * tan(angle): Abramowitz and Stegun, 26.7.3 and
    26.7.4."""
    squared = cos(angle) ** 2
    term, total = (cos(angle), 0.0) if degrees % 2 else (1.0, 0.0)
    for step in range(2 + degrees % 2, degrees + 1, 2):
        total += term
        term *= squared * (step - 1) / step
    return 2 / pi * (angle + sin(angle) * total) if degrees % 2 else sin(angle) * total
