"""`ifbbench report`, `plot`, `export` and `schema`: tables, charts and files of what was run."""

import gc
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifbbench.cli.given_settings import given_config
from ifbbench.cli.options import Command, IntegerRange, SettingsCommand
from ifbbench.errors import InputError
from ifbbench.files import check_new_directory, check_new_file
from ifbbench.rundir.run_directory import REPEATS_FILE, SERVER_LOGS
from ifbbench.settings.config import RunConfig
from ifbbench.settings.groups.recording import REPORT_FILES

if TYPE_CHECKING:
    from ifbbench.replay.single import RunResult
    from ifbbench.report.chart_files import Output
    from ifbbench.rundir.reader import RunData
    from ifbbench.studies.point_table import SweepTable

DIRECTORY = click.Path(path_type=Path)
EXPORT_FORMATS = ("csv", "parquet", "perfetto")
# The formats of charts. matplotlib is imported only when something is drawn.
FORMATS = ("png", "svg", "pdf")
DEFAULT_FORMATS = ("png", "svg")
Drawing = tuple[str, Callable[[], Sequence[Path]]]
"""What is drawn, and the function that draws it and returns the files that it wrote."""

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the figures as JSON, and nothing else, on standard output."
)
benchmark_lines_option = click.option(
    "--benchmark_lines/--no_benchmark_lines",
    default=None,
    help="Print gptManagerBenchmark's [BENCHMARK] lines below the tables. Default: where standard output is no "
    "terminal, and with options that only gptManagerBenchmark has.",
)


@click.command(
    cls=SettingsCommand,
    names=(*REPORT_FILES, "result_format", "save_detailed", "enable_steady_state", "overwrite"),
    setting_help={
        "enable_steady_state": "Of the steady state only: the window after ramp-up and before drain.",
        "overwrite": "Replace existing files.",
    },
)
@click.argument("run", type=DIRECTORY)
@json_option
@benchmark_lines_option
def report(run: Path, as_json: bool, benchmark_lines: bool | None, **options: Any) -> None:
    """Print the report of RUN, a run directory. That of a killed run covers what was done.

    Of a directory of `run --repeat` it has the means and their confidence intervals.
    """
    if (run / REPEATS_FILE).is_file():
        if given := [name for name, value in options.items() if value not in (None, ())]:
            raise InputError(
                f"--{given[0]}: is for one run, but {run} has several; name one of them, such as {run / 'repeat-1'}."
            )
        report_repeats(run, as_json)
        return
    config = given_config(None, options)
    for name in REPORT_FILES:
        if path := getattr(config, name):
            check_new_file(Path(path), f"--{name}", config.overwrite)
    write_run_outputs(run, config)

    from ifbbench.rundir.reader import load_run

    loaded = load_run(run)
    if not as_json:
        print_run(loaded, benchmark_lines, config.enable_steady_state)
        return

    from ifbbench.rundir.figures import figures, steady_figures

    click.echo(json.dumps(steady_figures(loaded) if config.enable_steady_state else figures(loaded), indent=2))


def report_repeats(directory: Path, as_json: bool = False, known: Mapping[str, Any] | None = None) -> None:
    """Print the means of repeats. known: their summary, by default that in `directory`."""
    if known is None:
        from ifbbench.rundir.checking import read_object

        known = read_object(directory / "summary.json", of_repeats=True)
    if as_json:
        click.echo(json.dumps(known, indent=2))
        return

    from ifbbench.analysis.words import words_of
    from ifbbench.cli.console import report_console
    from ifbbench.report.repeats import print_repeats

    runs = sorted(directory.glob("repeat-*/run.json"))[:1]
    words = words_of(*(json.loads(path.read_bytes()).get("config") or {} for path in runs))
    print_repeats(directory.name, known, words, report_console())


def write_run_outputs(directory: Path, config: RunConfig) -> None:
    """Write the files for other tools that `config` asks for."""
    is_logged = config.iteration_stats_format in SERVER_LOGS
    if config.result_format or is_logged or any(getattr(config, name) for name in REPORT_FILES):
        from ifbbench.report.outputs import write_outputs
        from ifbbench.rundir.reader import load_run

        write_outputs(load_run(directory), config)


