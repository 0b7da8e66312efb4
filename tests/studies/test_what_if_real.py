"""What `why` predicts for runs that cannot be replayed as they were: on a real device, and too long for the budget."""

import json
import random
import shlex
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from ifbbench.analysis.findings import Findings
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.build.engines import engine_defaults
from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.processes import TimeIsUp
from ifbbench.replay.run import run_trace
from ifbbench.report.what_if_table import print_what_if
from ifbbench.settings.config import RunConfig, settings
from ifbbench.simulated.hardware import load_hardware, write_profile
from ifbbench.studies import trace_window, what_if
from ifbbench.studies.fit import slowed
from ifbbench.studies.fitted_run import FITTED, _base_profile
from ifbbench.studies.trace_window import MIN_REQUESTS, window_of
from ifbbench.studies.what_if import WhatIf
from ifbbench.studies.what_if_outcome import Outcome
from tests.analysis.runs import simulate, write_requests
from tests.studies.test_what_if import assert_repeats

SHORT: dict[str, Any] = {"max_batch_size": 2, "cpu_threads": 1, "warm_up": 0, "quiet": True}
# The server of a run against an endpoint.
SERVER: dict[str, Any] = {
    "engine": "vllm",
    "device": "sim:h100-sxm",
    "model": "llama-3.1-8b",
    "max_batch_size": 4,
    "max_seq_len": 2048,
}


def write_trace(directory: Path, requests: list[tuple[float, int, int]]) -> Path:
    """A trace of requests with these arrivals, prompt and output lengths."""
    rows = [
        {
            "request_id": 7 + number,
            "arrival_s": at_s,
            "prompt_len": prompt,
            "max_new_tokens": out,
            "output_len": out,
        }
        for number, (at_s, prompt, out) in enumerate(requests)
    ]
    path = directory / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def real_run(directory: Path, **settings: Any) -> Findings:
    """A run on the CPU, whose requests wait for slots."""
    draw = random.Random(1)
    trace = write_trace(directory, [(number / 60, draw.randint(1, 90), draw.randint(4, 16)) for number in range(24)])
    run_trace(str(trace), RunConfig(device="cpu", output=str(directory / "run"), **SHORT | settings))
    return Findings(RecordedRun.load(directory / "run"))


def tried(findings: Findings, name: str | None = None, budget_s: float = 1e9) -> Outcome:
    trials = WhatIf(findings)
    return trials.try_all(trials.goal(name), budget_s=budget_s, processes=1)


def check_predictions(found: Outcome, summary: dict[str, Any]) -> None:
    """Every figure is compared with the run, and an effect below the distance to it is noise."""
    assert found.recorded["ttft_s.p99"] == summary["ttft_s"]["p99"]
    assert found.recorded.keys() == found.replayed.keys() == found.baseline.keys()
    for path, error in found.errors.items():
        recorded, replayed = found.recorded[path], found.replayed[path]
        assert recorded
        assert replayed
        assert error == max(replayed / recorded, recorded / replayed) - 1
    for change in found.changes:
        assert not {"tp_size", "kv_cache_dtype", "overlap"} & change.settings.keys()
        for path, effect in change.effects.items():
            if effect.change is not None and abs(effect.change) <= found.errors.get(path, 0.0):
                assert effect.is_noise, path
    if found.recommended is not None:
        assert not found.changes[found.recommended].effects[found.goal.path].is_noise


