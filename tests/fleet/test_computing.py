"""Fleets whose replicas compute on the CPU: the tokens are those of one engine, whatever moves, fails or is killed."""

import json
import os
import signal
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from ifbbench.engine.batch import Batch, BlockCopy, CopyKind
from ifbbench.engine.pickling import dumps, loads
from ifbbench.engine.plan import ContextChunk
from ifbbench.engine.request import Request, RequestTable
from ifbbench.engine.sampling_params import SamplingParams
from ifbbench.engine.sent_batches import BatchReader, SentBatch
from ifbbench.errors import InputError
from ifbbench.fleet.links import MeasuredLinks
from ifbbench.fleet.router import Replica, RoutedRequest, Router
from ifbbench.replay import disaggregated
from ifbbench.replay.replica_processes import process_of
from ifbbench.replay.run import run_trace
from ifbbench.rundir.fleet import replica_directories
from tests.fleet.test_disaggregated import CheckedSides
from tests.fleet.test_fleet import config_of, lines
from tests.report.test_schema import check

# One thread, because threads of several processes that wait for each other would take the cores.
CPU: dict[str, Any] = {"device": "cpu", "model": "tiny", "cpu_threads": 1, "max_batch_size": 8, "warm_up": 0}
SMALL: dict[str, Any] = {"max_tokens_in_paged_kvcache": 4096, "enable_kv_cache_reuse": True}


def write_load(path: Path, seed: int, count: int = 24) -> str:
    """Requests in bursts, many of which share the beginnings of their prompts."""
    draw, arrival_s, rows = Random(seed), 0.0, list[dict[str, Any]]()
    beginnings = [[draw.randrange(3, 4096) for _ in range(130)] for _ in range(3)]
    for number in range(count):
        arrival_s += draw.choice((0.0, 0.0, 0.005, 0.02))
        tokens = draw.choice(beginnings)[: draw.choice((0, 0, 33, 64, 96, 130))]
        tokens = tokens + [draw.randrange(3, 4096) for _ in range(draw.randint(1, 120))]
        output_len = draw.choice((1, 2, 5, 12, 20))
        row = {"request_id": number, "arrival_s": arrival_s, "prompt_tokens": tokens, "output_len": output_len}
        rows.append(row | {"prompt_len": len(tokens), "max_new_tokens": output_len})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(trace: str, output: Path, **values: Any) -> tuple[dict[str, Any], dict[int, list[int]]]:
    """The summary of a run, and the tokens of its requests."""
    tokens = output.with_suffix(".json")
    config = config_of(**CPU | SMALL | values, output=str(output), responses_json=str(tokens))
    summary = run_trace(trace, config).summary
    check(output)
    return summary, {one["response_id"]: one["response_tokens"] for one in json.loads(tokens.read_text())}


def processes_of_replicas() -> list[int]:
    """The ids of the processes of replicas that this process has started, in order."""
    children = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).split()
    return sorted(
        int(child) for child in children if b"replica_processes" in Path(f"/proc/{child}/cmdline").read_bytes()
    )


class Killing(Router):
    """In turn; once it has sent half of its requests, it kills the process of the second replica."""

    looks_at = frozenset(("requests",))
    killed = 1

    def choose(self, request: RoutedRequest, replicas: Any) -> Replica:
        if request.number == 12:
            os.kill(processes_of_replicas()[self.killed], signal.SIGKILL)
        one: Replica = replicas[request.number % len(replicas)]
        return one


