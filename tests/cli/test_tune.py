"""`ifbbench tune`: its output, files and exit status."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from ifbbench.cli.main import main
from ifbbench.config import RunConfig

MODEL = ["--model", "llama-3.1-8b", "--device", "h100-sxm"]
LOAD = ["--max_num_samples", "60", "--request_rate", "40"]
CONTRACT = {"recommendation", "candidates", "pareto", "binding", "importance"}


def tune(directory: Path, *options: str) -> Result:
    output = ["--output", str(directory / "tuned")]
    return CliRunner().invoke(main, ["tune", "chat", *MODEL, *LOAD, *output, *options])


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
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
    assert RunConfig(**yaml.safe_load((directory / "tuned/run.yaml").read_text())).policy == "max_utilization"
    assert (directory / "tuned/pareto.png").stat().st_size > 10_000


def test_tables_show_what_users_get_without_a_search(tmp_path):
    fixed = ["--max_batch_size", "256", "--no_enable_chunked_context", "--policy", "guaranteed_no_evict"]
    result = tune(tmp_path, "--max_num_tokens", "16384", *fixed, "--max_num_samples", "30")
    assert result.exit_code == 0, result.output
    assert "trtllm-bench rule" in result.output
    assert "dynamic tuning" in result.output
    assert "ifbbench run chat" in result.output


def test_impossible_objectives_end_with_status_1(tmp_path):
    short = ["--max_num_samples", "30", "--quiet", "--json"]
    result = tune(tmp_path, "--slo", "ttft.p99=1us", "--goal", "output_throughput", *short)
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["recommendation"]["meets_slo"]
    assert "ttft.p99 is" in found["verdict"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--device", "cpu"], "tune simulates"),
        (["--goal", "goodput"], "--goal output_throughput"),
        (["--goal", "speed"], "speed"),
        (["--goal", "max_rate", "--time_scale", "0"], "--goal max_rate"),
        (["--slo", "ttft=fast"], "ttft"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(tmp_path, options, expected):
    arguments = ["tune", "chat", *MODEL, "--max_num_samples", "30", "--output", str(tmp_path / "tuned"), *options]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert expected in result.output
    assert not (tmp_path / "tuned").exists()
