"""Files that are compressed where their name says so: `.gz` is gzip, anything else is as it is."""

import io
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

SUFFIX = ".gz"
# The quickest: lines of JSON repeat so much that higher levels save little and cost several times as much.
LEVEL = 1
GZIP = 16 + zlib.MAX_WBITS
BUFFER_BYTES = 1 << 16


def is_compressed(path: Path) -> bool:
    """Whether the name of `path` says that it is compressed."""
    return path.suffix.lower() == SUFFIX


def content_path(path: Path) -> Path:
    """`path` as it would be called if it were not compressed: `a.jsonl` of `a.jsonl.gz`."""
    return path.with_suffix("") if is_compressed(path) else path


class DamagedFile(ValueError):
    """A compressed file that does not hold what was once written to it."""


class Writer:
    """Bytes into a new file, gathered into large pieces.

    mode: `w` replaces a file that is there, `x` refuses to (FileExistsError). OSError if it cannot be written.
    """

    def __init__(self, path: Path, mode: str = "w") -> None:
        # Open for as long as the writer is; whoever made it closes it.
        self._file = cast(io.BufferedWriter, path.open(mode + "b", buffering=BUFFER_BYTES))

    def write(self, content: bytes) -> None:
        """Add `content`."""
        self._file.write(content)

    def flush(self) -> None:
        """Make all that was written so far readable by others."""
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        self._file.close()


class _GzipWriter(Writer):
    """Compresses what is written. Equal bytes make equal files, whatever they are called and whenever they were made.

    That holds however often they are flushed, too: a flush ends a copy of the compressed stream, so that the file is a
    whole one, and what is written next takes the place of that end.
    """

    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(path, mode)
        self._packer = zlib.compressobj(LEVEL, wbits=GZIP)
        self._packed = bytearray()
        self._packed_end = 0

    def write(self, content: bytes) -> None:
        self._packed += self._packer.compress(content)
        if len(self._packed) >= BUFFER_BYTES:
            self._put(b"")

    def flush(self) -> None:
        self._put(self._packer.copy().flush())

    def close(self) -> None:
        self._put(self._packer.flush())
        self._file.close()

    def _put(self, end: bytes) -> None:
        """Write what is packed over the end of the last flush, and `end` behind it."""
        self._file.seek(self._packed_end)
        self._file.write(self._packed)
        self._packed_end += len(self._packed)
        self._packed.clear()
        self._file.write(end)
        self._file.truncate()
        self._file.flush()


def open_to_write(path: Path, mode: str = "w") -> Writer:
    """A writer of `path`, which compresses where the name says so; see Writer."""
    return _GzipWriter(path, mode) if is_compressed(path) else Writer(path, mode)


def read_pieces(path: Path) -> Iterator[bytes]:
    """The content of `path` in pieces. EOFError behind the last piece of a gzip file that was cut off, DamagedFile
    where it is none."""
    with path.open("rb") as file:
        pieces = iter(lambda: file.read(BUFFER_BYTES), b"")
        yield from _unpacked(pieces) if is_compressed(path) else pieces


def _unpacked(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """What gzip members hold, one behind the other."""
    unpacker = None
    try:
        for piece in pieces:
            while piece:
                unpacker = unpacker or zlib.decompressobj(GZIP)
                yield unpacker.decompress(piece)
                piece = unpacker.unused_data
                if unpacker.eof:
                    unpacker = None
    except zlib.error as error:
        raise DamagedFile(f"not a gzip file ({error})") from error
    if unpacker is not None:
        raise EOFError("the gzip file was cut off")


def open_to_read(path: Path, accept_cut: bool = False) -> BinaryIO:
    """The content of `path` as a file that can be read in any order; that of a compressed one lies in an unnamed file,
    gone when it is closed.

    OSError if it cannot be read, DamagedFile if it is none of its kind, EOFError if it was cut off and `accept_cut` is
    not set.
    """
    if not is_compressed(path):
        return path.open("rb")
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115 - handed to the caller, who closes it
    try:
        for piece in read_pieces(path):
            unpacked.write(piece)
    except EOFError:
        if not accept_cut:
            unpacked.close()
            raise
    except BaseException:
        unpacked.close()
        raise
    unpacked.seek(0)
    return cast(BinaryIO, unpacked)
