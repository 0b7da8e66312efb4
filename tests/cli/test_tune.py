"""`ifbbench tune`: its output, files and exit status."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result

from ifbbench.analysis.recorded import RecordedRun
from ifbbench.cli.main import main
from ifbbench.settings.servers import read_line
from ifbbench.studies.tune_certainty import loss_text

MODEL = ["--model", "llama-3.1-8b", "--device", "h100-sxm"]
LOAD = ["--max_num_samples", "60", "--request_rate", "40"]
pytestmark = pytest.mark.usefixtures("one_process")
CONTRACT = {"recommendation", "candidates", "pareto", "binding", "importance"}


def tune(directory: Path, *options: str) -> Result:
    output = ["--output", str(directory / "tuned")]
    return CliRunner().invoke(main, ["tune", "chat", *MODEL, *LOAD, *output, *options])


@pytest.fixture(scope="module")
def directory(tmp_path_factory, one_process) -> Path:
    """Of a search whose standard output is in `stdout`."""
    path = tmp_path_factory.mktemp("tune")
    result = tune(path, "--slo", "ttft=1s", "--slo", "tpot=12ms", "--policy", "max_utilization", "--json")
    assert result.exit_code == 0, result.output
    (path / "stdout").write_text(result.stdout)
    return path


def test_json_alone_is_printed_and_is_the_file(directory):
    found = json.loads((directory / "stdout").read_text())
    assert set(found) >= CONTRACT
    assert found == json.loads((directory / "tuned/tune.json").read_text())
    assert found["recommendation"]["settings"]["policy"] == "max_utilization"  # given, so it is not searched
    assert "policy" not in found["importance"]


def test_the_run_has_the_figures_of_the_recommendation(directory):
    found = json.loads((directory / "tuned/tune.json").read_text())["recommendation"]
    summary = json.loads((directory / "tuned/run/summary.json").read_text())
    assert summary["goodput_share"] == found["figures"]["goodput_share"]
    # 60 requests in 1.5 s are one transient: they do not say how others would fare.
    assert found["intervals_95"] == {}
    assert found["interval_of"].startswith("No intervals: the run is too short")


def test_the_command_runs_the_recommendation(directory, tmp_path):
    found = json.loads((directory / "tuned/tune.json").read_text())["recommendation"]
    words = found["command"].split()[1:]
    result = CliRunner().invoke(main, [*words, "--output", str(tmp_path / "run"), "--json"])
    assert json.loads(result.stdout)["goodput_share"] == found["figures"]["goodput_share"]


def test_files_for_other_programs_have_the_settings(directory, tmp_path):
    settings = json.loads((directory / "tuned/tune.json").read_text())["recommendation"]["settings"]
    llm = yaml.safe_load((directory / "tuned/trtllm-serve.yaml").read_text())
    assert llm["max_batch_size"] == settings["max_batch_size"]
    assert llm["scheduler_config"]["capacity_scheduler_policy"] == "MAX_UTILIZATION"
    # As trtllm-bench reads it.
    output = ["--output", str(tmp_path / "bench"), "--quiet"]
    words = ["bench", "throughput", "chat", *MODEL, "--num_requests", "4", *output]
    result = CliRunner().invoke(main, [*words, "--extra_llm_api_options", str(directory / "tuned/trtllm-serve.yaml")])
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "bench/run.json").read_text())["config"]
    assert {name: config[name] for name in settings} == settings
    flags = (directory / "tuned/gptManagerBenchmark.txt").read_text().split()
    run = ["run", "chat", *MODEL, "--max_num_samples", "4", *flags, "--quiet", "--output", str(tmp_path / "run")]
    assert CliRunner().invoke(main, run).exit_code == 0
    assert f"--max-num-seqs {settings['max_batch_size']}" in (directory / "tuned/vllm.txt").read_text()
    # Lengths alone cannot tell whether prompts share prefixes.
    names = ("trtllm-serve.yaml", "gptManagerBenchmark.txt", "vllm.txt")
    files = [(directory / "tuned" / name).read_text() for name in names]
    assert not any(word in text for text in files for word in ("reuse", "prefix-caching"))
    assert (directory / "tuned/pareto.png").stat().st_size > 10_000


def test_the_config_file_replays_the_requests_that_were_tuned(directory, tmp_path):
    figures = json.loads((directory / "tuned/tune.json").read_text())["recommendation"]["figures"]
    values = yaml.safe_load((directory / "tuned/run.yaml").read_text())
    asked = {
        "trace": "chat",
        "model": "llama-3.1-8b",
        "device": "sim:h100-sxm",
        "request_rate": 40.0,
        "max_num_samples": 60,
        "policy": "max_utilization",
    }
    assert asked.items() <= values.items()
    output = ["--output", str(tmp_path / "run"), "--json"]
    result = CliRunner().invoke(main, ["run", "--config", str(directory / "tuned/run.yaml"), *output])
    summary = json.loads(result.stdout)
    assert {name: summary["ttft_s"][name] for name in figures["ttft_s"]} == figures["ttft_s"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """The answer of a search for the fewest GPUs, which are several replicas."""
    path = tmp_path_factory.mktemp("cost")
    limits = ["--max_batch_size", "64", "--max_num_tokens", "1024", "--policy", "guaranteed_no_evict", "--tp_size", "1"]
    rest = ["--enable_chunked_context", "--tokens_per_block", "32", "--enable_exp_delays", "--request_rate", "90"]
    slo = ["--slo", "ttft.p99=300ms", "--slo", "tpot.p99=9ms"]
    result = tune(path, "--goal", "cost", "--max-gpus", "16", *limits, *rest, *slo)
    assert result.exit_code == 0, result.output
    (path / "stdout").write_text(result.stdout)
    return path


def test_the_commands_of_all_replicas_together_give_the_figures(shared, tmp_path):
    found = json.loads((shared / "tuned/tune.json").read_text())["recommendation"]
    figures, replicas = found["figures"], found["figures"]["replicas"]
    assert len(found["commands"]) == replicas > 1
    rows: list[dict[str, Any]] = []
    gaps: list[float] = []
    for number, command in enumerate(found["commands"], start=1):
        assert command in (shared / "stdout").read_text()
        path = tmp_path / f"run-{number}"
        result = CliRunner().invoke(main, [*command.split()[1:], "--output", str(path), "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads((path / "run.json").read_text())["config"]["replica"] == f"{number}/{replicas}"
        rows += [json.loads(line) for line in (path / "requests.jsonl").read_text().splitlines()]
        gaps += token_gaps(path)
    assert len(rows) == 60
    assert len(gaps) == sum(row["output_len"] - 1 for row in rows)
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        values = [row[name] for row in rows if row[name] is not None]
        assert figures[name]["p99"] == pytest.approx(np.percentile(values, 99))
        assert figures[name]["mean"] == pytest.approx(np.mean(values))
    assert figures["itl_s"]["p99"] == pytest.approx(np.percentile(gaps, 99), rel=1e-6)
    duration_s = max(row["end_s"] for row in rows) - min(row["arrival_s"] for row in rows)
    tokens_per_s = sum(row["output_len"] for row in rows) / duration_s
    assert figures["output_throughput_tokens_per_s"] == pytest.approx(tokens_per_s)
    assert figures["cost_per_million_output_tokens"] == pytest.approx(replicas / 3600 / tokens_per_s * 1e6)
    assert max(figures["ttft_s"]["p99"] / 0.3, figures["tpot_s"]["p99"] / 0.009) <= 1  # "objectives are met"


def token_gaps(directory: Path) -> list[float]:
    """The gaps between the tokens of each request (s), from the spans and iterations of a run."""
    run = RecordedRun.load(directory)
    found: list[float] = []
    for spans in run.spans.values():  # a span yields a token in each of its last iterations
        numbers = [number for span in spans for number in range(span.last + 1 - span.produced, span.last + 1)]
        found += np.diff([run.iterations.end_of(number) for number in numbers]).tolist()
    return found


def test_a_config_file_for_several_replicas_runs_them_all(shared, tmp_path):
    path, found = shared / "tuned/run.yaml", json.loads((shared / "tuned/tune.json").read_text())["recommendation"]
    replicas = yaml.safe_load(path.read_text())["replicas"]
    output = ["--output", str(tmp_path / "run")]
    result = CliRunner().invoke(main, ["capacity", "--config", str(path)])
    assert result.exit_code == 2
    assert f"replicas is {replicas}" in result.output
    assert f"--replica 1/{replicas}" in result.output
    one = CliRunner().invoke(main, ["run", "--config", str(path), "--replica", f"1/{replicas}", "--json", *output])
    assert json.loads(one.stdout)["requests"]["total"] == -(-60 // replicas)
    every = CliRunner().invoke(main, ["run", "--config", str(path), "--json", *output, "--overwrite"])
    summary = json.loads(every.stdout)
    assert len(summary["fleet"]["replicas"]) == replicas
    assert summary["ttft_s"]["p99"] == found["figures"]["ttft_s"]["p99"]


def test_the_table_has_the_replicas_and_the_next_best_is_dearer(shared):
    text = (shared / "stdout").read_text()
    assert re.search(rf"^replicas +{yaml.safe_load((shared / 'tuned/run.yaml').read_text())['replicas']}\b", text, re.M)
    assert not re.search(r"-\d+(\.\d)? %", text)


@pytest.mark.parametrize(
    ("goal", "loss", "words"),
    [
        ("cost", 0.329, "is 32.9 % dearer"),
        ("cost", -0.024, "is 2.4 % cheaper"),
        ("cost", -0.002, "is 0.2 % cheaper, too little to leave default values for"),
        ("goodput", 0.124, "has a goodput that is 12.4 % lower"),
        ("max_rate", 0.124, "has a highest rate that is 12.4 % lower"),
        ("output_throughput", -0.124, "has a throughput that is 12.4 % higher"),
    ],
)
def test_the_loss_of_the_next_best_settings_in_words(goal, loss, words):
    assert loss_text({"loss": loss, "misses": {}}, goal) == words


def test_tables_show_what_users_get_without_a_search(tmp_path):
    fixed = ["--max_batch_size", "256", "--no_enable_chunked_context", "--policy", "guaranteed_no_evict"]
    result = tune(tmp_path, "--max_num_tokens", "16384", *fixed, "--max_num_samples", "30")
    assert result.exit_code == 0, result.output
    assert "trtllm-bench rule" in result.output
    assert "dynamic tuning" in result.output
    assert "ifbbench run chat" in result.output


def test_vllm_is_tuned_with_its_own_scheduler(tmp_path):
    few = ["--max_num_samples", "20", "--quiet", "--json"]
    result = tune(tmp_path, "--engine", "vllm", "--slo", "ttft.p99=300ms", *few)
    answer, output = json.loads(result.stdout), tmp_path / "tuned"
    assert [one["name"] for one in answer["baselines"]] == ["vLLM's defaults"]
    settings = answer["recommendation"]["settings"]
    assert "policy" not in settings
    assert "long_prefill_token_threshold" in settings
    assert "--engine vllm" in answer["recommendation"]["command"]
    assert not (output / "trtllm-serve.yaml").exists()
    line = read_line((output / "vllm.txt").read_text()).values
    assert line["max_num_tokens"] == settings["max_num_tokens"]
    assert line["model"] == "llama-3.1-8b"


def test_impossible_objectives_end_with_status_1(tmp_path):
    short = ["--max_num_samples", "10", "--quiet", "--json"]
    result = tune(tmp_path, "--slo", "ttft.p99=1us", "--goal", "output_throughput", *short)
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["recommendation"]["meets_slo"]
    assert "misses ttft.p99 by" in found["verdict"]


def test_deployments_are_compared_by_what_they_cost(tmp_path):
    slo = ["--slo", "ttft.p99=500ms", "--slo", "tpot.p99=20ms"]
    kinds = ["--device", "h100-sxm,b200", "--dtype", "bf16,fp8", "--tp_size", "1,2", "--goal", "cost"]
    prices = ["--gpu-hour-price", "h100=2.5,b200=7"]
    result = tune(tmp_path, *kinds, *slo, *prices, "--max_num_samples", "30", "--quiet")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "tuned/tune.json").read_text())
    rows = found["deployments"]
    assert len(rows) == 8
    searched = [row for row in rows if row.get("is_searched")]
    assert rows[: len(searched)] == searched
    assert {row["device"] for row in searched} == {"h100-sxm", "b200"}
    for row in rows:
        if row["gpus"] is None:
            assert row["needs_gpus"] > min(one["gpus"] for one in searched if one["device"] == row["device"])
            continue
        assert row["gpus"] == row["replicas"] * row["tp_size"] * row["pp_size"]
        assert row["price_per_hour"] == row["gpus"] * {"h100-sxm": 2.5, "b200": 7.0}[row["device"]]
        assert row["nearest_objective"]["share_of_limit"] <= 1
    prices = [row["price_per_hour"] for row in searched]
    assert prices == sorted(prices)
    assert searched[0]["spare_rate"] >= 0
    assert found["recommendation"]["figures"]["gpus"] == searched[0]["gpus"]
    assert f"it needs {searched[0]['gpus']} {searched[0]['device']}" in result.output


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--device", "cpu"], "tune simulates"),
        (["--tp_size", "1,2"], "give --goal cost"),
        (["--goal", "goodput"], "--goal output_throughput"),
        (["--goal", "speed"], "speed"),
        (["--goal", "max_rate", "--time_scale", "0"], "--goal max_rate"),
        (["--slo", "ttft=fast"], "ttft"),
    ],
)
def test_bad_input_is_refused(tmp_path, options, expected):
    arguments = ["tune", "chat", *MODEL, "--max_num_samples", "30", "--output", str(tmp_path / "tuned"), *options]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert expected in result.output
    assert not (tmp_path / "tuned").exists()
