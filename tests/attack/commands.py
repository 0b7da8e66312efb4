"""Runs commands in this process, with a limit of time and memory, and counts how they end."""

import io
import os
import resource
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from ifbbench.cli.main import DEFECT, main

LIMIT_S = 20
# Beyond what the process has already: a try that allocates more ends with a MemoryError, not with the machine.
LIMIT_BYTES = 3 << 30
STATUSES = (0, 1, 2, 130)


class Hang(BaseException):
    """A command took longer than LIMIT_S. No `except Exception` of a command catches it."""


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
        shown = f"ifbbench {' '.join(map(repr, arguments))} {note}"
        printed = io.StringIO()
        status, problem = 1, ""
        try:
            with _limited(), redirect_stdout(_Text(printed)), redirect_stderr(_Text(printed)):
                try:
                    main(["--debug", *arguments], prog_name="ifbbench")
                except SystemExit as end:
                    status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except Hang as hang:
            self.hangs.append(f"{shown}\n{_where(hang)}")
            return printed.getvalue()
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}\n{_where(error)}"
        text = printed.getvalue()
        self.statuses[status] += 1
        if problem or DEFECT in text:
            self.tracebacks.append(f"{shown}\n{problem or text[-1500:]}")
        if status not in STATUSES:
            self.wrong_statuses.append(f"{shown}\nstatus {status}")
        return text


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
def _limited() -> Iterator[None]:
    """A limit of time and of memory for a block; the working directory is restored after it."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    directory, path, recursion = os.getcwd(), list(sys.path), sys.getrecursionlimit()
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, hard))
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
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
