"""Settings by the names that users write: own names, aliases, and names that other systems have for the same."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.config import RunConfig, settings
from ifbbench.settings.fields import Setting


def snake_case(name: str) -> str:
    """`name` with underscores instead of dashes and of capital letters: `maxSeqLen` is `max_seq_len`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()


def setting(name: str) -> Setting:
    """The setting called `name`: its own name or an alias, with dashes, underscores or capital letters between words.
    InputError lists near names if there is none."""
    known, wanted = _by_name(), snake_case(name)
    if found := known.get(wanted):
        return found
    same = same_elsewhere(wanted)
    near = [same] if same else [known[one].name for one in get_close_matches(wanted, known, n=3, cutoff=0.5)]
    hint = f"Did you mean {', '.join(dict.fromkeys(near))}?" if near else "See `ifbbench run --help`."
    raise InputError(f"{name!r} is not a setting. {hint}")


@cache
def _by_name() -> dict[str, Setting]:
    """The settings by their names and aliases."""
    return {name: item for item in settings() for name in (item.name, *item.aliases)}


def same_elsewhere(name: str) -> str | None:
    """The setting (with `no_` before it where it turns that off) that another system calls `name`."""
    for candidate in settings():
        if name in candidate.elsewhere.split():
            return candidate.name
        if name in candidate.opposites.split():
            return f"no_{candidate.name}"
    return None


def own_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` by the settings' own names. InputError for a setting that is given by two names."""
    given: dict[str, str] = {}
    for name in values:
        if (other := given.setdefault(setting(name).name, name)) != name:
            raise InputError(f"{name}: {other} is the same setting; give one of them.")
    return {own: values[name] for own, name in given.items()}


def usual_settings(engine_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The value of each setting that is not given on the command line. engine_defaults: those of --engine_overhead."""
    return from_mapping(engine_defaults, command_line=True).as_dict()


def from_mapping(values: Mapping[str, Any], command_line: bool = False) -> RunConfig:
    """A RunConfig from names (own or alias) and values, texts included. Missing ones have the default of the library,
    or that of the command line."""
    defaults = {item.name: item.command_line_default for item in settings()} if command_line else {}
    return RunConfig(**defaults | own_names(values))
