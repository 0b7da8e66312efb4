"""`ifbbench bench`: trtllm-bench's command lines, its options and its report."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from ifbbench.cli.bench import BenchCommand, latency, throughput
from ifbbench.cli.main import main
from ifbbench.models.named_models import built_in_shape
from ifbbench.report.compat.trtllm_text import report_text

# Of trtllm-bench in TensorRT-LLM 0.12 to 1.2: of the group, of both commands, and of throughput alone.
GROUP = ["model", "model_path", "workspace", "log_level", "revision"]
BOTH = [
    "engine_dir",
    "backend",
    "extra_llm_api_options",
    "config",
    "sampler_options",
    "kv_cache_free_gpu_mem_fraction",
    "max_seq_len",
    "dataset",
    "modality",
    "max_input_len",
    "num_requests",
    "warmup",
    "tp",
    "pp",
    "ep",
    "beam_width",
    "concurrency",
    "medusa_choices",
    "report_json",
    "iteration_log",
]
THROUGHPUT = [
    "custom_module_dirs",
    "max_batch_size",
    "max_num_tokens",
    "mamba_ssm_cache_dtype",
    "no_skip_tokenizer_init",
    "eos_id",
    "image_data_format",
    "data_device",
    "target_input_len",
    "target_output_len",
    "cluster_size",
    "streaming",
    "output_json",
    "request_json",
    "enable_chunked_context",
    "disable_chunked_context",
    "scheduler_policy",
    "request_rate",
]
# From docs/source/performance of these versions, with shell variables in the place of paths.
COMMANDS = {
    "0.12": "trtllm-bench --model $model_name throughput --dataset $dataset_file --engine_dir $engine_dir",
    "0.14": "trtllm-bench --model $model_name throughput --dataset $dataset_file --engine_dir $engine_dir "
    "--kv_cache_free_gpu_mem_fraction 0.95",
    "0.20": "trtllm-bench --model $model_name throughput --dataset $dataset_file --backend pytorch "
    "--extra_llm_api_options $llm_options",
    "0.21": "trtllm-bench --model $model_name --model_path ${model_path} throughput --concurrency 128 "
    "--dataset $dataset_file --tp 1 --pp 1 --ep 1 --backend pytorch",
    "1.0": "trtllm-bench --model $model_name --model_path ${model_path} throughput --backend pytorch "
    "--max_batch_size 16 --max_num_tokens 4096 --dataset $dataset_file --tp 1 --ep 1 "
    "--kv_cache_free_gpu_mem_fraction 0.9 --extra_llm_api_options $llm_options --concurrency 16 --num_requests 8 "
    "--streaming",
    "1.1, latency": "trtllm-bench --model $model_name latency --dataset $dataset_file --tp 1 --config $llm_options "
    "--report_json bench.json --backend pytorch --num_requests 5",
}
LLM_OPTIONS = """
print_iter_log: true
cuda_graph_config:
  enable_padding: true
  batch_sizes: [1, 2, 4]
kv_cache_config:
  dtype: fp8
  enable_block_reuse: true
  free_gpu_memory_fraction: 0.5
enable_chunked_prefill: false
max_batch_size: 7
"""
HEADINGS = [
    "ENGINE DETAILS",
    "MACHINE DETAILS",
    "WORLD + RUNTIME INFORMATION",
    "REQUEST DETAILS",
    "PERFORMANCE OVERVIEW",
    "DATASET DETAILS",
]
assert isinstance(throughput, BenchCommand)
SIMULATED = ["--device", "h100-sxm", "--max_tokens", "65536"]
TINY = ["--model", "tiny"]  # before other words, which may name another model


# Limits of each of eight ranks, and draft tokens.
RANKS = """\
enable_attention_dp: true
max_batch_size: 7
speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 2}
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llm.yaml").write_text(LLM_OPTIONS)
    Path("ranks.yaml").write_text(RANKS)
    Path("model").mkdir()
    shape = {
        "model_type": "llama",
        "vocab_size": 500,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 2048,
    }
    Path("model/config.json").write_text(json.dumps(shape))


