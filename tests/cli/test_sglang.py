"""`--engine sglang`: its defaults, what it does not have, and its words."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.build.sglang import sglang_rules
from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.settings.command_line import option_words
from ifbbench.settings.config import RunConfig, settings
from ifbbench.settings.servers import read_line, write_line
from ifbbench.settings.sglang_serve import OPTIONS

LLAMA = ("--model", "llama-3.1-8b")


def shown(*options: str) -> dict[str, Any]:
    """The settings that a run with these options has, by name."""
    result = CliRunner().invoke(main, ["config", "show", "--engine", "sglang", *options, "--json"])
    assert result.exit_code == 0, result.output
    return {name: row["value"] for name, row in json.loads(result.stdout)["settings"].items()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # The share leaves 512 MiB of 80,999, 1.5 for each token of a chunk, 128 for a GPU, 2 for a request of a graph.
        (("--device", "h100-sxm", *LLAMA), (8192, "async", "sglang", 0.834)),
        (("--device", "h100-sxm", *LLAMA, "--chunked-prefill-size", "512"), (512, "async", "sglang", 0.874)),
        (("--device", "h100-sxm", *LLAMA, "--chunked-prefill-size", "none"), (None, "async", "sglang", 0.682)),
        (("--device", "h100-sxm", *LLAMA, "--disable-overlap-schedule"), (8192, None, "sglang", 0.834)),
        (("--device", "h100-sxm", *LLAMA, "--mem-fraction-static", "0.6"), (8192, "async", "sglang", 0.6)),
        (("--device", "b200", *LLAMA), (16_384, "async", "sglang", 0.856)),
        (("--device", "rtx-4090", *LLAMA), (4096, "async", "sglang", 0.716)),
        (("--device", "cpu"), (4096, None, None, None)),
    ],
)
def test_defaults_are_those_of_sglang_on_that_device(options: tuple[str, ...], expected: tuple[Any, ...]) -> None:
    found = shown(*options)
    names = ("max_num_tokens", "overlap", "engine_overhead", "gpu_memory_utilization")
    assert tuple(found[name] for name in names) == expected
    assert (found["tokens_per_block"], found["enable_kv_cache_reuse"]) == (1, True)


def test_sglangs_own_names_are_taken() -> None:
    options = (
        "--max-running-requests 7 --page-size 16 --max-total-tokens 4096 --disable-radix-cache --enable-mixed-chunk"
    )
    found = shown("--device", "h100-sxm", *LLAMA, *options.split())
    assert (found["max_batch_size"], found["tokens_per_block"]) == (7, 16)
    assert (found["max_tokens_in_paged_kvcache"], found["enable_kv_cache_reuse"]) == (4096, False)
    assert found["enable_mixed_chunk"] is True


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--policy max_utilization", "--engine sglang does not have it: SGLang retracts requests"),
        ("--overlap partitioned", "no micro batches"),
        ("--chunked_prefill_size 100 --page_size 16", "no multiple of the 16 tokens of a page"),
        ("--num_loras 2", "not built"),
        ("--draft_ngram 3", "draft tokens by look-up are not built"),
        ("--watermark 0.1", "is a setting of vLLM's scheduler"),
        ("--schedule_policy lpm --enable_priority_scheduling", "fcfs or lof only"),
        ("--schedule_policy shortest-prefill-first --disable_radix_cache", "needs the radix cache"),
        ("--retraction_policy priority", "needs --enable_priority_scheduling"),
        ("--kv_host_cache_bytes 1GiB", "SGLang's host memory is --enable_hierarchical_cache"),
        ("--hicache_ratio 3", "needs --enable_hierarchical_cache"),
        ("--enable_hierarchical_cache --disable_radix_cache", "needs the radix cache"),
    ],
)
def test_what_sglang_does_not_have_is_refused_with_what_it_has(options: str, words: str, tmp_path: Path) -> None:
    command = ["run", "chat", "--engine", "sglang", "--device", "h100-sxm", *LLAMA, *options.split()]
    result = CliRunner().invoke(main, [*command, "--output", str(tmp_path / "run")])
    assert result.exit_code == 2, result.output
    assert words in result.stderr


def test_a_run_speaks_sglang(tmp_path: Path) -> None:
    """Eight requests in a cache that holds some of them."""
    options = ["--time_scale", "0", "--max_num_samples", "30", "--max-total-tokens", "20000"]
    options += ["--device", "sim:h100-sxm", *LLAMA, "--schedule-conservativeness", "0.02", "--no_ignore_eos"]
    command = ["run", "chat", "--engine", "sglang", *options, "--output", str(tmp_path / "run")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert "Retractions" in result.output
    assert "chunked_prefill_size 8192" in result.output
    assert "KV tokens" in result.output


def test_what_host_memory_keeps_is_reused(tmp_path: Path) -> None:
    """Conversations go on after the device has lost their beginnings."""
    options = ["--max_num_samples", "40", "--max-total-tokens", "6000", "--device", "sim:h100-sxm", *LLAMA]
    found = {}
    for name, more in {"without": [], "with": ["--enable-hierarchical-cache", "--hicache-ratio", "8"]}.items():
        directory = tmp_path / name
        words = ["run", "multi-turn", "--engine", "sglang", *options, *more, "--output", str(directory)]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
        found[name] = json.loads((directory / "summary.json").read_text())
        rows = [json.loads(line) for line in (directory / "requests.jsonl").read_text().splitlines()]
        loaded = sum(row.get("host_reused_tokens", 0) for row in rows)
        assert loaded == found[name].get("host_cache", {}).get("loaded_tokens", 0)
    assert found["with"]["host_cache"]["pages"] == 48_000
    assert found["with"]["host_cache"]["loaded_tokens"] > 0
    assert found["with"]["prefix_hit_rate"] > found["without"]["prefix_hit_rate"]


def test_host_memory_changes_no_token(tmp_path: Path) -> None:
    """Requests begin with one of three blocks, which a cache of ten loses while they wait."""
    outputs = (4, 8, 12, 33, 33, 4, 6, 6, 6, 6, 6, 6)
    rows: list[dict[str, Any]] = [{"chat_id": row, "timestamp": 0, "output_length": outputs[row]} for row in range(12)]
    for row, one in enumerate(rows):
        blocks = [row % 3, 90 + row] if row != 5 else [0, *range(60, 65), 95]
        one |= {"input_length": 16 * len(blocks) - 15, "hash_ids": blocks}
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = "--device cpu --model tiny --time_scale 0 --max_seq_len 128 --max_tokens_in_paged_kvcache 160"
    tokens, loaded = [], 0
    for name, more in {
        "trtllm": "--tokens_per_block 16",
        "sglang": "--page-size 4 --enable-hierarchical-cache --no_ignore_eos --schedule-conservativeness 0.2",
    }.items():
        files = ["--output", str(tmp_path / name), "--responses_json", str(tmp_path / f"{name}.json")]
        words = ["run", str(trace), "--engine", name, *options.split(), *more.split(), *files, "--quiet"]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
        responses = json.loads((tmp_path / f"{name}.json").read_text())
        tokens.append({one["response_id"]: one["response_tokens"] for one in responses})
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        loaded += summary.get("host_cache", {}).get("loaded_tokens", 0)
    assert tokens[0] == tokens[1]
    assert loaded > 0


@pytest.mark.usefixtures("one_process")
def test_why_tries_the_settings_of_sglang(tmp_path: Path) -> None:
    """Each in SGLang's own name, and none of another engine."""
    options = ["--device", "sim:h100-sxm", *LLAMA, "--max_num_samples", "12", "--max-total-tokens", "20000"]
    run = str(tmp_path / "run")
    assert CliRunner().invoke(main, ["run", "chat", "--engine", "sglang", *options, "--output", run]).exit_code == 0
    result = CliRunner().invoke(main, ["why", run, "--json", "--budget", "600s"])
    assert result.exit_code == 0, result.output
    tried = json.loads(result.stdout)["what_if"]["changes"]
    names = {name for change in tried for name in change["settings"]}
    assert {"schedule_conservativeness", "enable_mixed_chunk", "disable_overlap_schedule"} <= names
    assert not names & {"policy", "overlap", "watermark", "context_chunking_policy"}
    assert any("--chunked-prefill-size" in change["command"] for change in tried)


