"""The C kernels of csrc/: compiled with the machine's compiler on first use, cached on disk, and loaded.

A cached library is loaded only if it is whole and of this user: it ends with a checksum of its content, and it and its
directory belong to the user and no other user can write to them.
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
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

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
        if (directory := _cache_directory()) is not None:
            return _load(_cached(compiler, directory))
        with tempfile.TemporaryDirectory() as private:
            return _load(_cached(compiler, Path(private)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"{compiler} failed: {error}"


def _load(library: Path) -> ctypes.CDLL:
    kernels = ctypes.CDLL(str(library))
    for name, arguments in ARGUMENTS.items():
        for kind, _ in KINDS.values():
            function = getattr(kernels, f"{name}_{kind}")
            function.argtypes = arguments
            function.restype = _INT if name == "packed_words" else ctypes.c_int
    return kernels


def _cache_directory() -> Path | None:
    """The directory of cached libraries. None, so that they are compiled for each process, if it cannot be written or
    belongs to another user."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # By the specification of base directories, a relative path is ignored.
        directory = (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "ifbbench"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = directory.stat()
        if about.st_uid != os.geteuid():
            problem = "it belongs to another user"
        elif not os.access(directory, os.W_OK):
            problem = "it cannot be written"
        else:
            if about.st_mode & OTHERS_MAY_WRITE:  # what is in it may be of anyone
                directory.chmod(stat.S_IRWXU)
                for library in directory.glob("*.so"):
                    library.unlink()
            return directory
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        _log.info("kernels are compiled for this process only: %s", error)
        return None
    _log.info("kernels are compiled for this process only, without the cache %s: %s", directory, problem)
    return None


def _cached(compiler: str, directory: Path) -> Path:
    """The library in `directory`; compiled if there is none that can be trusted."""
    library = directory / f"cpu_kernels-{_fingerprint(compiler)}.so"
    if not _is_trusted(library):
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
            for source in sorted(SOURCES.glob("*.c")) for kind, options in KINDS.values()
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
