"""The content of a config file: YAML, TOML or JSON."""

import json
import tomllib
from pathlib import Path
from typing import Any

from ifbbench.compressed import is_read_once, read_text
from ifbbench.errors import InputError

CONFIG_SUFFIXES = (".toml", ".yaml", ".yml")


def parse_config_file(path: Path) -> Any:
    """The content of a YAML, TOML or JSON file; values of YAML stay texts. A pipe without a suffix, as a shell makes it
    for `<(command)`, is YAML. InputError if it cannot be read."""
    try:
        text = read_text(path)
    except OSError as error:
        raise InputError(f"the config file cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError("the config file is not UTF-8 text.") from error
    try:
        return _parsed(path.suffix or (".yaml" if is_read_once(path) else ""), text)
    except RecursionError as error:
        raise InputError("the config file has values nested too deeply; expected a flat table.") from error


def _parsed(suffix: str, text: str) -> Any:
    if suffix == ".toml":
        try:
            return tomllib.loads(text)
        except ValueError as error:
            raise InputError(f"not valid TOML: {error}.") from error
    if suffix == ".json":
        from ifbbench.settings.json_text import check_keys

        try:
            check_keys(text)
            return json.loads(text)
        except ValueError as error:
            raise InputError(f"not valid JSON: {error}.") from error
    if suffix not in CONFIG_SUFFIXES:
        raise InputError("the name of a config file must end in .toml, .yaml or .yml, or be run.json.")
    from yaml import YAMLError

    from ifbbench.settings.yaml_text import parse_yaml

    try:
        # Every value is kept as text, as on the command line; otherwise `device: null` would be no device.
        return parse_yaml(text, as_texts=True) or {}
    except YAMLError as error:
        raise InputError(f"not valid YAML: {' '.join(str(error).split())}.") from error
