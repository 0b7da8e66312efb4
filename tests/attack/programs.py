"""Tries of every command: options drawn from those that it declares, pairs of settings, and config files."""

import json
import random
import shlex
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import yaml

from ifbbench.cli.main import COMMANDS
from ifbbench.cli.options import SettingOption
from ifbbench.serving.routing.config import serve_settings
from ifbbench.serving.triton_repository import triton_settings
from ifbbench.settings.config import settings
from ifbbench.settings.servers import SERVERS_READ
from tests.attack import hostile
from tests.attack.commands import Outcomes, fresh
from tests.attack.inputs import DEVICE, KV_CACHE, NULL, ROWS, SIMULATED, json_lines, setting_value
from tests.attack.results import recorded
from tests.replay.test_soak import DRAWS

STEP = ("explain-step", "llama-3.1-8b", "--device", "sim:h100-sxm", "--context", "64@0")
SYNTH = ("--num-requests", "5", "-o", "NEW.jsonl")
NORMAL = ("--input-mean", "20", "--input-stdev", "3", "--output-mean", "5", "--output-stdev", "2")
# Commands that end with status 0 as they are. TRACE, LOG, RUN and SWEEP are files and directories; NEW does not exist.
COMMAND_LINES: tuple[tuple[str, ...], ...] = (
    ("run", "TRACE", *SIMULATED, "--output", "NEW"),
    ("run", "TRACE", *SIMULATED, "--output", "NEW", "--repeat", "2"),
    ("sweep", "TRACE", *SIMULATED, "--over", "max_batch_size=1,2", "--processes", "1", "--keep", "summary", "--output",
     "NEW"),
    ("bench", "throughput", "TRACE", "--model", "tiny", *SIMULATED, "--output", "NEW"),
    ("bench", "--model", "tiny", "latency", "TRACE", *SIMULATED, "--output", "NEW"),
    ("report", "RUN"), ("why", "RUN"), ("compare", "RUN", "RUN"), ("watch", "RUN", "--once"),
    ("export", "RUN"), ("plot", "RUN", "--list"), ("config", "show", *SIMULATED), ("config", "schema"),
    ("schema", "summary.json"), ("capacity", "tiny", *SIMULATED), STEP, STEP,
    ("calibrate", "--from", "LOG", "--gpu", "h100-sxm", "--model", "tiny", "--output", "NEW.toml"),
    ("tune", "TRACE", *DEVICE, "--max_num_samples", "3", "--output", "NEW"),
    ("dataset", "info", "TRACE"), ("dataset", "convert", "TRACE", "--to", "gpt-manager", "-o", "NEW.json"),
    ("dataset", "sample", "TRACE", "--num-requests", "2", "-o", "NEW.jsonl"),
    ("dataset", "synth", "fixed", "--input-len", "5", "--output-len", "5", *SYNTH),
    ("dataset", "synth", "token-norm-dist", *NORMAL, *SYNTH),
    ("dataset", "synth", "token-unif-dist", "--input-min", "2", "--input-max", "9", "--output-min", "1",
     "--output-max", "4", *SYNTH),
    ("dataset", "synth", "token-from-histogram", "--trace", "TRACE", *SYNTH),
    ("dataset", "synth", "lognormal", "--input-median", "9", "--input-mean", "12", "--output-median", "3",
     "--output-mean", "4", *SYNTH),
    ("dataset", "synth", "shared-prefix", "--pools", "2", "--prefix-mean", "9", "--prefix-stdev", "1", *NORMAL,
     *SYNTH),
    ("dataset", "synth", "multi-turn", "--turns-mean", "2", "--think-time-mean", "1", *NORMAL, *SYNTH),
    ("triton", "--model", "tiny", "--device", "sim:h100-sxm", "--model_repository", "NEW"),
)  # fmt: skip
# Options that choose where it runs and what is written; with others the attack would leave its folder, or wait.
LEFT_OUT = {
    "device",
    "model",
    "model_path",
    "output",
    "quiet",
    "endpoint",
    "log_iteration_data",
    "debug",
    "cpu_threads",
    "plot",
    "interval",
    "html",
    "only",
    "quick",
    "gpu",
    "workspace",
    "sequential",
    "lora_dir",
}
MANY = {"num_requests", "max_num_samples", "repeat", "warm_up"}
# Settings that are not drawn for a pair: they wait, or need files that are not there.
ALONE = {
    "device",
    "output",
    "overwrite",
    "quiet",
    "log_iteration_data",
    "wait_sleep",
    "rate_schedule",
    "tokenizer",
    "engine_overhead",
    "lora_dir",
    "columns",
    "draft_model",
    "model",
    "cpu_threads",
    "tp_size",
    "pp_size",
}


