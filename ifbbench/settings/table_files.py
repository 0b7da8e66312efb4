"""Files that hold a list of tables: the replicas of a fleet, and what happens to them over time."""

from pathlib import Path
from typing import Any

from ifbbench.compressed import read_text
from ifbbench.errors import InputError
from ifbbench.settings.fields import located, table


def read_tables(path: Path, option: str) -> list[dict[str, Any]]:
    """The tables of a YAML or JSON file, in its order; each value is a text, as it is written. InputError names
    `option` and the file."""
    from yaml import YAMLError

    from ifbbench.settings.yaml_text import parse_yaml

    with located(f"{option} {path}"):
        try:
            content = parse_yaml(read_text(path), as_texts=True)
        except OSError as error:
            raise InputError(f"the file cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise InputError("the file is not UTF-8 text.") from error
        except (YAMLError, RecursionError) as error:
            raise InputError(f"not valid YAML: {' '.join(str(error).split())}.") from error
        if not isinstance(content, list) or not content:
            raise InputError("expected a list with at least one entry, each with keys and values (`- key: value`).")
        return [table(entry or {}, f"entry {number}") for number, entry in enumerate(content, start=1)]
