"""Real time, and the interface of all clocks. Only this module and `virtual_clock` read the time or sleep."""

import time
from typing import Protocol

from mypy_extensions import mypyc_attr

NANOSECONDS = 1_000_000_000
# `time.sleep` returns this much too late at most times (measured: 0.15 ms on Linux, 0.5 ms when the host is busy).
SPIN_S = 0.0005


@mypyc_attr(allow_interpreted_subclasses=True)
class Clock(Protocol):
    """The time of a run."""

    def now(self) -> float:
        """Seconds since the start of the run."""
        ...

    def timestamp(self) -> float:
        """Seconds since the Unix epoch."""
        ...

    def wait_until(self, seconds: float) -> None:
        """Wait until `now()` is at least `seconds`; return at once if it already is."""
        ...

    def restart(self) -> None:
        """Start a run: `now()` is 0."""
        ...


@mypyc_attr(allow_interpreted_subclasses=True)
class WallClock:
    """Real time since its construction, or the last `restart()`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._zero

    def align(self, other: "WallClock") -> None:
        """Have the zero of `other`."""
        self._zero = other._zero

    def real_now(self) -> float:
        """`now`."""
        return time.perf_counter() - self._zero

    def timestamp(self) -> float:
        return time.time()

    def wait_until(self, seconds: float) -> None:
        delay = seconds - self.now()
        if delay > SPIN_S:
            time.sleep(delay - SPIN_S)
        while self.now() < seconds:
            pass
