"""Modes of the engine: batching types, and how the host's work overlaps with the device's."""

from enum import StrEnum


class Overlap(StrEnum):
    """How the host's work overlaps with the device's.

    PARTITIONED: the requests are divided into two micro batches, each scheduled while the other runs. ASYNC: all
    requests run in each iteration, which is scheduled and submitted before the tokens of the one before are known.
    """

    PARTITIONED = "partitioned"
    ASYNC = "async"


class BatchingType(StrEnum):
    """The three batching types (TensorRT-LLM's `TrtGptModelType`).

    V1: static batches, which run until the last member is complete. INFLIGHT: requests join and leave in every
    iteration; context and generation run in one pass each. INFLIGHT_FUSED: the same in one packed pass, which
    TensorRT-LLM calls `inflight` today.
    """

    V1 = "v1"
    INFLIGHT = "inflight_unfused"
    INFLIGHT_FUSED = "inflight_fused"