def print_result(result: "RunResult", print_whole: Callable[["RunData"], None]) -> None:
    """Print a run that has ended with `print_whole`. OutputError if its directory was removed since: the tables of what
    is known without it are printed then, unless it was printed before."""
    from ifbbench.files import lost
    from ifbbench.rundir.reader import RunData
    from ifbbench.rundir.run_directory import is_lost

    # Reading and checking run.json and summary.json, which were just written, takes as long as printing them.
    data = RunData(result.directory, dict(result.description), result.summary)
    if is_lost(result.directory):
        print_run(data, with_lines=False)
    else:
        print_whole(data)
    if is_lost(result.directory):
        raise lost(result.directory)


def print_run(run: "RunData", with_lines: bool | None, steady_state: bool = False) -> None:
    """Print the tables of a run.

    with_lines: whether gptManagerBenchmark's [BENCHMARK] lines follow; None is where standard output is no terminal, of
        a run with requests.
    steady_state: tables of the steady state only.
    """
    from ifbbench.cli.console import progress_line, report_console
    from ifbbench.report.compat.gpt_manager_benchmark import benchmark_lines
    from ifbbench.report.tables import print_report
    from ifbbench.rundir.figures import steady_figures

    with progress_line("report", quiet=False) as progress:
        progress.stage("reading results")
        is_wanted = with_lines or (with_lines is None and not sys.stdout.isatty() and not run.lacks_requests)
        lines = benchmark_lines(run) if is_wanted else []
        steady = steady_figures(run) if steady_state else None
    print_report(run, report_console(), steady)
    for line in lines:
        click.echo(line)