def command_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """A command with one to three options, or arguments, that have hostile values."""
    words = [_placed(word, folder) for word in draw.choice(COMMAND_LINES)]
    command, depth = _command(words)
    if draw.random() < 0.1:
        words[draw.randrange(depth, len(words) + 1) - 1] = draw.choice(hostile.TEXTS)
    known = [one for one in command.params if isinstance(one, click.Option) and not _names(one) & LEFT_OUT]
    for option in draw.sample(known, min(len(known), draw.choice((1, 1, 2, 3)))):
        name = draw.choice([name for name in (*option.opts, *option.secondary_opts) if name.startswith("-")])
        if option.is_flag or option.secondary_opts:
            words.append(name)
        else:
            for _ in range(option.nargs):
                value = _value(option, draw)
                words += [f"{name}={value}"] if option.nargs == 1 and name.startswith("--") else [name, value]
    outcomes.attack(words)


def _placed(word: str, folder: Path) -> str:
    if word == "TRACE":
        path = folder / "trace.jsonl"
        path.write_bytes(
            json_lines([{"arrival_s": 0.1 * number, "prompt_len": 20 + number, "output_len": 4} for number in range(6)])
        )
        return str(path)
    places = {"RUN": recorded() / "run", "SWEEP": recorded() / "sweep", "LOG": recorded() / "run"}
    if word in places:
        return str(places[word])
    return str(fresh(folder, word)) if word.startswith("NEW") else word


def _command(words: list[str]) -> tuple[click.Command, int]:
    """The command of a command line, and the number of words that name it."""
    module, depth = COMMANDS[words[0]][0], 1
    command = getattr(import_module(f"ifbbench.cli.{module}"), words[0].replace("-", "_"))
    for place, word in enumerate(words):
        if isinstance(command, click.Group) and word in command.commands:
            command, depth = command.commands[word], place + 1
    return command, depth


def _names(option: click.Option) -> set[str]:
    return {name.lstrip("-").replace("-", "_") for name in (option.name or "", *option.opts)}


def _value(option: click.Option, draw: random.Random) -> str:
    if isinstance(option, SettingOption):
        declared = (*settings(), *serve_settings(), *triton_settings())
        return setting_value(next(one for one in declared if one.name == option.name), draw)
    kind = option.type
    if isinstance(kind, click.Choice) and draw.random() < 0.7:
        return str(draw.choice(list(kind.choices)))
    if isinstance(kind, click.types.IntParamType | click.types.FloatParamType) and draw.random() < 0.8:
        few = _names(option) & MANY
        return str(draw.choice((0, 1, 2, 5, -1) if few else (*hostile.INTEGERS, *hostile.FLOATS, 5, 12, 40)))
    return draw.choice(hostile.TEXTS)


def pair_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """Two settings, each with a value that is valid, at a limit or drawn for it; what they do together is tried."""
    trace = folder / "trace.jsonl"
    trace.write_bytes(json_lines(ROWS))
    known = [one for one in settings() if one.name not in ALONE and one.group != "endpoint"]
    simulated = (*DEVICE, "--quiet")
    device = draw.choice((simulated, simulated, NULL))
    options = []
    for one in draw.sample(known, 2):
        if device is NULL and one.name in ("time_scale", "arrival", "request_rate"):
            device = simulated
        options += [
            f"--{'' if value else 'no_'}{one.name}" if isinstance(value, bool) else f"--{one.name}={value}"
            for value in (_valid(one, draw),)
        ]
    if not any("max_tokens_in" in option for option in options):
        options += KV_CACHE
    if "--slo" in " ".join(options) or draw.random() < 0.8:
        outcomes.attack(["run", str(trace), *device, *options, "--output", str(fresh(folder, "run"))])
    else:
        command = draw.choice((["capacity", "--trace", str(trace)], ["config", "show"]))
        outcomes.attack([*command, *device, *options])


