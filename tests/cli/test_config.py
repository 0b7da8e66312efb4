"""`ifbbench config`, and config files that name the trace, sweep settings, or are those of a run or a sweep."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from ifbbench.cli.main import main
from ifbbench.config import settings

SIMULATED = ["--device", "h100-sxm", "--model", "llama-3.1-8b", "--max_num_samples", "12", "--request_rate", "20"]
SWEEP = """
trace: chat
over:
  max_num_tokens: 512..1024:x2
  policy: [guaranteed_no_evict, max_utilization]
repeat: 2
keep: summary
zip: true
device: h100-sxm
model: llama-3.1-8b
max_num_samples: 12
request_rate: 20
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ifbbench(*words: str, status: int = 0) -> Result:
    result = CliRunner().invoke(main, list(words))
    assert result.exit_code == status, result.output
    return result


def shown(*words: str) -> dict[str, Any]:
    return json.loads(ifbbench("config", "show", "--json", *words).stdout)


def digest(directory: str) -> str:
    return json.loads(Path(directory, "run.json").read_text())["schedule_digest"]


def test_each_setting_is_shown_with_value_source_default_and_unit() -> None:
    Path("run.yaml").write_text("max_num_tokens: 2048\nseed: 3\n")
    found = shown("run.yaml", "--device", "h100-sxm", "--model", "llama-3.1-8b", "--seed", "4")["settings"]
    assert list(found) == [item.name for item in settings()]
    values = {name: (found[name]["value"], found[name]["source"]) for name in found}
    assert values["max_num_tokens"] == (2048, "run.yaml")
    assert values["seed"] == (4, "option")
    assert values["policy"] == ("guaranteed_no_evict", "default")
    assert values["max_batch_size"] == (2048, "derived")
    assert values["max_tokens_in_paged_kvcache"][0] > 100_000
    assert (found["max_num_tokens"]["default"], found["max_num_tokens"]["unit"]) == (8192, "tokens")


def test_the_settings_of_a_real_device_are_resolved_without_its_weights() -> None:
    found = shown("--device", "cpu", "--model", "llama-3.1-8b")["settings"]
    assert (found["max_batch_size"]["value"], found["device"]["value"]) == (16, "cpu")


def test_only_changed_settings_are_shown_if_asked() -> None:
    printed = ifbbench("config", "show", "--device", "null", "--changed", "--max_batch_size", "9").stdout
    assert "max_batch_size" in printed
    assert "chunking_policy" not in printed


def test_settings_that_no_run_can_have_are_refused() -> None:
    error = ifbbench("config", "show", "--device", "h100-sxm", "--model", "llama-3.1-405b", status=2).stderr
    assert "memory" in error or "tp_size" in error
    assert "max_batch_size" in ifbbench("config", "show", "--max_batch_size", "0", status=2).stderr


