"""Stores beneath the KV caches of a fleet with prefill and decode apart."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ifbbench.analysis.sides import SidesFindings
from ifbbench.replay import disaggregated
from ifbbench.rundir.reader import load_run
from ifbbench.settings.groups.scheduling import POLICIES
from tests.fleet.test_changes import summary_of
from tests.fleet.test_conservation import check_stores, stores
from tests.fleet.test_disaggregated import (
    CheckedSides,
    check_failures,
    check_nothing_is_lost,
    check_single_iterations,
    constant_device,
    draw_failures,
    draw_sides,
    fleet_of,
)
from tests.fleet.test_fleet import ENGINES, lines, write_rows

# One of them, and others.
ONE, MORE = 6, 150


def draw_stored(draw: Random, engine: str) -> dict[str, Any]:
    """Settings of sides whose engines have stores."""
    values = draw_sides(draw, engine) | {"enable_kv_cache_reuse": True, "engine": engine, "pp_size": 1}
    values |= stores(draw, values)
    if engine == "trtllm":
        values["policy"] = POLICIES[0]
    if engine == "vllm" and draw.random() < 0.3:  # one side only
        values[draw.choice(("prefill", "decode"))] += ",kv_disk_bytes=0,kv_remote_bytes=0"
    return values


def check_stored_sides(seed: int, path: Path, engine: str) -> int:
    """One random fleet; returns how many tokens of prompts were loaded."""
    path.mkdir()
    draw = Random(f"stored sides {seed}")
    trace = write_rows(path / "trace.jsonl", draw, 40, sessions=draw.random() < 0.3, priorities=draw.random() < 0.3)
    values = draw_stored(draw, engine)
    fails = seed % 3 == 2
    if fails:
        values |= draw_failures(draw, path, values["prefill_replicas"] + values["decode_replicas"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disaggregated, "SteppedSides", CheckedSides)
        fleet_of(path / "fleet", trace, **values)
    reserves_first = engine == "sglang" or values["transfer_by"] == "layer"
    error = "although no other request runs" if values.get("num_reserved_decode_tokens") == 0 else None
    check_nothing_is_lost(trace, path / "fleet", values["prefill_replicas"], reserves_first, "" if fails else error)
    if fails:
        check_failures(path / "fleet", values["request_retries"])
    check_stores(path / "fleet", loads_more=True, engine=engine)
    rows = lines(path / "fleet" / "requests.jsonl")
    return sum(row.get("disk_reused_tokens", 0) + row.get("remote_reused_tokens", 0) for row in rows)


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_lost_between_sides_with_stores(engine: str, tmp_path: Path) -> None:
    assert check_stored_sides(ONE, tmp_path / "one", engine) > 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(MORE))
def test_nothing_is_lost_between_more_random_sides_with_stores(engine: str, seed: int, tmp_path: Path) -> None:
    check_stored_sides(seed, tmp_path / "one", engine)


def check_single_of_stored(seed: int, path: Path, engine: str) -> None:
    path.mkdir()
    draw = Random(f"stored at once {seed}")
    trace = write_rows(path / "trace.jsonl", draw, 40, sessions=draw.random() < 0.3, priorities=draw.random() < 0.3)
    values = draw_stored(draw, engine)
    if seed % 2:
        values |= {"device": constant_device(path), "engine_overhead": "none", "transfer_latency": 0.0}
    if seed % 3 == 2:
        values |= draw_failures(draw, path, values["prefill_replicas"] + values["decode_replicas"])
    check_single_iterations(path, trace, values)


@pytest.mark.parametrize("engine", ENGINES)
def test_iterations_at_once_write_and_load_what_single_ones_do(engine: str, tmp_path: Path) -> None:
    check_single_of_stored(ONE, tmp_path / "one", engine)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(70))
def test_more_iterations_at_once_write_and_load_what_single_ones_do(engine: str, seed: int, tmp_path: Path) -> None:
    check_single_of_stored(seed, tmp_path / "one", engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_prefill_replicas_find_in_the_store_what_others_have_computed(engine: str, tmp_path: Path) -> None:
    """Each of three prompts with a common prefix goes to another prefill replica."""
    rows = [
        {"request_id": number, "arrival_s": 2.0 * number, "prompt_len": 2048, "output_len": 20, "prefix_ids": [1, 2, 3]}
        for number in range(3)
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {"engine": engine, "prefill_replicas": 3, "decode_replicas": 1, "router": "round_robin"}
    values |= {"kv_remote_bytes": 10**12, "enable_kv_cache_reuse": True}
    if engine == "sglang":
        values |= {"enable_hierarchical_cache": True, "tokens_per_block": 16}
    fleet = fleet_of(tmp_path / "fleet", tmp_path / "trace.jsonl", **values)
    found = lines(fleet / "requests.jsonl")
    assert [row["prefill_replica"] for row in found] == [0, 1, 2]
    assert [row.get("remote_reused_tokens", 0) for row in found] == [0, 1536, 1536]
    run = load_run(fleet)
    stored = json.loads((fleet / "summary.json").read_text())["kv_tiers"]["remote"]
    assert stored["loaded_tokens"] == 3072
    times = SidesFindings(run).times
    moved = sum(row["transfer_end_s"] - row["transfer_start_s"] for row in found)
    assert times.transfer_s == pytest.approx(moved)
    loads = sum(row["attribution_s"]["transfer"] for row in found) - moved
    assert times.load_s == pytest.approx(loads)
    assert loads > 0
    assert "request-seconds in loads from stores" in " ".join(SidesFindings(run).sentences())
    for row in found:
        assert sum(row["attribution_s"].values()) == pytest.approx(row["e2e_s"])
        assert row["transfer_tokens"] == 2048 - (0 if row is found[0] or engine == "sglang" else 1536)


def test_vllm_writes_prompts_that_a_decode_replica_has_received(tmp_path: Path) -> None:
    """A disk of the decode replica gets all blocks of a prompt, and those of its outputs."""
    rows: list[dict[str, Any]] = [
        {"request_id": 0, "arrival_s": 0.0, "prompt_len": 1536, "output_len": 33, "prefix_ids": [1, 2, 3]},
        {"request_id": 1, "arrival_s": 9.0, "prompt_len": 5, "output_len": 2},  # so that the last write arrives
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fleet = fleet_of(
        tmp_path / "fleet",
        tmp_path / "trace.jsonl",
        kv_disk_bytes=10**12,
        enable_kv_cache_reuse=True,
        prefill="kv_disk_bytes=0",
    )
    assert summary_of(fleet)["kv_tiers"]["disk"]["stored_tokens"] == 1536 + 32
    assert "kv_tiers" not in json.loads((fleet / "replica=0" / "summary.json").read_text())
