"""Where commands write results: default names are numbered and said, a directory that is given is never replaced."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main

pytestmark = pytest.mark.usefixtures("undrawn_sweeps", "one_process")

SIMULATED = ("--model", "llama-3.1-8b", "--device", "sim:h100-sxm", "--max_num_samples", "5")
COMMANDS = {
    "chat": ("run", "chat", *SIMULATED),
    "repeat-chat": ("run", "chat", "--repeat", "2", *SIMULATED),
    "tune-chat": ("tune", "chat", "--max_batch_size", "8", "--policy", "max_utilization", *SIMULATED),
}
BENCH = ("bench", "throughput", "--dataset", "chat", *SIMULATED)
SWEEP = ("sweep", "chat", *SIMULATED)
COMPARE = ("compare", "chat", *SIMULATED)


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        *((words, words, name) for name, words in COMMANDS.items()),
        (BENCH, BENCH, "chat"),
        *(
            ((*words, "--over", "max_batch_size=2,4"), (*words, "--over", "max_batch_size=2,8"), "sweep-max_batch_size")
            for words in (SWEEP, COMPARE)
        ),
    ],
)
def test_a_default_name_is_numbered_and_a_given_one_is_refused(monkeypatch, caplog, tmp_path, first, second, name):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, first)
    assert result.exit_code == 0, result.output
    assert "exists" not in caplog.text
    files = {path: path.stat().st_ino for path in Path("results").rglob("*")}
    result = CliRunner().invoke(main, second)
    assert result.exit_code == 0, result.output
    assert f"results/{name} exists; results are written to results/{name}-2." in caplog.text
    assert sorted(path.name for path in Path("results").iterdir()) == [name, f"{name}-2"]
    given = CliRunner().invoke(main, [*second, "--output", f"results/{name}"])
    assert given.exit_code == 2
    assert "--overwrite" in given.stderr
    assert all(path.stat().st_ino == inode for path, inode in files.items())
