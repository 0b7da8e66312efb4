"""What `why` recommends: the best of all single changes, and its commands repeat the effects."""

import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.analysis.findings import Findings
from ifbbench.build.engines import engine_defaults, usual_beside
from ifbbench.cli.main import main
from ifbbench.replay.run import summarise_run
from ifbbench.settings.names import from_mapping
from ifbbench.studies.replayed_settings import base_config, command_of
from ifbbench.studies.what_if import MIN_GAIN, WhatIf
from ifbbench.studies.what_if_outcome import Change, Outcome, at
from tests.analysis.runs import simulate, write_requests

KINDS: dict[str, dict[str, Any]] = {
    "few slots": {"max_batch_size": 4},
    "few tokens": {"max_num_tokens": 128},
    "small cache": {"max_tokens_in_paged_kvcache": 4_000},
    "pauses": {"max_tokens_in_paged_kvcache": 3_000, "policy": "max_utilization"},
    "reuse": {"max_batch_size": 6, "shares_prefixes": True},
    "burst": {"max_batch_size": 12, "time_scale": 0.0},
    "overload": {"max_batch_size": 8, "time_scale": 0.3},
    "static": {"type": "v1", "policy": "static_batch", "enable_chunked_context": False, "max_batch_size": 6},
    "long prompts": {"max_num_tokens": 2048, "longest": 6_000},
    "objectives": {"max_batch_size": 6, "slo": "ttft=500ms,tpot=30ms"},
    "an objective of the run": {"max_batch_size": 32, "slo": "tpot.p99=12ms,ttft.p99=1s"},
    "vllm": {"engine": "vllm", "max_batch_size": 6, "max_num_tokens": 512, "max_tokens_in_paged_kvcache": None},
}
# One of each two that are alike; the slow tests have them all.
BY_DEFAULT = ("few tokens", "pauses", "reuse", "burst", "static", "long prompts", "objectives", "vllm")
GOAL_OF: dict[str, str] = {"few tokens": "tpot.p99", "small cache": "output_throughput", "overload": "e2e.mean"}


def made(directory: Path, kind: str, seed: int) -> Findings:
    """A run of this kind over random requests."""
    values = dict(KINDS[kind])
    shares, longest = values.pop("shares_prefixes", False), values.pop("longest", 900)
    trace = write_requests(directory / "trace.jsonl", seed, count=16, longest=longest)
    if shares:
        rows = [json.loads(line) for line in trace.read_text().splitlines()]
        draw = random.Random(seed)
        for row in rows:
            row["prompt_len"] += 512
            row["prefix_ids"] = [draw.randrange(2)]
        trace.write_text("\n".join(map(json.dumps, rows)) + "\n")
    settings = {"max_seq_len": 8192, "max_tokens_in_paged_kvcache": None, **values}
    if "engine" in values:
        settings = {**engine_defaults({"device": "sim:h100-sxm", **values}), **settings}
    return Findings(simulate(directory, "run", trace, **settings))


def check(findings: Findings, name: str | None) -> Outcome:
    """What was found is true of all changes, and the commands repeat the figures."""
    trials = WhatIf(findings)
    goal = trials.goal(name)
    found = trials.try_all(goal, budget_s=1e9, processes=1)
    assert not found.notes or "decides otherwise" not in found.notes[0]
    assert not found.untried

    before = goal.score(summarise_run(trials.trace, trials.config))
    assert before is not None
    failed = found.baseline["requests.failed"]
    exhaustive = [
        score
        for change in found.changes
        if not change.needs_more_gpus
        and (goal.counts_refusals or change.effects["requests.failed"].after == failed)
        and (score := goal.score(summarise_run(trials.trace, trials.config.with_values(**change.settings)))) is not None
    ]
    if found.recommended is None:
        assert min(exhaustive) > before - MIN_GAIN * abs(before)
        assert found.reason
        return found
    best = found.changes[found.recommended]
    if not best.needs_more_gpus:
        assert best.score - min(exhaustive) <= 0.05 * abs(min(exhaustive))
    assert best.score <= before - MIN_GAIN * abs(before)
    for change in [best, *([found.then] if found.then else [])]:
        assert_repeats(change.command, {path: effect.after for path, effect in change.effects.items()})
    assert best.loses_more == (costs(best) > gain(best, goal.path)) or goal.targets or goal.counts_refusals
    helping = [one for one in found.changes if one.score <= before - MIN_GAIN * abs(before) and not one.needs_more_gpus]
    helping = [one for one in helping if one.effects["requests.failed"].after == failed]
    mild = [one for one in helping if costs(one) <= gain(one, goal.path)]
    assert found.milder == (found.changes.index(mild[0]) if best.loses_more and mild else None)
    if found.then is not None:
        assert found.then.score < best.score
        assert found.then.effects[goal.path].before == best.effects[goal.path].after
    return found


def gain(change: Change, path: str) -> float:
    """The factor by which a figure gets better."""
    effect = change.effects[path]
    assert effect.before
    assert effect.after
    ratio = effect.after / effect.before
    return ratio if "throughput" in path else 1 / ratio


def costs(change: Change) -> float:
    """The largest factor by which a figure gets worse."""
    shown = ("ttft_s.p50", "ttft_s.p99", "tpot_s.p99", "e2e_s.mean", "output_throughput_tokens_per_s")
    return max([1 / gain(change, path) for path in shown if not change.effects[path].is_noise], default=1.0)


