"""Tries of one kind each: hostile traces, specifications, settings, config files and names.

A function makes the files of one try in a folder and runs the command that reads them. It depends on the generator
`draw` alone.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ifbbench.settings.config import settings
from ifbbench.settings.engines import ENGINE_NAMES
from ifbbench.settings.groups.recording import SIDE_OUTPUTS
from tests.attack import hostile
from tests.attack.commands import Outcomes, fresh
from tests.workload.sample_files import NAMES, SAMPLES, rows_of

Try = Callable[[Outcomes, Path, random.Random], None]

# A simulated GPU holds millions of blocks for the smallest model, which take longer to make than everything else.
DEVICE = ("--device", "sim:h100-sxm", "--model", "tiny")
KV_CACHE = ("--max_tokens_in_paged_kvcache", "65536")
SIMULATED = (*DEVICE, "--quiet", *KV_CACHE)
NULL = ("--device", "null", "--time_scale", "0", "--quiet")
ROWS: list[dict[str, Any]] = [
    {"request_id": 0, "arrival_s": 0.0, "prompt_len": 20, "max_new_tokens": 8, "output_len": 5},
    {"request_id": 1, "arrival_s": 0.5, "prompt_tokens": [5, 6, 7], "output_len": 3, "priority": 0.7, "stop_ids": [9]},
    {"request_id": 2, "arrival_s": 1.0, "prompt_len": 700, "prefix_ids": [1, 2], "output_len": 4, "class": "a"},
    {
        "request_id": 3,
        "arrival_s": 1.5,
        "prompt_len": 30,
        "prefix_ids": [1],
        "prefix_lens": [12],
        "output_len": 4,
        "after": 0,
        "think_s": 0.25,
        "lora_task_id": 3,
    },
]
SPECIFICATIONS: tuple[dict[str, Any], ...] = (
    {
        "name": "a",
        "num_requests": 20,
        "prompt_len": {"distribution": "fixed", "value": 10},
        "output_len": {"distribution": "uniform", "min": 1, "max": 9},
        "reserve": "factor:1.5",
        "arrival": {"process": "gamma", "rate": 9.5, "cv": 2},
        "priority": 0.4,
        "lora_task_id": {"min": 1, "max": 3},
    },
    {
        "name": "b",
        "num_requests": 15,
        "prompt_len": {"distribution": "lognormal", "median": 9, "mean": 12, "max": 60},
        "output_len": {"distribution": "quantiles", "p0": 1, "p50": 4, "p100": 9},
        "reserve": "fixed:12",
        "shared_prefix": {
            "pools": 3,
            "len": {"distribution": "normal", "mean": 20, "stdev": 5},
            "share": 0.5,
            "skew": 1,
        },
        "sessions": {
            "turns": {"distribution": "geometric", "mean": 2},
            "think_from": "answer",
            "think_time": {"distribution": "exponential", "mean": 2},
        },
        "arrival": {"process": "ramp", "start": 1, "end": 20, "duration": 2, "strategy": "exponential"},
    },
    {
        "name": "c",
        "num_requests": 12,
        "arrival": {"process": "schedule", "rates": [[0, 2], [3, 9]], "burstiness": 0.5},
        "classes": [
            {
                "name": "x",
                "weight": 2,
                "prompt_len": {"distribution": "histogram", "edges": [1, 5, 9], "counts": [1, 2]},
                "output_len": {"distribution": "fixed", "value": 3},
            },
            {
                "name": "y",
                "weight": 1,
                "priority": 0.9,
                "prompt_len": {"distribution": "fixed", "value": 4},
                "output_len": {"distribution": "fixed", "value": 3},
                "sessions": {
                    "turns": {"distribution": "fixed", "value": 2},
                    "think_time": {"distribution": "uniform", "min": 0, "max": 1},
                },
            },
        ],
    },
    {
        "num_requests": 9,
        "prompt_len": {"distribution": "fixed", "value": 10},
        "output_len": {"distribution": "fixed", "value": 2},
        "arrival": {"process": "on_off", "rate": 5, "on": 1, "off": 2, "burstiness": 2},
    },
)


def trace_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """A trace of any format with changed rows or bytes."""
    kind = draw.random()
    if kind < 0.35:
        name, content = (
            "trace.jsonl",
            json_lines([hostile.changed(row, draw) if draw.random() < 0.5 else row for row in ROWS]),
        )
    elif kind < 0.7:
        name = draw.choice(NAMES)
        rows, write = rows_of(name)
        place = draw.randrange(len(rows))
        try:
            content = write([*rows[:place], hostile.changed(rows[place], draw), *rows[place + 1 :]]).encode(
                "utf-8", "surrogatepass"
            )
        except (ValueError, AttributeError):  # not a table
            content = hostile.changed_bytes((SAMPLES / name).read_bytes(), draw)
    else:
        name = draw.choice(NAMES)
        content = hostile.changed_bytes((SAMPLES / name).read_bytes(), draw)
    path = folder / name
    path.write_bytes(content)
    options = [] if draw.random() < 0.6 else ["--skip_bad_rows"]
    if draw.random() < 0.2:
        outcomes.attack(["dataset", "info", str(path), *options], _shown(content))
        return
    if draw.random() < 0.2:
        options += ["--time_scale", repr(draw.choice(hostile.FLOATS))]
    output = fresh(folder, "run")
    outcomes.attack(["run", str(path), *SIMULATED, "--output", str(output), *options], _shown(content))


def specification_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """A workload specification with changed values or bytes, as YAML, TOML or JSON in YAML."""
    document: Any = draw.choice(SPECIFICATIONS)
    for _ in range(draw.choice((1, 1, 2))):
        document = hostile.changed(document, draw)
    content = _yaml(document) if draw.random() < 0.7 else json.dumps(document).encode("utf-8", "surrogatepass")
    name = "spec.yaml"
    if draw.random() < 0.2:
        content = hostile.changed_bytes(content, draw)
    if draw.random() < 0.1:
        name, content = (
            "spec.toml",
            hostile.changed_bytes(
                b"num_requests = 5\nprompt_len.distribution = 'fixed'\n"
                b"prompt_len.value = 7\noutput_len = [[{a = 1}]]\n",
                draw,
            ),
        )
    path = folder / name
    path.write_bytes(content)
    command = ["dataset", "info", str(path)]
    if draw.random() < 0.7:  # some specifications ask for thousands of requests
        command = ["run", str(path), *SIMULATED, "--max_num_samples", "200", "--output", str(fresh(folder, "run"))]
    outcomes.attack(command, _shown(content))


# Settings that name files which the command reads or writes: values come from `hostile` all the same, in the folder.
_WRITTEN = ("output", *SIDE_OUTPUTS)


def setting_value(one: Any, draw: random.Random) -> str:
    """A text for a setting, often next to one of its limits."""
    if one.choices and draw.random() < 0.5:
        return draw.choice(one.choices)
    limits = [limit for limit in (one.minimum, one.maximum, one.above) if limit is not None]
    if limits and draw.random() < 0.3:
        return str(draw.choice(limits) + draw.choice((-1, 0, 1)))
    kind = draw.random()
    if kind < 0.45:
        return str(draw.choice(hostile.INTEGERS))
    if kind < 0.75:
        return str(draw.choice(hostile.FLOATS))
    return draw.choice(hostile.TEXTS)


def settings_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """One to three settings with values near limits, as options or in a config file."""
    trace = folder / "trace.jsonl"
    trace.write_bytes(json_lines(ROWS))
    known = [
        one
        for one in settings()
        if one.name not in (*_WRITTEN, "log_iteration_data", "device", "quiet", "overwrite") and one.group != "endpoint"
    ]
    chosen = {one.name: setting_value(one, draw) for one in draw.sample(known, draw.choice((1, 1, 2, 3)))}
    engines = [one.group for one in known if one.name in chosen and one.group in ENGINE_NAMES]
    if "engine" not in chosen and draw.random() < (0.8 if engines else 0.3):  # a setting of an engine needs that engine
        chosen["engine"] = draw.choice(engines or ["vllm", "sglang"])
    if chosen.get("wait_sleep"):  # on a real clock only
        chosen["wait_sleep"] = "1"
    if (
        draw.random() < 0.4
        and "time_scale" not in chosen
        and not {"arrival", "request_rate", "rate_schedule", "concurrency", "duration"} & set(chosen)
    ):
        device: tuple[str, ...] = NULL
    elif draw.random() < 0.15 and not {"arrival", "request_rate", "rate_schedule", "model", "engine_overhead"} & set(
        chosen
    ):
        device = ("--device", "cpu", "--time_scale", "0", "--quiet", "--max_num_samples", "2", "--max_seq_len", "64")
        chosen.pop("time_scale", None), chosen.pop("max_seq_len", None), chosen.pop("max_num_samples", None)
        for name in ("cpu_threads", "tp_size", "pp_size"):  # they start threads and processes
            chosen.pop(name, None)
    else:
        device = (*DEVICE, "--quiet") if "max_tokens_in_paged_kvcache" in chosen else SIMULATED
    surface = draw.random()
    if surface < 0.75:
        options = [part for name, text in chosen.items() for part in _as_option(name, text)]
    else:
        path = folder / draw.choice(("config.yaml", "config.toml", "config.json"))
        values: dict[str, Any] = dict(chosen) if draw.random() < 0.5 else {name: hostile.value(draw) for name in chosen}
        content = json.dumps(values).encode("utf-8", "surrogatepass")
        if path.suffix == ".toml":
            content = "".join(f"{name} = {json.dumps(item)}\n" for name, item in values.items()).encode(
                "utf-8", "surrogatepass"
            )
        if path.suffix == ".json":
            path, content = (
                folder / "run.json",
                json.dumps({"config": values, "trace": {}}).encode("utf-8", "surrogatepass"),
            )
        if draw.random() < 0.15:
            content = hostile.changed_bytes(content, draw)
        path.write_bytes(content)
        options = ["--config", str(path)]
    command = draw.choice(("run",) * 7 + ("capacity", "config", "sweep"))
    if command == "run":
        arguments = ["run", str(trace), *device, "--output", str(fresh(folder, "run"))]
    elif command == "sweep":
        name, text = next(iter(chosen.items()))
        arguments = [
            "sweep",
            str(trace),
            *SIMULATED,
            "--processes",
            "1",
            "--output",
            str(fresh(folder, "sweep")),
            "--over",
            f"{name}={text}",
        ]
        options = []
    elif command == "capacity":
        arguments = ["capacity", *device, "--trace", str(trace)]
        if draw.random() < 0.5:
            arguments = ["capacity", *device, "--input-len", "100", "--output-len", str(draw.choice(hostile.INTEGERS))]
    else:
        arguments = ["config", *device]
    outcomes.attack([*arguments, *options], str(chosen))


def _as_option(name: str, text: str) -> list[str]:
    one = next(one for one in settings() if one.name == name)
    if one.type is bool:
        return [f"--{name}={text}" if text.lower() in ("true", "false") else f"--{name}"]
    return [f"--{name}={text}"]


def name_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """Hostile texts where names of traces, models, devices, files and commands are expected."""
    text = draw.choice(
        (*hostile.TEXTS, "\ud800.yaml", "x" * 300 + ".jsonl", "a/" * 3000, "\0.gguf", "sim:\0", "~nobody")
    )
    elsewhere = "/dev" if text in ("/", "..") else text  # where no other runs are
    trace = folder / "trace.jsonl"
    trace.write_bytes(json_lines(ROWS))
    output = ["--output", str(fresh(folder, "run"))]
    outcomes.attack(
        draw.choice(
            [
                ["run", text, *SIMULATED, *output],
                ["run", str(trace), "--model", text, *SIMULATED, *output],
                ["run", str(trace), "--device", f"sim:{text}", "--quiet", *output],
                ["run", str(trace), "--config", text, *SIMULATED, *output],
                ["run", str(trace), "--device", text, "--quiet", "--time_scale", "0", *output],
                ["run", str(trace), "--policy", text, *SIMULATED, *output],
                ["report", elsewhere],
                ["why", elsewhere],
                ["compare", elsewhere, elsewhere],
                ["watch", elsewhere, "--once"],
                ["schema", text],
                ["capacity", text],
                ["dataset", "info", text],
                ["plot", elsewhere],
                ["export", elsewhere],
                [text],
                ["run", str(trace), "--engine_dir", text, *SIMULATED, *output],
                ["bench", "--dataset", text],
                ["run", str(trace), "--slo", text, *SIMULATED, *output],
                ["run", str(trace), "--rate_schedule", text, *SIMULATED, *output],
                ["run", str(trace), "--tokenizer", text, *SIMULATED, *output],
                ["run", str(trace), "--arrival", text, *SIMULATED, *output],
                ["run", str(trace), "--engine_overhead", text, *SIMULATED, *output],
                ["dataset", "synth", text],
                ["sweep", str(trace), "--over", text, *SIMULATED],
                ["generate", "--model", text, "hello"],
                ["run", str(trace), "--columns", text, *SIMULATED, *output],
                ["explain-step", "--device", f"sim:{text}"],
                ["run", str(trace), "--reserve", text, *SIMULATED, *output],
                ["run", str(trace), "--max_attention_window", text, *SIMULATED, *output],
            ]
        )
    )


def json_lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode("utf-8", "surrogatepass")


def _yaml(document: Any) -> bytes:
    return yaml.safe_dump(document, allow_unicode=True).encode("utf-8", "surrogatepass")


def _shown(content: bytes) -> str:
    return repr(content[:500])
