"""Capacity schedulers: which requests may run, with regard to KV blocks. One policy a file."""

from ifbbench.batching.capacity.guaranteed_no_evict import GuaranteedNoEvict
from ifbbench.batching.capacity.load import POLICY_CLASSES, find_policy
from ifbbench.batching.capacity.max_requests import MaxRequests
from ifbbench.batching.capacity.max_utilization import MaxUtilization
from ifbbench.batching.capacity.policy import CapacityDecision, CapacityPolicy, LeftOut, Limit, LoraLimits, Pause
from ifbbench.batching.capacity.static_batch import StaticBatch

__all__ = [
    "POLICY_CLASSES", "CapacityDecision", "CapacityPolicy", "GuaranteedNoEvict", "LeftOut", "Limit", "LoraLimits",
    "MaxRequests", "MaxUtilization", "Pause", "StaticBatch", "find_policy",
]  # fmt: skip
