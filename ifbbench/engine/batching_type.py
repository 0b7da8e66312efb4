"""The three ways to batch (TensorRT-LLM's `TrtGptModelType`)."""

from enum import StrEnum


class BatchingType(StrEnum):
    """V1: static batches, run in lockstep until the last member is complete. INFLIGHT: requests join and leave every
    iteration, context and generation in a pass each. INFLIGHT_FUSED: the same in one packed pass."""

    V1 = "v1"
    INFLIGHT = "inflight"
    INFLIGHT_FUSED = "inflight_fused"
