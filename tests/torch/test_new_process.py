"""What holds in a process that has just begun, as a run's. One checks everything: to import torch takes seconds."""

import json
import subprocess
import sys
from typing import Any

import pytest

# The heap of a process that has run thousands of tests is fragmented, so that it says nothing about page faults.
PROGRAM = """
import json, sys
import ifbbench.torch.kernels, ifbbench.torch.build, ifbbench.torch.model_executor
found = {"triton": sorted(name for name in sys.modules if name.split('.')[0] == 'triton')}
from ifbbench.torch.model.compiled import load_cpu_kernels
load_cpu_kernels()
found["subnormal"] = 5e-324 + 0.0 > 0.0
if sys.platform == "linux":
    import resource, torch
    from ifbbench.torch.host import keep_freed_memory
    keep_freed_memory()
    faults = []
    for _ in range(50):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(1 << 24)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    found["faults_share"] = sum(faults[10:]) * resource.getpagesize() / (40 * 4 * (1 << 24))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def test_a_run_on_a_cpu_does_not_import_triton(found: dict[str, Any]) -> None:
    assert found["triton"] == []


def test_the_process_keeps_its_subnormal_numbers(found: dict[str, Any]) -> None:
    """A library linked with -ffast-math would turn them off in the whole process."""
    assert found["subnormal"]


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of another system")
def test_freed_memory_is_reused_without_page_faults(found: dict[str, Any]) -> None:
    assert found["faults_share"] < 0.8
