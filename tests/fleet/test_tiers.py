"""Stores beneath the device memory: held to a literal simulation, and what they must not change."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ifbbench.replay.run import run_trace
from tests.fleet.literal_tiers import BLOCK, Job, LiteralStore, LiteralTiers
from tests.fleet.test_disaggregated import ITERATION_S, KV_BYTES, constant_device
from tests.fleet.test_fleet import config_of, lines

BLOCK_BYTES = KV_BYTES * BLOCK
DISK, REMOTE = "disk", "remote"


def draw_jobs(draw: Random, count: int) -> list[Job]:
    arrival_s, jobs = 0.0, []
    for _ in range(count):
        arrival_s += draw.choice((0.0, 0.0013, 0.0217, 0.1003, 0.4001))
        pieces = tuple(draw.randrange(2) * 10 + depth for depth in range(draw.choice((0, 1, 2, 3, 3))))
        tail = draw.randrange(0, 20) * BLOCK + draw.randint(1, BLOCK)
        prompt_len = 512 * len(pieces) + tail
        room = -prompt_len % BLOCK + 1
        jobs.append(Job(round(arrival_s, 9), pieces, prompt_len, draw.randint(1, room)))
    return jobs


def write_jobs(path: Path, jobs: list[Job]) -> str:
    rows = [
        {"request_id": number, "arrival_s": job.arrival_s, "prompt_len": job.prompt_len, "output_len": job.output_len}
        | ({"prefix_ids": list(job.pieces)} if job.pieces else {})
        for number, job in enumerate(jobs)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def check_against_literal(seed: int, path: Path) -> int:
    """Returns how many requests loaded something."""
    draw = Random(seed)
    jobs = draw_jobs(draw, 60)
    largest = max(-(-job.prompt_len // BLOCK) for job in jobs)
    is_tight = draw.random() < 0.75
    blocks = largest + draw.choice((1, 20, 60)) if is_tight else 40 * largest
    tokens = 100_000 if is_tight else draw.choice((256, 1000))
    requests, replicas = draw.choice((1, 3, 64)), draw.randint(1, 3)
    kinds = draw.choice(((DISK,), (REMOTE,), (DISK, REMOTE)))
    values: dict[str, Any] = {"kv_tier_write_policy": draw.choice(("write_through", "write_back"))}
    made: dict[str, tuple[int, float, float, float]] = {}
    for kind in kinds:
        capacity, bandwidth = draw.choice((30, 120, 100_000)), draw.choice((2.03e9, 1.07e10, 1.01e12))
        made[kind] = capacity, float(BLOCK_BYTES), bandwidth, draw.choice((0.0, 0.00071))
        values |= {
            f"kv_{kind}_bytes": capacity * BLOCK_BYTES,
            f"kv_{kind}_bandwidth": bandwidth,
            f"kv_{kind}_latency": made[kind][-1],
        }
    config = config_of(
        engine="vllm",
        device=constant_device(path),
        engine_overhead="none",
        async_scheduling=False,
        router="round_robin",
        replicas=replicas,
        max_tokens_in_paged_kvcache=blocks * BLOCK,
        max_num_tokens=tokens,
        max_batch_size=requests,
        output=str(path / "run"),
        **values,
    )
    run_trace(write_jobs(path / "trace.jsonl", jobs), config)
    remote = LiteralStore(*made[REMOTE]) if REMOTE in made else None
    stores = [
        ([LiteralStore(*made[DISK])] if DISK in made else []) + ([remote] if remote else []) for _ in range(replicas)
    ]
    literal = LiteralTiers(
        jobs, ITERATION_S, (blocks, tokens, requests), stores, values["kv_tier_write_policy"] == "write_back"
    )
    expected = literal.run()
    num_loads = 0
    for row in sorted(lines(path / "run" / "requests.jsonl"), key=lambda row: row["index"]):
        times = expected[row["index"]]
        assert (row["first_token_s"], row["end_s"]) == pytest.approx((times.first_token_s, times.end_s), abs=1e-6), row
        loads = [(row["transfer_start_s"], row["transfer_end_s"])] if "transfer_start_s" in row else []
        assert len(loads) == len(times.loads), row
        for found, load in zip(loads, times.loads, strict=True):
            assert found == pytest.approx(load, abs=1e-6), row
            assert row["attribution_s"]["transfer"] == pytest.approx(load[1] - load[0], abs=1e-6)
            from_stores = [row[f"{kind}_reused_tokens"] for kind in kinds]
            assert from_stores == times.from_stores[: len(kinds)], row
            num_loads += 1
        assert sum(row["attribution_s"].values()) == pytest.approx(row["e2e_s"], abs=1e-9)
    return num_loads


def test_requests_load_what_a_literal_simulation_loads(tmp_path: Path) -> None:
    loads = 0
    for seed in range(12):
        (path := tmp_path / str(seed)).mkdir()
        loads += check_against_literal(seed, path)
    assert loads > 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 300))
def test_more_requests_load_what_a_literal_simulation_loads(seed: int, tmp_path: Path) -> None:
    check_against_literal(seed, tmp_path)
