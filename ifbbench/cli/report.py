"""`ifbbench report`: the tables of a run, finished or killed."""

from pathlib import Path

import click

from ifbbench.cli.options import Command


@click.command(cls=Command)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--output-csv", type=click.Path(path_type=Path), help="Also write gptManagerBenchmark's CSV here.")
def report(run: Path, output_csv: Path | None) -> None:
    """Print the report of RUN, a run directory. Of a run that was killed it tells what had been done."""
    print_run(run)
    if output_csv:
        write_csv(run, output_csv)


def print_run(directory: Path) -> None:
    """Print the tables and the [BENCHMARK] lines of a run directory."""
    from ifbbench.cli.console import report_console
    from ifbbench.report.benchmark_csv import benchmark_lines
    from ifbbench.report.load import load_run
    from ifbbench.report.tables import print_report

    run = load_run(directory)
    print_report(run, report_console())
    for line in benchmark_lines(run):
        click.echo(line)


def write_csv(directory: Path, path: Path) -> None:
    """Write a run directory's figures as gptManagerBenchmark's CSV."""
    from ifbbench.report.benchmark_csv import write_benchmark_csv
    from ifbbench.report.load import load_run

    write_benchmark_csv(load_run(directory), path)
