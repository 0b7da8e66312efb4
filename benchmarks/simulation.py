"""How fast recorded traces replay on a simulated GPU, everything recorded or a summary alone.

`python -m benchmarks.simulation [--azure azure_conv_2023.csv] [--mooncake mooncake_synthetic.jsonl]` runs
`ifbbench run` as a process of its own, several times, and prints one JSON object: the machine, and for each trace the
iterations a second in the loop and the seconds of the whole command. Each trace that is not given is looked for in
`../shared/traces`, and left out if it is not there.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.scale import measured
from ifbbench.rundir.run_directory import hardware, versions
from ifbbench.settings.groups.recording import RECORDINGS

REPEATS = 5
TRACES = Path("../shared/traces")
SETTINGS = {
    "azure": (
        "--device",
        "sim:a100-80gb-sxm",
        "--model",
        "llama-3-8b",
        "--dtype",
        "bf16",
        "--enable_chunked_context",
        "--max_num_tokens",
        "512",
        "--max_batch_size",
        "512",
    ),
    "mooncake": (
        "--device",
        "sim:h100-sxm",
        "--model",
        "llama-3.1-8b",
        "--enable_kv_cache_reuse",
        "--tokens_per_block",
        "128",
        "--max_seq_len",
        "200000",
        "--enable_chunked_context",
    ),
}
DEFAULTS = {"azure": TRACES / "azure_conv_2023.csv", "mooncake": TRACES / "mooncake_synthetic.jsonl"}


def measure(trace: Path, settings: Sequence[str], directory: Path) -> dict[str, Any]:
    """Run the command once. Requests that are too long for the model are refused, which is exit status 1."""
    command = [sys.executable, "-m", "ifbbench", "run", str(trace), "--output", str(directory), "--overwrite"]
    figures = measured([*command, *settings], accept=(0, 1))
    summary = json.loads((directory / "summary.json").read_text())
    loop_s = json.loads((directory / "run.json").read_text())["wall_s"]
    return {
        "iterations": summary["iterations"],
        "simulated_s": summary["duration_s"],
        "loop_s": loop_s,
        "iterations_per_s": summary["iterations"] / loop_s,
        "command_s": figures["seconds"],
        "peak_memory_mb": figures["peak_memory_bytes"] / 1e6,
    }


def main() -> None:
    """Measure, and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, path in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=Path, default=path, metavar="FILE")
    asked = vars(parser.parse_args())
    results = {}
    with TemporaryDirectory() as directory:
        for name, path in asked.items():
            if path.exists():
                for recording in RECORDINGS:
                    settings = (*SETTINGS[name], "--recording", recording)
                    runs = [measure(path, settings, Path(directory) / name) for _ in range(REPEATS)]
                    results[f"{name}, {recording}"] = {"settings": settings} | {
                        key: median(run[key] for run in runs) for key in runs[0]
                    }
    about = {"benchmark": "recorded traces on simulated GPUs", "repeats": REPEATS}
    print(json.dumps({**about, "hardware": hardware(), "versions": versions(), "results": results}, indent=2))


if __name__ == "__main__":
    main()
