"""`ifbbench capacity`: what it prints, and what it refuses."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.build.engine import build_engine
from ifbbench.cli.console import report_console
from ifbbench.cli.main import main
from ifbbench.settings.config import RunConfig
from ifbbench.studies.capacity import study
from ifbbench.studies.capacity_tables import print_study
from ifbbench.workload.trace import TraceRequest

KNOWN = [
    "--device",
    "cuda",
    "--max_tokens_in_paged_kvcache",
    "234208",
    "--input-len",
    "1096",
    "--output-len",
    "211",
    "--reserve",
    "fixed:7000",
    "--no_enable_chunked_context",
]


def invoke(*arguments: str):
    return CliRunner().invoke(main, ["capacity", *arguments], catch_exceptions=False)


def answer(*arguments: str) -> dict[str, Any]:
    done = invoke("--json", *arguments)
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def error_of(*arguments: str) -> str:
    done = invoke(*arguments)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    return str(done.stderr.splitlines()[-1])


@pytest.fixture
def trace(tmp_path) -> str:
    """Five requests, the last with a prompt that is too long."""
    path = tmp_path / "trace.jsonl"
    lengths = [(100, 20, 40), (300, 10, 10), (50, 5, 5), (50, 5, 5), (9000, 1, 1)]
    rows = [
        {"request_id": index, "arrival_s": 0.0, "prompt_len": prompt, "output_len": output, "max_new_tokens": reserved}
        for index, (prompt, output, reserved) in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_known_case():
    found = answer("tiny", *KNOWN)
    (window,) = found["kv_cache"]["windows"]
    assert (window["blocks"], window["tokens"], window["bytes_per_token"]) == (7319, 234_208, 4096)
    guaranteed, at_start, at_end, static = found["at_once"]
    assert guaranteed == {
        "policy": "guaranteed_no_evict",
        "moment": None,
        "mean_blocks_per_request": 253.0,
        "by_kv_blocks": 28,
        "by_batch_size": 2048,
        "by_num_tokens": 1341,
        "at_once": 28,
        "bound_by": "kv_blocks",
        "first_requests": None,
    }
    assert [(fit["policy"], fit["moment"], fit["at_once"]) for fit in (at_start, at_end, static)] == [
        ("max_utilization", "start", 209),
        ("max_utilization", "end", 178),
        ("static_batch", None, 7),
    ]
    assert found["contiguous"]["by_memory"] == 7319 * 32 // 16_384
    assert found["summary"][0] == (
        "28 such requests run at once under guaranteed_no_evict: the KV cache (7,319 blocks) binds first; "
        "max_batch_size would allow 2,048, max_num_tokens (8,192) 1,341."
    )


@pytest.mark.parametrize(
    ("options", "per_iteration"),
    [
        (["--engine", "sglang"], True),
        (["--engine", "sglang", "--chunked-prefill-size", "none"], False),
        (["--max_num_tokens", "none"], False),
    ],
)
def test_limits_that_are_none_are_null(options: list[str], per_iteration: bool) -> None:
    found = answer("tiny", *KNOWN, *options)
    assert [case["by_num_tokens"] for case in found["at_once"]] == [None] * len(found["at_once"])
    assert (found["requests"]["prompts_per_iteration"] is not None) == per_iteration


@pytest.mark.parametrize(
    ("engine", "each"),
    [
        ("sglang", "chunked_prefill_size=2048, max_prefill_tokens=16384, max_running_requests=256,"),
        ("vllm", " tokens,"),
    ],
)
def test_each_rank_of_a_server_says_what_it_holds(engine: str, each: str) -> None:
    options = ["--device", "b200", "--tp_size", "8", "--ep_size", "8", "--attention_dp_size", "8", "--engine", engine]
    found = answer("deepseek-r1", *options, "--input-len", "1000", "--output-len", "1000")
    text = next(one for one in found["summary"] if "command line" in one)
    (window,) = found["kv_cache"]["windows"]
    assert text.startswith("Each of the 8 ranks of ")
    assert each in text
    found_tokens = re.search(r"(?:max_total_num_tokens=|size: )([0-9,]+)[, ]", text)
    assert found_tokens is not None
    tokens = int(found_tokens[1].replace(",", ""))
    assert tokens == pytest.approx(window["tokens"] / 8, abs=window["tokens"] / window["blocks"] * 2)


@pytest.mark.parametrize("engine", ["trtllm", "vllm", "sglang"])
def test_the_longest_sequence_is_that_of_a_rank(engine: str) -> None:
    options = ["--device", "h200", "--tp_size", "8", "--ep_size", "8", "--attention_dp_size", "8", "--engine", engine]
    found = answer("deepseek-r1", *options, "--max_tokens_in_paged_kvcache", "32000", "--max_seq_len", "8192")
    assert found["kv_cache"]["longest_sequence_tokens"] == 32000 // 8


def test_tables():
    printed = invoke(*KNOWN).stdout
    rows = [" ".join(line.split()) for line in printed.splitlines()]
    assert "guaranteed_no_evict 253 28 28 KV blocks" in rows
    assert "static_batch, v1 253 28 7 token budget" in rows
    assert "contiguous cache – 14 14 memory" in rows
    assert "Requests of 1,096 prompt and 211 output tokens, 7,000 reserved" in printed


@pytest.mark.parametrize("width", [80, 120])
def test_tables_keep_their_lines_in_a_terminal(width, monkeypatch, capsys):
    requests = [TraceRequest(index, 0.0, 1096, 7000, 211 + index) for index in range(20_000)]
    found = study(RunConfig(max_tokens_in_paged_kvcache=234_208, device="cuda"), requests)
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich, a terminal
    monkeypatch.setenv("COLUMNS", str(width))
    print_study(found, report_console())
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert all(len(line) <= width for line in lines)
    for name in ("guaranteed_no_evict", "max_utilization, start", "max_utilization, end", "static_batch, v1"):
        (line,) = (line for line in lines if line.startswith(f"{name} "))
        assert line.rstrip().endswith(("KV blocks", "token budget"))


def test_a_trace(trace):
    found = answer("--memory-bytes", "23000000", "--trace", trace)
    assert found["requests"]["count"] == 4
    assert found["requests"]["refused"] == 1
    assert found["requests"]["mean_max_new_tokens"] == 15
    assert found["kv_cache"]["windows"][0]["blocks"] == 21
    guaranteed = found["at_once"][0]
    assert guaranteed["mean_blocks_per_request"] == (5 + 10 + 2 + 2) / 4
    assert (guaranteed["at_once"], guaranteed["first_requests"]) == (4, 4)
    assert found["summary"][0].endswith("All of the trace fit together.")
    printed = invoke("--memory-bytes", "23000000", "--trace", trace).stdout
    assert "4 requests, on average 125 prompt and 10 output tokens, 15 reserved; 1 more refused" in printed


def test_settings_of_the_replay_hold_for_the_trace(trace):
    found = answer("--memory-gib", "1", "--trace", trace, "--max_num_samples", "2", "--reserve", "actual")
    assert found["requests"]["count"] == 2
    assert found["requests"]["mean_max_new_tokens"] == 15
    assert answer("--memory-gib", "1", "--trace", trace, "--beam_width", "2")["requests"]["mean_beam_width"] == 2


@pytest.mark.parametrize(
    ("arguments", "first", "words"),
    [
        (["--policy", "max_utilization"], "178 such requests, all at their full length, run at once", "KV cache"),
        (["--policy", "static_batch"], "7 such requests run at once under static_batch", "max_num_tokens"),
        (["--type", "v1"], "28 such requests run at once in a static batch", "would allow 2,048."),
        (["--max_batch_size", "9"], "9 such requests run at once", "max_batch_size binds first"),
        (["--policy", "json:JSONDecoder"], "Error: --policy", ""),
    ],
)
def test_the_sentence_goes_by_policy_and_limits(arguments, first, words):
    done = invoke(*KNOWN, *arguments)
    line = next(line for line in done.output.splitlines() if line.startswith(first))
    assert words in line


def test_without_requests_the_pool_alone():
    done = invoke("--memory-bytes", "30000000")
    assert "One block   128 KiB for 32 tokens" in done.stdout
    assert "does not fit: the longest that does has 2,208 tokens." in done.stdout
    assert "Give --input-len and --output-len" in done.stdout
    found = answer("--memory-bytes", "30000000")
    assert found["requests"] is None
    assert found["at_once"] == []


def test_the_cache_is_that_of_the_settings():
    found = answer(
        "--memory-gib", "1", "--max_attention_window", "512,1024", "--sink_token_len", "4", "--kv_cache_dtype", "fp8"
    )["kv_cache"]
    long, short = found["windows"]
    assert (found["type"], found["dtype"], found["bytes_per_token"]) == ("paged", "fp8", 1024)
    assert (long["attention_window"], long["layers"], long["sink_tokens"]) == (1024, 2, 4)
    assert (short["attention_window"], short["layers"], short["sink_tokens"]) == (512, 2, 4)
    printed = invoke("--memory-gib", "1", "--max_attention_window", "512,1024", "--kv_cache_dtype", "fp8").stdout
    assert "float32 · KV cache fp8 ·" in printed
    assert "attention window 1024 + 512" in " ".join(printed.split())


def test_host_blocks_where_they_are_asked_for():
    arguments = ["--memory-gib", "1", "--kv_host_cache_bytes", "1000000"]
    assert answer(*arguments)["kv_cache"]["windows"][0]["host_blocks"] == 1_000_000 // (32 * 4096)
    assert "Host blocks   7" in invoke(*arguments).stdout
    assert "Host blocks" not in invoke("--memory-gib", "1").stdout


@pytest.mark.parametrize("batch_size", ["14", "15"])
def test_a_contiguous_cache_has_room_for_a_full_batch_or_not(batch_size):
    (sentence,) = answer(
        "--memory-gib",
        "1",
        "--kv_cache_type",
        "contiguous",
        "--max_batch_size",
        batch_size,
        "--input-len",
        "100",
        "--output-len",
        "100",
    )["summary"]
    assert f"for the {batch_size} requests of max_batch_size, 16,384 places each; memory has room for 14." in sentence


def test_options_of_a_run_are_taken(tmp_path):
    config = tmp_path / "settings.yaml"
    config.write_text("max_batch_size: 7\ntemperature: 0.5\n")
    found = answer("--memory-gib", "1", "--config", str(config), "--output", "nowhere", "--quiet", "--top_k", "3")
    assert found["limits"]["max_batch_size"] == 7
    assert "--temperature" not in invoke("--help").output


def test_null_and_cpu():
    assert answer("--device", "null", "--max_seq_len", "20000")["limits"]["max_seq_len"] == 20_000
    assert answer("--device", "cpu", "--memory-gib", "64")["limits"]["max_batch_size"] == 16


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--input-len", "3"], "--input-len needs --output-len."),
        (["--output-len", "3"], "--output-len needs --input-len."),
        (["--input-len", "0", "--output-len", "3"], "--input-len"),
        (["--input-len", "3", "--output-len", "3", "--trace", "x"], "leave out --input-len"),
        (["--memory-gib", "1", "--memory-bytes", "9"], "leave out one of them"),
        (["--memory-gib", "0"], "--memory-gib"),
        (["--memory-gib", "1", "--max_attention_window", "few"], "--max_attention_window: 'few' is not valid"),
        (["--memory-gib", "1", "--max_attention_window", "9", "--sink_token_len", "9"], "--sink_token_len: 9 first"),
        (["tiny", "--model", "other"], "MODEL tiny and --model other differ"),
        (["no/such/model"], "is neither a directory nor a built-in model"),
        (["--memory-bytes", "9"], "the weights of model tiny take 19.1 MiB"),
        (["--memory-gib", "1", "--trace", "no-such-trace"], "does not exist"),
        (
            ["--memory-gib", "1", "--input-len", "9000", "--output-len", "1", "--no_enable_chunked_context"],
            "the engine refuses this request",
        ),
        (["--memory-gib", "1", "--max_seq_len", "99999"], "--max_seq_len"),
        (["--memory-bytes", "21000000", "--input-len", "900", "--output-len", "1"], "needs 29 KV cache blocks"),
    ],
)
def test_errors_are_one_line_and_status_2(arguments, words):
    error = error_of(*arguments)
    assert error.startswith("Error: ")
    assert words in error


def test_given_memory_needs_no_torch():
    code = (
        "import sys; from ifbbench.cli.main import main; main(sys.argv[1:], standalone_mode=False); "
        "print('torch' in sys.modules)"
    )
    arguments = ["capacity", "--memory-gib", "1", "--input-len", "9", "--output-len", "9", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_simulated_device_has_the_cache_that_a_run_on_it_has(tmp_path):
    settings: dict[str, Any] = {
        "model": "llama-3.3-70b",
        "device": "sim:h100-sxm",
        "tp_size": 4,
        "max_seq_len": 8192,
    }
    found = answer("llama-3.3-70b", "--device", "sim:h100-sxm", "--tp_size", "4", "--max_seq_len", "8192")
    limits = build_engine(RunConfig(**settings)).limits
    assert found["kv_cache"]["windows"][0]["blocks_of_run"] == limits.num_blocks
    assert found["memory"]["weight_bytes"] == pytest.approx(70.55e9 * 2 / 4, rel=0.01)


def test_under_vllm_it_says_what_vllm_says():
    """A request of 8,192 tokens takes 512 blocks without a window and 513 with one, of vLLM's 4,097."""
    options = "--device sim:h100-sxm --engine vllm --max_seq_len 8192 --max_attention_window 128,131072"
    done = invoke("gpt-oss-20b", *options.split(), "--num_gpu_blocks_override", "4097")
    assert "GPU KV cache size: 32,744 tokens, Maximum concurrency for 8,192 tokens per request: 4.00x" in done.output
    assert "vllm serve gpt-oss-20b --max-model-len 8192" in done.output


