"""What tests of the model share."""

import ctypes

import pytest

from ifbbench.model.cpu_kernels import load_cpu_kernels

# What the compiler is told to leave out of the processor's instructions, so that vectors are 16, 8 and 4 floats wide
# wherever this runs, and bfloat16 has no instruction of its own.
INSTRUCTIONS = {"all": "", "no bf16": "-mno-avx512bf16", "AVX2": "-mno-avx512f", "SSE": "-mno-avx"}


@pytest.fixture(scope="session", params=list(INSTRUCTIONS.values()), ids=list(INSTRUCTIONS))
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels, compiled for these instructions."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setenv("CC", f"cc {request.param}")
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        found = load_cpu_kernels.__wrapped__()
    if found is None:
        pytest.skip("no C compiler on this machine, or not for this processor")
    return found
