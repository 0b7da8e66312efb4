"""Properties that are held to a few drawn examples by default, and to many in tests that are marked slow."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy


def holds(few: int, many: int, **strategies: SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """Make a property a test of a few drawn examples and a slow one of many."""

    def decorate(check: Callable[..., None]) -> Any:
        by_count = {count: settings(max_examples=count)(given(**strategies)(check)) for count in (few, many)}

        @functools.wraps(check)
        def test(examples: int, **fixtures: Any) -> None:
            by_count[examples](**fixtures)

        fixtures = [each for name, each in inspect.signature(check).parameters.items() if name not in strategies]
        examples = inspect.Parameter("examples", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([examples, *fixtures])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.slow)])(test)

    return decorate
