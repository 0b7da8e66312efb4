"""Replays operations on the sequences of one KV cache."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from ifbbench.engine.retention import NO_RETENTION, Retention, RetentionRange
from ifbbench.engine.tokens import KnownTokens, TokenIds
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.blocks import BlockCounters, OutOfBlocks
from ifbbench.kv.manager import KvCacheManager
from ifbbench.kv.sequence import ReuseRules
from tests.conformance.outcome import Case, Mismatch, Skip, expect_equal, require_features

SUPPORTED = {
    "beam",
    "rewind",
    "draft_tokens",
    "sink_tokens",
    "reuse",
    "partial_reuse",
    "extra_ids",
    "lora",
    "cache_salt",
    "retention_priority",
    "retention_duration",
    "eviction",
    "offload",
    "truncate",
    "stats",
    "sliding_window",
    "variable_window",
}
MILLISECONDS = 1000
RATE_TOLERANCE = 1e-9


def replay(case: Case) -> None:
    """Raise Skip or Mismatch, or return when the case passes. Each of several windows has a pool of its own."""
    require_features(case, SUPPORTED)
    for window in case["config"].get("attention_windows") or [case["config"]["attention_window"]]:
        _replay_in(case, {**case["config"], "attention_window": window})


def _replay_in(case: Case, config: Mapping[str, Any]) -> None:
    slots = len({step["id"] for step in case["steps"] if "id" in step})
    operations = Operations(config, slots, longest_sequence(case["steps"], config["tokens_per_block"]))
    for number, step in enumerate(case["steps"]):
        expected = dict(step.get("expect", {}))
        if expected.pop("throws", False):
            operations.expect_error(step)
            continue
        operations.run(step)
        for what, value in expected.items():
            expect_equal(f"step {number} {step['op']}, {what}", operations.observe(what, step, value), value)
        operations.cache.check_consistency()


@dataclass(slots=True)
class Known:
    """A request: its slot, its tokens if it has any, and the counters that adding it changed."""

    slot: int
    tokens: KnownTokens | None
    added: BlockCounters


class Operations:
    """Runs the steps of one case on one cache. Slots of sequences are numbered in the order of their first use."""

    def __init__(self, config: Mapping[str, Any], slots: int, longest: int) -> None:
        """longest: tokens of the longest sequence, for cases without `max_seq_len`."""
        # A sequence that fills its window reuses nothing. Without a window the longest sequence must not fill it.
        max_seq_len = config.get("max_seq_len") or max(config["attention_window"] or 0, longest + 1)
        attention_window = AttentionWindow(
            config["tokens_per_block"],
            config["attention_window"] or max_seq_len,
            max_seq_len,
            config["sink_token_length"],
            config["max_beam_width"],
            is_cyclic=config.get("window_mode", "cyclic") == "cyclic",
        )
        rules = ReuseRules(
            config["enable_block_reuse"], config["enable_partial_reuse"], config["copy_on_partial_reuse"]
        )
        self.cache = KvCacheManager(
            attention_window, config["primary_blocks"], slots, config["secondary_blocks"], rules
        )
        self._requests: dict[int, Known] = {}
        self._slots: dict[int, int] = {}
        self._now_s = 0.0
        self._position = 0

    def run(self, step: Mapping[str, Any]) -> None:
        """Run one step."""
        operation: Callable[[Mapping[str, Any]], None] | None = getattr(self, f"_{step['op']}", None)
        if operation is None:
            raise Skip(f"op {step['op']}")
        operation(step)

    def expect_error(self, step: Mapping[str, Any]) -> None:
        """Run a step that must raise an error."""
        try:
            self.run(step)
        except (ValueError, OutOfBlocks):
            return
        raise Mismatch(f"{step['op']} of id {step['id']} raised no error")

    def observe(self, what: str, step: Mapping[str, Any], expected: Any) -> Any:
        """The actual value of an expectation; for expectations by id, a dictionary with the expected ids."""
        simple: dict[str, Callable[[], Any]] = {
            "free_blocks": lambda: self.cache.free_blocks,
            "used_blocks": lambda: self.cache.num_blocks - self.cache.free_blocks,
            "context_position": lambda: self._position,
            "block_parent": lambda: {block: self._parent(int(block)) for block in expected},
            "block_is_primary": lambda: {block: self.cache.blocks.is_on_device(int(block)) for block in expected},
        }
        if what in simple:
            return simple[what]()
        if what.startswith("request_") or what == "reused_blocks_max":
            return self._observe_request(what, self._requests[step["id"]].added, expected)
        if what.endswith("_of"):
            return {key: self._observe_sequence(what.removesuffix("_of"), int(key)) for key in expected}
        return self._observe_sequence(what, step["id"])

    def _observe_request(self, what: str, added: BlockCounters, expected: Any) -> Any:
        counters = {
            "reused": added.reused,
            "missed": added.missed,
            "alloc_total": added.allocated_total,
            "alloc_new": added.allocated_new,
        }
        if what == "request_stats":
            return {name: counters[name] for name in expected}
        if what == "reused_blocks_max":
            return expected if added.reused <= expected else added.reused
        if what == "request_hit_rate":
            rate = added.reused / (added.reused + added.missed) if added.reused else 0.0
            return expected if abs(rate - expected) <= RATE_TOLERANCE else rate
        raise Skip(f"expectation {what}")

    def _observe_sequence(self, what: str, sequence_id: int) -> Any:
        beams = self.cache.sequences[self._slot(sequence_id)].beams
        if what == "block_ids":
            return beams[0]
        if what == "blocks_per_beam":
            return len(beams[0])
        if what == "distinct_blocks":
            return len(set(chain.from_iterable(beams)))
        raise Skip(f"expectation {what}")

    def _parent(self, block: int) -> int | None:
        parent = self.cache.blocks.tree.parent[block]
        return parent if parent >= 0 else None

    def _slot(self, sequence_id: int) -> int:
        return self._slots.setdefault(sequence_id, len(self._slots))

    def _check(self, step: Mapping[str, Any]) -> None:
        """Nothing to run: only the expectations are checked."""

    def _add_sequence(self, step: Mapping[str, Any]) -> None:
        known = None if step["tokens"] is None else _known(step)
        before = replace(self.cache.blocks.counters)
        slot = self._slot(step["id"])
        self._position = self.cache.add_sequence(
            slot, step["length"], step["beam_width"], known, _retention(step.get("retention"))
        )
        after = self.cache.blocks.counters
        added = BlockCounters(
            after.allocated_total - before.allocated_total,
            after.allocated_new - before.allocated_new,
            after.reused - before.reused,
            after.missed - before.missed,
        )
        self._requests[step["id"]] = Known(slot, known, added)

    def _block_add_sequence(self, step: Mapping[str, Any]) -> None:
        slot = self._slot(step["id"])
        self.cache.add_blocks(slot, step["num_blocks"], step["beam_width"], step["share_last_block"])

    def _append_tokens(self, step: Mapping[str, Any]) -> None:
        self._kv_add_token({"id": step["id"], "count": len(step["tokens"])})
        known = self._requests[step["id"]].tokens
        if known is not None and isinstance(known.tokens, TokenIds):
            known.tokens.append(np.array(step["tokens"], np.int32))

    def _kv_add_token(self, step: Mapping[str, Any]) -> None:
        for _ in range(step["count"]):
            self.cache.add_tokens(np.array([self._slot(step["id"])]))

    def _rewind(self, step: Mapping[str, Any]) -> None:
        rows = np.array([self._slot(step["id"])])
        self.cache.rewind(rows, self.cache.registered[rows] - step["count"])

    def _store_context(self, step: Mapping[str, Any]) -> None:
        self.cache.store_context(self._slot(step["id"]))

    def _remove_sequence(self, step: Mapping[str, Any]) -> None:
        slot = self._slot(step["id"])
        request = self._requests.get(step["id"])
        store = None
        if step["store"] and request is not None and request.tokens is not None:
            if step.get("store_as_tokens") is not None:
                tokens = TokenIds(np.array(step["store_as_tokens"], np.int32))
                known = KnownTokens(tokens, request.tokens.identity)
                self.cache.sequences[slot].known = request.tokens = known
            store = len(request.tokens.tokens) - 1
        self.cache.remove_sequence(slot, store, self._now_s)

    def _advance_time(self, step: Mapping[str, Any]) -> None:
        self._now_s += step["ms"] / MILLISECONDS

    def _refresh(self, step: Mapping[str, Any]) -> None:
        self.cache.blocks.eviction.refresh(self._now_s)

    def _set_block_priority(self, step: Mapping[str, Any]) -> None:
        self.cache.blocks.eviction.set_priority(step["block_id"], step["priority"])

    def _truncate(self, step: Mapping[str, Any]) -> None:
        self.cache.truncate(_known(step), len(step["tokens"]), step["keep_tokens"])


def longest_sequence(steps: Iterable[Mapping[str, Any]], tokens_per_block: int) -> int:
    """Tokens of the longest sequence that `steps` make, at least 1."""
    lengths: dict[int, int] = {}
    longest = 1
    for step in steps:
        operation, length = step["op"], lengths.get(step.get("id", -1), 0)
        if operation == "add_sequence":
            length = step["length"]
        elif operation == "block_add_sequence":
            length = step["num_blocks"] * tokens_per_block
        elif operation == "append_tokens":
            length += len(step["tokens"])
        elif operation in ("kv_add_token", "rewind"):
            length += step["count"] if operation == "kv_add_token" else -step["count"]
        else:
            continue
        lengths[step["id"]] = length
        longest = max(longest, length)
    return longest


def _known(step: Mapping[str, Any]) -> KnownTokens:
    extra = step.get("token_extra_ids")
    tokens = TokenIds(np.array(step["tokens"], np.int32), None if extra is None else np.array(extra, np.int64))
    return KnownTokens(tokens, (tokens.kind, step.get("lora_task_id"), step.get("cache_salt_id")))


def _retention(values: Mapping[str, Any] | None) -> Retention:
    if values is None:
        return NO_RETENTION
    ranges = [
        RetentionRange(item["start"], item["end"], item["priority"], _seconds(item["duration_ms"]))
        for item in values["ranges"]
    ]
    return Retention(ranges, values["decode_priority"], _seconds(values["decode_duration_ms"]))


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / MILLISECONDS
