"""Whether `ifbbench tune` finds what an exhaustive grid finds, with less work.

`python -m benchmarks.tune DIRECTORY [NAME…]` prints one JSON object: for each trace the best of the grid and that
of the search, their figures, and the simulated requests of both; and for the highest rate a scan in steps of 1 %.
DIRECTORY has the recorded traces (azure_conv_2023.csv, mooncake_synthetic.jsonl). NAME: some of CASES, or max_rate.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from click.testing import CliRunner

from ifbbench.cli.main import main as cli
from ifbbench.rundir.run_directory import hardware
from ifbbench.settings.names import from_mapping
from ifbbench.studies.tune import Tuner
from ifbbench.studies.tune_candidates import Goal
from ifbbench.studies.tune_runs import Case

BASE = {"device": "sim:h100-sxm", "model": "llama-3.1-8b"}
# Name: trace, goal, objectives, settings.
CASES: dict[str, tuple[str, str, str | None, dict[str, Any]]] = {
    "azure": ("azure_conv_2023.csv", "goodput", "ttft=1s,tpot=25ms", {"max_num_samples": 3000, "time_scale": 0.3}),
    "mooncake": (
        "mooncake_synthetic.jsonl",
        "goodput",
        "ttft=10s,tpot=50ms",
        {"max_num_samples": 300, "time_scale": 3.0, "enable_kv_cache_reuse": True},
    ),
    "reserved": ("reserved.jsonl", "output_throughput", None, {"time_scale": 0.0, "reserve": "factor:8"}),
}
RATE = ("azure_conv_2023.csv", "max_rate", "ttft.p99=1s,tpot.p99=40ms", {"max_num_samples": 2000})
SCAN_SHARE, SCAN_POINTS = 0.01, 12
SYNTHETIC = (
    "dataset synth lognormal --num-requests 2000 --input-median 400 --input-mean 600 "
    "--output-median 150 --output-mean 200"
)


def tuner(directory: Path, source: str, goal: str, slo: str | None, values: dict[str, Any]) -> Tuner:
    base = from_mapping({**BASE, "slo": slo, **values}, command_line=True)
    return Tuner(str(directory / source), base, frozenset(values), Goal.of(goal, slo))


def against_the_grid(directory: Path, case: tuple[str, str, str | None, dict[str, Any]]) -> dict[str, Any]:
    """The best of a search and of the grid, and the work of both."""
    searching = tuner(directory, *case)
    found = searching.run()
    assert found.best is not None
    work = searching.runs.work
    runs = searching.runs.run([Case(point) for point in searching.space.grid()])
    grid = [one for one in map(searching.judge.candidate, runs) if one is not None]
    best = max(grid, key=searching.judge.key)
    return {
        "found": found.best.settings,
        "found_figure": found.best.score,
        "grid": best.settings,
        "grid_figure": best.score,
        "ratio": found.best.score / best.score,
        "baselines": {one.name: one.score for one in found.baselines},
        "simulated_requests": work,
        "grid_requests": len(runs) * searching.runs.total,
        "work_share": work / (len(runs) * searching.runs.total),
        "grid_points": len(runs),
    }


def against_a_scan(directory: Path) -> dict[str, Any]:
    """The highest rate found, and the highest of a fine scan around it with the same settings."""
    searching = tuner(directory, *RATE)
    found = searching.run()
    assert found.best is not None
    assert found.best.rate is not None
    low, case, work = found.best.rate.low, found.best.run.case, searching.runs.work
    factors = [low * (1 + SCAN_SHARE * step) for step in range(-SCAN_POINTS, SCAN_POINTS + 1)]
    runs = searching.runs.run([Case(case.settings, rate=factor) for factor in factors])
    passing = [one.case.rate for one in runs if not one.error and not searching.goal.shortfalls(one.summary)]
    return {
        "settings": found.best.settings,
        "requests_per_s": found.best.score,
        "ratio_to_scan": low / max(passing),
        "baselines": {one.name: one.score for one in found.baselines},
        "simulated_requests": work,
        "whole_traces": work / searching.runs.total,
    }


def main() -> None:
    directory, *names = sys.argv[1:]
    results: dict[str, Any] = {}
    with TemporaryDirectory() as temporary:
        for path in Path(directory).iterdir():
            (Path(temporary) / path.name).symlink_to(path.resolve())
        made = CliRunner().invoke(cli, [*SYNTHETIC.split(), "-o", str(Path(temporary) / "reserved.jsonl")])
        assert made.exit_code == 0, made.output
        for name, case in CASES.items():
            if name in (names or CASES):
                results[name] = against_the_grid(Path(temporary), case)
        if "max_rate" in (names or ["max_rate"]):
            results["max_rate"] = against_a_scan(Path(temporary))
    print(json.dumps(results | {"hardware": hardware()}, indent=2))


if __name__ == "__main__":
    main()
