"""Limits that follow the lengths of active requests: the table, the averages, and whole runs."""

from pathlib import Path

import pytest

from ifbbench.engine.request import Request, RequestTable
from ifbbench.replay.run import run_trace
from ifbbench.replay.single import RunResult
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.schedulers.tensorrt_llm.dynamic_limits import DynamicLimits, tuned_batch_size, tuned_num_tokens
from ifbbench.schedulers.tensorrt_llm.micro_batch import MicroBatchScheduler
from ifbbench.settings.config import RunConfig


@pytest.mark.parametrize(
    ("capacity", "batch_size"),
    [
        (0, 128),
        (143, 128),
        (144, 256),
        (335, 256),
        (671, 512),
        (831, 768),
        (1279, 1024),
        (1663, 1536),
        (1665, 1665),
        (2049, 2048),
        (2175, 2048),
        (2176, 2176),
    ],
)
def test_batch_size_of_a_capacity(capacity, batch_size):
    assert tuned_batch_size(capacity) == batch_size


@pytest.mark.parametrize(
    ("batch_size", "prompt_len", "new_tokens", "budget"),
    [
        (1, 100, 2, 8192),
        (256, 100, 2, 16384),
        (1, 100, 100, 4096),
        (4096, 100, 100, 8192),
        (1, 2, 100, 2048),
        (4096, 2, 100, 8192),
        (1, 200, 100, 4096),
        (1, 50, 100, 2048),
    ],
)
def test_token_budget_of_average_lengths(batch_size, prompt_len, new_tokens, budget):
    assert tuned_num_tokens(batch_size, prompt_len, new_tokens) == budget


def limits_after(lengths: list[tuple[int, int]], **values) -> MicroBatchScheduler:
    """The limits after one iteration with active requests of these prompts and new tokens."""
    config = BatchingConfig(
        "guaranteed_no_evict",
        2048,
        65_536,
        8192,
        8191,
        32,
        num_blocks=100_000,
        tunes_batch_size=True,
        tunes_num_tokens=True,
        **values,
    )
    active = ActiveRequests(RequestTable(len(lengths)))
    for number, (prompt_len, new_tokens) in enumerate(lengths):
        active.add(Request(number, prompt_len, new_tokens))
    micro_batch = MicroBatchScheduler(config.max_batch_size, config.token_budget)
    DynamicLimits(config, micro_batch).update(active)
    return micro_batch


def test_limits_follow_the_average_of_the_latest_lengths():
    # 3,200 tokens of each are 100 blocks, of which the cache holds 1,000.
    limits = limits_after([(8000, 1), (3000, 200), (3000, 200)], tuning_window=2)
    assert limits.max_batch_size == 1024
    assert limits.token_budget == 16_384  # 1,024 * (1 + 15), a power of two already


def test_static_limits_are_never_exceeded():
    limits = limits_after([(10, 10)])  # 100,000 such requests fit
    assert (limits.max_batch_size, limits.token_budget) == (2048, 4096)


def test_an_admitted_prompt_always_fits_the_budget():
    assert limits_after([(7000, 8000)] * 2, chunk_unit=None).token_budget == 7000
    assert limits_after([(7000, 8000)] * 2, chunk_unit=32).token_budget == 4096


def run(directory: Path, **values) -> RunResult:
    config = RunConfig(
        device="sim:h100-sxm", model="llama-3.1-8b", enable_chunked_context=True, quiet=True, time_scale=0.0, **values
    )
    return run_trace("chat", config.with_values(output=str(directory), max_num_samples=200))


def test_a_run_with_tuned_limits_lowers_the_batch_size(tmp_path):
    tuned = run(tmp_path / "tuned", enable_batch_size_tuning=True, enable_max_num_tokens_tuning=True)
    static = run(tmp_path / "static")
    assert tuned.summary["requests"]["completed"] == 200
    assert tuned.summary["schedule_digest"] != static.summary["schedule_digest"]
    assert tuned.summary["peak_scheduled_requests"] <= static.summary["peak_scheduled_requests"]


def test_tuning_that_never_changes_a_limit_changes_no_decision(tmp_path):
    limits = {"max_batch_size": 64, "max_num_tokens": 2048}
    tuned = run(tmp_path / "tuned", enable_batch_size_tuning=True, enable_max_num_tokens_tuning=True, **limits)
    static = run(tmp_path / "static", **limits)
    assert tuned.summary["schedule_digest"] == static.summary["schedule_digest"]
    assert tuned.summary["ttft_s"] == static.summary["ttft_s"]
