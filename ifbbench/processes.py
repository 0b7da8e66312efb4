"""Independent tasks in parallel processes of this machine, forked from this one, so that tasks share what it has read.

Unlike `concurrent.futures`, a process that is killed costs only its own task, which is run again; and no process
outlives this one.
"""

import ctypes
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from ifbbench.clock import WallClock

MAX_ATTEMPTS = 3
REPORT_INTERVAL_S = 0.5
PR_SET_PDEATHSIG = 1

RunTask = Callable[[int, Callable[[int], None]], Any]
"""Runs the task of this number; the function that it is given takes how much of it is done, in steps of any size."""


class Lost(Exception):
    """The process of a task was killed, each of MAX_ATTEMPTS times."""


class TimeIsUp(BaseException):
    """The time for a task is over. No Exception: of these, a replay makes one that says at which iteration it
    failed."""


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent(parent: int) -> None:
    """Let this process be killed when its parent ends, whatever it does then: at once on Linux. It ends here if the
    parent has ended already."""
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def start_python(code: str, connection: Connection, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A new interpreter that runs `code`, with the number of the file of `connection` and the id of this process as
    arguments. It is in a session of its own: Ctrl+C is for this process. It begins with SIGINT blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(
            [sys.executable, "-c", code, str(connection.fileno()), str(os.getpid())],
            pass_fds=[connection.fileno()],
            env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def death_of(status: int) -> str:
    """How a process with this exit status ended; that of a signal is negative."""
    if status >= 0:
        return f"ended with exit status {status}"
    reason = ", perhaps for lack of memory" if -status == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-status).name}{reason}"


def run_in_processes(
    run_task: RunTask,
    count: int,
    processes: int,
    on_steps: Callable[[int], None] = lambda steps: None,
    known: Callable[[int], Any | None] = lambda number: None,
) -> Generator[tuple[int, Any], None, None]:
    """Run tasks 0 to `count` - 1; yields the number and the result of each as it ends: what `run_task` returned, or the
    exception that it raised, or Lost. A result must be picklable.

    on_steps: takes the sum of the steps of the tasks that are running, every REPORT_INTERVAL_S or more often; what it
        raises ends the tasks.
    known: is asked before each task, when all results so far were taken, for a result that makes it needless; None if
        there is none.
    """
    attempts = [0] * count
    waiting = list(range(count - 1, -1, -1))
    workers: dict[Connection, _Worker] = {}

    def begin(worker: _Worker) -> Generator[tuple[int, Any], None, None]:
        """Let `worker` run the next task whose result is not known; yields the results that are."""
        workers[worker.connection] = worker
        while waiting:
            number = waiting.pop()
            if (result := known(number)) is None:
                worker.begin(number)
                return
            yield number, result
        del workers[worker.connection]
        worker.stop()

    try:
        while waiting or workers:
            while waiting and len(workers) < processes:
                yield from begin(_Worker(run_task))
            for connection in wait(list(workers), REPORT_INTERVAL_S):
                worker = workers[connection]  # type: ignore[index]
                try:
                    steps, result, is_result = worker.connection.recv()
                except (EOFError, ConnectionError):
                    del workers[worker.connection]
                    worker.stop()
                    attempts[worker.task] += 1
                    if attempts[worker.task] < MAX_ATTEMPTS:
                        waiting.append(worker.task)
                    else:
                        yield worker.task, Lost(f"its process was killed {MAX_ATTEMPTS} times (out of memory?)")
                    continue
                worker.steps = steps
                if is_result:
                    yield worker.task, result
                    yield from begin(worker)
            on_steps(sum(one.steps for one in workers.values()))
    finally:
        for worker in workers.values():
            worker.stop()


def run_within(task: Callable[[], Any], seconds: float) -> Any:
    """What `task` returns or raises. It runs in another process, which is ended after `seconds`: TimeIsUp."""
    clock = WallClock()

    def check_time(steps: int) -> None:
        if clock.now() > seconds:
            raise TimeIsUp

    ((_, result),) = run_in_processes(lambda number, report: task(), 1, 1, check_time)
    if isinstance(result, Exception):
        raise result
    return result


class _Worker:
    """A process that runs one task after another.

    steps: how much of its task is done.
    """

    def __init__(self, run_task: RunTask) -> None:
        self.task, self.steps = -1, 0
        context = get_context("fork")
        self.connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_work, args=(run_task, theirs, self.connection, os.getpid()), daemon=True
        )
        self._process.start()
        theirs.close()

    def begin(self, task: int) -> None:
        """Run this task next."""
        self.task, self.steps = task, 0
        with suppress(BrokenPipeError):  # a process that was killed; `recv` notices it
            self.connection.send(task)

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _work(run_task: RunTask, connection: Connection, parents: Connection, parent: int) -> None:
    parents.close()
    end_with_parent(parent)  # it has the lock of the directory that the parent writes to
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the parent, which stops the others
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    clock, reported_s = WallClock(), 0.0

    def report(steps: int) -> None:
        nonlocal reported_s
        if clock.now() - reported_s < REPORT_INTERVAL_S:
            return
        reported_s = clock.now()
        if os.getppid() != parent:  # it was killed; what this process does is for nothing, and writes files
            os._exit(1)
        connection.send((steps, None, False))

    with suppress(EOFError, ConnectionError):
        while True:
            task = connection.recv()
            try:
                result = run_task(task, report)
            except Exception as error:
                result = error
            connection.send((0, result, True))