def _valid(one: Any, draw: random.Random) -> Any:
    if one.type is bool:
        return draw.random() < 0.5
    drawn = (
        next((value for _ in range(40) if (value := DRAWS[one.name](draw)) is not None), None)
        if one.name in DRAWS
        else None
    )
    if one.choices:
        return draw.choice(one.choices)
    if one.type in (int, float) and draw.random() < 0.7:
        low = one.minimum if one.minimum is not None else one.above + 1e-9 if one.above is not None else -3
        values = [low, one.maximum, low + 1, low + 2, 7, 64, 1000, 2**20]
        valid = [value for value in values if value is not None and low <= value <= one.maximum]
        return one.type(draw.choice(valid))
    return drawn if drawn is not None else setting_value(one, draw)


DOCUMENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("run", {"trace": "default", "max_num_samples": 3, "max_batch_size": 4, "policy": "max_utilization",
             "slo": ["ttft=1s", "tpot=50ms"], "enable_chunked_context": True, "time_scale": 0.5}),
    ("run", {"trace": "default", "repeat": 2, "max_num_samples": 2, "max_attention_window": [64, 32]}),
    ("sweep", {"trace": "default", "over": {"max_batch_size": [1, 2], "policy": ["max_utilization"]}, "keep": "summary",
               "processes": 1, "max_num_samples": 2}),
    ("sweep", {"trace": "default", "over": ["max_batch_size=1,2", "max_num_tokens=512,1024"], "zip": True,
               "processes": 1, "max_num_samples": 2}),
    ("config", {"max_batch_size": 4, "kv_cache_free_gpu_mem_fraction": 0.5, "type": "IFB"}),
    ("tune", {"trace": "default", "max_num_samples": 3, "max_batch_size": 4, "policy": "max_utilization",
              "max_num_tokens": 512, "enable_chunked_context": True}),
)  # fmt: skip


def config_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """A config file in YAML, TOML or JSON with changed values or bytes, and recorded ones of runs and sweeps."""
    command, document = draw.choice(DOCUMENTS)
    changed: Any = document
    for _ in range(draw.choice((1, 1, 2))):
        changed = hostile.changed(changed, draw)
    if isinstance(changed, dict) and isinstance(changed.get("repeat"), int):  # as many runs, which take their time
        changed["repeat"] = min(changed["repeat"], 3)
    name = draw.choice(("config.yaml", "config.yaml", "config.toml", "run.json"))
    writers: dict[str, Callable[[Any], str]] = {
        "config.yaml": lambda value: yaml.safe_dump(value, allow_unicode=True),
        "config.toml": _toml,
        "run.json": lambda value: json.dumps(value if draw.random() < 0.3 else {"config": value, "trace": value}),
    }
    content = writers[name](changed).encode("utf-8", "surrogatepass")
    if draw.random() < 0.25:
        content = hostile.changed_bytes(content, draw)
    path = folder / name
    path.write_bytes(content)
    words = {"config": ["config", "show"], "tune": ["tune"]}.get(command, [command])
    more = [] if command == "config" else ["--output", str(fresh(folder, "output"))]
    outcomes.attack([*words, *SIMULATED, "--config", str(path), *more], repr(content[:500]))


def _toml(value: Any) -> str:
    if not isinstance(value, dict):
        return f"value = {json.dumps(value)}"
    return "".join(f"{json.dumps(name)} = {_toml_value(item)}\n" for name, item in value.items())


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_toml_value(item)}" for name, item in value.items()) + "}"
    return json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf")


