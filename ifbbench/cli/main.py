"""The `ifbbench` command. It starts fast: a command's module, and what that imports, is loaded only when called."""

import click

from ifbbench import __version__
from ifbbench.cli.lazy_group import LazyCommand, LazyGroup

COMMANDS = {
    "run": LazyCommand("ifbbench.cli.run", "run", "Replay a trace and report what happened."),
    "generate": LazyCommand("ifbbench.cli.generate", "generate", "Print what a model says to a prompt."),
    "sweep": LazyCommand("ifbbench.cli.sweep", "sweep", "Run once for each combination of settings."),
    "report": LazyCommand("ifbbench.cli.report", "report", "Print the report of a run again."),
    "plot": LazyCommand("ifbbench.cli.plot", "plot", "Draw the charts of runs and sweeps."),
    "capacity": LazyCommand("ifbbench.cli.capacity", "capacity", "Tell what fits, before anything is run."),
    "explain-step": LazyCommand("ifbbench.cli.explain_step", "explain_step", "Tell where an iteration's time goes."),
    "calibrate": LazyCommand("ifbbench.cli.calibrate", "calibrate", "Measure this machine for simulated runs."),
    "dataset": LazyCommand("ifbbench.cli.dataset", "dataset", "Make, convert and describe traces."),
}


def _with_dashes(name: str) -> str:
    """Underscores and dashes are the same in the names of options and commands."""
    return name.replace("_", "-")


@click.group(
    cls=LazyGroup,
    lazy_commands=COMMANDS,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 120,
        "token_normalize_func": _with_dashes,
    },
)
@click.version_option(__version__, prog_name="ifbbench")
def main() -> None:
    """Which batching settings should you run on your traffic, and why?

    ifbbench replays a trace of requests through an in-flight batching engine and shows what happened, iteration by
    iteration.
    """
