"""Command line options and config files, made from the settings of `ifbbench.settings.config`."""

import difflib
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from ifbbench.compressed import STANDARD_INPUT
from ifbbench.errors import InputError
from ifbbench.files import protect, protecting_inputs
from ifbbench.rundir.run_directory import LINE_FILES, OPEN_SPANS, RUN, SWEEP_CONFIG
from ifbbench.settings.config import (
    ARRIVAL_SETTINGS,
    BY_ITERATION,
    DEVICE_FAMILIES,
    ENGINES,
    FLEET_SETTINGS,
    RECORDING_FORMATS,
    SIDE_OUTPUTS,
    SIMULATED,
    RunConfig,
    settings,
)
from ifbbench.settings.config_file import CONFIG_SUFFIXES, parse_config_file
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
    located,
    number,
    unexpected,
)
from ifbbench.settings.names import from_mapping, same_elsewhere, setting

DEBUG = "ifbbench.debug"
# Keys of config files that are no settings: arguments and options of the command itself. `run` takes the first two.
COMMAND_KEYS = ("trace", "repeat", "over", "zip", "keep", "processes", "executor")
RUN_KEYS = COMMAND_KEYS[:2]
# A setting by the other one that decides the same.
SAME_QUESTION = {"overlap": "enable_trt_overlap"}
# Settings of a recorded run that say where its results went.
PLACES = ("output", "overwrite", *SIDE_OUTPUTS)
# Arguments and options that name what a command writes. Files that any other one names are read.
WRITTEN = frozenset({*PLACES, "record", "pauses_csv", "directory", "model_repository"})
# What is read in a directory that they name: of adapters; of a run, a sweep or a model.
LORA_FILES = ("adapter_config.json", "adapter_model.safetensors", "model.lora_weights.npy", "model.lora_config.npy")
READ_IN_DIRECTORIES = (
    *(f"{name}.{suffix}" for name in LINE_FILES for suffix in RECORDING_FORMATS),
    "run.json",
    "summary.json",
    OPEN_SPANS,
    SWEEP_CONFIG,
    "*config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
    *LORA_FILES,
    *(f"*/{name}" for name in LORA_FILES),
)
_log = logging.getLogger("ifbbench")
# What `--help` is followed by for every option; what it means alone; the group of options that are no settings.
ALL, COMMON, COMMAND = "all", "common", "command"
SHOWN = "ifbbench.shown_options"
HELP_COLUMN = 30
# A command with more settings than this lists only these without `--help all`.
MAX_SHOWN = 40
COMMON_SETTINGS = (
    "max_num_samples", "time_scale", "request_rate", "enable_exp_delays", "concurrency", "seed", "slo", "endpoint",
    "engine", "policy", "max_batch_size", "max_num_tokens", "enable_chunked_context", "max_tokens_in_paged_kvcache",
    "kv_cache_free_gpu_mem_fraction", "enable_kv_cache_reuse", "device", "model", "dtype", "tp_size",
    "output", "overwrite", "quiet",
)  # fmt: skip
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
            _protect(ctx.params)
            return super().invoke(ctx)


def _protect(given: Mapping[str, Any]) -> None:
    """Keep the files that values of arguments, options or keys of a config file name from being replaced."""
    for name, value in given.items():
        for word in _words(value) if name not in WRITTEN else ():
            if word == STANDARD_INPUT:
                protect(Path("/dev/stdin"), "standard input")  # redirected from a file
                continue
            path = Path(word.removeprefix(SIMULATED))
            protect(path, word)
            for pattern in READ_IN_DIRECTORIES if os.path.isdir(path) else ():
                for file in path.glob(pattern):
                    protect(file, str(file))