def arguments_of(command: str) -> list[str]:
    values = {
        "model_name": "meta-llama/Llama-3.1-8B",
        "dataset_file": "default",
        "engine_dir": "/tmp/tp_1_pp_1",
        "llm_options": "llm.yaml",
        "model_path": "model",
    }
    return shlex.split(re.sub(r"\$\{?(\w+)\}?", lambda match: values[match[1]], command))[1:]


def bench(*words: str) -> dict:
    """The settings of the run that `ifbbench bench` made."""
    done = CliRunner().invoke(main, ["bench", *TINY, *words, *SIMULATED, "--output", "out", "--overwrite"])
    assert done.exit_code == 0, done.output
    return json.loads(Path("out/run.json").read_text())["config"]


def error_of(*words: str) -> str:
    done = CliRunner().invoke(main, ["bench", *TINY, *words, *SIMULATED, "--output", "out"])
    assert done.exit_code == 2, done.output
    assert not Path("out").exists()
    return done.stderr


@pytest.mark.parametrize("version", COMMANDS)
def test_a_command_line_of_upstream_runs(version: str) -> None:
    done = CliRunner().invoke(main, ["bench", *arguments_of(COMMANDS[version]), *SIMULATED, "--output", "out"])
    assert done.exit_code == 0, done.output
    assert re.findall(r"^= (.+)$", done.stdout, re.MULTILINE) == HEADINGS
    assert re.search(r"^Total Output Throughput \(tokens/sec\): +[0-9.]+$", done.stdout, re.MULTILINE)
    assert Path("out/summary.json").is_file()
    model = json.loads(Path("out/run.json").read_text())["config"]["model"]
    assert model == "model" if "model_path" in COMMANDS[version] else built_in_shape(model) == "llama-3.1-8b"


def test_every_option_of_upstream_exists() -> None:
    for command, names in ((throughput, [*GROUP, *BOTH, *THROUGHPUT]), (latency, [*GROUP, *BOTH])):
        given = [name for option in command.params for name in (*option.opts, *option.secondary_opts)]
        taken = {name.removeprefix("--") for name in given}
        assert [name for name in names if name not in taken] == []


@pytest.mark.parametrize("option", throughput.foreign, ids=lambda option: option.name)
def test_an_option_without_effect_says_so_in_one_line(option, caplog) -> None:
    words = ["throughput", "documentation", f"--{option.name}", *([] if option.metavar == "" else ["2"])]
    if option.is_refused:
        assert error_of(*words) == f"Error: --{option.name}: {option.reason} Leave it out.\n"
    else:
        bench(*words)
        assert caplog.messages == [f"--{option.name} has no effect: {option.reason}"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--tp 2 --pp 2 --num_requests 3", {"tp_size": 2, "pp_size": 2, "max_num_samples": 3}),
        ("--num_requests 0 --concurrency -1", {"max_num_samples": None, "concurrency": None, "time_scale": 0.0}),
        ("--concurrency 4", {"concurrency": 4, "time_scale": 1.0}),
        ("--request_rate 50", {"request_rate": 50.0, "time_scale": 1.0}),
        ("--disable_chunked_context", {"enable_chunked_context": False}),
        (
            "--enable_chunked_context --scheduler_policy max_utilization",
            {"enable_chunked_context": True, "policy": "max_utilization"},
        ),
        (
            "--extra_llm_api_options llm.yaml",
            {
                "kv_cache_dtype": "fp8",
                "enable_kv_cache_reuse": True,
                "kv_cache_free_gpu_mem_fraction": 0.5,
                "enable_chunked_context": False,
                "max_batch_size": 7,
            },
        ),
        ("--config llm.yaml --max_batch_size 9", {"max_batch_size": 9}),
        (
            "--model deepseek-r1 --tp 16 --ep 8 --config ranks.yaml --acceptance_rate 0.7",
            {"tp_size": 16, "ep_size": 8, "attention_dp_size": 16, "max_batch_size": 112, "draft_mtp": 2},
        ),
        ("--model_path model --model x/y", {"model": "model"}),
        ("-m mistralai/Mistral-7B-v0.1", {"model": "mistralai/Mistral-7B-v0.1"}),
    ],
)
def test_options_become_settings(words: str, expected: dict) -> None:
    config = bench("throughput", "--dataset", "default", *words.split())
    assert {name: config[name] for name in expected} == expected


