"""Compiles the kernels in cpu_kernels.c with the C compiler of the machine, once, and keeps the result."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("cpu_kernels.c")
# Infinities and NaNs keep their meaning; otherwise sums may be reordered, so that they can be vectorised.
COMPILE = ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp", "-fPIC", "-c")
# Apart, and without -ffast-math: a library linked with it makes the whole process round subnormal numbers to zero.
LINK = ("-fopenmp", "-shared")
COMPILERS = ("cc", "gcc", "clang")

_log = logging.getLogger("ifbbench")
_INT, _POINTER, _FLOAT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
ARGUMENTS = {
    "rms_norm": [_POINTER] * 3 + [_INT] * 2 + [_FLOAT],
    "swiglu": [_POINTER] * 2 + [_INT] * 2,
    "rotate": [_POINTER] * 4 + [_INT] * 4,
    "write": [_POINTER] * 5 + [_INT] * 3,
    "attend": [_POINTER] * 7 + [_INT] * 7,
}


@cache
def load_cpu_kernels() -> ctypes.CDLL | None:
    """The compiled kernels. None, with a line in the log, where there is no C compiler or it fails; PyTorch's own
    operations then do the same, more slowly."""
    compiler = os.environ.get("CC") or next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        _log.info("no C compiler: the CPU runs without kernels of its own, and attention is slower")
        return None
    try:
        library = _cache_directory() / f"cpu_kernels-{_fingerprint(compiler)}.so"
        if not library.exists():
            _compile(compiler, library)
        kernels = ctypes.CDLL(str(library))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home directory
        _log.info("the CPU runs without kernels of its own, for %s failed: %s", compiler, error)
        return None
    for name, arguments in ARGUMENTS.items():
        for kind in ("float", "bf16"):
            getattr(kernels, f"{name}_{kind}").argtypes = arguments
    return kernels


def _compile(compiler: str, library: Path) -> None:
    """Beside the library first, then moved: another process may be at it too."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        compiled, linked = Path(directory) / "kernels.o", Path(directory) / library.name
        for command in (
            [*compiler.split(), *COMPILE, "-o", str(compiled), str(SOURCE)],
            [*compiler.split(), *LINK, "-o", str(linked), str(compiled), "-lm"],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        linked.replace(library)


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ifbbench"


def _fingerprint(compiler: str) -> str:
    """Of all that the result depends on: the source, the compiler, how it is called, and the processor."""
    facts = [SOURCE.read_text(encoding="utf-8"), compiler, *COMPILE, *LINK, platform.machine(), _processor_features()]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _processor_features() -> str:
    """What the processor can do, in Linux's words; nothing elsewhere."""
    description = Path("/proc/cpuinfo")
    lines = description.read_text(encoding="utf-8").splitlines() if description.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
