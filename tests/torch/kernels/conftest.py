"""Kernel tests run on a GPU if there is one, else in Triton's interpreter; without either they are skipped."""

from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest
import torch


def _why_not() -> str | None:
    """Reason why kernels cannot run here; None if they can."""
    if find_spec("triton") is None:
        return "needs Triton, which is not installed"
    from triton import language
    from triton.runtime.jit import JITFunction

    if isinstance(language.sum, JITFunction) and not torch.cuda.is_available():
        return "needs a GPU, or TRITON_INTERPRET=1 in the environment before Triton is imported"
    return None


WHY_NOT = _why_not()


class SkippedModule(pytest.Module):
    """A module of tests that is skipped without being imported."""

    def collect(self) -> NoReturn:
        pytest.skip(f"{self.name}: {WHY_NOT}", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip all modules where kernels cannot run."""
    return SkippedModule.from_parent(parent, path=module_path) if WHY_NOT else None


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device that runs kernels."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