@contextmanager
def _libraries() -> Iterator[None]:
    """Import libraries without collections in between, and keep their objects out of later ones."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@click.command(cls=Command)
@click.argument("run", type=DIRECTORY)
@click.option(
    "--format",
    "export_format",
    type=click.Choice(EXPORT_FORMATS),
    default="csv",
    show_default=True,
    help="CSV, Parquet (needs the extra `parquet`), or a trace for ui.perfetto.dev.",
)
def export(run: Path, export_format: str) -> None:
    """Write the tables of RUN into its directory `export`: iterations, requests, spans and trace.

    With --format perfetto write one trace of iterations, requests, pauses and counters, for ui.perfetto.dev; of a fleet
    with the decisions of its router and a process for each replica. The files written are listed.
    """
    check_new_directory(run / "export", "export into")
    if export_format == "perfetto":
        from ifbbench.analysis.recorded import RecordedRun
        from ifbbench.report.compat.perfetto import write_trace

        recorded = RecordedRun.load(run, or_endpoint=True, or_fleet=True)
        click.echo(write_trace(recorded, recorded.data.path / "export"))
        return

    with _libraries():
        from ifbbench.report.export import export_tables, load_run

    for file in export_tables(load_run(run), export_format):
        click.echo(file)


@click.command(cls=Command)
@click.argument("file", required=False)
def schema(file: str | None) -> None:
    """Print the JSON schema of FILE of a run directory, such as requests.jsonl; without FILE those of all files.

    The schema of a file of lines describes one line.
    """
    from ifbbench.rundir.schema import schema_of, schemas

    click.echo(json.dumps(schema_of(file) if file else schemas(), indent=2))


@click.command(cls=Command)
@click.argument("paths", metavar="PATH...", nargs=-1, type=DIRECTORY)
@click.option("--only", metavar="NAME,…", help="Draw these charts only; see --list.")
@click.option("--list", "list_charts", is_flag=True, help="List the charts, and draw nothing.")
@click.option("--html", is_flag=True, help="Write the page of the run or sweep instead: one HTML file to look into it.")
@click.option("--overlay", is_flag=True, help="Draw all runs into common charts, or onto one page.")
@click.option("--from", "begin", metavar="N|SECONDSs", help="Start at an iteration (120) or a time (3.5s).")
@click.option("--to", "end", metavar="N|SECONDSs", help="End with an iteration (160) or at a time (800ms).")
@click.option("--requests", metavar="ID,…", help="Draw these requests of the timeline only, such as 3,8-12.")
@click.option("--exact", is_flag=True, help="Draw the timeline with a cell for each request and iteration.")
@click.option("--title", metavar="TEXT", help="Title of the charts, in place of their own.")
@click.option(
    "--format",
    "formats",
    metavar="FORMAT,…",
    default=",".join(DEFAULT_FORMATS),
    show_default=True,
    help="Formats of the charts: png, svg, pdf.",
)
@click.option("--dpi", type=IntegerRange(30, 1200), help="Pixels per inch of PNG files. Default: 150.")
@click.option("--output", type=DIRECTORY, help="Directory of the files. Default: charts in each run directory.")
def plot(
    paths: tuple[Path, ...],
    only: str | None,
    list_charts: bool,
    html: bool,
    overlay: bool,
    begin: str | None,
    end: str | None,
    requests: str | None,
    exact: bool,
    title: str | None,
    formats: str,
    dpi: int | None,
    output: Path | None,
) -> None:
    """Draw the charts of each run at or below PATH, and of each sweep that PATH is.

    Charts go into the directory of what they show; the files written are listed. With --overlay and --html, PATH can be
    several runs that are compared.
    """
    if list_charts:
        _list_charts()
        return
    if not paths:
        raise click.UsageError("Missing argument 'PATH...'; name a run directory, a sweep or a directory of runs.")

    if output is not None:
        check_new_directory(output, "--output")

    from ifbbench.cli.console import progress_line

    with _libraries():
        from ifbbench.report.chart_files import Output

        import_module("ifbbench.report.pages.page" if html else "ifbbench.report.charts")

    names = _names("--only", only, _chart_names(overlay)) if only else ()
    kinds = _names("--format", formats, FORMATS)
    if exact and not names:
        names = ("timeline",)
    how = Output(output, kinds, dpi, title)
    selection = {"begin": begin, "end": end, "requests": requests}
    if overlay:
        drawings = [_overlay(paths, how, names, selection, html)]
    elif html:
        drawings = [drawing for path in paths for drawing in _pages(path, output)]
    else:
        drawings = [drawing for path in paths for drawing in _drawings(path, how, names, selection, exact)]
    written: list[Path] = []
    with progress_line("plot", quiet=False) as progress:
        progress.stage("drawing")
        for done, (name, draw) in enumerate(drawings):
            progress.update(done, len(drawings), name)
            written += draw()
    for file in written:
        click.echo(file)


def _chart_names(overlay: bool) -> dict[str, str]:
    """The charts of one run, or of several, and what each shows."""
    from ifbbench.report.charts import CHARTS
    from ifbbench.report.overlay import OVERLAYS

    return dict(OVERLAYS) if overlay else {name: chart.shows for name, chart in CHARTS.items()}


def _list_charts() -> None:
    from ifbbench.cli.console import report_console
    from ifbbench.report import plain_table

    table = plain_table("Chart", "shows")
    for name, shows in _chart_names(False).items():
        table.add_row(name, shows)
    for name, shows in _chart_names(True).items():
        table.add_row(name, f"with --overlay: {shows}")
    table.add_row("run.html", "with --html: the run page, one interactive file")
    table.add_row("sweep.html", "with --html: the page of a sweep")
    report_console(highlight=False).print(table)


def _names(option: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    """The names in a list such as `png,svg`; InputError for one that is not known."""
    names = tuple(dict.fromkeys(part.strip().replace("-", "_") for part in text.split(",") if part.strip()))
    for name in names:
        if name not in known:
            raise InputError(f"{option} {text}: {name!r} is not known; expected {', '.join(known)}.")
    return names


def _runs(paths: Sequence[Path]) -> list[Path]:
    from ifbbench.rundir.reader import find_runs

    return list(dict.fromkeys(run for path in paths for run in find_runs(path)))


def _overlay(
    paths: Sequence[Path], how: "Output", names: Sequence[str], selection: dict[str, Any], html: bool
) -> Drawing:
    """The drawing of several runs together; into `charts` of the first one by default."""
    from ifbbench.report.overlay import MAX_RUNS

    runs = _runs(paths)
    most = 2 if html else MAX_RUNS
    if not 2 <= len(runs) <= most:
        expected = "2" if html else f"2 to {most}"
        raise InputError(f"--overlay: {len(runs)} runs; expected {expected}. Name their directories.")
    directory = how.directory or runs[0] / "charts"
    if html:
        return "page", partial(_write_page, runs, directory)

    def draw() -> Sequence[Path]:
        from ifbbench.report.overlay import plot_overlay
        from ifbbench.report.selection import select
        from ifbbench.rundir.reader import load_run

        loaded = [select(load_run(run), **selection) for run in runs]
        return plot_overlay(loaded, replace(how, directory=directory), names)

    return "overlay", draw


def _pages(path: Path, output: Path | None) -> list[Drawing]:
    """The pages of the runs at or below `path`, and that of the sweep which it is, with links to them."""
    from ifbbench.rundir.reader import find_runs

    table = _sweep_at(path)
    runs = find_runs(path) if table is None or any(path.rglob("run.json")) else []
    # Runs of equal names must not replace each other's pages.
    into = {
        run: output / run.relative_to(path) if output and len(runs) > 1 else output or run / "charts" for run in runs
    }
    pages: list[Drawing] = [(run.name, partial(_write_page, [run], into[run])) for run in runs]
    if table is None:
        return pages

    def write() -> Sequence[Path]:
        from ifbbench.report.pages.page import FILE
        from ifbbench.report.pages.sweep_page import write_sweep_page

        directory = output or path
        links = {
            name: [os.path.relpath(into[run] / FILE, directory) for run in runs if name in run.parts]
            for name in table.run_names
        }
        return [write_sweep_page(path.resolve().name, table.rows, table.over, links, directory)]

    return [(path.name, write), *pages]


def _sweep_at(path: Path) -> "SweepTable | None":
    """The table of the sweep that `path` is, None for other directories; InputError if no point of it has figures."""
    from ifbbench.studies.point_table import SWEEP_FILE, read_sweep

    if not (path / SWEEP_FILE).is_file():
        return None
    table = read_sweep(path)
    if not table.finished:
        raise InputError(f"{path}: every point of the sweep failed; see the column `error` of {SWEEP_FILE}.")
    return table


def _write_page(runs: Sequence[Path], directory: Path | None) -> Sequence[Path]:
    from ifbbench.report.pages.page import write_page

    return [write_page(runs, directory or runs[0] / "charts")]


def _drawings(path: Path, how: "Output", names: Sequence[str], selection: dict[str, Any], exact: bool) -> list[Drawing]:
    from ifbbench.rundir.reader import find_runs

    table = None if names else _sweep_at(path)
    found = find_runs(path) if names or table is None or any(path.rglob("run.json")) else []
    runs: list[Drawing] = []
    for run in found:
        # Runs of equal names must not replace each other's files.
        directory = how.directory / run.name if how.directory and len(found) > 1 else how.directory
        runs.append((run.name, partial(_draw_run, run, replace(how, directory=directory), names, selection, exact)))
    if table is None:
        return runs

    def draw_sweep() -> Sequence[Path]:
        from ifbbench.report.sweep_charts import plot_sweep

        return plot_sweep(table.finished, table.over, path)

    return [(path.name, draw_sweep), *runs]


def _draw_run(
    directory: Path, how: "Output", names: Sequence[str], selection: dict[str, Any], exact: bool
) -> Sequence[Path]:
    from ifbbench.report.charts import NOT_DRAWN, plot_run
    from ifbbench.report.selection import select
    from ifbbench.rundir.reader import load_run

    return plot_run(select(load_run(directory, NOT_DRAWN), **selection), only=names, exact=exact, output=how)
