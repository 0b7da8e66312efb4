"""`ifbbench config`: the settings that a command would run with, also as or from the command line of a server, and the
JSON schema of config files."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifbbench.cli.given_settings import COMMAND_KEYS, config_table, given_config, read_config_file
from ifbbench.cli.options import Command, SettingsCommand, json_instead_of_tables
from ifbbench.compressed import STANDARD_INPUT, read_text
from ifbbench.errors import InputError
from ifbbench.settings.config import FLEET_SETTINGS, RunConfig, settings
from ifbbench.settings.config_file import CONFIG_SUFFIXES
from ifbbench.settings.servers import SERVERS, line_remarks, plain_line, read_line, write_line

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT, OPTION, DERIVED = "default", "option", "derived"


@click.group()
def config() -> None:
    """Settings as they are resolved, and the schema of config files."""


@config.command(cls=SettingsCommand)
@click.argument("path", metavar="[PATH]", required=False, type=click.Path(path_type=Path))
@click.option("--changed", is_flag=True, help="Leave out settings that have their default.")
@click.option(
    "--as",
    "as_tool",
    type=click.Choice(list(SERVERS)),
    help="Print the command line of this server.",
)
@json_instead_of_tables
def show(
    path: Path | None, config_file: Path | None, changed: bool, as_tool: str | None, as_json: bool, **options: Any
) -> None:
    """Show each setting with its value, its source, default and unit.

    PATH, the same as --config, is a config file, a run directory or a sweep directory; options win over it. A source of
    "derived" means that model, device and the other settings decide.

    Example: ifbbench config show --device h100-sxm --model llama-3.1-8b --changed
    """
    file = path or config_file
    rows = shown_settings(file, options)
    if as_tool is not None:
        given = [row for row in rows if row["source"] not in (DEFAULT, DERIVED)]
        if file is not None and file.is_dir():  # it has every setting, most of which were not given
            given = [row for row in given if row["source"] == OPTION or row["value"] != row["default"]]
        values = {row["name"]: row["value"] for row in given}
        for remark in line_remarks(values, as_tool):
            click.echo(remark, err=True)
        click.echo(write_line(values, as_tool))
        return
    if changed:
        rows = [row for row in rows if row["value"] != row["default"]]
    keys = {name: value for name, value in config_table(file).items() if name in COMMAND_KEYS} if file else {}
    if as_json:
        click.echo(json.dumps({"settings": {row.pop("name"): row for row in rows}, **keys}, indent=2))
        return
    from ifbbench.cli.console import report_console

    _print_settings(rows, keys, report_console(highlight=False))


@config.command("from", cls=Command)
@click.argument("line", metavar="LINE")
@json_instead_of_tables
def from_line(line: str, as_json: bool) -> None:
    """Print the config file of a command line that starts a server (vLLM, SGLang, trtllm-serve).

    LINE is the command line as one argument, YAML of Docker Compose or Kubernetes with it, a file that holds either, or
    - for standard input. Options that are not simulated, or have no effect on schedule and times, are named in comments
    and on standard error.

    Example: ifbbench config from "vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 64" > server.yaml
    """
    from ifbbench.models.named_models import has_experts

    line = _text_of(line)
    found = read_line(line, has_experts)
    for remark in found.remarks():
        click.echo(remark, err=True)
    if as_json:
        click.echo(json.dumps(found.values, indent=2))
        return
    import yaml

    comments = "".join(f"# {text}\n" for text in (plain_line(line), *found.remarks()))
    click.echo(comments + yaml.safe_dump(found.values, sort_keys=False), nl=False)


def _text_of(line: str) -> str:
    """`line`, or the content of the file or of standard input that it names."""
    if line == STANDARD_INPUT:
        return sys.stdin.read()
    path = Path(line)
    try:
        is_there = path.exists() and not path.is_dir()
    except OSError:  # too long for a name
        return line
    if not is_there:
        if path.suffix in CONFIG_SUFFIXES and len(line.split()) == 1:
            raise InputError(f"{line}: there is no such file; check the path, or give the command line itself.")
        return line
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text ({error}); check the file.") from error


@config.command(cls=Command)
def schema() -> None:
    """Print the JSON schema of config files, for editors that check and complete them.

    Example: ifbbench config schema > ifbbench-config.json
    """
    from ifbbench.settings.config_schema import config_schema

    click.echo(json.dumps(config_schema(), indent=2))


def shown_settings(file: Path | None, options: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each setting: name, group, value, source (a file, or one of DEFAULT, OPTION, DERIVED), default, unit.
    InputError as of a run with these settings."""
    asked = given_config(file, options, needs_model=False, is_noted=False, runs_fleets=True)
    from_file = read_config_file(file) if file else {}
    given = {name for name, value in options.items() if value not in (None, ())}
    final, rows = _resolved(asked).as_dict(), []
    for item in settings():
        value, wanted = final[item.name], getattr(asked, item.name)
        source = OPTION if item.name in given else str(file) if item.name in from_file else DEFAULT
        if value != wanted and value is not None:
            source = DERIVED
        rows.append(
            {
                "name": item.name,
                "group": item.group,
                "value": value,
                "source": source,
                "default": item.command_line_default,
                "unit": item.unit,
            }
        )
    return rows


def _resolved(asked: RunConfig) -> RunConfig:
    """The settings with all that model and device decide. On a real device, the size of the KV cache is known only once
    the model is loaded, which this does not do."""
    from ifbbench.build.engine import build_engine
    from ifbbench.build.resolve import resolve_limits
    from ifbbench.models.named_models import load_model_config

    if asked.endpoint is not None:  # the server has settings of its own
        return asked
    if asked.makes_no_tokens:
        return build_engine(asked.of_one_replica()).config.with_values(
            **{name: getattr(asked, name) for name in FLEET_SETTINGS}
        )
    from ifbbench.torch.build import choose_device

    device = choose_device(asked)
    longest = load_model_config(asked.model).max_position_embeddings
    return resolve_limits(asked, longest, device.type == "cpu").with_values(device=str(device))


def _print_settings(rows: list[dict[str, Any]], keys: dict[str, Any], console: "Console") -> None:
    from rich.markup import escape

    from ifbbench.report import plain_table, print_fitting

    for name, value in keys.items():
        console.print(f"{name}: {value}", markup=False)
    table = plain_table("", "value", "unit", "source", "default")
    for group in dict.fromkeys(row["group"] for row in rows):
        table.add_row(f"[bold]{group}[/bold]")
        for row in rows:
            if row["group"] == group:
                default = _text(row["default"]) if row["value"] != row["default"] else ""
                is_none = row["value"] is None and row["default"] is not None  # none is a choice
                value = "none" if is_none else _text(row["value"])
                cells = (escape(value), row["unit"], escape(row["source"]), default)
                table.add_row(f"  {row['name']}", *cells)
    print_fitting(console, table)


def _text(value: Any) -> str:
    return {None: "–", True: "on", False: "off"}[value] if value is None or isinstance(value, bool) else str(value)
