"""Only a program that owns its process, such as the command line, has malloc options and thread counts changed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ifbbench.api.batch_manager import BatchManager
from ifbbench.cli.main import main
from ifbbench.execution import cpu_threads, host_memory

LIMITS = {"max_seq_len": 64, "max_tokens": 256, "max_batch_size": 2}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """One processor is granted, two threads are set. Collects the calls that set malloc options."""
    before, calls = torch.get_num_threads(), list[str]()
    monkeypatch.setattr(cpu_threads, "granted_processors", lambda: 1)
    monkeypatch.setattr(host_memory, "keep_freed_memory", lambda: calls.append("malloc"))
    torch.set_num_threads(2)
    yield calls
    torch.set_num_threads(before)


def manager(**parameters: object) -> BatchManager:
    return BatchManager("tiny", "ifb", 1, "guaranteed_no_evict", lambda count: [], lambda *response: None,
                        optional_params={"device": "cpu", **LIMITS, **parameters}, start=False)  # fmt: skip


def test_the_library_changes_nothing_of_the_process(kept: list[str]) -> None:
    manager().close()
    assert torch.get_num_threads() == 2
    assert kept == []


def test_threads_that_the_caller_asks_for_are_set(kept: list[str]) -> None:
    manager(cpu_threads=3).close()
    assert torch.get_num_threads() == 3
    assert kept == []


@pytest.mark.parametrize("command", [["run", "--max_num_samples", "1"], ["sweep", "--over", "seed=1", "--quiet"]])
def test_the_command_line_owns_its_process(kept: list[str], tmp_path: Path, command: list[str]) -> None:
    small = ["--max_num_samples", "1", "--max_prompt_len", "20", "--time_scale", "0", "--device", "cpu", "--quiet"]
    done = CliRunner().invoke(main, [*command, *small, "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert torch.get_num_threads() == 1
    assert kept == ["malloc"]
