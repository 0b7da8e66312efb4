"""The progress line of a run: drawn on standard error while a person watches, and gone when the run is done."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class ProgressLine:
    """What a run reports its advance to."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def update(self, completed: int, total: int, text: str) -> None:
        """Show `completed` of `total` done, with `text` behind."""
        self._progress.update(self._task, completed=completed, total=total, text=text)


@contextmanager
def progress_line(label: str, quiet: bool) -> Iterator[ProgressLine | None]:
    """A line that starts with `label`; None if `quiet` or if standard error is not a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield ProgressLine(progress, progress.add_task(label, total=None, text=""))
