"""The runner over published rows: how a row is replayed, its figures, errors, bands, and the whole command.

The figures of the rows here are made up.
"""

import csv
import json
import math
import subprocess
import sys
from random import Random
from statistics import fmean
from typing import Any

import pytest

from benchmarks.fit_rows import KEYS, TABLE, part_of
from benchmarks.inferencex_recipes import KEYS as RECIPE_KEYS
from benchmarks.inferencex_recipes import TABLE as RECIPES
from benchmarks.inferencex_rows import standard_row, tensorrt_llm_version
from benchmarks.serving import errors, fastest_degree
from benchmarks.serving_bands import Known, band, bands, curve_of, held_out, limit, weighted
from benchmarks.serving_differences import better_apart, better_deployment
from benchmarks.serving_rows import (
    AICONFIGURATOR,
    LATER_ROUNDS,
    PROMPT_ROOM,
    REQUESTS_PER_CLIENT,
    Comparison,
    NotReplayable,
    check,
    config_of,
    engine_name,
    figures_of,
    measured_figures,
    predict,
    requests_of,
    rows_of,
)
from benchmarks.serving_runs import NOT_RUN, predictions
from ifbbench.fleet.sides import side_values
from ifbbench.simulated.expected_error import COVERAGE, LOADS

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


def test_a_row_of_vllm_is_replayed_by_its_scheduler_with_the_settings_of_the_row():
    config = config_of(ROW, ROW["model"])
    requests = requests_of(ROW)

    assert (config.engine, config.engine_overhead, config.concurrency) == ("vllm", "vllm", 4)
    assert (config.max_num_tokens, config.max_batch_size, config.tokens_per_block) == (2048, 1024, 16)
    assert (config.async_scheduling, config.enable_kv_cache_reuse) == (True, False)
    assert config_of(ROW | {"overlap": False}, ROW["model"]).async_scheduling is False
    assert config_of(ROW | {"gpu": "b200", "max_num_tokens": None}, ROW["model"]).max_num_tokens == 16_384
    assert len(requests) == 4 * REQUESTS_PER_CLIENT
    assert {request.prompt_len for request in requests} == {128}
    assert len({request.output_len for request in requests}) > 1


def test_rows_of_aiconfigurator_have_equal_requests_and_the_settings_of_its_servers():
    row = ROW | {"source": AICONFIGURATOR}
    config = config_of(row, row["model"])

    assert (config.max_num_tokens, config.async_scheduling) == (128 + 4 + PROMPT_ROOM, False)
    assert {request.output_len for request in requests_of(row)} == {16}


def test_at_most_one_prompt_of_tensorrt_llm_runs_in_an_iteration():
    row = ROW | {"source": AICONFIGURATOR, "engine": "tensorrt-llm", "version": "1.0.0rc3"}

    assert config_of(row, row["model"]).max_num_tokens == 128 + 4
    assert config_of(row | {"max_num_tokens": 64}, row["model"]).max_num_tokens == 64
    assert config_of(row | {"source": "other"}, row["model"]).max_num_tokens == 2048
    assert {request.output_len for request in requests_of(row)} == {16}


def test_servers_of_tensorrt_llm_of_aiconfigurator_have_a_cache_of_8_bits_beside_quantized_weights():
    row = ROW | {"source": AICONFIGURATOR, "engine": "tensorrt-llm", "version": "1.0.0rc3", "model": "qwen3-32b"}
    quantized = row | {"dtype": "fp8"}

    assert config_of(row, row["model"]).kv_cache_dtype is None
    assert config_of(quantized, row["model"]).dtype == "fp8_block"
    assert config_of(quantized, row["model"]).kv_cache_dtype == "fp8"
    assert config_of(quantized | {"kv_cache_dtype": "bf16"}, row["model"]).kv_cache_dtype == "bf16"
    assert config_of(quantized | {"source": "other"}, row["model"]).kv_cache_dtype is None


def test_first_requests_count_by_their_share_of_all_that_the_source_sent():
    row = ROW | {"concurrency": None, "rate": 5, "distinct_prompts": 2, "num_requests": 4, "num_requests_published": 20}
    ttft_s = (1.0, 1.0, 0.0, 0.0)
    times = {"tpot_s": 0.1, "arrival_s": 0.0, "e2e_s": 2.0, "output_len": 16}
    requests = [{"request_id": index, "ttft_s": one, **times} for index, one in enumerate(ttft_s)]

    assert figures_of(row, requests, {})["ttft"] == pytest.approx(2 / 20)
    assert figures_of(row | {"num_requests_published": 0}, requests, {})["ttft"] == pytest.approx(0.5)


