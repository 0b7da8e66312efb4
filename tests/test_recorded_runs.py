"""`python -m benchmarks.recorded_runs compare` compares the runs that are named, or all."""

import json
from pathlib import Path

import pytest

from benchmarks import recorded_runs


def compared(monkeypatch: pytest.MonkeyPatch, *words: str) -> int | str | None:
    monkeypatch.setattr("sys.argv", ["recorded_runs", "compare", *words])
    with pytest.raises(SystemExit) as ended:
        recorded_runs.main()
    return ended.value.code


def test_only_named_runs_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorded_runs, "RUNS", dict.fromkeys(("equal", "other"), "chat --device sim:x"))
    for directory, text in (("a", "1"), ("b", "2")):
        for name, content in (("equal", "0"), ("other", text)):
            (tmp_path / directory / name).mkdir(parents=True)
            (tmp_path / directory / name / "summary.json").write_text(content)
    paths = str(tmp_path / "a"), str(tmp_path / "b")
    assert compared(monkeypatch, *paths, "equal") == 0
    assert json.loads(capsys.readouterr().out) | {"benchmark": ""} == {"benchmark": "", "runs": 1, "different": []}
    assert compared(monkeypatch, *paths, "other") == 1
    assert json.loads(capsys.readouterr().out)["different"] == ["other/summary.json"]
    assert compared(monkeypatch, *paths) == 1
    assert json.loads(capsys.readouterr().out)["runs"] == 2
    assert compared(monkeypatch, *paths, "unknown") == "unknown: no such run; expected some of equal, other."
