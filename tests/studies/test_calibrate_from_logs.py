"""`ifbbench calibrate --from`: constants of a known device are found again in its logs, and bad logs are explained."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.build.engines import engine_defaults
from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.models.named_models import load_model_config
from ifbbench.replay.run import run_trace
from ifbbench.report.compat.trtllm_bench import write_iterations
from ifbbench.report.outputs import write_server_log
from ifbbench.rundir.reader import load_run
from ifbbench.settings.config import RunConfig
from ifbbench.simulated.hardware import load_hardware, write_profile
from ifbbench.simulated.shard import Shard
from ifbbench.studies import calibrate_from_logs as calibrate_from_logs_module
from ifbbench.studies.calibrate_from_logs import ALL_REDUCES, LogCalibration, calibrate_from_logs
from ifbbench.studies.fit import Point, Predictor
from ifbbench.studies.log import Log
from ifbbench.studies.run_log import read_run
from tests.studies.logged import CHUNKED, MODEL, iterations, load_tests, replayed, tensorrt_llm, true_profile, vllm

GIVEN = {**MODEL, "device": "sim:h100-sxm"}
# Most tests have so many iterations of each kind, because the fit takes nearly all of their time.
MAX_POINTS = 16
# Tests of what is said of a log, whatever is found in it, have so many.
FEW_POINTS = 4
FIGURES = (("ttft_s", "mean"), ("ttft_s", "p99"), ("itl_s", "mean"), ("itl_s", "p99"), ("e2e_s", "mean"))


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Path:
    """A directory with the profile `true.toml`, and a run on it under `log`."""
    directory = tmp_path_factory.mktemp("server")
    replayed(directory / "log", true_profile(directory), max_num_samples=120, **CHUNKED)
    return directory


def largest_error(server: Path, profile: Path) -> float:
    """Of the figures of another trace, with the fitted profile and with the true one."""
    found = figures_of(server / "other", str(profile))
    return max(abs(one / true - 1) for one, true in zip(found, true_figures(server), strict=True))


@cache
def true_figures(server: Path) -> list[float]:
    return figures_of(server / "other", str(server / "true.toml"))


def figures_of(directory: Path, profile: str) -> list[float]:
    """Duration and latencies of a trace that is in no log."""
    summary = replayed(directory, f"sim:{profile}", "default", time_scale=0)
    return [summary["duration_s"], *(summary[name][key] for name, key in FIGURES)]


def calibrated(
    log: Path, directory: Path, max_points: int | None = MAX_POINTS, others: Sequence[Path] = (), **given
) -> LogCalibration:
    """The calibration from a log and `others`. max_points: iterations of each kind that are fitted, without a chart;
    None: as many as users have, and a chart."""
    with pytest.MonkeyPatch.context() as patch:
        if max_points is not None:
            patch.setattr(calibrate_from_logs_module, "MAX_POINTS_OF_A_KIND", max_points)
            patch.setattr(calibrate_from_logs_module, "write_chart", lambda found, path: None)
        return calibrate_from_logs([log, *others], {**GIVEN, **given}, directory / "fitted.toml", overwrite=True)


def written(directory: Path, text: str, name: str = "server.log") -> Path:
    (directory / name).write_text(text)
    return directory / name


def constants(calibration) -> dict[str, float | None]:
    """The standard error of each constant; None if it was kept."""
    return {verdict.name: verdict.error for verdict in calibration.determined.verdicts}


# Constants are found again.


@pytest.fixture(scope="module")
def fitted(server):
    """The calibration from the server's run, which lies in its directory with its chart."""
    return calibrated(server / "log", server, max_points=None)


def test_a_run_gives_the_constants_of_its_device(server, fitted, tmp_path):
    profile, true = fitted.found.profile, load_hardware(str(server / "true.toml"))
    for name in ("matmul", "memory", "context_attention", "generation_attention"):
        assert getattr(profile.constants, name) == pytest.approx(getattr(true.constants, name), rel=0.02)
    assert profile.host_iteration_s == pytest.approx(true.host_iteration_s, rel=0.02)
    assert largest_error(server, server / "fitted.toml") < 0.02
    # The test means nothing if the base were as good.
    base = tmp_path / "base.toml"
    base.write_text((Path(load_hardware.__code__.co_filename).parent / "profiles/h100-sxm.toml").read_text())
    assert largest_error(server, base) > 0.2


