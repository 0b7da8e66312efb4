"""What recording costs: the loop with everything recorded against the same loop with no observer, in processor time.

`python -m benchmarks.recording [--trace FILE] [--requests N]` replays a trace (default: the bundled one) all at
once on a small model on the CPU, and on a simulated GPU, where nothing is computed and a stretch of iterations is one
step. The two loops take turns. It prints one JSON object: the machine, and for each device the median seconds of both,
and the seconds inside the recorder, which differ less from run to run than the difference of the two.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from ifbbench.build.engine import Engine, build_engine, warm_up
from ifbbench.engine.interfaces import Observer, Unobserved
from ifbbench.engine.records import IterationRecord
from ifbbench.engine.stretch import Stretch
from ifbbench.replay.client import make_client
from ifbbench.replay.requests import request_maker
from ifbbench.rundir.recorder import Complete, Recorder
from ifbbench.rundir.run_directory import hardware, versions
from ifbbench.schedulers.engines import make_loop
from ifbbench.settings.config import RunConfig
from ifbbench.workload.load import load_trace
from ifbbench.workload.trace import Trace

REPEATS = 5
SETTINGS: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu", "model": "tiny", "cpu_threads": 1, "max_batch_size": 16},
    "simulated": {"device": "sim:h100-sxm", "model": "llama-3.1-8b", "max_batch_size": 256, "max_num_tokens": 2048},
}


class TimedRecorder(Recorder):
    """A recorder that adds up the processor time that it takes, `spent_s`."""

    spent_s = 0.0

    def iteration(self, record: IterationRecord) -> None:
        begin_s = time.process_time()
        super().iteration(record)
        self.spent_s += time.process_time() - begin_s

    def stretch(self, stretch: Stretch) -> None:
        begin_s = time.process_time()
        super().stretch(stretch)
        self.spent_s += time.process_time() - begin_s

    def close(self, partial: bool, complete: Complete | None = None) -> dict[str, Any]:
        begin_s = time.process_time()
        summary = super().close(partial, complete)
        self.spent_s += time.process_time() - begin_s
        return summary


def loop_seconds(engine: Engine, trace: Trace, records: bool) -> dict[str, float]:
    """Replay the trace once; processor seconds, those of the recorder, and iterations."""
    client = make_client(engine.config, trace, engine.clock, request_maker(engine))
    limits = engine.limits
    with TemporaryDirectory() as directory:
        recorder = None
        if records:
            kind, size = limits.batching_type, limits.max_batch_size
            recorder = TimedRecorder(Path(directory), {}, len(trace), kind, size, client.arrival_s)
        observer: Observer = recorder or Unobserved()
        loop = make_loop(
            limits,
            engine.executor,
            engine.clock,
            client.get_requests,
            client.send_response,
            observer,
            client.queued,
            next_change=client.next_arrival_s,
            next_priority=client.next_priority,
            is_open_loop=client.is_open_loop,
        )
        engine.clock.restart()
        start_s = time.process_time()
        while not client.done:
            if not loop.step():
                client.wait()
        if recorder is not None:
            recorder.close(partial=False)
        seconds, spent_s = time.process_time() - start_s, recorder.spent_s if recorder else 0.0
        return {"seconds": seconds, "recorder_s": spent_s, "iterations": loop.iteration}


def measure(trace_file: str | None, settings: dict[str, Any], requests: int | None) -> dict[str, Any]:
    """Both loops in turns."""
    config = RunConfig(time_scale=0.0, enable_chunked_context=True, max_num_samples=requests, **settings)
    trace = load_trace(trace_file, config)
    engine = build_engine(config)
    warm_up(engine)
    runs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(REPEATS):
        for records, found in runs.items():
            found.append(loop_seconds(engine, trace, records))
    engine.executor.close()
    off_s, on_s = (median(run["seconds"] for run in found) for found in runs.values())
    recorder_s, iterations = median(run["recorder_s"] for run in runs[True]), runs[True][0]["iterations"]
    return {
        "settings": settings,
        "requests": len(trace),
        "iterations": iterations,
        "cpu_s": off_s,
        "cpu_s_recording": on_s,
        "recorder_cpu_s": recorder_s,
        "recorder_us_per_iteration": recorder_s / iterations * 1e6,
        "cost": recorder_s / (on_s - recorder_s),
    }


def main() -> None:
    """Measure, and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", metavar="FILE")
    parser.add_argument("--requests", type=int, metavar="N", help="the first N requests of the trace")
    asked = parser.parse_args()
    results = {name: measure(asked.trace, settings, asked.requests) for name, settings in SETTINGS.items()}
    about = {"benchmark": "the loop with everything recorded and with no observer", "repeats": REPEATS}
    print(json.dumps({**about, "hardware": hardware(), "versions": versions(), "results": results}, indent=2))


if __name__ == "__main__":
    main()
