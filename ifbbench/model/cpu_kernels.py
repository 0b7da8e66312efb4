"""The C kernels in csrc/, compiled with the machine's compiler on first use and cached on disk."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
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


@cache
def load_cpu_kernels() -> ctypes.CDLL | None:
    """The compiled kernels; None, with a line in the log, where there is no C compiler or it fails. PyTorch's
    operations then replace them, more slowly."""
    compiler = os.environ.get("CC") or next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        _log.info("no C compiler: the CPU uses PyTorch's operations, which are slower")
        return None
    try:
        library = _cache_directory() / f"cpu_kernels-{_fingerprint(compiler)}.so"
        if not library.exists():
            _compile(compiler.split(), library)
        kernels = ctypes.CDLL(str(library))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home directory
        _log.info("the CPU uses PyTorch's operations, which are slower, because %s failed: %s", compiler, error)
        return None
    for name, arguments in ARGUMENTS.items():
        for kind, _ in KINDS.values():
            function = getattr(kernels, f"{name}_{kind}")
            function.argtypes = arguments
            function.restype = _INT if name == "packed_words" else ctypes.c_int
    return kernels


def _compile(compiler: list[str], library: Path) -> None:
    """Compile in a temporary directory and move the result: other processes may compile at the same time."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        commands = {
            str(Path(directory) / f"{source.stem}_{kind}.o"): [*compiler, *COMPILE, *options, str(source), "-o"]
            for source in sorted(SOURCES.glob("*.c")) for kind, options in KINDS.values()
        }
        with ThreadPoolExecutor() as threads:
            list(threads.map(_run, [[*command, compiled] for compiled, command in commands.items()]))
        linked = Path(directory) / library.name
        _run([*compiler, *LINK, "-o", str(linked), *commands, "-lm"])
        linked.replace(library)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ifbbench"


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