@pytest.mark.usefixtures("fitted")
def test_the_profile_says_where_it_comes_from(server):
    about = load_hardware(str(server / "fitted.toml")).calibration
    assert about["logs"] == ["log (run of ifbbench)"]
    assert len(about["sha256"][0]) == 64
    assert about["base"] == "h100-sxm"
    assert about["iterations"] == len(iterations(server / "log"))
    assert 0 <= about["median_error"] < 0.02
    assert 0 <= about["held_out_median_error"] < 0.02
    assert "memory" in about["determined"]
    assert "launch_s" in about["kept"]


@pytest.mark.parametrize("form", ["lines of Python", "array", "newer", "overlapping"])
def test_tensorrt_llm_statistics_predict_another_trace(server, tmp_path, form):
    rows = tensorrt_llm(server / "log", overlaps=form == "overlapping", has_keys=form == "newer")
    text = {
        "lines of Python": "\n".join(map(str, rows)),
        "array": json.dumps(rows[:2000]) + json.dumps(rows[2000:]),
    }.get(form, "\n".join(map(json.dumps, rows)))
    found = calibrated(written(tmp_path, text), tmp_path, max_points=None if form == "overlapping" else MAX_POINTS)
    assert largest_error(server, tmp_path / "fitted.toml") < 0.04
    assert found.logs[0].overlaps is (form == "overlapping")
    assert constants(found)["kernel_s"] is None


@pytest.mark.parametrize("model", [pytest.param("llama-3.1-8b", marks=pytest.mark.slow), "qwen3-30b-a3b"])
def test_the_log_of_a_vllm_server_predicts_another_trace_under_its_scheduler(tmp_path, model):
    base = load_hardware("h100-sxm")
    constants = replace(base.constants, matmul=0.45, memory=0.6, generation_attention=0.5)
    write_profile(replace(base, constants=constants), tmp_path / "true.toml", "Known.")
    given = {"engine": "vllm", "device": f"sim:{tmp_path / 'true.toml'}", "model": model, "dtype": "bf16"}
    settings = {**engine_defaults(given), **given, "request_rate": 8.0, "max_num_samples": 60}
    replayed(tmp_path / "log", trace="chat", **settings)
    write_server_log("vllm", load_run(tmp_path / "log"), tmp_path / "vllm.log")
    calibrated(tmp_path / "vllm.log", tmp_path, model=model, overlap="async")

    true = replayed(tmp_path / "other", trace="default", **settings)
    fitted = replayed(tmp_path / "other", trace="default", **settings | {"device": f"sim:{tmp_path / 'fitted.toml'}"})
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert fitted[name]["mean"] == pytest.approx(true[name]["mean"], rel=0.05)


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "max_utilization", "max_tokens_in_paged_kvcache": 12_000, "time_scale": 0, **CHUNKED},
        {"trace": "multi-turn", "enable_kv_cache_reuse": True},
        {"tp_size": 2},
        {"iteration_stats_every": 3},
    ],
)
def test_the_work_of_every_iteration_is_read_exactly(server, tmp_path, settings):
    summary = replayed(tmp_path / "log", f"sim:{server / 'true.toml'}", max_num_samples=50, **settings)
    assert (summary["pauses"] > 0) is ("policy" in settings)
    log = Log(tmp_path / "log")
    read_run(log)
    points = [Point(sample.work, sample.seconds, sample.loop_s, 1) for sample, _ in log.samples]
    assert len(points) >= summary["iterations"] // settings.get("iteration_stats_every", 1)
    shard = Shard(load_model_config(MODEL["model"]), "bf16", "bf16")
    predict = Predictor([point.observation(tp_size=settings.get("tp_size", 1)) for point in points], shard)
    seconds = predict(load_hardware(str(server / "true.toml")))
    assert seconds == pytest.approx([point.seconds for point in points], rel=1e-4)


