"""`ifbbench config`, and config files that name the trace, sweep settings, or are those of a run or a sweep."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from ifbbench.cli.given_settings import PLACES, given_config
from ifbbench.cli.main import main
from ifbbench.cli.sweep import SweepKeys
from ifbbench.settings.config import SIDE_SETTINGS, TIER_SETTINGS, settings
from ifbbench.settings.engines import ENGINES
from ifbbench.settings.names import from_mapping
from ifbbench.settings.yaml_text import parse_yaml

pytestmark = pytest.mark.usefixtures("undrawn_sweeps", "one_process")

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
    jsonschema.validate(yaml.safe_load("max_num_tokens: none"), schema)
    jsonschema.validate(yaml.safe_load("max_num_tokens: null"), schema)
    for size in ("1000", "40GB", "40GiB", "1.5e9", "512M"):
        jsonschema.validate(yaml.safe_load(f"kv_host_cache_bytes: {size}"), schema)
    unknown_unit = {"kv_host_cache_bytes": "40XB"}
    for bad in ({"max_batch": 8}, {"max_batch_size": 0}, {"policy": 3}, {"keep": "all"}, {"seed": "x"}, unknown_unit):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)


# A value of each setting that differs from its default; those that runs need besides. Settings of a run against an
# endpoint, of other devices, and of where results go are not among them.
OTHER_VALUES: dict[str, Any] = {
    "max_num_samples": 5,
    "time_scale": 0.5,
    "request_rate": 90.0,
    "enable_exp_delays": True,
    "burstiness": 0.5,
    "arrival": "all_at_once",
    "rate_schedule": "rates.csv",
    "duration": 0.2,
    "replica": "2/3",
    "replicas": 3,
    "router": "random",
    "router_state_age": 0.5,
    "replica_config": "replicas.yaml",
    "replica_events": "events.yaml",
    "request_retries": 1,
    "autoscale": "queue=4,max=3",
    "replica_start_up": 0.5,
    "prefill_replicas": 2,
    "decode_replicas": 2,
    "prefill": "max_batch_size=3",
    "decode": "max_batch_size=5",
    "decode_router": "random",
    "disaggregate_from": 200,
    "transfer_bandwidth": 1e9,
    "transfer_latency": 0.5,
    "transfer_by": "layer",
    "reserve": "factor:1.5",
    "max_prompt_len": 200,
    "skip_bad_rows": True,
    "trace_format": "ifbbench",
    "characters_per_token": 3.0,
    "default_output_len": 3,
    "concurrency": 2,
    "wait_sleep": 3,
    "beam_width": 2,
    "streaming": True,
    "normalize_log_probs": True,
    "exclude_input_in_output_seq": True,
    "eos_id": 7,
    "pad_id": 5,
    "warm_up": 1,
    "seed": 4,
    "slo": "ttft=1s",
    "engine": "tests.engine.test_foreign_scheduler:LastComeFirstServed",
    "type": "v1",
    "policy": "max_utilization",
    "max_batch_size": 3,
    "max_queue_size": 3,
    "max_num_tokens": "none",
    "enable_batch_size_tuning": True,
    "enable_max_num_tokens_tuning": True,
    "dynamic_batch_moving_average_window": 3,
    "enable_chunked_context": True,
    "context_chunking_policy": "equal_progress",
    "context_chunk_unit": 64,
    "max_seq_len": 2000,
    "max_input_len": 300,
    "max_beam_width": 2,
    "enable_trt_overlap": True,
    "overlap": "async",
    "static_emulated_batch_size": 3,
    "static_emulated_timeout": 5,
    "tokens_per_block": 16,
    "max_tokens_in_paged_kvcache": 9000,
    "kv_cache_free_gpu_mem_fraction": 0.5,
    "enable_kv_cache_reuse": True,
    "enable_partial_reuse": False,
    "copy_on_partial_reuse": False,
    "max_attention_window": "64,128",
    "sink_token_len": 3,
    "window_mode": "linear",
    "kv_host_cache_bytes": 200_000,
    "kv_retention_priority": 90,
    "kv_retention_s": 2.5,
    "kv_disk_bytes": 2**30,
    "kv_disk_bandwidth": 3e9,
    "kv_disk_latency": 0.002,
    "kv_remote_bytes": 2**30,
    "kv_remote_bandwidth": 3e9,
    "kv_remote_latency": 0.002,
    "kv_tier_write_policy": "write_back",
    "kv_tier_prefetch": "wait_complete",
    "kv_tier_prefetch_threshold": 1024,
    "kv_cache_dtype": "fp8",
    "kv_cache_type": "contiguous",
    "num_loras": 3,
    "lora_rank": 4,
    "max_lora_rank": 16,
    "lora_device_mem_fraction": 0.1,
    "lora_num_device_mod_layers": 5000,
    "lora_host_cache_bytes": 90_000_000,
    "dtype": "fp8",
    "ep_size": 2,
    "attention_dp_size": 2,
    "attention_dp_enable_balance": True,
    "attention_dp_time_out_iters": 7,
    "attention_dp_batching_wait_iters": 3,
    "expert_load": "0.5",
    "redundant_experts": 8,
    "enable_two_batch_overlap": True,
    "draft_mtp": 1,
    "cpu_threads": 1,
    "tp_size": 2,
    "pp_size": 2,
    "check_ranks": 7,
    "rank_timeout": 60.0,
    "engine_overhead": "vllm",
    "stream_interval": 10,
    "draft_model": "tiny",
    "draft_ngram": 3,
    "draft_len": 3,
    "acceptance_rate": "0.9,0.5",
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.3,
    "repetition_penalty": 1.3,
    "presence_penalty": 1.5,
    "frequency_penalty": 0.3,
    "min_length": 3,
    "length_penalty": 2.0,
    "early_stopping": "never",
    "save_detailed": True,
    "result_format": "vllm",
    "scheduling_policy": "priority",
    "vllm_version": "0.22",
    "async_scheduling": False,
    "max_num_scheduled_tokens": 300,
    "max_num_active_seqs": 3,
    "long_prefill_token_threshold": 64,
    "long_prefill_token_threshold_adaptive": True,
    "scheduler_reserve_full_isl": False,
    "watermark": 0.1,
    "num_gpu_blocks_override": 900,
    "prefix_cache_retention_interval": 64,
    "skip_samples": 2,
    "schedule_policy": "lpm",
    "schedule_conservativeness": 0.3,
    "reserve_by_ratio": True,
    "max_prefill_tokens": 900,
    "prefill_max_requests": 2,
    "scheduler_recv_interval": 4,
    "num_reserved_decode_tokens": 64,
    "enable_mixed_chunk": True,
    "disable_overlap_schedule": True,
    "disable_radix_cache": True,
    "radix_eviction_policy": "lfu",
    "enable_hierarchical_cache": True,
    "hicache_ratio": 3.0,
    "hicache_size": 1,
    "hicache_write_policy": "write_back",
    "retraction_policy": "priority",
    "enable_priority_scheduling": True,
    "disable_priority_preemption": True,
    "priority_scheduling_preemption_threshold": 0.2,
    "gpu_memory_utilization": 0.8,
    "recording": "summary",
    "recording_format": "jsonl.gz",
    "iteration_stats_format": "trtllm",
    "iteration_stats_every": 3,
    "enable_steady_state": True,
}
# What disks and remote stores need.
TIERED = {"engine": "vllm", "device": "h100-sxm", "model": "llama-3.1-8b"}
NEEDS: dict[str, dict[str, Any]] = {
    **{item.name: {"engine": item.group} for item in settings() if item.group in ENGINES},
    **{
        name: {"engine": "sglang", "enable_priority_scheduling": True}
        for name in ("retraction_policy", "disable_priority_preemption", "priority_scheduling_preemption_threshold")
    },
    **{
        name: {"engine": "sglang", "enable_hierarchical_cache": True}
        for name in ("hicache_ratio", "hicache_size", "hicache_write_policy")
    },
    "enable_exp_delays": {"request_rate": 90.0},
    "burstiness": {"request_rate": 90.0},
    "router_state_age": {"router": "least_kv", "replicas": 2},
    "replica_events": {"replicas": 2},
    "request_retries": {"replicas": 2, "replica_events": "events.yaml"},
    "replica_start_up": {"autoscale": "queue=4,max=3"},
    **{name: {"engine": "vllm", "prefill_replicas": 1, "decode_replicas": 1} for name in SIDE_SETTINGS},
    "prefill_replicas": {"engine": "vllm", "decode_replicas": 1},
    "decode_replicas": {"engine": "vllm", "prefill_replicas": 1},
    **{name: {**TIERED, "kv_disk_bytes": 2**31} for name in TIER_SETTINGS if not name.startswith("kv_remote")},
    **{name: {**TIERED, "kv_remote_bytes": 2**31} for name in TIER_SETTINGS if name.startswith("kv_remote")},
    **{
        name: {**TIERED, "engine": "sglang", "enable_hierarchical_cache": True, "kv_disk_bytes": 2**31}
        for name in ("kv_tier_prefetch", "kv_tier_prefetch_threshold")
    },
    "kv_retention_priority": {"enable_kv_cache_reuse": True},
    "kv_retention_s": {"enable_kv_cache_reuse": True, "kv_retention_priority": 90},
    "stream_interval": {"engine_overhead": "vllm"},
    "sink_token_len": {"max_attention_window": "64"},
    "kv_cache_type": {"enable_chunked_context": False},
    "lora_rank": {"num_loras": 3},
    "lora_device_mem_fraction": {"num_loras": 3},
    "lora_num_device_mod_layers": {"num_loras": 3},
    "ep_size": {"model": "qwen3-30b-a3b", "tp_size": 2},
    "attention_dp_size": {"model": "qwen3-30b-a3b", "tp_size": 2, "ep_size": 2},
    "attention_dp_enable_balance": {
        "model": "qwen3-30b-a3b",
        "tp_size": 2,
        "ep_size": 2,
        "attention_dp_size": 2,
        "enable_chunked_context": False,
    },
    "expert_load": {"model": "qwen3-30b-a3b"},
    "redundant_experts": {"model": "qwen3-30b-a3b", "tp_size": 2, "ep_size": 2},
    "enable_two_batch_overlap": {"model": "qwen3-30b-a3b", "tp_size": 2, "ep_size": 2, "attention_dp_size": 2},
    "draft_mtp": {"model": "glm-4.5", "tp_size": 8, "dtype": "fp8", "acceptance_rate": "0.6"},
    "draft_model": {"acceptance_rate": "0.6", "model": "tiny"},
    "draft_ngram": {"acceptance_rate": "0.6"},
    "draft_len": {"draft_ngram": 3, "acceptance_rate": "0.6"},
}
NOT_CHANGED = {
    *PLACES,
    "columns",
    "tokenizer",
    "lora_dir",
    "return_log_probs",
    "return_context_logits",
    "return_generation_logits",
    "device",
    "model",
    "profile",
    "log_iteration_data",
    "quiet",
    "stop_at_end_token",
}


def test_every_setting_has_another_value_below() -> None:
    assert OTHER_VALUES.keys() | NOT_CHANGED == {item.name for item in settings() if item.group != "endpoint"}


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_a_run_with_this_setting_is_the_config_file_of_the_same_run(name: str) -> None:
    Path("rates.csv").write_text("start_s,rate\n0,50\n0.2,0\n0.4,200\n")
    Path("replicas.yaml").write_text("- {}\n- {max_batch_size: 2}\n")
    Path("events.yaml").write_text("- {at: 0.01, fail: 0}\n")
    given = {"model": "llama-3.1-8b", "max_num_samples": 8, name: OTHER_VALUES[name], **NEEDS.get(name, {})}
    options = [
        f"--{'' if value else 'no_'}{one}" if isinstance(value, bool) else f"--{one}={value}"
        for one, value in given.items()
    ]
    words = ["run", "chat", "--device", "h100-sxm", "--model", "tiny", *options, "--quiet", "--json"]
    made = CliRunner().invoke(main, [*words, "--output", "first"])  # tables would take as long as the run
    assert made.exit_code in (0, 1), made.output  # 1: requests that are too long
    ifbbench("run", "--config", "first", "--output", "second", "--quiet", "--json", status=made.exit_code)
    first, second = (json.loads(Path(one, "run.json").read_text()) for one in ("first", "second"))
    assert first["config"][name] != usual()[name]
    for part in ("derived", "schedule_digest", "trace", "num_kv_blocks"):
        assert first[part] == second[part]
    configs = [{one: value for one, value in run["config"].items() if one not in PLACES} for run in (first, second)]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_the_file_of_a_sweep_has_this_setting(name: str) -> None:
    config = given_config(None, {name: OTHER_VALUES[name], **NEEDS.get(name, {})}, runs_fleets=True)
    Path("sweep.yaml").write_text(SweepKeys("chat", ["max_batch_size=1,2"]).described(config))
    read = given_config(Path("sweep.yaml"), {}, runs_fleets=True)
    assert getattr(read, name) != usual()[name]
    assert read == config


def test_the_file_of_a_sweep_has_what_is_not_the_engine_s_default() -> None:
    config = given_config(None, {"engine_overhead": "vllm", "policy": "guaranteed_no_evict"})
    Path("sweep.yaml").write_text(SweepKeys("chat", ["max_batch_size=1,2"]).described(config))
    assert given_config(Path("sweep.yaml"), {}) == config


def usual() -> dict[str, Any]:
    return from_mapping({}, command_line=True).as_dict()


def test_no_limit_of_tokens_is_not_the_default_limit() -> None:
    """None is a value of max_num_tokens, which a config file keeps apart from a setting that was left out."""
    at_once = [*SIMULATED[:-2], "--time_scale", "0"]
    ifbbench("run", "chat", *at_once, "--max_num_tokens", "none", "--output", "first", "--quiet")
    ifbbench("run", "chat", *at_once, "--output", "other", "--quiet")
    assert digest("first") != digest("other")
    assert "none" in ifbbench("config", "show", "first", "--changed").stdout
    for text in ("max_num_tokens: none", "max_num_tokens: null"):
        Path("run.yaml").write_text(text)
        assert shown("run.yaml", *SIMULATED)["settings"]["max_num_tokens"]["value"] is None
    ifbbench("sweep", "--config", "first", "--over", "max_num_tokens=512,none", "--output", "sweep", "--quiet")
    assert digest("sweep/max_num_tokens=none") == digest("first")
    over = ["--max_num_tokens", "none", "--over", "max_batch_size=8"]
    ifbbench("sweep", "chat", *at_once, *over, "--output", "a", "--quiet")
    ifbbench("sweep", "--config", "a", "--output", "b", "--quiet")
    assert digest("a/max_batch_size=8") == digest("b/max_batch_size=8")
    assert Path("a/sweep.yaml").read_text() == Path("b/sweep.yaml").read_text()
    assert "--max_num_tokens none: " in ifbbench("tune", "--config", "first", "--output", "tuned", status=2).stderr
    assert not Path("tuned").exists()


@pytest.mark.parametrize("name", ["first", "first/run.json"])
def test_a_run_is_the_config_file_of_the_same_run(name: str) -> None:
    ifbbench("run", "chat", *SIMULATED, "--policy", "max_utilization", "--output", "first", "--quiet")
    ifbbench("run", "--config", name, "--output", "second", "--quiet")
    assert digest("first") == digest("second")
    # What was derived from a setting is derived again from another one.
    ifbbench(
        "run",
        "--config",
        name,
        "--max_num_tokens",
        "512",
        "--no_enable_chunked_context",
        "--output",
        "third",
        "--quiet",
        status=1,
    )
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
        ("over: {polcy: [a]}", ["polcy", "Did you mean policy"]),
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


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("twice.yaml", "max_batch_size: 4\nseed: 1\nmax_batch_size: 5\n"),
        ("twice.yaml", "over:\n  max_batch_size: 2,4\n  max_batch_size: 8\n"),
        ("twice.toml", "max_batch_size = 4\nmax_batch_size = 5\n"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    done = CliRunner().invoke(main, ["sweep" if "over" in content else "run", "--config", str(tmp_path / name)])
    assert done.exit_code == 2
    assert re.search("there twice|Cannot overwrite a value", done.stderr), done.stderr
    assert str(tmp_path / name) in done.stderr


def test_keys_that_are_merged_into_a_mapping_are_not_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text("a: &a {seed: 1, max_batch_size: 4}\nb: &b\n  <<: *a\n  seed: 2\nc:\n  <<: *b\n  seed: 3\n")
    assert parse_yaml(path.read_text())["c"] == {"seed": 3, "max_batch_size": 4}
    assert parse_yaml("") is None


def test_the_note_on_a_config_file_names_what_each_point_has_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    over = ["--over", "model=llama-3.1-8b,qwen3-0.6b"]
    few = ["--max_num_samples", "4", "--quiet", "--keep", "summary"]
    ifbbench("sweep", "chat", "--device", "sim:h100-sxm", *few, *over, "--output", "a")
    caplog.clear()
    ifbbench("sweep", "--config", "a", "--quiet", "--output", "b")
    assert "With a: --model of each point and --device sim:h100-sxm." in caplog.text


def test_a_directory_of_something_else_names_the_configs_in_it() -> None:
    Path("other").mkdir()
    Path("other/run.yaml").write_text("seed: 1\n")
    Path("other/notes.txt").write_text("")
    Path("other/repeat-1").mkdir()
    Path("other/repeat-1/run.json").write_text("{}")
    refused = ifbbench("sweep", "chat", "--over", "seed=1,2", "--config", "other", status=2).stderr
    assert "Config files and runs in it: repeat-1, run.yaml." in refused


@pytest.mark.parametrize("text", ['{"seed": 1, "seed": 2}', '{"config": {"seed": 1, "seed": 2}, "trace": {}}'])
def test_a_config_in_json_has_each_key_once(text: str) -> None:
    Path("run.json").write_text(text)
    assert "run.json: the key 'seed' is there twice" in ifbbench("run", "--config", "run.json", status=2).stderr
