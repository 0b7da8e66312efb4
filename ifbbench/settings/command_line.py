"""Settings as the options that give them on a command line."""

from collections.abc import Mapping
from typing import Any

from ifbbench.settings.fields import as_text
from ifbbench.settings.names import setting
from ifbbench.settings.servers import SERVERS


def option_words(values: Mapping[str, Any], engine: str | None) -> list[str]:
    """The words of a command line that give these settings, by the names that `engine` has for them. What no option
    gives (None, where that is no value of its own) is left out."""
    server, words = SERVERS.get(str(engine)), list[str]()
    names: Mapping[str, str] = server.options if server else {}
    for name, value in values.items():
        option = names.get(name, name)
        if isinstance(value, bool):
            no = "no-" if name in names else "no_"
            words.append(f"--{'' if value else no}{option}")
        elif value is not None or setting(name).takes_none:
            words += [f"--{option}", as_text(value)]
    return words
