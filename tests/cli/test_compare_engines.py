"""`ifbbench compare --engine trtllm,vllm TRACE`: each engine with its defaults, and where the two part."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main as cli

COMPARE = (
    "compare --engine trtllm,vllm chat --device null --max_num_samples 40 --time_scale 0 --max_tokens_in_paged_kvcache "
    "16384 --quiet --output"
)


def compared(path: Path, *words: str) -> Any:
    done = CliRunner().invoke(cli, [*COMPARE.split(), str(path), *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def config_of(path: Path, engine: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / f"engine={engine}" / "run.json").read_text())["config"]
    return config


def test_each_engine_has_its_own_defaults_and_what_is_given_is_of_both(tmp_path: Path) -> None:
    compared(tmp_path / "both", "--max_batch_size", "32")
    trtllm, vllm = (config_of(tmp_path / "both", engine) for engine in ("trtllm", "vllm"))
    assert (trtllm["tokens_per_block"], vllm["tokens_per_block"]) == (32, 16)
    assert (trtllm["enable_kv_cache_reuse"], vllm["enable_kv_cache_reuse"]) == (False, True)
    assert trtllm["max_batch_size"] == vllm["max_batch_size"] == 32
    alone = ["run", "chat", "--engine", "vllm", *COMPARE.split()[4:], str(tmp_path / "alone"), "--max_batch_size", "32"]
    assert CliRunner().invoke(cli, alone).exit_code == 0
    assert (tmp_path / "both/engine=vllm/spans.jsonl").read_bytes() == (tmp_path / "alone/spans.jsonl").read_bytes()


def test_the_first_iteration_in_which_they_part_is_explained(tmp_path: Path) -> None:
    found = json.loads(compared(tmp_path / "json", "--json"))["first_divergence"]
    assert found["iteration"] == 0
    ran = {
        engine: [
            span["request_id"]
            for span in map(json.loads, (tmp_path / "json" / f"engine={engine}" / "spans.jsonl").open())
            if span["phase"] == "context" and span["first_iteration"] == 0
        ]
        for engine in ("trtllm", "vllm")
    }
    # vLLM cuts the prompt of the request that does not fit the budget; TensorRT-LLM keeps blocks for whole outputs.
    (only,) = set(ran["vllm"]) - set(ran["trtllm"])
    assert found["parted"] == [f"request {only} ran in b and not in a, where it waited for KV blocks"]
    text = compared(tmp_path / "text")
    assert f"Request {only} ran in b and not in a, where it waited for KV blocks." in text
    assert "was left out first, for the token budget" in text


def test_blocks_of_different_sizes_are_compared_by_their_tokens(tmp_path: Path) -> None:
    text = compared(tmp_path / "sizes")
    assert "kv_tokens.peak_held" in text
    assert "kv_blocks.peak_used" not in text
    assert "KV blocks of 32 tokens in use" in text
    assert "KV blocks of 16 tokens in use" in text
    text = compared(tmp_path / "same", "--tokens_per_block", "16")
    assert "kv_blocks.peak_used" in text
    assert "kv_tokens.peak_held" not in text
    assert "KV blocks in use" in text


def test_a_decision_made_while_the_iteration_before_runs_sees_fewer_arrivals(tmp_path: Path) -> None:
    simulated = "--device sim:h100-sxm --model llama-3.1-8b --max_num_samples 20 --request_rate 30 --json"
    arguments = f"compare chat --engine trtllm,vllm {simulated} --output {tmp_path / 'both'}"
    result = CliRunner().invoke(cli, arguments.split())
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["first_divergence"]
    assert found["iteration"] == 1
    earlier_s = found["a_start_s"] - found["b_start_s"]
    assert found["parted"][0].endswith("ran in a and not in b, where each had not arrived")
    assert found["parted"][1] == (
        "in b an iteration is decided while the one before it runs (asynchronous scheduling), here "
        f"{earlier_s:.4f} s before a: it sees fewer arrivals"
    )


@pytest.mark.parametrize("engines", ["trtllm,none", "vllm,vllm"])
def test_other_engines_are_refused(engines: str) -> None:
    done = CliRunner().invoke(cli, ["compare", "--engine", engines, "chat", "--device", "null"])
    assert done.exit_code == 2


@pytest.mark.usefixtures("undrawn_sweeps")
def test_a_sweep_over_engines_gives_each_its_defaults(tmp_path: Path) -> None:
    words = "sweep documentation --device null --over engine=trtllm,vllm --over max_num_seqs=4,8 --quiet --output"
    assert CliRunner().invoke(cli, [*words.split(), str(tmp_path / "sweep")], catch_exceptions=False).exit_code == 0
    found = [
        json.loads((tmp_path / "sweep" / f"engine={engine},max_batch_size={size}" / "run.json").read_text())["config"]
        for engine in ("trtllm", "vllm")
        for size in (4, 8)
    ]
    assert [one["tokens_per_block"] for one in found] == [32, 32, 16, 16]
    assert [one["max_batch_size"] for one in found] == [4, 8, 4, 8]
