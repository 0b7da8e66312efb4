"""Processes of ranks: starts them, waits for rank 0's result, and ends all when one has failed.

`run_in_ranks` starts all, and this process waits for them. With `other_ranks` this process is rank 0 itself.
What the ranks do, also without this parent under torchrun or mpirun: see `rank_runs`.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

from ifbbench.clock import WallClock
from ifbbench.errors import IfbbenchError, InputError, RunFailed
from ifbbench.models.config import check_ranks
from ifbbench.models.named_models import load_model_config
from ifbbench.processes import death_of, end_with_parent, start_python
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.replay.rank_runs import WRITING, end_others, follow, starts_ranks
from ifbbench.settings.config import RunConfig
from ifbbench.torch.ranks import Place, RankFailed, cause_of

# After the first failure, how long others may take to report theirs, and rank 0 to write what it has.
REPORT_S, WRITE_S = 15.0, 20.0
# After a rank has waited for another in vain for --rank_timeout, how long others may take to report the same.
REPORT_TIMEOUT_S = 0.5
POLL_S = 0.2
LOADING = "loading model"
# Messages of a rank that has failed: by itself, or because another rank is lost or has not answered.
FAILED, LOST, TIMED_OUT = "failed", "lost", "timed_out"
# Until the model is loaded, a signal ends the process at once: an exception would fall into imports, some of which make
# another error of it.
START = (
    "from signal import *; signal(SIGINT, SIG_DFL); pthread_sigmask(SIG_UNBLOCK, [SIGINT])\n"
    "from ifbbench.replay.rank_processes import work; work()"
)


@dataclass(frozen=True, slots=True)
class Job:
    """What rank 0 does: `run(progress=…, …)`, with a function for each name of `callbacks` that reports its arguments.
    run: can be pickled."""

    run: Callable[..., Any]
    callbacks: tuple[str, ...]


# The process that starts the ranks.


def run_in_ranks(
    run: Callable[..., Any],
    config: RunConfig,
    progress: Progress = NO_PROGRESS,
    callbacks: Mapping[str, Callable[..., None] | None] | None = None,
    *,
    subject: str = "the run",
    passed_on: Collection[signal.Signals] = (),
) -> Any:
    """The result of `run(progress=…, …)` in rank 0 of the processes that `config` needs. Its exception is raised here;
    RunFailed names a rank that died, does not answer or failed otherwise. No process is left.

    callbacks: further arguments of `run`, by name; called here when rank 0 calls them.
    subject: subject of messages.
    passed_on: signals to this process that are passed on to rank 0, which ends by them.
    """
    called: dict[str, Any] = {"stage": progress.stage, "update": progress.update, **(callbacks or {})}
    with _new_ranks(config, subject, called) as ranks:
        try:
            ranks.start(Job(run, tuple(callbacks or ())))
            with _passing_on(passed_on, ranks):
                return ranks.result()
        except KeyboardInterrupt:
            raise ranks.interrupt() from None


@contextmanager
def other_ranks(config: RunConfig, subject: str) -> "Iterator[Ranks | None]":
    """Start the other ranks of `config`, of which this process is rank 0 until the end of the block; None if there are
    none, or a launcher has started them."""
    if config.makes_no_tokens or not starts_ranks(config):
        yield None
        return
    with _new_ranks(config, subject, {}) as ranks:
        ranks.start(None)
        yield ranks
        end_others()


@contextmanager
def _new_ranks(config: RunConfig, subject: str, callbacks: Mapping[str, Any]) -> "Iterator[Ranks]":
    check_ranks(load_model_config(config.model), config.tp_size, config.pp_size, config.ep_size)
    with TemporaryDirectory(prefix="ifbbench-ranks-") as directory:
        ranks = Ranks(config, Path(directory) / "store", subject, callbacks)
        try:
            yield ranks
        finally:
            ranks.kill()


@contextmanager
def _passing_on(signals: Collection[signal.Signals], ranks: "Ranks") -> Iterator[None]:
    previous = {one: signal.signal(one, lambda number, frame: ranks.signal(number)) for one in signals}
    try:
        yield
    finally:
        for one, handler in previous.items():
            signal.signal(one, handler)


@dataclass(slots=True)
class _Rank:
    """A rank, and its process unless it is this one.

    failure: what it reported, None if nothing.
    is_lost: whether the failure is that of another rank, which with `is_timed_out` does not answer.
    has_ended: whether its connection is closed.
    """

    number: int
    process: Popen[bytes] | None = None
    connection: Connection | None = None
    failure: BaseException | None = None
    is_lost: bool = False
    is_timed_out: bool = False
    has_ended: bool = False

    def fail(self, what: str, failure: BaseException) -> None:
        """Note the message `what` of a rank that has failed."""
        self.failure, self.is_timed_out, self.is_lost = failure, what == TIMED_OUT, what in (LOST, TIMED_OUT)

    @property
    def is_done(self) -> bool:
        return self.failure is not None or self.has_ended

    def status(self) -> int:
        """The exit status of its process, once that has ended; that of a signal is negative."""
        return 0 if self.process is None else self.process.wait()

    def death(self) -> str:
        """How the process ended."""
        return death_of(self.status())


class Ranks:
    """The ranks that `config` needs.

    store: a file through which they find each other.
    subject: subject of messages.
    callbacks: callbacks for what rank 0 reports, by its name.
    """

    def __init__(self, config: RunConfig, store: Path, subject: str, callbacks: Mapping[str, Any]) -> None:
        self._size, self._config, self._store = config.num_ranks, config, store
        self._subject, self._callbacks = subject, callbacks
        self._ranks: list[_Rank] = []
        self._directory: Path | None = None
        self._is_writing = False

    def start(self, job: Job | None) -> None:
        """Start all processes. Rank 0 does `job`; None if it is this process."""
        if job is None:
            self._ranks.append(_Rank(0))
            os.environ.update(Place(0, self._size, 0, self._size).environment(self._store))
        for number in range(len(self._ranks), self._size):
            connection, theirs = Pipe()
            process = start_python(START, theirs, self._environment(number))
            theirs.close()
            self._ranks.append(_Rank(number, process, connection))
            with suppress(BrokenPipeError):  # a process that has died; `result` notices it
                connection.send(self._config if number else job)

    def _environment(self, number: int) -> dict[str, str]:
        environment = dict(os.environ) | Place(number, self._size, number, self._size).environment(self._store)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // self._size)))
        return environment

    def result(self) -> Any:
        """Rank 0's result. Raises its exception, or that of another rank where that is the cause."""
        first, clock, has_failed = self._ranks[0], WallClock(), False
        while True:
            for rank, what, content in self._messages(POLL_S):
                if rank is first and what == "result":
                    return content
                rank.fail(what, content)
            if not any(rank.is_done for rank in self._ranks):
                continue
            if not has_failed:
                clock.restart()
                has_failed = True
            report_s = REPORT_TIMEOUT_S if any(rank.is_timed_out for rank in self._ranks) else REPORT_S
            is_over = clock.now() >= (WRITE_S if self._is_writing and not first.is_done else report_s)
            if is_over or (first.failure and not first.is_lost) or all(rank.is_done for rank in self._ranks):
                raise self._verdict()

    def have_failed(self) -> bool:
        """Whether one of the other ranks has, of rank 0, which is this process."""
        for rank, what, content in self._messages(0.0):
            rank.fail(what, content)
        return any(rank.is_done for rank in self._ranks)

    def explanation(self, error: BaseException) -> BaseException:
        """`error` of rank 0, which is this process, or the failure of another rank that explains it best."""
        cause = cause_of(error)
        if not (isinstance(cause, RankFailed) or self.have_failed()):
            return error
        self._ranks[0].fail(TIMED_OUT if _kind(cause) == TIMED_OUT else LOST, cause)
        try:
            self.result()
        except IfbbenchError as verdict:
            return verdict
        return error

    def _messages(self, timeout_s: float) -> list[tuple[_Rank, str, Any]]:
        """What ranks have sent within this time. Calls the callbacks."""
        messages = []
        waiting = {rank.connection: rank for rank in self._ranks if rank.connection and not rank.has_ended}
        for connection in wait(list(waiting), timeout_s):
            rank = waiting[cast(Connection, connection)]
            try:
                what, *content = cast(Connection, connection).recv()
            except (EOFError, ConnectionError):
                rank.has_ended = True
                continue
            if what == "on_recording":
                self._directory = content[0]
            self._is_writing |= (what, *content) == ("stage", WRITING)
            if what not in self._callbacks:
                messages.append((rank, what, content[0]))
            elif (callback := self._callbacks[what]) is not None:
                callback(*content)
        return messages

    def _verdict(self) -> BaseException:
        """The error that explains the failures best."""
        first = self._ranks[0].failure
        outcome = getattr(first, "outcome", "")
        if not outcome and self._directory is not None:
            outcome = f"what was recorded is kept in {self._directory}"
        # NCCL ends the processes that wait for one which hangs by SIGABRT.
        hang = any(not rank.is_done for rank in self._ranks)
        for rank in self._ranks:
            if rank.has_ended and rank.failure is None and not (hang and rank.status() == -signal.SIGABRT):
                return RunFailed(f"{self._subject} ended early: rank {rank.number} {rank.death()}", outcome)
        for rank in self._ranks:
            if rank.failure is not None and not rank.is_lost:
                if rank.number == 0 or isinstance(rank.failure, InputError):
                    return rank.failure
                return RunFailed(f"{self._subject} ended early: in rank {rank.number}, {rank.failure}", outcome)
        for rank in self._ranks:
            if not (rank.is_done or (rank.number == 0 and self._is_writing)):
                limit = f"{self._config.rank_timeout:g} s, the limit of --rank_timeout"
                return RunFailed(f"{self._subject} ended early: rank {rank.number} did not answer for {limit}", outcome)
        return RunFailed(f"{self._subject} ended early: {getattr(first, 'reason', first)}", outcome)

    def signal(self, number: int) -> None:
        """Send this signal to the process of rank 0."""
        if (process := self._ranks[0].process) is not None:
            process.send_signal(number)

    def interrupt(self) -> KeyboardInterrupt:
        """Interrupt rank 0, and wait until it has written what it has; returns its exception, with its notes."""
        if not self._ranks:
            return KeyboardInterrupt()
        first, clock = self._ranks[0], WallClock()
        self.signal(signal.SIGINT)
        while not first.has_ended and (left_s := WRITE_S - clock.now()) > 0:
            for rank, _, content in self._messages(left_s):
                if rank is first and isinstance(content, KeyboardInterrupt):
                    return content
        return KeyboardInterrupt()

    def kill(self) -> None:
        """End all processes that have not ended."""
        started = [(rank.process, rank.connection) for rank in self._ranks if rank.process and rank.connection]
        for process, connection in started:
            connection.close()
            process.kill()
        for process, _ in started:
            process.wait()


