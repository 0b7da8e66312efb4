"""What overlap hides: a device that takes 5 ms a batch, a host that takes 2 ms an iteration, with each form of overlap.

`python -m benchmarks.overlap` prints one JSON object. Without overlap an iteration takes the sum of both, with
it the longer of the two. With two micro batches a request runs in every other iteration.
"""

import json
from collections import deque
from statistics import median

from ifbbench.clock import WallClock
from ifbbench.engine.batch import NO_OUTPUTS, Batch, StepOutputs
from ifbbench.engine.request import Request
from ifbbench.rundir import run_directory
from ifbbench.schedulers.engines import make_loop
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.settings.modes import Overlap

DEVICE_S = 0.005
HOST_S = 0.002
ACTIVE_REQUESTS = 16
ITERATIONS = 200
REPEATS = 5


class TimedDevice:
    """Runs batches one after the other, each for DEVICE_S, beside whatever the host does meanwhile."""

    def __init__(self, clock: WallClock) -> None:
        self._clock = clock
        self._done_s: deque[float] = deque()
        self._free_s = 0.0

    def submit(self, batch: Batch) -> None:
        self._free_s = max(self._free_s, self._clock.now()) + DEVICE_S
        self._done_s.append(self._free_s)

    def collect(self) -> StepOutputs:
        self._clock.wait_until(self._done_s.popleft())
        return NO_OUTPUTS

    def close(self) -> None:
        self._done_s.clear()


def iteration_ms(overlap: Overlap | None) -> float:
    """Milliseconds of an iteration in steady generation."""
    clock = WallClock()
    waiting = [Request(index, 8, ITERATIONS + 50) for index in range(ACTIVE_REQUESTS)]

    def get_requests(count: int) -> list[Request]:
        busy_until = clock.now() + HOST_S
        while clock.now() < busy_until:
            pass
        taken = waiting[:count]
        del waiting[:count]
        return taken

    config = BatchingConfig(
        policy="guaranteed_no_evict",
        max_batch_size=ACTIVE_REQUESTS,
        max_num_tokens=1024,
        max_seq_len=1024,
        max_input_len=1023,
        tokens_per_block=32,
        num_blocks=1024,
        overlap=overlap,
    )
    manager = make_loop(config, TimedDevice(clock), clock, get_requests, lambda response: None)
    while waiting or manager.iteration < 10:
        manager.step()
    start_s = clock.now()
    for _ in range(ITERATIONS):
        manager.step()
    return (clock.now() - start_s) / ITERATIONS * 1000


def main() -> None:
    """Measure all in turns, and print the medians."""
    found: dict[Overlap | None, list[float]] = {None: [], Overlap.PARTITIONED: [], Overlap.ASYNC: []}
    for _ in range(REPEATS):
        for overlap, times in found.items():
            times.append(iteration_ms(overlap))
    print(
        json.dumps(
            {
                "benchmark": "overlap of host and device",
                "device_ms": DEVICE_S * 1000,
                "host_ms": HOST_S * 1000,
                "iteration_ms": {str(overlap): round(median(times), 3) for overlap, times in found.items()},
                "hardware": run_directory.hardware(),
            }
        )
    )


if __name__ == "__main__":
    main()
