"""With all arrivals at once, the schedule is a function of trace, settings and seed, whatever runs it."""

import json
from pathlib import Path
from typing import Any

import pytest

from ifbbench.config import RunConfig
from ifbbench.replay.run import run_trace

SETTINGS: dict[str, Any] = {
    "time_scale": 0, "max_num_samples": 14, "max_batch_size": 6, "max_num_tokens": 512, "quiet": True,
    "max_tokens_in_paged_kvcache": 640,
}  # fmt: skip


def digest_and_tokens(folder: Path, name: str, **changes: Any) -> tuple[str, Any]:
    responses = folder / f"{name}.json"
    makes_tokens = changes.get("device") != "null"
    config = RunConfig(**{
        **SETTINGS, "device": "cpu", "output": str(folder / name),
        "responses_json": str(responses) if makes_tokens else None, **changes,
    })  # fmt: skip
    summary = run_trace(None, config).summary
    assert summary["requests"]["failed"] == 0
    return summary["schedule_digest"], json.loads(responses.read_text()) if makes_tokens else None


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization", "static_batch"])
def test_same_schedule_and_tokens_on_every_run(policy: str, chunked: bool, tmp_path: Path) -> None:
    changes = {"policy": policy, "enable_chunked_context": chunked}
    first = digest_and_tokens(tmp_path, "first", **changes)
    assert digest_and_tokens(tmp_path, "second", **changes) == first
    without_model, _ = digest_and_tokens(tmp_path, "null", device="null", **changes)
    assert without_model == first[0]


def test_a_run_directory_replays_to_the_same_schedule(tmp_path: Path) -> None:
    digest, _ = digest_and_tokens(tmp_path, "first", device="null")
    config = RunConfig(**{**SETTINGS, "device": "null", "output": str(tmp_path / "again")})
    assert run_trace(str(tmp_path / "first"), config).summary["schedule_digest"] == digest

