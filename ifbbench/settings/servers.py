"""The servers of other engines by the engine's name, and their command lines."""

import itertools
import shlex
from collections.abc import Mapping
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.config import SGLANG, VLLM
from ifbbench.settings.server import HasExperts, Line, Server
from ifbbench.settings.sglang_serve import SGLANG_SERVE
from ifbbench.settings.trtllm_serve import TRTLLM_SERVE
from ifbbench.settings.vllm_serve import VLLM_SERVE

SERVERS: Mapping[str, Server] = {VLLM: VLLM_SERVE, SGLANG: SGLANG_SERVE}
# The servers whose command lines are read.
SERVERS_READ = (*SERVERS.values(), TRTLLM_SERVE)


# Words after which a shell begins another command, or writes to a file.
_SHELL = frozenset(("&", "&&", "|", "||", ";", ">", ">>", "2>", "2>&1", "&>", "<"))


def read_line(text: str, has_experts: HasExperts = lambda _model: False) -> Line:
    """The settings of a line that starts a server, also in a container, behind variables and other programs
    (`docker run … IMAGE`, `NAME=VALUE`, `nohup`, `bash -c '…'`). InputError for a line that starts none, and for what
    it cannot mean here."""
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise InputError(f"the command line cannot be split into words ({error}); check its quotes.") from error
    for begins in (Server.options_of, Server.options_of_image):  # an image may stand before the program that it runs
        for start in range(len(words)):
            if start and words[start] == "serve":  # of `vllm bench serve`; alone it is what a container is given
                continue
            for server in SERVERS_READ:
                if (options := begins(server, words[start:])) is not None:
                    return server.read(_one_command(options), has_experts)
    for word in words:
        if any(" ".join(server.starts[0]) in word for server in SERVERS_READ) and word != text:
            return read_line(word, has_experts)
    expected = " or ".join(f"`{server.usage} …`" for server in SERVERS_READ)
    raise InputError(f"{' '.join(words[:3])!r} starts no server; expected {expected}.")


def _one_command(words: list[str]) -> list[str]:
    """`words` up to the end of the command."""
    return list(itertools.takewhile(lambda word: word not in _SHELL, words))


def write_line(values: Mapping[str, Any], engine: str) -> str:
    """The line that starts the server of `engine` with these settings, without those that it does not have."""
    return SERVERS[engine].write(values)
