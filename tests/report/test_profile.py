"""The figures of a profiled run, by hand."""

import json
from pathlib import Path

import pytest

from ifbbench.report.load import RunData, load_run
from ifbbench.report.tables import profile_figures, profile_sentence
from tests.report.example_runs import write_documentation_run


def profiled_run(directory: Path, device: str) -> RunData:
    """Each iteration schedules for 1 ms, prepares for 0.5 and launches for 0.25; the device is busy for 5, and does 1 M
    FLOPs and moves 2 MB then."""
    write_documentation_run(directory, device=device)
    path = directory / "iterations.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["ifbbench"] |= {"schedule_ms": 1.0, "prepare_ms": 0.5, "launch_ms": 0.25, "collect_ms": 4.0,
                            "device_busy_ms": 5.0, "flops": 1e6, "bytes": 2e6}  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = json.loads((directory / "run.json").read_text())
    run["device_limits"] = {"flops_per_s": 4e8, "bytes_per_s": 1e9}
    (directory / "run.json").write_text(json.dumps(run))
    return load_run(directory)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_parts_fill_the_duration(tmp_path: Path, device: str) -> None:
    run = profiled_run(tmp_path / "run", device)
    figures = profile_figures(run)
    assert figures is not None
    duration_s = run.iterations["latency_ms"].sum() / 1000
    assert sum(figures.parts.values()) * len(run.iterations) == pytest.approx(duration_s)
    assert figures.parts["Schedule"] == pytest.approx(0.001)
    assert figures.parts.get("Launch") == (pytest.approx(0.00025) if device == "cuda" else None)
    assert figures.parts.get("Forward pass") == (pytest.approx(0.005) if device == "cpu" else None)
    assert figures.device_busy == pytest.approx(0.005 * len(run.iterations) / duration_s)


def test_what_the_device_reached(tmp_path: Path) -> None:
    figures = profile_figures(profiled_run(tmp_path / "run", "cuda"))
    assert figures is not None
    assert figures.bandwidth is not None
    assert figures.arithmetic is not None
    assert figures.bandwidth.share == pytest.approx(0.4)  # 2 MB in 5 ms, of 1 GB/s
    assert figures.arithmetic.share == pytest.approx(0.5)  # 1 M FLOPs in 5 ms, of 400 M
    sentence = profile_sentence(figures)
    assert "40 % of the speed of a large copy (MBU, 0.400 of 1.00 GB/s)" in sentence
    assert "50 % of the speed of a large matrix product (MFU, 200 of 400 MFLOP/s)" in sentence


def test_other_runs_have_no_profile(tmp_path: Path) -> None:
    assert profile_figures(load_run(write_documentation_run(tmp_path / "run"))) is None