@pytest.mark.usefixtures("one_process")
def test_tune_searches_the_settings_of_sglang(tmp_path: Path) -> None:
    """Prompts share prefixes, so that their order is searched; the cache is short, so that admission is."""
    load = [
        "--max_num_samples",
        "16",
        "--request_rate",
        "20",
        "--max-total-tokens",
        "20000",
        "--goal",
        "output_throughput",
    ]
    output = tmp_path / "tune"
    words = ["tune", "multi-turn", "--engine", "sglang", "--device", "h100-sxm", *LLAMA, *load, "--quiet", "--json"]
    result = CliRunner().invoke(main, [*words, "--output", str(output)])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert [one["name"] for one in answer["baselines"]] == ["SGLang's defaults"]
    assert {"schedule_policy", "schedule_conservativeness", "enable_mixed_chunk"} <= answer["importance"].keys()
    found = answer["recommendation"]["settings"]
    assert not {"policy", "context_chunking_policy", "long_prefill_token_threshold"} & found.keys()
    line = read_line((output / "sglang.txt").read_text()).values
    assert (line["model"], line["max_batch_size"]) == ("llama-3.1-8b", found["max_batch_size"])
    for name in ("schedule_policy", "schedule_conservativeness", "max_prefill_tokens"):
        effect = (answer["importance"].get(name) or {}).get("effect")
        assert name not in line or found[name] != answer["baselines"][0]["settings"][name] or effect
    assert not (output / "vllm.txt").exists()


