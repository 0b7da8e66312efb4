"""Command line options, made from the settings of `ifbbench.settings.config`, and the commands that take them."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from ifbbench.cli.given_settings import protect_named
from ifbbench.files import protecting_inputs
from ifbbench.settings.config import settings
from ifbbench.settings.fields import (
    BYTES_FORMS,
    MAX_INTEGER_SETTING,
    MAX_NUMBER,
    MAX_NUMBER_SETTING,
    TECHNICAL_LIMIT,
    Setting,
    boolean,
    byte_count,
    did_you_mean,
    integer,
    number,
)
from ifbbench.settings.names import same_elsewhere, setting

DEBUG = "ifbbench.debug"
# What `--help` is followed by for every option; what it means alone; the group of options that are no settings.
ALL, COMMON, COMMAND = "all", "common", "command"
SHOWN = "ifbbench.shown_options"
HELP_COLUMN = 30
# A command with more settings than this lists only these without `--help all`.
MAX_SHOWN = 40
_METAVARS = {int: "N", float: "X", str: "TEXT"}
# What to do about options of other tools that none of ours corresponds to.
_ADVICE = {
    "trace dataset_path dataset_name input input_file": "Give the trace as an argument: ifbbench run TRACE.",
    "help_all": "`--help all` lists every option.",
    "ignore_eos": "Requests end at their recorded output length unless --stop_at_end_token is given.",
}


def debug_option() -> click.Option:
    """`--debug`, which every command takes."""

    def remember(ctx: click.Context, option: click.Parameter, value: bool) -> None:
        ctx.meta[DEBUG] = value or ctx.meta.get(DEBUG, False)

    return click.Option(
        ["--debug"], is_flag=True, expose_value=False, callback=remember, help="Show the traceback of an error."
    )


class Command(click.Command):
    """A command that explains unknown options, and does not take an option for the value of another."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(debug_option())

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = _booleans_as_flags(args, self.params)
        given = [arg.partition("=")[0] for arg in args]
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = next((one for one in given if one.replace("_", "-") == error.option_name), error.option_name)
            known = [one for option in self.params for one in (*option.opts, *option.secondary_opts)]
            raise click.NoSuchOption(name, f"No such option: {name}.{_suggestion(name, known)}", ctx=ctx) from None
        for option in self.params:
            values = ctx.params.get(option.name or "")
            for value in values if isinstance(values, tuple) else (values,):
                if isinstance(option, click.Option) and str(value).startswith("--"):
                    name = next(name for name in option.opts if name.startswith("--"))
                    raise click.UsageError(f"{name} needs a value, but {value} follows it.", ctx=ctx)
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        with protecting_inputs():
            protect_named(ctx.params)
            return super().invoke(ctx)


def _booleans_as_flags(args: list[str], parameters: Iterable[click.Parameter]) -> list[str]:
    """`--x false`, `--x=false` and the like, as gptManagerBenchmark takes them, become the flag of the pair
    `--x/--no_x` that they mean."""
    opposites: dict[str, str] = {}
    for pair in parameters:
        for on, off in zip(pair.opts, pair.secondary_opts, strict=False):
            opposites |= {_plain(on): off, _plain(off): on}
    flags, rest = [], list(args)
    while rest and rest[0] != "--":
        arg = rest.pop(0)
        name, equals, value = arg.partition("=")
        if _plain(name) in opposites and (equals or (rest and rest[0].lower() in ("true", "false"))):
            is_on = boolean(value if equals else rest.pop(0), name, from_text=True)
            arg = name if is_on else opposites[_plain(name)]
        flags.append(arg)
    return flags + rest


def _plain(name: str) -> str:
    return name.replace("_", "-")


def _suggestion(name: str, known: Collection[str]) -> str:
    """What to write instead of `name`, in its spelling; `known` are the names of the command's options."""
    word = name.lstrip("-").replace("-", "_").lower()
    for words, advice in _ADVICE.items():
        if word in words.split():
            return f" {advice}"
    names = {option.lstrip("-").replace("-", "_"): option for option in known if option.startswith("--")}
    same = same_elsewhere(word)
    near = [same] if same in names else difflib.get_close_matches(word, names, n=3, cutoff=0.6)
    separator = "_" if "_" in name else "-" if "-" in name[2:] else None
    options = [f"--{one.replace('_', separator)}" if separator else names[one] for one in near]
    return f" Did you mean {', '.join(options)}?" if options else ""


class IntegerRange(click.IntRange):
    """An integer in a range, checked as settings are."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        lowest, highest = -MAX_INTEGER_SETTING if self.min is None else self.min, self.max
        top = MAX_INTEGER_SETTING if highest is None else highest
        return integer(value, _option_name(param), int(lowest), int(top), from_text=True, guards=highest is None)


class FloatRange(click.FloatRange):
    """A finite number in a range, checked as settings are."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        lowest, highest = -MAX_NUMBER_SETTING if self.min is None else self.min, self.max
        top = MAX_NUMBER_SETTING if highest is None else min(highest, MAX_NUMBER)
        above = lowest if self.min_open else None
        name, guards = _option_name(param), highest is None
        return number(value, name, lowest, top, above=above, from_text=True, guards=guards)


def _option_name(param: click.Parameter | None) -> str:
    return "value" if param is None else param.opts[0] if isinstance(param, click.Option) else str(param.name)


# Values of options that are no settings.
COUNT, NOT_NEGATIVE_INTEGER = IntegerRange(min=1), IntegerRange(min=0)
POSITIVE, NOT_NEGATIVE = FloatRange(min=0, min_open=True), FloatRange(min=0)
json_instead_of_tables = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of tables."
)


