"""Writing files: whole files in one step, the check of a path before the work, and directories with one writer."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import BinaryIO

from ifbbench.compressed import SUFFIX as COMPRESSED
from ifbbench.compressed import GzipWriter, is_compressed, open_to_write
from ifbbench.errors import IfbbenchError, InputError

# Ends the names of files and directories that are not complete; they begin with a dot.
PART = ".part"
# Errors of the device and not of the path: the same command works once there is room.
DEVICE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE})


# The errors of file systems without hard links, and without locks.
NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS})
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF})
# The files that a command reads: by device and inode, as the user names them.
_inputs: ContextVar[dict[tuple[int, int], str] | None] = ContextVar("inputs", default=None)


class OutputError(IfbbenchError):
    """An output that could not be written to its end, such as on a full disk. What was there before is kept."""


class TakenError(InputError):
    """A directory that holds results, or that another process writes to."""


def is_part(path: Path) -> bool:
    """Whether this is the name of something that was not completed."""
    return path.name.startswith(".") and PART in path.name


def part_beside(path: Path) -> Path:
    """A new name beside `path`, for what will be renamed to it; with the same compression."""
    return path.with_name(f".{os.urandom(4).hex()}{PART}{COMPRESSED if is_compressed(path) else ''}")


def replace_file(path: Path, content: bytes | str) -> None:
    """Write a whole file in one step, over an existing one. Errors are those of `new_file`."""
    with new_file(path, overwrite=True) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def new_file(path: Path, overwrite: bool = False) -> Iterator[BinaryIO | GzipWriter]:
    """A file that is at `path` when the block has ended without an error, and compressed if its name ends in .gz.

    Until then the content goes to a temporary file beside it, so that no reader and no kill finds half of it. Missing
    directories are made. A link is followed, and what is not a file (/dev/null, a pipe) is written to directly.
    InputError if the file exists and `overwrite` is off, or the path is bad; OutputError if the device is full.
    """
    with writing(path):
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            with closing(open_to_write(target)) as file:
                yield file
            return
        if target.exists() and not overwrite:
            raise _exists(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = part_beside(target)
        try:
            with closing(open_to_write(part, "x")) as file:
                yield file
            if overwrite:
                part.replace(target)
            else:
                _rename_to_new(part, target)
        except FileExistsError:
            raise _exists(path) from None
        finally:
            part.unlink(missing_ok=True)


def _exists(path: Path) -> InputError:
    return InputError(f"{path} already exists. Give another name, or --overwrite to replace it.")


def _rename_to_new(part: Path, target: Path) -> None:
    """Rename a file unless `target` exists (FileExistsError), which a rename would replace."""
    try:
        os.link(part, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        part.replace(target)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of the operating system in the block are those of writing to `path`."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> IfbbenchError:
    """The error to raise for `error`."""
    problem = f"{path}: cannot be written ({error.strerror or error})"
    if error.errno in DEVICE_ERRORS:
        return OutputError(f"{problem}. What was written before is kept; free some space and repeat the command.")
    return InputError(f"{problem}; give a path that you can write to.")


def restored(path: Path, handle: int) -> bool:
    """Whether `path` was removed since the file `handle` was opened there; its content is then written there again.
    OutputError if another file has taken its place, which is kept."""
    with writing(path):
        try:
            if os.path.samestat(os.stat(path), os.fstat(handle)):
                return False
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(f"/proc/self/fd/{handle}", path)
            return True
    raise OutputError(f"{path}: was removed, and another file has taken its place; what was written to it is lost.")


def removed(directory: Path) -> OutputError:
    """The error for a directory of results that was removed, or files of it, and has been written again."""
    return OutputError(
        f"{directory}: was removed, or files in it, before the results were complete. They are written "
        f"there again; `ifbbench report {directory}` prints them."
    )


def lost(directory: Path) -> OutputError:
    """The error for a directory of results that was removed, or files of it, when they were complete."""
    return OutputError(
        f"{directory}: was removed, or files in it, after the run had ended. What is printed is all that is left of "
        "it; run again to have the files."
    )


@contextmanager
def protecting_inputs() -> Iterator[None]:
    """Until the end of the block, outputs do not replace the files that `protect` is called with."""
    token = _inputs.set({})
    try:
        yield
    finally:
        _inputs.reset(token)


def protect(path: Path, name: str) -> None:
    """Within `protecting_inputs`: refuse to replace the file at `path`, if there is one. name: for messages."""
    protected = _inputs.get()
    if protected is not None and (identity := _identity(path)) is not None:
        protected.setdefault(identity, name)


def check_not_input(path: Path, option: str) -> None:
    """InputError, naming `option`, if `path` is a protected file, by this name or another one (links)."""
    if (protected := _inputs.get()) and (name := protected.get(_identity(path) or (-1, -1))):
        raise InputError(f"{option} {path}: this would replace {name}, which the command reads; give another output.")


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None for what is no file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return (status.st_dev, status.st_ino) if S_ISREG(status.st_mode) else None


def check_new_file(path: Path, option: str, overwrite: bool) -> None:
    """InputError, naming `option`, if `new_file` would refuse `path`: it is a directory, exists without `overwrite`, is
    below something that is no directory, cannot be written, or is no valid name; and if the command reads it."""
    check_not_input(path, option)
    problem = _problem(path, expects_file=True)
    if problem is None and path.is_file() and not overwrite:
        raise InputError(f"{option} {path}: already exists; add --overwrite, or give another file.")
    if problem is not None:
        raise InputError(f"{option} {path}: cannot be written ({problem}); give another file.")


def check_new_directory(path: Path, option: str, files: Iterable[str] = ()) -> None:
    """InputError, naming `option`, if no file could be written into `path`, which need not exist, or not one of
    `files` in it, which may be replaced."""
    if (problem := _problem(path, expects_file=False)) is not None:
        raise InputError(f"{option} {path}: {problem}; give a directory that you can write to.")
    for name in files:
        check_new_file(path / name, option, overwrite=True)


def _problem(path: Path, expects_file: bool) -> str | None:
    """Why nothing can be written to `path`; None if nothing speaks against it."""
    try:
        is_directory = S_ISDIR(os.stat(path).st_mode)  # one look: another process may create it at any moment
    except FileNotFoundError:
        return _no_access(next(one for one in path.absolute().parents if os.path.exists(one)))
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # characters that no name has
        return str(error)
    if is_directory == expects_file:
        return "is a directory" if is_directory else "is a file"
    return _no_access(path)


def _no_access(path: Path) -> str | None:
    needed = os.W_OK | os.X_OK if path.is_dir() else os.W_OK
    return None if os.access(path, needed) else f"no permission to write to {path}"


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """Be the only process in such a block for `directory`, which exists. InputError if there is one already.

    The lock is that of the open directory, so that it ends with the process and stays with a directory that is
    renamed. File systems without locks are used without one.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TakenError(
                f"{directory}: another process is writing there; wait for its end, or give another directory."
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield
    finally:
        os.close(handle)
