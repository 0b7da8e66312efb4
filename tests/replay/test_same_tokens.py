"""The schedulers of all engines compute the same greedy tokens, whatever they pause and find in the cache."""

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main

pytestmark = pytest.mark.usefixtures("small_model")

OF_ENGINES = {
    "trtllm": "--policy max_utilization --enable_kv_cache_reuse",
    "vllm": "",
    "sglang": "--no_ignore_eos --schedule-conservativeness 0",
}


def write_trace(path: Path) -> None:
    """Twelve requests of which four are the same but for their last token, and all begin alike."""
    draw = random.Random(1)
    first, rows = [draw.randrange(5, 200) for _ in range(24)], []
    for number in range(12):
        if number % 3:
            prompt = first[:16] + [draw.randrange(5, 200) for _ in range(draw.randint(4, 24))]
        else:
            prompt = [*first, number + 7]
        rows.append({"arrival_s": 0.0, "prompt_tokens": prompt, "output_len": draw.randint(8, 40)})
    path.write_text("\n".join(map(json.dumps, rows)))


def test_all_engines_compute_the_same_tokens_with_pauses_and_prefixes(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl")
    answers = {}
    for engine, options in OF_ENGINES.items():
        words = ["run", str(tmp_path / "trace.jsonl"), "--engine", engine, "--device", "cpu", "--model", "tiny"]
        cache = "--max_tokens_in_paged_kvcache 160 --tokens_per_block 8 --max_seq_len 96 --time_scale 0"
        files = ["--output", str(tmp_path / engine), "--responses_json", str(tmp_path / f"{engine}.json")]
        done = CliRunner().invoke(main, [*words, *cache.split(), *options.split(), *files, "--quiet"])
        assert done.exit_code == 0, done.output
        summary = json.loads((tmp_path / engine / "summary.json").read_bytes())
        assert summary["pauses"] > 0
        assert summary["prefix_hit_rate"] > 0.3
        answers[engine] = json.loads((tmp_path / f"{engine}.json").read_bytes())
    assert answers["trtllm"] == answers["vllm"] == answers["sglang"]
    assert sum(len(one["response_tokens"]) for one in answers["sglang"]) > 12 * 8
