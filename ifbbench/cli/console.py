"""What commands print to: the console of tables, and the progress line."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

FILE_WIDTH = 160


def report_console(highlight: bool = True) -> "Console":
    """Standard output; in a file or pipe, which has no width of its own, wide enough that no column is cut."""
    from rich.console import Console

    class OutputConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # `main` handles it; rich would exit with status 1

    console = OutputConsole(highlight=highlight)
    return console if console.is_terminal else OutputConsole(width=FILE_WIDTH, highlight=highlight)


class ProgressLine:
    """Shows how far a command is."""

    def __init__(self, progress: "Progress", task: "TaskID") -> None:
        self._progress = progress
        self._task = task

    def update(self, completed: int, total: int, text: str) -> None:
        """Show `completed` of `total` steps, followed by `text`."""
        self._progress.update(self._task, completed=completed, total=total, text=text)


@contextmanager
def progress_line(label: str, quiet: bool) -> Iterator[ProgressLine | None]:
    """A line on standard error that starts with `label` and is removed at the end; None if `quiet` or if standard error
    is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        yield ProgressLine(progress, progress.add_task(label, total=None, text=""))
