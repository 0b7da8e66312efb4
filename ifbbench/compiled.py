"""Runs the modules of the simulation loop compiled, where a build of exactly their sources exists.

mypyc compiles the modules that pyproject.toml lists when a wheel or an editable install is built with a C compiler.
They call each other without Python's lookups, so either all of them run compiled or none does. A build does not run if
a source has changed since, or if ENVIRONMENT is set: then the sources run, with the same results.
"""

import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import ModuleType

ENVIRONMENT = "IFBBENCH_PURE_PYTHON"
PACKAGE = Path(__file__).parent
DIRECTORY = PACKAGE / "_native"
# The library with the code of all modules, which each module's own file only starts.
LIBRARY = "ifbbench__mypyc"
# A JSON object in DIRECTORY: the suffix of the files, and of each module the digest of its source.
BUILD = "build.json"


class CompiledFinder:
    """A finder of `sys.meta_path` for the compiled modules."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The compiled module `name`; None if it is not compiled, or the build is not used."""
        if (not name.startswith("ifbbench.") and name != LIBRARY) or name not in _build()[0]:
            return None
        from importlib.util import spec_from_file_location

        file = str(DIRECTORY / (name + EXTENSION_SUFFIXES[0]))
        return spec_from_file_location(name, file, loader=ExtensionFileLoader(name, file))


def use_compiled_modules() -> None:
    """Let imports find compiled modules from now on."""
    sys.meta_path.insert(0, CompiledFinder)


def description() -> str:
    """What runs: "compiled", or "pure Python" with the reason why a build is not used."""
    return _build()[1]


def source_of(module: str) -> Path:
    """The source file of a module of the package."""
    return PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")


def digest(source: Path) -> str:
    """The digest of a source file. FileNotFoundError if there is none."""
    import hashlib

    return hashlib.sha256(source.read_bytes()).hexdigest()


@cache
def _build() -> tuple[frozenset[str], str]:
    """The modules to run compiled, LIBRARY included, and the description. Read at the first import of a module."""
    if os.environ.get(ENVIRONMENT):
        return frozenset(), f"pure Python ({ENVIRONMENT} is set)"
    import json

    try:
        build = json.loads((DIRECTORY / BUILD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return frozenset(), "pure Python"
    if build["suffix"] != EXTENSION_SUFFIXES[0]:
        return frozenset(), "pure Python (the build is for another version of Python)"
    for module, recorded in build["sources"].items():
        if not (source := source_of(module)).exists() or digest(source) != recorded:
            return frozenset(), f"pure Python ({source.name} has changed since the build)"
    return frozenset((*build["sources"], LIBRARY)), "compiled"
