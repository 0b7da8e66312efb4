"""Whether `config from` knows each option of an installed vLLM or SGLang, and what it takes.

    python -m benchmarks.server_options vllm     # in an environment with vLLM
    python -m benchmarks.server_options sglang   # in one with SGLang, whose GPU packages need not be there

Prints the options that are unknown, or taken with another number of values; status 1 if there are any. Options of the
server that only short names have are left out.
"""

import argparse
import importlib
import sys

from ifbbench.settings.server import CONFIG
from ifbbench.settings.servers import SERVERS

FLAG, VALUE, LIST = "a flag", "a value", "a list"
BOOLEANS = ("_StoreTrueAction", "BooleanOptionalAction", "DeprecatedStoreTrueAction", "DeprecatedStoreConstAction")


def parser_of(engine: str) -> argparse.ArgumentParser:
    """The parser of the engine's own server."""
    if engine == "vllm":
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        return make_arg_parser(FlexibleArgumentParser())
    importlib.import_module("benchmarks.sglang_oracle")  # replaces the packages that need a GPU
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def theirs(parser: argparse.ArgumentParser) -> dict[str, str]:
    """What each option of the parser takes, by its name."""
    found: dict[str, str] = {}
    for action in parser._actions:
        kind = FLAG if type(action).__name__ in BOOLEANS else LIST if action.nargs in ("+", "*") else VALUE
        names = [name[2:] for name in action.option_strings if name.startswith("--") and not name.startswith("--no-")]
        found |= {name: kind for name in names if name not in ("help", CONFIG)}
    return found


def ours(engine: str, name: str) -> str | None:
    """What the option takes here; None if it is unknown."""
    server = SERVERS[engine]
    name = server.aliases.get(name, name)
    if server.settings.get(name) in server.flags or name in server.joint_flags or name in server.others.flags:
        return FLAG
    if name in server.others.lists:
        return LIST
    return VALUE if name in server.names else None


def main(engine: str) -> int:
    options = theirs(parser_of(engine))
    wrong = [(name, kind, ours(engine, name)) for name, kind in options.items() if ours(engine, name) != kind]
    for name, kind, found in wrong:
        print(f"--{name}: takes {kind}; here {found or 'unknown'}")
    print(f"{len(options)} options of {engine}, {len(wrong)} of them unknown or read in another way")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
