"""Prefill and decode apart: held to a literal simulation, and nothing is lost between the two sides."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ifbbench.errors import InputError
from ifbbench.fleet.links import Links, left_after_prefill
from ifbbench.replay import disaggregated
from ifbbench.replay.run import run_trace, summarise_run
from ifbbench.replay.side_replica import SideReplica
from ifbbench.replay.stepped_sides import SteppedSides
from ifbbench.rundir.fleet import replica_directories
from ifbbench.settings.engines import ENGINES
from ifbbench.settings.groups.fleet import ROUTERS, TRANSFERS
from ifbbench.simulated.hardware import load_hardware, write_profile
from tests.fleet.literal_sides import BLOCK, Job, LiteralSglang, LiteralSides, LiteralTrtllm, Sizes
from tests.fleet.test_fleet import FILES, SEEDS_AT_ONCE, config_of, lines, seeds_from, write_rows

ITERATION_S = 0.01
ROUTERS_OF_SIDES = [name for name in ROUTERS if name != "dynamo"]
KV_BYTES, LAYERS = 131_072, 32  # of a token of llama-3.1-8b in bf16, and of the model


# What the errors of requests say that fail with a replica.
LOST = ("failed at", "no prefill replica", "no decode")


def constant_device(path: Path) -> str:
    """A device that takes the same time for each iteration."""
    base = load_hardware("h100-sxm")
    constants = replace(base.constants, kernel_s=0.0, launch_s=0.0, context_s=0.0)
    profile = replace(
        base,
        peak_flops=dict.fromkeys(base.peak_flops, 1e40),
        memory_bandwidth=1e40,
        host_iteration_s=ITERATION_S,
        host_request_s=0.0,
        constants=constants,
    )
    write_profile(profile, path / "constant.toml", "Constant.")
    return str(path / "constant.toml")


def draw_jobs(draw: Random, count: int) -> list[Job]:
    arrival_s, jobs = 0.0, []
    for _ in range(count):
        arrival_s += draw.choice((0.0, 0.0, 0.0013, 0.0217, 0.1003))
        jobs.append(Job(round(arrival_s, 9), draw.randrange(0, 40) * BLOCK + 1, draw.choice((1, 2, 5, 12, 15))))
    return jobs


def draw_sizes(draw: Random, least_blocks: int) -> Sizes:
    return Sizes(
        replicas=draw.randint(1, 3),
        requests=draw.choice((1, 2, 5, 64)),
        tokens=draw.choice((256, 300, 1024)),
        blocks=least_blocks + draw.choice((0, 3, 30, 400)),
        rate=draw.choice((1e11, 40_000.0, 8_000.0)),
    )


def side_text(sizes: Sizes) -> str:
    return (
        f"max_batch_size={sizes.requests},max_num_tokens={sizes.tokens},"
        f"max_tokens_in_paged_kvcache={sizes.blocks * BLOCK}"
    )


def check_against_literal(engine: str, seed: int, path: Path) -> None:
    draw = Random(seed)
    jobs = draw_jobs(draw, 30)
    largest = max(job.blocks for job in jobs)
    prefill, decode = draw_sizes(draw, largest), draw_sizes(draw, largest)
    decode.rate = prefill.rate  # both have the bandwidth of --transfer_bandwidth
    latency_s = draw.choice((0.0, 0.0007))
    values: dict[str, Any] = {"async_scheduling": False}
    literal = LiteralSides(jobs, ITERATION_S, prefill, decode, latency_s)
    if engine == "trtllm":
        values = {"tokens_per_block": BLOCK, "enable_chunked_context": False, "overlap": None}
        prefill.tokens = decode.tokens = 1024  # any prompt is one iteration
        literal = LiteralTrtllm(jobs, ITERATION_S, prefill, decode, latency_s)
    elif engine == "sglang":
        layers = draw.choice((None, LAYERS))
        prefill.blocks, prefill.tokens, decode.tokens = (
            20_000,
            102_400,
            1024,
        )  # only rows limit prefills; tests of the engine see to the rest
        reserved = draw.choice((0, 20, 100))
        decode.blocks += ceil(reserved / BLOCK) + 1
        values = {
            "tokens_per_block": BLOCK,
            "disable_overlap_schedule": True,
            "max_prefill_tokens": 102_400,
            "num_reserved_decode_tokens": reserved,
            "transfer_by": "whole" if layers is None else "layer",
        }
        literal = LiteralSglang(jobs, ITERATION_S, prefill, decode, latency_s, layers)
        literal.reserved_tokens = reserved
    trace = path / "trace.jsonl"
    rows = [
        {"request_id": number, "arrival_s": job.arrival_s, "prompt_len": job.prompt_len, "output_len": job.output_len}
        for number, job in enumerate(jobs)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(
        engine=engine,
        device=constant_device(path),
        engine_overhead="none",
        enable_kv_cache_reuse=False,
        prefill_replicas=prefill.replicas,
        decode_replicas=decode.replicas,
        prefill=side_text(prefill),
        decode=side_text(decode),
        transfer_bandwidth=prefill.rate * KV_BYTES,
        transfer_latency=latency_s,
        output=str(path / "run"),
        **values,
    )
    run_trace(str(trace), config)
    expected = literal.run()
    for row in lines(path / "run" / "requests.jsonl"):
        times = expected[row["index"]]
        found = (row["first_token_s"], row["end_s"], row.get("transfer_end_s"))
        wanted = (times.first_token_s, times.end_s, times.received_s)
        assert found == pytest.approx(wanted, abs=1e-6), (seed, row)
        if engine != "sglang":  # else a transfer begins after the prefill
            assert row.get("transfer_start_s") == pytest.approx(times.reserved_s, abs=1e-6), (seed, row)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(8))
def test_requests_take_the_times_of_a_literal_simulation(engine: str, seed: int, tmp_path: Path) -> None:
    check_against_literal(engine, seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("first", range(8, 300, SEEDS_AT_ONCE))
def test_more_requests_take_the_times_of_a_literal_simulation(engine: str, first: int, tmp_path: Path) -> None:
    for seed, path in seeds_from(first, 300, tmp_path):
        check_against_literal(engine, seed, path)


def fleet_of(path: Path, trace: Path, **values: Any) -> Path:
    given = {"engine": "vllm", "prefill_replicas": 1, "decode_replicas": 1, "output": str(path)} | values
    run_trace(str(trace), config_of(**given))
    return path


def check_nothing_is_lost(
    trace: Path, fleet: Path, num_prefill: int, reserves_first: bool, error: str | None = None
) -> None:
    """Each request ends once, in order of time; the parts of its time add up; and each side has what it was sent.

    error: with which requests may fail, "" for any. A replica has the line of a request that ended there for each time
    that it got it."""
    asked, ended = lines(trace), lines(fleet / "requests.jsonl")
    assert sorted(row["request_id"] for row in ended) == [row["request_id"] for row in asked]
    directories = replica_directories(fleet)
    of_replicas = [
        {row["request_id"]: row for row in lines(path / "requests.jsonl") if row["outcome"] != "stopped"}
        for path in directories
    ]
    sent, completed = 0, [row for row in ended if row["outcome"] == "completed"]
    for row in ended:
        if row["outcome"] == "failed":
            assert error is not None
            assert error in row["error"]
            sent += row.get("transfer_tokens", 0)
            continue
        whole, prefill, decode = asked[row["index"]], row["prefill_replica"], row["decode_replica"]
        assert whole["request_id"] == row["request_id"]
        assert row["output_len"] == whole["output_len"]
        assert row["arrival_s"] <= row["first_scheduled_s"] <= row["first_token_s"] <= row["end_s"]
        assert sum(row["attribution_s"].values()) == pytest.approx(row["e2e_s"])
        assert min(row["attribution_s"].values()) >= 0
        for number, directory in enumerate(of_replicas if "retries" not in row else ()):
            assert (row["request_id"] in directory) == (number in (prefill, decode))
        if prefill is not None and decode is not None:
            first, second = of_replicas[prefill][row["request_id"]], of_replicas[decode][row["request_id"]]
            assert row["first_scheduled_s"] < row["transfer_start_s"] <= row["transfer_end_s"] == second["arrival_s"]
            if not reserves_first:  # else the answer of the prefill replica is on its way, too
                assert first["end_s"] <= row["transfer_start_s"]
            assert first["output_len"] == 1
            assert 0 < row["transfer_tokens"] <= row["prompt_len"]
            assert row["transfer_tokens"] == row["prompt_len"] - second["reused_tokens"]
            sent += row["transfer_tokens"]
    ends = [row["end_s"] for row in completed]
    assert ends == sorted(ends)
    summary = json.loads((fleet / "summary.json").read_text())
    assert summary["requests"]["completed"] == len(completed)
    assert summary["output_tokens"] == sum(row["output_len"] for row in completed)
    transfers = summary["fleet"]["transfers"]
    assert transfers["tokens"] == sent
    assert transfers["bytes"] == sent * KV_BYTES
    assert transfers["local_requests"] == sum(row.get("prefill_replica", 0) is None for row in ended)
    for number, path in enumerate(directories):
        check_times_and_blocks(path, is_prefill=number < num_prefill)


def check_times_and_blocks(path: Path, is_prefill: bool) -> None:
    """No iteration begins before the one before it, and no more blocks are in use than there are."""
    before_s = 0.0
    for row in lines(path / "iterations.jsonl"):
        assert before_s <= row["ifbbench"]["start_s"]
        before_s = row["ifbbench"]["start_s"]
        assert 0 <= row["Used KV cache blocks"] <= row["Max KV cache blocks"]
        assert not (is_prefill and row["Generation Requests"])


class CheckedSides(SteppedSides):
    """At the end no replica holds a block, and nothing is on its way."""

    def run(self) -> None:
        super().run()
        assert not self._passages
        # Where a side has failed as a whole, nothing is left to count when the last requests leave the other one.
        counts = all(not all(one.has_failed for one in side) for side in (self.prefill, self.decode))
        for one in self.replicas:
            if one.has_failed:
                continue
            assert not one.client.open
            assert one.view.requests == one.view.tokens == 0 or not counts
            cache: Any = one.loop.scheduler.kv_cache  # type: ignore[attr-defined]
            cache.check_consistency()
            assert cache.num_used == 0
            assert getattr(cache, "filled_positions", 0) == getattr(cache, "filled_tokens", 0) == 0
            assert one.loop.scheduler.table.num_transferring == 0
            assert not one.loop.scheduler.table.requests
            assert not one.mail.held
            assert not one.mail.has_news


OF_ENGINE: dict[str, Callable[[Random], dict[str, Any]]] = {
    "vllm": lambda draw: {
        "async_scheduling": draw.choice((True, False)),
        "scheduling_policy": draw.choice(("fcfs", "priority")),
    },
    "sglang": lambda draw: {
        "disable_overlap_schedule": draw.choice((True, False)),
        "enable_mixed_chunk": draw.choice((True, False, False)),
        "tokens_per_block": draw.choice((1, 16)),
        "num_reserved_decode_tokens": draw.choice((0, 128, 512)),
        "enable_priority_scheduling": draw.choice((True, False)),
    },
    "trtllm": lambda draw: {
        "pp_size": draw.choice((1, 1, 2)),
        "policy": draw.choice(("guaranteed_no_evict", "max_utilization")),
        "overlap": draw.choice((None, "async", "partitioned")),
        "enable_chunked_context": draw.choice((True, False)),
    },
}


def draw_sides(draw: Random, engine: str) -> dict[str, Any]:
    """Settings of a fleet with prefill and decode apart."""
    values: dict[str, Any] = {
        "prefill_replicas": draw.randint(1, 3),
        "decode_replicas": draw.randint(1, 3),
        "router": draw.choice(ROUTERS_OF_SIDES),
        "decode_router": draw.choice((None, *ROUTERS_OF_SIDES)),
        "disaggregate_from": draw.choice((0, 0, 300, 10_000)),
        "transfer_bandwidth": draw.choice((None, 2e9, 2e10, 1e17)),
        "transfer_latency": draw.choice((None, 0.0, 0.02)),
        "engine_overhead": draw.choice(("none", "tensorrt-llm" if engine == "trtllm" else engine)),
        "enable_kv_cache_reuse": draw.choice((True, False)),
        "concurrency": draw.choice((None, None, 7)),
        "transfer_by": draw.choice(TRANSFERS),
        **OF_ENGINE[engine](draw),
    }
    for side in ("prefill", "decode"):
        tokens = draw.choice((3_200, 6_400, 64_000))
        values[side] = f"max_batch_size={draw.choice((1, 3, 64))},max_tokens_in_paged_kvcache={tokens}"
    return values


def check_random_fleet(seed: int, path: Path, engine: str = "vllm", fails: bool = False) -> None:
    draw = Random(f"sides {seed}{' fail' * fails}")
    trace = write_rows(path / "trace.jsonl", draw, 40, sessions=draw.random() < 0.3, priorities=draw.random() < 0.3)
    values = draw_sides(draw, engine)
    if fails:
        values |= draw_failures(draw, path, values["prefill_replicas"] + values["decode_replicas"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disaggregated, "SteppedSides", CheckedSides)
        fleet_of(path / "fleet", trace, engine=engine, **values)
    reserves_first = engine == "sglang" or values["transfer_by"] == "layer"
    # With nothing reserved, requests that hold pages before they run may leave no room for one that runs, as in SGLang.
    error = "although no other request runs" if values.get("num_reserved_decode_tokens") == 0 else None
    check_nothing_is_lost(trace, path / "fleet", values["prefill_replicas"], reserves_first, "" if fails else error)
    if fails:
        check_failures(path / "fleet", values["request_retries"], (*LOST, error) if error else LOST)


def draw_failures(draw: Random, path: Path, replicas: int) -> dict[str, Any]:
    """Replicas of either side fail and drain."""
    events = [
        {"at": draw.choice((0.0, 0.2, 0.7, 1.5, draw.random())), draw.choice(("fail", "fail", "drain")): number}
        for number in draw.choices(range(replicas), k=draw.randint(1, 3))
    ]
    (path / "events.json").write_text(json.dumps(events))
    return {"replica_events": str(path / "events.json"), "request_retries": draw.choice((0, 1, 5))}


def check_failures(fleet: Path, retries: int, errors: Sequence[str] = LOST) -> None:
    """What was lost is counted, and only then, or with one of these errors, a request fails."""
    ended, summary = lines(fleet / "requests.jsonl"), json.loads((fleet / "summary.json").read_text())
    events, replicas = summary["fleet"].get("events", []), summary["fleet"]["replicas"]
    failures = [one for one in events if one["event"] == "fail"]
    lost = [row for row in ended if row["outcome"] == "failed" and "failed at" in row["error"]]
    assert sum(one["lost"] for one in failures) == len(lost)
    assert sum(one["retried"] for one in failures) >= sum(row.get("retries", 0) for row in ended) - len(lost)
    for row in ended:
        assert row.get("retries", 0) <= retries
        if row["outcome"] == "failed":
            assert any(error in row["error"] for error in errors)
        for number in (row.get("prefill_replica"), row.get("decode_replica")):
            if number is not None and events and row["outcome"] == "completed":
                sent_s = row["arrival_s"] + row["attribution_s"].get("router", 0.0)
                assert replicas[number]["ended_by"] != "fail" or row["first_scheduled_s"] <= replicas[number]["ended_s"]
                assert sent_s < row["end_s"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_when_replicas_of_a_side_fail(engine: str, seed: int, tmp_path: Path) -> None:
    check_random_fleet(seed, tmp_path, engine, fails=True)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("first", range(6, 200, SEEDS_AT_ONCE))
def test_nothing_is_lost_when_replicas_of_more_fleets_fail(engine: str, first: int, tmp_path: Path) -> None:
    for seed, path in seeds_from(first, 200, tmp_path):
        check_random_fleet(seed, path, engine, fails=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_between_the_sides(engine: str, seed: int, tmp_path: Path) -> None:
    check_random_fleet(seed, tmp_path, engine)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("first", range(6, 200, SEEDS_AT_ONCE))
def test_nothing_is_lost_between_the_sides_of_more_fleets(engine: str, first: int, tmp_path: Path) -> None:
    for seed, path in seeds_from(first, 200, tmp_path):
        check_random_fleet(seed, path, engine)


class CountingSides(SteppedSides):
    """Counts the steps of all replicas."""

    steps = 0

    def _step(self, one: SideReplica, now_s: float, known_s: float) -> None:
        CountingSides.steps += 1
        super()._step(one, now_s, known_s)


def check_iterations_at_once(seed: int, path: Path, engine: str, of_sides: str = "") -> None:
    """Iterations that run together, and are interrupted, leave the files that they leave one by one. of_sides: more
    settings of both sides."""
    draw = Random(f"at once {seed}")
    trace = write_rows(path / "trace.jsonl", draw, 40, sessions=draw.random() < 0.3, priorities=draw.random() < 0.3)
    values = draw_sides(draw, engine)
    if seed % 2:  # so that iterations of several replicas begin at the same time
        values |= {"device": constant_device(path), "engine_overhead": "none", "transfer_latency": 0.0}
    if seed % 3 == 2:
        values |= draw_failures(draw, path, values["prefill_replicas"] + values["decode_replicas"])
    values |= {side: values[side] + of_sides for side in ("prefill", "decode")}
    if of_sides:  # ranks have no pipelines
        values = {name: value for name, value in values.items() if name != "pp_size" and value != "partitioned"}
    steps = check_single_iterations(path, trace, values | {"engine": engine})
    # Plans of TensorRT-LLM and SGLang may never repeat (micro batches, dropped blocks, a queue that is always tried),
    # and replicas that fail may run none.
    assert steps[0] < steps[1] or ((engine != "vllm" or not steps[1]) and steps[0] == steps[1])


def check_single_iterations(path: Path, trace: Path, values: dict[str, Any]) -> list[int]:
    """The files of a fleet are those of single iterations; returns how many steps both took."""
    files, steps = list[dict[str, bytes]](), list[int]()
    for name, count in (("together", 1024), ("one by one", 1)):
        CountingSides.steps = 0
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(disaggregated, "SteppedSides", CountingSides)
            patched.setattr("ifbbench.engine.predicted_loop.MAX_ITERATIONS_AT_ONCE", count)
            fleet = fleet_of(path / name, trace, **values)
        written = [found for found in sorted(fleet.rglob("*")) if found.is_file() and found.name != "run.json"]
        files.append({str(found.relative_to(fleet)): found.read_bytes() for found in written})
        steps.append(CountingSides.steps)
    assert files[0].keys() == files[1].keys()
    assert [name for name, content in files[0].items() if content != files[1][name]] == []
    return steps


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(3))
def test_iterations_at_once_leave_the_files_of_single_ones(engine: str, seed: int, tmp_path: Path) -> None:
    check_iterations_at_once(seed, tmp_path, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_run_many_iterations_at_once(engine: str, tmp_path: Path) -> None:
    check_iterations_at_once(0, tmp_path, engine, ",tp_size=2,attention_dp_size=2")


def test_the_blocks_of_a_request_whose_prefill_fails_are_for_others(tmp_path: Path) -> None:
    # The last request waits for the blocks of one that a rank of the prefill side refuses.
    check_iterations_at_once(37, tmp_path, "vllm", ",tp_size=2,attention_dp_size=2")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("first", range(3, 70, SEEDS_AT_ONCE))
def test_more_ranks_run_many_iterations_at_once(engine: str, first: int, tmp_path: Path) -> None:
    for seed, path in seeds_from(first, 70, tmp_path):
        check_iterations_at_once(seed, path, engine, ",tp_size=2,attention_dp_size=2")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("first", range(3, 70, SEEDS_AT_ONCE))
def test_more_iterations_at_once_leave_the_files_of_single_ones(engine: str, first: int, tmp_path: Path) -> None:
    for seed, path in seeds_from(first, 70, tmp_path):
        check_iterations_at_once(seed, path, engine)


@pytest.mark.parametrize("reuse", [True, False])
def test_pipeline_stages_run_many_iterations_at_once(reuse: bool, tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "trace.jsonl", Random(3), 30)
    policy = "guaranteed_no_evict" if reuse else "max_utilization"
    values = {"engine": "trtllm", "pp_size": 2, "enable_kv_cache_reuse": reuse, "policy": policy}
    steps = check_single_iterations(tmp_path, trace, values)
    assert steps[0] < 0.7 * steps[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_settings_give_the_same_files(engine: str, tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "trace.jsonl", Random(4), 40, sessions=True)
    values: dict[str, Any] = {
        "engine": engine,
        "prefill_replicas": 2,
        "decode_replicas": 2,
        "router": "least_kv",
        "disaggregate_from": 100,
    }
    one, other = (fleet_of(tmp_path / name, trace, **values) for name in ("one", "other"))
    for name in ("requests.jsonl", "summary.json", "trace.jsonl"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    for first, second in zip(replica_directories(one), replica_directories(other), strict=True):
        for name in FILES:
            assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_no_request_of_a_prefill_replica_stands_aside_for_prompts(tmp_path: Path) -> None:
    """Under SGLang a running request does, but one whose keys and values are sent on never decodes there."""
    trace = write_rows(tmp_path / "trace.jsonl", Random(6), 40)
    fleet = fleet_of(tmp_path / "fleet", trace, engine="sglang")
    ran = lines(fleet / "replica=0" / "iterations.jsonl")
    assert max(row["Active Request Count"] for row in ran) > 1
    assert "prefill" not in {row["ifbbench"]["bound_by"] for row in ran}


def test_figures_without_files_are_those_of_the_run(tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "trace.jsonl", Random(5), 30)
    fleet = fleet_of(tmp_path / "fleet", trace, decode_replicas=2)
    config = config_of(engine="vllm", prefill_replicas=1, decode_replicas=2)
    assert summarise_run(str(trace), config) == json.loads((fleet / "summary.json").read_text())


@pytest.mark.parametrize("engine", ENGINES)
def test_one_request_at_a_time_takes_what_its_parts_take(engine: str, tmp_path: Path) -> None:
    """With transfers that take no time, a request takes what it takes on one engine, and under vLLM a step more: the
    decode replica computes the last token of the prompt again."""
    rows = [
        {
            "request_id": number,
            "arrival_s": 10.0 * number,
            "prompt_len": 100 + 700 * number,
            "output_len": 2 + 9 * number,
        }
        for number in range(4)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more: dict[str, Any] = {"engine": engine, "engine_overhead": "none"}
    if engine == "sglang":  # else the first step after an idle time is longer
        more["disable_overlap_schedule"] = True
    fleet = fleet_of(tmp_path / "fleet", trace, transfer_bandwidth=1e18, transfer_latency=0.0, **more)
    run_trace(str(trace), config_of(output=str(tmp_path / "run"), **more))
    decoded = lines(fleet / "replica=1" / "requests.jsonl")
    ended, plain = lines(fleet / "requests.jsonl"), lines(tmp_path / "run" / "requests.jsonl")
    for row, second, whole in zip(ended, decoded, plain, strict=True):
        assert row["output_len"] == second["output_len"] == whole["output_len"]
        assert row["e2e_s"] == pytest.approx(whole["e2e_s"] + second["ttft_s"], abs=1e-8)
        assert (second["ttft_s"] > 0.001) == (engine == "vllm")  # else the first token has come with the prompt
        assert row["ttft_s"] == pytest.approx(whole["ttft_s"] + second["ttft_s"], abs=1e-8)
        assert row["tpot_s"] == pytest.approx(whole["tpot_s"], rel=1e-6)


def test_a_prefill_replica_is_a_run_of_the_requests_that_it_got(tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "trace.jsonl", Random(6), 40)
    fleet = fleet_of(tmp_path / "fleet", trace, prefill_replicas=2, decode_replicas=1)
    for number in range(2):
        again = tmp_path / f"again-{number}"
        run_trace(str(fleet / f"replica={number}"), config_of(engine="vllm", output=str(again)))
        assert lines(again / "requests.jsonl") == lines(fleet / f"replica={number}" / "requests.jsonl")


def test_a_prefill_replica_admits_what_the_answer_to_a_refused_prompt_lets_arrive(tmp_path: Path) -> None:
    """The next turn of a session arrives at the very time of that answer, and runs in the iteration that begins then,
    as in a run of the replica alone."""
    for seed in (4, 17):
        draw = Random(f"turns {seed}")
        trace = write_rows(tmp_path / f"trace-{seed}.jsonl", draw, 60, sessions=True)
        fleet = fleet_of(tmp_path / f"fleet-{seed}", trace, prefill="max_seq_len=1600", engine_overhead="none")
        again = tmp_path / f"again-{seed}"
        config = config_of(engine="vllm", max_seq_len=1600, engine_overhead="none", output=str(again))
        run_trace(str(fleet / "replica=0"), config)
        ended = lines(fleet / "replica=0" / "requests.jsonl")
        assert any(row["outcome"] == "failed" for row in ended)
        assert lines(again / "requests.jsonl") == ended


@pytest.mark.parametrize("engine", ENGINES)
def test_short_prompts_stay_on_the_decode_side(engine: str, tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "trace.jsonl", Random(7), 40)
    keeps = {"enable_kv_cache_reuse": True, "decode": "enable_kv_cache_reuse=true"}
    fleet = fleet_of(tmp_path / "fleet", trace, engine=engine, disaggregate_from=600, **keeps)
    for row in lines(fleet / "requests.jsonl"):
        if row["prompt_len"] < 600:
            assert row["prefill_replica"] is None
            assert row["decode_replica"] == 1
        if not lines(trace)[row["index"]].get("prefix_ids"):
            assert (row["prefill_replica"] is None) == (row["prompt_len"] < 600)
    all_local = fleet_of(tmp_path / "local", trace, engine=engine, disaggregate_from=100_000, **keeps)
    run_trace(str(trace), config_of(engine=engine, enable_kv_cache_reuse=True, output=str(tmp_path / "run")))
    for name in FILES:
        assert (all_local / "replica=1" / name).read_bytes() == (tmp_path / "run" / name).read_bytes(), name


def test_requests_that_are_refused_release_what_they_hold(tmp_path: Path) -> None:
    """The KV cache of the prefill replica is too small for some, that of the decode replica for others."""
    rows = [
        {"request_id": number, "arrival_s": 0.01 * number, "prompt_len": 200 + 400 * (number % 4), "output_len": 30}
        for number in range(16)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = "max_tokens_in_paged_kvcache={}"
    fleet = fleet_of(tmp_path / "fleet", trace, prefill=small.format(1_300), decode=small.format(900))
    ended = {row["request_id"]: row for row in lines(fleet / "requests.jsonl")}
    for number, row in ended.items():
        assert row["outcome"] == ("failed" if number % 4 > 1 else "completed")
        assert (row["decode_replica"] is None) == (number % 4 == 3)
    last = lines(fleet / "replica=0" / "iterations.jsonl")[-1]
    assert last["Used KV cache blocks"] == 63  # what its prompt holds: those of the others were released
    summary = json.loads((fleet / "summary.json").read_text())
    assert summary["requests"] == {"total": 16, "completed": 8, "failed": 8}


@pytest.mark.parametrize("engine", ["trtllm", "sglang"])
@pytest.mark.parametrize("transfer_by", TRANSFERS)
def test_requests_that_one_side_refuses_fail_once(engine: str, transfer_by: str, tmp_path: Path) -> None:
    """Also where the other side has blocks for them, or has not heard of them."""
    rows = [
        {"request_id": number, "arrival_s": 0.01 * number, "prompt_len": 200 + 400 * (number % 4), "output_len": 30}
        for number in range(16)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for large, small in (("prefill", "decode"), ("decode", "prefill")):
        sides: dict[str, Any] = {small: "max_tokens_in_paged_kvcache=1184", large: "max_tokens_in_paged_kvcache=64000"}
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(disaggregated, "SteppedSides", CheckedSides)
            fleet = fleet_of(tmp_path / small, trace, engine=engine, transfer_by=transfer_by, **sides)
        ended = {row["request_id"]: row for row in lines(fleet / "requests.jsonl")}
        assert sorted(ended) == list(range(16))
        for number, row in ended.items():
            assert row["outcome"] == (
                "failed" if number % 4 > 2 - (small == "decode" and engine == "sglang") else "completed"
            )


def test_sglang_keeps_what_is_retracted_in_host_memory(tmp_path: Path) -> None:
    """With nothing reserved, answers outgrow the cache of the decode replica: it retracts requests, which go on with
    the tokens that they have, and none is computed again."""
    rows = [{"request_id": number, "arrival_s": 0.0, "prompt_len": 200, "output_len": 120} for number in range(12)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    decode = "max_tokens_in_paged_kvcache=1600"
    values: dict[str, Any] = {"engine": "sglang", "num_reserved_decode_tokens": 0, "decode": decode}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disaggregated, "SteppedSides", CheckedSides)
        fleet = fleet_of(tmp_path / "fleet", trace, **values)
    ended = lines(fleet / "requests.jsonl")
    assert sum(row["pauses"] for row in ended) > 0
    assert all(row["output_len"] == 120 and row["recomputed_tokens"] == 0 for row in ended)
    reserving = fleet_of(tmp_path / "reserving", trace, **values | {"num_reserved_decode_tokens": 130})
    assert sum(row["pauses"] for row in lines(reserving / "requests.jsonl")) == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_prefills_wait_for_blocks_of_the_decode_side(engine: str, tmp_path: Path) -> None:
    """Back-pressure: the decode replica has room for one prompt."""
    rows = [{"request_id": number, "arrival_s": 0.0, "prompt_len": 1000, "output_len": 20} for number in range(6)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    decode = "max_tokens_in_paged_kvcache=1536"
    fleet = fleet_of(tmp_path / "fleet", trace, engine=engine, decode=decode)
    ended = sorted(lines(fleet / "requests.jsonl"), key=lambda row: float(row["transfer_start_s"]))
    for before, after in pairwise(ended):
        assert before["end_s"] <= after["transfer_end_s"]
        assert after["attribution_s"]["waiting_decode_blocks"] > 0.05
        # Under SGLang the prompt waits, else its blocks do.
        assert (after["first_scheduled_s"] >= before["end_s"] - 0.01) == (engine == "sglang")


@pytest.mark.parametrize("engine", ["trtllm", "vllm"])
def test_a_prefill_replica_has_room_for_prompts_in_transfer_beside_a_full_batch(engine: str, tmp_path: Path) -> None:
    """Its batch is one prompt, a transfer takes as long as several, and no prompt waits for the blocks of another."""
    rows = [{"request_id": number, "arrival_s": 0.0, "prompt_len": 1000, "output_len": 2} for number in range(8)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fleet = fleet_of(
        tmp_path / "fleet", trace, engine=engine, prefill="max_batch_size=1,max_seq_len=1024", transfer_bandwidth=1e9
    )
    used = [line["Used KV cache blocks"] for line in lines(fleet / "replica=0" / "iterations.jsonl")]
    block = 16 if engine == "vllm" else 32
    assert max(used) > 4 * ceil(1000 / block)
    for row in lines(fleet / "requests.jsonl"):
        assert row["attribution_s"].get("waiting_kv_blocks", 0.0) == 0.0


def test_each_part_of_a_prefill_replica_gets_one_prompt_while_others_are_sent(tmp_path: Path) -> None:
    """Parts wait for the one with most tokens: equal prompts, one for each part, take one time."""
    rows = [{"request_id": number, "arrival_s": 0.001, "prompt_len": 1000, "output_len": 2} for number in range(20)]
    # It runs alone, within the budget of a rank, and is still sent when the others come.
    rows[0] |= {"arrival_s": 0.0, "prompt_len": 2000}
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_prefill = "tp_size=4,attention_dp_size=4,max_batch_size=4"
    fleet = fleet_of(
        tmp_path / "fleet",
        trace,
        engine="trtllm",
        model="qwen3-30b-a3b",
        prefill=of_prefill,
        decode="tp_size=4",
        transfer_bandwidth=1e9,
    )
    iterations = lines(fleet / "replica=0" / "iterations.jsonl")
    device_ms = [line["ifbbench"]["device_ms"] for line in iterations if line["Context Requests"] == 4]
    assert len(device_ms) == 4
    assert max(device_ms) == pytest.approx(min(device_ms))


def test_what_is_left_of_a_transfer_by_layer() -> None:
    assert left_after_prefill(320, 32, rate=1e6, computing_s=0.1) == 10  # the last layer
    assert left_after_prefill(320, 32, rate=0.0, computing_s=0.1) == 320
    assert left_after_prefill(320, 32, rate=1600.0, computing_s=0.1) == pytest.approx(320 - 155)  # a slow link
    assert left_after_prefill(320, 1, rate=1e6, computing_s=0.1) == 320


def test_links_share_their_bandwidth() -> None:
    links = Links([10.0, 10.0], [10.0], 0.5)
    links.send(1, 1, 0, 5, 1.0)  # a transfer may be sent before it begins
    links.send(0, 0, 0, 20, 0.0)
    assert links.next_s == 0.0
    assert links.take(0.0) == []
    assert links.next_s == 1.0
    assert links.take(1.0) == []
    assert links.next_s == 2.0  # 10 tokens of the first are left, and both have half of the link
    assert links.take(2.0) == []
    assert links.next_s == 2.5  # the second has left at 2.0, and the first has 5 tokens left
    assert links.take(2.5) == [1]
    assert links.take(3.0) == [0]
    assert links.next_s == float("inf")


BAD = [
    ({"decode_replicas": 0}, "--prefill_replicas 1: needs --decode_replicas"),
    ({"replicas": 2}, "--replicas: is a fleet of replicas that do both"),
    ({"prefill": "seed=3"}, "--prefill seed: both sides have it in common"),
    ({"prefill": "tp_size=2,tp_size=1"}, "--prefill gives tp_size twice"),
    ({"decode": "max_batch_size=0"}, "--decode: --max_batch_size is '0'"),
    ({"prefill": "batch=3"}, "--prefill: 'batch' is not a setting"),
    ({"engine": "trtllm", "type": "v1"}, "--type v1, --kv_cache_type contiguous: are not built"),
    ({"transfer_by": "block"}, "--transfer_by is 'block'"),
    ({"router_state_age": 1.0}, "--router_state_age: no router reads states"),
    ({"draft_len": 2, "acceptance_rate": "0.5"}, "drafts are not sent"),
]


@pytest.mark.parametrize(("values", "message"), BAD)
def test_settings_that_do_not_fit_are_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "trace.jsonl", Random(8), 3)
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        fleet_of(tmp_path / "fleet", trace, **values)
    assert not (tmp_path / "fleet").exists()


def test_settings_of_sides_need_sides(tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "trace.jsonl", Random(8), 3)
    with pytest.raises(InputError, match="--decode_router: is for a fleet with --prefill_replicas"):
        run_trace(str(trace), config_of(engine="vllm", replicas=2, decode_router="random", output=str(tmp_path / "f")))
