"""The runner over published rows: how a row is replayed, its figures, errors, bands, and the whole command.

The figures of the rows here are made up.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.serving import errors, fastest_degree
from benchmarks.serving_bands import MADE_FOR, band, bands, coverage
from benchmarks.serving_rows import (
    LATER_ROUNDS,
    REQUESTS_PER_CLIENT,
    Comparison,
    config_of,
    engine_name,
    half,
    measured_figures,
    predict,
    requests_of,
    rows_of,
)
from ifbbench.simulated.expected_error import LOADS

ROW: dict[str, Any] = {
    "source": "made-up",
    "engine": "vllm",
    "version": "0.12.0",
    "gpu": "h100-sxm",
    "num_gpus": 1,
    "tp": 1,
    "model": "llama-3.1-8b",
    "dtype": "bf16",
    "input": 128,
    "output": 16,
    "concurrency": 4,
    "num_requests": 40,
    "max_num_tokens": 2048,
    "chunked_context": True,
    "generation": "current",
    "id": 1,
    "ttft_ms": {"mean": 50.0},
    "itl_ms": {"mean": 8.0},
}


def test_a_closed_loop_is_replayed_with_the_settings_of_its_engine():
    config = config_of(ROW, ROW["model"])
    requests = requests_of(ROW)

    assert (config.engine_overhead, config.policy, config.concurrency) == ("vllm", "max_utilization", 4)
    assert config.max_num_tokens == 128 + 4
    assert config_of(ROW | {"max_num_tokens": 64}, ROW["model"]).max_num_tokens == 64
    assert len(requests) == 4 * REQUESTS_PER_CLIENT
    assert {(request.prompt_len, request.output_len) for request in requests} == {(128, 16)}


@pytest.mark.parametrize(("version", "differ"), [("0.5.1.post1", False), ("0.5.6.post2", True)])
def test_a_closed_loop_of_an_engine_that_batches_prompts(version, differ):
    row = ROW | {"engine": "sglang", "version": version}
    requests = requests_of(row)

    assert config_of(row, row["model"]).max_num_tokens == 2048
    assert len(requests) == 4 * (1 + LATER_ROUNDS)
    assert (len({request.output_len for request in requests}) > 1) == differ


@pytest.mark.parametrize(
    ("engine", "version", "generation", "name"),
    [
        ("sglang", "0.5.1.post1", "current", "sglang-0.5.1"),
        ("sglang", "0.5.6.post2", "current", "sglang"),
        ("tensorrt-llm", "1.0.0rc3", "current", "tensorrt-llm"),
        ("vllm", "2024", "2024", "vllm-2024"),
        ("tensorrt-llm", "NIM 1.0 for LLMs", "2024", "tensorrt-llm-nim"),
        ("sglang", "0.1", "2024", None),
        ("other", "1", "current", None),
    ],
)
def test_a_row_has_the_overhead_of_its_version(engine, version, generation, name):
    assert engine_name({"engine": engine, "version": version, "generation": generation}) == name


def test_repeated_prompts_and_named_lengths():
    open_loop = {"concurrency": None, "rate": 5, "num_requests": 6, "distinct_prompts": 2}
    repeated = requests_of(ROW | open_loop)
    assert [request.prefix_ids for request in repeated] == [(0,), (1,)] * 3

    named = {"engine": "vllm", "version": "0.12.0", "generation": "current", "lengths": "pairs", "num_requests": 3}
    (row,) = rows_of({"rows": [named], "lengths": {"pairs": [[10, 2], [30, 4]]}})
    assert (row["input"], row["output"]) == (20, 3)
    found = requests_of(row)
    assert [(request.prompt_len, request.output_len) for request in found] == [(10, 2), (30, 4), (10, 2)]


def test_throughput_of_a_closed_loop_follows_from_its_latencies():
    assert measured_figures(ROW)["throughput"] == pytest.approx(4 * 16 / (0.05 + 15 * 0.008))
    assert measured_figures(ROW | {"output_tokens_per_s": 7.0})["throughput"] == 7.0


def test_a_row_is_predicted():
    found = predict(ROW, {})

    assert set(found) == {"ttft", "itl", "throughput"}
    assert 0.005 < found["itl"] < 0.02


def test_halves_are_of_the_row_and_not_of_its_figures():
    assert half(ROW) == half(ROW | {"itl_ms": {"mean": 1.0}, "id": 9})
    halves = {half(ROW | {"input": length}) for length in range(100)}
    assert halves == {"fit", "judge"}


def test_errors_by_metric():
    found = errors([Comparison(ROW, "itl", 1.0, value) for value in (0.5, 1.1, 1.1)])

    assert found == {"itl": {"rows": 3, "median": 0.1, "p90": 0.42, "bias": 0.1, "within_20": 0.6667}}


def test_the_fastest_degree_is_found_where_several_were_measured():
    rows = [ROW | {"num_gpus": size, "tp": size} for size in (1, 2)]
    right = [Comparison(row, "throughput", float(row["tp"]), 10.0 * row["tp"]) for row in rows]
    wrong = [Comparison(row, "throughput", float(row["tp"]), 10.0 / row["tp"]) for row in rows]

    assert fastest_degree(right) == {"groups": 1, "right": 1, "within_5_percent": 1}
    assert fastest_degree(wrong) == {"groups": 1, "right": 0, "within_5_percent": 0}
    assert fastest_degree(right[:1])["groups"] == 0


def test_a_band_has_its_share_of_the_values():
    values = [index / 100 for index in range(100)]
    low, high = band(values)

    inside = sum(low <= value <= high for value in values) / len(values)
    assert MADE_FOR <= inside < MADE_FOR + 0.05
    assert band([0.1, 0.5, 0.3]) == (0.1, 0.5)


def test_bands_are_by_engine_and_load_where_there_are_rows_enough():
    comparisons = [
        Comparison(ROW | {"input": length, "concurrency": clients}, "itl", 1.0, 1.0 + length / 1000)
        for clients, count in ((4, 40), (64, 5))
        for length in range(1, count + 1)
    ]
    (setup,) = bands(comparisons)

    assert (setup["engine"], setup["hardware"], setup["tp_sizes"]) == ("vllm", "h100-sxm", [1])
    assert [part["up_to"] for part in setup["loads"]] == [LOADS[0]]
    assert setup["all_loads"]["rows"] == 45
    assert bands(comparisons[:5]) == []
    assert 0.5 < coverage(comparisons)["itl"]["inside"] <= 1


def test_the_command_ends_with_one_json_object(tmp_path):
    rows = [ROW, ROW | {"id": 2, "gpu": "unknown"}]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"models": {}, "rows": rows}))
    command = [sys.executable, "-m", "benchmarks.serving", str(file), "--jobs", "1", "--plot", str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    result = json.loads(printed[printed.index("\n{\n") :])
    assert "current engines, by engine" in printed
    assert result["rows"] == 2
    assert result["parts"]["current engines"]["itl"]["rows"] == 1
    assert [one["row"] for one in result["failed"]] == [2]
    assert "no hardware profile 'unknown'" in result["failed"][0]["error"]
    assert {path.name for path in tmp_path.glob("*.png")} == {"serving-accuracy.png", "serving-regimes.png"}
