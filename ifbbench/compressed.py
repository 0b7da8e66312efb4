"""Files that are gzip-compressed if their name ends in `.gz`, and plain otherwise; and lines of files.

Traces are also read from zstd and zip files, by their content."""

import errno
import io
import os
import sys
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from stat import S_ISBLK, S_ISCHR, S_ISDIR, S_ISREG
from typing import BinaryIO, Protocol, cast

from ifbbench.errors import InputError

SUFFIX = ".gz"
READ_SUFFIXES = (SUFFIX, ".zst", ".zip")
MAGIC = b"\x1f\x8b"
ZSTD_MAGIC, ZIP_MAGIC = b"\x28\xb5\x2f\xfd", b"PK\x03\x04"
# The most that a compressed file may unpack to: zlib packs a run of equal bytes a thousand times, recordings up to
# some fifty times. Small files may unpack to more.
MAX_RATIO = 200
ALWAYS_UNPACKED_BYTES = 64 << 20
# The major number of /dev/zero, /dev/random and others on Linux.
MEMORY_DEVICES = 1
STANDARD_INPUT = "-"
# The fastest level: lines of JSON are so repetitive that higher levels save little and take several times as long.
LEVEL = 1
GZIP = 16 + zlib.MAX_WBITS
BUFFER_BYTES = 1 << 16
PIECE_BYTES = 1 << 20
# A write to a compressed file replaces no more than this of the end that the flush before it wrote: zlib holds back
# one block, of at most 64 KiB.
REPLACED_BYTES = 1 << 17
MAX_LINE = 8 << 20
"""Bytes of the longest line that is read: a prompt of a million token ids fits."""


def is_compressed(path: Path) -> bool:
    """Whether `path` is the name of a compressed file."""
    return path.suffix.lower() == SUFFIX


def content_path(path: Path) -> Path:
    """`path` without the suffix of a compressed file: `a.jsonl` for `a.jsonl.gz`."""
    return path.with_suffix("") if path.suffix.lower() in READ_SUFFIXES else path


class DamagedFile(ValueError):
    """The content of a compressed file is not valid, or what should be a file is something else."""


