"""What a fleet costs beside single runs: processor time, and memory a replica.

`python -m benchmarks.fleet azure_code_2023.csv` replays a trace that is repeated once for each of eight replicas behind
several routers, and beside each fleet the eight single runs of the shares of `round_robin` (`--replica K/8`), in turns,
each as a process of its own. The copies of the trace are shifted by an eighth of its length each, so that they do not
arrive together. Fleets of one, two, four and eight replicas with as many copies show what memory a replica takes. It
prints one JSON object. `--turns`, `--replicas`, `--router` and what stands behind `--` change what is run.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import replace

from benchmarks.scale import measured
from ifbbench.rundir.run_directory import hardware, versions
from ifbbench.settings.config import RunConfig
from ifbbench.workload.formats import write_trace
from ifbbench.workload.load import load_trace
from ifbbench.workload.trace import Trace, TraceRequest

ROUTERS = ("round_robin", "least_requests", "least_kv", "prefix_affinity")
OPTIONS = ("--device", "sim:h100-sxm", "--model", "llama-3.1-8b", "--engine", "vllm")


def repeated(trace: Trace, copies: int) -> list[TraceRequest]:
    """`copies` of a trace, each of which begins a part of its length later; what then is after its end comes first."""
    rows = list(trace.requests)
    length_s = rows[-1].arrival_s
    arrivals = [
        ((row.arrival_s + number * length_s / copies) % length_s if number else row.arrival_s, row)
        for number in range(copies)
        for row in rows
    ]
    arrivals.sort(key=lambda pair: pair[0])
    return [replace(row, request_id=at, arrival_s=arrival_s) for at, (arrival_s, row) in enumerate(arrivals)]


class Runs:
    """Commands of `ifbbench run`, measured one after the other."""

    def __init__(self, directory: Path, options: Sequence[str]) -> None:
        self._directory, self._options = directory, options

    def measure(self, trace: Path, *options: str) -> dict[str, float]:
        """One run."""
        output = ["--output", str(self._directory / "run"), "--overwrite"]
        command = [sys.executable, "-m", "ifbbench", "run", str(trace), *output, *self._options, *options]
        return measured(command)

    def singles(self, trace: Path, replicas: int) -> dict[str, float]:
        """The runs of all shares: the sum of their times, and the most memory that one of them had."""
        runs = [self.measure(trace, "--replica", f"{number + 1}/{replicas}") for number in range(replicas)]
        return {
            "cpu_seconds": sum(run["cpu_seconds"] for run in runs),
            "peak_memory_bytes": max(run["peak_memory_bytes"] for run in runs),
        }


def main() -> None:
    """Measure, and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--replicas", type=int, default=8, metavar="N")
    parser.add_argument("--turns", type=int, default=3, metavar="N")
    parser.add_argument("--router", nargs="+", default=ROUTERS, metavar="ROUTER")
    parser.add_argument("options", nargs="*", help="options of `ifbbench run`, behind --")
    asked = parser.parse_args()
    options = asked.options or OPTIONS
    original = load_trace(asked.trace, RunConfig())
    with TemporaryDirectory() as name:
        directory, numbers = Path(name), [2**power for power in range(asked.replicas.bit_length())]
        traces = {number: directory / f"{number}.jsonl" for number in {*numbers, asked.replicas}}
        for number, path in traces.items():
            write_trace(repeated(original, number), path)
        runs, whole = Runs(directory, options), traces[asked.replicas]
        fleets: dict[str, list[dict[str, float]]] = {router: [] for router in asked.router}
        singles: list[dict[str, float]] = []
        for _ in range(asked.turns):
            singles.append(runs.singles(whole, asked.replicas))
            for router in asked.router:
                fleets[router].append(runs.measure(whole, "--replicas", str(asked.replicas), "--router", router))
        memory = {
            router: {
                number: runs.measure(traces[number], "--replicas", str(number), "--router", router)["peak_memory_bytes"]
                for number in numbers
            }
            for router in asked.router
        }
        alone = runs.measure(traces[1])
    print(
        json.dumps(report(asked, options, singles, fleets) | {"memory_by_replicas": memory, "alone": alone}, indent=2)
    )


def report(
    asked: argparse.Namespace,
    options: Sequence[str],
    singles: Sequence[dict[str, float]],
    fleets: dict[str, list[dict[str, float]]],
) -> dict[str, Any]:
    """The figures of all turns, and of each router the median of its time over that of the single runs of its turn."""
    ratios = {
        router: [one["cpu_seconds"] / other["cpu_seconds"] for one, other in zip(found, singles, strict=True)]
        for router, found in fleets.items()
    }
    return {
        "benchmark": "a fleet beside single runs",
        "trace": os.path.basename(asked.trace),
        "replicas": asked.replicas,
        "options": list(options),
        "hardware": hardware(),
        "versions": versions(),
        "singles": list(singles),
        "fleets": fleets,
        "ratios": {router: {"median": median(found), "all": found} for router, found in ratios.items()},
    }


if __name__ == "__main__":
    main()