def _words(value: Any) -> Iterator[str]:
    """The texts in a value, and the parts of those that are lists: `trace=a,b` names a and b."""
    if isinstance(value, str | Path):
        parts = str(value).split(",")
        yield from filter(None, {str(value), *parts, *(part.partition("=")[2] for part in parts)})
    elif isinstance(value, Mapping):
        yield from _words(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _words(one)


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

    names: the settings that it takes; None for all, and `--config`. shown: those that `--help` lists without `all`; by
    default all, or of more than MAX_SHOWN the COMMON_SETTINGS. setting_help: replaces the help text of some settings.
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
            shown = COMMON_SETTINGS
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


def given_config(
    config_file: Path | None,
    options: Mapping[str, Any],
    *,
    needs_model: bool = True,
    is_noted: bool = True,
    runs_fleets: bool = False,
    swept: Collection[str] = (),
) -> RunConfig:
    """The settings of `config_file`, then of the options that were given; InputError names the one that is wrong.

    needs_model: whether a GPU needs a model, which is not given otherwise. is_noted: whether what names stand for, and
    what comes from a file, is printed. runs_fleets: whether the command runs several replicas; with the share of one,
    --replica, those of a file are left out. swept: settings of which each run has a value of its own."""
    from_file = read_config_file(config_file) if config_file else {}
    if options.get("replica") is not None:
        from_file = {name: value for name, value in from_file.items() if name not in FLEET_SETTINGS}
    from_command_line = {name: value for name, value in options.items() if value not in (None, ())}
    values = {**from_file, **from_command_line}
    _protect(values)
    engine_dir = values.pop("engine_dir", None)
    if engine_dir:
        values = with_engine(engine_dir, values)
    from_engine: dict[str, Any] = {}
    is_recorded = config_file is not None and is_run(config_file)
    is_recorded = is_recorded and not {"engine", "engine_overhead"} & from_command_line.keys()
    if not is_recorded:  # the settings of a run are all there
        from_engine = {
            name: value
            for name, value in engine_defaults(values).items()
            if name not in values and SAME_QUESTION.get(name) not in values
        }
    config = from_mapping(from_engine | values, command_line=True)
    if config.is_fleet and not runs_fleets:
        raise _no_fleets(config, config_file if "replicas" in from_file else None)
    if needs_model and "model" not in swept:
        _check_model_is_given(config, values)
    if is_noted:
        for note in _notes(config, values, from_engine):
            _log.warning(note)
        if config_file is not None:
            model, device = (
                f"--{name} of each point"
                if name in swept
                else f"--{name} {getattr(config, name)}{_origin(name, from_file, values)}"
                for name in ("model", "device")
            )
            _log.warning("With %s: %s and %s.", config_file, model, device)
    return config


def with_recording(
    trace: str | None, config_file: Path | None, options: Mapping[str, Any]
) -> tuple[Path | None, Mapping[str, Any]]:
    """Config file and options of a replay of `trace`. The recording of a real engine is replayed with the settings of
    that engine, and its requests come in the iterations in which they came there, unless options say otherwise."""
    if trace is None or config_file is not None or not (Path(trace) / RUN).is_file():
        return config_file, options
    given = {name: value for name, value in options.items() if value not in (None, ())}
    recorded = parse_config_file(Path(trace) / RUN)
    if not isinstance(recorded, dict) or "recorded" not in recorded:
        return None, options
    if given.get("engine", recorded["recorded"]["engine"]) != recorded["recorded"]["engine"]:
        return None, options
    defaults: dict[str, Any] = {} if "device" in given else {"device": "null"}
    if not any(name in given for name in (*ARRIVAL_SETTINGS, "time_scale", "concurrency")):
        defaults["arrival"] = BY_ITERATION
    return Path(trace), {**options, **defaults}


def is_run(path: Path) -> bool:
    """Whether a config file is that of a recorded run."""
    return path.suffix == ".json" or (path.is_dir() and not (path / SWEEP_CONFIG).is_file())


def engine_defaults(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The defaults of the engine that `values` name, with --engine or --engine_overhead; none where they name none."""
    if values.get("engine") in (None, ENGINES[0]) and values.get("engine_overhead") is None:
        return {}
    from ifbbench.build import engines

    return engines.engine_defaults(values)


def _check_model_is_given(config: RunConfig, values: Mapping[str, Any]) -> None:
    """InputError for a GPU that was asked for without a model: the default one is for a CPU."""
    from ifbbench.models.named_models import TINY, built_in_models

    is_gpu = config.device == "cuda" or (config.hardware is not None and "cpu" not in config.hardware)
    if is_gpu and config.endpoint is None and "device" in values and "model" not in values:
        names = ", ".join(name for name in built_in_models() if name != TINY)
        raise InputError(
            f"--model: missing, and --device {config.device} is a GPU; give the model that runs there: "
            f"one of {names}, the name of a published model of such a shape, or a directory with "
            "config.json."
        )


def _notes(config: RunConfig, values: Mapping[str, Any], from_engine: Mapping[str, Any]) -> Iterator[str]:
    """What names that are short or foreign stand for."""
    from ifbbench.models.named_models import published_shape
    from ifbbench.models.quantization import quantization_of

    if str(values.get("device", "")).removeprefix(SIMULATED).lower() in DEVICE_FAMILIES:
        yield f"--device {values['device']}: this is {config.hardware}."
    if config.endpoint is None:
        shape, found = published_shape(config.model), quantization_of(config.model) if config.dtype is None else None
        facts = [f"the built-in shape {shape}, with random weights"] if shape else []
        if facts or found:
            yield f"--model {config.model}: {'; '.join([*facts, *([str(found)] if found else [])])}."
    if from_engine:
        listed = ", ".join(f"--{name} {value}" for name, value in from_engine.items())
        given = f"--engine {config.engine}" if "engine" in values else f"--engine_overhead {config.engine_overhead}"
        yield f"{given}: as the defaults of that engine, {listed}."


def _origin(name: str, from_file: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Where a setting of a run with a config file comes from, if not from the file."""
    if name not in values:
        return " (the default)"
    return "" if name in from_file and from_file[name] == values[name] else " (of the command line)"


def _no_fleets(config: RunConfig, path: Path | None) -> InputError:
    """The error of a command that runs one engine, for the settings of a fleet, which the config file `path` has."""
    if path is None or config.replicas == 1:
        return InputError("--replicas, --router: this command runs one engine; leave them out.")
    return InputError(
        f"{path}: replicas is {config.replicas}: so many servers with these settings share the requests, and this "
        f"command runs one. Add --replica 1/{config.replicas} for the share of the first (up to "
        f"{config.replicas}/{config.replicas}), or --replica 1/1 for all requests on one server."
    )


def with_engine(engine_dir: str, values: dict[str, Any]) -> dict[str, Any]:
    """`values` with the model of a TensorRT-LLM engine, and with the limits that it was built with as defaults.

    Where there is no such directory, a built-in shape that its name or `--model` refers to stands for the model.
    """
    from ifbbench.models.engine_config import engine_settings
    from ifbbench.models.named_models import TINY, built_in_models, built_in_shape

    if Path(engine_dir).is_dir():
        device = str(setting("device").check(values.get("device", "auto")))
        built_with = engine_settings(Path(engine_dir), device.startswith(SIMULATED))
        return built_with | values | {"model": engine_dir}
    model = values.get("model")
    if model is None or not (model in built_in_models() or Path(model).exists()):
        model = built_in_shape(engine_dir) or built_in_shape(model or "") or TINY
    _log.warning(
        "--engine_dir %s: there is no such directory; model %s runs instead. Name another with --model.",
        engine_dir,
        model,
    )
    return values | {"model": model}


def read_config_file(path: Path) -> dict[str, Any]:
    """Checked values by setting name, from a config file (see `config_table`). InputError names the file and the
    entry."""
    table = config_table(path)
    values: dict[str, Any] = {}
    with located(str(path)):
        for name, value in table.items():
            if name in COMMAND_KEYS:
                continue
            wanted = setting(str(name))
            if wanted.name in values:
                raise InputError(f"{wanted.name} is given twice, once as {name}.")
            values[wanted.name] = wanted.check(value)
    return values


def read_command_keys(path: Path | None, names: Collection[str], command: str) -> dict[str, Any]:
    """The values of those COMMAND_KEYS that a config file has. InputError for one that is not in `names`."""
    if path is None:
        return {}
    found = {name: value for name, value in config_table(path).items() if name in COMMAND_KEYS}
    for name in found:
        if name not in names:
            raise InputError(
                f"{path}: {name} is a key of `ifbbench sweep`; `ifbbench {command}` has no such key. Run `ifbbench "
                f"sweep --config {path}`, or give the directory of one run."
            )
    _protect(found)
    return found


def config_table(path: Path) -> dict[str, Any]:
    """Settings and COMMAND_KEYS as they are written in a flat YAML or TOML table, in `run.json`, or in a directory with
    such a file of a run or a sweep. The config of a run leaves out PLACES and what was derived from others, and has the
    trace."""
    with located(str(path)):
        if path.is_dir():
            path = next((path / name for name in (SWEEP_CONFIG, "run.json") if (path / name).is_file()), path)
            if path.is_dir():
                found = ", ".join(str(one.name) for one in sorted(path.iterdir()) if _is_config(one)) or "none"
                raise InputError(
                    f"the directory has no run.json and no {SWEEP_CONFIG}; expected that of a run or a sweep. "
                    f"Config files and runs in it: {found}."
                )
        table = parse_config_file(path)
        if not isinstance(table, dict):
            raise InputError("expected a table of settings, one `name: value` each.")
        if path.suffix != ".json":
            return table
        if not isinstance(table.get("config"), dict) or not isinstance(table.get("trace"), dict):
            raise InputError("expected the run.json of a run, with its config and trace.")
        derived = table.get("derived", [])
        if not isinstance(derived, list):
            raise unexpected("derived", derived, "a list of names of settings")
        # A real engine that was recorded had a device and a model of its own.
        own = ("device", "model") if "recorded" in table else ()
        left_out, with_none = [*PLACES, *derived, *own], [item.name for item in settings() if item.has_default]
        of_run = {
            name: value
            for name, value in table["config"].items()
            if name not in left_out and (value is not None or name in with_none)
        }
        source = table["trace"].get("source")
        return of_run | ({"trace": source} if source not in (None, STANDARD_INPUT) and not own else {})


def _is_config(path: Path) -> bool:
    """Whether `path` may be meant for a config file where the directory that it is in was given."""
    return (path / "run.json").is_file() if path.is_dir() else path.suffix in CONFIG_SUFFIXES
