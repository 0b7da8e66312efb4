"""Traces that say which blocks of prompts are equal: what of them is reused, by hand and on the recorded one."""

import json
from pathlib import Path
from typing import Any

import pytest

from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig

# input_length, output_length, hash_ids (512 tokens each), and how many of its tokens others before it have computed.
ROWS = [
    (1024, 2, [0, 1], 0),
    # The first one's prompt; its output is unique.
    (1100, 3, [0, 1, 2], 1024),
    # The same prompt again: its last token is always computed.
    (1024, 1, [0, 1], 1023),
    (600, 1, [0, 9], 512),
    (700, 1, [7, 8], 0),
    # The second one had 76 tokens of block 2.
    (1536, 1, [0, 1, 2], 1100),
    # The fifth one had 188 tokens of block 8. Block 1 stands elsewhere here, so it is another.
    (1536, 1, [7, 8, 1], 700),
]
PROMPT_TOKENS = 7520
REUSED = [row[3] for row in ROWS]
COUNTERS = ("Allocated total KV cache blocks", "Allocated new KV cache blocks", "Reused KV cache blocks")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "mooncake.jsonl"
    rows = [
        {"timestamp": 1000 * index, "input_length": length, "output_length": output, "hash_ids": ids}
        for index, (length, output, ids, _) in enumerate(ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(directory: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


def replay(trace: Path, directory: Path, **settings: Any) -> dict[str, Any]:
    config = RunConfig(
        **{
            "device": "null",
            "time_scale": 0,
            "enable_kv_cache_reuse": True,
            "tokens_per_block": 128,
            "quiet": True,
            "max_seq_len": 4096,
            "max_num_tokens": 4096,
            "output": str(directory),
            **settings,
        }
    )
    summary = run_trace(str(trace), config).summary
    assert summary["requests"]["failed"] == 0
    return summary


def reused_tokens(directory: Path) -> list[int]:
    rows = {row["index"]: row["reused_tokens"] for row in lines(directory, "requests")}
    return [rows[index] for index in range(len(ROWS))]


def test_one_after_the_other_all_that_was_seen_before_is_reused(trace: Path, tmp_path: Path) -> None:
    summary = replay(trace, tmp_path / "run", concurrency=1)
    assert reused_tokens(tmp_path / "run") == REUSED
    assert summary["prompt_tokens"] == PROMPT_TOKENS
    assert summary["prefix_hit_rate"] == sum(REUSED) / PROMPT_TOKENS == 4359 / 7520
    # What was not reused was computed, once.
    computed = sum(row["Total Context Tokens"] for row in lines(tmp_path / "run", "iterations"))
    assert computed == PROMPT_TOKENS - sum(REUSED)


def test_without_partial_reuse_only_whole_blocks_are(trace: Path, tmp_path: Path) -> None:
    replay(trace, tmp_path / "run", concurrency=1, enable_partial_reuse=False)
    assert reused_tokens(tmp_path / "run") == [0, 1024, 896, 512, 0, 1024, 640]


def test_without_reuse_nothing_is(trace: Path, tmp_path: Path) -> None:
    summary = replay(trace, tmp_path / "run", concurrency=1, enable_kv_cache_reuse=False)
    assert reused_tokens(tmp_path / "run") == [0] * len(ROWS)
    assert summary["prefix_hit_rate"] == 0


def test_blocks_are_counted_as_they_are_taken_and_found(trace: Path, tmp_path: Path) -> None:
    replay(trace, tmp_path / "run", concurrency=1)
    rows = lines(tmp_path / "run", "iterations")
    total, new, reused = (rows[-1][name] for name in COUNTERS)
    # Prompts have 8, 9, 8, 5, 6, 12 and 12 blocks. Found: whole ones, and one of which a beginning is wanted.
    assert reused == 0 + 8 + 8 + 4 + 0 + 9 + 6
    # The first one's output starts a block. What the third one finds in part others need, so it takes a copy; the last
    # two take over what they find in part.
    assert total == 9 + 1 + 1 + 1 + 6 + 3 + 6
    assert new == total
    for name in COUNTERS:
        values = [row[name] for row in rows]
        assert values == sorted(values)
    for row in rows:
        assert row["Used KV cache blocks"] + row["Free KV cache blocks"] == row["Max KV cache blocks"]


def test_at_once_no_more_is_reused_than_one_after_the_other(trace: Path, tmp_path: Path) -> None:
    summary = replay(trace, tmp_path / "run")
    assert all(now <= most for now, most in zip(reused_tokens(tmp_path / "run"), REUSED, strict=True))
    # Who could wait for a block that was being computed did.
    assert 0 < summary["prefix_hit_rate"] <= 4359 / 7520


@pytest.mark.parametrize("settings", [{}, {"concurrency": 1}, {"max_tokens_in_paged_kvcache": 2048}], ids=str)
def test_the_schedule_is_the_same_every_time(settings: dict[str, Any], trace: Path, tmp_path: Path) -> None:
    digests = {replay(trace, tmp_path / name, **settings)["schedule_digest"] for name in ("first", "second")}
    assert len(digests) == 1


def test_a_pool_that_is_too_small_forgets(trace: Path, tmp_path: Path) -> None:
    summary = replay(trace, tmp_path / "run", concurrency=1, max_tokens_in_paged_kvcache=1664)
    rows = lines(tmp_path / "run", "iterations")
    # 13 blocks: the sixth prompt needs 12.
    assert {row["Max KV cache blocks"] for row in rows} == {13}
    assert summary["prefix_hit_rate"] < 4359 / 7520
    assert rows[-1]["Allocated total KV cache blocks"] > rows[-1]["Allocated new KV cache blocks"]


def test_the_recorded_trace_is_reused_as_much_as_its_ids_say(shared_dir: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_seq_len": 200_000, "max_num_tokens": 200_000}
    summary = replay(shared_dir / "traces" / "mooncake_synthetic.jsonl", tmp_path / "run", **settings)
    assert summary["requests"]["completed"] == 3993
    assert 0.645 <= summary["prefix_hit_rate"] <= 0.6512
