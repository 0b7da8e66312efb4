"""Settings by the names that users write: own names, aliases, and names that other systems have for the same."""

from collections.abc import Mapping
from typing import Any

from ifbbench.config import RunConfig, settings
from ifbbench.errors import InputError
from ifbbench.fields import Setting, did_you_mean


def setting(name: str) -> Setting:
    """The setting called `name` (own name or alias, dashes or underscores); InputError lists near names if unknown."""
    wanted = name.replace("-", "_")
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
    or that of the command line."""
    defaults = {item.name: item.command_line_default for item in settings()} if command_line else {}
    return RunConfig(**defaults | {setting(name).name: value for name, value in values.items()})
