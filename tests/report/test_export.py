"""`load_run` gives data frames of finished, killed and compressed runs; `export` writes them as files."""

import csv
import importlib.util
import json
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

import ifbbench
from ifbbench.cli.main import main
from ifbbench.report.export import TABLES
from ifbbench.workload.formats import write_trace
from tests.report.example_runs import finish, write_documentation_run
from tests.rundir.virtual_run import Interrupted, limits, run, trace_of

TRACE = trace_of([(0.0, 40, 20)] * 40)


def with_trace(directory: Path, suffix: str = "") -> Path:
    write_trace(TRACE.requests, directory / f"trace.jsonl{suffix}")
    return directory


def test_a_run_is_loaded_as_data_frames(tmp_path: Path) -> None:
    run(TRACE, limits(), tmp_path / "run")
    loaded = ifbbench.load_run(str(with_trace(tmp_path / "run")))
    assert loaded.run["name"] == "virtual"
    assert loaded.summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert not loaded.partial
    assert [len(getattr(loaded, name)) for name in ("requests", "trace")] == [40, 40]
    assert loaded.trace["request_id"].tolist() == loaded.requests["request_id"].tolist()
    assert loaded.requests["output_len"].sum() == loaded.summary["output_tokens"]
    assert len(loaded.iterations) == loaded.summary["iterations"]
    assert set(loaded.spans["phase"]) >= {"context", "generation"}


def test_a_killed_run_has_figures_of_what_was_done(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(TRACE, limits("guaranteed_no_evict"), tmp_path / "run", kill_after=700)
    loaded = ifbbench.load_run(with_trace(tmp_path / "run"))
    assert loaded.partial
    assert loaded.summary["partial"]
    assert 0 < loaded.summary["requests"]["completed"] == len(loaded.completed) < 40


def test_a_compressed_run_is_the_same(tmp_path: Path) -> None:
    run(TRACE, limits(), tmp_path / "plain")
    run(TRACE, limits(), tmp_path / "packed", recording_format="jsonl.gz")
    plain, packed = (
        ifbbench.load_run(with_trace(tmp_path / name, suffix)) for name, suffix in (("plain", ""), ("packed", ".gz"))
    )
    for name in TABLES:
        pd.testing.assert_frame_equal(getattr(plain, name), getattr(packed, name))


@pytest.mark.parametrize("file_format", ["csv", "parquet"])
def test_exported_tables_are_those_of_the_run(tmp_path: Path, file_format: str) -> None:
    run(TRACE, limits(), tmp_path / "run")
    loaded = ifbbench.load_run(with_trace(tmp_path / "run"))
    result = CliRunner().invoke(main, ["export", str(tmp_path / "run"), "--format", file_format])
    assert result.exit_code == 0, result.output
    paths = [tmp_path / "run" / "export" / f"{name}.{file_format}" for name in TABLES]
    assert result.output.split() == list(map(str, paths))
    for name, path in zip(TABLES, paths, strict=True):
        read = pd.read_csv(path, dtype={"request_id": str}) if file_format == "csv" else pd.read_parquet(path)
        expected = getattr(loaded, name)
        assert list(read) == list(expected)
        assert len(read) == len(expected)
        numbers = expected.select_dtypes("number")
        pd.testing.assert_frame_equal(read[list(numbers)].astype(float), numbers.astype(float))
    chunks = pd.read_csv(paths[2])["chunks"] if file_format == "csv" else pd.read_parquet(paths[2])["chunks"]
    found = [json.loads(cell) if file_format == "csv" else list(cell) for cell in chunks.dropna()]
    assert found == loaded.spans["chunks"].dropna().tolist()


def test_without_pyarrow_parquet_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = finish(write_documentation_run(tmp_path / "run"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["export", str(directory), "--format", "parquet"])
    assert result.exit_code == 2
    assert "pip install 'ifbbench[parquet]'" in result.output
    assert not (directory / "export").exists()


def test_texts_of_errors_stay_in_their_cells(tmp_path: Path) -> None:
    """Also those with the characters that part the rows of JSON that CSV is made of."""
    directory = finish(write_documentation_run(tmp_path / "run"))
    requests = directory / "requests.jsonl"
    rows = [json.loads(line) for line in requests.read_text().splitlines()]
    texts = [']\n["', '"],[', "a,b", "", "naïve\r\n"]
    for row, text in zip(rows, texts, strict=False):
        row["error"] = text
    requests.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert CliRunner().invoke(main, ["export", str(directory)]).exit_code == 0
    with (directory / "export" / "requests.csv").open(newline="", encoding="utf-8") as file:
        found = [row["error"] for row in csv.DictReader(file)]
    assert found == (texts + [""] * len(rows))[: len(rows)]