def test_a_replica_that_is_killed(tmp_path: Path) -> None:
    """The process of a replica is killed: its requests are sent again, and all get the tokens of one engine."""
    trace = write_load(tmp_path / "trace.jsonl", 1)
    _, alone = run(trace, tmp_path / "one", engine="vllm")
    asked = {"engine": "vllm", "replicas": 2, "router": "tests.fleet.test_computing:Killing"}
    summary, tokens = run(trace, tmp_path / "fleet", **asked)

    assert tokens == alone
    assert len(tokens) == 24
    assert summary["requests"] == {"total": 24, "completed": 24, "failed": 0}
    assert not processes_of_replicas()
    (killed,) = summary["fleet"]["events"]
    assert (killed["event"], killed["replica"]) == ("fail", 1)
    assert killed["reason"].startswith("the process of replica 1 was killed by SIGKILL")
    requests = lines(tmp_path / "fleet" / "requests.jsonl")
    assert killed["retried"] == sum(line.get("retries", 0) for line in requests) > 0
    for line in requests:
        assert sum(line["attribution_s"].values()) == pytest.approx(line["e2e_s"])


@pytest.mark.slow
def test_without_retries_the_requests_of_a_killed_replica_fail(tmp_path: Path) -> None:
    trace = write_load(tmp_path / "trace.jsonl", 1)
    asked = {"replicas": 2, "router": "tests.fleet.test_computing:Killing", "request_retries": 0}
    summary, tokens = run(trace, tmp_path / "fleet", **asked)
    (killed,) = summary["fleet"]["events"]
    failed = [line for line in lines(tmp_path / "fleet" / "requests.jsonl") if line["outcome"] != "completed"]
    assert killed["lost"] == len(failed) == summary["requests"]["failed"] > 0
    assert len(tokens) == 24 - len(failed)
    assert all("replica 1 failed at" in line["error"] for line in failed)


@pytest.mark.parametrize(("engine", "model"), [("vllm", "tiny"), ("trtllm", "tiny-mla"), ("sglang", "tiny")])
def test_keys_and_values_move_between_processes(engine: str, model: str, tmp_path: Path) -> None:
    trace = write_load(tmp_path / "trace.jsonl", 2)
    chunked = {"engine": engine, "model": model, "max_num_tokens": 64, "enable_chunked_context": True}
    _, alone = run(trace, tmp_path / "one", **chunked)
    sides: dict[str, Any] = {"prefill_replicas": 1, "decode_replicas": 1, "decode": "max_tokens_in_paged_kvcache=320"}
    if engine == "sglang":
        sides |= {"num_reserved_decode_tokens": 0, "decode": f"{sides['decode']},enable_kv_cache_reuse=true"}
    summary, tokens = run(trace, tmp_path / "fleet", **chunked, **sides)
    assert tokens == alone
    assert len(tokens) == 24
    check_transfers(summary, tmp_path / "fleet", {"tiny": 4 * 2 * 4 * 32 * 4, "tiny-mla": 0}[model])


def check_transfers(summary: dict[str, Any], fleet: Path, bytes_per_token: int) -> None:
    """What was sent is in the records, and took time; the parts of each request's latency add up."""
    requests = lines(fleet / "requests.jsonl")
    sent = [line for line in requests if "transfer_tokens" in line]
    assert {line["request_id"] for line in sent} == {one["request_id"] for one in requests if one["output_len"] > 1}
    transfers = summary["fleet"]["transfers"]
    assert transfers["count"] == len(sent) > 0
    assert transfers["tokens"] == sum(line["transfer_tokens"] for line in sent)
    assert transfers["tokens"] < sum(line["prompt_len"] for line in sent)  # what the decode replica holds is not sent
    assert bytes_per_token in (0, transfers["bytes"] / transfers["tokens"])
    assert transfers["bytes"] > 0
    for line in requests:
        assert sum(line["attribution_s"].values()) == pytest.approx(line["e2e_s"])
        assert line.get("transfer_end_s", 1.0) > line.get("transfer_start_s", 0.0)
    prefill, decode = replica_directories(fleet)[0], replica_directories(fleet)[-1]
    assert all(line["output_len"] == 1 for line in lines(prefill / "requests.jsonl"))
    assert len(lines(decode / "requests.jsonl")) > 0


