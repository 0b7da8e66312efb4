"""Traces that are compressed, as whole files and as killed runs leave them."""

import gzip
import hashlib
import io
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.settings.config import RunConfig
from ifbbench.workload.load import load_trace
from ifbbench.workload.reading import read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47,396,109\n"
ROW = '{"arrival_s": 0, "prompt_tokens": [1, 2], "output_len": 1}\n'
MOONCAKE = '{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [4, 9]}\n'
SAMPLES = '[{"input_ids": [5, 6], "output_len": 3}]'


@pytest.mark.parametrize(
    ("name", "text"), [("a.csv", AZURE), ("a.jsonl", ROW * 5), ("a.jsonl", MOONCAKE), ("a.json", SAMPLES)]
)
def test_a_compressed_trace_is_the_same_trace(tmp_path: Path, name: str, text: str) -> None:
    plain, packed = tmp_path / name, tmp_path / f"{name}.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    trace = read_trace(packed)
    assert list(trace) == list(read_trace(plain))
    assert trace.name == "a"
    assert trace.sha256 == hashlib.sha256(packed.read_bytes()).hexdigest()


@pytest.mark.parametrize("content", [gzip.compress((ROW * 900).encode())[:-20], ROW.encode()], ids=["cut", "plain"])
def test_a_compressed_file_that_is_not_whole(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"a\.jsonl\.gz: .*gzip file.*Give the whole file"):
        read_trace(path)


def test_unknown_format_inside(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet.gz"
    path.write_bytes(gzip.compress(b"SQLite\0"))
    with pytest.raises(InputError, match=r"unknown trace format \(a SQLite file\)"):
        read_trace(path)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_the_trace_of_a_killed_run_is_read_as_far_as_it_goes(tmp_path: Path, name: str) -> None:
    content = b"".join(b'{"request_id":%d,"arrival_s":2.5,"prompt_len":7,"output_len":3}\n' % row for row in range(999))
    content = gzip.compress(content) if name.endswith(".gz") else content
    (tmp_path / name).write_bytes(content[: len(content) * 3 // 4])
    trace = load_trace(tmp_path, RunConfig())
    assert 300 < len(trace) < 999
    assert [request.request_id for request in trace] == list(range(len(trace)))
    assert trace.skipped_rows <= 1
    with pytest.raises(InputError):
        load_trace(tmp_path / name, RunConfig())


def test_synthetic_traces_are_written_compressed_and_the_same_each_time(tmp_path: Path) -> None:
    sizes = ["--input-mean", "9", "--input-stdev", "3", "--output-mean", "5", "--output-stdev", "1"]
    for name in ("a.jsonl", "a.jsonl.gz", "b.jsonl.gz"):
        arguments = ["dataset", "synth", "token-norm-dist", "--num-requests", "200", *sizes, "-o", str(tmp_path / name)]
        assert CliRunner().invoke(main, arguments).exit_code == 0
    packed = (tmp_path / "a.jsonl.gz").read_bytes()
    assert packed == (tmp_path / "b.jsonl.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "a.jsonl").read_bytes()


def zipped(*files: tuple[str, str]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files:
            archive.writestr(name, text)
    return content.getvalue()


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.jsonl.zst", lambda text: zstandard.compress(text.encode())),
        ("a.jsonl.zst", lambda text: zstandard.compress(text[:70].encode()) + zstandard.compress(text[70:].encode())),
        ("a.jsonl.zip", lambda text: zipped(("folder/", ""), ("folder/t.jsonl", text), ("__MACOSX/folder/._t", "x"))),
        ("a.jsonl.gz", lambda text: gzip.compress(text.encode()) + bytes(1000)),
        ("a.jsonl.gz", lambda text: gzip.compress(text[:70].encode()) + bytes(5) + gzip.compress(text[70:].encode())),
        ("a.jsonl.gz", lambda text: gzip.compress(text.encode()) + bytes(3 << 16)),
    ],
)
def test_traces_in_other_archives(tmp_path: Path, name: str, pack: Callable[[str], bytes]) -> None:
    text = "".join(ROW.replace("{", f'{{"request_id": {number}, ') for number in range(50))
    (tmp_path / "plain.jsonl").write_text(text)
    for path in (tmp_path / name, tmp_path / "a"):
        path.write_bytes(pack(text))
        trace = read_trace(path)
        assert list(trace) == list(read_trace(tmp_path / "plain.jsonl"))
        assert trace.name == "a"


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: gzip.compress(ROW.encode()) + b"garbage", r"a: not gzip behind its first part .*Give the whole file"),
        (lambda: gzip.compress(ROW.encode())[:-3], r"a: the gzip file was cut off"),
        (lambda: zstandard.compress(ROW.encode())[:-3], r"a: the zstd file was cut off"),
        (lambda: zstandard.compress(ROW.encode()) + b"garbage", r"a: not zstd behind its first part"),
        (
            lambda: zipped(("a.jsonl", ROW), ("b.jsonl", ROW)),
            r"a: the zip file holds 2 files \(a\.jsonl, b\.jsonl\); expected",
        ),
        (lambda: zipped(("a.jsonl", ROW))[:-9], r"a: not a zip file that can be read"),
        (lambda: gzip.compress(b"\n" * (65 << 20)), r"a: it unpacks to more than 64 MiB, 200 times its size"),
        (lambda: zipped(("a", "\n" * (65 << 20))), r"a: it unpacks to more than 64 MiB, 200 times its size"),
        (lambda: zstandard.compress(b"\n" * (65 << 20)), r"a: it unpacks to more than 64 MiB, 200 times its size"),
    ],
    ids=["garbage", "cut gzip", "cut zstd", "garbage zstd", "two files", "cut zip", "bomb", "zip bomb", "zstd bomb"],
)
def test_archives_that_are_refused(tmp_path: Path, make: Callable[[], bytes], complaint: str) -> None:
    (tmp_path / "a").write_bytes(make())  # made here, because every process that collects the tests makes parameters
    with pytest.raises(InputError, match=complaint):
        read_trace(tmp_path / "a")


def test_without_zstandard_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(zstandard.compress(ROW.encode()))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(InputError, match=r"needs the package zstandard; .*pip install 'ifbbench\[zstd\]'"):
        read_trace(tmp_path / "a")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero")
@pytest.mark.parametrize("arguments", [["/dev/zero"], ["-"], ["chat", "--config", "/dev/zero"]])
def test_a_device_without_an_end_is_refused(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "ifbbench", "run", *arguments, "--device", "null"]
    with Path("/dev/zero").open("rb") as zero:
        ended = subprocess.run(command, stdin=zero, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "it is a device, which has no end" in ended.stderr
