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

    Without TRACE the small bundled one is replayed.
    """
    config = given_config(config_file, options)

    from ifbbench.cli.console import progress_line
    from ifbbench.cli.report import print_run, write_csv
    from ifbbench.recording.run_directory import find_lines
    from ifbbench.replay.run import run_trace

    with progress_line("run", config.quiet) as progress:
        result = run_trace(trace, config, progress, owns_process=True)
    if config.output_csv:
        write_csv(result.directory, Path(config.output_csv))
    if not config.quiet:
        print_run(result.directory)
        click.echo(f"Results are in {result.directory}; `ifbbench plot {result.directory}` draws them.")
    if result.failed:
        reasons = find_lines(result.directory, "requests")
        click.echo(f"{result.failed} requests failed; {reasons} has the reason of each.", err=True)
        context.exit(1)