def sides_of(kills_prefill: bool) -> dict[str, Any]:
    """Two replicas of the side of which one is killed, and one of the other."""
    prefill, decode = (2, 1) if kills_prefill else (1, 2)
    return {"prefill_replicas": prefill, "decode_replicas": decode, "decode_router": "round_robin"}


class KillingPrefill(Killing):
    """It kills the process of the first prefill replica."""

    killed = 0


class KillingDecode(Killing):
    """It kills the process of the first decode replica."""

    killed = 1


@pytest.mark.parametrize(
    ("engine", "router"),
    [
        pytest.param(engine, router, marks=() if (engine, router) == ("vllm", "KillingPrefill") else pytest.mark.slow)
        for engine in ("vllm", "trtllm", "sglang")
        for router in ("KillingPrefill", "KillingDecode")
    ],
)
def test_a_replica_of_a_side_that_is_killed(engine: str, router: str, tmp_path: Path) -> None:
    """Its requests are sent again, and all get the tokens of one engine; the other replicas keep no block of them."""
    trace = write_load(tmp_path / "trace.jsonl", 12)
    _, alone = run(trace, tmp_path / "one", engine=engine)
    asked = {"engine": engine, "router": f"tests.fleet.test_computing:{router}", **sides_of(router == "KillingPrefill")}
    summary, tokens = run_checked(trace, tmp_path / "fleet", **asked)
    assert tokens == alone
    assert len(tokens) == 24
    check_killed(summary, tmp_path / "fleet", 0 if router == "KillingPrefill" else 1)


