"""How well a calibrated profile foretells real runs on this machine.

`python -m benchmarks.simulated_vs_real` calibrates the CPU with the tiny model, then runs traces that calibration
has not seen and simulates them, in turns, and prints one JSON object: for each trace, total time and TTFT p50 of each
real run beside the simulated ones, the errors of the simulated figures, what would be allowed, and whether the
schedules are equal. It takes some minutes; the quieter the machine, the less its real runs differ.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from ifbbench.replay.run import run_trace
from ifbbench.rundir import run_directory
from ifbbench.settings.config import RunConfig
from ifbbench.studies.calibrate import calibrate
from ifbbench.studies.calibration import Calibration

TURNS = 5
# Medians of the errors' sizes may be this, or half the spread of the real runs if that is larger.
ALLOWED = {"total_time_s": 0.10, "ttft_p50_s": 0.15}
LIMITS: dict[str, Any] = {"max_batch_size": 16, "max_tokens_in_paged_kvcache": 32_768}


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace and its settings. Of one whose requests are all there at once, the schedule is to be equal too."""

    name: str
    trace: str
    settings: dict[str, Any]
    is_all_at_once: bool


WORKLOADS = (
    Workload("default, all at once", "default", {"time_scale": 0}, True),
    Workload("chat, all at once", "chat", {"time_scale": 0, "max_num_samples": 16}, True),
    Workload(
        "chat in chunks, max_utilization, all at once",
        "chat",
        {
            "time_scale": 0,
            "max_num_samples": 16,
            "seed": 1,
            "enable_chunked_context": True,
            "max_num_tokens": 512,
            "policy": "max_utilization",
            "max_tokens_in_paged_kvcache": 8192,
        },
        True,
    ),
    Workload(
        "chat, 1.5 requests/s",
        "chat",
        {"request_rate": 1.5, "enable_exp_delays": True, "max_num_samples": 20, "seed": 2},
        False,
    ),
)


def figures(workload: Workload, device: str, directory: Path) -> dict[str, Any]:
    """Replay the workload on `device`, and return total time and TTFT p50, in seconds, and the schedule's digest."""
    config = RunConfig(**{**LIMITS, **workload.settings}, device=device, output=str(directory), overwrite=True)
    summary = run_trace(workload.trace, config, owns_process=True).summary
    return {
        "total_time_s": summary["duration_s"],
        "ttft_p50_s": summary["ttft_s"]["p50"],
        "schedule_digest": summary["schedule_digest"],
    }


def compared(workload: Workload, real: list[dict[str, Any]], simulated: list[dict[str, Any]]) -> dict[str, Any]:
    """Real and simulated figures side by side, each turn's error, and whether their median is allowed."""
    row: dict[str, Any] = {"workload": workload.name}
    for name, share in ALLOWED.items():
        reals = [run[name] for run in real]
        errors = [run[name] / measured - 1 for run, measured in zip(simulated, reals, strict=True)]
        spread = (max(reals) - min(reals)) / median(reals)
        error, allowed = median(map(abs, errors)), max(share, spread / 2)
        row[name] = {
            "real": _rounded(reals),
            "simulated": _rounded(run[name] for run in simulated),
            "errors": _rounded(errors),
            "spread_of_real": round(spread, 3),
            "median_error": round(error, 3),
            "allowed": round(allowed, 3),
            "is_met": error <= allowed,
        }
    if workload.is_all_at_once:
        row["schedules_agree"] = len({run["schedule_digest"] for run in (*real, *simulated)}) == 1
    return row


def _rounded(values: Any) -> list[float]:
    return [round(value, 4) for value in values]


def measure(turns: int, directory: Path) -> tuple[Calibration, list[dict[str, Any]]]:
    """Calibrate once, and then run and simulate every workload in every turn."""
    profile = directory / "here.toml"
    found = calibrate(RunConfig(device="cpu"), profile, owns_process=True)
    real: dict[str, list[dict[str, Any]]] = {workload.name: [] for workload in WORKLOADS}
    simulated: dict[str, list[dict[str, Any]]] = {workload.name: [] for workload in WORKLOADS}
    for _ in range(turns):
        for workload in WORKLOADS:
            real[workload.name].append(figures(workload, "cpu", directory / "real"))
            simulated[workload.name].append(figures(workload, f"sim:{profile}", directory / "simulated"))
    return found, [compared(workload, real[workload.name], simulated[workload.name]) for workload in WORKLOADS]


def main(turns: int) -> None:
    """Measure, and print the result as JSON."""
    with TemporaryDirectory() as directory:
        found, rows = measure(turns, Path(directory))
    about = {"benchmark": "simulated runs of a calibrated profile, and real ones", "turns": turns}
    machine = {"hardware": run_directory.hardware(), "versions": run_directory.versions()}
    print(json.dumps({**about, **machine, "calibration": found.profile.calibration, "results": rows}, indent=2))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else TURNS)
