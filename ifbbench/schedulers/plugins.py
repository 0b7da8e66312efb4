"""Classes of users: from an installed module, one in the current directory, or an entry point."""

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ifbbench.errors import InputError

PACKAGE = Path(__file__).parents[1]


def find_plugin(kind: str, name: str, group: str, built_in: Iterable[str]) -> Any:
    """What `name` names: `package.module:Name` of an installed module or one in the current directory, or an entry
    point of `group`.

    kind: name of the option that takes it.
    built_in: names to suggest.

    InputError if there is none.
    """
    return _from_module(kind, name) if ":" in name else _from_entry_point(kind, name, group, built_in)


def check_parameters(kind: str, name: str, target: Callable[..., Any], what: str, *parameters: str) -> None:
    """InputError unless `target`, which `name` names, can be called with these parameters.

    kind: see `find_plugin`.
    what: the parameters in words.
    """
    try:
        inspect.signature(target).bind(*parameters)
    except TypeError as error:
        raise InputError(
            f"--{kind}: {name!r} cannot be made from {what} ({error}); expected "
            f"__init__(self, {', '.join(parameters)}). Give other parameters defaults."
        ) from error
    except ValueError:  # a class written in C may not state its parameters
        return


def describe_failure(error: BaseException) -> str:
    """Type and message of an exception of a user's code, and the file and line that raised it.

    That is the innermost line outside ifbbench and Python's import machinery; of an exception of ifbbench alone, its
    own innermost line, and for a module that is not found nothing.
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not (frame.filename.startswith("<frozen importlib") or frame.filename == importlib.__file__)
    ]
    users = [frame for frame in frames if not _is_own(frame.filename)]
    if not users and isinstance(error, ImportError):
        return text
    frame = (users or frames)[-1]
    return f"{text} ({frame.filename}, line {frame.lineno})"


def _is_own(filename: str) -> bool:
    """Whether this is a source file of the package. Compiled modules name theirs from its root."""
    return Path(filename).is_relative_to(PACKAGE) or filename.startswith(f"{PACKAGE.name}/")


def _from_module(kind: str, name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    try:
        with _current_directory_first():
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise InputError(
            f"--{kind}: {name!r} is not valid: module {module_name!r} cannot be imported: {describe_failure(error)}; "
            "expected package.module:ClassName of an installed module or one in the current directory. Correct the "
            "module or the name."
        ) from error
    if not attribute or not hasattr(module, attribute):
        near = ", ".join(difflib.get_close_matches(attribute, dir(module), n=3))
        raise InputError(
            f"--{kind}: {name!r} is not valid: module {module_name!r} has no {attribute!r}; expected "
            f"package.module:ClassName. {f'Did you mean {near}?' if near else 'Check the name.'}"
        )
    return getattr(module, attribute)


def _from_entry_point(kind: str, name: str, group: str, built_in: Iterable[str]) -> Any:
    from importlib.metadata import entry_points  # takes 12 ms to import, and built-in names need none

    installed = {entry.name: entry for entry in entry_points(group=group)}
    if name not in installed:
        article = "an" if kind[0] in "aeiou" else "a"
        near = ", ".join(difflib.get_close_matches(name.lower().replace("-", "_"), [*built_in, *installed], n=3))
        raise InputError(
            f"--{kind}: {name!r} is not {article} {kind}; expected a built-in one ({', '.join(built_in)}), an "
            f"installed one of the entry point group {group} ({', '.join(sorted(installed)) or 'none here'}), or "
            f"package.module:ClassName.{f' Did you mean {near}?' if near else ''}"
        )
    try:
        return installed[name].load()
    except (Exception, SystemExit) as error:  # as above
        raise InputError(
            f"--{kind}: {name!r} is not valid: entry point {installed[name].value!r} cannot be loaded: "
            f"{describe_failure(error)}; expected a class that can be imported. Correct or reinstall the package "
            "that it comes with."
        ) from error


@contextmanager
def _current_directory_first() -> Iterator[None]:
    """Import from the current directory as `python -m` does, which the `ifbbench` command does not."""
    directory = os.getcwd()
    if directory in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path.remove(directory)
