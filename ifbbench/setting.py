"""One setting as every surface sees it: its names, its default, the values it takes and what is said of others."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ifbbench.errors import InputError


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of `RunConfig`: its name, type, default, range, help text and aliases.

    choices: the values of a text; case does not matter, and dashes are underscores. value_aliases: other words for
        them. other_texts: a pattern of texts that are taken too, and judged where they are used; `others` says in words
        what they are.
    """

    name: str
    type: type
    default: Any
    help: str
    group: str
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: bool = False
    choices: tuple[str, ...] = ()
    value_aliases: Mapping[str, str] = field(default_factory=dict, hash=False)
    other_texts: str = ""
    others: str = ""
    aliases: tuple[str, ...] = ()

    def check(self, value: Any) -> Any:
        """Return `value` as this setting's type, or raise InputError saying what was expected."""
        if value is None:
            if self.default is None:
                return None
            raise self._error(value)
        try:
            value = _convert(value, self.type)
        except (TypeError, ValueError, KeyError) as error:
            raise self._error(value) from error
        if self.choices:
            return self._check_choice(value)
        if self.minimum is not None and (value < self.minimum or (self.exclusive_minimum and value == self.minimum)):
            raise self._error(value)
        if self.maximum is not None and value > self.maximum:
            raise self._error(value)
        return value

    def expected(self) -> str:
        """What a value must be, in words: `an integer of at least 1 (requests)`."""
        if self.choices:
            return f"one of {', '.join(self.choices)}{', ' + self.others if self.others else ''}"
        words = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}[self.type]
        if self.minimum is not None:
            words += f" {'above' if self.exclusive_minimum else 'of at least'} {self.minimum:g}"
        if self.maximum is not None:
            words += f"{' and' if self.minimum is not None else ''} at most {self.maximum:g}"
        return words + (f" ({self.unit})" if self.unit else "")

    def _check_choice(self, value: str) -> str:
        known = {_folded(choice): choice for choice in self.choices}
        known |= {_folded(alias): choice for alias, choice in self.value_aliases.items()}
        if _folded(value) in known:
            return known[_folded(value)]
        if self.other_texts and re.fullmatch(self.other_texts, value):
            return value
        raise self._error(value)

    def _error(self, value: Any) -> InputError:
        return InputError(f"--{self.name}: {value!r} is not valid; expected {self.expected()}.")


def _folded(text: str) -> str:
    return text.lower().replace("-", "_")


def _convert(value: Any, kind: type) -> Any:
    if kind is bool:
        if isinstance(value, str):
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        return bool(value)
    if kind is int and isinstance(value, float) and not value.is_integer():
        raise ValueError(value)
    converted = kind(value)
    if kind is float and not math.isfinite(converted):
        raise ValueError("not a finite number")
    return converted
