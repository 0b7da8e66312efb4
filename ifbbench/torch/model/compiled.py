"""The C kernels of csrc/: compiled with the machine's compiler on first use, cached on disk, and loaded.

A cached library is loaded only if it is whole and of this user: it ends with a checksum of its content, and it and its
directory belong to the user and no other user can write to them. Where the user's cache directory cannot be used, a
directory in the system's temporary one replaces it, also for the kernels that Triton compiles.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).with_name("csrc")
# Each kernel is compiled for each of these data types: suffix of its name, and compiler options.
KINDS = {torch.float32: ("float", ()), torch.bfloat16: ("bf16", ("-DBF16",))}
# Sums may be reordered, so that they can be vectorised; infinities and NaNs keep their meaning.
COMPILE = ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp", "-fPIC", "-c")
# Linked separately, without -ffast-math: a library linked with it makes the whole process flush subnormal numbers.
LINK = ("-fopenmp", "-shared")
COMPILERS = ("cc", "gcc", "clang")
CHECKSUM_BYTES = 32
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

_log = logging.getLogger("ifbbench")
_INT, _POINTER, _FLOAT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
ARGUMENTS = {
    "rms_norm": [_POINTER] * 3 + [_INT] * 2 + [_FLOAT],
    "swiglu": [_POINTER] * 2 + [_INT] * 2,
    "rotate": [_POINTER] * 4 + [_INT] * 4,
    "write": [_POINTER] * 5 + [_INT] * 3,
    "attend": [_POINTER] * 8 + [_INT] * 7,
    "packed_words": [_INT] * 2,
    "pack": [_POINTER] * 2 + [_INT] * 2,
    "multiply": [_POINTER] * 4 + [_INT] * 3,
}


def load_cpu_kernels() -> ctypes.CDLL | None:
    """The compiled kernels; None where there is no C compiler or it fails. PyTorch's operations then replace them, more
    slowly."""
    found = _kernels()
    return found if isinstance(found, ctypes.CDLL) else None


def missing_kernels() -> str | None:
    """Why there are no compiled kernels; None if there are."""
    found = _kernels()
    return found if isinstance(found, str) else None


@cache
def _kernels() -> ctypes.CDLL | str:
    found = find_kernels()
    if isinstance(found, str):
        _log.info("the CPU uses PyTorch's operations, which are slower: %s", found)
    return found


def find_kernels() -> ctypes.CDLL | str:
    """The kernels, from the cache or compiled; or the reason why there are none."""
    compiler = os.environ.get("CC") or next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        return "there is no C compiler"
    try:
        return _load(_cached(compiler, *_cache_directory()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"{compiler} failed: {error}"


def keep_triton_kernels() -> None:
    """Let Triton keep its kernels where they can be written, and report the first that it compiles.

    Triton fails if it cannot write to its cache, which is below the home directory unless TRITON_CACHE_DIR is set."""
    import triton

    preferred, reason = Path(triton.knobs.cache.dir), ""
    try:
        preferred.mkdir(parents=True, exist_ok=True)
        if not os.access(preferred, os.W_OK):
            raise PermissionError("it cannot be written")
    except OSError as error:
        reason = f"{preferred} cannot be used ({error.strerror or error})"
        os.environ["TRITON_CACHE_DIR"] = str(_temporary_directory() / "triton")
    if triton.knobs.compilation.listener is None:
        triton.knobs.compilation.listener = _report_first_compilation(Path(triton.knobs.cache.dir), reason)


def _report_first_compilation(directory: Path, reason: str) -> Callable[..., None]:
    """A listener of Triton's compilations: called for each kernel that is loaded, from the cache or compiled."""
    is_reported = False

    def report(*, cache_hit: bool, **_: Any) -> None:
        nonlocal is_reported
        if not cache_hit and not is_reported:
            is_reported = True
            _report_compilation("GPU are compiled by Triton", directory, reason)

    return report


def _report_compilation(what: str, directory: Path, reason: str) -> None:
    """Log where kernels are compiled to. reason: why not to the user's cache; empty if to that."""
    because = f", because {reason}" if reason else ""
    _log.warning("The kernels for this %s into %s%s; later runs load them from there.", what, directory, because)


