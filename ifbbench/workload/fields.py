"""Typed reading of one trace row's fields."""

import math
import re
from collections.abc import Mapping
from typing import Any

MAX_LENGTH = 2**31 - 1
MAX_ID = 2**63 - 1
_INTEGER = re.compile(r"\s*-?[0-9]{1,18}\s*")


class BadRow(ValueError):
    """What is wrong with one row: field, value and what was expected. The reader adds the file and the row."""


class UnknownFormat(ValueError):
    """What was found where a trace file of a known format was expected. The reader adds the file."""


def integer(row: Mapping[str, Any], field: str, minimum: int = 1, maximum: int = MAX_LENGTH) -> int:
    """`row[field]` as an integer in the given range; a text, a float or a bool is none."""
    value = row.get(field)
    if type(value) is int and minimum <= value <= maximum:
        return value
    raise unexpected(field, present(row, field), f"an integer from {minimum} to {maximum}")


def integer_text(row: Mapping[str, Any], field: str) -> int:
    """`row[field]`, a text of digits as in a CSV file, as an integer of at least 1."""
    value = present(row, field)
    return integer({field: int(value) if _INTEGER.fullmatch(value) else value}, field)


def number(row: Mapping[str, Any], field: str, minimum: float = 0.0, maximum: float = math.inf) -> float:
    """`row[field]` as a finite float in the given range."""
    value = row.get(field)
    if type(value) is float or type(value) is int:
        try:
            converted = float(value)
        except OverflowError:
            converted = math.nan
        if minimum <= converted <= maximum and converted != math.inf:
            return converted
    upper = "" if maximum == math.inf else f" and at most {maximum:g}"
    raise unexpected(field, present(row, field), f"a finite number of at least {minimum:g}{upper}")


def token_ids(row: Mapping[str, Any], field: str) -> tuple[int, ...]:
    """`row[field]` as a non-empty list of token ids, each an integer of at least 0."""
    return integers(row, field, "token id", "an integer of at least 0")


def integers(
    row: Mapping[str, Any], field: str, item: str, range_text: str, minimum: int = 0, maximum: int = MAX_LENGTH
) -> tuple[int, ...]:
    """`row[field]` as a non-empty list of integers in the given range; `item` and `range_text` say what they are."""
    value = present(row, field)
    if not isinstance(value, list) or not value:
        raise unexpected(field, value, f"a list of at least one {item}")
    for position, entry in enumerate(value):
        if type(entry) is not int or not minimum <= entry <= maximum:
            raise unexpected(f"{field}[{position}]", entry, f"a {item}, {range_text}")
    return tuple(value)


def has(row: Mapping[str, Any], field: str) -> bool:
    """Whether the row gives this field; null counts as not given."""
    return row.get(field) is not None


def present(row: Mapping[str, Any], field: str) -> Any:
    """`row[field]`, or BadRow where it is missing or null."""
    if not has(row, field):
        raise BadRow(f"field {field!r} is missing")
    return row[field]


def json_object(value: Any) -> Mapping[str, Any]:
    """`value` itself if it is a JSON object, else BadRow."""
    if not isinstance(value, dict):
        raise BadRow(f"{_short(value)} is not valid; expected a JSON object")
    return value


def unexpected(field: str, value: Any, expected: str) -> BadRow:
    """What to raise where `field` is not what was expected."""
    return BadRow(f"field {field!r} is {_short(value)}; expected {expected}")


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a huge integer"
    return text if len(text) <= 60 else text[:57] + "..."
