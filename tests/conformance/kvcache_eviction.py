"""Replays steps on the eviction policy alone. Blocks have local names; two names may denote the same block."""

from collections.abc import Mapping
from typing import Any

from ifbbench.kv.eviction import EvictionPolicy
from tests.conformance.outcome import Case, Mismatch, Skip, expect_equal

MILLISECONDS = 1000


def replay(case: Case) -> None:
    """Raise Skip or Mismatch, or return when the case passes."""
    if case["config"]["secondary_offload_min_priority"] is None:
        policy = EvictionPolicy(case["config"]["primary_blocks"], case["config"]["secondary_blocks"])
    else:
        policy = EvictionPolicy(
            case["config"]["primary_blocks"],
            case["config"]["secondary_blocks"],
            case["config"]["secondary_offload_min_priority"],
        )
    names: dict[str, int] = {}
    for number, step in enumerate(case["steps"]):
        _run(policy, names, step, f"step {number} {step['op']}")


def _run(policy: EvictionPolicy, names: dict[str, int], step: Mapping[str, Any], where: str) -> None:
    operation = step["op"]
    if operation == "get":
        names[step["as"]] = policy.front(step["level"])
    elif operation == "claim":
        policy.claim(names[step["block"]], step.get("priority"), _seconds(step.get("duration_ms")))
    elif operation == "claim_front":
        for _ in range(step["times"]):
            policy.claim(policy.front(step["level"]))
    elif operation == "release":
        policy.release(names[step["block"]], step.get("to_front", False), _seconds(step.get("now_ms")) or 0.0)
    elif operation == "refresh":
        policy.refresh(step["now_ms"] / MILLISECONDS)
    elif operation.startswith("expect_"):
        _expect(policy, names, step, where)
    else:
        raise Skip(f"op {operation}")


def _expect(policy: EvictionPolicy, names: dict[str, int], step: Mapping[str, Any], where: str) -> None:
    what = step["op"].removeprefix("expect_")
    if what == "free":
        expect_equal(where, policy.num_free[step["level"]], step["count"])
    elif what == "priority":
        expect_equal(where, policy.priority(names[step["block"]]), step["priority"])
    elif what == "level":
        expect_equal(where, policy.level(names[step["block"]]), step["level"])
    elif what == "can_offload":
        expect_equal(where, policy.is_worth_offloading(policy.front(step["level"])), step["value"])
    elif what == "front" and "is" in step:
        expect_equal(where, policy.front(step["level"]), names[step["is"]])
    elif what == "front":
        if policy.front(step["level"]) == names[step["is_not"]]:
            raise Mismatch(f"{where}: block {step['is_not']} is in front")
    else:
        raise Skip(f"op {step['op']}")


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / MILLISECONDS
