"""`--profile`: where each iteration's time goes, in its line and in the report."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ifbbench.errors import InputError
from ifbbench.replay.run import run_trace
from ifbbench.report.tables import print_report
from ifbbench.rundir.reader import load_run
from ifbbench.settings.config import RunConfig

pytestmark = pytest.mark.usefixtures("small_model")

PARTS = ("schedule_ms", "prepare_ms", "launch_ms", "collect_ms", "device_busy_ms", "flops", "bytes")


def run(directory: Path, **changes: Any) -> list[dict[str, Any]]:
    """What the lines of a short run say under "ifbbench"."""
    settings = {"device": "cpu", "time_scale": 0, "max_batch_size": 4, "max_num_tokens": 64, "profile": True}
    run_trace("documentation", RunConfig(**{**settings, "output": str(directory), **changes}))
    # Static batches have their steps in a file of their own.
    name = "steps.jsonl" if changes.get("type") == "v1" else "iterations.jsonl"
    return [json.loads(line)["ifbbench"] for line in (directory / name).read_text().splitlines()]


def report(directory: Path) -> str:
    out = io.StringIO()
    print_report(load_run(directory), Console(file=out, width=120))
    return out.getvalue()


@pytest.mark.parametrize(
    "changes", [{}, {"enable_trt_overlap": True}, {"type": "inflight_unfused"}, {"type": "v1"}], ids=str
)
def test_each_line_has_its_parts(tmp_path: Path, changes: dict[str, Any]) -> None:
    lines = run(tmp_path / "run", **changes)
    assert len(lines) >= 3
    for line in lines:
        assert line["host_ms"] == pytest.approx(line["schedule_ms"] + line["prepare_ms"] + line["launch_ms"])
        assert line["launch_ms"] == 0
        assert min(line[name] for name in PARTS if name != "launch_ms") > 0
    limits = json.loads((tmp_path / "run" / "run.json").read_text())["device_limits"]
    assert limits["flops_per_s"] > 0
    assert limits["bytes_per_s"] > 0
    text = report(tmp_path / "run")
    for words in ("Where the time goes", "Forward pass", "The device was busy", "MBU", "MFU"):
        assert words in text


def test_other_runs_have_none_of_it(tmp_path: Path) -> None:
    for line in run(tmp_path / "run", profile=False):
        assert not set(PARTS) & set(line)
    assert "Where the time goes" not in report(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "null"}, "--profile: nothing is computed on --device null"),
        ({"device": "sim:h100-sxm"}, "--profile: nothing is computed on --device sim:h100-sxm"),
        ({"iteration_stats_every": 5}, "--profile: needs the times of every iteration"),
    ],
)
def test_what_cannot_be_profiled(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(tmp_path / "run", **changes)
