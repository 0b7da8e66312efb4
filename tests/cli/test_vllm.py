"""`--engine vllm`: its defaults, what it does not have, and command lines of `vllm serve`."""

import json
import shlex
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.settings.config import settings
from ifbbench.settings.servers import read_line, write_line
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


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("vllm serve", "no model"),
        ("vllm bench serve", "starts no server"),
        ("vllm serve m --foo 3", "--foo: this option of vLLM has no counterpart here"),
        ("vllm serve m --max-num-seq 3", "Did you mean max-num-seqs"),
        ("vllm serve m --max-num-seqs", "the value is missing"),
        ("vllm serve m --max-num-seqs many", "expected an integer of at least 1"),
        ("vllm serve m --quantization awq", "expected fp8"),
        ('vllm serve m --speculative-config \'{"method": "eagle"}\'', "ngram"),
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