def test_latency_offers_one_request_after_another() -> None:
    config = bench("latency", "--dataset", "default", "--num_requests", "4")
    expected = {"max_batch_size": 1, "concurrency": 1, "streaming": True, "enable_chunked_context": False}
    assert {name: config[name] for name in expected} == expected
    assert bench("latency", "--dataset", "default", "--concurrency", "0", "--num_requests", "4")["concurrency"] is None


def test_options_of_the_group_stand_before_the_command(caplog) -> None:
    config = bench("--model", "meta-llama/Llama-2-7b-hf", "-w", "/tmp", "throughput", "--dataset", "documentation")
    assert config["model"] == "meta-llama/Llama-2-7b-hf"
    assert caplog.messages == [
        "--workspace has no effect: no intermediate files are written; --output names the run directory.",
        "--model meta-llama/Llama-2-7b-hf: the built-in shape llama-2-7b, with random weights.",
    ]


def test_arguments_without_effect_are_named(caplog) -> None:
    bench("throughput", "documentation", "--extra_llm_api_options", "llm.yaml")
    assert caplog.messages == [
        "llm.yaml: print_iter_log, cuda_graph_config.enable_padding, cuda_graph_config.batch_sizes have no effect here."
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("speculative_config:\n  decoding_type: MTP\n", "add --acceptance_rate"),
        ("speculative_config:\n  decoding_type: Medusa\n", "speculative_config.decoding_type: medusa is not simulated"),
        ("enable_attention_dp: often\n", "enable_attention_dp is 'often'; expected true or false"),
        ("max_batch_size: 0\n", "--max_batch_size is '0'"),
        ("- 1\n", "llm.yaml: expected a table of arguments"),
    ],
)
def test_bad_arguments_are_refused(text: str, words: str) -> None:
    Path("llm.yaml").write_text(text)
    assert words in error_of("throughput", "documentation", "--extra_llm_api_options", "llm.yaml")


def test_sampler_options_are_settings() -> None:
    Path("sampler.yaml").write_text("temperature: 0.7\ntop_k: 40\n")
    config = bench("throughput", "documentation", "--sampler_options", "sampler.yaml")
    assert (config["temperature"], config["top_k"]) == (0.7, 40)


def test_the_printed_report_has_the_figures_of_its_file() -> None:
    sizes = ["--num_requests", "6", "--report_json", "r.json"]
    words = ["latency", "default", *sizes, "--output", "out", *TINY, *SIMULATED]
    printed = CliRunner().invoke(main, ["bench", *words]).stdout
    report = json.loads(Path("r.json").read_text())
    assert report_text(report) in printed
    figure = report["performance"]["system_output_throughput_tok_s"]
    assert f"Total Output Throughput (tokens/sec):             {figure:.4f}\n" in printed
    assert f"[TTFT] P99    : {report['streaming_metrics']['ttft_percentiles']['p99']:.4f}\n" in printed


def test_unknown_figures_are_not_available() -> None:
    """Of a run without completed requests, on a machine without a GPU."""
    words = ["throughput", "default", "--num_requests", "2", "--device", "null", "--output", "out"]
    text = CliRunner().invoke(main, ["bench", *words, "--max_seq_len", "2"]).stdout
    assert "No GPU info available" in text
    assert "Request Throughput (req/sec):                     N/A\n" in text


def test_a_quiet_run_prints_its_report() -> None:
    words = ["throughput", "documentation", *TINY, *SIMULATED, "--quiet", "--output", "out"]
    done = CliRunner().invoke(main, ["bench", *words])
    assert (done.exit_code, done.stderr) == (0, "")
    assert "Request Throughput (req/sec):" in done.stdout


@pytest.mark.parametrize(
    ("command", "words"), [("build", "no engine is built"), ("prepare-dataset", "use `ifbbench dataset synth`")]
)
def test_other_commands_of_upstream_are_explained(command: str, words: str) -> None:
    assert words in error_of("--model", "tiny", command, "--output", "x")
