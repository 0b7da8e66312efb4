"""Real runs with every batching type: the same greedy tokens, and the properties of each type."""

import json
from pathlib import Path
from typing import Any

import pytest

from ifbbench.engine.batch import Batch, StepOutputs
from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig
from ifbbench.torch.model_executor import ModelExecutor

pytestmark = pytest.mark.usefixtures("small_model")

OUTPUT_LENGTHS = [1, 14, 3, 22, 9, 17, 2, 30]

WAYS: dict[str, dict[str, Any]] = {
    "fused": {},
    "two passes": {"type": "UIFB"},
    "static": {"type": "V1"},
    "overlap": {"enable_trt_overlap": True},
    "overlap, two passes": {"type": "inflight_unfused", "enable_trt_overlap": True},
    "overlap, pauses": {
        "enable_trt_overlap": True,
        "policy": "max_utilization",
        "max_tokens_in_paged_kvcache": 88,
    },
    "streaming": {"streaming": True},
    "static emulation": {"static_emulated_batch_size": 3},
    "one at a time": {"concurrency": 1},
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    rows = [
        {
            "request_id": index,
            "arrival_s": 0.0,
            "prompt_len": 5 + 7 * index,
            "output_len": length,
            "max_new_tokens": length + 4 * (index % 2),
        }
        for index, length in enumerate(OUTPUT_LENGTHS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(trace: Path, directory: Path, **settings: Any) -> tuple[dict[int, list[int]], dict[str, Any]]:
    """Tokens by request, and the summary."""
    directory.mkdir()
    config = RunConfig(
        device="cpu",
        tokens_per_block=4,
        max_batch_size=4,
        quiet=True,
        output=str(directory / "run"),
        responses_json=str(directory / "responses.json"),
        **settings,
    )
    summary = run_trace(str(trace), config).summary
    rows = json.loads((directory / "responses.json").read_text())
    return {row["response_id"]: row["response_tokens"] for row in rows}, summary


def test_all_make_the_same_tokens(trace: Path, tmp_path: Path) -> None:
    found = {name: run(trace, tmp_path / name, **settings) for name, settings in WAYS.items()}
    expected, _ = found["fused"]
    assert [len(tokens) for tokens in expected.values()] == OUTPUT_LENGTHS
    for name, (tokens, summary) in found.items():
        assert tokens == expected, name
        assert (summary["pauses"] > 0) == ("pauses" in name)
        assert (summary["empty_generation_slots"] > 0) == (name == "static")
    assert found["two passes"][1]["schedule_digest"] == found["fused"][1]["schedule_digest"]
    assert found["streaming"][1]["schedule_digest"] == found["fused"][1]["schedule_digest"]


def test_a_static_batch_takes_as_many_steps_as_its_longest_output(trace: Path, tmp_path: Path) -> None:
    _, summary = run(trace, tmp_path / "static", type="v1")
    batches = [OUTPUT_LENGTHS[:4], OUTPUT_LENGTHS[4:]]
    assert summary["iterations"] == sum(map(max, batches))
    assert summary["empty_generation_slots"] == sum(4 * max(batch) - sum(batch) for batch in batches)


def test_overlap_submits_the_next_batch_before_it_collects_one(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    submit, collect = ModelExecutor.submit, ModelExecutor.collect

    def spy_submit(self: ModelExecutor, batch: Batch) -> None:
        events.append(f"submit {batch.iteration}")
        submit(self, batch)

    def spy_collect(self: ModelExecutor) -> StepOutputs:
        events.append("collect")
        return collect(self)

    # After the warm-up, which does not overlap.
    monkeypatch.setattr("ifbbench.replay.single.warm_up", lambda *_: None)
    monkeypatch.setattr(ModelExecutor, "submit", spy_submit)
    monkeypatch.setattr(ModelExecutor, "collect", spy_collect)
    run(trace, tmp_path / "overlap", enable_trt_overlap=True)
    assert events[:5] == ["submit 0", "submit 1", "collect", "submit 2", "collect"]
    iterations = [json.loads(line) for line in (tmp_path / "overlap/run/iterations.jsonl").read_text().splitlines()]
    assert [row["MicroBatch ID"] for row in iterations[:4]] == [0, 1, 0, 1]
