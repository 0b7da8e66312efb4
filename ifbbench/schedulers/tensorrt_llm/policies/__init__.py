"""Capacity scheduler policies, one a file, and how they are found by name: built-in ones and those of users."""

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from ifbbench.engine.plan import LeftOut, Limit, Pause
from ifbbench.errors import IfbbenchError, InputError
from ifbbench.kv.adapters import AdapterCache, LoraLimits
from ifbbench.kv.interface import KvCache
from ifbbench.schedulers.limits import CONTIGUOUS_POLICY, BatchingConfig
from ifbbench.schedulers.plugins import check_parameters, describe_failure, find_plugin
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.schedulers.tensorrt_llm.policies.guaranteed_no_evict import GuaranteedNoEvict, StaticBatch
from ifbbench.schedulers.tensorrt_llm.policies.max_utilization import MaxUtilization
from ifbbench.schedulers.tensorrt_llm.policies.policy import (
    CapacityDecision,
    CapacityPolicy,
    MaxRequests,
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
]


POLICY_CLASSES: dict[str, type[GuaranteedNoEvict] | type[MaxUtilization]] = {
    "guaranteed_no_evict": GuaranteedNoEvict,
    "max_utilization": MaxUtilization,
    "static_batch": StaticBatch,
}

ENTRY_POINT_GROUP = "ifbbench.policies"

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
    target = find_plugin("policy", name, ENTRY_POINT_GROUP, POLICY_CLASSES)
    _check(name, target)
    return partial(_make, name, target)


def make_policy(config: BatchingConfig, adapters: AdapterCache | None) -> CapacityPolicy:
    """The policy of `config`; one of a user is checked in each iteration."""
    name = config.effective_policy
    policy = find_policy(name)(config.max_active)
    if adapters is not None and isinstance(policy, GuaranteedNoEvict | MaxUtilization | MaxRequests):
        policy.lora = adapters.limits
    return policy if name in POLICY_CLASSES or name == CONTIGUOUS_POLICY else CheckedPolicy(name, policy)


class PolicyFailed(IfbbenchError):
    """A policy raised while it scheduled an iteration."""

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(f"policy {name} failed: {describe_failure(error)}")
        self.name = name


class CheckedPolicy:
    """A user's policy. PolicyFailed if it raises, or decides what cannot be done."""

    def __init__(self, name: str, policy: CapacityPolicy) -> None:
        self._name, self._policy = name, policy
        self.may_pause: bool = getattr(policy, "may_pause", True)
        self.is_steady = is_steady(policy)

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
    check_parameters("policy", name, target, "the maximum number of requests", "max_num_requests")


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
