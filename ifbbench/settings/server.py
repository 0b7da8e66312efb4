"""Command lines of the servers of other engines: the settings that a line means, and the line of some settings."""

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ifbbench.errors import InputError
from ifbbench.settings.config_file import parse_config_file
from ifbbench.settings.dtypes import DTYPES
from ifbbench.settings.engines import ENGINE_NAMES
from ifbbench.settings.fields import boolean, did_you_mean, integer, located, table
from ifbbench.settings.names import setting, snake_case

MODEL, QUANTIZATION, CONFIG, KV_DTYPE = "model", "quantization", "config", "kv_cache_dtype"
OTHER_OPTIONS = Path(__file__).with_name("server_options.toml")
DTYPES_READ = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float": "float32"}
DTYPES_WRITTEN = {"bf16": "bfloat16", "fp16": "float16"}
# 4-bit integers have several formats, which the checkpoint names.
QUANTIZATIONS_WRITTEN = {"fp8": "fp8", "fp8_block": "fp8", "mxfp4": "mxfp4", "nvfp4": "modelopt_fp4", "int4": None}
# Formats of weights by the names that servers have for them. The others say nothing beside the checkpoint.
QUANTIZATIONS = {
    "modelopt": "fp8", "modelopt_fp8": "fp8", "ptpc_fp8": "fp8", "fbgemm_fp8": "fp8", "w8a8_fp8": "fp8",
    "modelopt_fp4": "nvfp4", "awq": "int4", "awq_marlin": "int4", "gptq": "int4", "gptq_marlin": "int4",
}  # fmt: skip
OF_CHECKPOINT = ("auto", "none", "compressed-tensors", "quark")
ACCEPTANCE = "add acceptance_rate: R1,R2,…, the probability that a draft token is accepted if all before it were."
_LEVEL = re.compile(r"-O[0-9]")  # of vLLM's compilation, which is written as a compiler's
Convert = Callable[[str], dict[str, Any]]


class Line(NamedTuple):
    """What a command line means.

    values: values by setting name, with the engine.
    ignored: options on which neither schedule nor times depend here.
    not_simulated: options with which the server's schedule, times or memory may differ from what is simulated.
    notes: what else has to be known, in sentences.
    """

    values: dict[str, Any]
    ignored: list[str]
    not_simulated: list[str]
    notes: list[str]

    def remarks(self) -> list[str]:
        """What the settings do not say, one sentence each."""
        found = list(self.notes)
        if self.not_simulated:
            differs = "with them the server's schedule, times or memory may differ"
            found.append(f"Not simulated: {_listed(self.not_simulated)}; {differs}.")
        if self.ignored:
            found.append(f"Without effect here: {_listed(self.ignored)}.")
        return found


def _listed(names: list[str]) -> str:
    return ", ".join(f"--{name}" for name in names)


Given = Mapping[str, str | bool]
HasExperts = Callable[[str], bool]
"""Whether the model of this name has experts."""
Join = Callable[[Given, Line, HasExperts], None]
"""Adds to a line what options mean that depend on each other."""


def no_join(_given: Given, _line: Line, _has_experts: HasExperts) -> None:
    """Each option of the server stands for itself."""


def dtype_meant(value: str) -> dict[str, Any]:
    return {} if value == "auto" else {"dtype": setting("dtype").check(DTYPES_READ.get(value, value))}


def quantization_meant(value: str) -> dict[str, Any]:
    name = value.lower()
    if name in OF_CHECKPOINT:
        return {}
    dtype = QUANTIZATIONS.get(name, name)
    if dtype not in DTYPES:
        raise InputError(
            f"is {value}, which is not simulated; expected one of {', '.join(('fp8', 'mxfp4', *QUANTIZATIONS))}."
        )
    return {"dtype": dtype}


def number_of(given: Given, option: str, default: int = 1) -> int:
    """The value of an option that is an integer of at least 1."""
    return integer(given.get(option, str(default)), f"--{option}", 1, from_text=True)


