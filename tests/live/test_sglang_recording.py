"""Recordings of SGLang: the events of real workloads become run directories, and these are replayed to the iteration.

`sglang_events.json.gz` has what the recorder of `ifbbench.live.sglang` sent for random workloads in the event loops of
SGLang 0.5.23, and what SGLang ran (`python -m benchmarks.sglang_recording keep FILE`).
"""

import gzip
import importlib.util
import json
import logging
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.analysis.recorded import RecordedRun
from ifbbench.analysis.waiting import HeadsOfLine
from ifbbench.cli.main import main
from ifbbench.engine.plan import Limit
from ifbbench.live import sglang as recorder
from ifbbench.live.events import Step
from ifbbench.live.notes import RECORD, version_numbers
from tests.live.recordings import batches, decisions, difference_of_replay, held_by, lines
from tests.live.test_recording import events_of, summary, write_events
from tests.report.test_schema import check

CASES = json.loads(gzip.decompress((Path(__file__).parent / "sglang_events.json.gz").read_bytes()))


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_what_sglang_decided_is_recorded_and_replayed(case: dict[str, Any], tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    write_events(events_of(case), recorded)
    expected = [
        (len(step["tokens"]), sum(step["tokens"].values()), step["lost"], step["free"]) for step in case["steps"]
    ]
    assert [line[:4] for line in decisions(recorded)] == expected
    names = {row["request_id"]: row["name"] for row in lines(recorded, "requests")}
    # A request that has ended by then has no span of its step too many.
    for batch, step in zip(batches(recorded), case["steps"], strict=True):
        named = {names[number]: count for number, count in batch.items()}
        assert named == {name: count for name, count in step["tokens"].items() if name in named}
        assert all(step["tokens"][name] == 1 for name in step["tokens"].keys() - named.keys())
    figures = summary(recorded)
    assert not figures["partial"]
    assert figures["requests"]["total"] == len(lines(recorded, "trace")) == len(names)
    assert figures["pauses"] == sum(step["lost"] for step in case["steps"])
    assert difference_of_replay(recorded, tmp_path / "replayed", "sglang") is None


def test_why_names_what_held_a_request(tmp_path: Path) -> None:
    """In random iterations, against SGLang's own queue: all wait for the prompt that was cut, else for its first
    request; without a prefill batch that SGLang tried, that one was retracted.

    Left out are iterations of prompts that name the generating request that stands aside: there, `why` has the line as
    it was before them. So are requests that their clients stopped before they ran, which have no spans."""
    limits, rng = list[str | None](), random.Random(0)
    for case in CASES:
        recorded, events = tmp_path / case["name"], events_of(case)
        write_events(events, recorded)
        run = RecordedRun.load(recorded)
        heads, rows = HeadsOfLine(run), lines(recorded, "requests")
        ids = {row["name"]: row["request_id"] for row in rows}
        ran = {row["name"] for row in rows if row["first_scheduled_s"] is not None}
        reasons = [(line["ifbbench"]["first_left_out"] or {}).get("reason") for line in lines(recorded, "iterations")]
        steps = [event for event in events if isinstance(event, Step)]
        known = [number for number, one in enumerate(reasons) if one not in (None, Limit.PREFILL)]
        for number in rng.sample(known, min(40, len(known))):
            step, seen = steps[number], case["steps"][number]
            if not (waiting := [name for name in seen["queue"] if name in ran]):
                continue
            name, first = rng.choice(waiting), seen["cut"] or seen["queue"][0]
            expected = "num_tokens" if seen["cut"] else "kv_blocks" if step.head is None else step.head.limit
            assert step.head is not None or seen["cut"] or step.preempted
            found = held_by(run, heads, number, ids[name])
            assert found == (None if name == first else ids[first], expected), (case["name"], number, name)
            limits.append(expected)
    assert len(limits) > 100
    assert {"kv_blocks", "num_tokens", "batch_size"} == set(limits)


def test_the_cases_have_what_is_to_be_tested() -> None:
    steps = [event for case in CASES for event in events_of(case) if isinstance(event, Step)]
    limits = {step.head.limit for step in steps if step.head is not None}
    assert limits == {"kv_blocks", "num_tokens", "batch_size"}
    assert {one.limit for step in steps for one in step.preempted} == {"kv_blocks", "batch_size"}
    assert {one.outcome for step in steps for one in step.ended} >= {"completed", "stopped"}
    assert any(step.held is not None for step in steps)


def test_no_token_ids_are_written(tmp_path: Path) -> None:
    """The events have them, because SGLang has no hashes; the files have hashes."""
    events = events_of(CASES[0])
    write_events(events, tmp_path / "recorded")
    trace = lines(tmp_path / "recorded", "trace")
    assert all("prompt_tokens" not in row for row in trace)
    assert any(row.get("prefix_ids") for row in trace)


def test_a_recording_is_read_by_other_commands(tmp_path: Path) -> None:
    directory = tmp_path / "recorded"
    write_events(events_of(CASES[0]), directory)
    assert check(directory) > {"run.json", "trace.jsonl", "requests.jsonl"}
    for command in (["report"], ["why", "--budget", "0"], ["plot"]):
        result = CliRunner().invoke(main, [command[0], str(directory), *command[1:]])
        assert result.exit_code == 0, result.output


class Registry:
    """Keeps what is registered, as SGLang's `HookRegistry` does."""

    targets: list[str]

    @classmethod
    def register(cls, target: str, _hook: Any, _kind: str) -> None:
        cls.targets.append(target)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> type[Registry]:
    """SGLang's modules that `register` imports."""
    Registry.targets = []
    modules = {name: ModuleType(name) for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.version")}
    modules["sglang.srt.plugins.hook_registry"] = hooks = ModuleType("sglang.srt.plugins.hook_registry")
    hooks.__dict__.update(HookRegistry=Registry, HookType=SimpleNamespace(AROUND="around"))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return Registry


@pytest.mark.parametrize(
    ("version", "is_known"), [("0.5.23", True), ("0.5.22", False), ("0.5.24", False), ("1", False)]
)
def test_only_known_versions_are_hooked(
    registry: type[Registry],
    version: str,
    is_known: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys.modules["sglang.version"], "__version__", version, raising=False)
    recorder.register()
    assert not registry.targets  # nothing is to be recorded
    assert not caplog.records
    monkeypatch.setenv(RECORD, "directory")
    with caplog.at_level(logging.WARNING):
        recorder.register()
    assert bool(registry.targets) == is_known
    expected = [] if is_known else [f"nothing is recorded: SGLang {version} is not known; expected 0.5.23."]
    assert [record.message for record in caplog.records] == expected


def test_version_numbers() -> None:
    assert version_numbers("0.5.23.post1") == (0, 5, 23)
    assert version_numbers("0.32.0rc1") == (0, 32, 0)
    assert version_numbers("0.0.0.dev0") == (0, 0, 0)


def test_an_error_in_the_recorder_does_not_disturb_the_server(caplog: pytest.LogCaptureFixture) -> None:
    hooks, abandoned = recorder._Hooks("0.5.23"), list[bool]()

    class Broken(recorder._Notes):
        def __init__(self) -> None:
            pass

        def abandon(self) -> None:
            abandoned.append(True)

    hooks._notes = Broken()
    plan = hooks.get_next_batch_to_run(lambda _scheduler: "a plan", None)
    assert plan == "a plan"
    assert hooks._notes is None
    assert abandoned == [True]
    assert "the recording ends; the server goes on without it" in caplog.text
    assert hooks.process_batch_result(lambda *_given: "done", None, None, None) == "done"


def test_the_entry_point_is_the_recorder() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points."sglang.srt.plugins"]\nifbbench = "ifbbench.live.sglang:register"' in text


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang")
def test_the_recorder_in_the_event_loops_of_sglang() -> None:
    command = [sys.executable, "-m", "benchmarks.sglang_recording", "random", "--count", "8"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
