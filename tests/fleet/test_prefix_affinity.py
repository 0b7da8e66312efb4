"""The prefix affinity router against one that is written literally, from the files of a fleet."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ifbbench.replay.run import run_trace
from ifbbench.workload.trace import PREFIX_BLOCK
from tests.fleet.test_fleet import config_of, lines, write_rows


def brute_force(
    rows: list[dict[str, Any]], count: int, weight: float, capacity: int, counts_prefills: bool = False
) -> list[tuple[int, list[int]]]:
    """The replica of each request, and the tokens of its prompt that each replica was expected to hold.

    counts_prefills: what requests without a first token are expected to compute counts, too.

    rows: the requests of `requests.jsonl` in the order of arrival, with their `prefix_ids`. A replica holds the blocks
    of the prompts that were sent there, those of a prompt from the last to the first, as long as they fit; the ones
    used longest ago are forgotten."""
    held: list[list[tuple[tuple[int, ...] | str, int]]] = [[] for _ in range(count)]
    answers: list[tuple[int, list[int]]] = []
    latest = count - 1
    for number, row in enumerate(rows):
        ids = tuple(row.get("prefix_ids", ()))
        blocks: list[tuple[tuple[int, ...] | str, int]] = [(ids[: n + 1], PREFIX_BLOCK) for n in range(len(ids))]
        own = row["prompt_len"] - PREFIX_BLOCK * len(ids)
        if own:
            blocks.append((f"own {number}", own))
        hits, costs = [], []
        for replica in range(count):
            hit = 0
            for block in blocks:
                if block not in held[replica]:
                    break
                hit += block[1]
            outstanding = [
                rows[before]["prompt_len"]
                for before in range(number)
                if answers[before][0] == replica and rows[before]["end_s"] >= row["arrival_s"]
            ]
            prefills = [
                rows[before]["prompt_len"] - answers[before][1][replica]
                for before in range(number)
                if answers[before][0] == replica and rows[before]["first_token_s"] >= row["arrival_s"]
            ]
            hits.append(hit)
            pending = sum(prefills) if counts_prefills else 0
            costs.append(weight * (row["prompt_len"] - hit + pending) + sum(outstanding))
        in_turn = [(latest + 1 + step) % count for step in range(count)]
        latest = min(in_turn, key=lambda replica: costs[replica])
        answers.append((latest, hits))
        for block in reversed(blocks):
            if block in held[latest]:
                held[latest].remove(block)
            held[latest].append(block)
        while sum(length for _, length in held[latest]) > capacity:
            del held[latest][0]
    return answers


def check(trace: Path, fleet: Path, **asked: Any) -> None:
    run_trace(str(trace), config_of(**asked, output=str(fleet)))
    prefixes = {row["request_id"]: row.get("prefix_ids", ()) for row in lines(fleet / "trace.jsonl")}
    rows = sorted(lines(fleet / "requests.jsonl"), key=lambda row: row["index"])
    rows = [row | {"prefix_ids": prefixes[row["request_id"]]} for row in rows]
    config = json.loads((fleet / "replica=0" / "run.json").read_text())["config"]
    weight = float(str(asked["router"]).partition(":")[2] or 1)
    counts_prefills = str(asked["router"]).startswith("dynamo")
    expected = brute_force(rows, asked["replicas"], weight, config["max_tokens_in_paged_kvcache"], counts_prefills)
    assert [(row["replica"], row["offers"]["hit_tokens"]) for row in rows] == expected


@pytest.mark.parametrize(("weight", "capacity"), [("", 4_096), (":0.3", 200_000), (":2", 4_096), (":50", 200_000)])
def test_the_router_decides_as_one_that_is_written_literally(weight: str, capacity: int, tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "trace.jsonl", Random(f"{weight} {capacity}"), 60)
    asked: dict[str, Any] = {"replicas": 3, "router": f"prefix_affinity{weight}", "enable_kv_cache_reuse": True}
    check(trace, tmp_path / "fleet", **asked, max_tokens_in_paged_kvcache=capacity)


@pytest.mark.parametrize(("engine", "weight"), [("vllm", ""), ("trtllm", ":0.5"), ("sglang", ":3")])
def test_prompts_without_a_first_token_count_for_dynamo(engine: str, weight: str, tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "trace.jsonl", Random(f"dynamo {engine}"), 60)
    asked: dict[str, Any] = {
        "replicas": 3,
        "router": f"dynamo{weight}",
        "engine": engine,
        "enable_kv_cache_reuse": True,
    }
    check(trace, tmp_path / "fleet", **asked, max_num_tokens=512, enable_chunked_context=True)


def test_without_weight_it_is_the_router_by_tokens(tmp_path: Path) -> None:
    trace = str(write_rows(tmp_path / "trace.jsonl", Random(8), 60))
    chosen = []
    for router in ("prefix_affinity:0", "least_tokens"):
        run_trace(trace, config_of(replicas=4, router=router, output=str(tmp_path / router)))
        chosen.append([(row["request_id"], row["replica"]) for row in lines(tmp_path / router / "requests.jsonl")])
    assert chosen[0] == chosen[1]


def test_affinity_finds_more_prefixes_than_turns(tmp_path: Path) -> None:
    trace = str(write_rows(tmp_path / "trace.jsonl", Random(9), 80))
    rates = []
    for router in ("prefix_affinity:4", "round_robin"):
        config = config_of(replicas=4, router=router, enable_kv_cache_reuse=True, output=str(tmp_path / router))
        rates.append(run_trace(trace, config).summary["prefix_hit_rate"])
    assert rates[0] > 1.2 * rates[1]
