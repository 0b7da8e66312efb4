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
              help="A setting, or trace, and its values; ranges are 512..16384:x2 or 8..64:+8. Several --over make a "
                   "grid.")
@click.option("--zip", "is_paired", is_flag=True, help="Pair the values of several --over instead of crossing them.")
@click.option("--repeat", type=click.IntRange(min=1), default=1, metavar="N",
              help="Run each point N times, with the seeds --seed, --seed + 1, …; the table has the means.")
@click.option("--keep", type=click.Choice(["run", "summary"]),
              help="Keep the run directory of each run, or only its summary, which is faster. Default: run directories "
                   "of up to 16 runs.")
@click.option("--processes", type=click.IntRange(min=1), metavar="N",
              help="Simulated runs at the same time. Default: one for each core. Runs on a real device follow each "
                   "other.")
@click.option("--executor", type=click.Choice(["local", "ray"]), default="local", show_default=True,
              help="Run the points here, or simulated ones on the Ray cluster that this machine is connected to (needs "
                   "the extra `ray`).")
@json_option
@click.pass_context
def sweep(
    context: click.Context, /, trace: str | None, over: tuple[str, ...], as_json: bool, config_file: Path | None,
    is_paired: bool, repeat: int, keep: str | None, processes: int | None, executor: str, **options: Any,
) -> None:  # fmt: skip
    """Replay TRACE once for each combination of settings and compare the runs.

    Every value is checked before the first run starts. A sweep that was interrupted goes on where it was when the same
    command is given again.
    """
    config = given_config(config_file, options)
    result = _sweep(trace, config, over, config.quiet, is_paired=is_paired, repeats=repeat, keep=keep,
                    processes=processes, executor=executor)  # fmt: skip
    _report_sweep(result, config.quiet, as_json)
    if result.failed:
        click.echo(f"{result.failed} of {len(result.rows)} points failed or had failed requests.", err=True)
        context.exit(1)


def run_points(trace: str | None, config: RunConfig, over: Sequence[str], quiet: bool) -> list[Path]:
    """Run a sweep; returns the run directories in its order. InputError if a point failed."""
    result = _sweep(trace, config, over, quiet, keep="run")
    for row in result.rows:
        if row["error"]:
            raise InputError(f"{row['output']}: {row['error']}")
    return [Path(str(row["output"])) for row in result.rows]


def _sweep(
    trace: str | None, config: RunConfig, over: Sequence[str], quiet: bool, *, is_paired: bool = False,
    repeats: int = 1, keep: str | None = None, processes: int | None = None, executor: str = "local",
) -> "SweepResult":  # fmt: skip
    from ifbbench.cli.console import progress_line
    from ifbbench.planning.grid import grid, parse_axes
    from ifbbench.planning.sweep import Executor, LocalProcesses, run_sweep

    points = grid(parse_axes(over, is_paired), is_paired)
    where: Executor = LocalProcesses(processes)
    if executor == "ray":
        from ifbbench.planning.ray_cluster import RayCluster

        where = RayCluster(processes)
    with progress_line("sweep", quiet) as progress:
        return run_sweep(trace, config, points, _failure_reporter(quiet), repeats=repeats, keep=keep, executor=where,
                         progress=progress)  # fmt: skip


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


def _failure_reporter(quiet: bool) -> Callable[[int, int, str, str], None]:
    """Reports the points of a sweep that fail, as they end."""

    def report_point(ended: int, points: int, label: str, error: str) -> None:
        if error and not quiet:
            click.echo(f"{label}: {error}", err=True)

    return report_point


def _report_sweep(result: "SweepResult", quiet: bool, as_json: bool) -> None:
    from ifbbench.cli.console import report_console
    from ifbbench.planning.point_table import SWEEP_FILE, read_sweep
    from ifbbench.report.sweep_charts import plot_sweep
    from ifbbench.report.sweep_table import print_sweep

    table = read_sweep(result.directory)
    if table.finished:
        plot_sweep(table.finished, table.over, result.directory)
    if as_json:
        click.echo(json.dumps(table.rows, indent=2))
    elif not quiet:
        print_sweep(table.rows, table.over, report_console(), result.warnings)
        if result.resumed:
            click.echo(f"{result.resumed} runs had ended before and were not repeated; --overwrite repeats them.")
        click.echo(f"Results are in {result.directory}; {result.directory / SWEEP_FILE} has all figures.")


def replay(trace: str | None, config: RunConfig, label: str) -> "RunResult":
    """Run with the progress of a command called `label`, and write the files for other tools."""
    from ifbbench.cli.watch import run_progress
    from ifbbench.replay.run import run_trace

    with run_progress(label, config.quiet) as (progress, follow):
        return run_trace(
            trace, config, progress, owns_process=True, on_recording=follow,
            on_recorded=partial(write_run_outputs, config=config),
        )  # fmt: skip
