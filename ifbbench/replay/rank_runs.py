"""Runs in processes that are there already, started by a launcher or by `rank_processes`: rank 0 leads, others follow.

Before each run all ranks agree upon its number and settings. A run that fails ends the other ranks; under a launcher,
rank 0 alone says why.
"""

import atexit
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, cast

from ifbbench.build.engine import build_engine, loop_maker, warm_up
from ifbbench.errors import InputError
from ifbbench.settings.config import RunConfig
from ifbbench.torch.ranks import STORE, cause_of, launched_place

if TYPE_CHECKING:
    from ifbbench.build.ranks import RankLoop
    from ifbbench.torch.communicator import Communicator

# How long another rank waits for rank 0 to report that a rank does not answer.
REPORT_S = 1.0
# The stage in which rank 0 writes what others have not seen.
WRITING = "writing results"
_log = logging.getLogger("ifbbench")


def starts_ranks(config: RunConfig) -> bool:
    """Whether a run needs processes that no launcher has started. Other ranks than 0 of a launcher take part in its
    runs, and do not return."""
    launched = launched_place(config)
    if launched is None:
        return config.num_ranks > 1
    if launched.rank:
        _follow_and_exit(config, launched.rank)
    if not _has_parent():
        _led.meet(config)  # so that others are not left waiting if nothing comes of the run
    return False


def _has_parent() -> bool:
    """Whether `rank_processes` started the ranks, reports their failures and ends them."""
    return STORE in os.environ


# Rank 0.


@dataclass(slots=True)
class _Led:
    """The runs of rank 0 in this process.

    is_unfinished: the latest one has begun and not ended as it should.
    """

    num_runs: int = 0
    is_unfinished: bool = False
    has_met: bool = False

    def meet(self, config: RunConfig) -> None:
        """Find the other ranks, at the first call. They wait until this process begins a run, or exits."""
        # Imported here because it imports torch.
        from ifbbench.torch.communicator import join

        join(config.rank_timeout)
        if not self.has_met:
            self.has_met = True
            atexit.register(end_others)


_led = _Led()


def end_others() -> None:
    """End the other ranks, and leave. Also done at exit."""
    if not _led.has_met:
        return
    from ifbbench.torch.communicator import leave, share

    _led.has_met = False
    if not _led.is_unfinished:  # else they do not wait for this, but have lost the connection
        share(None)
    leave()


@contextmanager
def leading(config: RunConfig, beam_width: int) -> "Iterator[Communicator]":
    """Lead a run of several ranks, in rank 0, that lasts until the end of the block, in which the other ranks make
    their engines. InputError after a run that failed, which has ended the others."""
    from ifbbench.torch.communicator import communicator_of, share

    _led.meet(config)
    if _led.is_unfinished:
        raise InputError("an earlier run of these ranks failed, which has ended the other ranks; launch all again.")
    _led.num_runs += 1
    _led.is_unfinished = True
    share((_led.num_runs, config, beam_width))
    communicator = communicator_of(config)
    communicator.begin_run(_led.num_runs)
    try:
        yield communicator
    except BaseException:
        if not _has_parent():
            communicator.close()
        raise
    _led.is_unfinished = False


# Other ranks.


def follow(config: RunConfig) -> None:
    """Take part in the runs of rank 0, until it ends. config: of the first."""
    from ifbbench.torch.communicator import communicator_of, join, share

    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)  # rank 0 ends the run
    _log.setLevel(logging.CRITICAL)  # rank 0 logs the same
    join(config.rank_timeout)
    while (job := share(None)) is not None:
        number, config, beam_width = job
        communicator = communicator_of(config)
        communicator.begin_run(number)
        engine = build_engine(config, beam_width, owns_process=True, communicator=communicator)
        try:
            warm_up(engine)
            loop = loop_maker(config, communicator)(
                engine.limits, engine.executor, engine.clock, next_change=lambda now_s: None, next_priority=lambda: None
            )
            cast("RankLoop", loop).follow()
        finally:
            engine.executor.close()


def _follow_and_exit(config: RunConfig, number: int) -> NoReturn:
    """Follow rank 0 in the process of rank `number` of a launcher. A failure is reported by rank 0, if it still does
    anything; by rank 1 if rank 0 hangs; by the launcher if it has died."""
    status = 0
    try:
        follow(config)
    except BaseException as error:
        from ifbbench.torch.communicator import RankLost, RankTimedOut, rank_0_reports, report_failure

        status, cause = 1, cause_of(error)
        if isinstance(cause, RankTimedOut):
            is_reported = number != 1 or rank_0_reports(REPORT_S)
        else:
            is_reported = isinstance(cause, RankLost) or report_failure(str(cause) or repr(cause))
        if not is_reported:
            print(f"Error: {cause}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # Without the destructors of torch.distributed, which wait for other ranks.
    os._exit(status)