class Unpacker(Protocol):
    """Unpacks one member of a gzip file or one frame of a zstd file."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, piece: bytes) -> bytes: ...


class GzipWriter:
    """A new gzip file. Equal content gives equal files: they contain neither name nor date.

    That also holds for any number of flushes: a flush writes the end of a copy of the compressed stream, so that the
    file is complete, and the next write replaces that end.
    """

    def __init__(self, path: Path, mode: str) -> None:
        self._file = path.open(mode + "b")
        self._packer = zlib.compressobj(LEVEL, wbits=GZIP)
        self._packed = bytearray()
        self._packed_end = 0

    def write(self, content: bytes | bytearray) -> None:
        """Add `content`."""
        self._packed += self._packer.compress(content)
        if len(self._packed) >= BUFFER_BYTES:
            self._put(b"")

    def flush(self) -> None:
        """Make everything written so far readable for other processes."""
        self._put(self._packer.copy().flush())

    def fileno(self) -> int:
        """The number of the open file."""
        return self._file.fileno()

    def close(self) -> None:
        """End the file."""
        self._put(self._packer.flush())
        self._file.close()

    def _put(self, end: bytes) -> None:
        """Write the packed bytes over the end that the last flush wrote, followed by `end`."""
        self._file.seek(self._packed_end)
        self._file.truncate()  # first: half of what follows, before the rest of the former end, is no valid stream
        self._file.write(self._packed)
        self._packed_end += len(self._packed)
        self._packed.clear()
        self._file.write(end)
        self._file.flush()


def open_to_write(path: Path, mode: str = "w") -> BinaryIO | GzipWriter:
    """A new file of bytes, buffered, and compressed if the name ends in `.gz`.

    mode: `w` replaces an existing file, `x` raises FileExistsError.

    OSError if the file cannot be written.
    """
    if is_compressed(path):
        return GzipWriter(path, mode)
    return cast(BinaryIO, path.open(mode + "b", buffering=BUFFER_BYTES))


def read_pieces(path: Path, size: int = BUFFER_BYTES) -> Iterator[bytes]:
    """The content of a file of a run in pieces, of `size` bytes if it is plain. EOFError after the last piece of a gzip
    file that was cut off, DamagedFile if it is not valid gzip or no file: a pipe without a writer would wait forever.
    """
    check_regular(path)
    with path.open("rb") as file:
        yield from _gunzipped(path, file) if is_compressed(path) else _pieces(file, size)


def check_regular(path: Path) -> None:
    """DamagedFile if `path` is a pipe, a socket or a device; OSError if it cannot be looked at, or is a directory."""
    mode = path.stat().st_mode
    if S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not S_ISREG(mode):
        raise DamagedFile("it is a pipe or a device, not a file")


def large_pieces(path: Path) -> Iterator[bytes]:
    """As `read_pieces`, in pieces of at least PIECE_BYTES: fewer, larger calls of a decoder."""
    gathered: list[bytes] = []
    size, pieces, cut = 0, read_pieces(path, PIECE_BYTES), None
    while True:
        try:
            piece = next(pieces, None)
        except EOFError as error:
            piece, cut = None, error
        if piece is not None:
            gathered.append(piece)
            size += len(piece)
        if gathered and (piece is None or size >= PIECE_BYTES):
            yield gathered[0] if len(gathered) == 1 else b"".join(gathered)
            gathered, size = [], 0
        if piece is None:
            break
    if cut:
        raise cut


def _pieces(file: BinaryIO, size: int = BUFFER_BYTES) -> Iterator[bytes]:
    return iter(partial(file.read, size), b"")


def _gunzipped(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """The content of the gzip file `path`, open as `file`, in pieces."""
    return _bounded(path, file, _unpacked(file, "gzip", lambda: zlib.decompressobj(GZIP), zlib.error))


def _unpacked(file: BinaryIO, kind: str, unpacker: Callable[[], Unpacker], error: type[Exception]) -> Iterator[bytes]:
    """The content of all members of a compressed file. Zeros behind a member are padding, as for gzip itself."""
    current: Unpacker | None = None
    has_ended = False
    try:
        for piece in _pieces(file):
            while piece := piece if current or not has_ended else piece.lstrip(b"\0"):
                current = current or unpacker()
                yield current.decompress(piece)
                piece = current.unused_data
                if current.eof:
                    current, has_ended = None, True
    except error as problem:
        what = f"not {kind} behind its first part" if has_ended else f"not a {kind} file"
        raise DamagedFile(f"{what} ({problem})") from problem
    if current is not None:
        raise EOFError(f"the {kind} file was cut off")


def _zstd_unpacked(path: Path, file: BinaryIO) -> Iterator[bytes]:
    try:
        from zstandard import ZstdDecompressor, ZstdError
    except ImportError:
        raise InputError(
            f"{path}: reading a zstd file needs the package zstandard; install it with "
            "`pip install 'ifbbench[zstd]'`, or unpack the file."
        ) from None
    unpackers = ZstdDecompressor(max_window_size=1 << 31)
    return _unpacked(file, "zstd", unpackers.decompressobj, ZstdError)


def _zip_unpacked(path: Path, file: BinaryIO) -> Iterator[bytes]:
    from zipfile import BadZipFile, ZipFile

    try:
        with ZipFile(file) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
            if len(names) != 1:
                raise InputError(
                    f"{path}: the zip file holds {len(names)} files ({', '.join(names)[:200] or 'none'}); "
                    "expected one. Give a zip file of one trace, or unpack it."
                )
            with archive.open(names[0]) as content:
                yield from iter(partial(content.read, BUFFER_BYTES), b"")
    except (BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:  # RuntimeError: encrypted
        raise DamagedFile(f"not a zip file that can be read ({error})") from error


def _bounded(path: Path, file: BinaryIO, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """`pieces`, the content of the compressed `file`. InputError once they are larger than any recording that packs
    into so few bytes, so that a small file fills neither disk nor time."""
    most = max(MAX_RATIO * os.fstat(file.fileno()).st_size, ALWAYS_UNPACKED_BYTES)
    total = 0
    for piece in pieces:
        total += len(piece)
        if total > most:
            raise InputError(
                f"{path}: it unpacks to more than {most >> 20} MiB, {MAX_RATIO} times its size, which no "
                "recording does. If it is one, unpack it."
            )
        yield piece


# Copies of what can be read only once: by the stream of standard input, and by device, inode and time of the last write
# of a pipe. A command may read its trace once for each seed and its config file once for each kind of key.
_copies: dict[object, BinaryIO] = {}


def open_again(path: Path) -> BinaryIO:
    """The bytes of `path`, as often as it is opened, as a seekable file. `-` is standard input.

    Standard input and pipes are read once, to their end, into an unnamed temporary file that is kept until the process
    ends; processes that are forked from it have it too. OSError if it cannot be read."""
    if str(path) != STANDARD_INPUT and S_ISREG(path.stat().st_mode):
        return path.open("rb")
    _check_that_it_ends(path)
    if (key := _content_key(path)) not in _copies:
        if str(path) == STANDARD_INPUT:
            copy = _copied(iter(partial(sys.stdin.buffer.read, BUFFER_BYTES), b""))
        else:
            file = path.open("rb")
            if file.seekable():
                return file
            with file:
                copy = _copied(iter(partial(file.read, BUFFER_BYTES), b""))
        _copies[key := _content_key(path)] = copy  # the pipe was written to since the first look
    return Path(f"/proc/self/fd/{_copies[key].fileno()}").open("rb")  # with a position of its own


def _check_that_it_ends(path: Path) -> None:
    """OSError if `path` is a disk, or a device without an end such as /dev/zero."""
    try:
        status = os.fstat(sys.stdin.fileno()) if str(path) == STANDARD_INPUT and sys.stdin else path.stat()
    except (OSError, ValueError):  # not of the operating system, or closed: reading tells
        return
    is_memory = S_ISCHR(status.st_mode) and os.major(status.st_rdev) == MEMORY_DEVICES
    if S_ISBLK(status.st_mode) or (is_memory and not os.path.samestat(status, os.stat(os.devnull))):
        raise OSError(errno.ENODEV, "it is a device, which has no end")


def _content_key(path: Path) -> object:
    """The key of a copy in `_copies`."""
    if str(path) != STANDARD_INPUT:
        status = path.stat()
        return status.st_dev, status.st_ino, status.st_mtime_ns
    if sys.stdin is None:
        raise OSError(errno.EBADF, "standard input is closed")
    return sys.stdin.buffer


def is_read_once(path: Path) -> bool:
    """Whether `path` is standard input, a pipe or a device, which another process that is started does not have."""
    return str(path) == STANDARD_INPUT or (path.exists() and not path.is_file() and not path.is_dir())


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a file, or of a pipe, as often as it is asked for. OSError if it cannot be read, UnicodeDecodeError
    if it is not text."""
    with open_again(path) as file, io.TextIOWrapper(file, encoding=encoding) as text:
        return text.read()


