"""Blocks of agents that are kept through their tool calls, against a cache written literally, one request at a time."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ifbbench.errors import InputError
from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig

SIZE, NUM_BLOCKS, DEFAULT = 4, 26, 35
BASE: dict[str, Any] = {
    "device": "h100-sxm",
    "model": "tiny",
    "policy": "guaranteed_no_evict",
    "max_batch_size": 1,
    "max_num_tokens": 128,
    "max_seq_len": 96,
    "tokens_per_block": SIZE,
    "max_tokens_in_paged_kvcache": SIZE * NUM_BLOCKS,
    "enable_kv_cache_reuse": True,
    "enable_partial_reuse": False,
    "quiet": True,
}


class LiteralCache:
    """A list of free blocks for one sequence at a time. A block is [path, priority, duration, expiry, number];
    what can be found is a set of paths, which are tuples of tokens. Of equal expiries the lowest number is first."""

    def __init__(self) -> None:
        self.free: list[list[Any]] = [[None, DEFAULT, None, None, number] for number in range(NUM_BLOCKS)]
        self.found: dict[tuple[Any, ...], list[Any]] = {}
        self.retained = self.expired = self.lost = 0

    def take(self, priority: int, duration: float | None) -> list[Any]:
        block = min(self.free, key=lambda one: one[1])  # the first of the lowest priority
        self.lost += block[1] > DEFAULT
        self.unlink(block)
        return self.claim(block, priority, duration)

    def claim(self, block: list[Any], priority: int, duration: float | None) -> list[Any]:
        self.free = [one for one in self.free if one is not block]
        block[1:4] = [priority, duration, None]
        return block

    def unlink(self, block: list[Any]) -> None:
        if block[0] is not None and self.found.get(block[0]) is block:
            del self.found[block[0]]
            if len(block[0]) % SIZE == 0:  # nothing goes on from a partial block
                for path in [path for path in self.found if path[: len(block[0])] == block[0]]:
                    del self.found[path]
        block[0] = None

    def add(self, prompt: list[Any], priority: int, duration: float | None) -> tuple[list[list[Any]], int]:
        blocks: list[list[Any]] = []
        usable = len(prompt) - 1
        while (end := (len(blocks) + 1) * SIZE) <= usable and tuple(prompt[:end]) in self.found:
            blocks.append(self.found[tuple(prompt[:end])])
        for block in blocks:
            self.claim(block, priority, duration)
        reused = len(blocks) * SIZE
        path = tuple(prompt[:usable])
        if reused < usable < reused + SIZE and path in self.found:  # an equal partial block at the end
            block = self.found[path]
            self.unlink(block)
            blocks.append(self.claim(block, priority, duration))
            reused = usable
        while len(blocks) * SIZE < len(prompt):
            blocks.append(self.take(priority, duration))
        return blocks, reused

    def store(self, blocks: list[list[Any]], tokens: list[Any], with_partial: bool = False) -> None:
        ends = list(range(SIZE, len(tokens) + 1, SIZE))
        if with_partial and len(tokens) % SIZE:
            ends.append(len(tokens))
        for block, end in zip(blocks, ends, strict=False):
            path = tuple(tokens[:end])
            if path not in self.found:
                self.found[path] = block
                block[0] = path

    def release(self, blocks: list[list[Any]], now_s: float) -> None:
        for block in reversed(blocks):
            self.retained += block[1] > DEFAULT
            if block[2] is not None and block[1] != DEFAULT:
                block[3] = now_s + block[2]
            self.free.append(block)

    def refresh(self, now_s: float) -> None:
        due = [block for block in self.free if block[3] is not None and block[3] <= now_s]
        for block in sorted(due, key=lambda one: (one[3], one[4])):
            self.expired += block[1] > DEFAULT
            self.free = [one for one in self.free if one is not block]
            block[1:4] = [DEFAULT, None, None]
            self.free.append(block)


def sessions(draw: random.Random) -> list[dict[str, Any]]:
    """Conversations of which each prompt has the whole one before it, and requests that share nothing."""
    rows: list[dict[str, Any]] = []
    for session in range(draw.randint(2, 5)):
        length, before = 0, None
        for turn in range(draw.choice([1, 2, 3, 3, 4])):
            length += draw.randint(3, 14)
            output_len = draw.randint(2, 6)
            if length + output_len > 64:
                break
            row = {
                "request_id": len(rows),
                "arrival_s": session * 1e-3 + turn * 1e-4,
                "prompt_len": length,
                "output_len": output_len,
                "prefix_ids": [session],
                "prefix_lens": [length + output_len],
            }
            if before is not None:
                row |= {"after": before, "think_s": draw.choice([0.0, 0.002, 0.02])}
            before, length = len(rows), length + output_len
            rows.append(row)
    return rows


def lines(directory: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_kept_as_a_literal_cache_keeps_them(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    rows = sessions(draw)
    duration = draw.choice([None, 0.001, 0.01])
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RunConfig(**BASE, kv_retention_priority=90, kv_retention_s=duration, output=str(tmp_path / "run"))
    summary = run_trace(str(tmp_path / "trace.jsonl"), config).summary
    cache, found = LiteralCache(), dict[int, int]()
    goes_on = {row.get("after") for row in rows}
    starts = [line["ifbbench"]["start_s"] for line in lines(tmp_path / "run", "iterations")]
    served = sorted(lines(tmp_path / "run", "requests"), key=lambda line: line["end_s"])
    for line in served:
        row = rows[line["request_id"]]
        priority, its_duration = (90, duration) if row["request_id"] in goes_on else (DEFAULT, None)
        tokens = [(row["prefix_ids"][0], number) for number in range(row["prompt_len"] + row["output_len"])]
        prompt_len, count = row["prompt_len"], row["output_len"]
        its_starts, starts = starts[:count], starts[count:]
        blocks, found[row["request_id"]] = cache.add(tokens[:prompt_len], priority, its_duration)
        cache.refresh(its_starts[0])
        cache.store(blocks, tokens[: prompt_len - 1])
        for step, start_s in enumerate(its_starts[1:]):
            if (prompt_len + step) % SIZE == 0:
                blocks.append(cache.take(priority, its_duration))
            cache.refresh(start_s)
        cache.store(blocks, tokens[: prompt_len + count - 1], with_partial=True)
        cache.release(blocks, line["end_s"])
    assert not starts
    assert {line["request_id"]: line.get("reused_tokens", 0) for line in served} == found
    figures = summary["kv_retention"]
    assert (figures["retained_blocks"], figures["expired_blocks"], figures["lost_blocks"]) == (
        cache.retained,
        cache.expired,
        cache.lost,
    )


def test_an_agent_finds_its_blocks_after_other_requests(tmp_path: Path) -> None:
    """Without retention the request that comes meanwhile takes the agent's blocks, and with it takes its own again."""
    rows = [
        {"request_id": 0, "arrival_s": 0.0, "prompt_len": 40, "output_len": 2, "prefix_ids": [0], "prefix_lens": [42]},
        *({"request_id": k, "arrival_s": 0.01 * k, "prompt_len": 60, "output_len": 2} for k in (1, 2)),
        {
            "request_id": 3,
            "arrival_s": 0.001,
            "prompt_len": 50,
            "output_len": 2,
            "prefix_ids": [0],
            "prefix_lens": [42],
            "after": 0,
            "think_s": 0.1,
        },
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reused = {}
    for name, priority in {"usual": None, "kept": 90}.items():
        config = RunConfig(**BASE, kv_retention_priority=priority, output=str(tmp_path / name))
        run_trace(str(tmp_path / "trace.jsonl"), config)
        reused[name] = {line["request_id"]: line.get("reused_tokens", 0) for line in lines(tmp_path / name, "requests")}
    assert (reused["usual"][3], reused["kept"][3]) == (0, 40)


@pytest.mark.parametrize("router", ["session", "least_requests"])
def test_replicas_keep_blocks_and_their_traces_give_their_files(router: str, tmp_path: Path) -> None:
    rows = sessions(random.Random(3)) + [
        row
        | {"request_id": row["request_id"] + 100, "prefix_ids": [row["prefix_ids"][0] + 100]}
        | ({"after": row["after"] + 100} if "after" in row else {})
        for row in sessions(random.Random(4))
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept: dict[str, Any] = {"kv_retention_priority": 90, "kv_retention_s": 0.01}
    fleet = RunConfig(**BASE, **kept, replicas=2, router=router, output=str(tmp_path / "fleet"))
    summary = run_trace(str(tmp_path / "trace.jsonl"), fleet).summary
    parts = [json.loads((tmp_path / "fleet" / f"replica={k}" / "summary.json").read_text()) for k in range(2)]
    for name, value in summary["kv_retention"].items():
        assert value == sum(one["kv_retention"][name] for one in parts)
    assert summary["kv_retention"]["retained_blocks"] > 0
    if router == "session":  # a share with sessions of its own
        share = RunConfig(**BASE, **kept, replica="1/2", output=str(tmp_path / "share"))
        run_trace(str(tmp_path / "trace.jsonl"), share)
    else:
        run_trace(str(tmp_path / "fleet" / "replica=0"), RunConfig(**BASE, **kept, output=str(tmp_path / "share")))
    for name in ("iterations.jsonl", "requests.jsonl"):
        first, again = (path / name for path in (tmp_path / "fleet" / "replica=0", tmp_path / "share"))
        assert first.read_bytes() == again.read_bytes()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"enable_kv_cache_reuse": False, "kv_retention_priority": 90}, "--enable_kv_cache_reuse"),
        ({"kv_retention_s": 2.0}, "--kv_retention_priority"),
        ({"kv_retention_priority": 35}, "kv_retention_priority"),
        (
            {"engine": "vllm", "enable_partial_reuse": True, "kv_retention_priority": 90},
            "vLLM evicts the least recently used",
        ),
        (
            {"engine": "sglang", "enable_partial_reuse": True, "kv_retention_priority": 90},
            "--radix_eviction_policy priority",
        ),
        ({"prefill_replicas": 1, "decode_replicas": 1, "kv_retention_priority": 90}, "is not built"),
    ],
)
def test_refusals_name_the_setting(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        run_trace("agent", RunConfig(**BASE | settings))
