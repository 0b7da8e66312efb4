"""The expected error of a simulated run: which measurements it is of, and what was never compared."""

import json
from io import StringIO

import pytest
from rich.console import Console

from ifbbench.build.engines import engine_defaults
from ifbbench.replay.run import run_trace
from ifbbench.report.tables import expected_error_sentence, print_report
from ifbbench.rundir.reader import load_run
from ifbbench.settings.config import RunConfig
from ifbbench.simulated.engines import overhead_names
from ifbbench.simulated.expected_error import (
    BANDS,
    LOADS,
    Compared,
    difference_errors,
    expected_error,
    limit_of,
    load_in_words,
)
from ifbbench.simulated.hardware import hardware_names

KNOWN = json.loads(BANDS.read_text(encoding="utf-8"))
LIKE = Compared("vllm", "vllm", "h100-sxm", "llama-2-7b", "bf16", 1, 1)


@pytest.mark.parametrize("setup", KNOWN["setups"], ids=lambda setup: f"{setup['engine']} {setup['hardware']}")
def test_bands_are_of_known_engines_and_devices_and_hold_their_provenance(setup):
    assert setup["engine"] in ("none", *overhead_names())
    assert setup["hardware"] in hardware_names()
    assert setup["sources"]
    for part in [*setup["loads"], setup["all_loads"]]:
        assert part["rows"] >= part["curves"] >= 8
        assert part["bands"]
        assert all(low <= high for low, high in part["bands"].values())


def test_a_run_has_the_band_of_its_load_or_that_of_all():
    setup = next(one for one in KNOWN["setups"] if (one["engine"], one["hardware"]) == (LIKE.engine, LIKE.hardware))
    for limit in LOADS:
        part = next((one for one in setup["loads"] if one["up_to"] == limit), setup["all_loads"])
        found = expected_error(LIKE, limit or 1000)
        assert found["compared"]
        assert {name: found[name] for name in ("rows", "curves", "of")} == {
            name: part[name] for name in ("rows", "curves", "of")
        }
        assert found["ttft_s"] == part["bands"]["ttft_s"]


def test_a_regime_with_few_measurements_is_named():
    known = expected_error(LIKE, 32)
    assert (known["of"], known["load"]) == ("vllm on h100-sxm with 9 to 32 requests at a time", "9 to 32")
    assert "too few" not in expected_error_sentence(known)

    few = expected_error(LIKE, 4)
    assert (few["of"], few["load"]) == ("vllm on h100-sxm", "any")
    assert few["too_few"] == "vllm on h100-sxm with 1 to 8 requests at a time"
    sentence = expected_error_sentence(few)
    assert f"({few['rows']} published measurements of {few['curves']} deployments, vllm on h100-sxm)" in sentence
    assert sentence.endswith(
        f"There are too few measurements of {few['too_few']}: the range is that of vllm on h100-sxm."
    )


def test_versions_of_an_engine_have_one_range():
    names = ("tensorrt-llm", "tensorrt-llm-1.2", "tensorrt-llm-1.1", "tensorrt-llm-2024")
    today, *earlier, of_2024 = (
        expected_error(Compared(name, "trtllm", "b200", "deepseek-r1", "nvfp4", 4, 1), 4) for name in names
    )
    assert today["compared"]
    assert earlier == [today, today]
    assert of_2024["reason"] == "never compared: no measurement of b200 with tensorrt-llm-2024"


def test_rows_that_constants_were_fitted_to_are_no_measure_of_the_error():
    for engine, model in (("sglang", "qwen3-32b"), ("tensorrt-llm", "llama-3.1-8b")):
        run = Compared(engine, engine if engine == "sglang" else "trtllm", "h100-sxm", model, "bf16", 2, 1)
        assert not expected_error(run, 100)["compared"]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"hardware": "b200"}, "never compared: no measurement of b200 with vllm"),
        ({"dtype": "int4"}, "dtype int4, only"),
        ({"tp_size": 16}, "tp_size 16, only"),
        ({"pp_size": 2}, "pp_size 2, only 1"),
        ({"draft": "mtp"}, "draft mtp, only none"),
        ({"model": "qwen3-30b-a3b"}, "model qwen3-30b-a3b, only codellama-34b, "),
        ({"model": "llama-3.1-8b"}, "model llama-3.1-8b, only"),
        ({"scheduler": "trtllm"}, "no measurement with vllm and --engine trtllm, only vllm"),
        ({"engine": "none"}, "no measurement with no engine overhead and --engine vllm, only trtllm"),
        (
            {"engine": "none", "scheduler": "trtllm", "hardware": "rtx-4090"},
            "no measurement of rtx-4090 with no engine overhead",
        ),
    ],
)
def test_what_was_never_compared_is_named(other, reason):
    found = expected_error(LIKE._replace(**other), 32)

    assert not found["compared"]
    assert reason in found["reason"]


@pytest.mark.parametrize(
    ("requests", "limit", "words"),
    [(1, 8, "1 to 8"), (9, 32, "9 to 32"), (100.2, 128, "33 to 128"), (400, None, "over 128")],
)
def test_loads_are_ranges_of_requests_at_a_time(requests, limit, words):
    assert limit_of(requests) == limit
    assert load_in_words(limit) == words


def run_simulated(tmp_path, model):
    trace = tmp_path / "trace.jsonl"
    row = {"arrival_s": 0.0, "prompt_len": 64, "output_len": 16, "max_new_tokens": 16}
    trace.write_text("".join(json.dumps({"request_id": index, **row}) + "\n" for index in range(40)))
    given = {"engine": "vllm", "device": "sim:h100-sxm", "model": model, "concurrency": 4, "tp_size": 1}
    config = RunConfig(**engine_defaults(given) | given, output=str(tmp_path / "run"))
    summary = run_trace(str(trace), config).summary
    printed = StringIO()
    print_report(load_run(tmp_path / "run"), Console(file=printed, width=200))
    return summary, printed.getvalue()


def test_the_summary_and_the_report_of_a_simulated_run_have_it(tmp_path):
    summary, printed = run_simulated(tmp_path, "llama-2-7b")

    assert summary["expected_error"] == expected_error(LIKE, 8)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    sentence = expected_error_sentence(summary["expected_error"])
    assert "in 8 of 10 servers like this TTFT is within " in sentence
    assert " % of the prediction (" in sentence
    assert sentence in printed


def test_the_report_of_a_model_that_was_never_compared_has_none(tmp_path):
    summary, printed = run_simulated(tmp_path, "llama-3.1-8b")

    assert not summary["expected_error"]["compared"]
    assert "xpected error" not in printed


def test_the_summary_of_a_real_run_has_none(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"request_id": 0, "arrival_s": 0, "prompt_len": 8, "output_len": 2, "max_new_tokens": 2}\n')
    summary = run_trace(str(trace), RunConfig(device="null", output=str(tmp_path / "run"))).summary

    assert "expected_error" not in summary


def test_the_error_of_a_difference_is_known_where_that_of_a_prediction_is():
    paths = ("ttft_s.p99", "tpot_s.p99", "e2e_s.mean", "output_throughput_tokens_per_s", "goodput_share")
    known = difference_errors(expected_error(LIKE, 8), paths)
    assert known == {"ttft_s.p99": 0.33, "tpot_s.p99": 0.07}
    assert not difference_errors(expected_error(LIKE._replace(model="llama-3.1-8b"), 8), paths)