def _load(library: Path) -> ctypes.CDLL:
    kernels = ctypes.CDLL(str(library))
    for name, arguments in ARGUMENTS.items():
        for kind, _ in KINDS.values():
            function = getattr(kernels, f"{name}_{kind}")
            function.argtypes = arguments
            function.restype = _INT if name == "packed_words" else ctypes.c_int
    return kernels


def _cache_directory() -> tuple[Path, str]:
    """The directory of cached libraries: the user's; or a temporary one, and the reason for that."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # By the specification of base directories, a relative path is ignored.
        directory = (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "ifbbench"
    except RuntimeError:
        return _temporary_directory(), "there is no home directory"
    try:
        _make_private(directory)
        return directory, ""
    except OSError as error:
        return _temporary_directory(), f"{directory} cannot be used ({error.strerror or error})"


def _temporary_directory() -> Path:
    """A directory of this user in the system's temporary one, the same for all processes. OSError if another user has
    taken its name."""
    directory = Path(tempfile.gettempdir()) / f"ifbbench-{os.geteuid()}"
    if directory.is_symlink():
        raise PermissionError(f"{directory} is a link")
    try:
        _make_private(directory)
    except PermissionError as error:
        raise PermissionError(f"{directory} cannot be used: {error}") from error
    return directory


def _make_private(directory: Path) -> None:
    """Make `directory` with its parents, or check that it can be written, and by this user alone. OSError if not."""
    directory.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    about = directory.stat()
    if about.st_uid != os.geteuid():
        raise PermissionError("it belongs to another user")
    if not os.access(directory, os.W_OK):
        raise PermissionError("it cannot be written")
    if about.st_mode & OTHERS_MAY_WRITE:  # what is in it may be of anyone
        directory.chmod(stat.S_IRWXU)
        shutil.rmtree(directory / "triton", ignore_errors=True)
        for library in directory.glob("*.so"):
            library.unlink()


def _cached(compiler: str, directory: Path, reason: str) -> Path:
    """The library in `directory`; compiled if there is none that can be trusted. reason: as of `_cache_directory`."""
    library = directory / f"cpu_kernels-{_fingerprint(compiler)}.so"
    if not _is_trusted(library):
        _report_compilation(f"CPU are compiled with {compiler}", directory, reason)
        _compile(compiler.split(), library)
    return library


def _is_trusted(library: Path) -> bool:
    """Whether a file is a library that this user wrote, and whole."""
    try:
        about = library.lstat()
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & OTHERS_MAY_WRITE:
            return False
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    return content[-CHECKSUM_BYTES:] == _checksum(content[:-CHECKSUM_BYTES])


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _compile(compiler: list[str], library: Path) -> None:
    """Compile in a temporary directory and move the result: other processes may compile at the same time."""
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        commands = {
            str(Path(directory) / f"{source.stem}_{kind}.o"): [*compiler, *COMPILE, *options, str(source), "-o"]
            for source in sorted(SOURCES.glob("*.c"))
            for kind, options in KINDS.values()
        }
        run = partial(subprocess.run, check=True, capture_output=True, timeout=600)
        with ThreadPoolExecutor() as threads:
            list(threads.map(run, [[*command, compiled] for compiled, command in commands.items()]))
        linked = Path(directory) / library.name
        run([*compiler, *LINK, "-o", str(linked), *commands, "-lm"])
        with linked.open("ab") as file:  # loaders ignore what follows the sections
            file.write(_checksum(linked.read_bytes()))
        linked.chmod(stat.S_IRWXU)
        linked.replace(library)


def _fingerprint(compiler: str) -> str:
    """A digest of everything the result depends on: sources, compiler, options and processor."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(SOURCES.iterdir())]
    facts = [*sources, compiler, *COMPILE, *LINK, platform.machine(), processor_features()]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def processor_features() -> str:
    """The processor's feature flags from /proc/cpuinfo; empty on other systems than Linux."""
    description = Path("/proc/cpuinfo")
    lines = description.read_text(encoding="utf-8").splitlines() if description.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