def assert_repeats(command: str, figures: dict[str, float | None]) -> None:
    """The pasted command gives these figures, to the digit."""
    words = shlex.split(command)
    assert words[:2] == ["ifbbench", "run"]
    recording = ("--recording", "summary", "--quiet", "--output", "again", "--overwrite")
    result = CliRunner().invoke(main, [*words[1:], *recording])
    summary = json.loads(Path("again/summary.json").read_text())
    assert result.exit_code == (1 if summary["requests"]["failed"] else 0), result.output
    assert {path: at(summary, path) for path in figures} == figures


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in BY_DEFAULT else pytest.mark.slow) for kind in KINDS]
)
def test_the_recommendation_is_the_best_of_all(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = check(made(tmp_path, kind, seed=5), GOAL_OF.get(kind))
    if kind not in ("an objective of the run", "long prompts"):
        assert found.recommended is not None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_40_other_runs(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kind = list(KINDS)[seed % len(KINDS)]
    goals = [None, "ttft.p99", "tpot.p99", "e2e.mean", "output_throughput"]
    check(made(tmp_path, kind, seed=100 + seed), goals[seed % len(goals)])


def test_a_change_that_costs_more_than_it_gains_is_said_to(tmp_path: Path) -> None:
    """With one slot TPOT is shorter, and requests wait."""
    run = str(made(tmp_path, "burst", seed=5).run.path)

    def shown(*settings: str) -> str:
        tried = [word for text in settings for word in ("--what_if", text)]
        return " ".join(CliRunner().invoke(main, ["why", run, "--improve", "tpot.p99", *tried]).stdout.split())

    alone = shown("max_batch_size=1")
    assert (
        "costs more than it gains: another figure gets worse by a larger factor. So do all others that help." in alone
    )
    assert "Recommended, if only TPOT p99 counts: --max_batch_size 1" in alone
    both = shown("max_batch_size=1", "overlap=async")
    assert "Recommended, if only TPOT p99 counts: --max_batch_size 1" in both
    assert "Recommended, if the others count as much: --overlap async" in both


def test_just_the_given_changes_are_tried(tmp_path: Path) -> None:
    directory = str(made(tmp_path, "few slots", seed=5).run.path)

    def why(*words: str) -> Any:
        return CliRunner().invoke(main, ["why", directory, *words])

    only = ("--what_if", "max_batch_size=16", "--what_if", "overlap=async")
    facts = json.loads(why("--json", "--improve", "tpot.p99", *only).stdout)["what_if"]
    assert facts["goal"] == "tpot_s.p99"
    assert sorted(map(str, (one["settings"] for one in facts["changes"]))) == [
        "{'max_batch_size': 16}",
        "{'overlap': 'async'}",
    ]
    best = facts["changes"][0]["effects"]["tpot_s.p99"]
    assert best["before"] == facts["baseline"]["tpot_s.p99"]
    assert best["after"] == min(one["effects"]["tpot_s.p99"]["after"] for one in facts["changes"])
    assert "No other settings were tried: --budget 0." in why("--budget", "0").stdout
    assert "of --budget 0.001s; give more." in why("--budget", "1ms").stdout
    for words, text in {
        ("--improve", "goodput"): "the run has no objectives",
        ("--what_if", "max_batch_size"): "expected name=value",
        ("--what_if", "request_rate=3"): "is no setting of the engine",
        ("--what_if", "max_batch=3"): "is not a setting",
        ("--budget", "soon"): "is no time",
    }.items():
        result = why(*words)
        assert result.exit_code == 2
        assert "Bound by" not in result.output  # before the run is explained
        assert text in result.output


def test_a_command_says_that_no_server_is_simulated(tmp_path: Path) -> None:
    """vLLM on a simulated device has one by default."""
    values = {"engine": "vllm", "max_tokens_in_paged_kvcache": None, "engine_overhead": None}
    run = made(tmp_path, "vllm", seed=5).run
    assert "--engine_overhead" not in command_of("trace", base_config(run.config, [], sessions=False))
    command = command_of("trace", base_config(run.config | values, [], sessions=False))
    assert "--engine_overhead none" in command
    given = ("run", "chat", "--max_num_samples", "4", *shlex.split(command)[3:], "--quiet", "--output")
    assert CliRunner().invoke(main, [*given, str(tmp_path / "again")]).exit_code == 0
    assert json.loads((tmp_path / "again/run.json").read_text())["config"]["engine_overhead"] is None


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("changed", [{"max_num_tokens": 16_384}, {"max_num_tokens": 512}, {"tp_size": 4}])
def test_a_command_names_what_a_change_would_change_beside_itself(engine: str, changed: dict[str, Any]) -> None:
    """SGLang's default share of memory for the KV cache depends on chunks and GPUs, vLLM's batch on the tokens."""
    given = {"engine": engine, "device": "sim:h100-sxm", "model": "llama-3.1-8b"}
    tried = from_mapping({**engine_defaults(given), **given}, command_line=True).with_values(**changed)
    usual = usual_beside(tried)
    named = {name: value for name, value in tried.as_dict().items() if name in given or value != usual[name]}
    assert from_mapping({**engine_defaults(named), **named}, command_line=True) == tried
    words = command_of("trace", tried).split()
    assert ("--mem-fraction-static" in words) == (engine == "sglang")
    assert ("--max-num-seqs" in words) == (engine == "vllm" and changed == {"max_num_tokens": 512})
