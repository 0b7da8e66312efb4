"""Static batching emulated by the client: requests are handed out in batches, one batch after the other."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StaticEmulation:
    """A batch is handed out when none is outstanding and `batch_size` requests have arrived, the oldest has waited for
    `timeout_s` seconds, or no more will come. (gptManagerBenchmark's, which waits for the timeout in the last case.)"""

    batch_size: int
    timeout_s: float

    def ready_s(self, arrivals_s: Sequence[float], oldest: int, handed_out: int) -> float:
        """When the next batch is due, if nothing is outstanding; on the clock of `arrivals_s`, which is in ascending
        order. oldest: index of the first request that was not handed out. handed_out: number of those that were."""
        last = min(handed_out + self.batch_size, len(arrivals_s)) - 1
        return min(arrivals_s[last], arrivals_s[oldest] + self.timeout_s)