def test_a_row_of_sglang_is_replayed_by_its_scheduler_with_the_defaults_of_sglang():
    config = config_of(ROW | {"engine": "sglang", "max_num_tokens": None}, ROW["model"])

    assert (config.engine, config.engine_overhead, config.max_num_tokens) == ("sglang", "sglang", 8192)
    assert (config.enable_mixed_chunk, config.disable_overlap_schedule) == (False, False)


@pytest.mark.parametrize(("version", "is_mixed"), [("0.5.1.post1", False), ("0.5.6.post2", True)])
def test_servers_of_aiconfigurator_have_mixed_chunks_in_later_versions_of_sglang(version, is_mixed):
    row = ROW | {"source": AICONFIGURATOR, "engine": "sglang", "version": version}
    config = config_of(row, row["model"])

    assert (config.enable_mixed_chunk, config.disable_overlap_schedule) == (is_mixed, is_mixed)
    assert config.max_prefill_tokens == (128 + PROMPT_ROOM if is_mixed else 16_384)


def test_a_closed_loop_of_an_older_engine_counts_a_part_of_its_rounds():
    requests = requests_of(ROW | {"engine": "tensorrt-llm", "version": "NIM 1.0", "generation": "2024"})

    assert len(requests) == 4 * (1 + LATER_ROUNDS)
    assert len({request.output_len for request in requests}) > 1


