"""Replays capacity scheduler cases: which requests a policy schedules and pauses, iteration by iteration."""

from collections import defaultdict
from typing import Any

import numpy as np

from ifbbench.engine.request import Request, RequestTable
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.manager import KvCacheManager
from ifbbench.kv.sequence import ReuseRules
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.schedulers.tensorrt_llm.policies import POLICY_CLASSES, LoraLimits
from tests.conformance.capacity_loop import CapacityLoop, Decided
from tests.conformance.outcome import Case, Mismatch, Skip, expect_equal, require_features

SUPPORTED = {"lora", "pause", "chunking", "priority", "late_arrival", "sink_tokens", "draft_tokens", "reuse"}


def replay(case: Case) -> None:
    """Raise Skip or Mismatch, or return when the case passes."""
    require_features(case, SUPPORTED)
    {"scheduler_loop": _replay_loop, "insertion_order": _replay_insertions}[case["kind"]](case)


def _replay_insertions(case: Case) -> None:
    active = ActiveRequests(RequestTable(len(case["insertions"])))
    for entry in case["insertions"]:
        active.add(Request(entry["id"], 1, 1, priority=entry["priority"]))
    expect_equal("order", _ids(active), case["expected"]["order"])


def _replay_loop(case: Case) -> None:
    config, expected = case["config"], case["expected"]
    if config["two_steps_look_ahead"] and config["policy"] == "max_utilization":
        raise Skip("two_steps_look_ahead")
    arrivals = defaultdict(list)
    for entry in case["requests"]:
        arrivals[entry["arrival_iteration"]].append(_request(entry, by_priority=case["insertion"] == "priority"))
    policy = POLICY_CLASSES[config["policy"]](config["max_num_requests"], _lora_limits(config["peft"]))
    loop = CapacityLoop(policy, _cache(case), arrivals, config["max_input_len"])
    for decided in loop:
        for window in expected["windows"]:
            if window["begin"] <= decided.iteration < window["end"]:
                _check(decided, window)
    expect_equal("iterations", loop.iteration, expected["num_iterations"])
    expect_equal("free blocks at the end", loop.cache.free_blocks, config["kv_cache"]["num_blocks"])
    reused, least = loop.cache.blocks.counters.reused, expected["final_reused_blocks_min"]
    if expected["final_reused_blocks"] is not None:
        expect_equal("reused blocks", reused, expected["final_reused_blocks"])
    if least is not None and reused < least:
        raise Mismatch(f"reused blocks: {reused}, expected at least {least}")


def _check(decided: Decided, window: dict[str, Any]) -> None:
    where = f"iteration {decided.iteration}"
    scheduled = {request.request_id: request for request in decided.scheduled}
    expect_equal(f"{where}, active", _ids(decided.active), window["active_ids"])
    expect_equal(f"{where}, scheduled", sorted(scheduled), sorted(entry["id"] for entry in window["scheduled"]))
    if decided.iteration != window["begin"]:
        return
    for entry in window["scheduled"]:
        request = scheduled[entry["id"]]
        values = {
            "id": request.request_id,
            "max_new_tokens": request.max_new_tokens,
            "prompt_len": request.prompt_len,
            "generated_tokens": request.num_generated,
            "context_position": request.position,
        }
        expect_equal(f"{where}, request", values, entry)


def _ids(requests: Any) -> list[int]:
    return [request.request_id for request in requests]


def _request(entry: dict[str, Any], by_priority: bool) -> Request:
    priority = {"priority": entry["priority"]} if by_priority else {}
    request = Request(
        entry["id"],
        entry["prompt_len"],
        entry["max_new_tokens"],
        beam_width=entry["beam_width"],
        lora_task_id=entry["lora_task_id"],
        num_draft_tokens=entry["num_draft_tokens"],
        prompt_tokens=np.array(entry["prompt_tokens"] or [1] * entry["prompt_len"], np.int32),
        **priority,
    )
    if entry["context_chunk_size"] is not None:
        request.set_chunk(entry["context_chunk_size"])
    return request


def _lora_limits(peft: dict[str, int] | None) -> LoraLimits:
    if peft is None:
        return LoraLimits()
    return LoraLimits(peft["pages_per_new_task"], peft["max_device_pages"])


def _cache(case: Case) -> KvCacheManager:
    config = case["config"]["kv_cache"]
    longest = max(entry["prompt_len"] + entry["max_new_tokens"] for entry in case["requests"])
    max_seq_len = config.get("max_seq_len") or max(config["attention_window"] or 0, longest + 1)
    attention_window = AttentionWindow(
        config["tokens_per_block"],
        config["attention_window"] or max_seq_len,
        max_seq_len,
        config["sink_token_length"],
        max(entry["beam_width"] for entry in case["requests"]),
    )
    rules = ReuseRules(config["enable_block_reuse"], config["enable_partial_reuse"], config["copy_on_partial_reuse"])
    slots = len(case["requests"])
    return KvCacheManager(attention_window, config["num_blocks"], slots, config["host_blocks"], rules)
