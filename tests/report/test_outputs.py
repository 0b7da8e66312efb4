"""The files of trtllm-bench and of `vllm bench serve`: their names, and figures computed from them by hand."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ifbbench.errors import InputError
from ifbbench.report.compat.trtllm_bench import percentiles, report, write_requests
from ifbbench.report.compat.vllm_bench import result
from ifbbench.report.outputs import write_outputs
from ifbbench.rundir.reader import RunData, load_run
from ifbbench.rundir.run_directory import hardware
from ifbbench.settings.config import RunConfig
from tests.report.example_runs import finish, timeline, write_documentation_run, write_run

PERCENTILES = ["p50", "p90", "p95", "p99", "minimum", "maximum", "average"]
REPORT = {
    "engine": [
        "model",
        "model_path",
        "engine_dir",
        "version",
        "backend",
        "dtype",
        "kv_cache_dtype",
        "quantization",
        "max_input_length",
        "max_sequence_length",
    ],
    "machine": None,
    "world_info": [
        "tp_size",
        "pp_size",
        "ep_size",
        "world_size",
        "max_batch_size",
        "max_num_tokens",
        "scheduling_policy",
        "kv_cache_percentage",
        "issue_rate",
    ],
    "request_info": ["num_requests", "avg_num_concurrent_requests", "avg_input_length", "avg_output_length"],
    "performance": [
        "total_latency_ms",
        "avg_request_latency_ms",
        "request_throughput_req_s",
        "system_output_throughput_tok_s",
        "system_total_throughput_tok_s",
        "output_throughput_per_user_tok_s",
        "output_throughput_per_gpu_tok_s",
        "request_latency_percentiles_ms",
    ],
    "streaming_metrics": [
        "token_output_speed_tok_s",
        "avg_ttft_ms",
        "avg_tpot_ms",
        "tpot_percentiles",
        "ttft_percentiles",
        "gen_tps_percentiles",
    ],
    "dataset": [
        "isl_stats",
        "osl_stats",
        "seq_len_stats",
        "num_requests",
        "dataset_path",
        "max_isl",
        "max_osl",
        "max_sequence_length",
        "avg_isl",
        "avg_osl",
        "avg_sequence_length",
    ],
}
REQUEST = [
    "id",
    "num_input_tokens",
    "error_tokens",
    "start_timestamp",
    "first_token_timestamp",
    "end_timestamp",
    "decode_iteration",
    "num_total_output_tokens",
    "num_generated_tokens",
    "generation_time",
    "time_to_first_token",
    "intertoken_latency",
    "end_to_end_latency",
    "output_token_throughput",
    "generation_token_throughput",
    "output",
    "output_tokens",
]
RESULT = [
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "rtfx",
    *(
        f"{statistic}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for statistic in ("mean", "median", "std", "p99")
    ),
]
DETAILS = [
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "latencies",
    "start_times",
    "queue_times",
    "generated_texts",
    "errors",
]
# One of the requests has one token.
ROWS = ("a C5 G1 G2 G3 .", "b . C4 G1 G2 G3", "c . . C6 . .")


@pytest.fixture
def run(tmp_path: Path) -> RunData:
    """Three requests, and one that failed; iterations take 10 ms and 0.5 ms a token."""
    config = {"streaming": True, "policy": "max_utilization", "tp_size": 2, "pp_size": 1, "model": "tiny"}
    return load_run(finish(write_run(tmp_path / "run", timeline(*ROWS), config, 9, failed={"d": "too long"})))


def test_report_has_the_names_of_trtllm_bench(run: RunData) -> None:
    known = report(run)
    assert list(known) == list(REPORT)
    for name, keys in REPORT.items():
        assert keys is None or list(known[name]) == keys
    for name in ("tpot_percentiles", "ttft_percentiles", "gen_tps_percentiles"):
        assert list(known["streaming_metrics"][name]) == PERCENTILES
    assert list(known["performance"]["request_latency_percentiles_ms"]) == PERCENTILES


def test_the_machine_of_a_report_is_its_gpu(run: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(name="a GPU", total_memory=80 * 2**30)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: facts)
    run.run["hardware"] = hardware("cuda")
    assert report(run)["machine"] == {"name": "a GPU", "memory.total": 80.0, "clocks.mem": None}
    run.run["hardware"] = hardware("cpu")
    assert report(run)["machine"] is None
    run.run["config"]["device"] = "sim:h100-sxm"
    assert report(run)["machine"]["name"] == "sim:h100-sxm"


def test_report_without_streaming_has_no_metrics_of_tokens(tmp_path: Path) -> None:
    assert "streaming_metrics" not in report(load_run(write_documentation_run(tmp_path / "run")))


def test_figures_of_the_report_are_those_of_its_formulas(run: RunData) -> None:
    known, done = report(run), run.completed
    span_s = done["end_s"].max() - run.requests["arrival_s"].min()
    performance, streaming = known["performance"], known["streaming_metrics"]
    assert known["world_info"]["world_size"] == 2
    assert known["world_info"]["scheduling_policy"] == "MAX_UTILIZATION"
    assert known["request_info"]["avg_num_concurrent_requests"] == pytest.approx(done["e2e_s"].sum() / span_s)
    assert performance["total_latency_ms"] == pytest.approx(span_s * 1000)
    assert performance["system_output_throughput_tok_s"] == pytest.approx(9 / span_s)
    assert performance["output_throughput_per_gpu_tok_s"] == pytest.approx(9 / span_s / 2)
    assert performance["output_throughput_per_user_tok_s"] == pytest.approx((done["output_len"] / done["e2e_s"]).mean())
    # The request with one token counts as 0 in TPOT, and not at all in generation throughput.
    tpot_ms = sorted([0.0, *(done["tpot_s"].dropna() * 1000)])
    assert streaming["tpot_percentiles"]["p50"] == pytest.approx(tpot_ms[1])
    assert streaming["avg_tpot_ms"] == pytest.approx(sum(tpot_ms) / 3)
    assert streaming["gen_tps_percentiles"]["minimum"] == pytest.approx(1000 / tpot_ms[2])


def test_percentiles_are_those_of_trtllm_bench() -> None:
    known = percentiles(range(10))
    assert [known[name] for name in PERCENTILES] == [5, 9, 9, 9, 0, 9, 4.5]
    assert set(percentiles([]).values()) == {None}


def test_requests_have_the_names_of_trtllm_bench_in_nanoseconds(run: RunData, tmp_path: Path) -> None:
    write_requests(run, tmp_path / "requests.json")
    first, _, last = json.loads((tmp_path / "requests.json").read_text())
    assert list(first) == REQUEST
    row = run.requests.iloc[0]
    assert first["end_to_end_latency"] == round(row["e2e_s"] * 1e9)
    assert first["intertoken_latency"] == pytest.approx(row["tpot_s"] * 1e9)
    assert (first["decode_iteration"], first["output_tokens"]) == (3, 4)
    assert (last["intertoken_latency"], last["generation_token_throughput"]) == (0.0, None)


def test_result_has_the_names_of_vllm(run: RunData) -> None:
    assert list(result(run)) == RESULT
    assert [name for name in result(run, detailed=True) if name not in RESULT] == DETAILS


def test_figures_of_the_result_are_those_of_its_formulas(run: RunData) -> None:
    known, done = result(run, detailed=True), run.completed
    assert (known["num_prompts"], known["completed"], known["failed"]) == (4, 3, 1)
    gaps = [gap * 1000 for gaps in known["itls"] for gap in gaps]
    for name, values in (
        ("ttft", done["ttft_s"] * 1000),
        ("tpot", done["tpot_s"].dropna() * 1000),
        ("itl", gaps),
        ("e2el", done["e2e_s"] * 1000),
    ):
        expected = [np.mean(values), np.median(values), np.std(values), np.percentile(values, 99)]
        found = [known[f"{statistic}_{name}_ms"] for statistic in ("mean", "median", "std", "p99")]
        assert found == pytest.approx(expected), name
    for ttft, gaps_s, latency in zip(known["ttfts"], known["itls"], known["latencies"], strict=True):
        assert ttft + sum(gaps_s) == pytest.approx(latency)
    assert known["output_lens"] == [4, 4, 1, 0]
    assert [len(gaps_s) for gaps_s in known["itls"]] == [3, 3, 0, 0]
    assert known["errors"] == ["", "", "", "too long"]
    assert known["max_output_tokens_per_s"] == 9  # it lasts less than a second
    assert known["max_concurrent_requests"] == 3


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ("inf", 1.0)),
        ({"request_rate": 4.0}, (4.0, "inf")),
        ({"request_rate": 4.0, "enable_exp_delays": True}, (4.0, 1.0)),
        ({"request_rate": 4.0, "burstiness": 0.5}, (4.0, 0.5)),
        ({"request_rate": 4.0, "arrival": "poisson"}, (4.0, 1.0)),
        ({"request_rate": 4.0, "arrival": "gamma:0.25"}, (4.0, 0.25)),
    ],
)
def test_rate_and_burstiness(tmp_path: Path, config: dict[str, Any], expected: tuple[Any, Any]) -> None:
    known = result(load_run(write_documentation_run(tmp_path / "run", **config)))
    assert (known["request_rate"], known["burstiness"]) == expected


def test_a_run_without_a_completed_request_has_a_report_and_a_result(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", timeline("a C5"), {"streaming": True}, 9, failed={"d": "too long"})
    rows = (directory / "requests.jsonl").read_text().splitlines()
    (directory / "requests.jsonl").write_text(rows[1] + "\n")
    run = load_run(directory)
    assert report(run)["performance"]["request_throughput_req_s"] is None
    known = result(run, detailed=True)
    assert (known["completed"], known["mean_ttft_ms"], known["ttfts"]) == (0, 0.0, [0.0])
    json.dumps([report(run), known], allow_nan=False)


def test_every_setting_writes_its_file(run: RunData, tmp_path: Path) -> None:
    names = {"output_csv": "a.csv", "report_json": "new/b.json", "request_json": "c.json", "iteration_log": "d.jsonl"}
    paths: dict[str, Any] = {name: str(tmp_path / file) for name, file in names.items()}
    write_outputs(run, RunConfig(**paths, result_format="vllm"))
    assert all((tmp_path / file).stat().st_size for file in names.values())
    assert list(json.loads((run.path / "result.json").read_text())) == RESULT


def test_a_file_that_cannot_be_written_is_named(run: RunData, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be written \(Is a directory\)"):
        write_outputs(run, RunConfig(report_json=str(tmp_path)))
