"""With all arrivals at once, the schedule is a function of trace, settings and seed, whatever runs it."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ifbbench.errors import InputError
from ifbbench.replay.run import run_trace, summarise_run
from ifbbench.settings.config import RunConfig
from ifbbench.workload.trace import Trace, TraceRequest

SETTINGS: dict[str, Any] = {
    "time_scale": 0,
    "max_batch_size": 6,
    "max_num_tokens": 512,
    "quiet": True,
    "max_tokens_in_paged_kvcache": 640,
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """14 requests, which reserve more than they make; the longest takes a third of the pool."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    rows = []
    for _ in range(14):
        output_len = draw.randint(5, 40)
        lengths = {"prompt_len": draw.randint(10, 160), "output_len": output_len}
        rows.append({"arrival_s": 0.0, **lengths, "max_new_tokens": output_len + draw.randint(0, 10)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def digest_and_tokens(trace: str, folder: Path, name: str, **changes: Any) -> tuple[str, Any]:
    responses = folder / f"{name}.json"
    makes_tokens = changes.get("device") != "null"
    config = RunConfig(
        **{
            **SETTINGS,
            "device": "cpu",
            "output": str(folder / name),
            "responses_json": str(responses) if makes_tokens else None,
            **changes,
        }
    )
    summary = run_trace(trace, config).summary
    assert summary["requests"]["failed"] == 0
    return summary["schedule_digest"], json.loads(responses.read_text()) if makes_tokens else None


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization", "static_batch"])
def test_same_schedule_and_tokens_on_every_run(policy: str, chunked: bool, trace: str, tmp_path: Path) -> None:
    changes = {"policy": policy, "enable_chunked_context": chunked}
    first = digest_and_tokens(trace, tmp_path, "first", **changes)
    assert digest_and_tokens(trace, tmp_path, "second", **changes) == first
    without_model, _ = digest_and_tokens(trace, tmp_path, "null", device="null", **changes)
    assert without_model == first[0]
    pauses = json.loads((tmp_path / "first/summary.json").read_text())["pauses"]
    assert (pauses > 0) == (policy == "max_utilization")


def test_a_run_directory_replays_to_the_same_schedule(trace: str, tmp_path: Path) -> None:
    digest, _ = digest_and_tokens(trace, tmp_path, "first", device="null")
    config = RunConfig(**{**SETTINGS, "device": "null", "output": str(tmp_path / "again")})
    assert run_trace(str(tmp_path / "first"), config).summary["schedule_digest"] == digest


# A simulated device advances iterations without batches, and many together; the null device runs each as a batch.


def trace_of(rows: list[tuple[list[int], int, int]]) -> Trace:
    """Requests from (prompt, max_new_tokens, output_len)."""
    requests = [
        TraceRequest(index, 0.0, len(prompt), reserved, output, prompt_tokens=tuple(prompt))
        for index, (prompt, reserved, output) in enumerate(rows)
    ]
    return Trace("drawn", requests, "0" * 64, "test")


def drawn_run(draw: random.Random) -> tuple[Trace, dict[str, Any]]:
    """Prompts that begin alike, many of them full blocks to the last token, in small pools, with reuse in all forms."""
    block, longest, is_chunked = draw.choice([4, 8, 16]), draw.randint(30, 110), draw.random() < 0.5
    settings: dict[str, Any] = {
        "policy": draw.choice(["max_utilization"] * 4 + ["guaranteed_no_evict"] * 2 + ["static_batch"]),
        "max_batch_size": draw.randint(2, 12),
        "tokens_per_block": block,
        "max_seq_len": longest,
        "max_tokens_in_paged_kvcache": draw.randint(longest, 3 * longest),
        "kv_cache_dtype": "bf16",  # the host's blocks are given in bytes
        "enable_kv_cache_reuse": draw.random() < 0.9,
        "enable_partial_reuse": draw.random() < 0.5,
        "copy_on_partial_reuse": draw.random() < 0.5,
        "enable_chunked_context": is_chunked,
        "context_chunking_policy": draw.choice(["first_come_first_served", "equal_progress"]),
        "max_num_tokens": draw.randint(16, 48) if is_chunked else longest,
        "streaming": is_chunked and draw.random() < 0.2,
        "time_scale": 0,
    }
    if settings["enable_kv_cache_reuse"] and draw.random() < 0.25:
        settings["kv_host_cache_bytes"] = draw.randint(1, 12) * block * 4096
    if draw.random() < 0.3:
        several = [] if settings["enable_kv_cache_reuse"] else ["24,64"]
        settings["max_attention_window"] = draw.choice(["24", "30", "40", "64", *several])
        settings["window_mode"] = draw.choice(["cyclic", "linear"])
        settings["sink_token_len"] = draw.choice([0, 0, 3])
    ways: list[dict[str, Any]] = [{"enable_trt_overlap": True}, {"type": "inflight_unfused"}, {"concurrency": 3}]
    if draw.random() < 0.4:
        settings |= draw.choice(ways)

    num_ids, prompts = draw.choice([1, 2, 4]), list[list[int]]()
    for _ in range(draw.randint(2, 12)):
        prompt = [draw.randrange(num_ids) for _ in range(draw.randint(1, longest - 1))]
        if prompts and draw.random() < 0.7:
            other = draw.choice(prompts)
            prompt = other[: draw.randint(1, len(other))] + prompt[: draw.choice([0, 1, len(prompt)])]
        if draw.random() < 0.4:
            prompt = prompt[: max(len(prompt) // block * block, 1)]
        prompts.append(prompt[: longest - 1])
    rows = [(prompt, draw.randint(0, 20), draw.randint(1, 40)) for prompt in prompts]
    return trace_of([(prompt, output + more, output) for prompt, more, output in rows]), settings


def digests(trace: Trace, settings: dict[str, Any]) -> list[str]:
    """The digests of a run without batches and of one with."""
    return [
        summarise_run(trace, RunConfig(device=device, **settings))["schedule_digest"]
        for device in ("sim:h100-sxm", "null")
    ]


# 473: a prompt that is cut before reuse is found comes before another one in the batch, and both end with it.
@pytest.mark.parametrize("seeds", [[*range(80), 473], pytest.param(range(80, 3200), marks=pytest.mark.slow)])
def test_a_simulated_device_schedules_as_the_null_one(seeds: Sequence[int]) -> None:
    refused = 0
    for seed in seeds:
        trace, settings = drawn_run(random.Random(seed))
        try:
            simulated, null = digests(trace, settings)
        except InputError:  # a pool too small for any request
            refused += 1
            continue
        assert simulated == null, (seed, settings)
    assert refused < len(seeds) / 20


def test_of_equal_blocks_that_fill_in_one_iteration_the_prompt_s_remains() -> None:
    """Request 0 fills its first block with its first output, in the iteration in which request 1 completes a prompt
    that begins alike. Request 1's block is the one that can be found: it is still in use when request 0 has ended."""
    first = [3, 3, 0, 3, 0, 1, 1, 1, 0, 0, 2, 2, 2, 3, 3, 1]
    rest = [int(digit) for digit in "1202133102113220310101203032022210110033300312032"]
    rows = [(first, 44, 7), (first + rest, 31, 31), ([*first, 1], 29, 29), ((first + rest)[:62], 29, 26)]
    settings: dict[str, Any] = {
        "policy": "max_utilization",
        "max_batch_size": 8,
        "max_num_tokens": 96,
        "tokens_per_block": 16,
        "max_tokens_in_paged_kvcache": 112,
        "max_seq_len": 97,
        "enable_kv_cache_reuse": True,
        "enable_partial_reuse": False,
        "enable_chunked_context": False,
        "time_scale": 0,
    }
    assert len(set(digests(trace_of(rows), settings))) == 1
