"""Outcomes of replayed cases, and checks that all kinds of cases share."""

from collections.abc import Mapping, Set
from typing import Any

RULE_SET = "v1.0"
LATER_RULE_SET = "post-1.0"
LATER_FEATURE = "reuse_aware_capacity"

Case = Mapping[str, Any]


class Skip(Exception):
    """The case needs a feature that the engine does not have; the message names it."""


class Mismatch(Exception):
    """The result of the engine differs from the expected one."""


def require_rule_set(case: Case) -> None:
    """Skip a case that is valid under other rules only. Cases of later versions are replayed too unless they contradict
    the rules here: then their name ends in the version, or their feature exists only in that version."""
    later = LATER_RULE_SET in case["versions"] and not case["name"].endswith(f"[{LATER_RULE_SET}]")
    if RULE_SET not in case["versions"] and (not later or LATER_FEATURE in case["features"]):
        raise Skip(f"rule set {', '.join(case['versions'])}")


def require_features(case: Case, supported: Set[str]) -> None:
    """Skip a case that needs more than the `supported` features."""
    missing = sorted(set(case["features"]) - supported)
    if missing:
        raise Skip(", ".join(missing))


def expect_equal(what: str, actual: object, expected: object) -> None:
    """Raise Mismatch unless both are the same."""
    if actual != expected:
        raise Mismatch(f"{what}: {actual}, expected {expected}")