def open_to_read(path: Path, accept_cut: bool = False, on_cut: Callable[[], None] | None = None) -> BinaryIO:
    """The content of `path` as a seekable file, see `open_again`; content that begins like gzip, zstd or zip is
    unpacked. A zip file holds one file.

    For a compressed file it is an unnamed temporary file, deleted when closed.

    on_cut: with `accept_cut`, called if it was cut off.

    OSError if it cannot be read, InputError if it needs a package or unpacks to too much, DamagedFile if it is not
    valid, EOFError if it was cut off and `accept_cut` is not set.
    """
    file = open_again(path)
    start = file.read(4)
    file.seek(0)
    if is_compressed(path) or start.startswith(MAGIC):
        unpacked = _gunzipped
    elif start == ZSTD_MAGIC:
        unpacked = _zstd_unpacked
    elif start == ZIP_MAGIC:
        unpacked = _zip_unpacked
    else:
        return file
    with file:
        return _copied(_bounded(path, file, unpacked(path, file)), accept_cut, on_cut)


def _copied(pieces: Iterator[bytes], accept_cut: bool = False, on_cut: Callable[[], None] | None = None) -> BinaryIO:
    """A temporary file of `pieces`."""
    from tempfile import TemporaryFile  # imported here: a plain trace needs none

    copy = TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        for piece in pieces:
            copy.write(piece)
    except EOFError:
        if not accept_cut:
            copy.close()
            raise
        if on_cut is not None:
            on_cut()
    except BaseException:
        copy.close()
        raise
    copy.seek(0)
    return cast(BinaryIO, copy)


class GrowingFile:
    """A file of lines that another process is writing, compressed as by GzipWriter or not. It need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unpacker = zlib.decompressobj(GZIP) if is_compressed(path) else None
        self._position = 0
        # Content after the last complete line; and how much content behind `_position` was given already.
        self._rest, self._ahead = b"", 0

    def new_lines(self) -> Iterator[bytes]:
        """The complete lines since the last call, in pieces of several lines. DamagedFile if it cannot be unpacked
        or is no file."""
        if not self.path.exists():
            return
        check_regular(self.path)
        with self.path.open("rb") as file:
            file.seek(self._position)
            size = self.path.stat().st_size - (REPLACED_BYTES if self._unpacker else 0)
            while piece := file.read(max(min(size - self._position, BUFFER_BYTES), 0)):
                self._position += len(piece)
                try:
                    content = self._unpacker.decompress(piece) if self._unpacker else piece
                except zlib.error as error:
                    raise DamagedFile(str(error)) from error
                known = min(self._ahead, len(content))
                self._ahead -= known
                lines, newline, rest = (self._rest + content[known:]).rpartition(b"\n")
                self._rest = rest
                yield lines + newline
            if self._unpacker is None:
                return
            try:
                content = self._unpacker.copy().decompress(file.read())
            except zlib.error:  # the end is being replaced; the next call reads it
                return
        lines, newline, _ = (self._rest + content[self._ahead :]).rpartition(b"\n")
        if newline:
            self._ahead += len(lines) + 1 - len(self._rest)
            self._rest = b""
            yield lines + newline


def bounded_lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes | None]]:
    """(number from 1, first byte, content) of each line of a file, without a byte order mark; None for the content of
    a line of more than MAX_LINE bytes."""
    file.seek(0)
    end, number = 0, 0
    line: bytes | None
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE), b""), start=1):
        start, end = end, end + len(line)
        if len(line) == MAX_LINE and not line.endswith(b"\n"):
            # The rest of the line is read in pieces, and the numbers go on behind it.
            while (rest := file.readline(MAX_LINE)) and not rest.endswith(b"\n"):
                pass
            end, line = file.tell(), None
        elif start == 0 and line.startswith(BOM_UTF8):
            start, line = len(BOM_UTF8), line.removeprefix(BOM_UTF8)
        yield number, start, line