def test_a_killed_run_is_read_up_to_its_end(server, tmp_path):
    shutil.copytree(server / "log", tmp_path / "log")
    (tmp_path / "log" / "summary.json").unlink()
    lines = (tmp_path / "log" / "spans.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "log" / "spans.jsonl").write_text("".join(lines[: len(lines) // 2]))
    found = calibrated(tmp_path / "log", tmp_path)
    assert any("the run was cut" in warning for warning in found.warnings)
    assert largest_error(server, tmp_path / "fitted.toml") < 0.02


def test_a_run_with_pipeline_stages_is_refused(server, tmp_path):
    replayed(tmp_path / "log", f"sim:{server / 'true.toml'}", max_num_samples=5, pp_size=2)
    with pytest.raises(InputError, match="--pp_size 2"):
        calibrated(tmp_path / "log", tmp_path)


@pytest.mark.parametrize("overlap", ["partitioned", "async"])
def test_a_run_with_overlap_is_read(server, tmp_path, overlap):
    device = f"sim:{server / 'true.toml'}"
    replayed(tmp_path / "log", device, max_num_samples=80, overlap=overlap, **CHUNKED)
    found = calibrated(tmp_path / "log", tmp_path, max_points=None)
    assert found.determined.fit_error.p90 < 0.001
    assert constants(found)["host_iteration_s"] is None  # hidden behind the device


def test_iterations_without_timestamps_may_overlap(server, tmp_path):
    rows = [{**row, "timestamp": ""} for row in tensorrt_llm(server / "log")]
    log = written(tmp_path, "\n".join(map(json.dumps, rows)))
    assert any("no timestamps" in warning for warning in calibrated(log, tmp_path, FEW_POINTS).warnings)
    with pytest.raises(InputError, match="no timestamps"):
        calibrated(log, tmp_path, enable_trt_overlap=True)


@pytest.mark.parametrize(
    ("form", "overlap"),
    [
        ("iteration_log", None),
        ("batch_manager", "async"),
        ("trtllm", "partitioned"),
        *(
            pytest.param(form, overlap, marks=pytest.mark.slow)
            for form, overlap in (
                ("iteration_log", "async"),
                ("iteration_log", "partitioned"),
                ("batch_manager", None),
                ("batch_manager", "partitioned"),
                ("trtllm", None),
                ("trtllm", "async"),
            )
        ),
    ],
)
def test_own_logs_say_whether_iterations_overlap(server, tmp_path, overlap, form):
    log = tmp_path / "iterations.log"
    settings = {} if form == "iteration_log" else {"iteration_stats_format": form}
    replayed(tmp_path / "log", f"sim:{server / 'true.toml'}", max_num_samples=80, overlap=overlap, **settings)
    if form == "iteration_log":
        write_iterations(load_run(tmp_path / "log"), log)
    else:
        shutil.copy(tmp_path / "log" / "iterations.jsonl", log)
    found = calibrated(log, tmp_path)
    assert found.logs[0].overlaps is (overlap is not None)
    assert not any("timestamps" in warning for warning in found.warnings)
    assert found.determined.fit_error.median < 0.01


def test_timestamps_that_do_not_suffice_are_described(server, tmp_path):
    rows = tensorrt_llm(server / "log")
    for changed, message in (
        ([{**row, "timestamp": row["timestamp"].partition(".")[0]} for row in rows], "are whole seconds"),
        (rows[::2], "no two successive iterations"),
        ([{**row, "timestamp": "yesterday"} for row in rows], "are not like 08-19-2026"),
    ):
        log = written(tmp_path, "\n".join(map(json.dumps, changed)))
        assert any(message in warning for warning in calibrated(log, tmp_path, FEW_POINTS).warnings)
        with pytest.raises(InputError, match=message):
            calibrated(log, tmp_path, enable_trt_overlap=True)


def test_vllm_lines_predict_another_trace(server, tmp_path):
    found = calibrated(written(tmp_path, vllm(server / "log")), tmp_path)
    assert largest_error(server, tmp_path / "fitted.toml") < 0.08
    assert constants(found)["host_iteration_s"] is not None
    # Without summaries there is nothing that shows the host's time.
    lines = [line for line in vllm(server / "log").splitlines() if "Avg prompt" not in line]
    found = calibrated(written(tmp_path, "\n".join(lines)), tmp_path)
    assert constants(found)["host_iteration_s"] is None
    assert any("leave out its scheduler" in warning for warning in found.warnings)


def test_vllm_summaries_alone_predict_another_trace(server, tmp_path):
    log = written(tmp_path, vllm(server / "log", every=20, has_iterations=False))
    assert calibrated(log, tmp_path).found.profile.calibration["points"] > 20
    assert largest_error(server, tmp_path / "fitted.toml") < 0.15


def test_load_tests_predict_another_trace(server, tmp_path):
    rows = [
        {"input_len": prompt, "output_len": output, "concurrency": load}
        for prompt, output in ((128, 96), (2000, 64))
        for load in (1, 8, 48)
    ]
    text = load_tests(tmp_path, f"sim:{server / 'true.toml'}", rows)
    found = calibrated(written(tmp_path, text, "tests.csv"), tmp_path)
    assert {point.kind for point in found.determined.observations} == {"throughput", "TTFT", "ITL"}
    assert largest_error(server, tmp_path / "fitted.toml") < 0.05


def test_load_tests_with_a_rate_are_scheduled_again_with_what_was_found(server, tmp_path):
    rows = [
        {"input_len": prompt, "output_len": output, "rate": rate}
        for prompt, output in ((128, 96), (2000, 64))
        for rate in (0.5, 4)
    ]
    text = load_tests(tmp_path, f"sim:{server / 'true.toml'}", rows)
    found = calibrated(written(tmp_path, text, "tests.csv"), tmp_path)
    assert found.determined.fit_error.median < 0.02


def test_columns_may_have_the_names_of_other_clients(server, tmp_path):
    rows = [{"input_len": 128, "output_len": 48, "concurrency": load} for load in (1, 8, 16, 48)]
    text = load_tests(tmp_path, f"sim:{server / 'true.toml'}", rows)
    names = {"input_len": "random input len", "concurrency": "max-concurrency", "itl": "mean_tpot_ms", "tp": "note"}
    header, *lines = text.splitlines()
    header = ",".join(names.get(name, name) for name in header.split(","))
    lines = [line.replace(",,", ",inf,") for line in lines]
    found = calibrated(written(tmp_path, "\n".join([header, *lines])), tmp_path)
    assert len(found.determined.observations) == 12
    assert found.determined.fit_error.median < 0.02


def test_all_reduces_are_found_if_degrees_differ(server, tmp_path):
    rows = [{"input_len": 128, "output_len": 48, "concurrency": load, "tp": tp} for tp in (1, 2, 4) for load in (1, 32)]
    text = load_tests(tmp_path, f"sim:{server / 'true.toml'}", rows)
    found = calibrated(written(tmp_path, text, "tests.csv"), tmp_path)
    assert any(constants(found).get(name) is not None for name in ALL_REDUCES)


def test_several_logs_are_fitted_together(server, tmp_path):
    log = written(tmp_path, vllm(server / "log"))
    found = calibrated(server / "log", tmp_path, others=[log])
    assert len(found.found.profile.calibration["logs"]) == 2
    assert found.determined.fit_error.median < 0.02


def test_a_disturbed_log_gives_nearly_the_same(server, tmp_path):
    rows = tensorrt_llm(server / "log")
    for row in rows[::40]:
        row["iterLatencyMS"] *= 9
    rows[0]["iterLatencyMS"] = 67_526.1  # warm-up
    found = calibrated(written(tmp_path, "\n".join(map(json.dumps, rows))), tmp_path)
    assert found.determined.left_out > 0
    assert any("left out" in warning for warning in found.warnings)
    assert largest_error(server, tmp_path / "fitted.toml") < 0.03


# What cannot be determined is said.


def test_one_batch_size_determines_little(server, tmp_path):
    trace = tmp_path / "equal.jsonl"
    trace.write_text(8 * (json.dumps({"arrival_s": 0, "prompt_len": 64, "output_len": 400}) + "\n"))
    replayed(tmp_path / "log", f"sim:{server / 'true.toml'}", str(trace))
    found = calibrated(tmp_path / "log", tmp_path)
    assert any("have 8 requests" in warning for warning in found.warnings)
    kept = {name for name, error in constants(found).items() if error is None}
    assert {"matmul", "context_attention", "host_request_s"} <= kept
    for name in ("matmul", "context_attention"):
        assert getattr(found.found.profile.constants, name) == getattr(load_hardware("h100-sxm").constants, name)
    assert all(verdict.reason for verdict in found.determined.verdicts if verdict.error is None)


def test_a_cut_log_is_used_up_to_its_end(server, tmp_path):
    text = "\n".join(map(json.dumps, tensorrt_llm(server / "log")))
    found = calibrated(written(tmp_path, text[:-200]), tmp_path, FEW_POINTS)
    assert any("it is cut in line" in warning for warning in found.warnings)
    array = json.dumps(tensorrt_llm(server / "log"))
    found = calibrated(written(tmp_path, array[: len(array) // 2]), tmp_path, FEW_POINTS)
    assert any("it is cut in line 1" in warning for warning in found.warnings)


@pytest.mark.usefixtures("fitted")
def test_the_table_names_what_is_determined(server, tmp_path):
    """The command finds what the function finds, and writes the same files."""
    done = CliRunner().invoke(
        main, ["calibrate", "--from", str(server / "log"), "--gpu", "h100-sxm", "-o", str(tmp_path / "fitted.toml")]
    )
    assert done.exit_code == 0, done.output
    assert "not determined (kept)" in done.output
    assert "the other half is predicted with an error of" in done.output
    assert f"sim:{tmp_path / 'fitted.toml'}" in done.output
    assert (tmp_path / "fitted.png").read_bytes().startswith(b"\x89PNG")
    for name in ("fitted.toml", "fitted.png"):
        assert (tmp_path / name).read_bytes() == (server / name).read_bytes()


# Bad input.


def refused(tmp_path: Path, text: str, name: str = "server.log", **given) -> str:
    with pytest.raises(InputError) as caught:
        calibrated(written(tmp_path, text, name), tmp_path, **given)
    assert not (tmp_path / "fitted.toml").exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("once upon a time\n", "no known log"),
        ('{"iterLatencyMS": 7.0, "iter": 1, "kvCacheStats": {}}\n', "no inflightBatchingStats"),
        ('{"iterLatencyMS": 7.0, "inflightBatchingStats": {"numContextRequests": 1}}\n', "numGenRequests is missing"),
        ('{"inflightBatchingStats": {"numContextRequests": 1}}\n', "iterLatencyMS is missing"),
        ('{"iterLatencyMS": 7.0, "staticBatchingStats": {"numGenTokens": 1}}\n', "static batching"),
        ('{"iterLatencyMS": 1, "inflightBatchingStats": {}\n{"iterLatencyMS": 1}\n', "line 1: not a valid object"),
        (
            "Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 2.0 tokens/s, "
            "Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%\n",
            "--max_tokens_in_paged_kvcache",
        ),
        ("Iteration(1): 5 context requests and more, iteration elapsed time: 3 ms\nmore\n", "another version of vLLM"),
        ("input_len,output_len,concurrency\n1,2,3\n", "no column throughput, ttft or itl"),
        ("input_len,output_len,ttft\n1,2,3\n", "neither a column concurrency nor rate"),
        ("input_len,output_len,concurrency,itl\n100,two,1,7\n", "line 2: output_len is 'two'"),
        ("input_len,output_len,concurrency,itl,model\n100,9,1,7,a\n100,9,2,7,b\n", "model is a and b"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path, text, message):
    assert message in refused(tmp_path, text)


def test_logs_of_several_engines_are_refused(server, tmp_path):
    rows = tensorrt_llm(server / "log")[:50]
    for row in rows[25:]:
        row["kvCacheStats"]["maxNumBlocks"] = 7
    assert "several engines" in refused(tmp_path, "\n".join(map(json.dumps, rows)))
    text = vllm(server / "log")
    assert "several servers" in refused(tmp_path, text + text.replace("Llama-3.1-8B", "Qwen3-8B"))


def test_drafted_tokens_are_refused(server, tmp_path):
    rows = tensorrt_llm(server / "log")[:50]
    rows[7]["specDecodingStats"] = {"numDraftTokens": 4}
    assert "line 8: specDecodingStats" in refused(tmp_path, "\n".join(map(json.dumps, rows)))


def test_a_run_of_another_model_is_refused(server, tmp_path):
    with pytest.raises(InputError, match=r"model is llama-3.1-8b, but --model is qwen3-32b"):
        calibrated(server / "log", tmp_path, model="qwen3-32b")
    replayed(tmp_path / "other", "sim:h100-sxm", "default", model="qwen2.5-7b", max_num_samples=2)
    with pytest.raises(InputError, match="different engines: model is"):
        calibrate_from_logs([server / "log", tmp_path / "other"], {"device": "sim:h100-sxm"}, tmp_path / "both.toml")


def test_too_few_iterations_are_refused(server, tmp_path):
    text = "\n".join(map(json.dumps, tensorrt_llm(server / "log")[:4]))
    assert "too few" in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "cpu"}, "--device: cpu; with --from"),
        ({"device": "sim:h99"}, "no hardware profile 'h99'"),
        ({"device": None}, "--device: is missing"),
        ({"model": "none"}, "none"),
    ],
)
def test_settings_that_do_not_say_what_was_measured_are_refused(server, tmp_path, given, message):
    text = "\n".join(map(json.dumps, tensorrt_llm(server / "log")[:500]))
    assert message in refused(tmp_path, text, **given)


