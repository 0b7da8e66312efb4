"""`ifbbench report`, `plot`, `export` and `schema`: tables, charts and files of what was run."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from ifbbench.cli.options import Command, SettingsCommand, given_config
from ifbbench.config import REPORT_FILES, RunConfig
from ifbbench.errors import InputError
from ifbbench.recording.run_directory import REPEATS_FILE

DIRECTORY = click.Path(path_type=Path)
EXPORT_FORMATS = ("csv", "parquet")
Drawing = tuple[str, Callable[[], Sequence[Path]]]
"""What is drawn, and the function that draws it and returns the files that it wrote."""

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the figures as JSON, and nothing else, on standard output."
)


@click.command(
    cls=SettingsCommand, names=(*REPORT_FILES, "result_format", "save_detailed", "enable_steady_state"),
    setting_help={"enable_steady_state": "Of the steady state only: the window after ramp-up and before drain."},
)
@click.argument("run", type=DIRECTORY)
@json_option
def report(run: Path, as_json: bool, **options: Any) -> None:
    """Print the report of RUN, a run directory. That of a killed run covers what was done.

    Of a directory of `run --repeat` it has the means and their confidence intervals.
    """
    if (run / REPEATS_FILE).is_file():
        report_repeats(run, as_json)
        return
    config = given_config(None, options)
    write_run_outputs(run, config)
    if not as_json:
        print_run(run, config.enable_steady_state)
        return

    from ifbbench.report.figures import figures
    from ifbbench.report.load import load_run
    from ifbbench.report.recorded import steady_figures

    loaded = load_run(run)
    click.echo(json.dumps(steady_figures(loaded) if config.enable_steady_state else figures(loaded), indent=2))


def report_repeats(directory: Path, as_json: bool = False) -> None:
    """Print the means of repeats."""
    if as_json:
        click.echo((directory / "summary.json").read_text(encoding="utf-8"), nl=False)
        return

    from ifbbench.cli.console import report_console
    from ifbbench.report.repeats import print_repeats

    print_repeats(directory, report_console())


def write_run_outputs(directory: Path, config: RunConfig) -> None:
    """Write the files for other tools that `config` asks for."""
    if config.result_format or any(getattr(config, name) for name in REPORT_FILES):
        from ifbbench.report.load import load_run
        from ifbbench.report.outputs import write_outputs

        write_outputs(load_run(directory), config)


def print_run(directory: Path, steady_state: bool = False) -> None:
    """Print the tables and the [BENCHMARK] lines of a run directory. steady_state: tables of the steady state only."""
    from ifbbench.cli.console import progress_line, report_console
    from ifbbench.report.figures import benchmark_lines
    from ifbbench.report.load import load_run
    from ifbbench.report.recorded import steady_figures
    from ifbbench.report.tables import print_report

    run = load_run(directory)
    with progress_line("report", quiet=False) as progress:
        progress.stage("reading results")
        lines = benchmark_lines(run)
        steady = steady_figures(run) if steady_state else None
    print_report(run, report_console(), steady)
    for line in lines:
        click.echo(line)


@click.command(cls=Command)
@click.argument("run", type=DIRECTORY)
@click.option("--format", "export_format", type=click.Choice(EXPORT_FORMATS), default="csv", show_default=True,
              help="CSV, or Parquet (needs the extra `parquet`).")
def export(run: Path, export_format: str) -> None:
    """Write the tables of RUN into its directory `export`: iterations, requests, spans and trace.

    The files written are listed.
    """
    from ifbbench.report.export import export_tables, load_run

    for file in export_tables(load_run(run), export_format):
        click.echo(file)


@click.command(cls=Command)
@click.argument("file", required=False)
def schema(file: str | None) -> None:
    """Print the JSON schema of FILE of a run directory, such as requests.jsonl; without FILE those of all files.

    The schema of a file of lines describes one line.
    """
    from ifbbench.report.schema import schema_of, schemas

    click.echo(json.dumps(schema_of(file) if file else schemas(), indent=2))


@click.command(cls=Command)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=DIRECTORY)
def plot(paths: tuple[Path, ...]) -> None:
    """Draw the charts of each run at or below PATH, and of each sweep that PATH is.

    Charts go into the directory of what they show; the files written are listed.
    """
    from ifbbench.cli.console import progress_line

    drawings = [drawing for path in paths for drawing in _drawings(path)]
    written: list[Path] = []
    with progress_line("plot", quiet=False) as progress:
        progress.stage("drawing")
        for done, (name, draw) in enumerate(drawings):
            progress.update(done, len(drawings), name)
            written += draw()
    for file in written:
        click.echo(file)


def _drawings(path: Path) -> list[Drawing]:
    from ifbbench.planning.point_table import SWEEP_FILE, read_sweep
    from ifbbench.report.load import find_runs

    table = read_sweep(path) if (path / SWEEP_FILE).is_file() else None
    is_without_runs = table is not None and not any(path.rglob("run.json"))
    runs: list[Drawing] = [(run.name, partial(_draw_run, run)) for run in ([] if is_without_runs else find_runs(path))]
    if table is None:
        return runs
    if not table.finished:
        raise InputError(f"{path}: every point of the sweep failed; see the column `error` of {SWEEP_FILE}.")

    def draw_sweep() -> Sequence[Path]:
        from ifbbench.report.sweep_charts import plot_sweep

        return plot_sweep(table.finished, table.over, path)

    return [(path.name, draw_sweep), *runs]


def _draw_run(directory: Path) -> Sequence[Path]:
    from ifbbench.report.charts import plot_run
    from ifbbench.report.load import load_run

    return plot_run(load_run(directory))
