"""`ifbbench plot`: draw the charts of runs and sweeps."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from ifbbench.cli.options import Command
from ifbbench.errors import InputError

Drawing = tuple[str, Callable[[], Sequence[Path]]]


@click.command(cls=Command)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path))
def plot(paths: tuple[Path, ...]) -> None:
    """Draw the charts of each run at or below PATH, and of each sweep that PATH is.

    Charts go into the directory of what they show; the files written are listed.
    """
    from ifbbench.cli.progress import progress_line

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
    """What is to be drawn at `path`: names, and the functions that draw and return the files they wrote."""
    from ifbbench.report.load import find_runs
    from ifbbench.sweep.table import SWEEP_FILE, read_sweep

    if not (path / SWEEP_FILE).is_file():
        return [(run.name, partial(_draw_run, run)) for run in find_runs(path)]
    table, axis = read_sweep(path).with_one_axis()
    if not table.finished:
        raise InputError(f"{path}: every point of the sweep failed; {SWEEP_FILE} says why in its column `error`.")
    return [
        (path.name, partial(_draw_sweep, table.finished, axis, path)),
        *((run.name, partial(_draw_run, run)) for run in find_runs(path)),
    ]


def _draw_run(directory: Path) -> Sequence[Path]:
    from ifbbench.report.charts import plot_run
    from ifbbench.report.load import load_run

    return plot_run(load_run(directory))


def _draw_sweep(rows: Sequence[Mapping[str, Any]], axis: str, directory: Path) -> Sequence[Path]:
    from ifbbench.report.charts import plot_sweep

    return plot_sweep(rows, axis, directory)
