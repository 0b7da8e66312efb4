"""Files that are compressed where their name says so."""

import gzip
import random
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ifbbench.compressed import (
    MAGIC,
    REPLACED_BYTES,
    DamagedFile,
    GrowingFile,
    content_path,
    open_to_read,
    open_to_write,
    read_pieces,
)

NAMES = ("some.jsonl", "some.jsonl.gz")
TEXT = b"".join(b'{"line":%d}\n' % number for number in range(20_000))


def write(path: Path, *parts: bytes) -> Path:
    writer = open_to_write(path)
    for part in parts:
        writer.write(part)
    writer.close()
    return path


def read(path: Path) -> bytes:
    return b"".join(read_pieces(path))


@given(parts=st.lists(st.binary(max_size=50), max_size=5))
@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, name: str, parts: list[bytes]) -> None:
    path = write(tmp_path_factory.mktemp("files") / name, *parts)
    assert read(path) == b"".join(parts)
    assume(not b"".join(parts).startswith(MAGIC))  # a plain file that begins like gzip is read as one
    with open_to_read(path) as file:
        assert file.read() == b"".join(parts)


def test_a_compressed_file_is_gzip_and_smaller_and_says_nothing_of_when_and_where(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.gz", TEXT), write(tmp_path / "b.gz", TEXT)
    assert gzip.decompress(first.read_bytes()) == TEXT
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes()[3:8] == bytes(5)  # no name, no time
    assert len(first.read_bytes()) < len(TEXT) / 4


@pytest.mark.parametrize("name", NAMES)
def test_what_was_flushed_can_be_read_before_the_file_ends(tmp_path: Path, name: str) -> None:
    writer = open_to_write(tmp_path / name)
    for line in (b"one\n" * 500, b"two\n", b"three\n"):
        writer.write(line)
        writer.flush()
        before = read(tmp_path / name)
        assert before.endswith(line)
        writer.write(b"four\n")
        assert read(tmp_path / name) == before
    writer.close()
    assert read(tmp_path / name) == b"one\n" * 500 + b"four\ntwo\nfour\nthree\nfour\n"


@given(pieces=st.lists(st.tuples(st.binary(max_size=30), st.integers(1, 20_000), st.booleans()), max_size=6))
def test_flushing_leaves_no_trace(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[bytes, int, bool]]
) -> None:
    path = tmp_path_factory.mktemp("files") / "some.gz"
    writer = open_to_write(path)
    for piece, times, flushes in pieces:
        writer.write(piece * times)
        if flushes:
            writer.flush()
    writer.close()
    never_flushed = write(path.with_name("other.gz"), *(piece * times for piece, times, _ in pieces))
    assert path.read_bytes() == never_flushed.read_bytes()


def test_what_was_flushed_stays_there_while_more_is_written(tmp_path: Path) -> None:
    path, dice = tmp_path / "some.gz", random.Random(1)
    writer = open_to_write(path)
    written = flushed = 0
    for number in range(600):
        line = dice.randbytes(4_000)
        writer.write(line)
        written += len(line)
        if number % 150 == 20:
            writer.flush()
            flushed = written
        with open_to_read(path, accept_cut=True) as file:
            assert len(file.read()) >= flushed
    assert path.stat().st_size > 2**20
    writer.close()


@pytest.mark.parametrize("name", NAMES)
def test_lines_are_read_while_the_file_grows(tmp_path: Path, name: str) -> None:
    """Each complete line once and in order, whatever of a compressed file's end a later write replaces."""
    draw, growing = random.Random(3), GrowingFile(tmp_path / name)
    assert b"".join(growing.new_lines()) == b""
    writer, written, seen = open_to_write(tmp_path / name), b"", b""
    for number in range(40):
        length = draw.choice((10, 1_000, 100_000))
        part = draw.choice((draw.randbytes(length).hex().encode(), b'{"line":%d}' % number * (length // 10)))
        part += draw.choice((b"\n", b"\n", b""))
        writer.write(part)
        written += part
        if number % 3 == 0:
            writer.flush()
            seen += b"".join(growing.new_lines())
            assert seen == written[: written.rfind(b"\n") + 1]
    writer.close()
    assert seen + b"".join(growing.new_lines()) == written[: written.rfind(b"\n") + 1]
    assert (tmp_path / name).stat().st_size > 4 * REPLACED_BYTES


def test_a_file_that_was_cut_off_gives_what_is_left(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gz", TEXT)
    whole = path.read_bytes()
    for length in (5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(EOFError):
            open_to_read(path)
        with open_to_read(path, accept_cut=True) as file:
            left = file.read()
        assert TEXT.startswith(left)
        assert (len(left) > len(TEXT) / 4) == (length > 5)


def test_several_members_and_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"one") + gzip.compress(b"") + gzip.compress(b"two"))
    assert read(path) == b"onetwo"
    path.write_bytes(b"")
    assert read(path) == b""


def test_a_file_that_is_no_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(TEXT)
    with pytest.raises(DamagedFile, match="not a gzip file"):
        read(path)


def test_an_existing_file_is_kept_if_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gz", TEXT)
    with pytest.raises(FileExistsError):
        open_to_write(path, "x")
    assert read(path) == TEXT


def test_names_of_contents() -> None:
    assert content_path(Path("x/a.jsonl.gz")) == Path("x/a.jsonl")
    assert content_path(Path("x/a.b.csv")) == Path("x/a.b.csv")