# The process of a rank.


def work() -> None:
    """Do the job of rank 0, or follow it as another rank. Ends when the parent does."""
    connection, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    end_with_parent(parent)  # also a rank that hangs
    try:
        job = connection.recv()
        threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
        if isinstance(job, RunConfig):
            follow(job)
        else:
            connection.send(("result", _do(job, connection)))
    except BaseException as error:
        cause = cause_of(error)
        with suppress(BrokenPipeError):
            connection.send((_kind(cause), _sendable(error, cause)))
    # Without the destructors of torch.distributed, which wait for other ranks.
    sys.stdout.flush()
    os._exit(0)


def _end_with_parent(connection: Connection) -> None:
    with suppress(EOFError, OSError):
        connection.recv()
    os._exit(1)


def _do(job: Job, connection: Connection) -> Any:
    def report(what: str) -> Callable[..., None]:
        return lambda *content: connection.send((what, *content))

    def stage(label: str) -> None:
        if label != LOADING:  # from now on there may be results to keep
            for one in (signal.SIGINT, signal.SIGTERM):  # as in the command
                signal.signal(one, signal.default_int_handler)
        connection.send(("stage", label))

    progress = cast(Progress, SimpleNamespace(stage=stage, update=report("update")))
    return job.run(progress=progress, **{name: report(name) for name in job.callbacks})


def _kind(cause: BaseException) -> str:
    """Which of the messages of a failed rank reports `cause`."""
    if not isinstance(cause, RankFailed) or not cause.is_lost:
        return FAILED
    return TIMED_OUT if cause.is_timed_out else LOST


def _sendable(error: BaseException, cause: BaseException) -> BaseException:
    """`error` as one of the classes that the parent knows: it does not import torch, which others may need."""
    if isinstance(error, KeyboardInterrupt | RunFailed):
        return error
    if isinstance(error, InputError):
        return InputError(str(error))
    return IfbbenchError(str(cause) or repr(cause))
