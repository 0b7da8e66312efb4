"""The servers of other engines by the engine's name, and their command lines."""

import shlex
from collections.abc import Mapping
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.config import SGLANG, VLLM
from ifbbench.settings.server import Line, Server
from ifbbench.settings.sglang_serve import SGLANG_SERVE
from ifbbench.settings.vllm_serve import VLLM_SERVE

SERVERS: Mapping[str, Server] = {VLLM: VLLM_SERVE, SGLANG: SGLANG_SERVE}


def read_line(text: str) -> Line:
    """The settings of a line that starts a server. InputError for a line of none, and for what it cannot mean here."""
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise InputError(f"the command line cannot be split into words ({error}); check its quotes.") from error
    for server in SERVERS.values():
        if (options := server.options_of(words)) is not None:
            return server.read(options)
    expected = " or ".join(f"`{server.usage} …`" for server in SERVERS.values())
    raise InputError(f"{' '.join(words[:3])!r} starts no server; expected {expected}.")


def write_line(values: Mapping[str, Any], engine: str) -> str:
    """The line that starts the server of `engine` with these settings, without those that it does not have."""
    return SERVERS[engine].write(values)
