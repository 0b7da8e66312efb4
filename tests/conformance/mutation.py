"""Copies of modules with changed rules: a case that a change does not fail does not test the rule."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import cast

from tests.conformance.outcome import Case

Replay = Callable[[Case], None]
Edit = tuple[str, str, str]


@contextmanager
def changed(modules: Sequence[str], edits: Sequence[Edit], name: str = "replay") -> Iterator[Replay]:
    """The function `name` of the last of `modules`, made of copies of all of them, while the context lasts.

    modules: in the order of their imports. edits: the last part of a module's name, what its source has once, and what
    stands there instead."""
    kept = {module: sys.modules[module] for module in modules if import_module(module)}
    try:
        for module in modules:
            path = Path(str(kept[module].__file__))
            source = path.read_text()
            for of_module, old, new in edits:
                if module.rpartition(".")[2] == of_module and module != modules[-1]:
                    assert source.count(old) == 1, f"{path.name} has {source.count(old)} times: {old}"
                    source = source.replace(old, new)
            copy = sys.modules[module] = ModuleType(module)
            exec(compile(source, str(path), "exec"), copy.__dict__)
        yield cast(Replay, getattr(sys.modules[modules[-1]], name))
    finally:
        sys.modules.update(kept)


def fails(replay: Replay, case: Case) -> bool:
    """Whether a case fails; a scheduler that raises fails it."""
    try:
        replay(case)
    except Exception:
        return True
    return False
