"""`ifbbench run`: replay a trace, once or several times."""

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifbbench.cli.given_settings import (
    RUN_KEYS,
    given_config,
    read_command_keys,
    with_recording,
)
from ifbbench.cli.gpt_manager import TraceCommand
from ifbbench.cli.options import IntegerRange
from ifbbench.cli.report import benchmark_lines_option, json_option, print_result, print_run, write_run_outputs
from ifbbench.clock import WallClock
from ifbbench.errors import InputError
from ifbbench.files import lost
from ifbbench.rundir.run_directory import REPEATS_FILE, is_lost
from ifbbench.settings.config import RunConfig
from ifbbench.settings.fields import integer
from ifbbench.settings.groups.replay import BY_ITERATION

if TYPE_CHECKING:
    from ifbbench.replay.single import RunResult

MAX_REPEATS = 10_000


@click.command(cls=TraceCommand)
@click.argument("trace", required=False)
@click.option(
    "--repeat",
    type=IntegerRange(1, MAX_REPEATS),
    metavar="N",
    help="Run N times, with the seeds --seed, --seed + 1, …; report means and confidence intervals.",
)
@json_option
@benchmark_lines_option
@click.pass_context
def run(
    context: click.Context,
    /,
    trace: str | None,
    repeat: int | None,
    as_json: bool,
    benchmark_lines: bool | None,
    config_file: Path | None,
    **options: Any,
) -> None:
    """Replay TRACE and report what happened, iteration by iteration.

    Without TRACE the small bundled one is replayed.
    """
    config_file, given = with_recording(trace, config_file, options)
    config = given_config(config_file, given, runs_fleets=True)
    keys = read_command_keys(config_file, RUN_KEYS, "run")
    trace = keys.get("trace") if trace is None else trace
    repeat = repeat or integer(keys.get("repeat", 1), "repeat", 1, MAX_REPEATS, from_text=True)
    if repeat > 1:
        _repeat(context, trace, config, repeat, as_json)
        return

    from ifbbench.rundir.run_directory import find_lines

    result = replay(trace, config, "run")
    if as_json:
        click.echo(json.dumps(result.summary, indent=2))
        if is_lost(result.directory):
            raise lost(result.directory)
    else:
        print_result(result, lambda data: print_run(data, benchmark_lines))
        click.echo(f"Results are in {result.directory}; `ifbbench plot {result.directory}` draws them.")
    report_differences(trace, config, [result.directory])
    if result.failed:
        reasons = find_lines(result.directory, "requests")
        click.echo(f"{result.failed} requests failed; {reasons} has the reason of each.", err=True)
        context.exit(1)


def _repeat(context: click.Context, trace: str | None, config: RunConfig, count: int, as_json: bool) -> None:
    from ifbbench.cli.report import report_repeats
    from ifbbench.studies.repeat import run_repeats

    result = run_repeats(trace, config, count, _run_point, _point_reporter(config.quiet))
    report_repeats(result.directory, as_json, result.summary)
    there = sum(not is_lost(directory) for directory in result.directory.glob("repeat-*"))
    if there < result.summary["repeats"]["completed"] or not (result.directory / REPEATS_FILE).is_file():
        raise lost(result.directory)
    if not as_json:
        click.echo(f"Results are in {result.directory}; each repeat is a run directory in it.")
    report_differences(trace, config, sorted(result.directory.glob("repeat-*")))
    if result.failed:
        click.echo(f"{result.failed} of {count} repeats failed or had failed requests.", err=True)
        context.exit(1)


def report_differences(trace: str | None, config: RunConfig, directories: Sequence[Path]) -> None:
    """Say which of these replays of the recording `trace` do not have its schedule; of several, by their names."""
    if trace is None or config.arrival != BY_ITERATION:
        return
    from ifbbench.analysis.replayed import difference_from_recording

    found: dict[str, list[str]] = {}
    for directory in directories:
        if difference := difference_from_recording(Path(trace), directory, config.as_dict()):
            found.setdefault(difference, []).append(directory.name)
    for difference, names in found.items():
        click.echo(f"{', '.join(names)}: {difference}" if len(directories) > 1 else difference, err=True)


def _run_point(trace: str | None, config: RunConfig) -> "RunResult":
    return replay(trace, config, Path(str(config.output)).name)


def _point_reporter(quiet: bool) -> Callable[[int, int, str, str], None]:
    """Reports each of several runs as it ends, and the time that the others will take."""
    clock = WallClock()

    def report_point(ended: int, points: int, label: str, error: str) -> None:
        if not quiet:
            rest_s = round(clock.now() / ended * (points - ended))
            left = f", {timedelta(seconds=rest_s)} left" if ended < points else ""
            click.echo(f"{ended}/{points} {label}: {error or 'done'}{left}", err=True)

    return report_point


def replay(trace: str | None, config: RunConfig, label: str) -> "RunResult":
    """Run with the progress of a command called `label`, and write the files for other tools."""
    from ifbbench.cli.watch import run_progress
    from ifbbench.replay.run import run_trace

    with run_progress(label, config.quiet) as (progress, follow):
        return run_trace(
            trace,
            config,
            progress,
            owns_process=True,
            on_recording=follow,
            on_recorded=partial(_write_outputs, config=config),
        )


def _write_outputs(directory: Path, config: RunConfig) -> None:
    """`write_run_outputs`, nothing if the directory was removed: who prints the run says so."""
    try:
        write_run_outputs(directory, config)
    except InputError:
        if not is_lost(directory):
            raise
