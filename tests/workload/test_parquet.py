"""Traces in Parquet, which needs the package pyarrow."""

import io
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from ifbbench.errors import InputError
from ifbbench.workload.formats import ReadOptions
from ifbbench.workload.reading import read_trace
from tests.workload.sample_files import NAMES, SAMPLES, rows_of


def written(path: Path, rows: list[dict[str, object]]) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=1)
    return path


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".jsonl")])
def test_a_sample_as_parquet_has_the_same_requests(name: str, tmp_path: Path) -> None:
    rows, _ = rows_of(name)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    try:
        columns = {key: [row.get(key) for row in rows] for key in keys}
        table = pa.table(columns)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        pytest.skip(f"a column of this sample has values of several types, as no Parquet file has: {error}")
    parquet.write_table(table, tmp_path / "trace.parquet", row_group_size=1)
    trace = read_trace(tmp_path / "trace.parquet")
    assert list(trace) == list(read_trace(SAMPLES / name))
    assert trace.name == "trace"


def test_times_of_parquet(tmp_path: Path) -> None:
    stamps = [datetime(2023, 4, 9, 0, 2, 53, tzinfo=UTC), datetime(2023, 4, 9, 0, 2, 54, 250_000, tzinfo=UTC)]
    path = written(tmp_path / "a.parquet", [{"when": when, "usage": {"in": 5, "out": 7}} for when in stamps])
    trace = read_trace(path, options=ReadOptions(columns="arrival_s=when,prompt_len=usage.in,output_len=usage.out"))
    assert [(one.arrival_s, one.prompt_len, one.output_len) for one in trace] == [(0.0, 5, 7), (1.25, 5, 7)]


def test_parquet_on_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.parquet", [{"prompt_len": 3, "output_len": 4}])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    assert [(one.prompt_len, one.output_len) for one in read_trace(Path("-"))] == [(3, 4)]


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", [{"prompt_len": 3, "output_len": 4}, {"prompt_len": -3, "output_len": 4}])
    with pytest.raises(InputError, match=r"a\.parquet, row 2: prompt_len is -3"):
        read_trace(path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", [{"prompt_len": 3, "output_len": 4}])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"a\.parquet: not a valid Parquet file .*Give the whole file"):
        read_trace(path)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", [{"prompt_len": 3, "output_len": 4}])
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from ifbbench.cli.main import main\n"
        f"main(['dataset', 'info', {str(path)!r}])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "pip install 'ifbbench[parquet]'" in ended.stderr
    assert "Traceback" not in ended.stderr
