"""Replays KV cache cases: operations on sequences, and block estimates."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np

from ifbbench.batching.active import ActiveRequests
from ifbbench.batching.kv_cache.geometry import CacheGeometry
from ifbbench.batching.kv_cache.manager import KvCacheManager, OutOfBlocks
from ifbbench.batching.request import Request
from ifbbench.batching.request_table import RequestTable
from tests.conformance.outcome import Case, Mismatch, Skip, expect_equal, require_features

OPS_SUPPORTED = {"beam", "rewind", "draft_tokens", "sink_tokens"}
ESTIMATE_SUPPORTED = OPS_SUPPORTED | {"two_steps_look_ahead", "sliding_window"}
ESTIMATE_FREE_BLOCKS = 256


def replay(case: Case) -> None:
    """Raise Skip or Mismatch, or return when the case passes."""
    kinds: dict[str, Callable[[Case], None]] = {
        "ops": _replay_ops,
        "function": _replay_function,
        "blocks_estimate": _replay_estimate,
    }
    if case["kind"] not in kinds:
        raise Skip(", ".join(case["features"]) or case["kind"])
    kinds[case["kind"]](case)


def _replay_ops(case: Case) -> None:
    require_features(case, OPS_SUPPORTED)
    operations = Operations(case["config"], slots=len({step["id"] for step in case["steps"] if "id" in step}))
    for number, step in enumerate(case["steps"]):
        expected = dict(step.get("expect", {}))
        if expected.pop("throws", False):
            operations.expect_error(step)
            continue
        operations.run(step)
        for what, value in expected.items():
            expect_equal(f"step {number} {step['op']}, {what}", operations.observe(what, step, value), value)


class Operations:
    """Runs the steps of one case on one cache. A sequence's slot is the place of its id among those seen first."""

    def __init__(self, config: dict[str, Any], slots: int) -> None:
        longest = config["tokens_per_block"] * config["primary_blocks"]
        window = config["attention_window"] or longest
        geometry = CacheGeometry(
            config["tokens_per_block"],
            window,
            config["max_seq_len"] or window,
            config["sink_token_length"],
            config["max_beam_width"],
        )
        self.cache = KvCacheManager(geometry, config["primary_blocks"], slots)
        self._slots: dict[int, int] = {}

    def run(self, step: dict[str, Any]) -> None:
        """Do what the step says."""
        operation = getattr(self, f"_{step['op']}", None)
        if operation is None:
            raise Skip(f"op {step['op']}")
        operation(step)

    def expect_error(self, step: dict[str, Any]) -> None:
        """The step must be refused."""
        try:
            self.run(step)
        except (ValueError, OutOfBlocks):
            return
        raise Mismatch(f"{step['op']} of id {step['id']} raised no error")

    def observe(self, what: str, step: dict[str, Any], expected: Any) -> Any:
        """The actual value of an expectation; of those by id, for the expected ids."""
        if what == "free_blocks":
            return self.cache.free_blocks
        if what == "used_blocks":
            return self.cache.num_blocks - self.cache.free_blocks
        if what == "context_position":
            return 0
        if what.endswith("_of"):
            return {key: self._observe_sequence(what.removesuffix("_of"), int(key)) for key in expected}
        return self._observe_sequence(what, step["id"])

    def _observe_sequence(self, what: str, sequence_id: int) -> Any:
        beams = self.cache.sequences[self._slot(sequence_id)].beams
        if what == "block_ids":
            return beams[0]
        if what == "blocks_per_beam":
            return len(beams[0])
        if what == "distinct_blocks":
            return len(set(chain.from_iterable(beams)))
        raise Skip(f"expectation {what}")

    def _slot(self, sequence_id: int) -> int:
        return self._slots.setdefault(sequence_id, len(self._slots))

    def _check(self, step: dict[str, Any]) -> None:
        self.cache.check_consistency()

    def _add_sequence(self, step: dict[str, Any]) -> None:
        self.cache.add_sequence(self._slot(step["id"]), step["length"], step["beam_width"])

    def _block_add_sequence(self, step: dict[str, Any]) -> None:
        slot = self._slot(step["id"])
        self.cache.add_blocks(slot, step["num_blocks"], step["beam_width"], step["share_last_block"])

    def _append_tokens(self, step: dict[str, Any]) -> None:
        self._kv_add_token({"id": step["id"], "count": len(step["tokens"])})

    def _kv_add_token(self, step: dict[str, Any]) -> None:
        for _ in range(step["count"]):
            self.cache.add_tokens(np.array([self._slot(step["id"])]))

    def _rewind(self, step: dict[str, Any]) -> None:
        for _ in range(step["count"]):
            self.cache.remove_token(self._slot(step["id"]))

    def _remove_sequence(self, step: dict[str, Any]) -> None:
        self.cache.remove_sequence(self._slot(step["id"]))


def _replay_function(case: Case) -> None:
    arguments = case["input"]
    if arguments["function"] != "max_block_requirements_per_beam":
        raise Skip(f"function {arguments['function']}")
    length, window = arguments["sequence_length"], arguments["window_size"]
    geometry = CacheGeometry(arguments["tokens_per_block"], window, length, arguments["sink_token_length"])
    _, blocks = geometry.total_blocks(length, max_new_tokens=0)
    expect_equal("blocks", blocks, case["expected"])


def _replay_estimate(case: Case) -> None:
    require_features(case, ESTIMATE_SUPPORTED)
    arguments = case["input"]
    estimates = {"needed_blocks_one_step": _one_step_need, "remaining_blocks_to_completion": _remaining}
    expect_equal("blocks", estimates[arguments["function"]](arguments), case["expected"])


def _estimated_cache(arguments: dict[str, Any]) -> tuple[KvCacheManager, Request]:
    """A cache of the stated geometry, and the request, active in it but not started."""
    window = arguments["attention_window"]
    temporary = 0
    if arguments.get("paged_context_fmha") and (arguments["max_input_len"] or 0) > window:
        temporary = min(arguments["max_num_tokens"], arguments["max_input_len"] - window)
    geometry = CacheGeometry(
        arguments["tokens_per_block"],
        window,
        arguments["max_seq_len"],
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
    return KvCacheManager(geometry, ESTIMATE_FREE_BLOCKS, slots=1), request


def _one_step_need(arguments: dict[str, Any]) -> int:
    cache, request = _estimated_cache(arguments)
    if arguments["phase"] == "context":
        return cache.first_chunk_need(request)
    rows = np.array([request.slot])
    cache.add_request(request)
    for _ in range(arguments["generated_tokens"]):
        cache.add_tokens(rows)
    limit = np.array([request.prompt_len + request.max_new_tokens + cache.geometry.bubble])
    steps = 2 if arguments["two_steps_look_ahead"] else 1
    needs = cache.geometry.step_needs(
        cache.registered[rows], limit, request.num_draft_tokens, request.beam_width, steps
    )
    return int(needs[0])


def _remaining(arguments: dict[str, Any]) -> int:
    cache, request = _estimated_cache(arguments)
    return cache.blocks_to_completion(request)
