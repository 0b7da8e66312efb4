"""Simulated time, in whole nanoseconds."""

import time
from operator import truediv

from mypy_extensions import mypyc_attr

from ifbbench.clock import NANOSECONDS, WallClock

EXACT_NS = 2**53  # 104 days: a float of so many seconds still tells one nanosecond from the next
# A host that is later than this does not catch up, where a simulated device serves live clients.
MAX_LAG_S = 0.05


def to_seconds(nanoseconds: int) -> float:
    """The float that is closest to a time in seconds."""
    # Compiled, the division rounds numbers above EXACT_NS twice.
    return nanoseconds / NANOSECONDS if nanoseconds < EXACT_NS else float(truediv(nanoseconds, NANOSECONDS))


@mypyc_attr(allow_interpreted_subclasses=True)
class VirtualClock:
    """Simulated time: it passes only in `advance` and `wait_until`. In whole nanoseconds, so that sums do not depend on
    their order.

    epoch_s: when it started, in seconds since the Unix epoch.
    now_ns: nanoseconds since the run started.
    """

    def __init__(self, epoch_s: int = 1_700_000_000) -> None:
        self.epoch_s = epoch_s
        self.now_ns = 0

    def now(self) -> float:
        return to_seconds(self.now_ns)

    def timestamp(self) -> float:
        return self.epoch_s + to_seconds(self.now_ns)

    def restart(self) -> None:
        self.now_ns = 0

    def advance(self, nanoseconds: int) -> None:
        """Let `nanoseconds` pass; ValueError if negative."""
        if nanoseconds < 0:
            raise ValueError(f"time cannot go back by {-nanoseconds} ns")
        self.now_ns += nanoseconds

    def wait_until(self, seconds: float) -> None:
        nanoseconds = round(seconds * NANOSECONDS)
        self.wait_until_ns(nanoseconds if nanoseconds < EXACT_NS else tick(seconds))

    def wait_until_ns(self, nanoseconds: int) -> None:
        """`wait_until`, in nanoseconds since the start."""
        self.now_ns = max(self.now_ns, nanoseconds)


class PacedClock(VirtualClock):
    """Simulated time that is not ahead of real time, for a simulated device that serves live clients.

    Waiting for a simulated time also waits for it in reality. While the host keeps up, simulated times are exactly
    those of a VirtualClock, because a wait that ends late does not delay the next one. A host that is more than
    MAX_LAG_S late moves the simulated time on to the real one: `num_skips` times, by `skipped_ns` in all.
    """

    def __init__(self) -> None:
        super().__init__(epoch_s=round(time.time()))
        self._wall = WallClock()
        self.num_skips = self.skipped_ns = 0

    def restart(self) -> None:
        super().restart()
        self._wall.restart()
        self.num_skips = self.skipped_ns = 0
        self.epoch_s = round(time.time())

    def align(self, other: "PacedClock") -> None:
        """Have the start of `other`, of which the run has only begun."""
        self._wall.align(other._wall)
        self.epoch_s = other.epoch_s

    def real_now(self) -> float:
        """Real seconds since the start of the run. May be called from any thread."""
        return self._wall.now()

    def wait_until_ns(self, nanoseconds: int) -> None:
        super().wait_until_ns(nanoseconds)
        delay = self.now_ns / NANOSECONDS - self._wall.now()
        if delay > 0:
            time.sleep(delay)
        elif delay < -MAX_LAG_S:
            before_ns, self.now_ns = self.now_ns, round(self._wall.now() * NANOSECONDS)
            self.num_skips += 1
            self.skipped_ns += self.now_ns - before_ns


def tick(seconds: float) -> int:
    """The first whole nanosecond at or after `seconds`, as a VirtualClock tells it: `now()` is not less then."""
    nanoseconds = round(seconds * NANOSECONDS)
    if to_seconds(nanoseconds) < seconds:
        # Exactly, because beyond 2^53 ns (104 days) the next nanosecond may be the same float.
        numerator, denominator = seconds.as_integer_ratio()
        nanoseconds = -(-numerator * NANOSECONDS // denominator)
    return nanoseconds
