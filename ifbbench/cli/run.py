"""`ifbbench run` and `ifbbench sweep`: replay a trace once, or once for each combination of settings."""

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifbbench.cli.gpt_manager import TraceCommand
from ifbbench.cli.options import given_config
from ifbbench.cli.report import json_option, print_run, write_run_outputs
from ifbbench.clock import WallClock
from ifbbench.config import RunConfig
from ifbbench.errors import InputError

if TYPE_CHECKING:
    from ifbbench.planning.sweep import SweepResult
    from ifbbench.replay.run import RunResult

SWEEP_HELP = {
    "output": "Sweep directory, with a run directory for each point. Default: results/sweep-<keys>.",
    "overwrite": "Replace the runs and the table of an existing sweep directory.",
}


@click.command(cls=TraceCommand)
@click.argument("trace", required=False)
@click.option("--repeat", type=click.IntRange(min=1), default=1, metavar="N",
              help="Run N times, with the seeds --seed, --seed + 1, …; report means and confidence intervals.")
@json_option
@click.pass_context
def run(
    context: click.Context, /, trace: str | None, repeat: int, as_json: bool, config_file: Path | None, **options: Any
) -> None:  # fmt: skip
    """Replay TRACE and report what happened, iteration by iteration.

    Without TRACE the small bundled one is replayed.
    """
    config = given_config(config_file, options)
    if repeat > 1:
        _repeat(context, trace, config, repeat, as_json)
        return

    from ifbbench.recording.run_directory import find_lines

    result = replay(trace, config, "run")
    if as_json:
        click.echo(json.dumps(result.summary, indent=2))
    elif not config.quiet:
        print_run(result.directory)
        click.echo(f"Results are in {result.directory}; `ifbbench plot {result.directory}` draws them.")
    if result.failed:
        reasons = find_lines(result.directory, "requests")
        click.echo(f"{result.failed} requests failed; {reasons} has the reason of each.", err=True)
        context.exit(1)


@click.command(cls=TraceCommand, setting_help=SWEEP_HELP)
@click.argument("trace", required=False)
@click.option("--over", multiple=True, required=True, metavar="KEY=V1,V2,…",
              help="A setting and its values; several --over make a grid.")
@json_option
@click.pass_context
def sweep(
    context: click.Context, /, trace: str | None, over: tuple[str, ...], as_json: bool, config_file: Path | None,
    **options: Any,
) -> None:  # fmt: skip
    """Replay TRACE once for each combination of settings and compare the runs.

    Every value is checked before the first run starts. sweep.csv of the sweep directory gets a row as each point ends.
    """
    config = given_config(config_file, options)
    result = _sweep(trace, config, over, config.quiet)
    _report_sweep(result.directory, config.quiet, as_json)
    if result.failed:
        click.echo(f"{result.failed} of {result.points} points failed or had failed requests.", err=True)
        context.exit(1)


def run_points(trace: str | None, config: RunConfig, over: Sequence[str], quiet: bool) -> list[Path]:
    """Run a sweep; returns the run directories in its order. InputError if a point failed."""
    from ifbbench.planning.sweep import read_sweep

    result = _sweep(trace, config, over, quiet)
    table = read_sweep(result.directory)
    for row in table.rows:
        if row["error"]:
            raise InputError(f"{row['output']}: {row['error']}")
    return [Path(str(row["output"])) for row in table.rows]


def _sweep(trace: str | None, config: RunConfig, over: Sequence[str], quiet: bool) -> "SweepResult":
    from ifbbench.planning.sweep import parse_axes, run_sweep

    return run_sweep(trace, config, parse_axes(over), _run_point, _point_reporter(quiet))


def _repeat(context: click.Context, trace: str | None, config: RunConfig, count: int, as_json: bool) -> None:
    from ifbbench.cli.report import report_repeats
    from ifbbench.planning.repeat import run_repeats

    result = run_repeats(trace, config, count, _run_point, _point_reporter(config.quiet))
    if as_json or not config.quiet:
        report_repeats(result.directory, as_json)
    if not as_json and not config.quiet:
        click.echo(f"Results are in {result.directory}; each repeat is a run directory in it.")
    if result.failed:
        click.echo(f"{result.failed} of {count} repeats failed or had failed requests.", err=True)
        context.exit(1)


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


def _report_sweep(directory: Path, quiet: bool, as_json: bool) -> None:
    from ifbbench.cli.console import report_console
    from ifbbench.planning.sweep import SWEEP_FILE, read_sweep
    from ifbbench.report.charts import plot_sweep
    from ifbbench.report.sweep_table import print_sweep

    table, axis = read_sweep(directory).with_one_axis()
    if table.finished:
        plot_sweep(table.finished, axis, directory)
    if as_json:
        click.echo(json.dumps(table.rows, indent=2))
    elif not quiet:
        print_sweep(table.rows, axis, report_console())
        click.echo(f"Results are in {directory}; {directory / SWEEP_FILE} has all figures.")


def replay(trace: str | None, config: RunConfig, label: str) -> "RunResult":
    """Run with the progress of a command called `label`, and write the files for other tools."""
    from ifbbench.cli.watch import run_progress
    from ifbbench.replay.run import run_trace

    with run_progress(label, config.quiet) as (progress, follow):
        return run_trace(
            trace, config, progress, owns_process=True, on_recording=follow,
            on_recorded=partial(write_run_outputs, config=config),
        )  # fmt: skip
