"""Kernel tests run on a GPU if there is one, else in Triton's interpreter; without either they are skipped."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

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


def _quicken_interpreter() -> None:
    """Leave out what takes two thirds of the time of Triton's interpreter and changes no result. At each launch and
    call of a function it replaces all functions of its language by interpreted ones, and puts them back. It computes
    each sum a second time, to report an overflow in debug mode only. For each value it makes a table of data types, and
    checks the shape of its type again."""
    from triton import language as tl
    from triton.runtime import interpreter

    replace_functions, np_dtype_of = interpreter._patch_lang, cache(interpreter._get_np_dtype)
    replaced: set[frozenset[int]] = set()

    def replace_once(function: Callable[..., Any]) -> Any:
        modules = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
        if modules not in replaced:
            replaced.add(modules)
            replace_functions(function)
        return interpreter._LangPatchScope()  # nothing to put back

    interpreter._patch_lang = replace_once
    interpreter._get_np_dtype = lambda dtype: np_dtype_of(tl.uint64 if dtype.scalar.is_ptr() else dtype.scalar)
    _keep_types(tl)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _keep_types(tl: Any) -> None:
    """Types of blocks that were made once are not checked again, and values of a type share its shape."""
    constexpr, make_type, make_tensor = tl.constexpr, tl.block_type.__init__, tl.tensor.__init__
    types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], dict[str, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple([one.value if isinstance(one, constexpr) else one for one in shape])
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key], element_ty=element_ty)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(shapes[key], handle=handle, type=type, dtype=type.scalar)

    tl.block_type.__init__, tl.tensor.__init__ = block_type, tensor


if WHY_NOT is None and os.environ.get("TRITON_INTERPRET") == "1":
    _quicken_interpreter()


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
