"""`ifbbench watch`, and the same view during `run`: what a run does now."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ifbbench.cli.console import StageProgress, progress_line
from ifbbench.cli.options import Command, FloatRange
from ifbbench.clock import WallClock
from ifbbench.errors import IfbbenchError, InputError
from ifbbench.progress import Progress

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from ifbbench.report.pages.live import Follower, Snapshot

# A refresh takes some 10 ms of the process that runs, mostly to read what it wrote.
REFRESHES_PER_SECOND = 1
START_TIMEOUT_S = 30.0
Follow = Callable[[Path], None]
# What reading a run directory may raise that was removed, or is not written yet.
NOT_READABLE = (OSError, ValueError, IfbbenchError)


@click.command(cls=Command)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--interval",
    type=FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
@click.option("--once", is_flag=True, help="Show the run once, and do not wait for its end.")
def watch(run: Path, interval: float, once: bool) -> None:
    """Show what RUN does now, a run directory that another process is writing.

    On a terminal the view is updated in place until the run has ended; elsewhere there is a line for each look.
    """
    from rich.live import Live

    from ifbbench.cli.console import report_console
    from ifbbench.report.pages.live import Follower

    clock, console = WallClock(), report_console(highlight=False)
    content = _read_run(run, clock, 0.0 if once else START_TIMEOUT_S)
    if content.get("endpoint"):
        raise InputError(
            f"{run}: a run against an endpoint has no iterations to watch; the run itself shows its "
            "progress, and `ifbbench report` what it has done."
        )
    follower = Follower(run, content)
    first: Snapshot | None = None
    if once:
        now = follower.snapshot()
        console.print("no iteration yet" if now is None else follower.table(now))
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            now = follower.snapshot()
            first = first or now
            if now is not None and console.is_terminal:
                left = _remaining(first, now, clock.now())
                live.update(_titled(f"{run.name}  {left}", follower.table(now)), refresh=True)
            elif now is not None:
                click.echo(f"{now.progress}{' requests' if now.requests else ''}, {now.line}")
            if now is not None and now.ended:
                break
            clock.wait_until(clock.now() + interval)
    click.echo(f"The run has ended; `ifbbench report {run}` prints its report.")


def _read_run(directory: Path, clock: WallClock, timeout_s: float) -> dict[str, object]:
    """run.json; waits until the run has written it. InputError if it does not."""
    from ifbbench.rundir.checking import read_object

    path = directory / "run.json"
    while True:
        if path.is_file() and path.stat().st_size:
            return read_object(path)
        if clock.now() >= timeout_s:
            raise InputError(f"{directory}: has no run.json; expected the directory of a run that began its work.")
        clock.wait_until(clock.now() + 0.2)


def _remaining(first: "Snapshot | None", now: "Snapshot", elapsed_s: float) -> str:
    """The time that is left at the rate since the first look."""
    if now.ended:
        return "has ended"
    done = now.tokens - (first.tokens if first else 0)
    if not done or not now.planned_tokens:
        return ""
    return f"{timedelta(seconds=round(elapsed_s * (now.planned_tokens - now.tokens) / done))} left"


def _titled(title: str, body: "Table | str") -> "Group":
    from rich.console import Group
    from rich.text import Text

    return Group(Text(title, "bold"), body)


@contextmanager
def run_progress(label: str, quiet: bool) -> Iterator[tuple[Progress, Follow | None]]:
    """The progress of a run, and a function to call with its directory when it begins to record.

    On a terminal a view of several lines, which is removed at the end; else lines now and then, nothing if `quiet`.
    """
    if quiet or not sys.stderr.isatty():
        with progress_line(label, quiet) as progress:
            yield progress, _line_follower(progress)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    dashboard = Dashboard(label)
    with Live(dashboard, console=console, transient=True, refresh_per_second=REFRESHES_PER_SECOND):
        yield dashboard, dashboard.follow


def _line_follower(progress: Progress) -> Follow | None:
    """Adds throughput and TTFT to the lines of `progress`; None if it prints none."""
    if not isinstance(progress, StageProgress):
        return None

    def follow(directory: Path) -> None:
        progress.details = _details(directory)

    return follow


def _details(directory: Path) -> Callable[[], str]:
    """A function that says what a run does now."""
    follower: list[Follower] = []

    def details() -> str:
        from ifbbench.report.pages.live import Follower

        try:
            if not follower:
                follower.append(Follower(directory, json.loads((directory / "run.json").read_text(encoding="utf-8"))))
            now = follower[0].snapshot()
        except NOT_READABLE:
            return ""
        return "" if now is None else now.line

    return details


class Dashboard(StageProgress):
    """The stage and the remaining time, and below what the run does now."""

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._directory: Path | None = None
        self._follower: Follower | None = None

    def follow(self, directory: Path) -> None:
        """Show the run that is recorded in `directory`."""
        self._directory = directory

    def __rich__(self) -> "Group":
        done = f"{self._completed:,}/{self._total:,}" if self._total else ""
        title = "  ".join(filter(None, (self.title, done, self.remaining)))
        table = self._table()
        return _titled(f"{title}  {self._text}" if table is None else title, table or "")

    def _table(self) -> "Table | None":
        if self._directory is None:
            return None
        from ifbbench.report.pages.live import Follower

        try:
            if self._follower is None:
                text = (self._directory / "run.json").read_text(encoding="utf-8")
                self._follower = Follower(self._directory, json.loads(text))
            now = self._follower.snapshot()
        except NOT_READABLE:
            self._directory = None  # the stage is shown without it
            return None
        return None if now is None else self._follower.table(now)
