"""The settings that a command is given: by options, a config file, a recorded run or an engine directory."""

import logging
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ifbbench.compressed import STANDARD_INPUT
from ifbbench.errors import InputError
from ifbbench.files import protect
from ifbbench.rundir.run_directory import LINE_FILES, OPEN_SPANS, RUN, SWEEP_CONFIG
from ifbbench.settings.config import ARRIVAL_SETTINGS, FLEET_SETTINGS, RunConfig, settings
from ifbbench.settings.config_file import CONFIG_SUFFIXES, parse_config_file
from ifbbench.settings.devices import DEVICE_FAMILIES, SIMULATED
from ifbbench.settings.engines import ENGINES
from ifbbench.settings.fields import located, unexpected
from ifbbench.settings.groups.recording import RECORDING_FORMATS, SIDE_OUTPUTS
from ifbbench.settings.groups.replay import BY_ITERATION
from ifbbench.settings.names import from_mapping, setting

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

    needs_model: whether a GPU needs a model, which is not given otherwise.
    is_noted: whether what names stand for, and what comes from a file, is printed.
    runs_fleets: whether the command runs several replicas; with the share of one, --replica, those of a file are left
        out.
    swept: settings of which each run has a value of its own.
    """
    from_file = read_config_file(config_file) if config_file else {}
    if options.get("replica") is not None:
        from_file = {name: value for name, value in from_file.items() if name not in FLEET_SETTINGS}
    from_command_line = {name: value for name, value in options.items() if value not in (None, ())}
    values = {**from_file, **from_command_line}
    protect_named(values)
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
    protect_named(found)
    return found


def config_table(path: Path) -> dict[str, Any]:
    """Settings and COMMAND_KEYS as they are written in a flat YAML or TOML table, in `run.json`, or in a directory with
    such a file of a run or a sweep. The config of a run leaves out PLACES and what was derived from others, and has the
    trace; that of an imported log has what the log says."""
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
        imported = table.get("imported")
        if isinstance(imported, dict):  # the log says only some settings of its server, and the others are defaults
            known = ("engine", *imported.get("settings", ()))
            return {name: value for name, value in table["config"].items() if name in known and value is not None}
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


def protect_named(given: Mapping[str, Any]) -> None:
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
