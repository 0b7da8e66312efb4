"""`ifbbench run --repeat N`: the same run with N seeds, the mean of each figure and its confidence interval."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ifbbench.analysis.confidence import summary_of
from ifbbench.errors import InputError
from ifbbench.files import check_new_directory, sole_writer, writing
from ifbbench.replay.single import RunResult
from ifbbench.rundir.run_directory import REPEATS_FILE, default_directory, write_json
from ifbbench.settings.config import RunConfig
from ifbbench.settings.groups.recording import SIDE_OUTPUTS
from ifbbench.studies.point_table import ERROR_COLUMN, Row, row_of, write_table
from ifbbench.studies.points import FAILURES, in_one_line, prove, run_all, summarise
from ifbbench.studies.sweep import OnPoint, check_free, remove_runs
from ifbbench.workload.load import in_memory, load_trace, read_source

RunOne = Callable[[str | None, RunConfig], RunResult]
"""Runs one repeat, given the trace and the settings, `output` included."""


def run_repeats(source: str | None, base: RunConfig, count: int, run_one: RunOne, on_point: OnPoint) -> RunResult:
    """Run `count` times, with the seeds `base.seed`, `base.seed` + 1, …, into the directories repeat-1, repeat-2, …

    `repeats.csv` and `summary.json` are written after each repeat, from those that ended; one that failed is in the
    table with its error. The result counts the repeats that failed or had failed requests. InputError, before anything
    is written, if the trace or the settings are bad or results would be overwritten.
    """
    trace = load_trace(source, base)
    for name in SIDE_OUTPUTS:
        if getattr(base, name) is not None:
            raise InputError(f"--{name} names one file, but --repeat makes many runs; leave out one of the two.")
    directory = Path(base.output) if base.output else default_directory(f"repeat-{trace.name}", base.overwrite)
    check_new_directory(directory, "--output", (REPEATS_FILE, "summary.json"))
    if (directory / "run.json").exists():
        raise InputError(f"{directory} is a run; choose another --output for {count} repeats.")
    prove([(source, base)], replaces=base.overwrite and directory.exists())
    check_free(directory, base.overwrite)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with sole_writer(directory):
        remove_runs(directory.glob("repeat-*"))
        for name in (REPEATS_FILE, "summary.json"):
            (directory / name).unlink(missing_ok=True)
        rows: list[Row] = []
        summaries: list[dict[str, Any]] = []
        refusals: list[InputError] = []
        failed = 0

        def noted(source: str | None, config: RunConfig) -> RunResult:
            try:
                result = run_one(source, config)
            except InputError as error:
                refusals.append(error)
                raise
            summaries.append(result.summary)
            return result

        for number in range(1, count + 1):
            config = base.with_values(seed=base.seed + number - 1, output=str(directory / f"repeat-{number}"))
            try:
                row, is_failed = _run_one(source, trace.source, config, noted)
            except KeyboardInterrupt as interrupt:
                interrupt.add_note(f"{len(rows)} of {count} repeats are kept in {directory}.")
                raise
            if number == 1 and refusals:  # bad settings are bad with every seed
                if not any(directory.iterdir()):
                    directory.rmdir()
                raise refusals[0]
            rows.append(row)
            failed += is_failed
            # The table makes this a directory of repeats, of which the summary is read: it comes last.
            write_json(directory / "summary.json", summary_of(summaries, count))
            write_table(directory / REPEATS_FILE, rows)
            on_point(number, count, f"repeat-{number}", row[ERROR_COLUMN])
        return RunResult(directory, summary_of(summaries, count), failed)


def simulate_seeds(
    source: str | None, base: RunConfig, seeds: Sequence[int], on_run: Callable[[], None]
) -> list[dict[str, Any]]:
    """The summary of a simulated run with each of `seeds`; no file is written. on_run: called as each ends. InputError
    if one fails."""
    configs = [base.with_values(seed=seed) for seed in seeds]
    found: dict[int, dict[str, Any]] = {}
    for number, result in run_all(summarise, [(in_memory(read_source(source, one)), one) for one in configs]):
        if result.error:
            raise InputError(f"seed {seeds[number]}: {result.error}")
        found[number] = result.summary
        on_run()
    return [found[number] for number in range(len(seeds))]


def _run_one(source: str | None, trace: str, config: RunConfig, run_one: RunOne) -> tuple[Row, bool]:
    """The row of a repeat, and whether the repeat failed."""
    summary: Mapping[str, Any] = {}
    message, is_failed = "", True
    try:
        finished = run_one(source, config)
        summary, is_failed = finished.summary, finished.failed > 0
    except FAILURES as error:
        message = in_one_line(error)
    return row_of({"seed": config.seed}, config, trace, config.output, summary, message), is_failed
