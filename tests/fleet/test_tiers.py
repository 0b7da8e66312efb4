"""Stores beneath the device memory: held to a literal simulation, and what they must not change."""

import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ifbbench.engine.transferring_loop import TransferringLoop
from ifbbench.errors import InputError
from ifbbench.kv.store import KvStore
from ifbbench.replay.run import run_trace, summarise_run
from ifbbench.replay.single import client_of, engine_for, next_change, recorder_of, use_tiers, wait
from ifbbench.schedulers.engines import make_loop
from ifbbench.workload.load import load_trace
from tests.fleet.literal_tiers import BLOCK, Job, LiteralConnector, LiteralStore, LiteralTiers
from tests.fleet.test_disaggregated import ITERATION_S, KV_BYTES, constant_device
from tests.fleet.test_fleet import FILES, SEEDS_AT_ONCE, assert_equal_runs, config_of, lines, seeds_from, write_rows

BLOCK_BYTES = KV_BYTES * BLOCK
DISK, REMOTE = "disk", "remote"
SIDES = {"prefill_replicas": 1, "decode_replicas": 1}
HOST: dict[str, Any] = {"enable_hierarchical_cache": True, "tokens_per_block": 16, "kv_remote_bytes": 0}


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


def check_against_literal(seed: int, path: Path, engine: str = "vllm") -> int:
    """Returns how many requests loaded something."""
    path.mkdir()
    draw = Random(seed)
    jobs = draw_jobs(draw, 60)
    largest = max(-(-job.prompt_len // BLOCK) for job in jobs)
    is_tight = draw.random() < 0.75 and engine == "vllm"
    blocks = largest + draw.choice((1, 20, 60)) if is_tight else 40 * largest
    tokens = 100_000 if is_tight or engine == "trtllm" else draw.choice((256, 1000))
    requests, replicas = draw.choice((1, 3, 64)), draw.randint(1, 3)
    kinds = draw.choice(((DISK,), (REMOTE,), (DISK, REMOTE)))
    if engine == "trtllm" and REMOTE not in kinds:  # its device forgets nothing: what is found came from others
        kinds, replicas = (REMOTE,), 3
    values: dict[str, Any] = {"kv_tier_write_policy": draw.choice(("write_through", "write_back"))}
    literal_of: type[LiteralTiers] = LiteralTiers
    prefetches = engine == "vllm" and len(kinds) == 2 and draw.random() < 0.5
    if prefetches:
        values["kv_tier_prefetch"] = "wait_complete"
    if engine == "trtllm":
        values = {"kv_tier_write_policy": "write_through", "enable_partial_reuse": False, "tokens_per_block": BLOCK}
        blocks, literal_of = len(jobs) * largest, LiteralConnector
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
        engine=engine,
        enable_kv_cache_reuse=True,
        device=constant_device(path),
        engine_overhead="none",
        async_scheduling=None if engine == "trtllm" else False,
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
    literal = literal_of(
        jobs,
        ITERATION_S,
        (blocks, tokens, requests),
        stores,
        values["kv_tier_write_policy"] == "write_back",
        prefetches,
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
            if not prefetches:  # else it waited for that, too
                assert row["attribution_s"]["transfer"] == pytest.approx(load[1] - load[0], abs=1e-6)
            from_stores = [row[f"{kind}_reused_tokens"] for kind in kinds]
            assert from_stores == times.from_stores[: len(kinds)], row
            num_loads += 1
        assert sum(row["attribution_s"].values()) == pytest.approx(row["e2e_s"], abs=1e-9)
    return num_loads


@pytest.mark.parametrize("engine", ["vllm", "trtllm"])
def test_requests_load_what_a_literal_simulation_loads(engine: str, tmp_path: Path) -> None:
    # 79: what a replica prefetches comes while another one uses the shared store.
    seeds = [*range(12), *([79] if engine == "vllm" else [])]
    assert sum([check_against_literal(seed, tmp_path / str(seed), engine) for seed in seeds]) > 30


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "trtllm"])
@pytest.mark.parametrize("first", range(12, 300, SEEDS_AT_ONCE))
def test_more_requests_load_what_a_literal_simulation_loads(engine: str, first: int, tmp_path: Path) -> None:
    for seed, path in seeds_from(first, 300, tmp_path):
        check_against_literal(seed, path / "run", engine)


def replay(trace: Path, directory: Path, together: bool, **values: Any) -> dict[str, str]:
    """The files of a run on one engine, with fast-forward if `together`."""
    config = config_of(enable_kv_cache_reuse=True, output=str(directory), **values)
    loaded = load_trace(str(trace), config)
    directory.mkdir()
    with engine_for(loaded, config) as engine:
        assert engine.tiers is not None
        client = client_of(loaded, engine)
        recorder = recorder_of(loaded, engine, client, directory, {})
        loop = make_loop(
            engine.limits,
            engine.executor,
            engine.clock,
            client.get_requests,
            client.send_response,
            recorder,
            client.queued,
            next_change=partial(next_change, engine.tiers, client) if together else None,
            loop_class=TransferringLoop,
        )
        assert isinstance(loop, TransferringLoop)
        use_tiers(loop, engine.tiers)
        while not client.done:
            if not loop.step():
                wait(engine, client)
            loop.scheduler.kv_cache.check_consistency()  # type: ignore[attr-defined]
        recorder.close(partial=False)
        figures = json.dumps(engine.tiers.figures())
    return {name: (directory / name).read_text() for name in FILES} | {"figures": figures}


@pytest.mark.parametrize(
    "asked",
    [
        {"engine": "vllm"},
        {"engine": "vllm", "kv_tier_write_policy": "write_back"},
        {"engine": "sglang", **HOST},
        {"engine": "sglang", **HOST, "kv_tier_prefetch": "wait_complete", "kv_disk_bandwidth": 2e8},
        {"engine": "sglang", **HOST, "kv_tier_prefetch": "best_effort", "hicache_write_policy": "write_back"},
        {"engine": "trtllm"},
        {"engine": "trtllm", "overlap": "async", "enable_chunked_context": True, "max_num_tokens": 256},
    ],
    ids=str,
)
def test_iterations_together_write_and_load_what_single_ones_do(asked: dict[str, Any], tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "trace.jsonl", Random(5), 90, sessions=True)
    values = {
        "kv_disk_bytes": 4_000 * BLOCK_BYTES,
        "kv_remote_bytes": 40_000 * BLOCK_BYTES,
        "max_tokens_in_paged_kvcache": 4096,
        "max_batch_size": 12,
        **asked,
    }
    together, single = (replay(trace, tmp_path / str(one), one, **values) for one in (True, False))
    loaded = json.loads(together["figures"])
    assert loaded[DISK]["loaded_tokens"] > 0
    assert together == single


@pytest.mark.parametrize("policy", ["timeout", "wait_complete"])
def test_requests_wait_for_storage_while_others_run_and_while_none_does(policy: str, tmp_path: Path) -> None:
    """A store reads a prefix of 1,536 tokens, which the host no longer has, in 2 s. With `timeout` a request waits for
    1.375 s."""
    known: dict[str, Any] = {"prompt_len": 1600, "output_len": 3, "prefix_ids": [0, 1, 2]}
    others: list[dict[str, Any]] = [
        {"arrival_s": 10.0 * number, "prompt_len": 1600, "output_len": 2} for number in range(1, 9)
    ]
    while_none_runs = {"arrival_s": 100.0} | known
    while_one_runs = [{"arrival_s": 200.0, "prompt_len": 40, "output_len": 900}, {"arrival_s": 200.1} | known]
    more = [{"arrival_s": one["arrival_s"] + 100} for one in others]
    rows = [
        {"arrival_s": 0.0} | known,
        *others,
        while_none_runs,
        *[one | later for one, later in zip(others, more, strict=True)],
    ]
    trace = tmp_path / "trace.jsonl"
    rows = [{"request_id": number} | row for number, row in enumerate([*rows, *while_one_runs])]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "engine": "sglang",
        **HOST,
        "kv_disk_bytes": 40_000 * BLOCK_BYTES,
        "kv_disk_bandwidth": 1e8,
        "kv_tier_prefetch": policy,
        "max_tokens_in_paged_kvcache": 4096,
    }
    together, single = (replay(trace, tmp_path / str(one), one, **values) for one in (True, False))
    assert together == single
    answered = [json.loads(line) for line in together["requests.jsonl"].splitlines()]
    waited_s = [one["transfer_end_s"] - one["transfer_start_s"] for one in answered if "transfer_end_s" in one]
    expected_s = 1.375 if policy == "timeout" else 96 * BLOCK_BYTES / 1e8
    assert waited_s == pytest.approx([expected_s] * 2, abs=0.05)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_comes_for_two_replicas_at_a_time_is_taken_by_both(engine: str, tmp_path: Path) -> None:
    """Two replicas prefetch 96 blocks of a shared store at the same time. Until a last request comes, they cannot know
    when they go on."""
    known: dict[str, Any] = {"prompt_len": 1600, "output_len": 3, "prefix_ids": [0, 1, 2]}
    rows: list[dict[str, Any]] = [{"arrival_s": time_s} | known for time_s in (0.0, 10.0, 10.0)]
    rows = [
        {"request_id": n} | row for n, row in enumerate([*rows, {"arrival_s": 11.0, "prompt_len": 40, "output_len": 1}])
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {"kv_disk_bytes": 10**9} if engine == "vllm" else HOST
    asked: dict[str, Any] = {
        "engine": engine,
        "replicas": 3,
        "router": "round_robin",
        "kv_tier_prefetch": "wait_complete",
        "max_tokens_in_paged_kvcache": 4096,
    }
    values |= asked | {"kv_remote_bytes": 10**12, "kv_remote_bandwidth": 1e8}
    run_trace(str(trace), config_of(output=str(tmp_path / "run"), **values))
    _, one, other, _ = sorted(lines(tmp_path / "run" / "requests.jsonl"), key=lambda row: row["index"])
    assert one["reused_tokens"] == other["reused_tokens"] == 1536
    assert one["queue_time_s"] == other["queue_time_s"] == pytest.approx(2 * 96 * BLOCK_BYTES / 1e8, abs=0.2)


def test_a_fleet_with_stores_gives_the_same_files_again(tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "trace.jsonl", Random(6), 60, sessions=True)
    values = {"kv_remote_bytes": 10**12, "kv_disk_bytes": 10**9, "max_tokens_in_paged_kvcache": 4096}
    for name in ("one", "other"):
        config = config_of(engine="vllm", replicas=2, router="least_tokens", output=str(tmp_path / name), **values)
        run_trace(str(trace), config)
    for number in range(2):
        assert_equal_runs(tmp_path / "one" / f"replica={number}", tmp_path / "other" / f"replica={number}")
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    rows = lines(tmp_path / "one" / "requests.jsonl")
    loaded = sum(row.get("remote_reused_tokens", 0) for row in rows)
    assert summary["kv_tiers"][REMOTE]["loaded_tokens"] >= loaded > 0  # paused requests load again
    for row in rows:
        assert sum(row["attribution_s"].values()) == pytest.approx(row["e2e_s"], abs=1e-9)
        assert row["reused_tokens"] >= row.get("transfer_tokens", 0)


def test_one_replica_with_a_store_is_the_run_without_a_router(tmp_path: Path) -> None:
    trace = str(write_rows(tmp_path / "trace.jsonl", Random(7), 40))
    values = {"engine": "vllm", "kv_remote_bytes": 10**12, "max_tokens_in_paged_kvcache": 4096}
    run_trace(trace, config_of(output=str(tmp_path / "run"), **values))
    run_trace(trace, config_of(router="least_kv", output=str(tmp_path / "fleet"), **values))
    assert_equal_runs(tmp_path / "run", tmp_path / "fleet" / "replica=0")


def test_an_infinitely_quick_store_is_a_larger_cache(tmp_path: Path) -> None:
    """What was computed once is never computed again."""
    trace = str(write_rows(tmp_path / "trace.jsonl", Random(8), 60))
    small = {"engine": "vllm", "max_tokens_in_paged_kvcache": 4096, "arrival": None}
    stored = summarise_run(trace, config_of(kv_disk_bytes=10**12, kv_disk_bandwidth=1e18, kv_disk_latency=0.0, **small))
    ample = summarise_run(trace, config_of(engine="vllm"))
    assert stored["prefix_hit_rate"] == pytest.approx(ample["prefix_hit_rate"], abs=0.02)
    assert summarise_run(trace, config_of(**small))["prefix_hit_rate"] < 0.9 * stored["prefix_hit_rate"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"engine": "trtllm", "kv_disk_bytes": 10**9, "policy": "max_utilization"},
            "needs --policy guaranteed_no_evict",
        ),
        ({"engine": "trtllm", "kv_disk_bytes": 10**9, "overlap": "partitioned"}, "several micro batches are not built"),
        (
            {"engine": "trtllm", "kv_disk_bytes": 10**9, "kv_tier_write_policy": "write_back"},
            "writes what is computed, not what is evicted",
        ),
        ({"engine": "sglang", "kv_remote_bytes": 10**9}, "behind its host memory; add --enable_hierarchical_cache"),
        ({"engine": "sglang", **HOST, "kv_remote_bytes": 10**9, "kv_disk_bytes": 10**9}, "has one storage backend"),
        ({"engine": "sglang", **HOST, "kv_disk_bytes": 10**9, "kv_tier_prefetch": "none"}, "SGLang always prefetches"),
        ({"kv_disk_bytes": 10**9, "kv_tier_prefetch": "timeout"}, "vLLM's connectors have no timeout"),
        ({"kv_disk_bytes": 10**9, "kv_tier_prefetch": "wait_complete"}, "--kv_tier_prefetch needs both"),
        (
            {"engine": "trtllm", "kv_disk_bytes": 10**9, "kv_tier_prefetch": "wait_complete"},
            "loads once a prompt is scheduled",
        ),
        ({"kv_disk_bytes": 10**9, "enable_kv_cache_reuse": False}, "without --enable_kv_cache_reuse"),
        ({"kv_disk_bytes": 10**9, "max_attention_window": "64"}, "attention windows are not built with it"),
        ({"kv_disk_bytes": 10**9, "draft_ngram": 2, "acceptance_rate": "0.5"}, "draft tokens are not built with it"),
        ({"kv_disk_bytes": 1000}, "is less than the 2,097,152 bytes of a block"),
        ({"kv_disk_latency": 0.5}, "--kv_disk_latency: there is no such store; add --kv_disk_bytes"),
        ({"kv_tier_write_policy": "write_back"}, "there is no store; add --kv_disk_bytes or --kv_remote_bytes"),
        ({"kv_disk_bytes": 10**9, "device": "null"}, "loads no blocks"),
        (
            {"engine": "trtllm", **SIDES, "kv_disk_bytes": 10**9, "decode": "kv_disk_bytes=1000000000"},
            "--decode kv_disk_bytes: TensorRT-LLM's KV cache connector is built for prefill replicas only",
        ),
        (
            {"engine": "sglang", **SIDES, **HOST, "kv_disk_bytes": 10**9, "decode": "kv_disk_bytes=1000000000"},
            "--decode kv_disk_bytes: SGLang's storage is built for prefill replicas only",
        ),
        (
            {**SIDES, "kv_remote_bytes": 10**9, "decode": "tokens_per_block=32"},
            "both sides share the remote store, and need the same tokens_per_block",
        ),
        ({**SIDES, "kv_tier_write_policy": "write_back"}, "there is no store on either side; give --kv_disk_bytes"),
        (
            {"engine": "trtllm", **SIDES, "kv_remote_bytes": 10**9, "prefill": "kv_remote_bytes=0"},
            "--kv_remote_bytes: there is no store on either side",
        ),
        ({"kv_remote_bytes": 10**9, "replica_config": "tp.yaml"}, "replicas that share a store"),
    ],
)
def test_what_is_not_built_is_refused(
    values: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tp.yaml").write_text("- {}\n- {tokens_per_block: 32}\n")
    trace = str(write_rows(tmp_path / "trace.jsonl", Random(1), 5))
    with pytest.raises(InputError) as refusal:
        summarise_run(trace, config_of(**{"engine": "vllm", "enable_kv_cache_reuse": True} | values))
    assert expected in str(refusal.value)


def test_what_a_replica_that_fails_has_not_written_never_comes() -> None:
    store = KvStore(REMOTE, capacity=100, block_bytes=10.0, bandwidth=10.0, latency_s=0.5)
    store.write(1, ["a"], (), 0.0)  # there at 1.5 s
    store.write(1, ["b"], (), 0.0)
    store.write(1, ["c"], (), 0.0)
    store.advance(1.9)
    store.write(2, ["d"], (), 1.9)  # shares the link with b
    store.lose_writes(1, 2.0)
    store.advance(1000.0)
    assert [key for key in "abcd" if store.has(key)] == ["a", "d"]
    store.write(2, ["b", "c"], (), 1000.0)  # others may write the same
    store.advance(2000.0)
    assert [key for key in "abcd" if store.has(key)] == ["a", "b", "c", "d"]
    assert store.counters.stored == len(store) == 4


def test_a_store_serves_a_fleet_in_which_a_replica_fails(tmp_path: Path) -> None:
    """The requests of the lost replica find in the store what it had written."""
    trace = write_rows(tmp_path / "trace.jsonl", Random(9), 60, sessions=True)
    (tmp_path / "events.json").write_text(json.dumps([{"at": 1.0, "fail": 0}, {"at": 1.0, "start": 1}]))
    asked = {"engine": "vllm", "replicas": 2, "router": "least_tokens", "max_tokens_in_paged_kvcache": 4096}
    config = config_of(**asked, kv_remote_bytes=10**12, replica_events=str(tmp_path / "events.json"))
    rows = []
    for name in ("one", "other"):
        run_trace(str(trace), config.with_values(output=str(tmp_path / name)))
        rows.append(lines(tmp_path / name / "requests.jsonl"))
    assert rows[0] == rows[1]
    assert all(row["outcome"] == "completed" for row in rows[0])
    assert any(row.get("retries") and row.get("remote_reused_tokens") for row in rows[0])
