"""Capacity schedulers: which requests may run, with regard to KV blocks. One policy a file."""

from ifbbench.engine.policies.guaranteed_no_evict import GuaranteedNoEvict
from ifbbench.engine.policies.load import POLICY_CLASSES, PolicyFailed, find_policy
from ifbbench.engine.policies.max_requests import MaxRequests
from ifbbench.engine.policies.max_utilization import MaxUtilization
from ifbbench.engine.policies.policy import CapacityDecision, CapacityPolicy, LeftOut, Limit, LoraLimits, Pause
from ifbbench.engine.policies.static_batch import StaticBatch

__all__ = [
    "POLICY_CLASSES", "CapacityDecision", "CapacityPolicy", "GuaranteedNoEvict", "LeftOut", "Limit", "LoraLimits",
    "MaxRequests", "MaxUtilization", "Pause", "PolicyFailed", "StaticBatch", "find_policy",
]  # fmt: skip
