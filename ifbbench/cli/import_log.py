"""`ifbbench import`: the log of another engine becomes a run directory."""

from pathlib import Path

import click

from ifbbench.cli.options import Command


@click.command("import", cls=Command)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    metavar="DIRECTORY",
    help="The run directory. Default: results/NAME, for a FILE called NAME.log; numbered if it exists.",
)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    metavar="N",
    help="The rank of data parallelism whose iterations are read, where the log has several.",
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier run in the directory.")
def import_log(file: Path, output: Path | None, rank: int | None, overwrite: bool) -> None:
    """Make a run directory of FILE, a log of iterations: vLLM's with --enable-logging-iteration-details, SGLang's, or
    TensorRT-LLM's iteration statistics. report, why, plot and compare read it, as far as the log goes; what it lacks is
    listed.
    """
    from ifbbench.compressed import content_path
    from ifbbench.rundir.run_directory import default_directory
    from ifbbench.studies.import_logs import import_log as read_and_write

    target = default_directory(content_path(file).stem, overwrite) if output is None else output
    directory, log = read_and_write(file, target, overwrite, rank)
    click.echo(f"{log.format}: {len(log.iterations):,} iterations. Not in it:")
    for sentence in log.lost:
        click.echo(f"- {sentence}")
    click.echo(f"The run is {directory}; `ifbbench report {directory}` prints its report.")
