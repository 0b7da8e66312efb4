"""Commands without the packages that they do not need, as after the light installation of the README."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ifbbench.cli.main import COMPUTING_PACKAGES

ROOT = Path(__file__).parents[2]
SIMULATED = ("--device", "sim:h100-sxm", "--model", "llama-3.1-8b", "--max_num_samples", "20", "--quiet")
COMPUTING = {*COMPUTING_PACKAGES, "transformers", "tokenizers"}
# Runs one command after another; none of them finds the packages.
PROGRAM = """
import sys
from importlib.machinery import PathFinder

blocked = set(sys.argv[1].split(","))
find = PathFinder.find_spec

def find_spec(name, *arguments):
    return None if name.partition(".")[0] in blocked else find(name, *arguments)

PathFinder.find_spec = find_spec
from ifbbench.cli.main import main

for words in sys.argv[2:]:
    print(">", words)
    try:
        main(words.split(";"))
    except SystemExit as end:
        if end.code:
            raise
"""


def without(packages: set[str], directory: Path, *commands: tuple[str, ...]) -> tuple[int, str]:
    """The exit status of the last of `commands` that ran, and what they printed."""
    arguments = [sys.executable, "-c", PROGRAM, ",".join(packages), *map(";".join, commands)]
    ended = subprocess.run(arguments, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    return ended.returncode, f"{ended.stdout[-2_000:]}\n{ended.stderr}"


def test_a_simulated_run_and_its_report_need_no_data_frames_and_no_files_of_tensors(tmp_path: Path) -> None:
    """They would take longer to import than the run takes."""
    status, printed = without(
        {*COMPUTING, "pandas", "pyarrow", "scipy", "matplotlib", "safetensors", "multiprocessing"},
        tmp_path,
        ("run", "default", *SIMULATED[:-1], "--output", "a"),
        ("report", "a"),
    )
    assert status == 0, printed
    assert "Latency (ms)" in printed, printed


def test_simulated_runs_and_reports_need_no_package_that_computes(tmp_path: Path) -> None:
    status, printed = without(
        COMPUTING,
        tmp_path,
        ("run", "chat", *SIMULATED, "--output", "a"),
        ("run", "chat", *SIMULATED, "--max_batch_size", "2", "--output", "b"),
        ("report", "a"),
        ("why", "b", "--budget", "0"),
        ("why", "b", "--request", "3"),
        ("compare", "a", "b"),
        ("plot", "b", "--only", "timeline", "--format", "png"),
        ("plot", "b", "--html"),
        ("export", "a", "--format", "csv"),
        ("sweep", "chat", *SIMULATED, "--over", "max_batch_size=2,4", "--output", "s"),
        ("tune", "chat", *SIMULATED, "--slo", "ttft.p99=9s", "--output", "t"),
        ("capacity", "llama-3.1-8b", "--device", "h100-sxm", "--input-len", "100", "--output-len", "100"),
        ("explain-step", "llama-3.1-8b", "--device", "h100-sxm", "--context", "512@0"),
        ("dataset", "info", "chat"),
        ("config", "--help"),
        ("serve", "--help"),
    )
    assert status == 0, printed


def test_a_simulated_run_draws_nothing(tmp_path: Path) -> None:
    status, printed = without(
        {*COMPUTING, "matplotlib"},
        tmp_path,
        ("run", "chat", *SIMULATED, "--output", "a"),
        ("report", "a"),
        ("why", "a", "--budget", "0"),
    )
    assert status == 0, printed


@pytest.mark.parametrize(
    "command",
    [
        ("run", "--device", "cpu"),
        ("run",),
        ("serve", "--device", "cpu"),
        ("bench", "--model", "tiny", "throughput", "--dataset", "lengths.jsonl", "--device", "cpu"),
    ],
    ids=lambda command: command[0],
)
def test_a_package_that_computes_is_named_where_it_is_missing(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "lengths.jsonl").write_text('{"task_id": 0, "input_ids": [1, 2], "output_tokens": 2}\n')
    status, printed = without({"torch"}, tmp_path, command)
    assert status == 2
    assert "pip install 'torch>=2.11,<2.14'" in printed
    assert "--device sim:" in printed
    assert "Traceback" not in printed


def test_the_light_installation_is_the_whole_one_without_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    computing = [need for need in project["project"]["dependencies"] if need.startswith(tuple(COMPUTING_PACKAGES))]
    light = [need for need in project["project"]["dependencies"] if need not in computing]
    assert project["dependency-groups"]["simulation"] == light
    assert [need.partition(";")[0] for need in computing] == list(COMPUTING_PACKAGES.values())
