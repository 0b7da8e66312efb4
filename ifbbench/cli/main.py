"""The `ifbbench` command. It starts fast: the module of a command is imported only when the command is called."""

import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

import click

from ifbbench import __version__, compiled
from ifbbench.cli.options import DEBUG, debug_option
from ifbbench.errors import IfbbenchError, InputError
from ifbbench.files import DEVICE_ERRORS
from ifbbench.settings.fields import printable, shown

FAILED, INTERRUPTED = 1, 130
DEFECT = "This is a defect of ifbbench: please report it with the command; --debug shows the traceback."

# What the dynamic linker says where a limit on memory leaves no room for a library.
NO_ROOM_FOR_LIBRARY = "failed to map segment|[Cc]annot allocate memory|cannot create shared object descriptor"

# Packages that a simulated run does without, and what pip installs them from.
COMPUTING_PACKAGES = {"torch": "torch>=2.11,<2.14", "triton": "triton>=3.6,<3.8"}

# Module below ifbbench.cli and help line of each command. The function has the command's name, with underscores.
COMMANDS = {
    "run": ("run", "Replay a trace and report what happened."),
    "serve": ("serve", "Serve a model or a simulated device to OpenAI clients."),
    "triton": ("triton", "Serve them through NVIDIA Triton Inference Server."),
    "generate": ("generate", "Print what a model answers to a prompt."),
    "bench": ("bench", "Run with trtllm-bench's options and report."),
    "sweep": ("sweep", "Run once for each combination of settings."),
    "tune": ("tune", "Find the best settings for a trace on a simulated device."),
    "report": ("report", "Print the report of a run again."),
    "why": ("why", "Explain what bound a run, what a request waited for."),
    "compare": ("compare", "Compare runs: figures, decisions, requests."),
    "plot": ("report", "Draw the charts of runs and sweeps."),
    "watch": ("watch", "Show what a run does now, while it runs."),
    "import": ("import_log", "Make a run directory of another engine's log."),
    "export": ("report", "Write the tables of a run, or a trace for Perfetto."),
    "config": ("config", "Show resolved settings, and the schema of config files."),
    "schema": ("report", "Print the JSON schema of the files of a run."),
    "capacity": ("capacity", "Calculate what fits, before anything is run."),
    "explain-step": ("simulate", "Show where the time of one iteration goes."),
    "calibrate": ("simulate", "Measure this machine for simulated runs."),
    "dataset": ("dataset", "Make, convert and describe traces."),
}


class LazyGroup(click.Group):
    """The group of COMMANDS. Errors of ifbbench and interrupts become one line and an exit status."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(debug_option())

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"ifbbench.cli.{COMMANDS[cmd_name][0]}")
        # A function cannot be called `import`.
        name = {"import": "import_log"}.get(cmd_name, cmd_name.replace("-", "_"))
        command: click.Command = getattr(module, name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in COMMANDS.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for arg in args:
            if not arg or (arg.startswith("--") and arg.endswith("=")):
                raise click.UsageError(
                    f"The argument {arg!r} is empty; expected a value. Is a shell variable unset?", ctx
                )
            if "\0" in arg or any("\ud800" <= character <= "\udfff" for character in arg):
                raise click.UsageError(f"The argument {shown(arg)} is not text in UTF-8.", ctx)
        return super().parse_args(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            with _closed_pipe_is_no_error():  # of --help
                return super().make_context(*args, **kwargs)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None
        except OSError as error:  # standard output is full
            _end(None, f"{error.strerror or error}.", FAILED)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _closed_pipe_is_no_error(), _notes_once():
                value = super().invoke(ctx)
                sys.stdout.flush()
                return value
        except (click.exceptions.Exit, click.Abort, click.ClickException):
            raise
        except IfbbenchError as error:
            _end(ctx, str(error), error.exit_status)
        except MemoryError as error:
            _end_without_memory(ctx, str(error) or "for what the command asks")
        except OSError as error:
            where = "" if error.filename is None else f"{shown(str(error.filename))}: "
            status = FAILED if error.errno in DEVICE_ERRORS else InputError.exit_status
            _end(ctx, f"{where}{error.strerror or error}.", status)
        except ModuleNotFoundError as error:
            if error.name not in COMPUTING_PACKAGES:
                _end(ctx, f"{error}. {DEFECT}", FAILED)
            _end(
                ctx,
                f"the package {error.name} is not installed, which computes on CPUs and GPUs; install it with "
                f"`pip install '{COMPUTING_PACKAGES[error.name]}'`, or simulate a device: --device sim:h100-sxm "
                "--model llama-3.1-8b.",
                InputError.exit_status,
            )
        except Exception as error:
            if isinstance(error, ImportError) and re.search(NO_ROOM_FOR_LIBRARY, str(error)):
                _end_without_memory(ctx, f"to load a library: {error}")
            _end(ctx, f"{type(error).__name__}: {error}. {DEFECT}", FAILED)
        except KeyboardInterrupt as interrupt:
            click.echo(" ".join(["Interrupted.", *getattr(interrupt, "__notes__", [])]), err=True)
            ctx.exit(INTERRUPTED)


def _end_without_memory(ctx: click.Context, reason: str) -> NoReturn:
    _end(
        ctx,
        f"there is not enough memory ({reason}). Choose smaller sizes or fewer requests, or raise the limit "
        "(ulimit -v).",
        FAILED,
    )


def _end(ctx: click.Context | None, message: str, status: int) -> NoReturn:
    """End the command because of the exception that is handled."""
    if ctx is not None and ctx.meta.get(DEBUG):
        click.echo(traceback.format_exc(), err=True, nl=False)
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    for line in (*_earlier_messages(), message):
        click.echo(f"Error: {printable(line)}", err=True)
    raise click.exceptions.Exit(status)


def _earlier_messages() -> list[str]:
    """The errors of ifbbench during which the one that is handled was raised: an output may be impossible to write
    after a run that failed. Causes are left out, because what they caused quotes them."""
    messages: list[str] = []
    later = sys.exception()
    while later and (earlier := later.__context__) and (later.__cause__ or not later.__suppress_context__):
        if isinstance(earlier, IfbbenchError) and earlier is not later.__cause__:
            messages.insert(0, str(earlier))
        later = earlier
    return messages


@contextmanager
def _notes_once() -> Iterator[None]:
    """In the block, and in processes that are forked in it, a note on a trace is printed once, however often the trace
    is read: once for each seed of a repeat."""
    logger, printed = logging.getLogger("ifbbench"), set[str]()

    def is_new(record: logging.LogRecord) -> bool:
        if not getattr(record, "once", False):
            return True
        text, known = record.getMessage(), len(printed)
        printed.add(text)
        return len(printed) > known

    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


@contextmanager
def _closed_pipe_is_no_error() -> Iterator[None]:
    """A reader that closes the pipe early, as `| head` does, ends the command with status 0."""
    try:
        yield
    except BrokenPipeError:
        _discard_output()
        raise click.exceptions.Exit(0) from None


def _discard_output() -> None:
    """Python flushes standard output once more when it exits; that must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_version(ctx: click.Context, _parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        click.echo(f"ifbbench, version {__version__}, {compiled.description()}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 120,
        # Underscores and dashes are the same in the names of options and commands.
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Which batching settings should you run on your traffic, and why?

    ifbbench replays a trace of requests through an in-flight batching engine and shows what happened, iteration by
    iteration.
    """
