"""`ifbbench run`: replay one trace."""

from pathlib import Path
from typing import Any

import click

from ifbbench.cli.options import SettingsCommand, given_config


@click.command(cls=SettingsCommand)
@click.argument("trace", required=False)
@click.pass_context
def run(context: click.Context, /, trace: str | None, config_file: Path | None, **options: Any) -> None:
    """Replay TRACE and report what happened, iteration by iteration.

    Without TRACE the small one that comes with ifbbench is replayed.
    """
    config = given_config(config_file, options)

    from ifbbench.cli.progress import progress_line
    from ifbbench.replay.run import run_trace

    with progress_line("run", config.quiet) as progress:
        result = run_trace(trace, config, progress)
    if config.output_csv or not config.quiet:
        _report(result.directory, config.quiet, config.output_csv)
    if result.failed:
        click.echo(f"{result.failed} requests failed; {result.directory / 'requests.jsonl'} says why.", err=True)
        context.exit(1)


def _report(directory: Path, quiet: bool, output_csv: str | None) -> None:
    from ifbbench.report.benchmark_csv import benchmark_lines, write_benchmark_csv
    from ifbbench.report.load import load_run

    finished = load_run(directory)
    if output_csv:
        write_benchmark_csv(finished, Path(output_csv))
    if quiet:
        return
    from ifbbench.cli.console import report_console
    from ifbbench.report.tables import print_report

    print_report(finished, report_console())
    for line in benchmark_lines(finished):
        click.echo(line)
    click.echo(f"Results are in {directory}; `ifbbench plot {directory}` draws them.")
