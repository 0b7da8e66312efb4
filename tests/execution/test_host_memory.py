"""What the host's memory is asked for."""

import ctypes
import subprocess
import sys

import pytest

from ifbbench.execution.host import available_host_bytes, keep_freed_memory

# In a process of its own, as a run is: a heap that thousands of tests have used has no end to grow at.
FAULTS_OF_LARGE_TENSORS = """
import resource, torch
from ifbbench.execution.host import keep_freed_memory
keep_freed_memory()
faults = []
for _ in range(50):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sum(faults[10:]) * resource.getpagesize() / (40 * 4 * (1 << 24)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of another system")
def test_freed_memory_is_taken_again_as_it_is() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS_OF_LARGE_TENSORS], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.8


def test_a_c_library_that_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    keep_freed_memory()


def test_there_is_memory() -> None:
    assert available_host_bytes() > 0
