"""The host: free memory, malloc options and threads, and that only a program that owns its process changes them."""

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.serving.library.batch_manager import BatchManager
from ifbbench.torch import host
from ifbbench.torch.host import available_host_bytes, granted_processors, keep_freed_memory, use_threads

pytestmark = pytest.mark.usefixtures("small_model")

LIMITS = {"max_seq_len": 64, "max_tokens": 256, "max_batch_size": 2}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore the number of threads for other tests."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# Memory.


def test_a_c_library_without_mallopt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    keep_freed_memory()


def test_there_is_memory() -> None:
    assert available_host_bytes() > 0


# Threads.


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system of control groups, empty at first."""
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    monkeypatch.setattr(host, "MEMBERSHIP", tmp_path / "membership")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(("limit", "granted"), [("max 100000", None), ("150000 100000", 2), ("20000 100000", 1)])
def test_a_containers_share(system: Path, limit: str, granted: int | None) -> None:
    write(system / "membership", "0::/\n")
    write(system / "cpu.max", limit + "\n")
    assert granted_processors() == granted


def test_the_tightest_group_counts(system: Path) -> None:
    write(system / "membership", "0::/pod/container\n")
    write(system / "pod/cpu.max", "300000 100000\n")
    write(system / "pod/container/cpu.max", "max 100000\n")
    assert granted_processors() == 3


def test_a_group_that_the_container_does_not_see(system: Path) -> None:
    write(system / "membership", "0::/host/path\n")
    write(system / "cpu.max", "400000 100000\n")
    assert granted_processors() == 4


@pytest.mark.parametrize(("quota", "granted"), [("-1", None), ("250000", 3)])
def test_version_1(system: Path, quota: str, granted: int | None) -> None:
    write(system / "membership", "5:memory:/a\n4:cpu,cpuacct:/a\n")
    write(system / "cpu/a/cpu.cfs_quota_us", quota + "\n")
    write(system / "cpu/a/cpu.cfs_period_us", "100000\n")
    assert granted_processors() == granted


def test_no_control_groups(system: Path) -> None:
    assert granted_processors() is None


def test_the_number_asked_for_has_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "granted_processors", lambda: 1)
    assert use_threads(3) == torch.get_num_threads() == 3
    assert use_threads(None) == torch.get_num_threads() == 1
    monkeypatch.setattr(host, "granted_processors", lambda: None)
    torch.set_num_threads(2)
    assert use_threads(None) == torch.get_num_threads() == 2


def test_a_run_reports_how_many(tmp_path: Path) -> None:
    command = ["run", "--max_num_samples", "1", "--cpu_threads", "1", "--quiet", "--output", str(tmp_path / "run")]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "run/run.json").read_text())["config"]["cpu_threads"] == 1


# Settings of the whole process.


@pytest.fixture
def malloc_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One processor is granted, two threads are set. Collects the calls that set malloc options."""
    calls = list[str]()
    monkeypatch.setattr(host, "granted_processors", lambda: 1)
    monkeypatch.setattr(host, "keep_freed_memory", lambda: calls.append("malloc"))
    torch.set_num_threads(2)
    return calls


def manager(**parameters: object) -> BatchManager:
    return BatchManager(
        "tiny",
        "ifb",
        1,
        "guaranteed_no_evict",
        lambda count: [],
        lambda *response: None,
        optional_params={"device": "cpu", **LIMITS, **parameters},
        start=False,
    )


def test_the_library_changes_nothing_of_the_process(malloc_calls: list[str]) -> None:
    manager().close()
    assert torch.get_num_threads() == 2
    assert malloc_calls == []


def test_threads_that_the_caller_asks_for_are_set(malloc_calls: list[str]) -> None:
    manager(cpu_threads=3).close()
    assert torch.get_num_threads() == 3
    assert malloc_calls == []


@pytest.mark.parametrize("command", [["run"], ["sweep", "--over", "seed=1"]])
def test_the_command_line_owns_its_process(malloc_calls: list[str], tmp_path: Path, command: list[str]) -> None:
    small = ["--max_num_samples", "1", "--max_prompt_len", "20", "--time_scale", "0", "--device", "cpu", "--quiet"]
    done = CliRunner().invoke(main, [*command, *small, "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert torch.get_num_threads() == 1
    assert malloc_calls == ["malloc"]
