"""Validation of single fields, for command line options, files and callers of the library; and settings, the fields of
a configuration.

A function returns the value as a plain Python value or raises InputError: `NAME is VALUE; expected WHAT.` `name` is the
field as the user knows it (an option, a key, a column); `located` adds the place (file, line). None counts as missing.
Booleans are never numbers and numbers never booleans; NaN and infinities are refused; integers fit 64 bits.
from_text: the value may also be given as text, as on a command line or in a CSV file.
"""

import dataclasses
import difflib
import math
import numbers
import re
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from ifbbench.errors import InputError

MAX_INTEGER = 2**63 - 1
MAX_NUMBER = sys.float_info.max
# Limits of settings from here on only guard against overflow: help texts leave them out.
TECHNICAL_LIMIT = 10_000
# The maxima of settings that declare none of their own: larger values would overflow, or take years.
MAX_INTEGER_SETTING, MAX_NUMBER_SETTING = 2**31 - 1, 1e9
_LONGEST_NUMBER = 400  # characters; Python refuses to parse integers of more than 4,300 digits
# The longest file name in bytes; the rest of the 255 that systems allow is left for numbers and suffixes.
_LONGEST_NAME = 200
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# How a number of bytes may be given.
BYTES_FORMS = "1500000000, 1.5e9, 512M, 40GB (powers of 1000) or 40GiB (of 1024)"
_BYTES = re.compile(
    r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:e\+?\d{1,3})?) ?(?:(?P<unit>[kmgt])(?P<binary>i)?)?b?",
    re.ASCII | re.IGNORECASE,
)
# Groups of settings that a run against a server has, unless a setting says otherwise.
CLIENT_GROUPS = ("replay", "endpoint", "recording")
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def integer(
    value: Any,
    name: str,
    minimum: int = -MAX_INTEGER - 1,
    maximum: int = MAX_INTEGER,
    *,
    unit: str = "",
    from_text: bool = False,
    guards: bool = False,
) -> int:
    """`value` as an integer from `minimum` to `maximum`. Integers of NumPy are taken; floats such as 2.0 are not.

    guards: `maximum` only guards against overflow, and is named to a value beyond it only."""
    if type(value) is int and minimum <= value <= maximum:
        return value
    converted: Any = _parsed(value, int) if from_text else value
    if type(converted) is int and minimum <= converted <= maximum:
        return converted
    is_integer = isinstance(converted, numbers.Integral) and not isinstance(converted, bool)
    if is_integer and minimum <= converted <= maximum:
        return int(converted)
    is_technical = guards or maximum == MAX_INTEGER
    upper = None if is_technical and not (is_integer and converted > maximum) else maximum
    lower = minimum if minimum != -MAX_INTEGER - 1 else None
    raise unexpected(name, value, "an integer" + range_in_words(lower, upper, unit=unit))


def byte_count(value: Any, name: str, minimum: int = 0, maximum: int = MAX_INTEGER, *, guards: bool = False) -> int:
    """`value` as an integer from `minimum` to `maximum`, given as a number or as a text: 512, 1.5e9, 512M, 40GB (powers
    of 1000) or 40GiB (of 1024). Fractions of a byte are cut off where there is a unit.

    guards: as in `integer`."""
    converted = value
    if isinstance(value, float) and value.is_integer():  # as files have 1.5e9
        converted = int(value)
    elif isinstance(value, str) and len(value) <= _LONGEST_NUMBER and (found := _BYTES.fullmatch(value.strip())):
        unit = (found["unit"] or "").lower()
        size = Fraction(found["number"]) * (1024 if found["binary"] else 1000) ** " kmgt".index(unit or " ")
        converted = int(size) if unit or size.denominator == 1 else value
    return integer(converted, name, minimum, maximum, unit=f"bytes, as {BYTES_FORMS}", guards=guards)


