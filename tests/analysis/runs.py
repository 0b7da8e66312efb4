"""Runs for the tests of analyses: random traces, replayed under settings that each limit in another way."""

import json
import random
from pathlib import Path
from typing import Any

from ifbbench.analysis.recorded import RecordedRun
from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig

POOL_TOKENS = 4_000
COUNT = 60


def write_requests(path: Path, seed: int, count: int = COUNT, rate: float = 40.0, longest: int = 900) -> Path:
    """Requests of random lengths that arrive at `rate` a second; the reserved output is larger than the actual one."""
    draw = random.Random(seed)
    now, lines = 0.0, []
    for index in range(count):
        now += draw.expovariate(rate)
        output = draw.randint(1, 200)
        row = {
            "request_id": 1000 + index,
            "arrival_s": now,
            "prompt_len": draw.randint(1, longest),
            "max_new_tokens": output + draw.randint(0, 150),
            "output_len": output,
        }
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")
    return path


def simulate(tmp_path: Path, name: str, trace: Path, **settings) -> RecordedRun:
    values: dict[str, Any] = {
        "device": "sim:h100-sxm",
        "model": "llama-3.1-8b",
        "max_tokens_in_paged_kvcache": POOL_TOKENS,
        "max_seq_len": 2048,
        "output": str(tmp_path / name),
        "enable_chunked_context": True,
        "max_num_tokens": 1024,
    } | settings
    run_trace(str(trace), RunConfig(**values))
    return RecordedRun.load(tmp_path / name)


SETTINGS: dict[str, dict[str, Any]] = {
    "guaranteed_no_evict": {"policy": "guaranteed_no_evict"},
    "max_utilization": {"policy": "max_utilization"},
    "unchunked": {"policy": "guaranteed_no_evict", "enable_chunked_context": False},
    "small batch": {"policy": "guaranteed_no_evict", "max_batch_size": 4},
    "small budget": {"policy": "max_utilization", "max_num_tokens": 96},
    "static": {"type": "v1", "max_batch_size": 8},
    "all at once": {"policy": "max_utilization", "time_scale": 0.0},
    "two passes": {"type": "UIFB", "policy": "max_utilization"},
}
