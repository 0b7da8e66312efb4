"""Click options made from the settings of `ifbbench.config`, and a `RunConfig` made from what was given."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from ifbbench.cli.config_file import read_config_file
from ifbbench.config import RunConfig, from_mapping, settings
from ifbbench.setting import Setting

_METAVARS = {int: "N", float: "X", str: "TEXT"}


class SettingOption(click.Option):
    """The option of one setting. It hands its value on as typed, for `Setting.check` to judge."""

    def __init__(self, setting: Setting, help: str | None = None) -> None:
        names = [setting.name, *setting.aliases]
        is_pair = setting.type is bool
        super().__init__(
            [setting.name, *(_pair(name) if is_pair else f"--{name}" for name in names)],
            default=None,
            metavar=None if is_pair else _METAVARS[setting.type],
            help=help or _help_text(setting),
        )
        self.group = setting.group


class SettingsCommand(click.Command):
    """A command that takes `--config` and every setting; `setting_help` replaces the help text of some settings."""

    def __init__(self, *args: Any, setting_help: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += _setting_options(setting_help or {})

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List options under the groups of their settings."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                sections.setdefault(getattr(parameter, "group", "command"), []).append(record)
        for group, records in sections.items():
            with formatter.section(f"{group.upper()} OPTIONS"):
                formatter.write_dl(records)


def given_config(config_file: Path | None, options: Mapping[str, Any]) -> RunConfig:
    """The settings of `config_file`, then of the options that were given; InputError names the one that is wrong."""
    from_file = read_config_file(config_file) if config_file else {}
    from_command_line = {name: value for name, value in options.items() if value is not None}
    return from_mapping({**from_file, **from_command_line}, command_line=True)


def _setting_options(setting_help: Mapping[str, str]) -> Iterator[click.Option]:
    yield click.Option(
        ["config_file", "--config"],
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Settings from a YAML or TOML file; options on the command line win.",
    )
    for setting in settings():
        yield SettingOption(setting, setting_help.get(setting.name))


def _pair(name: str) -> str:
    return f"--{name}/--no_{name}"


def _help_text(setting: Setting) -> str:
    facts = [", ".join(setting.choices) or _range(setting)]
    if setting.others:
        facts.append(f"or {setting.others}")
    if setting.type is bool:
        facts.append(f"default: {'off' if setting.command_line_default is False else 'on'}")
    elif setting.default is not None:
        facts.append(f"default: {setting.default}")
    told = "; ".join(fact for fact in facts if fact)
    return setting.help + (f" [{told}]" if told else "")


def _range(setting: Setting) -> str:
    """The unit and the bounds, in the fewest words: `tokens, at least 1`."""
    facts = [setting.unit]
    if setting.minimum is not None:
        facts.append(f"{'above' if setting.exclusive_minimum else 'at least'} {setting.minimum:g}")
    if setting.maximum is not None:
        facts.append(f"at most {setting.maximum:g}")
    return ", ".join(fact for fact in facts if fact)
