"""gptManagerBenchmark's command lines run with only the binary's name changed."""

import json
import logging
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ifbbench.cli.gpt_manager import TraceCommand
from ifbbench.cli.main import main
from ifbbench.cli.run import run
from ifbbench.cli.sweep import sweep
from ifbbench.workload.load import bundled_path

# Every option of gptManagerBenchmark in TensorRT-LLM 0.5 to 1.0. The last line has those that were retired.
NAMES = [
    "help",
    "engine_dir",
    "decoder_engine_dir",
    "encoder_engine_dir",
    "api",
    "type",
    "dataset",
    "output_csv",
    "max_num_samples",
    "beam_width",
    "warm_up",
    "eos_id",
    "pad_id",
    "max_tokens_in_paged_kvcache",
    "max_attention_window",
    "sink_token_len",
    "random_seed",
    "kv_cache_free_gpu_mem_fraction",
    "cross_kv_cache_fraction",
    "request_rate",
    "concurrency",
    "max_batch_size",
    "max_num_tokens",
    "enable_batch_size_tuning",
    "enable_max_num_tokens_tuning",
    "enable_exp_delays",
    "streaming",
    "enable_kv_cache_reuse",
    "enable_chunked_context",
    "return_context_logits",
    "return_generation_logits",
    "scheduler_policy",
    "static_emulated_batch_size",
    "log_level",
    "log_iteration_data",
    "wait_sleep",
    "lora_dir",
    "lora_host_cache_bytes",
    "lora_num_device_mod_layers",
    "kv_host_cache_bytes",
    "kv_onboard_blocks",
    "max_prompt_len",
    "gpu_weights_percent",
    "medusa_choices",
    "eagle_choices",
    "eagle_posterior_threshold",
    "temperature",
    "eagle_use_dynamic_tree",
    "eagle_dynamic_tree_max_top_k",
    "multi_block_mode",
    "cuda_graph_mode",
    "cuda_graph_cache_size",
    "enable_trt_overlap",
    "enable_context_fmha_fp32_acc",
    "executor_lookahead_config",
    "request_lookahead_config",
    "responses_json",
    "model",
    "max_num_sequences",
    "first_batch_delay",
    "static_emulated_timeout",
    "kv_dont_onboard_blocks",
    "exclude_input_in_output_seq",
    "responses_json_file",
    "dump_profile",
]
# From benchmarks/cpp/README.md and docs/source/performance/perf-overview.md of these versions.
COMMANDS = {
    "0.5, V1": "./benchmarks/gptManagerBenchmark --model gpt "
    "--engine_dir ../../examples/gpt/trt_engine/gpt2/fp16/1-gpu/ --type V1 "
    "--dataset ../../benchmarks/cpp/preprocessed_dataset.json",
    "0.5, IFB": "mpirun -n 2 ./benchmarks/gptManagerBenchmark --model gpt "
    "--engine_dir ../../examples/gpt/trt_engine/gpt2-ib/fp16/2-gpu/ --type IFB "
    "--dataset ../../benchmarks/cpp/preprocessed_dataset.json",
    "0.12": "mpirun -n 2 ./benchmarks/gptManagerBenchmark "
    "--engine_dir ../../examples/gpt/trt_engine/gpt2-ib/fp16/2-gpu/ --request_rate 10 "
    "--dataset ../../benchmarks/cpp/preprocessed_dataset.json --max_num_samples 500",
    "0.12, static": "./benchmarks/gptManagerBenchmark --engine_dir ../../examples/gpt/trt_engine/gpt2/fp16/1-gpu/ "
    "--request_rate -1 --static_emulated_batch_size 32 --static_emulated_timeout 100 "
    "--dataset ../../benchmarks/cpp/tokens-fixed-lengths.json",
    "0.12, LoRA": "mpirun -n ${TP} --output-filename ${EG_DIR}/log-base-lora cpp/build/benchmarks/gptManagerBenchmark "
    '--engine_dir $LORA_ENGINE --type IFB --dataset "${EG_DIR}/data/token-norm-dist-lora-8.json" '
    "--lora_host_cache_bytes 8589934592 --lora_num_device_mod_layers 286720 --kv_cache_free_gpu_mem_fraction 0.70 "
    "--log_level info --eos_id ${EOS_ID} --lora_dir ${EG_DIR}/loras",
    "0.13": "mpirun -n $tp_size --allow-run-as-root --oversubscribe cpp/build/benchmarks/gptManagerBenchmark "
    "--engine_dir $engine_dir --type IFB --dataset $dataset_file --scheduler_policy max_utilization "
    "--kv_cache_free_gpu_mem_fraction 0.9 --output_csv $results_csv --request_rate -1.0 --enable_chunked_context "
    "--streaming --warm_up 0",
    "0.17": "/app/tensorrt_llm/benchmarks/cpp/gptManagerBenchmark --engine_dir $engine_dir --type IFB --api executor "
    "--dataset $dataset_file_json --eos_id -1 --log_iteration_data --scheduler_policy guaranteed_no_evict "
    "--kv_cache_free_gpu_mem_fraction 0.95 --output_csv result.csv --request_rate -1.0 --enable_chunked_context "
    "--warm_up 0",
}
ENCODER_DECODER = (
    "mpirun --allow-run-as-root -np 4 ./benchmarks/gptManagerBenchmark "
    "--encoder_engine_dir ../../examples/enc_dec/tmp/trt_engines/t5-small-4gpu/bfloat16/encoder "
    "--decoder_engine_dir ../../examples/enc_dec/tmp/trt_engines/t5-small-4gpu/bfloat16/decoder "
    "--dataset cnn_dailymail.json"
)
assert isinstance(run, TraceCommand)
VARIABLES = {
    "LORA_ENGINE": "Llama-2-13b-hf-engine",
    "EG_DIR": "eg",
    "EOS_ID": "2",
    "engine_dir": "/tmp/engine",
    "dataset_file": "data.json",
    "dataset_file_json": "data.json",
    "results_csv": "results.csv",
}
# A small cache, because making the blocks of a whole GPU takes most of the time of such a run.
SIMULATED_GPU = ["--device", "a100-80gb-sxm", "--max_tokens", "65536"]
SIMULATED = ["--model", "tiny", *SIMULATED_GPU]
ENGINE = {
    "version": "0.17.0",
    "pretrained_config": {
        "architecture": "LlamaForCausalLM",
        "dtype": "float16",
        "vocab_size": 1000,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_size": 32,
        "intermediate_size": 344,
        "hidden_act": "silu",
        "norm_epsilon": 1e-6,
        "max_position_embeddings": 4096,
        "rotary_base": 10000.0,
        "rotary_scaling": None,
        "mapping": {"world_size": 2, "tp_size": 2, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"},
    },
    "build_config": {
        "max_input_len": 500,
        "max_seq_len": 700,
        "max_batch_size": 12,
        "max_beam_width": 1,
        "max_num_tokens": 2048,
        "plugin_config": {"tokens_per_block": 64},
    },
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The build directory of a checkout that holds the data sets of the commands, made from the bundled trace."""
    source = bundled_path("default")
    assert source is not None
    rows = [json.loads(line) for line in source.read_text().splitlines()[:40]]
    samples = [
        {"input_ids": [1] * row["prompt_len"], "output_len": row["output_len"], "task_id": index % 3 - 1}
        for index, row in enumerate(rows)
    ]
    build = tmp_path / "cpp" / "build"
    for name in (
        "../../benchmarks/cpp/preprocessed_dataset.json",
        "../../benchmarks/cpp/tokens-fixed-lengths.json",
        "eg/data/token-norm-dist-lora-8.json",
        "data.json",
        "cnn_dailymail.json",
    ):
        (build / name).resolve().parent.mkdir(parents=True, exist_ok=True)
        (build / name).resolve().write_text(json.dumps({"samples": samples}))
    for task_id in range(2):
        loras = build / "eg" / "loras" / str(task_id)
        loras.mkdir(parents=True)
        np.save(loras / "model.lora_weights.npy", np.zeros((2, 8 * 512), np.float16))
        np.save(loras / "model.lora_config.npy", np.array([[1, 0, 8], [1, 3, 8]], np.int32))
    monkeypatch.chdir(build)
    return build


def arguments_of(command: str) -> list[str]:
    """The words behind the name of the binary."""
    filled = re.sub(r"\$\{?(\w+)\}?", lambda match: VARIABLES.get(match[1], "1"), command)
    return shlex.split(filled.partition("gptManagerBenchmark ")[2])


def config_of(directory: Path) -> dict:
    return json.loads((directory / "run.json").read_text())["config"]


@pytest.mark.parametrize("version", COMMANDS)
def test_a_command_line_of_upstream_runs(version: str, checkout: Path) -> None:
    done = CliRunner().invoke(main, ["run", *arguments_of(COMMANDS[version]), *SIMULATED])
    assert done.exit_code == 0, done.output
    assert re.search(r"^\[BENCHMARK\] num_samples 40$", done.stdout, re.MULTILINE)
    assert re.search(r"^\[BENCHMARK\] token_throughput\(token/sec\) [0-9.]+$", done.stdout, re.MULTILINE)
    for name in re.findall(r"--output_csv \$?(\S+)", COMMANDS[version]):
        assert Path(VARIABLES.get(name, name)).read_text().startswith("num_samples,")


def test_an_encoder_decoder_model_is_refused(checkout: Path) -> None:
    done = CliRunner().invoke(main, ["run", *arguments_of(ENCODER_DECODER), *SIMULATED])
    assert done.exit_code == 2
    assert done.stderr == "Error: --encoder_engine_dir: encoder-decoder models are not available. Leave it out.\n"
    assert not Path("results").exists()


@pytest.mark.parametrize("command", [run, sweep], ids=["run", "sweep"])
def test_every_option_of_upstream_exists(command) -> None:
    assert len(NAMES) == 65  # --help included
    taken = {name.removeprefix("--") for option in command.params for name in option.opts} | {"help"}
    assert [name for name in NAMES if name not in taken] == []


@pytest.mark.parametrize("option", run.foreign, ids=lambda option: option.name)
def test_an_option_without_effect_says_so_in_one_line(option, checkout: Path, caplog) -> None:
    words = [f"--{option.name}"] if option.is_flag else [f"--{option.name}", "[[0], [0, 1]]"]
    done = CliRunner().invoke(main, ["run", "documentation", *words, *SIMULATED, "--quiet", "--output", "out"])
    if option.is_refused:
        assert (done.exit_code, done.stderr) == (2, f"Error: --{option.name}: {option.reason} Leave it out.\n")
    else:
        assert done.exit_code == 0, done.output
        assert caplog.messages == [f"--{option.name} has no effect: {option.reason}"]


def test_harmless_values_of_refused_options_are_taken(checkout: Path, caplog) -> None:
    words = "--gpu_weights_percent 1.0 --eagle_use_dynamic_tree false --decoding_mode auto --quiet --output out"
    done = CliRunner().invoke(main, ["run", "documentation", *SIMULATED, *words.split()])
    assert (done.exit_code, done.stderr, caplog.messages) == (0, "", [])


def test_options_without_effect_have_a_help_of_their_own() -> None:
    listed = CliRunner().invoke(main, ["run", "--help-compat"]).stdout
    assert "gptManagerBenchmark options without effect:" in listed
    usual = CliRunner().invoke(main, ["run", "--help"]).stdout
    for option in run.foreign:
        assert f"--{option.name}" in listed
        assert f"--{option.name} " not in usual
    assert "--help_compat" in usual


def test_the_dataset_is_the_trace(checkout: Path) -> None:
    words = [*SIMULATED, "--quiet", "--output", "out"]
    assert CliRunner().invoke(main, ["run", "data.json", "--dataset", "data.json", *words]).exit_code == 0
    assert json.loads(Path("out/run.json").read_text())["trace"]["requests"] == 40
    done = CliRunner().invoke(main, ["run", "default", "--dataset", "data.json", *words])
    assert done.exit_code == 2
    assert "TRACE is default and --dataset is data.json; leave out one of them." in done.stderr


@pytest.mark.parametrize("rate", ["-1", "-1.0", "-5"])
def test_a_negative_rate_offers_all_requests_at_once(rate: str, checkout: Path) -> None:
    words = [*SIMULATED, "--quiet", "--output", "out", "--enable_exp_delays"]
    assert CliRunner().invoke(main, ["run", "default", "--request_rate", rate, *words]).exit_code == 0
    assert {json.loads(line)["arrival_s"] for line in Path("out/requests.jsonl").read_text().splitlines()} == {0.0}


def test_a_negative_rate_and_a_time_scale_exclude_each_other() -> None:
    done = CliRunner().invoke(main, ["run", "--request_rate", "-1", "--time_scale", "2"])
    assert done.exit_code == 2
    assert "leave out one of them" in done.stderr


@pytest.mark.parametrize(
    ("words", "is_on"),
    [
        ("--enable_kv_cache_reuse true", True),
        ("--enable_kv_cache_reuse false", False),
        ("--enable-kv-cache-reuse=False", False),
        ("--enable_kv_cache_reuse=1", True),
        ("--no_enable_kv_cache_reuse=true", False),
        ("--enable_block_reuse true", True),
    ],
)
def test_booleans_take_a_value(words: str, is_on: bool, checkout: Path) -> None:
    done = CliRunner().invoke(main, ["run", *words.split(), "documentation", *SIMULATED, "--quiet", "--output", "out"])
    assert done.exit_code == 0, done.output
    assert config_of(Path("out"))["enable_kv_cache_reuse"] is is_on


def test_a_boolean_takes_no_other_value() -> None:
    done = CliRunner().invoke(main, ["run", "--streaming=maybe"])
    assert (done.exit_code, done.stderr) == (2, "Error: --streaming is 'maybe'; expected true or false.\n")


def test_minus_one_means_not_given_as_in_early_versions(checkout: Path) -> None:
    words = "--max_num_sequences -1 --max_tokens_in_paged_kvcache -1 --kv_cache_free_gpu_mem_fraction -1.0 --quiet"
    done = CliRunner().invoke(main, ["run", "documentation", *SIMULATED[:4], *words.split(), "--output", "out"])
    assert done.exit_code == 0, done.output
    assert config_of(Path("out"))["kv_cache_free_gpu_mem_fraction"] == 0.9


class Kept(logging.Handler):
    """Keeps messages."""

    def __init__(self, messages: list[logging.LogRecord]) -> None:
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record)


def test_the_log_level_is_that_of_the_messages(checkout: Path) -> None:
    """It is reset when the command ends."""
    logger = logging.getLogger("ifbbench")
    seen: list[logging.LogRecord] = []
    for level in ("error", "verbose"):
        options = ["--log_level", level, "--cuda_graph_cache_size", "3", "--quiet", "--output", f"out-{level}"]
        words = ["--model", "tiny", *options, *SIMULATED_GPU]
        handler = Kept(seen)
        logger.addHandler(handler)
        assert CliRunner().invoke(main, ["run", "documentation", *words]).exit_code == 0
        logger.removeHandler(handler)
        assert len([one for one in seen if one.name == "ifbbench"]) == (level == "verbose")
    assert logger.level == logging.NOTSET
    done = CliRunner().invoke(main, ["run", "--log_level", "loud"])
    assert (done.exit_code, "--log_level is 'loud'; expected one of verbose" in done.stderr) == (2, True)


@pytest.fixture
def engine_dir(checkout: Path) -> Path:
    directory = checkout / "llama-engine"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(ENGINE))
    (directory / "rank0.engine").write_bytes(b"")
    return directory


def test_an_engine_gives_the_shape_and_the_defaults_of_limits(engine_dir: Path) -> None:
    words = ["--engine_dir", str(engine_dir), *SIMULATED_GPU, "--max_batch_size", "5", "--quiet", "--output", "out"]
    done = CliRunner().invoke(main, ["run", "documentation", *words])
    assert done.exit_code == 0, done.output
    assert json.loads(Path("out/run.json").read_text())["model"]["layers"] == 3
    config = config_of(Path("out"))
    expected = {
        "max_batch_size": 5,
        "max_num_tokens": 2048,
        "max_seq_len": 700,
        "max_input_len": 500,
        "tokens_per_block": 64,
        "tp_size": 2,
        "dtype": "fp16",
        "kv_cache_dtype": "fp8",
        "model": str(engine_dir),
    }
    assert {name: config[name] for name in expected} == expected


def test_an_engine_runs_on_a_cpu_with_random_weights(engine_dir: Path) -> None:
    words = ["--decoder_engine_dir", str(engine_dir), "--device", "cpu", "--max_prompt_len", "9", "--quiet"]
    done = CliRunner().invoke(main, ["run", "documentation", *words, "--output", "out"])
    assert done.exit_code == 0, done.output
    assert config_of(Path("out"))["tp_size"] == 1


@pytest.mark.parametrize(
    ("words", "model"),
    [
        ("--engine_dir /engines/llama-3.1-8b-instruct/fp8/1-gpu", "llama-3.1-8b"),
        ("--engine_dir /engines/falcon/1-gpu", "tiny"),
        ("--engine_dir /engines/x --model llama-2-7b", "llama-2-7b"),
        ("--engine_dir /engines/x --model meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("--engine_dir /engines/x --model gpt", "tiny"),
    ],
)
def test_an_engine_that_is_not_there_is_replaced_and_said(words: str, model: str, checkout: Path, caplog) -> None:
    words = f"run documentation {words} --quiet --output out"
    done = CliRunner().invoke(main, [*words.split(), *SIMULATED_GPU])
    assert done.exit_code == 0, done.output
    assert config_of(Path("out"))["model"] == model
    assert f"there is no such directory; model {model} runs instead" in caplog.text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"builder_config": {"num_layers": 2}}, "builder_config is that of TensorRT-LLM 0.8 or earlier"),
        ({"pretrained_config": {"architecture": "EncoderModel"}}, "architecture is 'EncoderModel'; expected one of"),
    ],
)
def test_an_engine_of_another_kind_is_explained(config: dict, words: str, engine_dir: Path) -> None:
    (engine_dir / "config.json").write_text(json.dumps(config))
    done = CliRunner().invoke(main, ["run", "--engine_dir", str(engine_dir), *SIMULATED_GPU])
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.parametrize(
    ("spelling", "stored"),
    [
        ("V1", "v1"),
        ("static", "v1"),
        ("IFB", "inflight_fused"),
        ("inflight", "inflight_fused"),
        ("UIFB", "inflight_unfused"),
    ],
)
def test_batching_types_have_upstreams_names(spelling: str, stored: str, checkout: Path) -> None:
    words = ["--type", spelling, *SIMULATED, "--quiet", "--output", "out"]
    assert CliRunner().invoke(main, ["run", "documentation", *words]).exit_code == 0
    assert config_of(Path("out"))["type"] == stored
