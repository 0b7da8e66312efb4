"""A file layer that ends the process, or has a full disk, at the n-th change of a file; and processes to try it in."""

import builtins
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ifbbench.cli.main import main

KILLED = 99
# Functions of `os` that change files.
CHANGES = ("mkdir", "rename", "replace", "link", "unlink", "remove", "rmdir", "truncate")
# Of them those that need room on the disk.
NEED_ROOM = ("mkdir", "link")


class FileLayer:
    """Counts the changes of files of this process: what is opened to be written, each write, rename and so on.

    At the change `stop_at`, from 1, half of a write is done, and then the process ends as by kill -9; or, if `is_full`,
    this change and all later ones that need room fail for lack of it.
    """

    def __init__(self, stop_at: int, is_full: bool = False) -> None:
        self.count, self.stop_at, self.is_full = 0, stop_at, is_full

    def install(self) -> None:
        """Take effect for the rest of the process."""
        layer = self

        class File(io.FileIO):
            def write(self, content: Any, /) -> int:
                if self.fileno() > 2 and layer.changes():
                    whole = memoryview(content).cast("B")
                    is_first = layer.count == layer.stop_at
                    written = super().write(whole[: len(whole) // 2]) if is_first else 0
                    if not written or not layer.is_full:
                        layer.stop()
                    return written  # the rest, tried again, finds the disk full
                return super().write(content)

        def opened(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: Any = None,
            errors: Any = None,
            newline: Any = None,
            *_: Any,
            **__: Any,
        ) -> Any:
            if set(mode) <= set("rbt"):
                return true_open(file, mode, buffering, encoding, errors, newline)
            if isinstance(file, str | os.PathLike) and not os.path.exists(file) and layer.changes():
                layer.stop()
            raw = File(file, mode.replace("b", "").replace("t", ""))
            binary = io.BufferedWriter(raw, buffering if buffering > 0 else 512)
            return binary if "b" in mode else io.TextIOWrapper(binary, encoding, errors, newline)

        true_open = io.open
        io.open = builtins.open = opened
        for name in CHANGES:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if self.changes() and (not self.is_full or name in NEED_ROOM):
                self.stop()
            return function(*arguments, **options)

        return counted

    def changes(self) -> bool:
        """Count a change; whether it is not to be done."""
        self.count += 1
        return self.count == self.stop_at or (self.is_full and self.count > self.stop_at)

    def stop(self) -> None:
        """End the process, or raise the error of a full disk."""
        if not self.is_full:
            os._exit(KILLED)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def in_fork(task: Callable[[], int], output: Path, stdout: str | None = None) -> int:
    """The exit status of `task` in a forked process; see `forked`."""
    return ended(forked(task, output, stdout))


def ended(process: int) -> int:
    """The exit status of a process, when it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def forked(task: Callable[[], int], output: Path, stdout: str | None = None) -> int:
    """A forked process that ends with the status that `task` returns, 70 if it raised. It prints into the file
    `output`; to standard output into the file `stdout` if given."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    status = 70
    try:
        printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(stdout, os.O_WRONLY) if stdout else printed, 1)
        os.dup2(printed, 2)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
        status = task()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def status_of(arguments: Sequence[str]) -> int:
    """The exit status of `ifbbench ARGUMENTS` in this process."""
    try:
        main(list(arguments), prog_name="ifbbench")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def command(
    arguments: Sequence[str],
    stop_at: int,
    is_full: bool,
    before: Callable[[], None],
    run: Callable[[Sequence[str]], int] = status_of,
) -> Callable[[], int]:
    """A task that runs `ifbbench ARGUMENTS` on a FileLayer, and prints the number of changes at its end."""

    def task() -> int:
        before()
        layer = FileLayer(stop_at, is_full)
        layer.install()
        status = run(arguments)
        print(f"changes {layer.count}", file=sys.stderr)
        return status

    return task