def test_the_schema_takes_config_files_and_refuses_others() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(ifbbench("config", "schema").stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    names = {name for item in settings() for name in (item.name, *item.aliases)}
    assert names < set(schema["properties"])
    jsonschema.validate(yaml.safe_load(SWEEP), schema)
    for bad in ({"max_batch": 8}, {"max_batch_size": 0}, {"policy": 3}, {"keep": "all"}, {"seed": "x"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)


@pytest.mark.parametrize("name", ["first", "first/run.json"])
def test_a_run_is_the_config_file_of_the_same_run(name: str) -> None:
    ifbbench("run", "chat", *SIMULATED, "--policy", "max_utilization", "--output", "first", "--quiet")
    ifbbench("run", "--config", name, "--output", "second", "--quiet")
    assert digest("first") == digest("second")
    # What was derived from a setting is derived again from another one.
    ifbbench("run", "--config", name, "--max_num_tokens", "512", "--no_enable_chunked_context", "--output", "third",
             "--quiet", status=1)  # fmt: skip
    config = json.loads(Path("third/run.json").read_text())["config"]
    assert (config["max_input_len"], config["policy"]) == (512, "max_utilization")


def test_a_run_is_a_config_file_for_tune() -> None:
    ifbbench("run", "chat", *SIMULATED, "--policy", "max_utilization", "--output", "first", "--quiet")
    ifbbench("tune", "--config", "first", "--output", "tuned", "--quiet")
    found = json.loads(Path("tuned/tune.json").read_text())
    assert {"max_num_tokens", "tokens_per_block"} < set(found["importance"])
    assert "policy" not in found["importance"]  # given


def test_a_sweep_from_a_file_is_that_of_its_options() -> None:
    Path("sweep.yaml").write_text(SWEEP)
    ifbbench("sweep", "--config", "sweep.yaml", "--output", "a", "--quiet")
    over = ["--over", "max_num_tokens=512,1024", "--over", "policy=guaranteed_no_evict,max_utilization", "--zip"]
    ifbbench("sweep", "chat", *SIMULATED, *over, "--repeat", "2", "--keep", "summary", "--output", "b", "--quiet")
    assert Path("a/sweep.csv").read_bytes() == Path("b/sweep.csv").read_bytes()
    ifbbench("sweep", "--config", "sweep.yaml", "--no-zip", "--repeat", "1", "--output", "c", "--quiet")
    assert len(json.loads(Path("c/sweep.json").read_text())) == 4


def test_a_sweep_is_the_config_file_of_the_same_sweep() -> None:
    over = ["--over", "slo=ttft=1s,tpot=50ms;ttft=2s", "--over", "max_batch_size=4..8:x2"]
    ifbbench("sweep", "chat", *SIMULATED, *over, "--keep", "summary", "--output", "a", "--quiet")
    ifbbench("sweep", "--config", "a", "--output", "b", "--quiet")
    assert Path("a/sweep.csv").read_bytes() == Path("b/sweep.csv").read_bytes()
    assert Path("a/sweep.yaml").read_text() == Path("b/sweep.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("over: {polcy: [a]}", ["polcy", "Did you mean policy?"]),
        ("over: {max_batch_size: [8, 8]}", ["8 is there twice"]),
        ("over: {max_batch_size: 8..4}", ["ends before it begins"]),
        ("over: []", ["--over", "missing"]),
        ("over: [max_batch_size]", ["expected KEY=V1,V2"]),
        ("over: {seed: [1, 2]}\nrepeat: 0", ["sweep.yaml: repeat", "from 1 to"]),
        ("over: {seed: [1, 2]}\nkeep: all", ["sweep.yaml: keep", "run, summary"]),
        ("over: {seed: [1, 2], slo: [ttft=1s]}\nzip: true", ["equally many", "seed has 2"]),
        ("over: {seed: [1, 2]}\nmax_batch: 3", ["'max_batch' is not a setting", "max_batch_size"]),
        ("over: {slo: ['ttft=quick']}", ["ttft"]),
    ],
)
def test_a_bad_sweep_file_is_explained(text: str, words: list[str]) -> None:
    Path("sweep.yaml").write_text(text)
    error = ifbbench("sweep", "chat", "--config", "sweep.yaml", status=2).stderr
    assert all(word in error for word in words), error
    assert error.count("\n") == 1


def test_a_key_of_another_command_and_a_directory_of_neither_are_refused() -> None:
    Path("sweep.yaml").write_text(SWEEP)
    assert "over is a key of `ifbbench sweep`" in ifbbench("run", "--config", "sweep.yaml", status=2).stderr
    Path("empty").mkdir()
    assert "no run.json and no sweep.yaml" in ifbbench("run", "--config", "empty", status=2).stderr
    Path("run.json").write_text("{}")
    assert "the run.json of a run" in ifbbench("run", "--config", "run.json", status=2).stderr


def test_a_sweep_says_which_objectives_no_point_meets_and_which_all_do() -> None:
    over = ["--over", "max_batch_size=4,8", "--keep", "summary"]
    hopeless = ifbbench("sweep", "chat", *SIMULATED, *over, "--slo", "ttft.p99=1us", "--output", "a").stdout
    assert "No point meets ttft.p99: the nearest has" in hopeless
    easy = ifbbench("sweep", "chat", *SIMULATED, *over, "--slo", "ttft=100s", "--output", "b").stdout
    assert "Every point meets every objective" in easy
    assert "No point" not in easy
