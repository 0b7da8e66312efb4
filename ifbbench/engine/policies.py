"""The capacity policies by their documented name: users' modules import them from here, see docs/library.md."""

from ifbbench.schedulers.tensorrt_llm.policies import (
    ENTRY_POINT_GROUP,
    POLICY_CLASSES,
    CapacityDecision,
    CapacityPolicy,
    GuaranteedNoEvict,
    LeftOut,
    Limit,
    LoraLimits,
    MaxRequests,
    MaxUtilization,
    Pause,
    PolicyFailed,
    StaticBatch,
    find_policy,
)

__all__ = [
    "ENTRY_POINT_GROUP",
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
    "find_policy",
]
