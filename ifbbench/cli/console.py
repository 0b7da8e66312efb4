"""Where tables are printed."""

from rich.console import Console

FILE_WIDTH = 160


def report_console() -> Console:
    """Standard output; in a file or pipe, which has no width of its own, wide enough that no column is cut."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)