def run_checked(trace: str, output: Path, **values: Any) -> tuple[dict[str, Any], dict[int, list[int]]]:
    """`run`, and at its end no replica that is left holds a block."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disaggregated, "SteppedSides", values.pop("sides", CheckedSides))
        return run(trace, output, **values)


def check_killed(summary: dict[str, Any], fleet: Path, number: int) -> None:
    assert summary["requests"] == {"total": 24, "completed": 24, "failed": 0}
    assert not processes_of_replicas()
    (killed,) = summary["fleet"]["events"]
    assert (killed["event"], killed["replica"]) == ("fail", number)
    assert killed["reason"].startswith(f"the process of replica {number} was killed by SIGKILL")
    assert killed["lost"] == 0
    requests = lines(fleet / "requests.jsonl")
    assert killed["retried"] == sum(line.get("retries", 0) for line in requests) > 0
    for line in requests:
        assert sum(line["attribution_s"].values()) == pytest.approx(line["e2e_s"])


class KillingSource(CheckedSides):
    """Kills the process that is to send, once the one that is to receive waits for the sixth transfer."""

    kills_source = True
    _moved = 0

    def _move(self, index: int) -> float:
        self._moved += 1
        passage = self._passages[index]
        if self._moved == 6:
            one = self._prefill_of(passage) if self.kills_source else self._decode_of(passage)
            os.kill(process_of(one.engine).pid, signal.SIGKILL)
        return super()._move(index)


class KillingTarget(KillingSource):
    """Kills the process that is to receive."""

    kills_source = False


@pytest.mark.parametrize("sides", [pytest.param(KillingSource, marks=pytest.mark.slow), KillingTarget])
def test_a_process_that_is_killed_in_a_transfer(sides: type[KillingSource], tmp_path: Path) -> None:
    """The other process waits for nothing, and takes part in the next transfers."""
    trace = write_load(tmp_path / "trace.jsonl", 13)
    _, alone = run(trace, tmp_path / "one", engine="trtllm")
    summary, tokens = run_checked(
        trace, tmp_path / "fleet", engine="trtllm", sides=sides, **sides_of(sides.kills_source)
    )
    assert tokens == alone
    (killed,) = summary["fleet"]["events"]
    check_killed(summary, tmp_path / "fleet", killed["replica"])
    assert killed["replica"] in ((0, 1) if sides.kills_source else (1, 2))


CASES: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
    (3, "trtllm", {"policy": "max_utilization", "tokens_per_block": 16}, {"decode": "max_tokens_in_paged_kvcache=320"}),
    (4, "vllm", {}, {"decode": "max_tokens_in_paged_kvcache=288", "decode_replicas": 2}),
    (5, "trtllm", {"repetition_penalty": 1.3, "temperature": 0.8}, {"decode": "kv_host_cache_bytes=2000000"}),
    (6, "vllm", {"repetition_penalty": 1.3, "temperature": 0.8}, {"async_scheduling": True, "prefill_replicas": 2}),
    (7, "trtllm", {"tokens_per_block": 8}, {"disaggregate_from": 64, "decode": "overlap=async"}),
    (8, "vllm", {"eos_id": 7}, {"concurrency": 4}),
    (9, "trtllm", {"dtype": "bf16", "model": "tiny-mla"}, {"decode": "tokens_per_block=16"}),
    (10, "vllm", {"model": "tiny-mla"}, {"decode": "max_tokens_in_paged_kvcache=320"}),
    (3, "sglang", {}, {"decode": "max_tokens_in_paged_kvcache=400", "num_reserved_decode_tokens": 0}),
    (4, "sglang", {"tokens_per_block": 16}, {"decode": "enable_kv_cache_reuse=true", "decode_replicas": 2}),
    (8, "sglang", {"eos_id": 7, "repetition_penalty": 1.3, "temperature": 0.8}, {"prefill_replicas": 2}),
    (6, "sglang", {"disable_overlap_schedule": True, "model": "tiny-mla"}, {"disaggregate_from": 64}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "engine", "own", "sides"), CASES)
def test_prefill_and_decode_apart(
    seed: int, engine: str, own: dict[str, Any], sides: dict[str, Any], tmp_path: Path
) -> None:
    trace = write_load(tmp_path / "trace.jsonl", seed, 40)
    _, alone = run(trace, tmp_path / "one", engine=engine, **own)
    both = {"prefill_replicas": 1, "decode_replicas": 1} | sides
    _, tokens = run(trace, tmp_path / "fleet", engine=engine, **own, **both)
    assert tokens == alone
    assert len(tokens) == 40


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["trtllm", "vllm", "sglang"])
def test_first_tokens_that_end_requests(engine: str, tmp_path: Path) -> None:
    """Such a request has no more tokens, whether its decode replica has blocks for it or not."""
    trace = write_load(tmp_path / "trace.jsonl", 15)
    _, longer = run(trace, tmp_path / "longer", engine=engine)
    ends = next(tokens[0] for tokens in longer.values() if len(tokens) > 5)
    _, alone = run(trace, tmp_path / "one", engine=engine, eos_id=ends)
    assert [ends] in alone.values()
    sides = {"prefill_replicas": 1, "decode_replicas": 1, "eos_id": ends}
    _, tokens = run_checked(trace, tmp_path / "fleet", engine=engine, **sides)
    assert tokens == alone
    for line in lines(tmp_path / "fleet" / "requests.jsonl"):
        assert sum(line["attribution_s"].values()) == pytest.approx(line["e2e_s"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["trtllm", "vllm", "sglang"])
@pytest.mark.parametrize("router", ["round_robin", "least_kv", "prefix_affinity"])
def test_replicas_give_the_tokens_of_one_engine(engine: str, router: str, tmp_path: Path) -> None:
    trace = write_load(tmp_path / "trace.jsonl", 11, 40)
    _, alone = run(trace, tmp_path / "one", engine=engine, draft_ngram=2 if engine == "trtllm" else None)
    events = tmp_path / "events.json"
    events.write_text(json.dumps([{"at": 0.02, "fail": 1}, {"at": 0.03, "start": 1}, {"at": 0.05, "drain": 0}]))
    asked = {"replicas": 2, "router": router, "replica_events": str(events)}
    _, tokens = run(trace, tmp_path / "fleet", engine=engine, **asked)
    assert tokens == alone


def test_replicas_have_adapters(tmp_path: Path) -> None:
    """Each has all of them, and room for one at a time in its caches, so that they are read again and again."""
    trace = write_load(tmp_path / "trace.jsonl", 14, 12)
    small = {"num_loras": 3, "lora_num_device_mod_layers": 28, "lora_host_cache_bytes": 1}
    _, alone = run(trace, tmp_path / "one", num_loras=3)
    _, tokens = run(trace, tmp_path / "fleet", replicas=2, router="least_requests", **small)
    assert tokens == alone
    assert len(tokens) == 12
    _, without = run(trace, tmp_path / "without")
    assert tokens != without
    replicas = [json.loads((path / "summary.json").read_text()) for path in replica_directories(tmp_path / "fleet")]
    assert all(one["lora"]["misses"] > 0 for one in replicas)


def test_a_batch_as_it_is_sent() -> None:
    """An executor in another process reads the same of it."""
    table = RequestTable(4)
    prompt = np.arange(10, dtype=np.int32)
    requests = [Request(n, 10, 4, prompt_tokens=prompt + n, sampling=SamplingParams(min_length=n)) for n in range(2)]
    for number, request in enumerate(requests):
        request.enter(table, number)
    chunks = (ContextChunk(requests[0], 2, 3), ContextChunk(requests[1], 6, 4))
    tables = np.arange(4 * 3, dtype=np.int32).reshape(4, 1, 3)
    copies = (BlockCopy(CopyKind.OFFLOAD, 1, 2, 16),)
    sent = Batch(7, chunks, np.array([3], np.int32), np.array([5], np.int32), tables, copies=copies)
    batch = BatchReader().batch(loads(dumps(SentBatch.of(sent))))
    assert (batch.iteration, batch.copies) == (7, copies)
    for chunk, own in zip(batch.context, chunks, strict=True):
        assert (chunk.start, chunk.length, chunk.is_last) == (own.start, own.length, own.is_last)
        assert (chunk.request.slot, chunk.request.sampling) == (own.request.slot, own.request.sampling)
        assert chunk.tokens().tolist() == own.tokens().tolist()
    assert batch.context[1].request.tokens_between(0, 10).tolist() == (prompt + 1).tolist()
    used = [requests[0].slot, requests[1].slot, 3]
    assert batch.block_tables[used].tolist() == tables[used].tolist()


def test_measured_transfers_follow_one_another() -> None:
    """Each takes its own time, and waits for those before it at either end."""
    links = MeasuredLinks(2, 2, lambda key: key / 10)
    links.send(3, 0, 0, 1, 1.0)
    links.send(1, 0, 1, 1, 1.0)  # behind the first one, at the replica that sends
    links.send(2, 1, 1, 1, 1.1)  # behind the second one, at the replica that receives
    assert links.next_s == pytest.approx(1.3)
    assert links.take(1.35) == [3]
    assert links.next_s == pytest.approx(1.4)
    assert links.take(1.7) == [1, 2]
    assert links.next_s == float("inf")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"replicas": 2, "tp_size": 2}, "--tp_size, --pp_size: replicas that compute"),
        ({"replicas": 2, "device": "cuda"}, "device cuda has one engine"),
        ({"replicas": 2, "profile": True}, "--profile: is not built"),
        ({"prefill_replicas": 1, "decode_replicas": 1, "transfer_by": "layer"}, "--transfer_by layer: is simulated"),
        ({"prefill_replicas": 1, "decode_replicas": 1, "transfer_latency": 1.0}, "--transfer_latency: transfers"),
        ({"prefill_replicas": 1, "decode_replicas": 1, "return_log_probs": True}, "--return_log_probs: is not sent"),
    ],
)
def test_what_is_not_built_is_refused(asked: dict[str, Any], said: str, tmp_path: Path) -> None:
    trace = write_load(tmp_path / "trace.jsonl", 1, 2)
    with pytest.raises(InputError, match=said):
        run_trace(trace, config_of(**CPU | asked, output=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
