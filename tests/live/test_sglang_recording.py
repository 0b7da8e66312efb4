"""Recordings of SGLang: the events of real workloads become run directories, and these are replayed to the iteration.

`sglang_events.json.gz` has what the recorder of `ifbbench.live.sglang` sent for random workloads in the event loops of
SGLang 0.5.23, and what SGLang ran (`python -m benchmarks.sglang_recording keep FILE`).
"""

import gzip
import importlib.util
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.engine.plan import Limit
from ifbbench.live import sglang as recorder
from ifbbench.live.events import Step
from ifbbench.live.notes import RECORD, version_numbers
from tests.live.recordings import batches, decisions, difference_of_replay, difference_of_why, lines
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


def test_why_names_what_held_each_request_in_each_iteration(tmp_path: Path) -> None:
    """Against SGLang's own queue, and the line of its source that ended the pass over it."""
    total = 0
    for case in CASES:
        write_events(events_of(case), tmp_path / case["name"])
        count, found = difference_of_why(tmp_path / case["name"], case["steps"])
        assert found is None, case["name"]
        total += count
    assert total > 1500
    assert {step["limit"] for case in CASES for step in case["steps"]} == {
        None,
        "kv_blocks",
        "num_tokens",
        "batch_size",
    }


def test_a_recording_of_an_earlier_version_names_no_head_of_the_queue(tmp_path: Path) -> None:
    """It is read, and what held the queue is taken to be as before while running requests stand aside for prompts."""
    wrong = 0
    for case in CASES:
        recorded = tmp_path / case["name"]
        write_events(events_of(case), recorded)
        rows = lines(recorded, "iterations")
        named = [row["ifbbench"].pop("queue_head", "") for row in rows]
        (recorded / "iterations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        reasons = [(row["ifbbench"]["first_left_out"] or {}).get("reason") for row in rows]
        assert all(reason == Limit.PREFILL for reason, head in zip(reasons, named, strict=True) if head is None)
        wrong += difference_of_why(recorded, case["steps"])[1] is not None
    assert 0 < wrong < len(CASES)


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


@pytest.mark.usefixtures("without_layout")
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
