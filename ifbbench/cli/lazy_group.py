"""A click group that knows its commands by name and help line, and imports one only when it is called."""

import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from os import O_WRONLY, devnull, dup2
from os import open as os_open
from typing import Any

import click

from ifbbench.cli.options import DEBUG, debug_option
from ifbbench.errors import IfbbenchError

INTERRUPTED = 130


@dataclass(frozen=True)
class LazyCommand:
    """Where a command is defined, and the line that `--help` shows for it."""

    module: str
    attribute: str
    short_help: str

    def load(self) -> click.Command:
        command: click.Command = getattr(import_module(self.module), self.attribute)
        return command


class LazyGroup(click.Group):
    """A group of lazy commands that turns ifbbench's errors and interrupts into one line and an exit status."""

    def __init__(self, *args: Any, lazy_commands: Mapping[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy_commands = lazy_commands
        self.params.append(debug_option())

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lazy_commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        lazy = self.lazy_commands.get(cmd_name)
        return lazy.load() if lazy else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.short_help) for name, lazy in self.lazy_commands.items()])

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _closed_pipe_ends_quietly():  # of --help
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _closed_pipe_ends_quietly():
                value = super().invoke(ctx)
                sys.stdout.flush()
                return value
        except IfbbenchError as error:
            if ctx.meta.get(DEBUG):
                click.echo(traceback.format_exc(), err=True, nl=False)
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_status)
        except KeyboardInterrupt as interrupt:
            click.echo(" ".join(["Interrupted.", *getattr(interrupt, "__notes__", [])]), err=True)
            ctx.exit(INTERRUPTED)


@contextmanager
def _closed_pipe_ends_quietly() -> Iterator[None]:
    """A reader that has seen enough, as `| head`, ends the command with status 0."""
    try:
        yield
    except BrokenPipeError:
        # Python flushes standard output once more when it exits.
        dup2(os_open(devnull, O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(0) from None
