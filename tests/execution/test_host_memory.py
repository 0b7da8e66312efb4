"""What the host's memory is asked for."""

import ctypes
import resource
import sys

import pytest
import torch

from ifbbench.execution.host_memory import available_host_bytes, keep_freed_memory

LARGE = 1 << 24
PAGE = resource.getpagesize()


def page_faults(repeats: int) -> int:
    """Of taking and giving back large tensors."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(repeats):
        torch.ones(LARGE)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of another system")
def test_freed_memory_is_taken_again_as_it_is() -> None:
    keep_freed_memory()
    page_faults(5)
    assert page_faults(10) < 5 * 4 * LARGE / PAGE


def test_a_c_library_that_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    keep_freed_memory()


def test_there_is_memory() -> None:
    assert available_host_bytes() > 0
