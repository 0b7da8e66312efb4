"""How much memory the writer of a recording takes while a server answers 100,000 requests.

`python -m benchmarks.live_memory [--requests 100000] [--running 16]` sends the writer process what a recording
scheduler sends (no vLLM is needed): in each iteration a request comes and the oldest one ends. Prints one JSON object
with the resident memory of the writer after each tenth of the requests and at its end, when it has completed the files.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO, cast

from ifbbench.live.events import Added, Begin, End, Ended, Started, Step, write

PROMPT, BLOCK, NUM_BLOCKS = 96, 32, 4096
SETTINGS = {
    "model": "m",
    "max-num-seqs": 256,
    "max-num-batched-tokens": 2048,
    "block-size": BLOCK,
    "max-model-len": 4096,
}
MIB = 1 << 20


def resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


def steps(requests: int, running: int):
    """Iterations in which each request has `running` output tokens."""
    active = deque[str]()
    for number in range(requests + running):
        added, ended, name = [], [], f"cmpl-{number:032x}-0"
        if number < requests:
            active.append(name)
            added = [Added(name, time.time(), PROMPT, running)]
        if number >= running:
            hashes = [number.to_bytes(8, "big") + bytes([block]) * 24 for block in range(PROMPT // BLOCK)]
            ended = [Ended(active[0], "completed", running, BLOCK, hashes)]
        tokens = {one: PROMPT if one is active[-1] and added else 1 for one in active}
        started = [Started(name, 0, PROMPT)] if added else []
        now = time.monotonic()
        yield Step(now, now, now, [*added], tokens, started, [], None, NUM_BLOCKS - 4 * len(active), {}, ended)
        if ended:
            active.popleft()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="(default 100,000)")
    parser.add_argument("--running", type=int, default=16, help="at a time, and output tokens of each (default 16)")
    options = parser.parse_args(arguments)
    found, begun_s = dict[str, float](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ifbbench.live.writer", f"{folder}/recording"]
        writer = subprocess.Popen(command, stdin=subprocess.PIPE)
        pipe = cast(BinaryIO, writer.stdin)
        write(pipe, Begin("vllm", "0.32.0", SETTINGS, {}, time.monotonic(), time.time(), NUM_BLOCKS))
        for number, step in enumerate(steps(options.requests, options.running), start=1):
            write(pipe, step)
            if number % (options.requests // 10) == 0:
                found[f"{number:,}"] = round(resident_bytes(writer.pid) / MIB, 1)
        write(pipe, End())
        pipe.close()
        writer.wait()
        size = sum(file.stat().st_size for file in Path(f"{folder}/recording").iterdir())
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    report = {"resident_mib": found, "peak_mib": round(peak, 1), "files_mib": round(size / MIB, 1)}
    print(json.dumps(report | {"seconds": round(time.monotonic() - begun_s, 1)}, indent=1))
    return writer.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