def of_all_ranks(values: Mapping[str, Any], limits: tuple[str, ...], ranks: int) -> dict[str, Any]:
    """The limits of all ranks of data parallelism together, of `values` that hold for each rank. limits: the names of
    these settings; what is not given is left out."""
    return {name: setting(name).check(values[name]) * ranks for name in limits if values.get(name) is not None}


def of_each_rank(values: Mapping[str, Any], limits: tuple[str, ...], ranks: int) -> dict[str, Any]:
    """The limits of each rank, of `values` that hold for all of them together: see `of_all_ranks`. A limit below
    their number becomes 1 each: a server takes no 0 there, or runs nothing with it."""
    return {name: max(min(1, values[name]), values[name] // ranks) for name in limits if values.get(name) is not None}


def uneven_limits(values: Mapping[str, Any], limits: tuple[str, ...], names: Mapping[str, str]) -> list[str]:
    """A sentence for each limit of all ranks together that is no multiple of their number, so that ranks with equal
    limits have another one together. names: what the server calls them."""
    ranks = values.get("attention_dp_size") or 1
    return [
        f"{names[name]}: {values[name]} for {ranks} ranks together is no multiple of {ranks}; what is written gives "
        f"each rank {each}, which is {each * ranks} together."
        for name, each in of_each_rank(values, limits, ranks).items()
        if each * ranks != values[name]
    ]


def json_table(value: str | bool, option: str) -> dict[str, Any]:
    """The JSON object that an option has as its value."""
    try:
        found = json.loads(str(value))
    except (ValueError, RecursionError) as error:
        raise InputError(f"--{option}: is not valid JSON ({error}); check its quotes.") from error
    if not isinstance(found, dict):
        raise InputError(f'--{option}: expected a JSON object, such as {{"num_speculative_tokens": 3}}.')
    return found


class _Others(NamedTuple):
    """Names of options that are no settings, by what they take and by what they change."""

    flags: frozenset[str]
    lists: frozenset[str]
    no_effect: frozenset[str]
    not_simulated: frozenset[str]

    @classmethod
    def of_engine(cls, engine: str) -> "_Others":
        tables = tomllib.loads(OTHER_OPTIONS.read_text(encoding="utf-8"))[engine]

        def names(takes: tuple[str, ...], changes: tuple[str, ...]) -> frozenset[str]:
            return frozenset(name for change in changes for take in takes for name in tables[change][take].split())

        takes, changes = ("values", "flags", "lists"), ("no_effect", "not_simulated")
        return cls(names(("flags",), changes), names(("lists",), changes), *(names(takes, (one,)) for one in changes))


@dataclass(frozen=True)
class Server:
    """The command line of one engine's server.

    starts: words that begin a line, where `python` is any interpreter; the first are written.
    options: options of each setting that the server has.
    kv_dtypes: data types of the KV cache by the server's names; the first ones are written.
    images: beginnings of the names of container images that start it.
    aliases: other names of its options.
    converted: what a value means, where it is not the setting's own.
    joint, joint_flags: options with and without a value that depend on others, and `join` reads them.
    has_negations: whether `--no-` turns a flag off; else a flag that is off is left out.
    model_option: option before the model, if it has one.
    of_a_rank: limits that hold for each rank of data parallelism.
    own_words: the words of settings that no single option says, and the settings that are left.
    """

    engine: str
    version: str
    usage: str
    starts: tuple[tuple[str, ...], ...]
    options: Mapping[str, str]
    kv_dtypes: Mapping[str, str]
    images: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    converted: Mapping[str, Convert] = field(default_factory=dict)
    joint: frozenset[str] = frozenset()
    joint_flags: frozenset[str] = frozenset()
    join: Join = no_join
    has_negations: bool = True
    model_option: str | None = None
    of_a_rank: tuple[str, ...] = ()
    own_words: Callable[[Mapping[str, Any]], tuple[list[str], Mapping[str, Any]]] = lambda values: ([], values)

    @cached_property
    def flags(self) -> frozenset[str]:
        """The settings that are flags."""
        return frozenset(name for name in self.options if setting(name).type is bool)

    @cached_property
    def settings(self) -> Mapping[str, str]:
        """The setting of each option."""
        return {option: name for name, option in self.options.items()}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All options, of which a line may write an unambiguous beginning, as argparse and click allow it."""
        own = (*self.settings, *self.converted, *self.joint, *self.joint_flags, MODEL, QUANTIZATION)
        return tuple(dict.fromkeys((*own, *sorted(self.others.no_effect | self.others.not_simulated))))

    @cached_property
    def others(self) -> _Others:
        """The options that are no settings."""
        return _Others.of_engine(self.engine)

    def options_of(self, words: list[str]) -> list[str] | None:
        """The words after the beginning of a line of this server; None of another line."""
        program = words[0].rpartition("/")[2]
        for start in self.starts:
            is_program = program == start[0] or (start[0] == "python" and program.startswith("python"))
            if is_program and words[1 : len(start)] == list(start[1:]):
                return words[len(start) :]
        return None

    def options_of_image(self, words: list[str]) -> list[str] | None:
        """The words after the name of a container image that starts this server; None of another word."""
        return words[1:] if words[0].removeprefix("docker.io/").startswith(self.images) else None

    def read(self, words: list[str], has_experts: HasExperts) -> Line:
        """What these options mean. InputError for those that the server does not have, and for values that cannot
        be."""
        line = Line({"engine": self.engine}, [], [], [])
        joint: dict[str, str | bool] = {}
        unknown: list[str] = []
        for name, value in self._given(self._with_file(words)):
            if name in self.joint or name in self.joint_flags:
                joint[name] = value
                continue
            with located(f"--{name}" if name != MODEL else self.usage):
                if not self._take(name, value, line):
                    unknown.append(name)
        if unknown:
            are = "is no option" if len(unknown) == 1 else "are no options"
            raise InputError(
                f"{_listed(unknown)}: {are} of {ENGINE_NAMES[self.engine]} {self.version}; correct or leave out what "
                "your version does not have." + "".join(did_you_mean(name, self.names) for name in unknown)
            )
        if MODEL not in line.values:
            raise InputError(f"{' '.join(self.starts[0])}: no model; expected `{self.usage} …`.")
        self.join(joint, line, has_experts)
        return line

    def write(self, values: Mapping[str, Any]) -> str:
        """The line of these settings. Those that the server does not have are left out."""
        words = [*self.starts[0], *([self.model_option] if self.model_option else [])]
        words.append(str(values.get(MODEL, "MODEL")))
        more, own = self.own_words(values)
        for name in self.options:
            if own.get(name) is not None:
                words += self.option(name, own[name])
        return shlex.join(words + more)

    def remarks(self, values: Mapping[str, Any]) -> list[str]:
        """What the written line does not say of these settings, one sentence each."""
        return uneven_limits(values, self.of_a_rank, {name: f"--{option}" for name, option in self.options.items()})

    def option(self, name: str, value: Any) -> list[str]:
        """The words that give a setting of the server this value."""
        option = self.options[name]
        if name in self.flags:
            return [f"--{'' if value else 'no-'}{option}"] if value or self.has_negations else []
        if name == "dtype":
            if value not in QUANTIZATIONS_WRITTEN:
                return [f"--{option}", DTYPES_WRITTEN.get(value, value)]
            format = QUANTIZATIONS_WRITTEN[value]
            return [f"--{QUANTIZATION}", format] if format else []
        if name == KV_DTYPE:
            value = next((theirs for theirs, ours in self.kv_dtypes.items() if ours == value), value)
        return [f"--{option}", f"{value:g}" if isinstance(value, float) else str(value)]

    def _with_file(self, words: list[str]) -> list[str]:
        """`words` behind the options in the YAML file of --config, which they win over."""
        option = f"--{CONFIG}"
        index = next((at for at, word in enumerate(words) if word.partition("=")[0] == option), None)
        if CONFIG in self.aliases or index is None:
            return words
        _, equals, path = words[index].partition("=")
        if not equals and index + 1 == len(words):
            raise InputError(f"{option}: the value is missing.")
        others = words[:index] + words[index + (1 if equals else 2) :]
        path = path if equals else words[index + 1]
        found = list[str]()
        with located(path):
            for name, value in table(parse_config_file(Path(path)), "the content").items():
                is_flag = str(value).lower() in ("true", "false")
                text = json.dumps(value) if isinstance(value, dict) else str(value)
                found += [f"--{name}={text}"] if is_flag or not isinstance(value, list) else [f"--{name}", *value]
        return found + others

    def _given(self, words: list[str]) -> Iterator[tuple[str, str | bool]]:
        """Name and value of each option, the model among them; True or False of a flag. Options of one key in a JSON
        object (`--speculative-config.method`) are put together."""
        rest, tables, model = list(words), dict[str, dict[str, Any]](), ""
        while rest:
            word = rest.pop(0)
            if not word.startswith("-"):
                if model:
                    raise InputError(f"{word!r} stands beside the model {model!r}; expected one model.")
                model = word
                yield MODEL, word
                continue
            name, key, value = self._split(word)
            positive = name.removeprefix("no-") if self.has_negations else name
            flag = next((one for one in (name, positive) if self._is_flag(one)), None)
            if flag is not None:
                if value is None and rest and rest[0].lower() in ("true", "false"):
                    value = rest.pop(0)
                is_on = value is None or boolean(value, f"--{name}", from_text=True)
                yield flag, is_on == (flag == name)
                continue
            is_known = name in self.names
            if name in self.others.lists or (not is_known and value is None):
                while rest and not rest[0].startswith("-"):
                    rest.pop(0)
                value = ""
            elif value is None:
                if not rest:
                    raise InputError(f"--{name}: the value is missing.")
                value = rest.pop(0)
            if key and is_known:
                tables.setdefault(name, {})[key] = value
            else:
                yield name, value
        for name, keys in tables.items():
            yield name, json.dumps(keys)

    def _split(self, word: str) -> tuple[str, str, str | None]:
        """The option that a word names, the key of a JSON object behind it, and the value in the same word."""
        if _LEVEL.fullmatch(word):
            word = f"--optimization-level={word[2:]}"
        option, equals, value = word.partition("=")
        name, _, key = snake_case(option.lstrip("-")).partition(".")
        name = name.replace("_", "-")
        name = self.aliases.get(name, name)
        longer = [one for one in self.names if one.startswith(name)] if name not in self.names else []
        return longer[0] if len(longer) == 1 else name, key, value if equals else None

    def _is_flag(self, name: str) -> bool:
        return self.settings.get(name) in self.flags or name in self.joint_flags or name in self.others.flags

    def _take(self, name: str, value: str | bool, line: Line) -> bool:
        """Add one option to `line`; False of an option that the server does not have."""
        if name == MODEL:
            line.values[MODEL] = value
        elif name in self.others.no_effect:
            line.ignored.append(name)
        elif name in self.others.not_simulated:
            if value is not False:
                line.not_simulated.append(name)
        elif name in self.converted:
            line.values.update(self.converted[name](str(value)))
        elif name == "dtype":
            line.values.update(dtype_meant(str(value)))
        elif name == QUANTIZATION:
            line.values.update(quantization_meant(str(value)))
        elif name == "kv-cache-dtype":
            dtype = self.kv_dtypes.get(str(value), value)
            line.values.update({} if value == "auto" else {KV_DTYPE: setting(KV_DTYPE).check(dtype)})
        elif name in self.settings:
            own = self.settings[name]
            line.values[own] = setting(own).check(value)
        else:
            return False
        return True