def number(
    value: Any,
    name: str,
    minimum: float = -MAX_NUMBER,
    maximum: float = MAX_NUMBER,
    *,
    above: float | None = None,
    below: float | None = None,
    unit: str = "",
    from_text: bool = False,
    guards: bool = False,
) -> float:
    """`value` as a finite float from `minimum` to `maximum`, greater than `above` and less than `below`.

    guards: the limits only guard against overflow, and are named to values beyond them only."""
    converted = _parsed(value, float) if from_text else value
    kind = type(converted)
    if kind is not float and kind is not int:
        is_number = kind is not bool and isinstance(converted, numbers.Real)  # scalars of NumPy, fractions
        converted = _float(converted) if is_number else math.nan
    if (
        minimum <= converted <= maximum  # false for NaN and infinities
        and (above is None or converted > above)
        and (below is None or converted < below)
    ):
        return float(converted)
    lower = None if minimum == -MAX_NUMBER or (guards and minimum < 0 and not converted < minimum) else minimum
    upper = None if maximum == MAX_NUMBER or (guards and not converted > maximum) else maximum
    raise unexpected(name, value, "a finite number" + range_in_words(lower, upper, above, below, unit))


def text(value: Any, name: str) -> str:
    """`value`, a text that is not empty, without control characters and lone surrogates, which harm
    terminals and are in no file name; line breaks and tabs may be in it."""
    if isinstance(value, str) and value and not _UNPRINTABLE.search(value):
        return value
    raise unexpected(name, value, "a text")


def file_name(value: Any, name: str) -> str:
    """`value`, the name of a file or a directory that is made of it: no path to elsewhere."""
    if "/" not in text(value, name) and value.strip(". ") and len(value.encode()) <= _LONGEST_NAME:
        return str(value)
    raise unexpected(name, value, f"a name of at most {_LONGEST_NAME} bytes without /, because a directory has it")


def boolean(value: Any, name: str, *, from_text: bool = False) -> bool:
    """`value`, True or False; with `from_text` also true, false, 1 and 0 as texts, in any case."""
    if type(value) is bool:
        return value
    if from_text and isinstance(value, str) and value.lower() in _TRUTH:
        return _TRUTH[value.lower()]
    raise unexpected(name, value, "true or false")


def choice(
    value: Any,
    name: str,
    choices: Iterable[str],
    *,
    aliases: Mapping[str, str] | None = None,
    pattern: str = "",
    others: str = "",
) -> str:
    """The choice that `value` names. Case does not matter, and dashes are underscores.

    aliases: other texts for choices.
    pattern: a regular expression of texts that are returned as they are, which `others` describes in messages.
    """
    known = tuple(choices)
    if isinstance(value, str):
        folded = {_folded(one): one for one in known} | {_folded(one): to for one, to in (aliases or {}).items()}
        if _folded(value) in folded:
            return folded[_folded(value)]
        if pattern and re.fullmatch(pattern, value):
            return value
    hint = did_you_mean(value, known) if isinstance(value, str) else ""
    raise InputError(str(unexpected(name, value, f"one of {', '.join((*known, *filter(None, [others])))}")) + hint)


def integers(
    value: Any, name: str, item: str = "integer", minimum: int = -MAX_INTEGER - 1, maximum: int = MAX_INTEGER
) -> tuple[int, ...]:
    """`value`, a list of at least one integer from `minimum` to `maximum`; `item` is what one of them is called."""
    if not isinstance(value, list | tuple) or not value:
        raise unexpected(name, value, f"a list of at least one {item}")
    if set(map(type, value)) == {int} and minimum <= min(value) and max(value) <= maximum:
        return tuple(value)
    return tuple(integer(entry, f"{name}[{position}]", minimum, maximum) for position, entry in enumerate(value))


def table(value: Any, name: str, known: Iterable[str] | None = None, required: Iterable[str] = ()) -> dict[str, Any]:
    """`value`, keys and values of which `required` are given and all are among `known` (None: any)."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise unexpected(name, value, "keys and values")
    if known is not None:
        names = tuple(known)
        for key in value:
            if key not in names:
                expected = ", ".join(names) or "none"
                raise InputError(f"{name} has an unknown key {key!r}; expected {expected}.{did_you_mean(key, names)}")
    for key in required:
        if value.get(key) is None:
            raise InputError(f"{name} has no key {key!r}; expected {', '.join(required)}.")
    return value


def printable(text: str) -> str:
    """`text` with control characters and lone surrogates as escapes: from a file, they would change the terminal."""
    return _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], text)


def memory_size(num_bytes: float) -> str:
    """A number of bytes to three digits, with the unit that keeps it short: `18.8 MiB`, `512 bytes`."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    step = 0
    while abs(num_bytes) >= 1024 and step < len(units) - 1:
        num_bytes, step = num_bytes / 1024, step + 1
    decimals = (2 if abs(num_bytes) < 9.995 else 1 if abs(num_bytes) < 99.95 else 0) if step else 0
    return f"{num_bytes:,.{decimals}f} {units[step]}"


