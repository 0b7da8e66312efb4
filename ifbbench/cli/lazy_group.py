"""A click group that knows its commands by name and help line, and imports one only when it is called."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click

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

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lazy_commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        lazy = self.lazy_commands.get(cmd_name)
        return lazy.load() if lazy else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.short_help) for name, lazy in self.lazy_commands.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except IfbbenchError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_status)
        except KeyboardInterrupt as interrupt:
            notes = getattr(interrupt, "__notes__", ["What was recorded until now is kept in the run directory."])
            click.echo(" ".join(["Interrupted.", *notes]), err=True)
            ctx.exit(INTERRUPTED)
