"""The event loop of a client of many streams: a precise timer, the limit of open files, garbage collection."""

import asyncio
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf

from ifbbench.clock import NANOSECONDS, Clock

# Timers of an event loop are this late at most; the rest of a wait is spent looking for events without sleeping.
TIMER_S = 0.0015
CLOCK_MONOTONIC = 1
# More objects than those of the requests that begin or end at a time; a collection of so many takes 30 ms.
YOUNG_OBJECTS = 100_000
# Collections of younger objects between two of all objects: so many that there is none in a run.
NEVER = 1_000_000
# The progress display, a thread, has the interpreter for so long at a time.
SWITCH_S = 0.0003


def new_event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of uvloop, which is twice as fast, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def allow_many_connections() -> int | None:
    """Raise the limit of open files, often 1,024, to what the process may have; returns it, None if there is none."""
    try:
        import resource
    except ImportError:  # not on this system
        return None
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return None if most == resource.RLIM_INFINITY else most


@contextmanager
def undisturbed() -> Iterator[None]:
    """Other threads give way at once, and there is hardly any garbage collection: even of few objects it takes a
    millisecond. Requests that have ended need none, because they are in no reference cycle."""
    thresholds, switch_s = gc.get_threshold(), sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, thresholds[1], NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        sys.setswitchinterval(switch_s)


@contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """SIGINT and SIGTERM cancel the current task. A KeyboardInterrupt, raised in a callback of uvloop, could end as the
    error of one connection."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    numbers = [signal.SIGINT, signal.SIGTERM] if threading.current_thread() is threading.main_thread() else []
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if task is not None and handler is not signal.SIG_IGN:
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(task.cancel))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Alarm:
    """Calls `callback` once, at the time that was set last.

    at_s: that time on `clock`, infinite if there is none.

    A loop looks at its timers after all data that it has, which may be that of hundreds of streams: a reader
    of streams calls `ring` before each if `at_s` has passed.

    On Linux it is a timer of the kernel, which the loop waits for as for a socket: 0.1 ms late where the loop's own
    timers are 1 ms early or late. On other systems it is a timer of the loop, and the last TIMER_S are not slept.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock, callback: Callable[[], None]) -> None:
        self.at_s = inf
        self._loop, self._clock, self._callback = loop, clock, callback
        self._handle: asyncio.Handle | None = None
        self._timer = _KernelTimer() if sys.platform == "linux" else None
        if self._timer is not None:
            loop.add_reader(self._timer.file, self._look)

    def set(self, at_s: float) -> None:
        """Replaces the time that was set before. A time that has passed is one for the next turn of the loop."""
        if at_s == self.at_s:
            return
        self.at_s = at_s
        if self._handle is not None:
            self._handle.cancel()
        if at_s == inf:
            return
        delay_s = at_s - self._clock.now()
        if delay_s <= 0:
            self._handle = self._loop.call_soon(self._look)
        elif self._timer is not None:
            self._timer.set(delay_s)
        elif delay_s > TIMER_S:
            self._handle = self._loop.call_later(delay_s - TIMER_S, self._look)
        else:
            self._handle = self._loop.call_soon(self._look)

    def close(self) -> None:
        """End it; may be called again."""
        self.set(inf)
        if self._timer is not None:
            self._loop.remove_reader(self._timer.file)
            self._timer.close()
            self._timer = None

    def ring(self) -> None:
        """Call it now."""
        self.at_s = inf
        self._callback()

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.clear()
        if self.at_s <= self._clock.now():
            self.ring()
        else:  # it was set anew, or the loop was early
            at_s, self.at_s = self.at_s, inf
            self.set(at_s)


class _KernelTimer:
    """A timerfd, which Python has from 3.13 on only.

    file: can be read when the time has come.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.file = self._libc.timerfd_create(CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        # struct itimerspec: seconds and nanoseconds of the interval (0, once) and of the time until it.
        self._times = (ctypes.c_long * 4)()
        self._set = self._libc.timerfd_settime

    def set(self, delay_s: float) -> None:
        self._times[2], self._times[3] = divmod(max(round(delay_s * NANOSECONDS), 1), NANOSECONDS)
        self._set(self.file, 0, self._times, None)

    def clear(self) -> None:
        with suppress(BlockingIOError):  # it was set anew
            os.read(self.file, 8)

    def close(self) -> None:
        os.close(self.file)
