"""`ifbbench report` and `ifbbench plot`: the tables and the charts of what was run."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click

from ifbbench.cli.options import Command, SettingsCommand
from ifbbench.errors import InputError

DIRECTORY = click.Path(path_type=Path)
Drawing = tuple[str, Callable[[], Sequence[Path]]]
"""What is drawn, and the function that draws it and returns the files that it wrote."""


@click.command(cls=SettingsCommand, names=("enable_steady_state",), setting_help={
    "enable_steady_state": "Of the steady state only: the window after ramp-up and before drain."})
@click.argument("run", type=DIRECTORY)
@click.option("--output-csv", type=DIRECTORY, help="Also write gptManagerBenchmark's CSV here.")
def report(run: Path, output_csv: Path | None, enable_steady_state: str | None) -> None:
    """Print the report of RUN, a run directory. That of a killed run covers what was done."""
    report_run(run, output_csv, steady_state=bool(enable_steady_state))


def report_run(directory: Path, output_csv: Path | None, quiet: bool = False, steady_state: bool = False) -> None:
    """Print the tables and the [BENCHMARK] lines of a run directory, and write gptManagerBenchmark's CSV."""
    from ifbbench.cli.console import report_console
    from ifbbench.report.figures import benchmark_lines, write_benchmark_csv
    from ifbbench.report.load import load_run
    from ifbbench.report.recorded import steady_figures
    from ifbbench.report.tables import print_report

    run = load_run(directory)
    if output_csv:
        write_benchmark_csv(run, output_csv)
    if not quiet:
        print_report(run, report_console(), steady_figures(run) if steady_state else None)
        for line in benchmark_lines(run):
            click.echo(line)


@click.command(cls=Command)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=DIRECTORY)
def plot(paths: tuple[Path, ...]) -> None:
    """Draw the charts of each run at or below PATH, and of each sweep that PATH is.

    Charts go into the directory of what they show; the files written are listed.
    """
    from ifbbench.cli.console import progress_line

    drawings = [drawing for path in paths for drawing in _drawings(path)]
    written: list[Path] = []
    with progress_line("plot", quiet=len(drawings) == 1) as progress:
        for done, (name, draw) in enumerate(drawings):
            if progress:
                progress.update(done, len(drawings), name)
            written += draw()
    for file in written:
        click.echo(file)


def _drawings(path: Path) -> list[Drawing]:
    from ifbbench.planning.sweep import SWEEP_FILE, read_sweep
    from ifbbench.report.load import find_runs

    runs: list[Drawing] = [(run.name, partial(_draw_run, run)) for run in find_runs(path)]
    if not (path / SWEEP_FILE).is_file():
        return runs
    table, axis = read_sweep(path).with_one_axis()
    if not table.finished:
        raise InputError(f"{path}: every point of the sweep failed; see the column `error` of {SWEEP_FILE}.")

    def draw_sweep() -> Sequence[Path]:
        from ifbbench.report.charts import plot_sweep

        return plot_sweep(table.finished, axis, path)

    return [(path.name, draw_sweep), *runs]


def _draw_run(directory: Path) -> Sequence[Path]:
    from ifbbench.report.charts import plot_run
    from ifbbench.report.load import load_run

    return plot_run(load_run(directory))
