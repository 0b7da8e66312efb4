"""What a replayed case can come to, and the checks that all kinds of cases share."""

from collections.abc import Mapping, Set
from typing import Any

RULE_SET = "v1.0"

Case = Mapping[str, Any]


class Skip(Exception):
    """The case needs something that the engine does not do; the message says what."""


class Mismatch(Exception):
    """The engine does something else than the case expects."""


def require_rule_set(case: Case) -> None:
    """Skip a case that holds under other rules only."""
    if RULE_SET not in case["versions"]:
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
