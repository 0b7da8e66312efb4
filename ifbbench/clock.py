"""The one source of time: nothing else in ifbbench asks the time or sleeps."""

import time
from typing import Protocol

NANOSECONDS = 1_000_000_000


class Clock(Protocol):
    """Seconds since the run started, and a way to let time pass."""

    def now(self) -> float:
        """Seconds since the start of the run."""
        ...

    def timestamp(self) -> float:
        """Seconds since the Unix epoch."""
        ...

    def wait_until(self, seconds: float) -> None:
        """Let time pass until `now()` is at least `seconds`; return at once if it already is."""
        ...

    def restart(self) -> None:
        """Make this moment the run's second zero."""
        ...


class WallClock:
    """Real time. Its zero is the moment it was made, or the last `restart()`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._zero

    def timestamp(self) -> float:
        return time.time()

    def wait_until(self, seconds: float) -> None:
        delay = seconds - self.now()
        if delay > 0:
            time.sleep(delay)


class VirtualClock:
    """Time that passes only when told to, in whole nanoseconds so that sums do not depend on their order.

    now_ns: nanoseconds since the run started. epoch_s: what time it was then, in seconds since the Unix epoch.
    """

    def __init__(self, epoch_s: int = 1_700_000_000) -> None:
        self.epoch_s = epoch_s
        self.now_ns = 0

    def now(self) -> float:
        return self.now_ns / NANOSECONDS

    def timestamp(self) -> float:
        return self.epoch_s + self.now_ns / NANOSECONDS

    def restart(self) -> None:
        self.now_ns = 0

    def advance(self, nanoseconds: int) -> None:
        """Let `nanoseconds` pass; negative is an error, for time does not go back."""
        if nanoseconds < 0:
            raise ValueError(f"time cannot go back by {-nanoseconds} ns")
        self.now_ns += nanoseconds

    def wait_until(self, seconds: float) -> None:
        self.wait_until_ns(round(seconds * NANOSECONDS))

    def wait_until_ns(self, nanoseconds: int) -> None:
        """`wait_until`, in nanoseconds since the start."""
        self.now_ns = max(self.now_ns, nanoseconds)
