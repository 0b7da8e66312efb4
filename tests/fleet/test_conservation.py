"""Random fleets with all that fleets can have: each request ends once, blocks and transfers add up, and no time runs
backwards."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ifbbench.replay import fleet as fleets
from ifbbench.replay.run import run_trace
from ifbbench.replay.stepped_fleet import SteppedFleet
from ifbbench.rundir.fleet import replica_directories
from ifbbench.settings.groups.fleet import ROUTERS, WEIGHTED_ROUTERS
from ifbbench.settings.groups.kv_cache import TIER_WRITE_POLICIES
from ifbbench.settings.groups.scheduling import POLICIES
from ifbbench.settings.groups.sglang import HOST_WRITE_POLICIES
from tests.fleet.test_changes import check_conservation, summary_of, write_events
from tests.fleet.test_disaggregated import check_random_fleet, check_times_and_blocks
from tests.fleet.test_fleet import ENGINES, SEEDS_AT_ONCE, config_of, lines, seeds_from, write_rows

# Bytes of the keys and values of a token of llama-3.1-8b in bf16.
TOKEN_BYTES = 131_072
USUAL_RETRIES = 5
# So many fleets at first, then the others.
FEW, ALL = 9, 500


class CheckedFleet(SteppedFleet):
    """At the end no replica that is left holds a block or a request."""

    def run(self) -> None:
        super().run()
        for one in self.replicas:
            if one.has_failed:
                continue
            scheduler: Any = one.loop.scheduler
            scheduler.kv_cache.check_consistency()
            assert scheduler.kv_cache.num_used == 0
            assert not scheduler.table.requests


def of_engine(draw: Random, engine: str) -> dict[str, Any]:
    """Settings of one engine."""
    if engine == "trtllm":
        return {
            "overlap": draw.choice((None, "async", "partitioned")),
            "policy": draw.choice(POLICIES[:2]),
            "enable_chunked_context": draw.choice((True, False)),
            "kv_host_cache_bytes": draw.choice((0, 0, 4096 * TOKEN_BYTES)),
        }
    if engine == "sglang":
        host = draw.choice((None, None, *HOST_WRITE_POLICIES))
        tokens = {"enable_hierarchical_cache": True, "hicache_write_policy": host} if host else {}
        return {"disable_overlap_schedule": draw.choice((True, False))} | tokens
    return {"async_scheduling": draw.choice((True, False)), "scheduling_policy": draw.choice(("fcfs", "priority"))}


def stores(draw: Random, given: dict[str, Any]) -> dict[str, Any]:
    """Stores beneath the cache of an engine, small or ample, quick or slow."""
    kinds = draw.choice((("disk",), ("remote",), ("disk", "remote")))
    asked: dict[str, Any] = {"kv_tier_write_policy": "write_through"}
    if given["engine"] == "vllm":
        asked["kv_tier_write_policy"] = draw.choice(TIER_WRITE_POLICIES)
        asked["kv_tier_prefetch"] = "wait_complete" if len(kinds) > 1 and draw.random() < 0.5 else None
    elif given["engine"] == "sglang":
        kinds = kinds[-1:]
        prefetch = draw.choice((None, "best_effort", "wait_complete"))
        asked |= {"enable_hierarchical_cache": True, "kv_tier_prefetch": prefetch, "tokens_per_block": 16}
    else:
        asked |= {"policy": POLICIES[0], "overlap": draw.choice((None, "async"))}
    for kind in kinds:
        asked[f"kv_{kind}_bytes"] = draw.choice((2_000, 500_000)) * TOKEN_BYTES
        asked[f"kv_{kind}_bandwidth"] = draw.choice((2e9, 2.5e10))
        asked[f"kv_{kind}_latency"] = draw.choice((0.0, 1e-3))
    return asked


def changes(draw: Random, path: Path, replicas: int) -> dict[str, Any]:
    """Replicas that fail, drain and start, by a file or by a rule."""
    asked: dict[str, Any] = {"replica_start_up": draw.choice((0.0, 0.1, 1.0))}
    kinds = draw.choice((("events",), ("autoscale",), ("events", "autoscale")))
    if "events" in kinds:
        events = list[dict[str, float]]()
        for _ in range(draw.randint(1, 5)):
            kind = draw.choice(("fail", "fail", "drain", "start", "replicas"))
            value = draw.randrange(replicas) if kind in ("fail", "drain") else draw.randint(1, 3)
            events.append({"at": draw.choice((0.0, 0.2, 0.7, 1.5, draw.random())), kind: value})
        asked["replica_events"] = write_events(path / "events.json", *events)
        asked["request_retries"] = draw.choice((0, 1, USUAL_RETRIES))
    if "autoscale" in kinds:
        measure = draw.choice(("queue=1", "requests=3", "kv_use=0.01", "ttft=0.05s"))
        asked["autoscale"] = f"{measure},min={draw.randint(1, 3)},max={draw.randint(4, 6)},every=0.2s,cool_down=0.5s"
    return asked


def draw_fleet(draw: Random, path: Path) -> dict[str, Any]:
    """Settings of a fleet of replicas that do both prefill and decode."""
    engine, replicas = draw.choice(ENGINES), draw.randint(1, 4)
    router = draw.choice((*ROUTERS, *(f"{name}:{draw.choice((0, 0.5, 4))}" for name in WEIGHTED_ROUTERS)))
    asked: dict[str, Any] = {"engine": engine, "replicas": replicas, "router": router, "seed": draw.randrange(9)}
    asked |= {"max_batch_size": draw.choice((2, 4, 64)), "enable_kv_cache_reuse": True, **of_engine(draw, engine)}
    asked["max_tokens_in_paged_kvcache"] = draw.choice((3_200, 6_400, 64_000))
    if router == "least_kv":
        asked["router_state_age"] = draw.choice((0.0, 0.02, 1.0))
    if draw.random() < 0.6:
        asked |= stores(draw, asked)
    elif draw.random() < 0.2:
        asked["device"] = "null"
    if draw.random() < 0.5:
        asked |= changes(draw, path, replicas)
    if draw.random() < 0.3:
        own = [{"max_batch_size": draw.choice((1, 8))} if draw.random() < 0.5 else {} for _ in range(replicas)]
        (path / "replicas.json").write_text(json.dumps(own))
        asked["replica_config"] = str(path / "replicas.json")
        del asked["replicas"]
    if draw.random() < 0.3:
        asked["concurrency"] = draw.randint(1, 12)
    return asked


def check_stores(fleet: Path, loads_more: bool, engine: str) -> None:
    """Stores have what was written and not given up; what was loaded from them was used. loads_more: or lost, or
    prefetched."""
    rows = lines(fleet / "requests.jsonl")
    for name, store in summary_of(fleet).get("kv_tiers", {}).items():
        assert store["used_tokens"] == store["stored_tokens"] - store["evicted_tokens"]
        loaded = sum(row.get(f"{name}_reused_tokens", 0) for row in rows)
        if loads_more or engine == "sglang" or any(row["pauses"] for row in rows):  # what was paused is loaded again
            assert loaded <= store["loaded_tokens"]
        else:
            assert loaded == store["loaded_tokens"]


def check_fleet(seed: int, path: Path) -> None:
    """One random fleet. Each third one has prefill and decode apart."""
    draw = Random(f"conserving {seed}")
    path.mkdir()
    if seed % 3 == 2:
        check_random_fleet(seed + 1000, path, ENGINES[seed // 3 % len(ENGINES)])
        return
    trace = write_rows(
        path / "trace.jsonl", draw, draw.randint(5, 40), sessions=draw.random() < 0.3, priorities=draw.random() < 0.3
    )
    asked, fleet = draw_fleet(draw, path), path / "fleet"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fleets, "SteppedFleet", CheckedFleet)
        run_trace(str(trace), config_of(**asked, output=str(fleet)))
    check_conservation(trace, fleet, asked.get("request_retries", USUAL_RETRIES))
    for row in lines(fleet / "requests.jsonl"):
        if row["outcome"] == "completed":
            assert row["arrival_s"] <= row["first_scheduled_s"] <= row["first_token_s"] <= row["end_s"]
            assert min(row["attribution_s"].values()) >= 0
    for directory in replica_directories(fleet):
        check_times_and_blocks(directory, is_prefill=False)
    check_stores(fleet, "replica_events" in asked or asked.get("kv_tier_prefetch") is not None, asked["engine"])


@pytest.mark.parametrize("seed", range(FEW))
def test_random_fleets_conserve_requests_and_blocks(seed: int, tmp_path: Path) -> None:
    check_fleet(seed, tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FEW, ALL, SEEDS_AT_ONCE))
def test_more_random_fleets_conserve_requests_and_blocks(first: int, tmp_path: Path) -> None:
    for seed, path in seeds_from(first, ALL, tmp_path):
        check_fleet(seed, path / "one")