def unexpected(name: str, value: Any, expected: str) -> InputError:
    """The error for a field with this value where `expected` was."""
    return InputError(f"{name} is {'missing' if value is None else shown(value)}; expected {expected}.")


def shown(value: Any) -> str:
    """`value` as it stands in a message, without control characters, cut off after 60 characters."""
    try:
        characters = _SHORT.repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a huge integer"
    return characters if len(characters) <= 60 else characters[:57] + "..."


class _ShortRepr(reprlib.Repr):
    """`repr` of the beginning of a value. Aliases make YAML documents whose whole `repr` would never end."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxother = 4, 80
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 20

    def repr_str(self, value: str, level: int) -> str:
        return repr(value[:80])

    def repr_int(self, value: int, level: int) -> str:
        return repr(value)


_SHORT = _ShortRepr()


def range_in_words(
    minimum: float | None, maximum: float | None, above: float | None = None, below: float | None = None, unit: str = ""
) -> str:
    """` of at least 1 and below 10 (tokens)`; empty where there is no limit and no unit."""
    limits = ((" of at least ", minimum), (" of at most ", maximum), (" above ", above), (" below ", below))
    words = [f"{word}{limit:{'g' if type(limit) is float else ''}}" for word, limit in limits if limit is not None]
    if minimum is not None and maximum is not None:
        words[:2] = [f"{words[0]} to {words[1].split()[-1]}".replace("of at least", "from")]
    return " and".join(words) + (f" ({unit})" if unit else "")


# A beginning that a word and a name have in common suggests the name if it has at least so many characters, and if it
# suggests no more names than these.
_MIN_BEGINNING, _MAX_NAMES = 4, 4


def did_you_mean(word: str, known: Sequence[str], number_of_names: int = 1) -> str:
    """` Did you mean NAME?` with the known names nearest to `word`; empty if none is near. The nearest are those that
    begin with it, then those with which it begins, then those that are spelt like it."""
    folded, whole = {_folded(one): one for one in known}, _folded(word)
    names = [one for name, one in folded.items() if name.startswith(whole)] if len(whole) >= _MIN_BEGINNING else []
    names = names or [one for name, one in folded.items() if len(name) >= _MIN_BEGINNING and whole.startswith(name)]
    if not 0 < len(names) <= _MAX_NAMES:
        names = [folded[name] for name in difflib.get_close_matches(whole, folded, number_of_names, 0.5)]
    return f" Did you mean {', '.join(names)}?" if names else ""


@contextmanager
def located(place: str, advice: str = "") -> Iterator[None]:
    """Put `place` (a file, a line) before the message of an InputError raised in the block, and `advice` after it."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}{' ' if advice else ''}{advice}") from None


def _parsed(value: Any, kind: Callable[[str], Any]) -> Any:
    if not isinstance(value, str) or len(value) > _LONGEST_NUMBER or not value.isascii():
        return value
    try:
        return kind(value)
    except ValueError:
        return value


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # a fraction
        return math.inf


def _folded(word: str) -> str:
    return word.lower().replace("-", "_")


# Settings: fields of a dataclass, with all that commands, config files and errors need to know of them.


def declare(group: str, default: Any, help: str, **facts: Any) -> Any:
    """The default of a field that is a setting. facts: those of `Setting`, by name."""
    return field(default=default, metadata={"help": help, "group": group, **facts})


def or_none(value: Any) -> Any:
    """None for the text none."""
    return None if isinstance(value, str) and value.lower() in ("none", "null") else value


