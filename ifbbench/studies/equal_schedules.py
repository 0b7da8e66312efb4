"""Summaries of simulated runs that need no simulation: no limit in which they differ from an earlier run decided
anything in that run, so that their schedules are equal.

Decisions depend on max_batch_size, max_num_tokens, the number of KV blocks and the policy only where requests, tokens
or blocks are short. Each rule below makes sure that they are short in neither of two runs; then iterations and times
are equal, one after the other, and of the summary only the size of the KV cache differs.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ifbbench.errors import InputError
from ifbbench.replay.requests import expected_refusals
from ifbbench.replay.single import engine_for
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.settings.config import RunConfig
from ifbbench.settings.modes import BatchingType
from ifbbench.workload.load import load_trace
from ifbbench.workload.trace import Integers, Trace, columns_of

COMPARED_POLICIES = ("guaranteed_no_evict", "max_utilization")


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a run is asked to do.

    prompt_len, max_new_tokens: lengths of each request.
    refused: number of requests that it can never run.
    """

    limits: BatchingConfig
    prompt_len: Integers
    max_new_tokens: Integers
    refused: int

    @classmethod
    def of(cls, trace: Trace, config: RunConfig) -> "_Asked":
        loaded = load_trace(trace, config)
        with engine_for(loaded, config) as engine:
            refusals = expected_refusals(loaded, engine.config, engine.limits)
            columns = columns_of(loaded.requests)
            refused = sum(count for _, count in refusals)
            return cls(engine.limits, columns.prompt_len, columns.max_new_tokens, refused)


@dataclass(frozen=True, slots=True)
class _Ended:
    """A run that has ended.

    max_active: the highest number of its active requests.
    """

    asked: _Asked
    summary: Mapping[str, Any]
    max_active: int


class EqualSchedules:
    """The runs that have ended, by all that they have in common with others of equal schedule.

    Traces are distinguished by identity: those of all runs exist as long as this object."""

    def __init__(self) -> None:
        self._ended: defaultdict[tuple[int, RunConfig], list[_Ended]] = defaultdict(list)
        # Runs whose summary was asked for and is not known.
        self._asked: dict[tuple[int, RunConfig], _Asked] = {}

    def add(self, trace: Trace, config: RunConfig, summary: Mapping[str, Any], max_active: int) -> None:
        """Take in a run that has ended."""
        if _is_comparable(config):
            asked = self._asked.pop((id(trace), config), None) or _Asked.of(trace, config)
            self._ended[_common(trace, config)].append(_Ended(asked, summary, max_active))

    def summary_of(self, trace: Trace, config: RunConfig) -> dict[str, Any] | None:
        """The summary that a run would have; None if it must run to know. Warns as the run would."""
        others = self._ended.get(_common(trace, config))
        if not others or not _is_comparable(config):
            return None
        try:
            asked = _Asked.of(trace, config)
        except InputError:  # the run will say so
            return None
        for other in others:
            if _is_equal(other, asked):
                return _with_cache_of(asked.limits, other)
        self._asked[id(trace), config] = asked
        return None


def _is_comparable(config: RunConfig) -> bool:
    """Whether the rules hold for such runs: simulated, with one iteration in flight, without adapters, draft tokens and
    limits that move."""
    return (
        config.hardware is not None
        and not config.is_fleet
        and config.type != BatchingType.V1
        and config.kv_cache_type == "paged"
        and config.policy in COMPARED_POLICIES
        and config.pp_size == 1
        and not (
            config.enable_trt_overlap
            or config.overlap
            or config.enable_batch_size_tuning
            or config.enable_max_num_tokens_tuning
            or config.enable_steady_state
            or config.uses_lora
            or config.has_drafts
            or config.max_queue_size is not None
        )
    )


def _common(trace: Trace, config: RunConfig) -> tuple[int, RunConfig]:
    """What runs must have in common: all but these settings."""
    return id(trace), config.without("max_batch_size", "max_num_tokens", "policy", "output")


def _is_equal(other: _Ended, asked: _Asked) -> bool:
    """Whether a run has the schedule of `other`."""
    limits, theirs = asked.limits, other.asked.limits
    compared = ("max_batch_size", "max_num_tokens", "max_input_len", "num_blocks", "policy")
    different = [name for name in compared if getattr(limits, name) != getattr(theirs, name)]
    if replace(theirs, **{name: getattr(limits, name) for name in different}) != limits:
        return False
    if limits.num_micro_batches > 1 or limits.max_beam_width > 1 or limits.attention_dp_size > 1:
        return False
    # Fewer requests are active than either batch size allows: admission and batches are never full.
    if "max_batch_size" in different and other.max_active >= min(limits.max_batch_size, theirs.max_batch_size):
        return False
    # No request is refused, and none is ever left out or cut: the order in which policies try them is of no
    # consequence, nor is a larger token budget.
    if {"max_num_tokens", "max_input_len", "policy"} & set(different):
        is_less = (limits.max_num_tokens or math.inf) < (theirs.max_num_tokens or math.inf)
        if is_less or asked.refused or other.asked.refused or not _runs_all_at_once(other.summary):
            return False
    # As many requests as were active at most fit into either cache, whichever they are, when they are complete.
    if {"num_blocks", "policy"} & set(different):
        is_plain = not (limits.reuse.enabled or limits.num_host_blocks or limits.windows)
        blocks = min(limits.num_blocks, theirs.num_blocks)
        return is_plain and _largest_need(asked, other.max_active) <= blocks
    return True


def _runs_all_at_once(summary: Mapping[str, Any]) -> bool:
    """Whether every active request ran in every iteration, as a whole."""
    waited_for = [limit for limit, seconds in summary["waiting_by_limit"].items() if seconds and limit != "none"]
    return summary["bound_by"]["none"] == 1.0 and not waited_for and not summary["pauses"]


def _largest_need(asked: _Asked, count: int) -> int:
    """Blocks of the `count` requests that need most, when they are complete; one more each for tokens tried ahead."""
    lengths = np.sort(np.add(asked.prompt_len, asked.max_new_tokens))[-max(count, 1) :]
    needs = map(asked.limits.attention_window.prompt_blocks, lengths.clip(max=asked.limits.max_seq_len).tolist())
    return sum(needs) + len(lengths)


def _with_cache_of(limits: BatchingConfig, other: _Ended) -> dict[str, Any]:
    """The summary of `other` with the size of another KV cache."""
    summary = dict(other.summary)
    if limits.num_blocks != other.asked.limits.num_blocks:
        summary["kv_blocks"] = summary["kv_blocks"] | {"max": limits.num_blocks}
        summary["kv_tokens"] = summary["kv_tokens"] | {"max": limits.num_blocks * limits.tokens_per_block}
    return summary
