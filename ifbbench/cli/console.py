"""The console that all commands print their tables to."""

from rich.console import Console

FILE_WIDTH = 160


def report_console(highlight: bool = True) -> Console:
    """Standard output; in a file or pipe, which has no width of its own, wide enough that no column is cut."""
    console = Console(highlight=highlight)
    return console if console.is_terminal else Console(width=FILE_WIDTH, highlight=highlight)
