"""What requests spend their time on where iterations are decided one ahead: a prompt lasts until its first token."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.analysis.bounds import LowerBound
from ifbbench.analysis.explain import iteration_facts, request_life
from ifbbench.analysis.findings import Findings
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.analysis.waiting import HeadsOfLine
from ifbbench.cli.main import main
from ifbbench.rundir.metrics import own_seconds

SETTINGS: list[dict[str, Any]] = [
    {"engine": "sglang"},
    {"engine": "sglang", "disable_overlap_schedule": True},
    {"engine": "vllm"},
    {"overlap": "async"},
    {"overlap": "partitioned"},
    {},
]


def run(directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """A prompt of 4,000 tokens twice a second beside requests that generate."""
    trace = directory.with_suffix(".csv")
    rows = [f"{index / 2},4000,{40 + 20 * (index % 5)}" for index in range(16)]
    trace.write_text("\n".join(["arrival_s,prompt_len,output_len", *rows]))
    options = [f"--{name}={value}" if value is not True else f"--{name}" for name, value in settings.items()]
    options += ["--device=h100-sxm", "--model=llama-3.1-8b", "--output", str(directory)]
    result = CliRunner().invoke(main, ["run", str(trace), *options])
    assert result.exit_code == 0, result.output
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return summary


@pytest.mark.parametrize("settings", SETTINGS)
def test_generation_begins_with_the_first_token(tmp_path: Path, settings: dict[str, Any]) -> None:
    run(tmp_path / "run", settings)
    recorded = RecordedRun.load(tmp_path / "run")
    for row in recorded.row_of.values():
        parts = row["attribution_s"]
        after_s = parts["generation"] + parts.get("skipped", 0.0)
        assert after_s == pytest.approx(row["e2e_s"] - row["ttft_s"], abs=1e-6)
        life = request_life(recorded, HeadsOfLine(recorded), row["request_id"])
        told: dict[str, float] = {}
        for one in life.stretches:
            told[one.phase] = told.get(one.phase, 0.0) + one.duration_s
        for phase in ("context", "generation", "skipped"):
            assert told.get(phase, 0.0) == pytest.approx(parts.get(phase, 0.0), abs=1e-6)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_time_of_the_device_is_divided_among_limits_once(tmp_path: Path, settings: dict[str, Any]) -> None:
    summary = run(tmp_path / "run", settings)
    lines = [json.loads(line) for line in (tmp_path / "run/iterations.jsonl").read_text().splitlines()]
    details = [line["ifbbench"] for line in lines]
    starts = [one["start_s"] for one in details]
    ends = [one["start_s"] + (one["latency_ms"] + one.get("delivery_ms", 0.0)) / 1000 for one in details]
    every = 2 if settings.get("overlap") == "partitioned" else 1
    seconds = [
        end - (max(start, ends[index - every]) if index >= every else start)
        for index, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
    for limit, share in summary["bound_by_time"].items():
        bound_s = sum(own for own, one in zip(seconds, details, strict=True) if one["bound_by"] == limit)
        assert share == pytest.approx(bound_s / sum(seconds), abs=1e-6)


def test_iterations_of_several_servers_do_not_overlap() -> None:
    assert own_seconds([0, 1, 4, 0, 2], [2, 5, 6, 3, 4], 1).tolist() == [2, 3, 1, 3, 1]
    assert own_seconds([0, 1, 2, 3], [3, 4, 5, 6], 2).tolist() == [3, 3, 2, 2]


def test_an_iteration_that_was_decided_ahead_says_how_long_it_took_alone(tmp_path: Path) -> None:
    run(tmp_path / "run", {"engine": "sglang"})
    lines = [json.loads(line) for line in (tmp_path / "run/iterations.jsonl").read_text().splitlines()]
    behind = next(
        after["Iteration Counter"]
        for before, after in pairwise(lines)
        if before["Context Requests"] and not after["Context Requests"] and before["ifbbench"]["latency_ms"] > 50
    )
    facts = iteration_facts(RecordedRun.load(tmp_path / "run"), behind)
    assert facts.own_s is not None
    assert facts.own_s < 0.2 * facts.duration_s
    told = CliRunner().invoke(main, ["why", str(tmp_path / "run"), "--iteration", str(behind)]).stdout
    assert f"the last {facts.own_s * 1000:.2f} of them after the one before it had ended" in told
    first = iteration_facts(RecordedRun.load(tmp_path / "run"), 0)
    assert first.own_s == first.duration_s


@pytest.mark.parametrize("every", [4, 50])
def test_thinned_statistics_divide_the_time_as_all_do(tmp_path: Path, every: int) -> None:
    """Iterations between the recorded ones overlap too: the time until the recorded one before is not what precedes."""
    summary = run(tmp_path / "run", {"engine": "vllm"})
    run(tmp_path / "thin", {"engine": "vllm", "iteration_stats_every": every})
    whole, thin = (Findings(RecordedRun.load(tmp_path / name)) for name in ("run", "thin"))
    for found in (whole, thin):
        assert found.by_time == pytest.approx(summary["bound_by_time"], abs=1e-6)
        assert found.by_iterations == pytest.approx(summary["bound_by"], abs=1e-6)
    assert isinstance(whole.lower_bound, LowerBound)
    assert isinstance(thin.lower_bound, LowerBound)
    parts = thin.lower_bound.parts_s
    assert parts == pytest.approx(whole.lower_bound.parts_s, abs=0.04 * whole.lower_bound.duration_s)
    numbers = thin.run.iterations.number.tolist()
    after = next(number for number in numbers if number and number - 1 not in numbers)
    assert iteration_facts(thin.run, after).own_s is None
    told = CliRunner().invoke(main, ["why", str(tmp_path / "thin"), "--iteration", str(after)])
    assert (told.exit_code, "after the one before it" in told.stdout) == (0, False)
    (tmp_path / "thin/summary.json").unlink()
    killed = Findings(RecordedRun.load(tmp_path / "thin"))
    assert killed.by_iterations == pytest.approx(summary["bound_by"], abs=0.05)
