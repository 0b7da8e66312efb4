"""What a replayed case can come to, and the checks that all kinds of cases share."""

from collections.abc import Mapping, Set
from typing import Any

RULE_SET = "v1.0"
LATER_RULE_SET = "post-1.0"
LATER_FEATURE = "reuse_aware_capacity"

Case = Mapping[str, Any]


class Skip(Exception):
    """The case needs something that the engine does not do; the message says what."""


class Mismatch(Exception):
    """The engine does something else than the case expects."""


def require_rule_set(case: Case) -> None:
    """Skip a case that holds under other rules only. What is said of later versions holds too, unless it contradicts
    the rules here: a name then ends in the version, or the feature is of that version alone."""
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
