"""Capacity schedulers: which requests may run, with regard to KV blocks. One policy a file."""

from ifbbench.batching.capacity.guaranteed_no_evict import GuaranteedNoEvict
from ifbbench.batching.capacity.max_requests import MaxRequests
from ifbbench.batching.capacity.max_utilization import MaxUtilization
from ifbbench.batching.capacity.policy import CapacityDecision, CapacityPolicy, LeftOut, Limit, LoraLimits, Pause
from ifbbench.batching.capacity.static_batch import StaticBatch

POLICY_CLASSES: dict[str, type[GuaranteedNoEvict] | type[MaxUtilization]] = {
    "guaranteed_no_evict": GuaranteedNoEvict,
    "max_utilization": MaxUtilization,
    "static_batch": StaticBatch,
}

__all__ = [
    "POLICY_CLASSES", "CapacityDecision", "CapacityPolicy", "GuaranteedNoEvict", "LeftOut", "Limit", "LoraLimits",
    "MaxRequests", "MaxUtilization", "Pause", "StaticBatch",
]  # fmt: skip
