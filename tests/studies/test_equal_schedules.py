"""Summaries without a simulation are those of the simulation, to the last bit; and where limits decide, runs run."""

import random
from typing import Any

import pytest

import ifbbench.studies.points as points_module
from ifbbench.progress import NO_PROGRESS
from ifbbench.settings.config import RunConfig
from ifbbench.studies.equal_schedules import EqualSchedules
from ifbbench.studies.points import run_points, summarise
from ifbbench.workload.load import in_memory, read_source

SIMULATED = RunConfig(device="sim:h100-sxm", model="llama-3.1-8b")
BATCHES, TOKENS = (4, 16, 17, 32, 64, 512), (512, 2048, 4096, 16_384)
# Of one of these kinds each: what all points of a sweep have in common.
KINDS: list[dict[str, Any]] = [
    {"request_rate": 5.0},
    {"request_rate": 5.0, "enable_chunked_context": True},
    {"request_rate": 40.0, "max_tokens_in_paged_kvcache": 30_000},
    {"time_scale": 0.0, "max_tokens_in_paged_kvcache": 9000},
    {"request_rate": 20.0, "enable_kv_cache_reuse": True},
    {"concurrency": 16},
    {"concurrency": 3},
    {"request_rate": 10.0, "max_attention_window": "256"},
    {"request_rate": 10.0, "reserve": "factor:4"},
    {"request_rate": 10.0, "enable_trt_overlap": True},
    {"request_rate": 5.0, "streaming": True},
    {"request_rate": 5.0, "engine_overhead": "vllm"},
    {"request_rate": 5.0, "beam_width": 2},
    {"request_rate": 5.0, "type": "inflight_unfused", "slo": "ttft=20ms,tpot=8ms"},
]


@pytest.mark.parametrize("num_points", [6, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", range(len(KINDS)))
def test_a_summary_that_is_known_is_that_of_the_run(
    number: int, num_points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(number)
    base = SIMULATED.with_values(max_num_samples=60, **KINDS[number])
    trace = in_memory(read_source("chat", base))
    grid = [
        (batch, tokens, policy)
        for batch in BATCHES
        for tokens in TOKENS
        for policy in ("guaranteed_no_evict", "max_utilization")
    ]
    configs = [
        base.with_values(max_batch_size=batch, max_num_tokens=tokens, policy=policy)
        for batch, tokens, policy in draw.sample(grid, num_points)
    ]
    simulated: list[RunConfig] = []

    def counted(trace: Any, config: RunConfig, progress: Any) -> Any:
        simulated.append(config)
        return summarise(trace, config, progress)

    monkeypatch.setattr(points_module, "summarise", counted)
    found = run_points(trace, configs, 1)
    if "enable_trt_overlap" in KINDS[number] or "beam_width" in KINDS[number]:
        assert len(simulated) == len(configs)
    for config, result in zip(configs, found, strict=True):
        if config not in simulated:
            assert result == run_points(trace, [config], 1)[0]


def known(limits: dict[str, Any], others: dict[str, Any], **common: Any) -> bool:
    """Whether a run with `others` needs none after one with `limits`."""
    first = SIMULATED.with_values(max_num_samples=40, **{"request_rate": 5.0, **common, **limits})
    trace, schedules = in_memory(read_source("chat", first)), EqualSchedules()
    summary, max_active = summarise(trace, first, NO_PROGRESS)
    assert max_active is not None
    schedules.add(trace, first, summary, max_active)
    return schedules.summary_of(trace, first.with_values(**others)) is not None


def test_limits_that_decide_nothing_change_nothing() -> None:
    limits = {"max_batch_size": 64, "max_num_tokens": 4096}
    assert known(limits, {"max_batch_size": 128})
    assert known(limits, {"max_num_tokens": 8192})
    assert known(limits, {"policy": "max_utilization"})
    assert known(limits, {"policy": "max_utilization", "max_num_tokens": 8192, "max_batch_size": 32})


@pytest.mark.parametrize(
    ("limits", "others"),
    [
        ({"max_batch_size": 2}, {"max_batch_size": 64}),  # it was full
        ({"max_batch_size": 64}, {"max_batch_size": 2}),  # it would be full
        ({"max_num_tokens": 4096}, {"max_num_tokens": 2048}),  # a smaller budget may bind
        ({"max_num_tokens": 300}, {"max_num_tokens": 4096}),  # longer prompts are refused
        ({"max_tokens_in_paged_kvcache": 4096}, {"policy": "max_utilization"}),  # blocks are short
        ({}, {"time_scale": 2.0}),
        ({}, {"policy": "static_batch"}),
        ({}, {"enable_batch_size_tuning": True}),
    ],
)
def test_limits_that_may_decide_are_run(limits: dict[str, Any], others: dict[str, Any]) -> None:
    assert not known(limits, others, enable_chunked_context=False)
