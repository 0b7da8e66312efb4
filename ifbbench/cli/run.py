"""`ifbbench run` and `ifbbench sweep`: replay a trace once, or once for each combination of settings."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifbbench.cli.options import SettingsCommand, given_config
from ifbbench.config import RunConfig
from ifbbench.errors import InputError

if TYPE_CHECKING:
    from ifbbench.planning.sweep import SweepResult
    from ifbbench.replay.run import RunResult

SWEEP_HELP = {
    "output": "Sweep directory, with a run directory for each point. Default: results/sweep-<keys>.",
    "overwrite": "Replace the runs and the table of an existing sweep directory.",
}


@click.command(cls=SettingsCommand)
@click.argument("trace", required=False)
@click.pass_context
def run(context: click.Context, /, trace: str | None, config_file: Path | None, **options: Any) -> None:
    """Replay TRACE and report what happened, iteration by iteration.

    Without TRACE the small bundled one is replayed.
    """
    config = given_config(config_file, options)

    from ifbbench.cli.report import report_run
    from ifbbench.recording.run_directory import find_lines

    result = _replay(trace, config, "run")
    if config.output_csv or not config.quiet:
        report_run(result.directory, Path(config.output_csv) if config.output_csv else None, config.quiet)
    if not config.quiet:
        click.echo(f"Results are in {result.directory}; `ifbbench plot {result.directory}` draws them.")
    if result.failed:
        reasons = find_lines(result.directory, "requests")
        click.echo(f"{result.failed} requests failed; {reasons} has the reason of each.", err=True)
        context.exit(1)


@click.command(cls=SettingsCommand, setting_help=SWEEP_HELP)
@click.argument("trace", required=False)
@click.option("--over", multiple=True, required=True, metavar="KEY=V1,V2,…",
              help="A setting and its values; several --over make a grid.")
@click.pass_context
def sweep(
    context: click.Context, /, trace: str | None, over: tuple[str, ...], config_file: Path | None, **options: Any
) -> None:
    """Replay TRACE once for each combination of settings and compare the runs.

    Every value is checked before the first run starts. sweep.csv of the sweep directory gets a row as each point ends.
    """
    config = given_config(config_file, options)
    result = _sweep(trace, config, over, config.quiet)
    _report_sweep(result.directory, config.quiet)
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

    def run_point(trace: str | None, config: RunConfig) -> "RunResult":
        return _replay(trace, config, Path(str(config.output)).name)

    def report_point(ended: int, points: int, label: str, error: str) -> None:
        if not quiet:
            click.echo(f"{ended}/{points} {label}: {error or 'done'}", err=True)

    return run_sweep(trace, config, parse_axes(over), run_point, report_point)


def _report_sweep(directory: Path, quiet: bool) -> None:
    from ifbbench.cli.console import report_console
    from ifbbench.planning.sweep import SWEEP_FILE, read_sweep
    from ifbbench.report.charts import plot_sweep
    from ifbbench.report.tables import print_sweep

    table, axis = read_sweep(directory).with_one_axis()
    if table.finished:
        plot_sweep(table.finished, axis, directory)
    if not quiet:
        print_sweep(table.rows, axis, report_console())
        click.echo(f"Results are in {directory}; {directory / SWEEP_FILE} has all figures.")


def _replay(trace: str | None, config: RunConfig, label: str) -> "RunResult":
    from ifbbench.cli.console import progress_line
    from ifbbench.replay.run import run_trace

    with progress_line(label, config.quiet) as progress:
        return run_trace(trace, config, progress, owns_process=True)