def test_under_sglang_it_says_what_sglang_says():
    """Chunks limit prefill batches, not the requests that decode."""
    options = "--device sim:h100-sxm --engine sglang --chunked_prefill_size 256 --max-total-tokens 64000"
    done = invoke("llama-3-8b", *options.split(), "--input-len", "512", "--output-len", "129")
    line = "max_total_num_tokens=64000, chunked_prefill_size=256, max_prefill_tokens=16384, max_running_requests=2048"
    assert line in done.output
    assert "python -m sglang.launch_server --model-path llama-3-8b" in done.output
    assert "--chunked-prefill-size 256" in done.output
    assert "100 such requests, all at their full length, run at once under sglang: the KV cache" in done.output


def test_prefill_replicas_of_sglang_may_have_host_memory_which_decode_replicas_have_not():
    sides = ("--device", "h100-sxm", "--engine", "sglang", "--prefill_replicas", "2", "--decode_replicas", "1")
    asked = ("llama-3.1-8b", *sides, "--input-len", "1000", "--output-len", "100")
    found, usual = answer(*asked, "--enable_hierarchical_cache"), answer(*asked)
    assert found["summary"] == usual["summary"]
    pages = {name: side["kv_cache"]["windows"][0]["host_blocks"] for name, side in found["sides"].items()}
    assert pages == {"prefill": 2 * 411_526, "decode": 0}