def size_option(ctx: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """The callback of an option with a number of bytes of at least 1, as settings take it."""
    return None if value is None else byte_count(value, option.opts[0], 1)


class SettingOption(click.Option):
    """The option of one setting. Its value stays as typed: `Setting.check` converts it."""

    def __init__(self, setting: Setting, help: str | None = None) -> None:
        names = [setting.name, *setting.aliases]
        is_pair = setting.type is bool
        super().__init__(
            [setting.name, *(f"--{name}/--no_{name}" if is_pair else f"--{name}" for name in names)],
            default=None,
            metavar=None if is_pair else _metavar(setting),
            help=help or _help_text(setting),
            multiple=setting.is_list,
        )
        self.group = setting.group


class SettingsCommand(Command):
    """A command that takes settings as options, and those of a config file.

    names: the settings that it takes; None for all, and `--config`.
    shown: those that `--help` lists without `all`; by default all, or of more than MAX_SHOWN the common ones.
    setting_help: replaces the help text of some settings.
    """

    def __init__(
        self,
        *args: Any,
        names: Collection[str] | None = None,
        shown: Collection[str] | None = None,
        setting_help: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if names is None:
            self.params.append(
                click.Option(
                    ["config_file", "--config"],
                    type=click.Path(path_type=Path),
                    metavar="FILE",
                    help="Settings from a YAML or TOML file, or from a run or sweep directory; options on the command "
                    "line win.",
                )
            )
        taken = list(settings() if names is None else map(setting, names))
        if shown is None and len(taken) > MAX_SHOWN:
            shown = [one.name for one in taken if one.is_common]
        self.only_in_all = set[str]() if shown is None else {one.name for one in taken} - set(shown)
        self._help_with_groups: click.Option | None = None
        self.params += [SettingOption(one, (setting_help or {}).get(one.name)) for one in taken]

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """`--help`, followed by a group of options, an option, or `all`."""
        if self._help_with_groups is None:  # click compares the option by identity, so that it is made once
            self._help_with_groups = click.Option(
                ["shown_options", *sorted(self.get_help_option_names(ctx))],
                is_flag=False,
                flag_value=COMMON,
                metavar="[GROUP]",
                expose_value=False,
                is_eager=True,
                callback=self._print_help,
                shell_complete=lambda ctx, option, text: [one for one in (ALL, *self._groups) if one.startswith(text)],
                help=f"Show this message; with {ALL} or the name of a group, every option or those of the group.",
            )
        return self._help_with_groups

    @property
    def _groups(self) -> list[str]:
        """As they are given behind `--help`: `kv-cache`."""
        return list(dict.fromkeys(_group(one) for one in self.params))

    def _print_help(self, ctx: click.Context, option: click.Parameter, asked: str | None) -> None:
        if asked is None or ctx.resilient_parsing:
            return
        names = [name for one in self.params for name in one.opts if isinstance(one, click.Option)]
        found = {_plain(name).lstrip("-"): name for name in (*names, *self._groups, ALL, COMMON)}
        word = _plain(asked.strip()).lower().replace(" ", "-").lstrip("-")
        if word not in found:
            raise click.UsageError(
                f"--help {asked}: there is no such group of options, and no such option; expected "
                f"{ALL}, {', '.join(self._groups)}, or the name of an option."
                f"{did_you_mean(word, list(found))}",
                ctx,
            )
        ctx.meta[SHOWN] = found[word]
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List options under the groups of their settings."""
        asked, left_out = ctx.meta.get(SHOWN, COMMON), 0
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if not isinstance(parameter, click.Option) or not (record := parameter.get_help_record(ctx)):
                continue
            if asked == COMMON and parameter.name in self.only_in_all:
                left_out += 1
            elif asked in (COMMON, ALL, _group(parameter), *parameter.opts):
                sections.setdefault(_group(parameter), []).append(record)
        for group, records in sections.items():
            with formatter.section(f"{group.upper().replace('-', ' ')} OPTIONS"):
                # Padded, so that the texts of all sections begin in one column.
                formatter.write_dl([(names.ljust(HELP_COLUMN), text) for names, text in records], HELP_COLUMN)
        if left_out:
            formatter.write_paragraph()
            formatter.write_text(
                f"--help {ALL} lists {left_out} more options, --help GROUP those of a group: {', '.join(self._groups)}."
            )


def _group(parameter: click.Parameter) -> str:
    return str(getattr(parameter, "group", COMMAND)).replace(" ", "-")


def _metavar(setting: Setting) -> str:
    return "SIZE" if setting.unit == "bytes" else _METAVARS[setting.type]


def _help_text(setting: Setting) -> str:
    """The setting's help with its values, range and default: `[tokens, at least 1; default: 32]`."""
    limits = {"above": setting.above, "at least": setting.minimum, "at most": setting.maximum}
    in_words = [
        f"{words} {limit:g}" for words, limit in limits.items() if limit is not None and abs(limit) < TECHNICAL_LIMIT
    ]
    unit = f"bytes: {BYTES_FORMS}" if setting.unit == "bytes" else setting.unit
    facts = [", ".join(setting.choices or [word for word in (unit, *in_words) if word])]
    if setting.others:
        facts.append(f"or {setting.others}")
    if setting.type is bool:
        facts.append(f"default: {'off' if setting.command_line_default is False else 'on'}")
    elif setting.default is not None:
        facts.append(f"default: {setting.default}")
    in_brackets = "; ".join(filter(None, facts))
    return setting.help + (f" [{in_brackets}]" if in_brackets else "")