LINE = (
    "python3 -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B --tp 2 --chunked-prefill-size 4096 "
    "--max-running-requests=64 --mem-fraction-static 0.85 --context-length 8192 --enable-mixed-chunk --dtype bfloat16 "
    "--kv-cache-dtype fp8_e4m3 --schedule-policy lpm --host 0.0.0.0 --trust-remote-code --dp-size 1"
)
MEANT = {
    "engine": "sglang",
    "model": "meta-llama/Llama-3.1-8B",
    "tp_size": 2,
    "max_num_tokens": 4096,
    "max_batch_size": 64,
    "gpu_memory_utilization": 0.85,
    "max_seq_len": 8192,
    "enable_mixed_chunk": True,
    "dtype": "bf16",
    "kv_cache_dtype": "fp8",
    "schedule_policy": "lpm",
}


def test_a_command_line_of_sglang_is_a_config_and_back() -> None:
    found = read_line(LINE)
    assert found.values == MEANT
    assert found.ignored == ["host", "trust-remote-code"]
    written = write_line(MEANT, "sglang")
    assert read_line(written).values == MEANT
    short = written.replace("python -m sglang.launch_server --model-path", "sglang serve")
    assert short.startswith("sglang serve meta-llama/Llama-3.1-8B ")
    assert read_line(short).values == MEANT


HIERARCHICAL = ("enable_hierarchical_cache", "hicache_ratio", "hicache_size", "hicache_write_policy")


@pytest.mark.parametrize("without", [HIERARCHICAL, ("disable_radix_cache",)], ids=["no tree", "a tree"])
def test_each_option_that_is_written_is_read_and_is_an_option_here(without: tuple[str, ...]) -> None:
    """Host memory needs the tree, and two batches need ranks, so that not all options go together."""
    names = OPTIONS.keys() - {*without, "enable_two_batch_overlap"}
    values = {item.name: item.default for item in settings() if item.name in names and item.default is not None}
    values |= {name: True for name, value in values.items() if value is False} | {"schedule_policy": "lof"}
    line = write_line(values | {"model": "m"}, "sglang")
    assert read_line(line).values == values | {"model": "m", "engine": "sglang"}
    assert shlex.split(line)[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "m"]
    found = shown("--device", "h100-sxm", *LLAMA, *option_words(values, "sglang"))
    resolved = {"enable_kv_cache_reuse": without != HIERARCHICAL, "disable_overlap_schedule": True}
    assert {name: found[name] for name in resolved} == resolved
    assert {name: found[name] for name in values} == values


