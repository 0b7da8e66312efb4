"""Shared by tests of the model."""

import ctypes
import fcntl
import os
from collections.abc import Iterator

import pytest

from ifbbench.torch.model import compiled
from ifbbench.torch.model.compiled import find_kernels, load_cpu_kernels

# Compiler options that exclude instructions of the processor, so that vectors of 16, 8 and 4 floats are tested on any
# machine, and bfloat16 without its own instruction. Only those of all instructions are compiled as users have them: the
# compiler takes many times as long with -O3.
INSTRUCTIONS = {"all": "", "no bf16": "-mno-avx512bf16", "AVX2": "-mno-avx512f", "SSE": "-mno-avx"}


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    """The C kernels divide their work between two threads; elsewhere, tests have one (see the other conftest)."""
    openmp = load_cpu_kernels()  # the functions of the library that it is linked to, the same for all its variants
    before = None if openmp is None else openmp.omp_get_max_threads()
    if openmp is not None:
        openmp.omp_set_num_threads(2)
        assert openmp.omp_get_max_threads() == 2
    yield
    if openmp is not None:
        openmp.omp_set_num_threads(before)


@pytest.fixture(scope="session", params=list(INSTRUCTIONS.values()), ids=list(INSTRUCTIONS))
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The C kernels, compiled for these instructions: once for all files, in whichever process of pytest-xdist."""
    own = tmp_path_factory.getbasetemp()
    cache = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "kernels"
    cache.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if request.param:
            patch.setenv("CC", f"cc {request.param}")
            patch.setenv("XDG_CACHE_HOME", str(cache))
            patch.setattr(compiled, "COMPILE", ("-O0", *compiled.COMPILE[1:]))
        found = find_kernels()
    if isinstance(found, str):
        pytest.skip(found)
    return found
