"""The executor's form of `iterations.jsonl` says the same as the batch manager's, and has the executor's names."""

import json
from pathlib import Path

import pandas as pd
import pytest

from ifbbench.replay.run import run_trace
from ifbbench.report.compat.trtllm_bench import write_iterations
from ifbbench.rundir.reader import RunData, load_run
from ifbbench.settings.config import RunConfig

LINE = [
    "timestamp",
    "iter",
    "iterLatencyMS",
    "numActiveRequests",
    "numQueuedRequests",
    "numCompletedRequests",
    "maxNumActiveRequests",
    "kvCacheStats",
    "staticBatchingStats",
    "inflightBatchingStats",
]
KV_CACHE = [
    "maxNumBlocks",
    "freeNumBlocks",
    "usedNumBlocks",
    "tokensPerBlock",
    "allocTotalBlocks",
    "allocNewBlocks",
    "reusedBlocks",
    "missedBlocks",
    "cacheHitRate",
]
INFLIGHT = [
    "numScheduledRequests",
    "numContextRequests",
    "numGenRequests",
    "numPausedRequests",
    "numCtxTokens",
    "microBatchId",
    "avgNumDecodedTokensPerIter",
]
STATIC = ["numScheduledRequests", "numContextRequests", "numCtxTokens", "numGenTokens", "emptyGenSlots"]


def both_forms(tmp_path: Path, **settings: object) -> tuple[RunData, RunData]:
    """The same run in the batch manager's form and in the executor's."""
    prompt = list(range(40))
    rows = [
        {
            "request_id": index,
            "arrival_s": 0.002 * index,
            "prompt_tokens": prompt,
            "output_len": 5 + index,
            "max_new_tokens": 30,
        }
        for index in range(12)
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "device": "sim:h100-sxm",
        "model": "llama-3.1-8b",
        "tokens_per_block": 8,
        "max_batch_size": 4,
        "max_tokens_in_paged_kvcache": 160,
        **settings,
    }
    for name in ("batch_manager", "executor"):
        config = RunConfig(**common, iteration_stats_format=name, output=str(tmp_path / name))  # type: ignore[arg-type]
        run_trace(str(tmp_path / "trace.jsonl"), config)
    return load_run(tmp_path / "batch_manager"), load_run(tmp_path / "executor")


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "max_utilization", "enable_chunked_context": True},
        {"enable_kv_cache_reuse": True},
        {"type": "v1"},
        {"iteration_stats_every": 5},
        {"kv_cache_type": "contiguous", "max_tokens_in_paged_kvcache": None, "max_seq_len": 100},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_both_forms_are_read_as_the_same_table(tmp_path: Path, settings: dict[str, object]) -> None:
    documented, executor = both_forms(tmp_path, **settings)
    pd.testing.assert_frame_equal(documented.iterations, executor.iterations)
    assert documented.summary == executor.summary
    lines = list(map(json.loads, (executor.path / "iterations.jsonl").read_text().splitlines()))
    assert all(list(line) == [*LINE, "ifbbench"] for line in lines)
    if not settings.get("iteration_stats_every"):
        assert sum(line["numCompletedRequests"] for line in lines) == 12
    # The log of either run has the same lines without `ifbbench`.
    for run in (documented, executor):
        write_iterations(run, tmp_path / "log")
        logged = list(map(json.loads, (tmp_path / "log").read_text().splitlines()))
        # Timestamps are those of the lines, with microseconds.
        fractions = [line.pop("timestamp").partition(".") for line in logged]
        assert [second for second, _, _ in fractions] == [line["timestamp"] for line in lines]
        starts = [line["ifbbench"]["start_s"] % 1 for line in lines]
        assert [int(fraction) / 1e6 for _, _, fraction in fractions] == pytest.approx(starts, abs=1e-6)
        assert logged == [{name: line[name] for name in LINE if name != "timestamp"} for line in lines]


def test_names_of_in_flight_batching_and_the_hit_rate(tmp_path: Path) -> None:
    _, run = both_forms(tmp_path, enable_kv_cache_reuse=True)
    line = json.loads((run.path / "iterations.jsonl").read_text().splitlines()[-1])
    assert list(line["kvCacheStats"]) == KV_CACHE
    assert list(line["inflightBatchingStats"]) == INFLIGHT
    assert line["staticBatchingStats"] is None
    known = line["kvCacheStats"]
    assert known["missedBlocks"] > 0
    assert known["cacheHitRate"] == known["reusedBlocks"] / (known["reusedBlocks"] + known["missedBlocks"]) > 0


def test_names_of_static_batches(tmp_path: Path) -> None:
    _, run = both_forms(tmp_path, type="v1")
    line = json.loads((run.path / "iterations.jsonl").read_text().splitlines()[-1])
    assert list(line["staticBatchingStats"]) == STATIC
    assert line["inflightBatchingStats"] is None
