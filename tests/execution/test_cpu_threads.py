"""A process computes with as many threads as it can keep busy."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.execution import host
from ifbbench.execution.host import granted_processors, use_threads


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Put back what other tests run with."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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
def test_a_container_s_share(system: Path, limit: str, granted: int | None) -> None:
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


def test_what_the_user_says_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "granted_processors", lambda: 1)
    assert use_threads(3) == torch.get_num_threads() == 3
    assert use_threads(None) == torch.get_num_threads() == 1
    monkeypatch.setattr(host, "granted_processors", lambda: None)
    torch.set_num_threads(2)
    assert use_threads(None) == torch.get_num_threads() == 2


def test_a_run_says_how_many(tmp_path: Path) -> None:
    command = ["run", "--max_num_samples", "1", "--cpu_threads", "1", "--quiet", "--output", str(tmp_path / "run")]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "run/run.json").read_text())["config"]["cpu_threads"] == 1
