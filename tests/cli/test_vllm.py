"""`--engine vllm`: its defaults, what it does not have, and command lines of `vllm serve`."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.settings.config import settings
from ifbbench.settings.servers import read_line, write_line
from ifbbench.settings.trtllm_serve import arguments_of, remarks_of_arguments
from ifbbench.settings.vllm_serve import OPTIONS


def shown(*options: str) -> dict[str, Any]:
    """The settings that a run with these options has, by name."""
    result = CliRunner().invoke(main, ["config", "show", "--engine", "vllm", *options, "--json"])
    assert result.exit_code == 0, result.output
    return {name: row["value"] for name, row in json.loads(result.stdout)["settings"].items()}


LLAMA = ("--model", "llama-3.1-8b")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--device", "h100-sxm", *LLAMA), (8192, 1024, "async", "vllm")),
        (("--device", "b200", *LLAMA), (16_384, 1024, "async", "vllm")),
        (("--device", "a100", *LLAMA), (2048, 256, "async", "vllm")),
        (("--device", "rtx-4090", *LLAMA, "--max-model-len", "4096"), (2048, 256, "async", "vllm")),
        (("--device", "cpu"), (2048, 128, None, None)),
        (
            ("--device", "h200", "--model", "deepseek-r1", "--tp_size", "8", "--attention_dp_size", "8"),
            (16_384 * 8 // 2, 1024 * 8, "async", "vllm"),
        ),
        (("--device", "h100-sxm", *LLAMA, "--max-num-batched-tokens", "512"), (512, 512, "async", "vllm")),
        (("--device", "h100-sxm", *LLAMA, "--no-async-scheduling"), (8192, 1024, None, "vllm")),
        (("--device", "h100-sxm", *LLAMA, "--engine_overhead", "sglang"), (8192, 1024, "async", "sglang")),
    ],
)
def test_defaults_are_those_of_vllm_on_that_device(options: tuple[str, ...], expected: tuple[Any, ...]) -> None:
    found = shown(*options)
    names = ("max_num_tokens", "max_batch_size", "overlap", "engine_overhead")
    assert tuple(found[name] for name in names) == expected
    assert (found["tokens_per_block"], found["enable_kv_cache_reuse"], found["gpu_memory_utilization"]) == (
        16,
        True,
        0.92,
    )


def test_a_share_of_all_memory_includes_weights_and_activations() -> None:
    """14.96 GiB of weights are in the share of vLLM, and beside that of TensorRT-LLM."""
    tokens = [
        shown("--device", "h100-sxm", *LLAMA, *more)["max_tokens_in_paged_kvcache"]
        for more in ((), ("--gpu-memory-utilization", "0.5"), ("--num-gpu-blocks-override", "101"))
    ]
    assert tokens[2] == 100 * 16
    bytes_per_token = 2 * 32 * 8 * 128 * 2
    assert (tokens[0] - tokens[1]) * bytes_per_token == pytest.approx(0.42 * 84_932_978_278, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            "--policy max_utilization",
            "--engine vllm does not have it: vLLM pre-empts the last running",
        ),
        ("--type v1", "static batches"),
        ("--overlap partitioned", "--async_scheduling"),
        ("--beam_width 2", "--beam_width"),
        ("--kv_cache_type contiguous", "paged"),
        ("--num_loras 2", "not built"),
        ("--max-num-seqs 100 --max-num-batched-tokens 64", "which vLLM refuses"),
        ("--no-enable-chunked-prefill", "--max_seq_len"),
        ("--no-enable-chunked-prefill --max-model-len 64 --max-num-scheduled-tokens 32", "scheduled_tokens is 32"),
        ("--acceptance_rate 0.5 --async-scheduling", "--async_scheduling"),
        ("--kv_cache_free_gpu_mem_fraction 0.5 --gpu-memory-utilization 0.5", "leave out one of them"),
    ],
)
def test_what_vllm_does_not_have_is_refused_with_what_it_has(options: str, words: str) -> None:
    command = ["run", "chat", "--engine", "vllm", "--device", "h100-sxm", *LLAMA, *options.split(), "--output", "run"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2, result.output
    assert words in result.stderr


def test_a_setting_of_vllm_needs_its_engine() -> None:
    result = CliRunner().invoke(main, ["run", "chat", "--watermark", "0.1"])
    assert result.exit_code == 2
    assert "--watermark: is a setting of vLLM's scheduler; add --engine vllm" in result.stderr


LINE = (
    "vllm serve meta-llama/Llama-3.1-8B --max-model-len 8k --max-num-seqs=64 --no-enable-prefix-caching "
    "--gpu-memory-utilization 0.85 -tp 2 --async-scheduling --dtype auto --host 0.0.0.0 --trust-remote-code "
    "--kv-cache-dtype fp8 --scheduling-policy priority --enable-chunked-prefill false --quantization fp8"
)
MEANT = {
    "engine": "vllm",
    "model": "meta-llama/Llama-3.1-8B",
    "max_seq_len": 8000,
    "max_batch_size": 64,
    "enable_kv_cache_reuse": False,
    "gpu_memory_utilization": 0.85,
    "tp_size": 2,
    "async_scheduling": True,
    "kv_cache_dtype": "fp8",
    "scheduling_policy": "priority",
    "enable_chunked_context": False,
    "dtype": "fp8",
}


def test_a_command_line_of_vllm_is_a_config_and_back() -> None:
    found = read_line(LINE)
    assert found.values == MEANT
    assert found.ignored == ["host", "trust-remote-code"]
    assert read_line(write_line(MEANT, "vllm")).values == MEANT


def test_each_option_that_is_written_is_read() -> None:
    values = {item.name: item.default for item in settings() if item.name in OPTIONS and item.default is not None}
    line = write_line(values | {"model": "m"}, "vllm")
    assert read_line(line).values == values | {"model": "m", "engine": "vllm"}
    assert shlex.split(line)[:3] == ["vllm", "serve", "m"]


# Lines as users start servers, and what they mean beside the engine.
STARTS = [
    (
        "CUDA_VISIBLE_DEVICES=0 nohup /bin/vllm serve m -tp 4 --enable-expert-parallel --stream-interval 20 > log &",
        {"tp_size": 4, "ep_size": 4, "stream_interval": 20},
    ),
    (
        "docker run --gpus all -e HF_TOKEN=x -p 8000:8000 vllm/vllm-openai:v0.32 --model m --max-num-seqs 64",
        {"max_batch_size": 64},
    ),
    ("bash -c 'vllm serve m -q modelopt_fp4 -O3'", {"dtype": "nvfp4"}),
    ("hf jobs run --flavor h200x2 vllm/vllm-openai:latest vllm serve m --max-num-se 4", {"max_batch_size": 4}),
    ("vllm serve m -dp 4", {"replicas": 4, "router": "least_requests"}),
    (
        "vllm serve deepseek-r1 -tp 2 -dp 4 --max-num-seqs 256 --num-gpu-blocks-override 100",
        {"tp_size": 8, "attention_dp_size": 4, "max_batch_size": 1024, "num_gpu_blocks_override": 400},
    ),
    (
        "vllm serve m -dp 8 --enable-expert-parallel --enable-dbo --enable-eplb --eplb-config.num-redundant-experts 32",
        {
            "tp_size": 8,
            "attention_dp_size": 8,
            "ep_size": 8,
            "enable_two_batch_overlap": True,
            "redundant_experts": 32,
        },
    ),
    (
        'vllm serve m --speculative-config \'{"method": "eagle3", "model": "n", "num_speculative_tokens": 3}\'',
        {"draft_mtp": 3},
    ),
    ("vllm serve m --spec-method deepseek_mtp --spec-tokens 2", {"draft_mtp": 2}),
    (
        'vllm serve m -sc \'{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}\'',
        {"draft_len": 5, "draft_ngram": 4},
    ),
]


@pytest.mark.parametrize(("line", "expected"), STARTS)
def test_lines_as_users_start_servers(line: str, expected: dict[str, Any]) -> None:
    model = "deepseek-r1" if "deepseek-r1" in line else "m"
    found = read_line(line, lambda name: name == "deepseek-r1")
    assert found.values == {"engine": "vllm", "model": model} | expected
    again = read_line(write_line(found.values, "vllm"), lambda name: name == "deepseek-r1")
    assert again.values == found.values


def test_options_in_a_file_are_read_and_those_of_the_line_win(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "model: n\nmax-num-seqs: 8\nmax_num_batched_tokens: 512\nenable-prefix-caching: false\nheadless: true\n"
        "served-model-name: [a, b]\nspeculative-config: {method: mtp, num_speculative_tokens: 2}\n"
    )
    found = read_line(f"vllm serve m --max-num-seqs 16 --config {file}")
    limits = {"max_batch_size": 16, "max_num_tokens": 512, "enable_kv_cache_reuse": False, "draft_mtp": 2}
    assert found.values == {"engine": "vllm", "model": "m"} | limits
    assert found.ignored == ["headless", "served-model-name"]
    assert read_line(f"vllm serve --config={file}").values["model"] == "n"
    file.write_text("max-num-seqs: many\n")
    with pytest.raises(InputError, match="max-num-seqs"):
        read_line(f"vllm serve m --config {file}")
    with pytest.raises(InputError, match=r"none\.yaml: the config file cannot be read"):
        read_line("vllm serve m --config none.yaml")


def test_options_that_are_not_simulated_are_named() -> None:
    line = (
        "vllm serve m --enforce-eager --compilation-config.cudagraph_mode FULL --api-key a b --lora-modules x=y z=w "
        '--max-loras 4 --speculative-config \'{"method": "medusa", "num_speculative_tokens": 2}\' --port 1'
    )
    found = read_line(line)
    assert found.values == {"engine": "vllm", "model": "m"}
    assert found.ignored == ["api-key", "port"]
    names = ["enforce-eager", "lora-modules", "max-loras", "compilation-config", "speculative-config (medusa)"]
    assert found.not_simulated == names
    result = CliRunner().invoke(main, ["config", "from", line])
    assert "# Not simulated: --enforce-eager, --lora-modules" in result.stdout
    assert "Not simulated: --enforce-eager" in result.stderr


@pytest.mark.parametrize("model", ["deepseek-r1", "llama-3.1-8b"])
def test_a_line_with_drafts_runs(tmp_path: Path, model: str) -> None:
    """The layer for multi-token prediction of a model that has one, an EAGLE head of another."""
    line = f"vllm serve {model} -tp 8 --max-num-seqs 8 --spec-method mtp --spec-tokens 2"
    result = CliRunner().invoke(main, ["config", "from", line])
    assert "add acceptance_rate" in result.stdout
    config = tmp_path / "server.yaml"
    config.write_text(f"{result.stdout}acceptance_rate: '0.8,0.6'\n")
    options = ["--config", str(config), "--device", "b200", "--max_num_samples", "4", "--output", str(tmp_path / "run")]
    result = CliRunner().invoke(main, ["run", "chat", *options])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "run/summary.json").read_text())["speculative_decoding"]["acceptance_rate"] > 0.5


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("vllm serve", "no model"),
        ("vllm bench serve", "starts no server"),
        ("docker run --name vllm image", "starts no server"),
        ("vllm serve m --foo 3", "--foo: is no option of vLLM"),
        ("vllm serve m --foo 3 --max-nun-seqs 3", "--foo, --max-nun-seqs: are no options of vLLM"),
        ("vllm serve m --max-nun-seqs 3", "Did you mean max-num-seqs"),
        ("vllm serve m --kv-cache-dtype nvfp4", "--kv_cache_dtype is 'nvfp4'; expected one of float32"),
        ("vllm serve m --dtype int3", "expected one of float32"),
        ("vllm serve m n", "'n' stands beside the model 'm'"),
        ("vllm serve m -dp none", "--data-parallel-size is 'none'; expected an integer of at least 1"),
        ("vllm serve m --max-num-seqs", "the value is missing"),
        ("vllm serve m --max-num-seqs many", "expected an integer of at least 1"),
        ("vllm serve m --quantization int8", "is int8, which is not simulated"),
        ("vllm serve m --speculative-config ngram", "--speculative-config: is not valid JSON"),
        ("vllm serve m --speculative-config '{\"num_speculative_tokens\": 0}'", "expected an integer of at least 1"),
        ("vllm serve m 'x", "quotes"),
    ],
)
def test_what_a_command_line_cannot_mean_is_named(line: str, words: str) -> None:
    with pytest.raises(InputError) as refused:
        read_line(line)
    assert words in str(refused.value)


def test_the_commands_print_configs_and_lines(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["config", "from", LINE.replace(" --quantization fp8", "")])
    assert result.exit_code == 0
    assert "Without effect here: --host, --trust-remote-code." in result.stderr
    (tmp_path / "server.yaml").write_text(result.stdout)
    options = ["--config", "server.yaml", "--device", "h100-sxm", "--enable_chunked_context", "--as", "vllm"]
    printed = CliRunner().invoke(main, ["config", "show", *options]).stdout
    assert read_line(printed).values == {name: value for name, value in MEANT.items() if name != "dtype"} | {
        "enable_chunked_context": True
    }


def test_the_line_of_a_run_has_no_defaults(tmp_path: Path) -> None:
    options = ["--engine", "vllm", "--device", "null", "--max-num-seqs", "8", "--output", str(tmp_path / "run")]
    assert CliRunner().invoke(main, ["run", "documentation", *options]).exit_code == 0
    line = CliRunner().invoke(main, ["config", "show", str(tmp_path / "run"), "--as", "vllm"]).stdout
    assert "--max-num-seqs 8" in line
    assert not [option for option in ("--watermark", "--seed", "enable-dbo", "--stream-interval") if option in line]
    assert read_line(line).values["max_batch_size"] == 8


@pytest.mark.parametrize(("limit", "each", "words"), [(4, 1, "8 together"), (12, 1, "8 together"), (16, 2, "")])
def test_each_rank_has_a_limit_of_at_least_one(limit: int, each: int, words: str) -> None:
    """A limit below the number of ranks was written as 0, which no server takes."""
    values = {"model": "m", "tp_size": 8, "attention_dp_size": 8, "max_batch_size": limit}
    words_of_line = write_line(values, "vllm").split()
    assert words_of_line[words_of_line.index("--max-num-seqs") + 1] == str(each)
    options = ["--model", "deepseek-r1", "--device", "b200", "--tp_size", "8", "--attention_dp_size", "8"]
    options += ["--engine", "vllm", "--max_batch_size", str(limit), "--as", "vllm"]
    remarks = CliRunner().invoke(main, ["config", "show", *options]).stderr
    assert words in remarks
    assert ("--max-num-seqs" in remarks) == bool(words)
    sglang = write_line(values, "sglang").split()
    assert sglang[sglang.index("--max-running-requests") + 1] == str(max(limit, 8))
    assert arguments_of(values)["max_batch_size"] == each
    assert bool(remarks_of_arguments(values)) == bool(words)
