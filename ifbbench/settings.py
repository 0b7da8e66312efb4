"""Settings by the names that users write: own names, aliases, and names that other systems have for the same."""

import re
from collections.abc import Mapping
from typing import Any

from ifbbench.config import RunConfig, settings
from ifbbench.errors import InputError
from ifbbench.fields import Setting, did_you_mean


def snake_case(name: str) -> str:
    """`name` with underscores instead of dashes and of capital letters: `maxNumTokens` is `max_num_tokens`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()


def setting(name: str) -> Setting:
    """The setting called `name`: its own name or an alias, with dashes, underscores or capital letters between words.
    InputError lists near names if there is none."""
    wanted = snake_case(name)
    for candidate in settings():
        if wanted in (candidate.name, *candidate.aliases):
            return candidate
    near = same_elsewhere(wanted)
    names = [item.name for item in settings()]
    hint = f" Did you mean {near}?" if near else did_you_mean(wanted, names, number_of_names=3)
    raise InputError(f"{name!r} is not a setting.{hint or ' See `ifbbench run --help`.'}")


def same_elsewhere(name: str) -> str | None:
    """The setting (with `no_` before it where it turns that off) that another system calls `name`."""
    for candidate in settings():
        if name in candidate.elsewhere.split():
            return candidate.name
        if name in candidate.opposites.split():
            return f"no_{candidate.name}"
    return None


def from_mapping(values: Mapping[str, Any], command_line: bool = False) -> RunConfig:
    """A RunConfig from names (own or alias) and values, texts included. Missing ones have the default of the library,
    or that of the command line. InputError for a setting that is given by two names."""
    defaults = {item.name: item.command_line_default for item in settings()} if command_line else {}
    given: dict[str, str] = {}
    for name in values:
        if (other := given.setdefault(setting(name).name, name)) != name:
            raise InputError(f"{name}: {other} is the same setting; give one of them.")
    return RunConfig(**defaults | {own: values[name] for own, name in given.items()})
