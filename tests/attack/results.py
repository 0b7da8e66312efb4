"""Tries of commands that read what runs and sweeps have written, with fields changed or bytes damaged."""

import json
import random
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tests.attack import hostile
from tests.attack.commands import Outcomes

LINE_FILES = ("requests.jsonl", "iterations.jsonl", "spans.jsonl", "trace.jsonl")
OBJECT_FILES = ("summary.json", "run.json")
QUICK = (
    "report",
    "report --json",
    "report --json --steady-state",
    "why --budget 0",
    "why --budget 0 --json",
    "why --request 3",
    "why --iteration 5",
    "compare",
    "watch --once",
    "run --config",
    "dataset info",
    "export --format csv",
)


@cache
def recorded() -> Path:
    """A folder with a run and a sweep of two points."""
    folder = Path(mkdtemp(prefix="attack-"))
    trace = folder / "trace.jsonl"
    rows = [
        {
            "request_id": number,
            "arrival_s": number * 0.01,
            "prompt_len": 30 + number,
            "output_len": 6,
            "class": "ab"[number % 2],
            "priority": 0.5 + number % 3 / 10,
        }
        for number in range(12)
    ]
    rows.append({"request_id": 99, "arrival_s": 0.2, "prompt_len": 10**6, "output_len": 2})
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcomes = Outcomes("preparation")
    common = [
        str(trace),
        "--device",
        "sim:h100-sxm",
        "--model",
        "tiny",
        "--quiet",
        "--max_tokens_in_paged_kvcache",
        "128",
        "--policy",
        "max_utilization",
        "--slo",
        "ttft=1s",
    ]
    outcomes.attack(["run", *common, "--output", str(folder / "run")])
    outcomes.attack(["run", *common, "--output", str(folder / "thinned"), "--iteration_stats_every", "3"])
    outcomes.attack(["run", *common, "--output", str(folder / "executor"), "--iteration_stats_format", "trtllm"])
    outcomes.attack(
        ["sweep", *common, "--output", str(folder / "sweep"), "--over", "max_batch_size=2,4", "--processes", "1"]
    )
    assert not outcomes.problems, outcomes.problems
    return folder


def damage(directory: Path, draw: random.Random) -> str:
    """Change one file of a run directory; returns what was changed."""
    name = draw.choice((*LINE_FILES, *OBJECT_FILES, "summary.json", "requests.jsonl", "iterations.jsonl"))
    path = directory / name
    what = draw.random()
    if what < 0.05:
        path.unlink()
        return f"{name} removed"
    if what < 0.2:
        path.write_bytes(hostile.changed_bytes(path.read_bytes(), draw))
        return f"{name} damaged"
    if name in OBJECT_FILES:
        after: Any = hostile.changed(json.loads(path.read_text()), draw)
        path.write_bytes(json.dumps(after).encode("utf-8", "surrogatepass"))
        return f"{name} changed"
    lines = path.read_text().splitlines()
    place = draw.randrange(len(lines))
    lines[place] = json.dumps(hostile.changed(json.loads(lines[place]), draw))
    path.write_bytes("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass"))
    return f"{name}: {lines[place][:700]}"


def result_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """A command reads a damaged run directory or sweep."""
    source = recorded()
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    if draw.random() < 0.12:
        shutil.copytree(source / "sweep", copy)
        name = draw.choice(("sweep.csv", "sweep.csv", "sweep.csv", "sweep.yaml"))
        content = hostile.changed_bytes((copy / name).read_bytes(), draw)
        if name == "sweep.csv" and draw.random() < 0.7:
            rows = [line.split(",") for line in (copy / name).read_text().splitlines()]
            row = draw.choice(rows)
            row[draw.randrange(len(row))] = (
                str(draw.choice((*hostile.TEXTS, *hostile.FLOATS))).replace("\ud800", "?").replace("\udcff", "?")
            )
            content = "".join(",".join(row) + "\n" for row in rows).encode()
        (copy / name).write_bytes(content)
        note = name
        commands: tuple[str, ...] = ("report", "report --json", "compare", "sweep --config")
    else:
        shutil.copytree(source / draw.choice(("run", "run", "thinned", "executor")), copy)
        note, commands = damage(copy, draw), QUICK
    command, *options = draw.choice(commands).split()
    if draw.random() < 0.02:
        command, options = "plot", []
    arguments = [command, str(copy), *options]
    if command == "compare":
        arguments = [command, str(source / "run"), str(copy)]
    elif "--config" in options:
        arguments = [command, "--config", str(copy), "--quiet", "--output", str(folder / "again"), "--overwrite"]
    elif command == "dataset":
        arguments = [command, *options, str(copy)]
    outcomes.attack(arguments, note)
