"""Capacity scheduler policies, one a file, and how they are found by name: built-in ones and those of users."""

import difflib
import importlib
import inspect
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import FrameType, FunctionType, MethodType
from typing import Any

from ifbbench.engine.active import ActiveRequests
from ifbbench.engine.config import CONTIGUOUS_POLICY
from ifbbench.engine.interfaces import CapacityPolicy
from ifbbench.errors import IfbbenchError, InputError
from ifbbench.kv.adapters import LoraLimits
from ifbbench.kv.interface import KvCache
from ifbbench.schedulers.tensorrt_llm.policies.guaranteed_no_evict import GuaranteedNoEvict, StaticBatch
from ifbbench.schedulers.tensorrt_llm.policies.max_utilization import MaxUtilization
from ifbbench.schedulers.tensorrt_llm.policies.policy import (
    CapacityDecision,
    LeftOut,
    Limit,
    MaxRequests,
    Pause,
    check_decision,
)

__all__ = [
    "POLICY_CLASSES",
    "CapacityDecision",
    "CapacityPolicy",
    "GuaranteedNoEvict",
    "LeftOut",
    "Limit",
    "LoraLimits",
    "MaxRequests",
    "MaxUtilization",
    "Pause",
    "PolicyFailed",
    "StaticBatch",
    "check_decision",
    "find_policy",
    "named_if_stuck",
]

PACKAGE = Path(__file__).parents[3]
ENTRY_POINT_GROUP = "ifbbench.policies"
STUCK_S = 10.0
_log = logging.getLogger("ifbbench")

POLICY_CLASSES: dict[str, type[GuaranteedNoEvict] | type[MaxUtilization]] = {
    "guaranteed_no_evict": GuaranteedNoEvict,
    "max_utilization": MaxUtilization,
    "static_batch": StaticBatch,
}

PolicyFactory = Callable[[int], CapacityPolicy]
"""Makes a policy from the maximum number of requests that run at a time."""


def is_steady(policy: CapacityPolicy) -> bool:
    """Whether `policy` declares `is_steady`. A declaration that a subclass inherits does not hold for its own
    `schedule`."""
    for cls in type(policy).__mro__:
        if "is_steady" in vars(cls) or "schedule" in vars(cls):
            return bool(vars(cls).get("is_steady", False))
    return False


def find_policy(name: str) -> PolicyFactory:
    """The factory of the policy `name`: a built-in one, `package.module:ClassName` of an installed module or one in the
    current directory, or an entry point of the group `ifbbench.policies`.

    Raises InputError if there is none of that name or it is no policy; the factory does if a user's class cannot be
    instantiated."""
    if name in POLICY_CLASSES:
        return POLICY_CLASSES[name]
    if name == CONTIGUOUS_POLICY:  # chosen with a cache without blocks, not by a user
        return MaxRequests
    target = _from_module(name) if ":" in name else _from_entry_point(name)
    _check(name, target)
    return partial(_make, name, target)


class PolicyFailed(IfbbenchError):
    """A policy raised while it scheduled an iteration."""

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(f"policy {name} failed: {describe_failure(error)}")
        self.name = name


class CheckedPolicy:
    """A user's policy. PolicyFailed if it raises, or decides what cannot be done."""

    def __init__(self, name: str, policy: CapacityPolicy) -> None:
        self._name, self._policy = name, policy

    def schedule(self, active: ActiveRequests, kv_cache: KvCache) -> CapacityDecision:
        before = list(active)
        try:
            decision = self._policy.schedule(active, kv_cache)
            check_decision(decision, active, before)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # it may raise anything, such as SystemExit
            raise PolicyFailed(self._name, error) from error
        return decision


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


