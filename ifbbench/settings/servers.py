"""The servers of other engines by the engine's name, and their command lines."""

import itertools
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.engines import ENGINE_NAMES, SGLANG, VLLM
from ifbbench.settings.fields import shown
from ifbbench.settings.groups.vllm import VLLM_VERSIONS
from ifbbench.settings.manifests import container_lines
from ifbbench.settings.server import HasExperts, Line, Server
from ifbbench.settings.sglang_serve import SGLANG_SERVE
from ifbbench.settings.trtllm_serve import TRTLLM_SERVE
from ifbbench.settings.vllm_serve import VLLM_SERVE

SERVERS: Mapping[str, Server] = {VLLM: VLLM_SERVE, SGLANG: SGLANG_SERVE}
# The servers whose command lines are read.
SERVERS_READ = (*SERVERS.values(), TRTLLM_SERVE)


# Words after which a shell begins another command, or writes to a file.
_SHELL = frozenset(("&", "&&", "|", "||", ";", ">", ">>", "2>", "2>&1", "&>", "<"))
# Images of containers whose tag is a version of the server, such as vllm/vllm-openai:v0.19.1.
_TAG = re.compile(
    r"(?:docker\.io/)?(?:vllm/vllm-openai|lmsysorg/sglang)[^:]*:v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", re.ASCII
)


def read_line(text: str, has_experts: HasExperts = lambda _model: False) -> Line:
    """The settings of a line that starts a server, also in a container, behind variables and other programs
    (`docker run … IMAGE`, `NAME=VALUE`, `nohup`, `bash -c '…'`), and of the one server that YAML of Docker Compose or
    Kubernetes starts. InputError for a line that starts none, and for what it cannot mean here."""
    return _read(_words(text), has_experts)


def plain_line(text: str) -> str:
    """`text`, or what is read of it where it is YAML, as one line."""
    return " ".join(shlex.join(_words(text)).split() if container_lines(text) else text.split())


def _words(text: str) -> list[str]:
    if lines := container_lines(text):
        starting = [words for words in lines if _found(words) is not None]
        if len(starting) > 1:
            listed = "; ".join(shlex.join(words)[:60] for words in starting)
            raise InputError(f"{len(starting)} containers start a server ({listed}); give one of them.")
        return (starting or lines)[0]
    try:
        return shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise InputError(f"the command line cannot be split into words ({error}); check its quotes.") from error


def _found(words: list[str]) -> tuple[Server, list[str]] | None:
    """The server that `words` start, and its options; None if they start none. An image may stand before the program
    that it runs, and a shell's line before both."""
    return _begun(Server.options_of, words) or _in_shell(words) or _begun(Server.options_of_image, words)


def _begun(
    begins: Callable[[Server, list[str]], list[str] | None], words: list[str]
) -> tuple[Server, list[str]] | None:
    for start in range(len(words)):
        if start and words[start] == "serve":  # of `vllm bench serve`; alone it is what a container is given
            continue
        for server in SERVERS_READ:
            if (options := begins(server, words[start:])) is not None:
                return server, _one_command(options)
    return None


def _in_shell(words: list[str]) -> tuple[Server, list[str]] | None:
    """What the line in one of `words` starts, as behind `bash -c`."""
    for word in words:
        line = " ".join(word.split())
        if any(" ".join(server.starts[0]) in line for server in SERVERS_READ) and (inner := _words(word)) != words:
            return _found(inner)
    return None


def _read(words: list[str], has_experts: HasExperts) -> Line:
    if (found := _found(words)) is None:
        expected = " or ".join(f"`{server.usage} …`" for server in SERVERS_READ)
        raise InputError(f"{shown(' '.join(words[:3]))} starts no server; expected {expected}.")
    server, options = found
    line = server.read(options, has_experts)
    for tag in filter(None, map(_TAG.match, words)):
        _take_version(tag, server, line)
    return line


def _take_version(tag: re.Match[str], server: Server, line: Line) -> None:
    """The rules of the version in the tag of an image, as far as they are here."""
    major, minor, patch = tag.groups()
    version = f"{major}.{minor}"
    if server.engine == VLLM:
        first, last = (int(one.partition(".")[2]) for one in (VLLM_VERSIONS[0], VLLM_VERSIONS[-1]))
        rules = f"0.{min(max(int(minor), first), last)}" if major == "0" else VLLM_VERSIONS[-1]
        if rules != VLLM_VERSIONS[-1]:
            line.values["vllm_version"] = rules
    else:
        version, rules = f"{version}.{patch or 0}", server.version
    if version != server.version:
        name = ENGINE_NAMES[server.engine]
        line.notes.append(f"{tag[0]}: simulated by the rules of {name} {rules}, with the defaults of {server.version}.")


def _one_command(words: list[str]) -> list[str]:
    """`words` up to the end of the command."""
    return list(itertools.takewhile(lambda word: word not in _SHELL, words))


def write_line(values: Mapping[str, Any], engine: str) -> str:
    """The line that starts the server of `engine` with these settings, without those that it does not have."""
    return SERVERS[engine].write(values)


def line_remarks(values: Mapping[str, Any], engine: str) -> list[str]:
    """What the line of `write_line` does not say, one sentence each."""
    return SERVERS[engine].remarks(values)
