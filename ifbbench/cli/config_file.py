"""Settings from a file: a flat YAML or TOML table of setting names and values."""

import tomllib
from pathlib import Path
from typing import Any

from ifbbench.config import setting
from ifbbench.errors import InputError

_READERS_BY_SUFFIX = ".toml, .yaml or .yml"


def read_config_file(path: Path) -> dict[str, Any]:
    """Checked values by setting name; InputError names the file and the entry that is wrong."""
    table = _parse(path)
    if not isinstance(table, dict):
        raise InputError(f"{path}: expected a table of settings, one `name: value` each.")
    values: dict[str, Any] = {}
    for name, value in table.items():
        try:
            wanted = setting(str(name))
            if not isinstance(value, str | int | float):
                raise InputError(f"{name}: expected {wanted.expected()}, not a {type(value).__name__}.")
            if wanted.name in values:
                raise InputError(f"{wanted.name} is given twice, once as {name}.")
            values[wanted.name] = wanted.check(value)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
    return values


def _parse(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: the config file cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: the config file is not UTF-8 text.") from error
    if path.suffix == ".toml":
        return _parse_toml(path, text)
    if path.suffix in (".yaml", ".yml"):
        return _parse_yaml(path, text)
    raise InputError(f"{path}: a config file's name must end in {_READERS_BY_SUFFIX}.")


def _parse_toml(path: Path, text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not valid TOML: {error}.") from error


def _parse_yaml(path: Path, text: str) -> Any:
    import yaml

    try:
        # BaseLoader leaves every value a text, as on the command line; else `device: null` would mean nothing.
        table = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML: {' '.join(str(error).split())}.") from error
    return table if table else {}
