"""What a million requests cost: peak memory, and time a request against that of a shorter trace.

`python -m benchmarks.scale` writes synthetic traces (128 tokens in, 128 out, all at once), runs `ifbbench run` on
each as a process of its own, 512 requests at a time on a simulated GPU, and prints one JSON object: the machine, and
for each trace how long the command took and the most memory it had. Times a request leave out what a run of a single
request takes: starting. `--requests`, `--device`, `--model` and what stands behind `--` change what is run.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Container, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ifbbench.rundir.run_directory import hardware, versions

REQUESTS = (10_000, 1_000_000)
TOKENS = "128"
MAX_BATCH_SIZE = "512"
KIBIBYTE = 1024


def write_trace(path: Path, requests: int) -> None:
    """Write a trace of `requests` requests, all alike."""
    lengths = ["--input-mean", TOKENS, "--input-stdev", "0", "--output-mean", TOKENS, "--output-stdev", "0"]
    command = ["dataset", "synth", "token-norm-dist", "--num-requests", str(requests), *lengths, "-o", str(path)]
    subprocess.run([sys.executable, "-m", "ifbbench", *command], check=True, stdout=subprocess.DEVNULL)


def measured(command: Sequence[str], accept: Container[int] = (0,)) -> dict[str, float]:
    """Run a command to its end; its wall time and processor time in seconds, and its peak memory in bytes. An exit
    status that is not in `accept` is an error."""
    start_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in accept:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_memory_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else KIBIBYTE),
    }


def measure(requests: int, directory: Path, options: Sequence[str]) -> dict[str, Any]:
    """One trace: what its run took, and what it recorded."""
    trace, run = directory / f"{requests}.jsonl", directory / f"run-{requests}"
    write_trace(trace, requests)
    command = [sys.executable, "-m", "ifbbench", "run", str(trace), "--output", str(run), *options]
    figures = measured([*command, "--time_scale", "0", "--max_batch_size", MAX_BATCH_SIZE])
    summary = json.loads((run / "summary.json").read_text())
    assert summary["requests"]["completed"] == requests
    recorded_bytes = sum(file.stat().st_size for file in run.iterdir())
    trace.unlink()
    return {
        "requests": requests,
        **figures,
        "iterations": summary["iterations"],
        "recorded_bytes": recorded_bytes,
    }


def main() -> None:
    """Measure, and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS, metavar="N")
    parser.add_argument("--device", default="sim:h100-sxm")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("options", nargs="*", help="more options of `ifbbench run`, behind --")
    asked = parser.parse_args()
    options = ["--device", asked.device, "--model", asked.model, *asked.options]
    with TemporaryDirectory() as directory:
        start, *results = [measure(requests, Path(directory), options) for requests in (1, *asked.requests)]
    for result in results:
        result["cpu_us_a_request"] = (result["cpu_seconds"] - start["cpu_seconds"]) / result["requests"] * 1e6
    first, last = results[0], results[-1]
    report = {
        "benchmark": "a long trace, 512 requests at a time",
        "options": options,
        "hardware": hardware(),
        "versions": versions(),
        "start_cpu_seconds": start["cpu_seconds"],
        "results": results,
        "time_a_request_ratio": last["cpu_us_a_request"] / first["cpu_us_a_request"],
        "peak_memory_gb": last["peak_memory_bytes"] / 1e9,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