SHARED = [11 * number % 97 for number in range(40)]
# Requests of several priorities that begin alike.
LIKE_ROWS = [
    {
        "arrival_s": 0.001 * number,
        "prompt_tokens": [*SHARED[: 8 * (number % 6)], *range(number, 3 * number + 1)],
        "output_len": 1 + 3 * number % 11,
        "max_new_tokens": 12,
        "priority": number % 3 / 2,
    }
    for number in range(10)
]
# Settings that those of an engine act with.
BESIDE = ("max_num_tokens", "max_batch_size", "tokens_per_block", "max_tokens_in_paged_kvcache", "max_queue_size")


def engine_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """Two to five settings of vLLM or SGLang, each valid or at a limit, on requests with priorities and prefixes."""
    trace = folder / "trace.jsonl"
    trace.write_bytes(json_lines(LIKE_ROWS))
    engine = draw.choice(("sglang", "sglang", "vllm"))
    own = [one for one in settings() if one.group == engine]
    beside = [one for one in settings() if one.name in BESIDE]
    chosen = {one.name: _valid(one, draw) for one in draw.sample(own, draw.choice((1, 2, 3)))}
    chosen |= {one.name: _valid(one, draw) for one in draw.sample(beside, draw.choice((0, 1, 2)))}
    chosen.setdefault("max_tokens_in_paged_kvcache", draw.choice((64, 128, 1024)))
    for name, needed in (("hicache_", "enable_hierarchical_cache"), ("preemption", "enable_priority_scheduling")):
        if any(name in one for one in chosen) and draw.random() < 0.8:
            chosen[needed] = True
    options = [
        f"--{'' if value else 'no_'}{name}" if isinstance(value, bool) else f"--{name}={value}"
        for name, value in chosen.items()
    ]
    arguments = [
        "run",
        str(trace),
        "--engine",
        engine,
        *DEVICE,
        "--quiet",
        *options,
        "--output",
        str(fresh(folder, "run")),
    ]
    outcomes.attack(arguments, str(chosen))


# How the command lines of the servers that `config from` reads begin.
SERVER_LINES = {
    "vllm": ("vllm serve tiny", "python -m vllm.entrypoints.openai.api_server --model tiny"),
    "sglang": ("sglang serve tiny", "python -m sglang.launch_server --model-path tiny"),
    "trtllm": ("trtllm-serve tiny", "mpirun -n 2 trtllm-serve serve tiny"),
}
# Options that depend on each other, and those of JSON objects, files and lists.
JOINT = {
    "vllm": ("data-parallel-size", "enable-expert-parallel", "speculative-config", "eplb-config", "config", "api-key"),
    "sglang": ("dp-size", "ep-size", "enable-dp-attention", "speculative-algorithm", "speculative-num-steps", "config"),
    "trtllm": ("config", "extra_llm_api_options"),
}


def line_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """The command line of a server with options of either engine and hostile values, read by `config from`."""
    engine = draw.choice(list(SERVER_LINES))
    line = [draw.choice(SERVER_LINES[engine])]
    options = {server.engine: server.options for server in SERVERS_READ}
    others = options[draw.choice(list(SERVER_LINES)) if draw.random() < 0.1 else engine]
    for name, option in draw.sample(sorted(others.items()), draw.choice((1, 2, 3, 6))):
        line.append(f"--{option}")
        one = next(one for one in settings() if one.name == name)
        if one.type is not bool or draw.random() < 0.1:
            value = setting_value(one, draw)
            line[-1] += draw.choice(("=", " ")) + (shlex.quote(value) if draw.random() < 0.8 else value)
    for option in draw.sample(JOINT[engine], draw.choice((0, 0, 1, 2))):
        value = draw.choice(
            ("", "2", "-1", "{}", "[", "eagle", str(folder), '{"method": 3}', '{"num_speculative_tokens": "x"}')
        )
        line.append(f"--{option}{draw.choice(('=', ' ', '.key '))}{shlex.quote(value)}")
    text = " ".join(line)
    outcomes.attack(["config", "from", text, *draw.choice(([], ["--json"]))], repr(text))
