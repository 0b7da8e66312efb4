"""The console that all commands print their tables to."""

from rich.console import Console

FILE_WIDTH = 160


def report_console(highlight: bool = True) -> Console:
    """Standard output; in a file or pipe, which has no width of its own, wide enough that no column is cut."""
    console = _Console(highlight=highlight)
    return console if console.is_terminal else _Console(width=FILE_WIDTH, highlight=highlight)


class _Console(Console):
    """A console that leaves a closed pipe to the command line, where rich exits with status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
