"""Replays KV cache cases: operations on sequences, functions, block estimates, and the eviction policy."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ifbbench.engine.request import Request, RequestTable
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.manager import KvCacheManager
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from tests.conformance import kvcache_eviction, kvcache_functions, kvcache_ops
from tests.conformance.outcome import RULE_SET, Case, Skip, expect_equal, require_features

ESTIMATE_SUPPORTED = {"beam", "rewind", "draft_tokens", "sink_tokens", "two_steps_look_ahead", "sliding_window"}
ESTIMATE_FREE_BLOCKS = 256


def replay(case: Case) -> None:
    """Raise Skip or Mismatch, or return when the case passes."""
    kinds: dict[str, Callable[[Case], None]] = {
        "ops": kvcache_ops.replay,
        "function": kvcache_functions.replay,
        "blocks_estimate": _replay_estimate,
        "eviction_policy": kvcache_eviction.replay,
    }
    if case["kind"] not in kinds:
        raise Skip(", ".join(case["features"]) or case["kind"])
    kinds[case["kind"]](case)


def _replay_estimate(case: Case) -> None:
    require_features(case, ESTIMATE_SUPPORTED)
    if RULE_SET not in case["versions"] and "sliding_window" in case["features"]:
        raise Skip(f"rule set {', '.join(case['versions'])}")
    arguments = case["input"]
    estimates = {"needed_blocks_one_step": _one_step_need, "remaining_blocks_to_completion": _remaining}
    expect_equal("blocks", estimates[arguments["function"]](arguments), case["expected"])


def _estimated_cache(arguments: dict[str, Any]) -> tuple[KvCacheManager, Request]:
    """A cache with the attention window of the case, and its request, active but not started."""
    length = arguments["prompt_len"] + arguments["max_new_tokens"]
    max_seq_len = arguments.get("max_seq_len") or max(arguments["attention_window"] or 0, length + 1)
    window = arguments["attention_window"] or max_seq_len
    temporary = 0
    if arguments.get("paged_context_fmha") and (arguments["max_input_len"] or 0) > window:
        temporary = min(arguments["max_num_tokens"], arguments["max_input_len"] - window)
    attention_window = AttentionWindow(
        arguments["tokens_per_block"],
        window,
        max_seq_len,
        arguments["sink_token_length"],
        arguments["beam_width"],
        temporary,
    )
    request = Request(
        0,
        arguments["prompt_len"],
        arguments["max_new_tokens"],
        beam_width=arguments["beam_width"],
        num_draft_tokens=arguments.get("num_draft_tokens", 0),
    )
    active = ActiveRequests(RequestTable(rows=1))
    active.add(request)
    return KvCacheManager(attention_window, ESTIMATE_FREE_BLOCKS, slots=1), request


def _one_step_need(arguments: dict[str, Any]) -> int:
    cache, request = _estimated_cache(arguments)
    if arguments["phase"] == "context":
        return cache.first_chunk_need(request)
    rows = np.array([request.slot])
    cache.add_request(request)
    for _ in range(arguments["generated_tokens"]):
        cache.add_tokens(rows)
    limit = np.array([request.prompt_len + request.max_new_tokens + cache.attention_window.bubble])
    steps = 2 if arguments["two_steps_look_ahead"] else 1
    needs = cache.attention_window.step_needs(
        cache.registered[rows], limit, request.num_draft_tokens, request.beam_width, steps
    )
    return int(needs[0])


def _remaining(arguments: dict[str, Any]) -> int:
    cache, request = _estimated_cache(arguments)
    return cache.blocks_to_completion(request)