@contextmanager
def named_if_stuck(name: str, iteration: Callable[[], int]) -> Iterator[None]:
    """While the block runs in this thread, log a warning when a user's policy does not return for STUCK_S.

    iteration: the number of the latest one."""
    if name in POLICY_CLASSES:
        yield
        return
    ended, thread = threading.Event(), threading.get_ident()

    def watch() -> None:
        before = iteration()
        while not ended.wait(STUCK_S):
            now, frame = iteration(), sys._current_frames().get(thread)
            place = _line_in_policy(frame) if now == before and frame is not None else None
            if place is not None:
                _log.warning(
                    "policy %s: schedule() has not returned for %g s (%s). Interrupt the run with Ctrl-C.",
                    name,
                    STUCK_S,
                    place,
                )
                return
            before = now

    threading.Thread(target=watch, name="ifbbench-policy-watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _line_in_policy(frame: FrameType) -> str | None:
    """File and line of `frame`, or of the innermost one of it outside ifbbench; None if no policy was called in it."""
    outer: FrameType | None = frame
    found: FrameType | None = None
    while outer is not None and outer.f_code.co_qualname != "CheckedPolicy.schedule":
        if found is None and not _is_own(outer.f_code.co_filename):
            found = outer
        outer = outer.f_back
    return None if outer is None or found is None else f"{found.f_code.co_filename}, line {found.f_lineno}"


def _from_module(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    try:
        with _current_directory_first():
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise InputError(
            f"--policy: {name!r} is not valid: module {module_name!r} cannot be imported: {describe_failure(error)}; "
            "expected package.module:ClassName of an installed module or one in the current directory. Correct the "
            "module or the name."
        ) from error
    if not attribute or not hasattr(module, attribute):
        near = ", ".join(difflib.get_close_matches(attribute, dir(module), n=3))
        raise InputError(
            f"--policy: {name!r} is not valid: module {module_name!r} has no {attribute!r}; expected "
            f"package.module:ClassName. {f'Did you mean {near}?' if near else 'Check the name.'}"
        )
    return getattr(module, attribute)


def _from_entry_point(name: str) -> Any:
    installed = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in installed:
        near = ", ".join(difflib.get_close_matches(name.lower().replace("-", "_"), [*POLICY_CLASSES, *installed], n=3))
        raise InputError(
            f"--policy: {name!r} is not a policy; expected a built-in one ({', '.join(POLICY_CLASSES)}), an installed "
            f"one of the entry point group {ENTRY_POINT_GROUP} ({', '.join(sorted(installed)) or 'none here'}), or "
            f"package.module:ClassName.{f' Did you mean {near}?' if near else ''}"
        )
    try:
        return installed[name].load()
    except (Exception, SystemExit) as error:  # as above
        raise InputError(
            f"--policy: {name!r} is not valid: entry point {installed[name].value!r} cannot be loaded: "
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


def _check(name: str, target: Any) -> None:
    """Raise InputError for what is certainly no policy, before a run starts and without an instance."""
    # Not other callables: to call `os:_exit` with the maximum number of requests would end the program.
    if not isinstance(target, type | FunctionType | MethodType | partial):
        raise InputError(
            f"--policy: {name!r} is of type {type(target).__name__}, not a class; expected one with a method "
            "schedule(active, kv_cache). Name the class."
        )
    if isinstance(target, type):
        _check_schedule(name, target, target)
    try:
        inspect.signature(target).bind(1)
    except TypeError as error:
        raise InputError(
            f"--policy: {name!r} cannot be made from the maximum number of requests ({error}); expected "
            "__init__(self, max_num_requests). Give other parameters defaults."
        ) from error
    except ValueError:  # a class written in C may not state its parameters
        return


def _check_schedule(name: str, found: Any, cls: type) -> None:
    if not callable(getattr(found, "schedule", None)):
        raise InputError(
            f"--policy: {name!r} has no method `schedule` ({cls.__name__}); expected schedule(self, active, "
            "kv_cache) that returns a CapacityDecision. Add it."
        )


def _make(name: str, target: Callable[[int], CapacityPolicy], max_num_requests: int) -> CapacityPolicy:
    try:
        policy = target(max_num_requests)
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        raise InputError(
            f"--policy: {name!r} cannot be made for {max_num_requests} requests: {describe_failure(error)}. "
            "Correct its __init__."
        ) from error
    _check_schedule(name, policy, type(policy))
    return policy
