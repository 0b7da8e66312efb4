"""Sweeps on a Ray cluster that the tests start on this machine."""

import sys
from pathlib import Path

import pytest

import ifbbench.studies.sweep as sweep_module
from ifbbench.errors import InputError
from ifbbench.settings.config import RunConfig
from ifbbench.studies.grid import grid, parse_axes
from ifbbench.studies.ray_cluster import RayCluster
from ifbbench.studies.sweep import LocalProcesses, run_sweep

POINTS = grid(parse_axes(["max_num_tokens=512..2048:x2", "policy=guaranteed_no_evict,max_utilization"]))
SIMULATED = RunConfig(
    device="sim:h100-sxm", model="llama-3.1-8b", max_num_samples=40, request_rate=40.0, enable_chunked_context=True
)


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="Ray is not installed; install it with: pip install 'ifbbench[ray]'")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    yield ray
    ray.shutdown()


def tables(directory: Path) -> list[bytes]:
    return [(directory / name).read_bytes() for name in ("sweep.csv", "sweep.json")]


@pytest.mark.parametrize("keep", ["run", "summary"])
def test_the_table_is_that_of_local_processes_to_the_byte(cluster, tmp_path, monkeypatch, keep) -> None:
    for name, executor in (("local", LocalProcesses(2)), ("ray", RayCluster())):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        run_sweep("chat", SIMULATED.with_values(output="s"), POINTS, keep=keep, executor=executor)
    assert tables(tmp_path / "ray" / "s") == tables(tmp_path / "local" / "s")
    recorded = [len(list((tmp_path / name / "s").glob("*=*/iterations.jsonl"))) for name in ("ray", "local")]
    assert recorded == ([6, 6] if keep == "run" else [0, 0])


def test_a_worker_that_is_killed_costs_nothing_but_time(cluster, tmp_path, monkeypatch) -> None:
    summarise = sweep_module.KEEP["summary"]
    killed = str(tmp_path / "killed")

    def killed_once(trace, config, progress):
        import os
        import signal
        from pathlib import Path

        if config.max_num_tokens == 1024 and not Path(killed).exists():
            Path(killed).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return summarise(trace, config, progress)

    base = SIMULATED.with_values(output=str(tmp_path / "whole"))
    run_sweep("chat", base, POINTS, keep="summary", executor=LocalProcesses(1))
    monkeypatch.setitem(sweep_module.KEEP, "summary", killed_once)
    on_ray = base.with_values(output=str(tmp_path / "ray"))
    result = run_sweep("chat", on_ray, POINTS, keep="summary", executor=RayCluster())
    assert Path(killed).exists()
    assert result.failed == 0
    assert tables(tmp_path / "ray") == tables(tmp_path / "whole")


def test_a_point_that_fails_does_not_end_the_sweep(cluster, tmp_path) -> None:
    points = grid(parse_axes(["max_num_tokens=8,2048"]))
    base = SIMULATED.with_values(output=str(tmp_path))
    result = run_sweep("chat", base, points, keep="summary", executor=RayCluster())
    assert [bool(row["error"]) for row in result.rows] == [True, False]


def test_devices_that_are_not_simulated_are_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="device cpu is not simulated"):
        run_sweep(None, RunConfig(device="cpu", output=str(tmp_path / "s")), [{"seed": 1}], executor=RayCluster())
    assert not (tmp_path / "s").exists()


def test_without_ray_the_error_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'ifbbench\[ray\]'"):
        run_sweep("chat", SIMULATED.with_values(output=str(tmp_path)), POINTS, executor=RayCluster())
