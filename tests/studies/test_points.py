"""Many runs in memory: the summaries of recorded runs, in parallel, with failures and processes that are killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ifbbench.build.engine import build_engine
from ifbbench.clock import WallClock
from ifbbench.processes import MAX_ATTEMPTS, Lost, run_in_processes
from ifbbench.replay.run import run_trace, summarise_run
from ifbbench.settings.config import RunConfig
from ifbbench.studies import points as points_module
from ifbbench.studies.points import run_points
from ifbbench.workload.load import in_memory, load_trace, read_source

SIMULATED = RunConfig(device="sim:h100-sxm", model="llama-3.1-8b")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A trace with what only `recall` knows: prompt tokens, priorities, and named prefixes."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {
            "request_id": number,
            "arrival_s": number / 100,
            "prompt_len": 600 + number,
            "prefix_ids": [1, number],
            "max_new_tokens": 40,
            "output_len": 1 + number % 40,
            "priority": (number % 3 + 1) / 10,
        }
        for number in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


POINTS: list[dict[str, Any]] = [
    {},
    {"max_tokens_in_paged_kvcache": 4096, "policy": "max_utilization", "enable_chunked_context": True},
    {"enable_kv_cache_reuse": True, "request_rate": 20.0, "slo": "ttft=20ms,tpot.p99=5ms"},
    {"max_num_samples": 7, "time_scale": 0.0, "type": "v1"},
    {"concurrency": 4, "enable_trt_overlap": True, "max_prompt_len": 100},
    {"max_input_len": 640, "reserve": "factor:2"},
    {"enable_steady_state": True},
]


@pytest.mark.parametrize("values", POINTS)
def test_a_summary_in_memory_is_that_of_the_recorded_run(lines: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    config = SIMULATED.with_values(**values)
    recorded = run_trace(str(lines), config.with_values(output=str(tmp_path / "run"))).summary
    assert summarise_run(in_memory(read_source(str(lines), SIMULATED)), config) == recorded


def test_points_are_the_same_one_by_one_and_in_parallel(lines: Path) -> None:
    configs = [SIMULATED.with_values(**values) for values in POINTS]
    alone, together = (run_points(str(lines), configs, processes) for processes in (1, 3))
    assert together == alone
    assert [result.config for result in together] == configs
    assert [result.summary["requests"]["total"] for result in together] == [60, 60, 60, 7, 60, 60, 60]


def test_points_share_the_trace_and_the_cost_model(lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, configs = (
        [],
        [
            SIMULATED.with_values(max_batch_size=size, dtype=dtype)
            for size, dtype in ((8, "bf16"), (16, "bf16"), (8, "fp8"))
        ],
    )

    def counted(source: Any, config: RunConfig) -> Any:
        read.append(source)
        return read_source(source, config)

    monkeypatch.setattr(points_module, "read_source", counted)
    results = run_points(str(lines), configs, 1)
    assert read == [str(lines)]
    assert not any(result.error for result in results)
    executors: list[Any] = [build_engine(config).executor for config in configs]
    first, second, other = (executor.cost_model for executor in executors)
    assert first is second
    assert (first.shard.dtype, other.shard.dtype) == ("bf16", "fp8")


def test_a_simulated_run_without_tables_imports_no_package_that_it_does_not_need(tmp_path: Path) -> None:
    """Packages that take longer to import than a short run takes to simulate."""
    code = """if True:
        import sys
        from ifbbench.cli.main import main
        main(sys.argv[1:], standalone_mode=False)
        print([name for name in ("torch", "triton", "pandas", "matplotlib", "rich", "numpy.ma") if name in sys.modules])
    """
    command = ["run", "default", "--device", "sim:h100-sxm", "--model", "llama-3.1-8b", "--quiet", "--json", "--output"]
    done = subprocess.run([sys.executable, "-c", code, *command, str(tmp_path / "run")], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_point_that_fails_has_its_error_and_its_warnings(lines: Path) -> None:
    values: list[dict[str, Any]] = [{"enable_chunked_context": True, "max_num_tokens": 8}, {"max_input_len": 639}, {}]
    configs = [SIMULATED.with_values(**one) for one in values]
    for processes in (1, 2):
        bad, refused, good = run_points(str(lines), configs, processes)
        assert (bad.summary, good.error, good.warnings) == ({}, "", ())
        assert "max_num_tokens" in bad.error
        assert refused.summary["requests"]["failed"] == 20
        assert "20 of 60 requests will be refused" in refused.warnings[0]


@pytest.mark.parametrize("source", [None, "chat", "agent"])
def test_a_trace_in_memory_has_the_same_requests(lines: Path, source: str | None) -> None:
    trace = load_trace(source or lines, SIMULATED)
    assert list(in_memory(trace)) == list(trace)


def test_a_trace_in_memory_needs_no_file(lines: Path) -> None:
    trace = in_memory(read_source(lines, SIMULATED))
    lines.unlink()
    assert len(list(trace)) == 60


def test_a_killed_process_costs_only_its_own_task_which_runs_again(tmp_path: Path) -> None:
    def run(number: int, report: Any) -> int:
        if number == 2 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number * 10

    assert sorted(run_in_processes(run, 6, 2)) == [(number, number * 10) for number in range(6)]
    assert (tmp_path / "killed").exists()


def test_a_task_that_always_loses_its_process_is_given_up() -> None:
    def run(number: int, report: Any) -> int:
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    results = dict(run_in_processes(run, 3, 2))
    assert (results[0], results[2]) == (0, 2)
    assert isinstance(results[1], Lost)
    assert f"killed {MAX_ATTEMPTS} times" in str(results[1])


def test_an_error_in_a_process_is_a_result() -> None:
    def run(number: int, report: Any) -> int:
        return 1 // number

    results = dict(run_in_processes(run, 2, 2))
    assert results[1] == 1
    assert isinstance(results[0], ZeroDivisionError)


def test_steps_are_counted_while_no_task_reports_any(tmp_path: Path) -> None:
    def run(number: int, report: Any) -> bool:
        clock = WallClock()
        while not (is_counted := (tmp_path / "counted").exists()) and clock.now() < 300:
            clock.wait_until(clock.now() + 0.02)
        return is_counted

    assert dict(run_in_processes(run, 2, 2, lambda steps: (tmp_path / "counted").touch())) == {0: True, 1: True}


def test_no_process_is_left_behind_by_an_interrupt() -> None:
    pids = []

    def run(number: int, report: Any) -> int:
        if number:
            signal.pause()
        return os.getpid()

    running = run_in_processes(run, 2, 2)
    pids.append(next(running)[1])
    running.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