def test_whole_prompts_are_a_chunk_of_minus_one(tmp_path: Path) -> None:
    assert read_line("sglang serve m --chunked-prefill-size -1").values["max_num_tokens"] is None
    config = CliRunner().invoke(main, ["config", "from", "sglang serve llama-3.1-8b --chunked-prefill-size -1"]).stdout
    (tmp_path / "server.yaml").write_text(config)
    words = ["config", "show", "--config", str(tmp_path / "server.yaml"), "--device", "h100-sxm"]
    result = CliRunner().invoke(main, [*words, "--json"])
    assert json.loads(result.stdout)["settings"]["max_num_tokens"]["value"] is None
    assert "--chunked-prefill-size -1" in CliRunner().invoke(main, [*words, "--as", "sglang"]).stdout


STARTS = [
    ("docker run --gpus all lmsysorg/sglang:latest python3 -m sglang.launch_server --model m --tp 2", {"tp_size": 2}),
    ("sglang serve m --dp 4", {"replicas": 4, "router": "round_robin"}),
    (
        "sglang serve m --tp 16 --dp 8 --enable-dp-attention --moe-a2a-backend deepep --nnodes 2 --load-format dummy",
        {"tp_size": 16, "attention_dp_size": 8, "ep_size": 16},
    ),
    ("sglang serve m --tp 8 --attn-dp-size 4", {"tp_size": 8, "attention_dp_size": 4}),
    (
        "sglang serve m --tp 8 --attn-dp-size 4 --max-running-requests 64 --max-total-tokens 1000",
        {"tp_size": 8, "attention_dp_size": 4, "max_batch_size": 64, "max_tokens_in_paged_kvcache": 4000},
    ),
    ("sglang serve m --tp 8 --ep 4 --quantization modelopt_fp4", {"tp_size": 8, "dtype": "nvfp4", "ep_size": 4}),
    ("sglang serve m --speculative-algorithm EAGLE3 --speculative-num-steps 3", {"draft_mtp": 3}),
    ("sglang serve m --speculative-algo NEXTN --speculative-num-draft-tokens 3", {"draft_mtp": 2}),
    ("sglang serve m --speculative-algorithm NGRAM --speculative-num-draft-tokens 3", {}),
]


@pytest.mark.parametrize(("line", "expected"), STARTS)
def test_lines_as_users_start_servers(line: str, expected: dict[str, Any]) -> None:
    found = read_line(line)
    assert found.values == {"engine": "sglang", "model": "m"} | expected
    assert found.not_simulated == (["speculative-algorithm (ngram)"] if "NGRAM" in line else [])
    assert read_line(write_line(found.values, "sglang")).values == found.values


def test_what_sglang_chooses_itself_or_drafts_as_a_tree_is_said() -> None:
    found = read_line("sglang serve m --speculative-algorithm EAGLE --speculative-eagle-topk 4 --cuda-graph-bs 1 2 4")
    assert found.values["draft_mtp"] == 1
    assert found.not_simulated == ["cuda-graph-bs"]
    acceptance, chosen, tree = found.notes
    assert "add acceptance_rate" in acceptance
    assert "SGLang chooses it by the model" in chosen
    assert "as a chain of 1" in tree


def test_ranks_that_share_the_experts_admit_more() -> None:
    """SGLang multiplies its conservativeness with 0.3 there (`parallel_hook.py`)."""
    rules = [
        sglang_rules(RunConfig(engine="sglang", device="sim:h200-sxm", tp_size=8, attention_dp_size=ranks))
        for ranks in (1, 8)
    ]
    assert rules[1].conservativeness == pytest.approx(0.3 * rules[0].conservativeness)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sglang serve", "no model; expected `python -m sglang.launch_server --model-path MODEL"),
        ("sglang bench", "starts no server"),
        ("sglang serve m --no-enable-mixed-chunk", "--no-enable-mixed-chunk: is no option of SGLang"),
        ("sglang serve m --max-runing-requests 3", "Did you mean max-running-requests"),
        ("sglang serve m --dp 0", "--dp-size is '0'; expected an integer of at least 1"),
        ("sglang serve m --schedule-policy sjf", "--schedule-policy"),
    ],
)
def test_what_a_command_line_cannot_mean_is_named(line: str, words: str) -> None:
    with pytest.raises(InputError) as refused:
        read_line(line)
    assert words in str(refused.value)
