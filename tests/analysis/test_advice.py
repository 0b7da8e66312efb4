"""The advice is sound: following it improves the figure that it names, and limits that it calls idle change nothing."""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ifbbench.analysis.advice import STATIC_BATCH
from ifbbench.analysis.explain import SETTING_OF
from ifbbench.analysis.findings import Findings
from ifbbench.analysis.recorded import RecordedRun
from tests.analysis.runs import simulate

SEEDS = range(20)


def draw_settings(draw: random.Random) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "policy": draw.choice(["guaranteed_no_evict", "guaranteed_no_evict", "max_utilization", "static_batch"]),
        "type": draw.choice(["inflight_fused", "inflight_fused", "inflight"]),
        "max_batch_size": draw.choice([2, 8, 32, 256]),
        "max_num_tokens": draw.choice([128, 512, 1_024, 8_192]),
        "enable_chunked_context": draw.random() < 0.75,
        "context_chunking_policy": draw.choice(["first_come_first_served", "equal_progress"]),
        "max_tokens_in_paged_kvcache": draw.choice([2_048, 4_096, 10_000, 50_000, None]),
        "time_scale": draw.choice([1.0, 1.0, 0.0]),
        "enable_kv_cache_reuse": draw.random() < 0.2,
        "enable_trt_overlap": draw.random() < 0.1,
        "concurrency": draw.choice([None, None, None, 30]),
    }
    if draw.random() < 0.1:
        settings |= {"type": "v1", "policy": "guaranteed_no_evict", "enable_chunked_context": False,
                     "enable_kv_cache_reuse": False, "enable_trt_overlap": False}  # fmt: skip
    if not settings["enable_chunked_context"]:
        settings["max_num_tokens"] = max(settings["max_num_tokens"], 1_024)
    return settings


def draw_trace(draw: random.Random, path: Path) -> Path:
    """More requests than the limits above let run at once, some with prompts that begin alike and some more urgent."""
    now_s, rows = 0.0, []
    rate, longest = draw.choice([60.0, 200.0, 1_000.0]), draw.choice([200, 900])
    has_priorities = draw.random() < 0.2
    for index in range(draw.randint(60, 120)):
        now_s += draw.expovariate(rate)
        output = draw.randint(1, 150)
        row: dict[str, Any] = {
            "request_id": index, "arrival_s": now_s, "prompt_len": draw.randint(1, longest),
            "max_new_tokens": output + draw.choice([0, draw.randint(0, 100)]), "output_len": output,
        }  # fmt: skip
        if draw.random() < 0.3:
            row |= {"prefix_ids": [draw.randrange(2)], "prefix_lens": [draw.randint(1, min(row["prompt_len"], 512))]}
        if has_priorities:
            row["priority"] = draw.choice([0.1, 0.5, 0.9])
        rows.append(json.dumps(row))
    path.write_text("\n".join(rows) + "\n")
    return path


def following(run: RecordedRun, setting: str) -> dict[str, Any]:
    """The settings that the advice asks for: twice the limit, or batches that are not static."""
    if setting in ("type", "policy"):
        return {"type": "inflight_fused", "policy": "guaranteed_no_evict"}
    return {setting: 2 * int(run.config[setting])}


def check(seed: int, folder: Path) -> tuple[str | None, list[str]]:
    """Check the advice of one random run; returns the limit that it names and those that it calls idle."""
    draw = random.Random(seed)
    trace, settings = draw_trace(draw, folder / "trace.jsonl"), draw_settings(draw)
    run = simulate(folder, "run", trace, **settings)
    advice = Findings(run).advice
    assert run.data.summary is not None
    if advice.setting is not None:
        assert advice.figure == "queue_time_s.mean"
        better = simulate(folder, "better", trace, **settings | following(run, advice.setting))
        assert better.data.summary is not None
        before, after = run.data.summary["queue_time_s"]["mean"], better.data.summary["queue_time_s"]["mean"]
        assert after < before, f"{advice.setting}: {before} to {after}; {settings}"
    for limit in advice.idle:
        name = SETTING_OF[limit]
        other = simulate(folder, f"idle {limit}", trace, **settings | following(run, name))
        assert other.data.run["schedule_digest"] == run.data.run["schedule_digest"], f"{name}: {settings}"
        lines = [(path.data.path / "requests.jsonl").read_bytes() for path in (run, other)]
        assert lines[0] == lines[1], f"{name}: {settings}"
    return advice.limit, advice.idle


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[str | None, list[str]]]:
    return cache(lambda seed: check(seed, tmp_path_factory.mktemp("runs")))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_advice_of_a_random_run_is_sound(checked, seed: int) -> None:
    checked(seed)


def test_each_kind_of_advice_is_given(checked) -> None:
    found = [checked(seed) for seed in SEEDS]
    without_adapters = {*SETTING_OF} - {"lora_pages"}
    assert {limit for limit, _ in found} >= {*without_adapters, STATIC_BATCH}
    assert {limit for _, idle in found for limit in idle} == without_adapters


def test_lora_pages_that_requests_wait_for(tmp_path: Path) -> None:
    """Twice the share of memory shortens the queue time."""
    trace, queue_time_s = tmp_path / "trace.jsonl", []
    rows = [{"request_id": index, "arrival_s": 0.0, "prompt_len": 20, "output_len": 30} for index in range(30)]
    trace.write_text("\n".join(map(json.dumps, rows)) + "\n")
    for share in (0.002, 0.004):
        run = simulate(tmp_path, str(share), trace, device="sim:h100-sxm", model="llama-3.1-8b", num_loras=30,
                       lora_device_mem_fraction=share)  # fmt: skip
        assert run.data.summary is not None
        queue_time_s.append(run.data.summary["queue_time_s"]["mean"])
        advice = Findings(run).advice
        assert (advice.limit, advice.setting) == ("lora_pages", "lora_device_mem_fraction")
    assert queue_time_s[1] < queue_time_s[0]
