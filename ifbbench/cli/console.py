"""What commands print to: the console of tables, and the progress of long operations."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import click

from ifbbench.clock import WallClock
from ifbbench.progress import NO_PROGRESS, Progress

if TYPE_CHECKING:
    from rich.console import Console

FILE_WIDTH = 160
# Refreshing more often costs more than 1 % of the time of a simulated run.
REFRESHES_PER_SECOND = 4
# Where standard error is not a terminal: the first line, and at least one line in each interval from then on.
FIRST_LINE_S = 3.0
LINE_INTERVAL_S = 10.0


def report_console(highlight: bool = True) -> "Console":
    """Standard output; in a file or pipe, which has no width of its own, wide enough that no column is cut."""
    from rich.console import Console
    from rich.text import Text

    from ifbbench.settings.fields import printable

    class OutputConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

        def print(self, *objects: Any, **options: Any) -> None:
            # A sentence is one line in a file; a terminal would cut words at its end, so that lines are broken here.
            if self.is_terminal:
                options["soft_wrap"] = False
            super().print(*objects, **options)

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # `main` handles it; rich would exit with status 1

    # Without emoji: a name such as `:bug:` stays as it is, and no text is searched for them.
    console = OutputConsole(highlight=highlight, emoji=False)
    return console if console.is_terminal else OutputConsole(width=FILE_WIDTH, highlight=highlight, emoji=False)


class StageProgress:
    """The stage of a command, how much of it is done, and the time that the rest will take at the same rate.

    details: returns what to print in place of the text of the last update, once some of the stage is done.
    """

    def __init__(self, label: str) -> None:
        self._clock = WallClock()
        self._label = label
        self._stage, self._started_s = "", 0.0
        self._completed, self._text = 0, ""
        self._total: int | None = None
        self.details: Callable[[], str] | None = None

    def stage(self, label: str) -> None:
        self._stage, self._started_s = label, self._clock.now()
        self._completed, self._total, self._text = 0, None, ""

    def update(self, completed: int, total: int | None, text: str) -> None:
        self._completed, self._total, self._text = completed, total, text

    @property
    def title(self) -> str:
        """The command and its stage."""
        return f"{self._label}: {self._stage}" if self._stage else self._label

    @property
    def remaining(self) -> str:
        """`0:01:40 left`; empty while unknown."""
        if not self._total or not 0 < self._completed <= self._total:
            return ""
        elapsed_s = self._clock.now() - self._started_s
        return f"{timedelta(seconds=round(elapsed_s * (self._total / self._completed - 1)))} left"


class LineProgress(StageProgress):
    """Prints a line now and then on standard error: after FIRST_LINE_S, when a stage begins after that, and every
    LINE_INTERVAL_S. A thread prints it, because an operation such as loading a model may be silent for long."""

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._due_s = FIRST_LINE_S
        self._ended = Event()
        self._thread = Thread(target=self._print_until_the_end, daemon=True)
        self._thread.start()

    def stage(self, label: str) -> None:
        super().stage(label)
        if self._clock.now() >= FIRST_LINE_S:
            self.print()

    def print(self) -> None:
        """Print where the command is."""
        self._due_s = self._clock.now() + LINE_INTERVAL_S
        share = f"{100 * self._completed // self._total} %" if self._total else ""
        done = f"{self._completed:,} of {self._total:,} ({share})" if self._total else ""
        text = (self.details and self._completed and self.details()) or self._text
        click.echo(", ".join(filter(None, (self.title, done, self.remaining, text))), err=True)

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _print_until_the_end(self) -> None:
        while not self._ended.wait(max(self._due_s - self._clock.now(), 0.0)):
            if self._clock.now() >= self._due_s:
                try:
                    self.print()
                except OSError:  # standard error was closed: the command goes on without progress
                    return


@contextmanager
def _bar(label: str, console: "Console") -> Iterator[Progress]:
    """A line with a bar on a terminal, which is removed at the end."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    class BarProgress(StageProgress):
        def stage(self, label: str) -> None:
            super().stage(label)
            bar.reset(task, total=None, description=self.title, counts="", remaining="", text="")

        def update(self, completed: int, total: int | None, text: str) -> None:
            super().update(completed, total, text)
            counts = f"{completed:,}/{total:,}" if total else ""
            bar.update(task, completed=completed, total=total, counts=counts, remaining=self.remaining, text=text)

    names = ("counts", "remaining", "text")
    columns = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in names]
    with Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        *columns,
        console=console,
        transient=True,
        refresh_per_second=REFRESHES_PER_SECOND,
    ) as bar:
        task = bar.add_task(label, total=None, counts="", remaining="", text="")
        yield BarProgress(label)


def echo_beside_bar(text: str) -> None:
    """Print a line on standard error while a bar may be there: rich then draws the bar below it. click.echo would write
    to the terminal behind rich's back, into the line of the bar."""
    print(text, file=sys.stderr)


@contextmanager
def progress_line(label: str, quiet: bool) -> Iterator[Progress]:
    """The progress of a command called `label`, on standard error: a bar on a terminal, else a line now and then, which
    a command of few seconds does not reach; nothing if `quiet`."""
    if quiet:
        yield NO_PROGRESS
        return
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with _bar(label, console) as progress:
            yield progress
    else:
        lines = LineProgress(label)
        try:
            yield lines
        finally:
            lines.close()
