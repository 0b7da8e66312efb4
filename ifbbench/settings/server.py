"""Command lines of the servers of other engines: the settings that a line means, and the line of some settings."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ifbbench.errors import InputError
from ifbbench.settings.config import ENGINE_NAMES
from ifbbench.settings.fields import boolean, did_you_mean, located
from ifbbench.settings.names import setting, snake_case

MODEL, QUANTIZATION = "model", "quantization"
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float": "float32", "float32": "float32"}
DTYPES_WRITTEN = {"bf16": "bfloat16", "fp16": "float16"}
Convert = Callable[[str], dict[str, Any]]


class Line(NamedTuple):
    """What a command line means. values: by setting name, with the engine. ignored: options without an effect."""

    values: dict[str, Any]
    ignored: list[str]


def dtype_meant(value: str) -> dict[str, Any]:
    return {} if value == "auto" else {"dtype": DTYPES.get(value, value)}


def quantization_meant(value: str) -> dict[str, Any]:
    if value != "fp8":
        raise InputError(f"is {value}; expected fp8. Give the data type of the weights with --dtype.")
    return {"dtype": "fp8"}


@dataclass(frozen=True)
class Server:
    """The command line of one engine's server.

    starts: words that begin a line, where `python` is any interpreter; the first are written. options: of each setting
    that the server has. aliases: other names of its options. converted: what a value means, where it is not the
    setting's own. no_effect, no_effect_flags: options with and without a value on which no schedule and no time depends
    here. has_negations: whether `--no-` turns a flag off; else a flag that is off is left out. kv_dtypes: data types of
    the KV cache by the server's names, those that are written first. model_option: before the model, if it has one.
    own_values: settings that are written, where the server says them by others.
    """

    engine: str
    usage: str
    starts: tuple[tuple[str, ...], ...]
    options: Mapping[str, str]
    no_effect: frozenset[str]
    no_effect_flags: frozenset[str]
    kv_dtypes: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    converted: Mapping[str, Convert] = field(default_factory=dict)
    has_negations: bool = True
    model_option: str | None = None
    own_values: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict

    @cached_property
    def flags(self) -> frozenset[str]:
        """The settings that are flags."""
        return frozenset(name for name in self.options if setting(name).type is bool)

    @cached_property
    def settings(self) -> Mapping[str, str]:
        """The setting of each option."""
        return {option: name for name, option in self.options.items()}

    def options_of(self, words: list[str]) -> list[str] | None:
        """The words after the beginning of a line of this server; None of another line."""
        for start in self.starts:
            found = words[: len(start)]
            if found == list(start) or (start[0] == "python" and found[1:] == list(start[1:])):
                return words[len(start) :]
        return None

    def read(self, words: list[str]) -> Line:
        """What these options mean. InputError for an option that would change what is measured and has no counterpart,
        and for an unknown one."""
        line = Line({"engine": self.engine}, [])
        for name, value in self._given(words):
            with located(f"--{name}" if name != MODEL else self.usage):
                self._take(name, value, line)
        if MODEL not in line.values:
            raise InputError(f"{' '.join(self.starts[0])}: no model; expected `{self.usage} …`.")
        return line

    def write(self, values: Mapping[str, Any]) -> str:
        """The line of these settings. Those that the server does not have are left out."""
        words = [*self.starts[0], *([self.model_option] if self.model_option else [])]
        words.append(str(values.get(MODEL, "MODEL")))
        own = self.own_values(values)
        for name, option in self.options.items():
            value = own.get(name)
            if value is None:
                continue
            if name not in self.flags:
                words += self._written(name, option, value)
            elif value or self.has_negations:
                words.append(f"--{'' if value else 'no-'}{option}")
        return shlex.join(words)

    def _written(self, name: str, option: str, value: Any) -> list[str]:
        if name == "dtype":
            return [f"--{QUANTIZATION}", value] if value == "fp8" else [f"--{option}", DTYPES_WRITTEN.get(value, value)]
        if name == "kv_cache_dtype":
            value = next((theirs for theirs, ours in self.kv_dtypes.items() if ours == value), value)
        return [f"--{option}", f"{value:g}" if isinstance(value, float) else str(value)]

    def _given(self, words: list[str]) -> Iterator[tuple[str, str | bool]]:
        """Name and value of each option, the model among them; True or False of a flag."""
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if not word.startswith("-"):
                yield MODEL, word
                continue
            name, equals, value = word.partition("=")
            name = snake_case(name.lstrip("-")).replace("_", "-")
            name = self.aliases.get(name, name)
            positive = name.removeprefix("no-") if self.has_negations else name
            is_setting = self.settings.get(positive) in self.flags
            if is_setting or name in self.no_effect_flags:
                is_given = bool(equals) or (bool(rest) and rest[0].lower() in ("true", "false"))
                is_on = boolean(value if equals else rest.pop(0), f"--{name}", from_text=True) if is_given else True
                yield (positive, is_on == (positive == name)) if is_setting else (name, is_on)
                continue
            if not equals:
                if not self._is_known(name):
                    yield name, ""
                    continue
                if not rest:
                    raise InputError(f"--{name}: the value is missing.")
                value = rest.pop(0)
            yield name, value

    def _is_known(self, name: str) -> bool:
        return any(name in known for known in (self.settings, self.converted, self.no_effect, (MODEL, QUANTIZATION)))

    def _take(self, name: str, value: str | bool, line: Line) -> None:
        """Add one option to `line`."""
        if name == MODEL and MODEL not in line.values:
            line.values[MODEL] = value
        elif name in self.no_effect or name in self.no_effect_flags:
            line.ignored.append(name)
        elif name in self.converted:
            line.values.update(self.converted[name](str(value)))
        elif name == "dtype":
            line.values.update(dtype_meant(str(value)))
        elif name == QUANTIZATION:
            line.values.update(quantization_meant(str(value)))
        elif name == "kv-cache-dtype":
            line.values.update({} if value == "auto" else {"kv_cache_dtype": self.kv_dtypes.get(str(value), value)})
        elif name in self.settings:
            own = self.settings[name]
            line.values[own] = setting(own).check(value)
        else:
            raise InputError(
                f"this option of {ENGINE_NAMES[self.engine]} has no counterpart here, and may change what is measured; "
                "leave it out." + did_you_mean(name, list(self.settings))
            )
