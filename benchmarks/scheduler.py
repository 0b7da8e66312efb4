"""How many iterations a second the loop does in steady generation, with an executor that answers at once.

`python -m benchmarks.scheduler` prints one JSON object: the machine, and for each policy and number of active
requests the median of several repeats, with and without recording.
"""

import json
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from ifbbench.clock import WallClock
from ifbbench.engine.interfaces import Observer, Unobserved
from ifbbench.engine.loop import TokenGenerationLoop
from ifbbench.engine.passes import NullExecutor
from ifbbench.engine.request import Request
from ifbbench.engine.responses import Response
from ifbbench.rundir.recorder import Recorder
from ifbbench.rundir.run_directory import hardware, versions
from ifbbench.schedulers.engines import make_loop
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.tensorrt_llm.policies import POLICY_CLASSES
from ifbbench.settings.modes import BatchingType
from tests.engine.engine import scheduler_of

ACTIVE_REQUESTS = (16, 64, 256, 1024)
REPEATS = 5
ITERATIONS = 300
LONGEST_PROMPT = 64
MAX_SEQ_LEN = 4096
TOKENS_PER_BLOCK = 32


def requests_of(count: int) -> list[Request]:
    """Requests with prompts of all lengths, so that they need their next block in different iterations."""
    return [Request(index, 1 + index % LONGEST_PROMPT, MAX_SEQ_LEN // 2, index=index) for index in range(count)]


def iterations_per_second(policy: str, requests: list[Request], observer: Observer) -> float:
    """The median rate over repeats, once all requests are in their generation phase."""
    clock = WallClock()
    manager = _manager(policy, requests, observer, clock)
    while scheduler_of(manager).active.context or manager.iteration == 0:
        manager.step()
    rates = []
    for _ in range(REPEATS):
        start = clock.now()
        for _ in range(ITERATIONS):
            manager.step()
        rates.append(ITERATIONS / (clock.now() - start))
    assert len(scheduler_of(manager).active) == len(requests)
    return median(rates)


def _manager(policy: str, requests: list[Request], observer: Observer, clock: WallClock) -> TokenGenerationLoop:
    waiting = list(requests)

    def get_requests(count: int) -> list[Request]:
        taken = waiting[:count]
        del waiting[:count]
        return taken

    def send_response(response: Response) -> None:
        raise ValueError(f"{response.request} ended within the measurement")

    config = BatchingConfig(
        policy=policy,
        max_batch_size=len(requests),
        max_num_tokens=LONGEST_PROMPT * len(requests),
        max_seq_len=MAX_SEQ_LEN,
        max_input_len=LONGEST_PROMPT,
        tokens_per_block=TOKENS_PER_BLOCK,
        num_blocks=len(requests) * MAX_SEQ_LEN // TOKENS_PER_BLOCK,
    )
    return make_loop(config, NullExecutor(), clock, get_requests, send_response, observer)


def recorded_iterations_per_second(policy: str, requests: list[Request]) -> float:
    """The same with everything written to a run directory on disk."""
    with TemporaryDirectory() as directory:
        recorder = Recorder(
            Path(directory), {}, len(requests), BatchingType.INFLIGHT_FUSED, len(requests), lambda request: 0.0
        )
        rate = iterations_per_second(policy, requests, recorder)
        recorder.close(partial=True)
    return rate


def measure() -> list[dict[str, object]]:
    """One row for each policy and number of active requests."""
    return [
        {
            "policy": policy,
            "active_requests": count,
            "iterations_per_s": round(iterations_per_second(policy, requests_of(count), Unobserved())),
            "iterations_per_s_recording": round(recorded_iterations_per_second(policy, requests_of(count))),
        }
        for policy in POLICY_CLASSES
        for count in ACTIVE_REQUESTS
    ]


def main() -> None:
    """Measure, and print the result as JSON."""
    about = {"benchmark": "steady generation, null executor", "repeats": REPEATS, "iterations_a_repeat": ITERATIONS}
    print(json.dumps({**about, "hardware": hardware(), "versions": versions(), "results": measure()}, indent=2))


if __name__ == "__main__":
    main()
