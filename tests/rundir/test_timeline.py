"""The timeline of a run has what its lines say, in each format; a single iteration is found without reading all."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ifbbench.compressed import open_to_read
from ifbbench.errors import InputError
from ifbbench.replay.run import run_trace
from ifbbench.rundir.run_directory import find_iterations
from ifbbench.rundir.timeline import Iterations, read_iteration, read_iterations
from ifbbench.settings.config import RunConfig


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """60 requests at once, so that many wait and are paused."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    lengths = [(40 + 13 * index % 170, 5 + 7 * index % 90) for index in range(60)]
    rows = [{"arrival_s": 0.0, "prompt_len": prompt, "output_len": output} for prompt, output in lengths]
    path.write_text("".join(json.dumps(row | {"request_id": index}) + "\n" for index, row in enumerate(rows)))
    return str(path)


def recorded(trace: str, directory: Path, **settings: Any) -> tuple[Path, dict[str, Any]]:
    """The file of iterations of a run, and its settings."""
    small: dict[str, Any] = {"max_tokens_in_paged_kvcache": 2048, "max_batch_size": 24, "policy": "max_utilization"}
    config = RunConfig(device="sim:h100-sxm", model="llama-3.1-8b", output=str(directory), **(small | settings))
    run_trace(trace, config)
    return find_iterations(directory), config.as_dict()


def test_columns_are_what_the_lines_say(trace: str, tmp_path: Path) -> None:
    path, config = recorded(trace, tmp_path / "run")
    found, rows = read_iterations(path, config), [json.loads(line) for line in path.read_text().splitlines()]
    details = [row["ifbbench"] for row in rows]
    assert found.number.tolist() == [row["Iteration Counter"] for row in rows]
    assert found.active.tolist() == [row["Active Request Count"] for row in rows]
    assert found.used_blocks.tolist() == [row["Used KV cache blocks"] for row in rows]
    for name in ("start_s", "queued", "waiting", "budget_used"):
        assert getattr(found, name).tolist() == [one[name] for one in details]
    assert found.end_s.tolist() == [one["start_s"] + one["latency_ms"] / 1000 for one in details]
    assert [found.limits[code] for code in found.limit] == [one["bound_by"] for one in details]
    left_out = [None if code < 0 else found.left_out_pairs[code] for code in found.left_out]
    named = [one["first_left_out"] for one in details]
    assert left_out == [None if one is None else (one["request_id"], one["reason"]) for one in named]
    pauses = [
        (row["Iteration Counter"], pause["request_id"], pause["for"])
        for row in rows
        for pause in row["ifbbench"]["paused"]
    ]
    assert [(one.iteration, one.victim, one.beneficiary) for one in found.pauses] == pauses
    assert pauses


@pytest.mark.parametrize(
    "settings",
    [
        {"iteration_stats_format": "trtllm"},
        {"recording_format": "jsonl.gz"},
        {"max_attention_window": "64,256", "policy": "guaranteed_no_evict", "max_tokens_in_paged_kvcache": 8192},
        {"type": "v1", "policy": "static_batch", "enable_chunked_context": False},
    ],
)
def test_forms_of_recording_have_the_same_columns(trace: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    usual = {
        name: value for name, value in settings.items() if name not in ("iteration_stats_format", "recording_format")
    }
    expected = read_iterations(*recorded(trace, tmp_path / "usual", **usual))
    path, config = recorded(trace, tmp_path / "other", **settings)
    found = read_iterations(path, config)
    for name, value in vars(expected).items():
        np.testing.assert_equal(getattr(found, name), value)
    with open_to_read(path) as lines:
        assert len(found) == sum(1 for _ in lines)
    for index in (0, len(found) // 2, len(found) - 1):
        one = read_iteration(path, int(found.number[index]))
        assert isinstance(one, Iterations)
        assert (one.start_s[0], one.waiting[0]) == (found.start_s[index], found.waiting[index])
    assert read_iteration(path, int(found.number[-1]) + 1) is None


def test_times_of_tokens_are_looked_up_or_interpolated(trace: str, tmp_path: Path) -> None:
    whole = read_iterations(*recorded(trace, tmp_path / "whole"))
    thinned = read_iterations(*recorded(trace, tmp_path / "thinned", iteration_stats_every=10))
    asked = np.arange(-3, len(whole) + 5)
    assert len(thinned) < len(whole)
    for found in (whole, thinned):
        expected = np.interp(asked, found.number, found.delivered_s)
        np.testing.assert_array_equal(found.delivered_at(asked), expected)


@pytest.mark.parametrize(("field", "value"), [("waiting", None), ("start_s", 1e15)])
def test_a_bad_value_is_an_error(trace: str, tmp_path: Path, field: str, value: object) -> None:
    path, config = recorded(trace, tmp_path / "run")
    lines = path.read_text().splitlines()
    row = json.loads(lines[4])
    row["ifbbench"][field] = value
    path.write_text("\n".join([*lines[:4], json.dumps(row), *lines[5:]]) + "\n")
    with pytest.raises(InputError, match=r"iterations\.jsonl"):
        read_iterations(path, config)