def test_a_model_is_needed(server, tmp_path):
    log = written(tmp_path, "\n".join(map(json.dumps, tensorrt_llm(server / "log")[:500])))
    with pytest.raises(InputError, match="--model: is missing"):
        calibrate_from_logs([log], {"device": "sim:h100-sxm"}, tmp_path / "fitted.toml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h100-sxm"], "--gpu: is for --from"),
        (["--from", "nowhere"], "nowhere"),
        (["--from", ".", "--gpu", "h100-sxm", "--device", "sim:l4"], "give one of them"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(arguments, message):
    done = CliRunner().invoke(main, ["calibrate", *arguments])
    assert done.exit_code == 2
    assert message in done.output


# A real run.


@pytest.mark.slow
def test_real_runs_on_a_cpu_predict_another_trace(tmp_path):
    """Within 10 % of a real run. Runs of both traces take turns, because other programs disturb them."""
    limits: dict[str, Any] = {"max_batch_size": 16, "max_tokens_in_paged_kvcache": 32_768, "time_scale": 0}
    logs, real = [], []
    for turn in range(3):
        logs.append(tmp_path / f"log-{turn}")
        for directory, trace, count in ((logs[-1], "chat", 16), (tmp_path / "other", "default", None)):
            config = RunConfig(device="cpu", output=str(directory), overwrite=True, max_num_samples=count, **limits)
            summary = run_trace(trace, config, owns_process=True).summary
        real.append(summary["duration_s"])
    found = calibrate_from_logs(logs, {"device": "sim:cpu"}, tmp_path / "fitted.toml")
    config = RunConfig(device=f"sim:{tmp_path / 'fitted.toml'}", output=str(tmp_path / "simulated"), **limits)
    simulated = run_trace("default", config).summary["duration_s"]
    print(f"real {real}, simulated {simulated}, fit {found.determined.fit_error}")
    assert 0.9 * min(real) < simulated < 1.1 * max(real)