@pytest.mark.parametrize(
    ("engine", "version", "generation", "name"),
    [
        ("sglang", "0.5.1.post1", "current", "sglang"),
        ("sglang", "0.5.6.post2", "current", "sglang"),
        ("tensorrt-llm", "1.0.0rc3", "current", "tensorrt-llm-1.1"),
        ("tensorrt-llm", "1.1.0rc2", "current", "tensorrt-llm-1.1"),
        ("tensorrt-llm", "1.2.0rc6", "current", "tensorrt-llm-1.2"),
        ("tensorrt-llm", "1.3.0rc14", "current", "tensorrt-llm"),
        ("vllm", "2024", "2024", "vllm-2024"),
        ("tensorrt-llm", "NIM 1.0 for LLMs", "2024", "tensorrt-llm-nim"),
        ("tensorrt-llm", "NIM 1.8.0", "current", "tensorrt-llm-compiled"),
        ("sglang", None, "current", "sglang"),
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

    assert set(found) == {"ttft", "itl", "tpot", "throughput", "power_w_per_gpu"}
    assert found["tpot"] == found["itl"]
    assert 0.005 < found["itl"] < 0.02


INFERENCEX: dict[str, Any] = {
    "source": "inferencex-dsr1",
    "engine": "sglang",
    "model": "llama-3.1-8b",
    "dtype": "bf16",
    "gpu": "h200",
    "input": 100,
    "output": 50,
    "concurrency": 4,
    "disaggregated": False,
    "decode": {"workers": 0, "tp": 2, "ep": 1, "dp_attention": False, "gpus": 2},
    "ttft_ms": {"p50": 20.0, "p99": 30.0},
    "itl_ms": {"p50": 100.0},
    "tpot_ms": {"p50": 9.0},
    "output_tokens_per_s_per_gpu": 100.0,
    "generation": "current",
    "id": 3,
}


def test_a_row_of_inferencex_has_medians_random_lengths_and_the_throughput_of_all_gpus():
    (row,) = rows_of({"rows": [INFERENCEX]})

    assert measured_figures(row) == {"ttft": 0.02, "tpot": 0.009, "throughput": 200.0}
    assert (row["gpu"], row["num_gpus"], row["input"], row["output"]) == ("h200-sxm", 2, 90, 45)
    lengths = requests_of(row)
    assert {80, 100} <= {request.prompt_len for request in lengths} | {80, 100}
    assert all(80 <= request.prompt_len <= 100 and 40 <= request.output_len <= 50 for request in lengths)
    found = predict(row, {})
    assert 0.001 < found["tpot"] < 0.02


def deepseek(**changes):
    row = INFERENCEX | {"model": "deepseek-r1", "gpu": "b200", "dtype": "fp4", "input": 8192, "output": 1024}
    row |= {"date": "2026-03-01", "decode": {"tp": 8, "ep": 8, "dp_attention": False}} | changes
    (found,) = rows_of({"rows": [row]})
    return found, config_of(found, found["model"])


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"concurrency": 4}, {"scheduler_recv_interval": 10, "max_num_tokens": 16_384, "kv_cache_dtype": "fp8"}),
        ({"concurrency": 16, "dtype": "fp8"}, {"scheduler_recv_interval": 30, "max_num_tokens": 32_768}),
        (
            {"gpu": "h200", "dtype": "fp8"},
            {"scheduler_recv_interval": 1, "max_batch_size": 256, "kv_cache_dtype": "bf16"},
        ),
        ({"drafts": "mtp"}, {"draft_mtp": 2, "acceptance_rate": "0.38", "max_batch_size": 512}),
        ({"engine": "tensorrt-llm", "concurrency": 16}, {"max_num_tokens": 8320, "enable_chunked_context": False}),
        ({"engine": "tensorrt-llm", "input": 1024}, {"max_num_tokens": 8192}),
        ({"engine": "tensorrt-llm", "input": 1024, "date": "2025-12-10"}, {"max_num_tokens": 1152}),
        (
            {"engine": "tensorrt-llm", "drafts": "mtp", "output": 8192},
            {"draft_mtp": 3, "acceptance_rate": "0.85,0.74,0.64"},
        ),
        # Without overlap as long as the image's engine needs a variable for it, which only this script does not export.
        ({"dtype": "fp8", "drafts": "mtp", "date": "2026-03-25"}, {"disable_overlap_schedule": True}),
        ({"dtype": "fp8", "drafts": "mtp", "date": "2026-05-17"}, {"disable_overlap_schedule": False}),
        ({"dtype": "fp8", "date": "2026-03-25"}, {"disable_overlap_schedule": False}),
        (
            {"engine": "tensorrt-llm", "drafts": "mtp", "decode": {"tp": 8, "ep": 8, "dp_attention": True}},
            {"draft_mtp": 1, "max_batch_size": 8, "max_num_tokens": 8 * 8320, "attention_dp_size": 8}
            | {"attention_dp_enable_balance": True, "attention_dp_time_out_iters": 60},
        ),
    ],
)
def test_servers_of_inferencex_have_the_settings_of_their_scripts(changes, settings):
    _, config = deepseek(**changes)
    assert {name: getattr(config, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({"date": "2025-12-10"}, True),
        ({}, False),  # the client warms the server up
        ({"date": "2025-12-10", "concurrency": 1}, False),  # no prompt is cut
        ({"date": "2025-12-10", "gpu": "h200"}, False),
        ({"date": "2025-12-10", "engine": "tensorrt-llm"}, False),
    ],
)
def test_sglang_on_blackwell_compiles_where_nothing_has_warmed_it_up(changes, waits):
    row, _ = deepseek(**changes)
    requests = [
        {"request_id": index, "ttft_s": 1.0, "tpot_s": 0.1, "arrival_s": 0.0, "e2e_s": 10.0, "output_len": 900}
        for index in range(10 * row["concurrency"])
    ]
    seconds = 10 + 72 if waits else 10
    assert figures_of(row, requests, {"itl_s": {"mean": 0.1}})["throughput"] == pytest.approx(
        len(requests) * 900 / seconds
    )


@pytest.mark.parametrize(
    ("changes", "times"),
    [
        ({"gpu": "b300", "date": "2026-05-13"}, 35_921 / 7_140),
        ({"gpu": "b300", "date": "2026-05-17"}, 1),  # the client was mended
        ({"gpu": "b200", "date": "2026-05-13"}, 1),  # an image with transformers 4
        ({"gpu": "b300", "date": "2026-05-13", "engine": "tensorrt-llm"}, 1),
    ],
)
def test_prompts_are_longer_where_the_client_had_a_wrong_tokenizer(changes, times):
    row, _ = deepseek(**changes)
    expected, _ = deepseek()
    assert row["input"] == pytest.approx(expected["input"] * times, rel=0.001)
    assert (row["output"], row["lengths_of"]) == (expected["output"], expected["lengths_of"])


