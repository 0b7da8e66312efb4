"""Runs commands in this process, with a limit of time and memory, and counts how they end."""

import io
import os
import resource
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn
from unittest.mock import patch

import click

from ifbbench.cli import main as command_line
from ifbbench.cli.main import DEFECT, FAILED, main
from ifbbench.errors import IfbbenchError
from ifbbench.schedulers.tensorrt_llm.policies import POLICY_CLASSES, PolicyFailed

# Of a try: of processor time, because the machine may be busy, and of all time, for one that waits for ever.
LIMIT_S, LIMIT_WALL_S = 20, 300
# Beyond what the process has already: a try that allocates more ends with a MemoryError, not with the machine.
LIMIT_BYTES = 3 << 30
STATUSES = (0, 1, 2, 130)
# A command may fail because of a device, a server, a user's policy or lack of memory. Behind a message with status 1,
# these are defects of the code all the same.
DEFECTS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    AssertionError,
    NameError,
)


class Hang(KeyboardInterrupt):
    """A command took longer than a limit. Event loops swallow what is neither this nor SystemExit."""


@dataclass
class Outcomes:
    """The tries of one kind of attack: how many, their exit statuses, and what went wrong, with the command."""

    kind: str
    statuses: Counter[int] = field(default_factory=Counter)
    tracebacks: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    wrong_statuses: list[str] = field(default_factory=list)

    @property
    def tries(self) -> int:
        return self.statuses.total() + len(self.hangs)

    @property
    def problems(self) -> list[str]:
        return self.tracebacks + self.hangs + self.wrong_statuses

    def report(self) -> str:
        by_status = ", ".join(f"{count} with {status}" for status, count in sorted(self.statuses.items()))
        return (
            f"{self.kind}: {self.tries} tries ({by_status}), {len(self.tracebacks)} tracebacks, {len(self.hangs)} "
            f"hangs, {len(self.wrong_statuses)} wrong exit statuses"
        )

    def attack(self, arguments: Sequence[str], note: str = "") -> str:
        """Run `ifbbench ARGUMENTS`, count how it ends, and return what it printed. note: what reproduces the try."""
        printed = io.StringIO()

        def run() -> int:
            with redirect_stdout(_Text(printed)), redirect_stderr(_Text(printed)), _noting(failures):
                try:
                    main(["--debug", *arguments], prog_name="ifbbench")
                except SystemExit as end:
                    return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
                return 0

        failures: list[BaseException | None] = []
        self.call(run, f"ifbbench {' '.join(map(repr, arguments))} {note}", failures)
        if DEFECT in printed.getvalue() and not failures:
            self.tracebacks.append(f"{arguments} {note}\n{printed.getvalue()[-1500:]}")
        return printed.getvalue()

    def call(self, task: Callable[[], int], shown: str, failures: Sequence[BaseException | None] = ()) -> None:
        """Count a try: how `task` ends, which returns its exit status or raises an error of ifbbench.

        failures: what `task` adds the exceptions to that it has handled."""
        status, problem = 1, ""
        hangs: list[BaseException] = []
        try:
            with _limited(hangs):
                status = task()
        except IfbbenchError as error:
            status, failures = error.exit_status, [*failures, error]
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}\n{_where(error)}"
        if hangs:
            self.hangs.append(f"{shown}\n{_where(hangs[0])}")
            return
        self.statuses[status] += 1
        if not problem and status == FAILED and (found := next(filter(None, map(defect, failures)), None)):
            problem = f"{type(found).__name__}: {found}\n{_where(found)}"
        if problem:
            self.tracebacks.append(f"{shown}\n{problem}")
        if status not in STATUSES:
            self.wrong_statuses.append(f"{shown}\nstatus {status}")


@contextmanager
def _noting(failures: list[BaseException | None]) -> Iterator[None]:
    """Add the exceptions with which commands end in the block to `failures`."""
    end = command_line._end

    def noted(context: click.Context | None, message: str, status: int) -> NoReturn:
        failures.append(sys.exception())
        end(context, message, status)

    with patch.object(command_line, "_end", noted):
        yield


def defect(error: BaseException | None) -> BaseException | None:
    """The defect of the code that is behind `error`, None if there is none. What a user's policy raises is none."""
    while error is not None and (isinstance(error, IfbbenchError) or not isinstance(error, DEFECTS)):
        is_users = isinstance(error, PolicyFailed) and error.name not in POLICY_CLASSES
        error = None if is_users else error.__cause__
    return error


class _Text(io.TextIOWrapper):
    """Takes all texts, lone surrogates as well, as a terminal does with `backslashreplace`."""

    def __init__(self, target: io.StringIO) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
        self._target = target

    def write(self, text: str) -> int:
        self._target.write(text)
        return super().write(text)


def _where(error: BaseException) -> str:
    return "".join(traceback.format_tb(error.__traceback__)[-3:])


@contextmanager
def _limited(hangs: list[BaseException]) -> Iterator[None]:
    """A limit of time, which adds to `hangs`, and of memory for a block; the working directory is restored after it."""

    def stop(number: int, frame: FrameType | None) -> None:
        hangs.append(hang := Hang())
        raise hang

    directory, path, recursion = os.getcwd(), list(sys.path), sys.getrecursionlimit()
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    timers = {signal.ITIMER_PROF: (signal.SIGPROF, LIMIT_S), signal.ITIMER_REAL: (signal.SIGALRM, LIMIT_WALL_S)}
    before = {number: signal.signal(number, stop) for number, _ in timers.values()}
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, hard))
    for timer, (_, limit_s) in timers.items():
        signal.setitimer(timer, limit_s)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        os.chdir(directory)
        sys.path[:] = path
        sys.setrecursionlimit(recursion)


def fresh(folder: Path, name: str) -> Path:
    """`folder`/`name`, which does not exist."""
    number, path = 0, folder / name
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}"
    return path