def as_text(value: Any) -> str:
    """The value of a setting as it is given on the command line: true, none, 512."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of `RunConfig`: its names, default, help text and the values it takes.

    is_optional: None is a value. Where it is the command line's default, the model, the device and the other settings
        resolve it; elsewhere it is a choice of its own, which is given as none (see `takes_none`).
    default: default of the library.
    command_line_default: default of commands and config files.
    choices, value_aliases, other_texts, others: see `choice`.
    convert: is applied to a value before it is checked.
    is_list: an option may be given several times; `convert` makes one value of them.
    aliases: names that are taken too.
    elsewhere: its names in vLLM, SGLang, TensorRT-LLM and llama.cpp, which are only suggested.
    opposites: names that turn it off.
    engine_decides: some engines have a default that is not None, which none leaves out.
    family: name of a group of settings that are asked for together.
    is_common: whether `--help` lists it where it does not list all settings.
    with_endpoint: whether a run against a server has it; None if its group decides.
    """

    name: str
    type: type
    is_optional: bool
    default: Any
    command_line_default: Any
    help: str
    group: str
    unit: str = ""
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    value_aliases: Mapping[str, str] = field(default_factory=dict, hash=False)
    other_texts: str = ""
    others: str = ""
    convert: Callable[[Any], Any] | None = None
    is_list: bool = False
    aliases: tuple[str, ...] = ()
    elsewhere: str = ""
    opposites: str = ""
    engine_decides: bool = False
    family: str = ""
    is_common: bool = False
    with_endpoint: bool | None = None

    @property
    def is_of_client(self) -> bool:
        """Whether a run against a server of others has it: it is not of an engine."""
        return self.group in CLIENT_GROUPS if self.with_endpoint is None else self.with_endpoint

    @property
    def has_default(self) -> bool:
        """Whether None is another choice than the default of every engine, so that a None that was recorded is not a
        setting left out."""
        return self.is_optional and self.command_line_default is not None

    @property
    def takes_none(self) -> bool:
        """Whether None is a choice that is given as none, because it is not the default, or not with every engine."""
        return self.has_default or self.engine_decides

    def check(self, value: Any) -> Any:
        """`value`, as given on any surface (texts included), as this setting's type; InputError if it is not valid."""
        name = f"--{self.name}"
        if value is None and self.is_optional:
            return None
        if self.convert is not None and (value := self.convert(value)) is None and self.is_optional:
            return None
        if self.choices:
            return choice(
                value, name, self.choices, aliases=self.value_aliases, pattern=self.other_texts, others=self.others
            )
        if self.type is bool:
            return boolean(value, name, from_text=True)
        if self.type is str:
            return text(value, name)
        limits = {name: limit for name in ("minimum", "maximum") if (limit := getattr(self, name)) is not None}
        guards = self.maximum is not None and self.maximum >= TECHNICAL_LIMIT
        if self.unit == "bytes":
            return byte_count(value, name, **limits, guards=guards)
        if self.type is int:
            return integer(value, name, **limits, unit=self.unit, from_text=True, guards=guards)
        return number(value, name, **limits, above=self.above, unit=self.unit, from_text=True, guards=guards)


def settings_of(config_type: type) -> tuple[Setting, ...]:
    """The settings of a dataclass, in its order."""
    hints, found = typing.get_type_hints(config_type), []
    limits: dict[type, dict[str, float]] = {
        int: {"maximum": MAX_INTEGER_SETTING},
        float: {"minimum": -MAX_NUMBER_SETTING, "maximum": MAX_NUMBER_SETTING},
    }
    for item in dataclasses.fields(config_type):
        hint, facts = hints[item.name], {"command_line_default": item.default, **item.metadata}
        is_optional = isinstance(hint, types.UnionType)  # int | None, and likewise
        plain_type = typing.get_args(hint)[0] if is_optional else hint
        guards = limits.get(plain_type, {})
        if "above" in facts:
            guards = {name: limit for name, limit in guards.items() if name != "minimum"}
        found.append(Setting(item.name, plain_type, is_optional, item.default, **guards | facts))
    return tuple(found)