def test_a_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    findings = real_run(tmp_path)
    found = tried(findings, "ttft.p99")
    assert (findings.run.path / FITTED).exists()
    check_predictions(found, findings.run.data.summary or {})
    # The iterations together take about as long as they did; other programs make single ones longer.
    assert found.errors["output_throughput_tokens_per_s"] < 0.5
    more = next(one for one in found.changes if one.settings == {"max_batch_size": 8})
    after, before = more.effects["ttft_s.p99"].after, found.baseline["ttft_s.p99"]
    assert after is not None
    assert before is not None
    assert after <= before  # equal where the machine is so fast that no request waits
    assert_repeats(more.command, {path: effect.after for path, effect in more.effects.items()})
    words = shlex.split(more.real_command)
    assert {"--max_batch_size", "8", "--device", "cpu", "--cpu_threads", "1"} <= set(words)
    assert "--max_seq_len" not in words
    assert CliRunner().invoke(main, [*words[1:], "--quiet", "--output", "real"]).exit_code == 0

    why = ["why", str(findings.run.path), "--what_if", "max_batch_size=8"]
    shown = " ".join(CliRunner().invoke(main, why).stdout.split())
    assert "predicted by a simulated device that was fitted to this run" in shown
    assert "its replay there" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"max_batch_size": 3, "enable_chunked_context": True, "max_num_tokens": 64},
        {"max_tokens_in_paged_kvcache": 640, "policy": "max_utilization", "max_seq_len": 400, "max_batch_size": 8},
        {"engine": "vllm", "max_batch_size": 4, "max_num_tokens": 256, "enable_chunked_context": True},
        {"overlap": "async", "max_batch_size": 4},
        {"slo": "ttft=200ms,tpot=50ms", "max_batch_size": 6},
    ],
)
def test_other_runs_on_a_cpu(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    findings = real_run(tmp_path, **settings)
    found = tried(findings)
    check_predictions(found, findings.run.data.summary or {})
    for change in found.changes[:1]:
        assert_repeats(change.command, {path: effect.after for path, effect in change.effects.items()})


def test_a_replay_that_is_too_far_off_recommends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = real_run(tmp_path)
    summary = findings.run.data.summary
    assert summary is not None
    summary["ttft_s"]["p99"] *= 1000
    found = tried(findings, "ttft.p99")
    assert found.recommended is None
    assert "the error of such predictions" in found.reason
    assert all(one.effects["ttft_s.p99"].is_noise for one in found.changes)


def endpoint_run(directory: Path, slower: float) -> RecordedRun:
    """A run of vLLM on a simulated H100 that is so much slower, as a client records it: without iterations and settings
    of the server."""
    profile = directory / "true.toml"
    write_profile(slowed(load_hardware("h100-sxm"), slower), profile, "")
    draw = random.Random(3)
    trace = write_trace(directory, [(number / 10, draw.randint(50, 900), draw.randint(20, 90)) for number in range(60)])
    server = SERVER | {"device": f"sim:{profile}"}
    simulate(directory, "run", trace, **engine_defaults(server) | server | {"max_tokens_in_paged_kvcache": None})
    path = directory / "run/run.json"
    facts = json.loads(path.read_text())
    replayed = {item.name for item in settings() if item.group == "replay"}
    facts["config"] = {name: value for name, value in facts["config"].items() if name in replayed}
    facts["endpoint"] = {"url": "http://host", "type": "openai", "model": "m"}
    path.write_text(json.dumps(facts))
    (directory / "run/iterations.jsonl").unlink()
    return RecordedRun.load(directory / "run", or_endpoint=True)


def test_a_run_against_an_endpoint_with_the_settings_of_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device of the server is found, and with it the effects are those on that device."""
    monkeypatch.chdir(tmp_path)
    run = endpoint_run(tmp_path, slower=1.4)
    trials = WhatIf.of_endpoint(run, SERVER)
    found = trials.try_all(trials.goal("ttft.p99"), budget_s=1e9, processes=1)
    check_predictions(found, run.data.summary or {})
    assert "made 1.40 times slower than its profile" in found.notes[0]
    assert all(error < 0.02 for error in found.errors.values())
    assert found.recommended is not None
    best = found.changes[found.recommended]
    assert "max_batch_size" in best.settings
    assert not best.real_command
    assert_repeats(best.command, {path: effect.after for path, effect in best.effects.items()})
    on_device = shlex.split(best.command)
    on_device[on_device.index("--device") + 1] = "sim:true.toml"
    assert CliRunner().invoke(main, [*on_device[1:], "--quiet", "--output", "true"]).exit_code == 0
    truth = json.loads((tmp_path / "true/summary.json").read_text())
    assert best.effects["ttft_s.p99"].after == pytest.approx(truth["ttft_s"]["p99"], rel=0.05)


def test_an_endpoint_that_no_such_gpu_can_be(tmp_path: Path) -> None:
    run = endpoint_run(tmp_path, slower=6.0)
    with pytest.raises(InputError, match="no h100-sxm that is up to 4 times slower or faster"):
        WhatIf.of_endpoint(run, SERVER)


def test_runs_that_nothing_can_be_fitted_to(tmp_path: Path) -> None:
    static = real_run(tmp_path, type="v1", policy="static_batch", enable_chunked_context=False).run.path
    facts = json.loads(CliRunner().invoke(main, ["why", str(static), "--json"]).stdout)["what_if"]
    assert facts["goal"] is None
    assert "has no times that a profile describes" in facts["reason"]
    asked = CliRunner().invoke(main, ["why", str(static), "--improve", "ttft.p99"])
    assert asked.exit_code == 2
    assert "has no times that a profile describes" in asked.output


@pytest.mark.parametrize(
    ("name", "gigabytes", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", 80, "h100-sxm"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100-80gb-sxm"),
        ("NVIDIA H200", 141, "h200-sxm"),
        ("NVIDIA L4", 24, "l4"),
        ("NVIDIA L40S", 48, "l40s"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96, "rtx-pro-6000"),
        ("NVIDIA GH200 480GB", 96, "gh200-96gb"),
        ("NVIDIA B200", 180, "b200"),
        ("NVIDIA A10G", 24, "a10g"),
    ],
)
def test_the_profile_of_a_gpu(name: str, gigabytes: int, profile: str, tmp_path: Path) -> None:
    run = simulate(tmp_path, "run", write_requests(tmp_path / "trace.jsonl", seed=1, count=2))
    run.data.run["config"]["device"] = "cuda"
    run.data.run["hardware"]["gpu"] = {"name": name, "memory_bytes": gigabytes << 30}
    assert _base_profile(run) == profile
    run.data.run["hardware"]["gpu"] = {"name": "Radeon", "memory_bytes": 1}
    with pytest.raises(InputError, match="no hardware profile is like Radeon"):
        _base_profile(run)


def test_a_fit_ends_with_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So do the replays that fit a device to a run against an endpoint; what was found in the run is printed."""
    monkeypatch.setattr(what_if, "fit_device", lambda run: time.sleep(600))
    monkeypatch.setattr(what_if, "replay_endpoint", lambda run, trace, config: time.sleep(600))
    (tmp_path / "server").mkdir()
    result = CliRunner().invoke(main, ["why", str(real_run(tmp_path).run.path), "--budget", "3s"])
    assert result.exit_code == 0, result.output
    assert "Slowest" in result.stdout
    assert "reading the run and preparing the trials took" in result.stdout
    assert "of --budget 3s; give more." in result.stdout
    with pytest.raises(TimeIsUp):
        WhatIf.of_endpoint(endpoint_run(tmp_path / "server", slower=1.0), SERVER, fit_s=0.1)


# Windows.


def long_run(directory: Path, count: int = 1200, **settings: Any) -> Findings:
    """So many requests, of which an eighth arrive in a burst in the middle."""
    draw, now_s, requests = random.Random(4), 0.0, []
    for number in range(count):
        now_s += draw.expovariate(120.0 if 5 / 12 * count <= number < 13 / 24 * count else 12.0)
        requests.append((now_s, draw.randint(1, 900), draw.randint(1, 80)))
    values = {"max_tokens_in_paged_kvcache": None, "max_batch_size": 8} | settings
    return Findings(simulate(directory, "run", write_trace(directory, requests), **values))


def test_a_window_holds_the_burst_and_begins_without_a_queue(tmp_path: Path) -> None:
    findings = long_run(tmp_path)
    ids = list(findings.run.trace)
    window = window_of(findings.run, ids, "ttft_s.p99", 600)
    assert window.requests <= 600
    assert window.first < 640 < window.first + window.requests
    assert window.waiting == 0
    share = int(window.reason.split("have ")[1].split()[0].lstrip(">"))
    assert share > 50
    assert f"{window.requests:,} of 1,200" in window.text
    of_mean = window_of(findings.run, ids, "e2e_s.mean", 600)
    own, everything = (float(text.rstrip(",")) for text in of_mean.reason.split() if text[0].isdigit())
    assert own == pytest.approx(everything, rel=0.05)
    assert window_of(findings.run, ids, "ttft_s.p99", 1).requests <= MIN_REQUESTS


def test_trials_of_a_window_are_repeated_by_their_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(what_if, "MIN_REACHED", 1e12)  # no replay of all requests is quick enough
    monkeypatch.setattr(what_if, "MIN_REQUESTS", 130)
    monkeypatch.setattr(trace_window, "MIN_REQUESTS", 130)
    findings = long_run(tmp_path, count=400)
    found = tried(findings, "ttft.p99", budget_s=1e6)
    assert found.window is not None
    assert found.recommended is not None
    best = found.changes[found.recommended]
    assert f"--max_num_samples {found.window.requests} --skip_samples {found.window.first}" in best.command
    assert found.on_all is not None
    assert found.on_all.settings == best.settings
    assert "--skip_samples" not in found.on_all.command
    assert_repeats(found.on_all.command, {path: effect.after for path, effect in found.on_all.effects.items()})
    assert_repeats(best.command, {path: effect.after for path, effect in best.effects.items()})
    assert_repeats(found.command, found.baseline)
    assert not any("decides otherwise" in note for note in found.notes)

    trials = WhatIf(findings)
    others = [one.settings for one in found.changes if {"max_batch_size", "overlap"} & one.settings.keys()]
    of_all = trials.try_all(found.goal, others, processes=1)
    assert of_all.window is None
    assert found.on_all.score <= 1.05 * of_all.changes[0].score
    summary = findings.run.data.summary or {}
    assert {path: effect.before for path, effect in found.on_all.effects.items()} == of_all.baseline
    assert of_all.baseline["ttft_s.p99"] == summary["ttft_s"]["p99"]
    text = StringIO()
    print_what_if(found.as_dict(), Console(file=text, width=200))
    assert found.window.text in text.getvalue()
    assert "this run, these requests" in text.getvalue()


def test_replays_end_with_the_time(tmp_path: Path) -> None:
    """Also while one is running: the budget does not wait for it."""
    findings = long_run(tmp_path)
    trials = WhatIf(findings)
    goal = trials.goal("ttft.p99")
    found = trials.try_all(goal, budget_s=0.01, processes=1)
    assert found.window is not None
    assert not found.changes
    assert found.untried
    assert found.recommended is None
    assert found.reason == "no change was reached in the time"


def test_an_effect_below_the_error_of_predicted_differences_is_noise(tmp_path: Path) -> None:
    """The setup was compared with a real server; 2 requests at a time hardly wait."""
    like = {"engine": "vllm", "model": "llama-2-7b", "dtype": "bf16", "tp_size": 2, "max_seq_len": 4096}
    trace = write_trace(tmp_path, [(number / 2, 200, 30) for number in range(12)])
    like["device"] = "sim:h100-sxm"
    values = {**engine_defaults(like), **like, "max_tokens_in_paged_kvcache": None, "max_batch_size": 1}
    trials = WhatIf(Findings(simulate(tmp_path, "run", trace, **values)))
    found = trials.try_all(trials.goal("tpot.p99"), [{"max_batch_size": 2}, {"tp_size": 1}], processes=1)
    assert found.errors["tpot_s.p99"] == 0.07
    slight, slower = sorted(found.changes, key=lambda one: "tp_size" in one.settings)
    assert slower.effects["tpot_s.p99"].change is not None
    assert slower.effects["tpot_s.p99"].change > 0.08
    assert not slower.effects["tpot_s.p99"].is_noise
    assert slight.effects["tpot_s.p99"].is_noise
    assert found.recommended is None
    assert "7 %, the error of such predictions" in found.reason