@pytest.mark.parametrize(
    ("changes", "overhead"),
    [
        ({"date": "2025-12-10"}, "tensorrt-llm-1.1"),
        ({"date": "2026-02-03"}, "tensorrt-llm-1.2"),
        ({"date": "2026-02-03", "drafts": "mtp"}, "tensorrt-llm-1.1"),  # its image changed later
        ({"date": "2026-05-19"}, "tensorrt-llm"),
        ({"date": "2026-02-03", "gpu": "h200", "dtype": "fp8"}, "tensorrt-llm-1.1"),
        ({"date": "2026-05-18", "gpu": "h200", "dtype": "fp8"}, "tensorrt-llm"),
    ],
)
def test_a_row_of_inferencex_has_the_overhead_of_the_image_of_its_date(changes, overhead):
    assert deepseek(engine="tensorrt-llm", **changes)[1].engine_overhead == overhead


def test_disaggregated_rows_have_the_version_in_the_image_of_dynamo():
    row = {"engine": "tensorrt-llm", "gpu": "gb200", "dtype": "fp4", "disaggregated": True}
    versions = {date: tensorrt_llm_version(row | {"date": date}) for date in ("2025-12-05", "2026-02-03")}
    assert versions == {"2025-12-05": "1.1.0rc2", "2026-02-03": "1.2.0rc6"}
    assert tensorrt_llm_version(row | {"gpu": "b300", "date": "2026-01-28"}) == "1.2.0rc6"


def test_rows_of_inferencex_have_no_means_beside_medians():
    row, _ = deepseek(ttft_ms={"mean": 7000.0, "p50": 600.0, "p99": 68_000.0}, tpot_ms={"mean": 10.0})
    assert measured_figures(row) == {"ttft": 0.6, "tpot": 0.01, "throughput": pytest.approx(row["output_tokens_per_s"])}


