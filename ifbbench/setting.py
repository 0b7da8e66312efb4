"""One setting as every surface sees it: its names, its default, the values it takes and what is said of others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ifbbench import fields


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of `RunConfig`: its name, type, default, range, help text and aliases.

    default: that of the library. command_line_default: that of commands and config files. None, of an optional setting,
    is resolved by what the model, the device and the other settings allow.

    choices: the values of a text; case does not matter, and dashes are underscores. value_aliases: other words for
        them. other_texts: a pattern of texts that are taken too, and judged where they are used; `others` says in words
        what they are. convert: applied to a text before it is looked at.
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
    maximum: float | None = None
    exclusive_minimum: bool = False
    choices: tuple[str, ...] = ()
    value_aliases: Mapping[str, str] = field(default_factory=dict, hash=False)
    other_texts: str = ""
    others: str = ""
    convert: Callable[[str], str] | None = None
    aliases: tuple[str, ...] = ()

    def check(self, value: Any) -> Any:
        """`value`, as given on any surface (texts included), as this setting's type; InputError if it is not valid."""
        name = f"--{self.name}"
        if value is None and self.is_optional:
            return None
        if self.convert is not None and isinstance(value, str):
            value = self.convert(value)
        if self.choices:
            return fields.choice(value, name, self.choices, aliases=self.value_aliases, pattern=self.other_texts,
                                 others=self.others)  # fmt: skip
        if self.type is bool:
            return fields.boolean(value, name, from_text=True)
        if self.type is str:
            # max_attention_window = 512, or (512, 1024)
            is_convertible = isinstance(value, int | list | tuple) and not isinstance(value, bool)
            return fields.text(str(value) if is_convertible else value, name)
        if self.type is int:
            return fields.integer(value, name, **self._range(fields.MAX_INTEGER), from_text=True)
        above = self.minimum if self.exclusive_minimum else None
        return fields.number(value, name, **self._range(fields.MAX_NUMBER), above=above, from_text=True)

    def _range(self, limit: Any) -> dict[str, Any]:
        minimum = -limit if self.minimum is None or self.exclusive_minimum else self.minimum
        return {"minimum": minimum, "maximum": limit if self.maximum is None else self.maximum, "unit": self.unit}

    def expected(self) -> str:
        """What a value must be, in words: `an integer of at least 1 (requests)`."""
        if self.choices:
            return f"one of {', '.join(self.choices)}{', ' + self.others if self.others else ''}"
        words = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}[self.type]
        minimum, above = (None, self.minimum) if self.exclusive_minimum else (self.minimum, None)
        return words + fields.range_in_words(minimum, self.maximum, above, unit=self.unit)