def test_rounds_that_were_not_replayed_take_as_long_as_the_latest_ones():
    row, _ = deepseek()
    times = {"ttft_s": 1.0, "tpot_s": 0.1, "output_len": 900, "e2e_s": 10.0}
    requests = [{"request_id": index, "arrival_s": 10.0 * (index // 4), **times} for index in range(8)]
    assert figures_of(row, requests, {"itl_s": {"mean": 0.1}})["throughput"] == pytest.approx(4 * 900 / 10)


def test_curves_of_a_source_are_fit_or_judged():
    fit, _ = deepseek(input=1024)
    assert part_of(fit) == "fit"
    assert part_of(deepseek()[0]) == part_of(deepseek(input=1024, drafts="mtp")[0]) == "judged"
    assert part_of(deepseek(input=1024, gpu="b300")[0]) == "judged"


def test_medians_are_compared_with_medians():
    requests = [{"request_id": index, "ttft_s": one, "tpot_s": one} for index, one in enumerate((9.0, 1.0, 2.0, 3.0))]
    row = ROW | {"concurrency": 1, "ttft_ms": {"p50": 1.0}}
    found = figures_of(row, requests, {})

    assert found["ttft"] == 2.0
    assert found["itl"] == pytest.approx(0.1 * 9 + 0.9 * 2)
    assert "throughput" not in measured_figures(row)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (ROW | {"disaggregated": True}, "different GPUs"),
        (ROW | {"input": None}, "does not say the lengths"),
        (ROW | {"model": None, "gpu": ""}, "does not say gpu, model"),
        (ROW | {"concurrency": None, "num_requests": None}, "neither clients nor a rate"),
    ],
)
def test_a_row_that_cannot_be_replayed_says_why(row, reason):
    with pytest.raises(NotReplayable, match=reason):
        check(standard_row(row) if "decode" in row else row)


def apart(prefill: str, decode: str, **changes: Any) -> tuple[dict[str, Any], Any]:
    """A disaggregated row with so many workers x GPUs of each, and its settings."""
    sides = {}
    for name, text in (("prefill", prefill), ("decode", decode)):
        workers, gpus = map(int, text.split("x"))
        sides[name] = {"workers": workers, "tp": gpus, "ep": gpus, "dp_attention": True, "gpus": workers * gpus}
    return deepseek(disaggregated=True, **sides, **changes)


def test_a_disaggregated_row_has_two_sides():
    row, config = apart("1x8", "9x8", gpu="h200", dtype="fp8", input=1024, engine="tensorrt-llm", concurrency=72)
    assert row["num_gpus"] == 80
    assert row["output_tokens_per_s"] == pytest.approx(72 * INFERENCEX["output_tokens_per_s_per_gpu"])
    assert part_of(row) == "judged"
    assert (config.prefill_replicas, config.decode_replicas) == (1, 9)
    assert config.prefill.startswith("tp_size=8,ep_size=8,attention_dp_size=8,")
    assert config.decode.startswith("tp_size=8,ep_size=8,attention_dp_size=1,")


@pytest.mark.parametrize(
    ("workers", "changes", "prefill", "decode", "drafts"),
    [
        # 256 requests and 256 slots of experts on each of 16 GPUs, one draft token.
        (
            ("11x4", "1x16"),
            {"engine": "tensorrt-llm", "gpu": "gb200", "drafts": "mtp", "concurrency": 4301},
            {"max_num_tokens": 4 * 16_640, "max_batch_size": 4 * 2, "kv_cache_free_gpu_mem_fraction": 0.6},
            {"max_batch_size": 16 * 256, "kv_cache_free_gpu_mem_fraction": 0.8},
            1,
        ),
        # The recipe depends on the number of clients.
        (
            ("1x8", "9x8"),
            {"engine": "tensorrt-llm", "gpu": "h200", "dtype": "fp8", "input": 1024, "concurrency": 11},
            {},
            {"max_batch_size": 1},
            None,
        ),
        (
            ("1x8", "9x8"),
            {"engine": "tensorrt-llm", "gpu": "h200", "dtype": "fp8", "input": 1024, "concurrency": 576},
            {},
            {"max_batch_size": 256},
            None,
        ),
        (
            ("4x4", "1x32"),
            {"engine": "sglang", "gpu": "gb200", "dtype": "fp4", "input": 1024, "concurrency": 4096},
            {"max_num_tokens": 65_536, "gpu_memory_utilization": 0.84},
            {"max_batch_size": 67_584, "gpu_memory_utilization": 0.83, "scheduler_recv_interval": 1},
            None,
        ),
        # Its script has tensor parallelism, whatever the row says.
        (
            ("1x4", "2x4"),
            {"engine": "sglang", "gpu": "gb200", "dtype": "fp4", "input": 1024, "concurrency": 4},
            {"attention_dp_size": 1, "max_num_tokens": 8192},
            {"attention_dp_size": 1, "scheduler_recv_interval": 10},
            None,
        ),
    ],
)
def test_sides_have_the_settings_of_recipes(workers, changes, prefill, decode, drafts):
    _, config = apart(*workers, **changes)
    assert {name: side_values(config, "prefill")[name] for name in prefill} == prefill
    assert {name: side_values(config, "decode")[name] for name in decode} == decode
    assert config.draft_mtp == drafts


def test_sglang_accepts_as_the_model_does_where_drafts_are_overlapped():
    drafted = {"engine": "sglang", "dtype": "fp8", "drafts": "mtp", "concurrency": 64}
    rates = {gpu: apart("1x8", "1x8", **drafted, gpu=gpu)[1].acceptance_rate for gpu in ("b200", "h200")}
    assert rates == {"b200": "0.71,0.615,0.533", "h200": "0.38"}
    assert deepseek(**drafted)[1].acceptance_rate == "0.38"


def test_a_recipe_is_of_one_deployment():
    with RECIPES.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    of_all = [tuple(line[key] for key in (*RECIPE_KEYS, "concurrency")) for line in lines]
    assert len(of_all) == len(set(of_all))
    assert all(int(line["decode_batch"]) > 0 and 0 < float(line["decode_memory"]) < 1 for line in lines)
    assert all((line["drafts"] == "none") == (line["num_drafts"] == "0") for line in lines)


def test_which_of_aggregated_and_disaggregated_is_better_is_of_pairs_with_similar_tpot():
    def measured(number: int, tpot_s: float, throughput: float, predicted: float, **row: Any) -> list[Comparison]:
        row = {"id": number, "lengths_of": "1/1", "concurrency": 4, **row}
        return [
            Comparison(row, "tpot", tpot_s, 0.01),
            Comparison(row, "throughput", throughput, predicted),
        ]

    alone = {"num_gpus": 8, "tp": 8}
    sides = {"num_gpus": 16, "sides": {"prefill": {}, "decode": {}}}
    rows = [
        *measured(1, 0.010, 800.0, 700.0, **alone),  # 100 of each GPU, 87.5 predicted
        *measured(2, 0.011, 3200.0, 2400.0, **sides),  # 200, 150: better, as predicted
        *measured(3, 0.011, 3200.0, 2400.0, **sides),  # the same again
        *measured(4, 0.012, 1760.0, 2000.0, **sides, concurrency=8),  # 110: within the noise
        *measured(5, 0.013, 3200.0, 3200.0, **sides, concurrency=9),  # other TPOT
        *measured(6, 0.009, 800.0, 1600.0, **sides, concurrency=16),  # 50: worse, but 100 predicted
        *measured(7, 0.010, 9999.0, 9.0, **sides, drafts="mtp"),
    ]
    assert better_apart(rows) == {"pairs": 2, "right": 1, "apart_is_better": 1}


def test_which_of_two_deployments_under_one_load_is_better_is_judged_by_tokens_of_each_gpu():
    def row(measured, predicted, **values):
        """A deployment of eight GPUs, if `values` have no other number."""
        values = {"lengths_of": "1024/1024", "tp": 8, "num_gpus": 8, "dtype": "fp8"} | values
        return Comparison(ROW | values, "throughput", measured, predicted)

    rows = [
        *(row(measured, 800.0, date=date) for date, measured in enumerate((700.0, 800.0, 5000.0))),  # 100 a GPU
        row(800.0, 800.0, tp=4, num_gpus=4),  # 200 a GPU: better than all others, as predicted
        row(840.0, 700.0, dtype="nvfp4"),  # 105: within the noise of the first one, and predicted to be worse
        row(720.0, 4000.0, drafts="mtp"),  # 90: the worst, but predicted to be the best
        row(100.0, 900.0, concurrency=8, dtype="nvfp4"),  # another load
        row(100.0, 900.0, sides={"prefill": {}, "decode": {}}),
    ]
    assert better_deployment(rows) == {"pairs": 5, "right": 2, "all_pairs": 6, "all_right": 2}


def test_a_disaggregated_row_without_workers_is_not_replayed():
    side = {"workers": 0, "tp": 28, "ep": 1, "dp_attention": False, "gpus": 28}
    row = INFERENCEX | {"engine": "tensorrt-llm", "disaggregated": True, "prefill": side, "decode": side}
    with pytest.raises(NotReplayable, match="its recipe is not known"):
        check(standard_row(row))


def test_a_disaggregated_row_has_as_many_rounds_as_are_affordable():
    workers = {"engine": "tensorrt-llm", "gpu": "h200", "dtype": "fp8", "input": 1024}
    rounds = {
        clients: len(requests_of(apart("1x8", "9x8", **workers, concurrency=clients)[0])) for clients in (11, 576)
    }
    assert rounds == {11: 10 * 11, 576: 2 * 576}


def test_a_disaggregated_row_is_replayed_where_the_engine_has_sides():
    apart = {"workers": 1, "tp_size": 1}
    row = ROW | {"disaggregated": True, "sides": {"prefill": apart, "decode": apart}, "num_gpus": 2}
    alone = predict(ROW, {})
    found = predict(row, {})

    assert found["ttft"] > alone["ttft"]  # keys and values are sent
    assert found["itl"] == pytest.approx(alone["itl"], rel=0.3)


def test_an_unknown_model_is_a_reason():
    with pytest.raises(NotReplayable, match="model unheard-of is not known"):
        predict(ROW | {"model": "unheard-of"}, {})


def test_replicas_share_the_load_and_add_up():
    row = ROW | {"num_gpus": 4, "tp": 2, "replicas": 2, "concurrency": 9, "num_requests": 90}
    config = config_of(row, row["model"])

    assert (config.tp_size, config.pp_size, config.concurrency) == (2, 1, 5)
    assert len(requests_of(row)) == 5 * REQUESTS_PER_CLIENT
    assert measured_figures(row)["throughput"] == pytest.approx(2 * 5 * 16 / (0.05 + 15 * 0.008))
    of_rate = row | {"concurrency": None, "rate": 6.0}
    assert config_of(of_rate, row["model"]).request_rate == 3.0
    assert len(requests_of(of_rate)) == 45


def test_only_listed_rows_are_fit():
    listed = dict(zip(KEYS, TABLE.read_text().splitlines()[1].split(",")[:4], strict=True))

    assert part_of(ROW | listed) == "fit"
    assert part_of(ROW | listed | {"version": "0.13.0"}) == "judged"
    assert part_of(ROW | listed | {"gpu": "h200-sxm"}) == "judged"
    assert part_of(ROW) == "judged"


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


def test_a_band_is_a_factor_that_its_share_of_further_curves_is_within():
    # The 0.8 (99 + 1)-th of 99 curves in order; of 8, a fifth of the way from the seventh to the eighth.
    scores = [(str(index), index / 100) for index in range(1, 100)]
    assert limit(weighted(scores)) == pytest.approx(0.8)
    assert band(weighted(scores)) == (round(math.exp(-0.8) - 1, 3), round(math.exp(0.8) - 1, 3))
    assert limit(weighted(scores[:8])) == pytest.approx(0.072)
    # A curve with many rows counts as much as one with a single row; of three curves nothing follows.
    many = [("many", 2.0)] * 1000 + scores[:9]
    assert limit(weighted(many)) == pytest.approx(limit(weighted([("many", 2.0), *scores[:9]])), abs=0.01)
    assert limit(weighted(scores[:4])) == pytest.approx(0.04)
    assert math.isinf(limit(weighted(scores[:3])))


def scores_of_curves(cell: tuple[str, ...], curves: int, figure: str = "ttft_s") -> list[tuple[str, Any, Any]]:
    return [(figure, cell, (f"{cell} {index}", index / 100)) for index in range(curves)]


def test_a_regime_with_few_curves_has_the_band_of_a_larger_one():
    known = Known(
        [
            *scores_of_curves(("vllm", "h100-sxm", "8"), 8),
            *scores_of_curves(("vllm", "h100-sxm", "32"), 2),
            *scores_of_curves(("vllm", "h200-sxm", "32"), 7),
            *scores_of_curves(("vllm", "b200", "8"), 7),
            *scores_of_curves(("sglang", "b200", "8"), 7),
            *scores_of_curves(("sglang", "b200", "8"), 7, "itl_s"),
        ]
    )
    regimes = {
        ("vllm", "h100-sxm", "8"): ("vllm", "h100-sxm", "8"),
        ("vllm", "h100-sxm", "32"): ("vllm", "h100-sxm"),
        ("vllm", "h200-sxm", "32"): ("vllm", "hopper GPUs"),
        ("vllm", "b200", "8"): ("vllm",),
        ("sglang", "b200", "8"): (),
    }
    for cell, regime in regimes.items():
        assert known.regime_of(cell) == regime
    assert known.bands((), ("ttft_s", "itl_s")).keys() == {"ttft_s"}
    assert len(known.scores(("vllm", "hopper GPUs"), "ttft_s")) == 17


@pytest.mark.parametrize("within", [0.0, 0.12])
@pytest.mark.parametrize("curves", [8, 9, 12, 20])
def test_bands_cover_further_curves_as_often_as_they_say(curves, within):
    """Simulated errors of a regime with so many curves of one to eight rows, long-tailed, which err together (within 0)
    or less so. One further curve is tried on each band."""
    random, inside = Random(curves), list[float]()

    def curve(bias: float) -> list[float]:
        student_t = random.gauss(0, 1) / math.sqrt(sum(random.gauss(0, 1) ** 2 for _ in range(3)) / 3)
        of_curve = bias + 0.12 * student_t
        return [abs(of_curve + random.gauss(0, within)) for _ in range(random.randint(1, 8))]

    for _ in range(600):
        bias = random.gauss(0, 0.07)
        scores = [(str(index), row) for index in range(curves) for row in curve(bias)]
        most = limit(weighted(scores))
        inside.append(fmean(row <= most for row in curve(bias)))
    assert fmean(inside) == pytest.approx(COVERAGE, abs=0.05)  # of 600 curves: a deviation of 0.016


def test_rows_of_a_curve_differ_in_load_and_date():
    first, _ = deepseek()
    assert curve_of(first) == curve_of(deepseek(concurrency=64, date="2026-04-01")[0])
    for changes in ({"drafts": "mtp"}, {"input": 1024}, {"gpu": "b300"}, {"decode": first | {"tp": 4}}):
        assert curve_of(first) != curve_of(
            deepseek(**{"decode": {"tp": 8, "ep": 8, "dp_attention": False}} | changes)[0]
        )


def comparisons_of(curves: int, clients: int, **changes) -> list[Comparison]:
    """Curves with an error of their own each, from 1 to 2 times, with two rows."""
    return [
        Comparison(ROW | {"input": 100 + curve, "concurrency": clients} | changes, "itl", 1 + curve / curves, 1.0)
        for curve in range(curves)
        for _ in range(2)
    ]


def test_bands_are_by_engine_and_load():
    (setup,) = bands(comparisons_of(20, 4) + comparisons_of(2, 64))

    assert (setup["engine"], setup["hardware"], setup["tp_sizes"]) == ("vllm", "h100-sxm", [1])
    of_gpu = "vllm on h100-sxm"
    # Two curves are too few; they have the lengths of others, so that there are 20 in all.
    assert [(part["up_to"], part["of"], part["curves"]) for part in setup["loads"]] == [
        (LOADS[0], f"{of_gpu} with 1 to 8 requests at a time", 20),
        (LOADS[2], of_gpu, 20),
    ]
    assert setup["all_loads"] == {name: value for name, value in setup["loads"][1].items() if name != "up_to"}
    assert setup["drafts"] == ["none"]
    low, high = setup["loads"][0]["bands"]["itl_s"]
    assert (1 + low) * (1 + high) == pytest.approx(1, abs=1e-3)
    assert bands(comparisons_of(3, 4)) == []


def test_rows_are_tried_on_a_band_without_their_curve():
    judged, regime = comparisons_of(20, 4), "vllm on h100-sxm with 1 to 8 requests at a time"
    found = held_out(judged)
    # The first 16, which are within the 16th of the 19 others.
    assert found["by_regime"] == {regime: {"rows": 40, "curves": 20, "inside": 0.8, "inside_by_curve": 0.8}}
    assert found["by_figure"].keys() == {f"{regime}: itl_s"}
    assert held_out(judged, "fit") == {"by_regime": {}, "by_figure": {}}
    # A row that is far from all others is in no band, and few have none.
    far = Comparison(ROW | {"input": 999, "concurrency": 4}, "itl", 9.0, 1.0)
    assert held_out([*judged, far])["by_regime"][regime]["inside"] < 35 / 41
    assert held_out([far])["by_regime"] == {}
    # Servers with prefill and decode apart are others.
    apart_too = [Comparison({**one.row, "disaggregated": True}, "itl", 9.0, 1.0) for one in judged]
    assert held_out([*judged, *apart_too]) == found


def test_predictions_that_were_interrupted_go_on(tmp_path, capsys):
    cache, other = tmp_path / "kept.jsonl", ROW | {"concurrency": 2}
    (first,) = predictions([ROW], {}, 1, cache)
    assert "1 of 1 predictions" in capsys.readouterr().err
    with cache.open("a") as file:
        file.write('{"key": "cut')
    # No further row begins: what is there was kept.
    found = predictions([ROW, other, ROW | {"id": 9}], {}, 1, cache, minutes=0.0)
    assert found[0] == found[2] == first
    assert found[1] == {"error": NOT_RUN}


def test_the_command_ends_with_one_json_object(tmp_path):
    rows = [ROW, ROW | {"id": 2, "gpu": "unknown"}]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"models": {}, "rows": rows}))
    command = [sys.executable, "-m", "benchmarks.serving", str(file), "--jobs", "1", "--plot", str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    result = json.loads(printed[printed.index("\n{\n") :])
    assert "judged rows, by engine" in printed
    assert "not replayed: 1 rows of made-up: " in printed
    assert result["rows"] == 2
    assert result["judged"]["itl"].keys() == {"rows", "median", "p90", "bias"}
    assert result["judged"]["itl"]["rows"] == 1
    assert result["fit_rows"] == {}
    assert [one["row"] for one in result["failed"]] == [2]
    assert "no hardware profile 'unknown'" in result["failed"][0]["error"]
    names = {"serving-accuracy-judged.png", "serving-regimes-judged.png"}
    assert {path.name for path in tmp_path.glob("*.png")} == names
