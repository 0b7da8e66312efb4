"""The tables and sentences of reports."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ifbbench.analysis.number_texts import count, percent, significant, time_unit
from ifbbench.report import bar, plain_table, print_fitting
from ifbbench.report.profile import profile_figures, profile_sentence
from ifbbench.report.sweep_table import print_sweep
from ifbbench.report.tables import BATCHING_TYPES, bound_sentence, print_report
from ifbbench.rundir.figures import figures
from ifbbench.rundir.reader import RunData, load_run
from tests.report.example_runs import DOCUMENTATION, finish, write_documentation_run, write_run


def printed(path: Path) -> str:
    out = io.StringIO()
    print_report(load_run(path), Console(file=out, width=120))
    return out.getvalue()


def test_report_of_a_finished_run(tmp_path: Path) -> None:
    text = printed(finish(write_documentation_run(tmp_path / "docs", model="tiny", device="cpu")))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    settings = "max_utilization · max_batch_size 4 · max_num_tokens 12 · chunked context · tiny on cpu"
    assert f"docs example · {settings}" in lines
    assert "Requests completed 5 of 5 Iterations 12" in lines
    assert "Latency (ms) mean p50 p90 p99 p99.9 max" in lines
    assert "TTFT 36.1 31.5 61.2 70.9 71.9 72.0" in lines
    assert "Total throughput 425 tokens/s KV blocks, peak use 12 of 12 (100 %)" in lines
    assert any(line.startswith("token budget ██") and line.endswith("25 %") for line in lines)
    assert "Partial" not in text
    assert "failed" not in text


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_no_cell_is_cut_on_a_narrow_terminal(width: int, tmp_path: Path) -> None:
    run = load_run(finish(write_documentation_run(tmp_path / "docs", model="tiny", device="cpu")))
    wide, narrow = io.StringIO(), io.StringIO()
    print_report(run, Console(file=wide, width=200))
    print_report(run, Console(file=narrow, width=width))
    tables = [text.getvalue().partition("Requests completed")[2].splitlines() for text in (wide, narrow)]
    tables = [[line for line in lines if "  " in line] for lines in tables]  # not sentences, which are not broken here
    assert max(map(len, tables[1])) <= width
    words = [{word for line in lines for word in line.split() if word[0] not in " ▏▎▍▌▋▊▉█"} for lines in tables]
    assert words[0] == words[1]


@pytest.mark.parametrize(("width", "parts"), [(200, 1), (60, 2), (50, 3)])
def test_a_wide_table_is_divided_into_parts_with_its_first_columns(width: int, parts: int) -> None:
    out = io.StringIO()
    table = plain_table("setting", "other", numbers=[f"figure {number}" for number in range(6)])
    for row in range(3):
        table.add_row(f"name-{row}", f"of-{row}", *(f"{row}.{column}" for column in range(6)))
    print_fitting(Console(file=out, width=width), table, keys=2)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert text.count("name-2") == text.count("of-2") == parts
    assert all(text.split().count(f"{row}.{column}") == 1 for row in range(3) for column in range(6))


def test_report_of_a_killed_run_says_so(tmp_path: Path) -> None:
    assert "Partial: the run did not reach its end." in printed(write_documentation_run(tmp_path / "docs"))


def test_report_of_a_run_that_did_nothing(tmp_path: Path) -> None:
    directory = write_documentation_run(tmp_path / "docs")
    for name in ("iterations", "spans", "requests"):
        (directory / f"{name}.jsonl").unlink()
    assert "No iteration was run." in printed(directory)


def test_failed_requests_are_listed_first_few(tmp_path: Path) -> None:
    failed = {f"bad{number}": f"prompt of 99 tokens [limit {number}]" for number in range(7)}
    text = printed(finish(write_run(tmp_path / "run", DOCUMENTATION, {}, max_blocks=12, failed=failed)))
    assert "5 of 12 (7 failed)" in text
    assert "7 failed requests" in text
    assert "bad4: prompt of 99 tokens [limit 4]" in text
    assert "bad5" not in text
    assert "and 2 more in" in text


def test_sentence_says_which_limit_and_what_it_cost() -> None:
    shares = {"batch_size": 0.0, "num_tokens": 0.12, "kv_blocks": 0.38, "none": 0.5}
    known: dict[str, Any] = {"iterations": 50, "kv_blocks": {"max": 1200}, "bound_by": shares}
    known["bound_by_time"] = {"batch_size": 0.0, "num_tokens": 0.3, "kv_blocks": 0.2, "none": 0.5}
    known["waiting_by_limit"] = {"batch_size": 0.0, "num_tokens": 2.5, "kv_blocks": 7.5, "none": 0.0}
    assert bound_sentence(known, {"max_num_tokens": 8192}) == (
        "The KV cache (1,200 blocks) left work out 20 % of the time and caused 75 % of the waiting (7.50 "
        "request-seconds). max_num_tokens (8192) left work out 30 % of the time and caused 25 % of the waiting (2.50 "
        "request-seconds)."
    )
    known["bound_by"] = {"none": 1.0}
    assert bound_sentence(known, {}).startswith("No limit left any request out")


def test_limits_of_a_user_policy_are_reported_under_their_own_names(tmp_path: Path) -> None:
    shares = {"batch_size": 0.0, "num_tokens": 0.25, "kv_blocks": 0.0, "none": 0.25, "fair [share]": 0.5}
    known: dict[str, Any] = {"iterations": 8, "bound_by": shares}
    # A run that was recorded before shares of time were.
    assert bound_sentence(known, {"max_num_tokens": 64}) == (
        "fair [share] left work out 50 % of the time. max_num_tokens (64) left work out 25 % of the time."
    )
    directory = finish(write_documentation_run(tmp_path / "docs"))
    summary = json.loads((directory / "summary.json").read_text()) | {"bound_by": shares, "bound_by_time": shares}
    (directory / "summary.json").write_text(json.dumps(summary))
    text = printed(directory)
    assert any(line.startswith("fair [share] ") and line.endswith("50 %") for line in map(str.strip, text.splitlines()))
    assert "fair [share] left work out" in text


def test_figures_of_a_killed_run_have_the_limits_of_a_user_policy(tmp_path: Path) -> None:
    directory = write_documentation_run(tmp_path / "docs")
    lines = (directory / "iterations.jsonl").read_text()
    (directory / "iterations.jsonl").write_text(lines.replace('"bound_by": "num_tokens"', '"bound_by": "fairness"'))
    shares = figures(load_run(directory))["bound_by"]
    assert list(shares) == ["batch_size", "num_tokens", "kv_blocks", "none", "fairness"]
    assert shares["fairness"] == pytest.approx(3 / 12)
    assert sum(shares.values()) == pytest.approx(1.0)


def test_refused_requests_are_named_where_no_limit_was_reached() -> None:
    known: dict[str, Any] = {"iterations": 50, "bound_by": {"none": 1.0}, "requests": {"total": 5, "failed": 4}}
    sentence = bound_sentence(known, {})
    assert "No limit left any request out" not in sentence
    assert sentence == (
        "No limit left an admitted request out: every iteration ran all of them. 4 of 5 requests failed without "
        "a complete answer; the reasons are listed below."
    )
    known["bound_by"] = {"num_tokens": 0.5, "none": 0.5}
    assert bound_sentence(known, {}).endswith(
        "4 of 5 requests failed without a complete answer; the reasons are listed below."
    )
    known["iterations"] = 0
    assert bound_sentence(known, {}).startswith("No iteration was run. 4 of 5 requests failed")


def test_sweep_marks_the_best_and_keeps_failed_points(capsys: pytest.CaptureFixture[str]) -> None:
    speed = "output_throughput_tokens_per_s"
    rows: list[dict[str, Any]] = [
        {"max_batch_size": 4, speed: 100.0, "ttft_s.p50": 0.2, "ttft_s.p99": 0.4, "pauses": 0},
        {"max_batch_size": 8, speed: 180.0, "ttft_s.p50": 0.3, "ttft_s.p99": 0.5, "pauses": 2},
        {"max_batch_size": 16, speed: ""},
    ]
    print_sweep(rows, ["max_batch_size"], Console(width=120))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["4", "–", "–", "100", "–", "200*", "400*", "–", "–", "0"] in lines
    assert ["8", "–", "–", "180*", "–", "300", "500", "–", "–", "2"] in lines
    assert ["16", *["–"] * 9] in lines


def test_sweep_says_what_bound_each_point(capsys: pytest.CaptureFixture[str]) -> None:
    limits = {
        "bound_by_time.kv_blocks": 0.25,
        "bound_by_time.num_tokens": 0.05,
        "bound_by_time.none": 0.7,
        "waiting_by_limit.kv_blocks": 9.0,
        "waiting_by_limit.none": 1.0,
    }
    print_sweep([{"pool": 1, **limits, "ttft_s.p50": 0.2, "ttft_s.p99": 4.0}], ["pool"], Console(width=120))
    out = capsys.readouterr().out
    assert "1 KV 25 % KV 90 %" in " ".join(out.split())
    assert "failed" not in out
    assert "0.200" in out  # percentiles of one latency have one unit
    assert "4.00" in out


def test_sweep_lists_hit_rates_where_anything_was_reused(capsys: pytest.CaptureFixture[str]) -> None:
    rates = "prefix_hit_rate"
    print_sweep([{"pool": 1, rates: 0.0}, {"pool": 2, rates: 0.0}], ["pool"], Console(width=120))
    assert "hit rate" not in capsys.readouterr().out
    print_sweep([{"pool": 1, rates: 0.25}, {"pool": 2, rates: 0.004}, {"pool": 3}], ["pool"], Console(width=120))
    out = capsys.readouterr().out
    assert "hit rate" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    dashes = " ".join("–" * 8)
    assert [f"1 {dashes} 25 %*", f"2 {dashes} <1 %", f"3 {dashes} –"] == lines[-4:-1]


def test_sweep_marks_no_equal_values_and_no_point_with_failed_requests(capsys: pytest.CaptureFixture[str]) -> None:
    speed, failed = "output_throughput_tokens_per_s", "requests.failed"
    rows: list[dict[str, Any]] = [
        {"a": 1, "b": "x", speed: 100.4, "ttft_s.p99": 0.01, failed: 6765},
        {"a": 2, "b": "x", speed: 100.01, "ttft_s.p99": 0.2, failed: 0, "queue_growth_requests_per_s": 1.5},
        {"a": 3, "b": "y", speed: 100.02, "ttft_s.p99": 0.3, failed: 0},
        {"a": 4, "b": "y", "error": "no [room]"},
    ]
    warnings = {"a=1,b=x": ["6,765 of 8,819 requests will be refused: too long."]}
    print_sweep(rows, ["a", "b"], Console(width=160), warnings)
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["1", "x", "–", "–", "100", "–", "–", "10.0", "–", "–", "–", "6,765"] in lines
    assert ["2", "x", "–", "–", "100", "–", "–", "200*", "–", "–", "1.50/s", "0"] in lines
    assert ["3", "y", "–", "–", "100", "–", "–", "300", "–", "–", "–", "0"] in lines
    assert "more requests arrive than are served" in out
    assert "a=4,b=y: no [room]" in out
    assert "a=1,b=x: 6,765 of 8,819 requests will be refused: too long." in out


def test_sweep_names_the_best_point_and_what_the_points_beside_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    def point(slots: int, tokens: int, per_s: float, ttft_s: float, failed: int = 0) -> dict[str, Any]:
        slo = {"slo.ttft.p99.value": ttft_s, "slo.ttft.p99.target": 1.0, "slo.ttft.p99.met": ttft_s <= 1}
        given = {"slots": slots, "tokens": tokens, "requests.failed": failed, "ttft_s.p99": ttft_s}
        return {**given, "output_throughput_tokens_per_s": per_s, **slo}

    rows = [
        point(8, 512, 80.0, 3.0),
        point(16, 512, 90.0, 1.5),
        point(32, 512, 100.0, 0.5),
        point(64, 512, 95.0, 0.6),
        point(128, 512, 99.0, 0.6),
        point(32, 256, 100.05, 0.9),
        point(32, 1024, 120.0, 0.4, failed=7),
        point(64, 1024, 10.0, 0.4),
    ]
    print_sweep(rows, ["slots", "tokens"], Console(width=200))
    text = " ".join(capsys.readouterr().out.split())
    assert "5 of 8 points meet every objective; the best of them is slots=32,tokens=512, with 100 output" in text
    assert (
        "Of the points beside it, slots=16 misses ttft.p99 (1.50 s); slots=64 has a throughput that is 5.0 % lower; "
        "tokens=256 has the same throughput; tokens=1024 fails 7 requests."
    ) in text


def test_sweep_counts_throughput_for_each_gpu_where_points_have_different_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Replicas that the objective does not need are no gain, however little more they answer."""

    def point(replicas: int, per_s: float, ttft_s: float) -> dict[str, Any]:
        slo = {"slo.ttft.p99.value": ttft_s, "slo.ttft.p99.target": 1.0, "slo.ttft.p99.met": ttft_s <= 1}
        given = {"replicas": replicas, "ttft_s.p99": ttft_s, "fleet.gpus": 2 * replicas}
        return {**given, "output_throughput_tokens_per_s": per_s, **slo}

    rows = [point(2, 90.0, 4.0), point(3, 96.0, 0.5), point(4, 100.0, 0.3), point(8, 101.0, 0.2)]
    print_sweep(rows, ["replicas"], Console(width=200))
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "3 of 4 points meet every objective; the best of them is replicas=3, with 96.0 output tokens/s on 6 GPUs, "
        "the most for each GPU. Of the points beside it, replicas=2 misses ttft.p99 (4.00 s); "
        "replicas=4 has a throughput for each GPU that is 21.9 % lower."
    ) in text


def test_numbers_as_people_read_them() -> None:
    assert [significant(value) for value in (0, 1234.5, 12.34, 0.01234, None, float("nan"))] == [
        "0",
        "1,234",
        "12.3",
        "0.0123",
        "–",
        "–",
    ]
    assert [percent(value) for value in (0, 0.001, 0.5, 0.999, 1)] == ["0 %", "<1 %", "50 %", ">99 %", "100 %"]
    assert [percent(value, 1) for value in (0.0001, 0.1234, 0.9999, 12.5)] == [
        "<0.1 %",
        "12.3 %",
        ">99.9 %",
        "1,250.0 %",
    ]


@pytest.mark.parametrize("value", [-0.000000126, -1e-16, -0.0, 1e-9])
def test_rounding_noise_is_printed_as_nothing(value: float) -> None:
    assert significant(value) == count(value) == "0"
    assert percent(-abs(value)) == "0 %"
    assert count(12345.0) == "12,345"
    assert time_unit([2.0])[0] == "s"
    assert time_unit([0.02, None])[0] == "ms"
    assert time_unit([2e-5])[0] == "µs"
    assert bar(0.5, 4) == "██  "
    assert bar(1, 4) == "████"
    assert bar(0.0001, 4) == "▏   "


def profiled_run(directory: Path, device: str) -> RunData:
    """Each iteration schedules for 1 ms, prepares for 0.5 and launches for 0.25; the device is busy for 5, and does 1 M
    FLOPs and moves 2 MB then."""
    write_documentation_run(directory, device=device)
    path = directory / "iterations.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["ifbbench"] |= {
            "schedule_ms": 1.0,
            "prepare_ms": 0.5,
            "launch_ms": 0.25,
            "collect_ms": 4.0,
            "device_busy_ms": 5.0,
            "flops": 1e6,
            "bytes": 2e6,
        }
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = json.loads((directory / "run.json").read_text())
    run["device_limits"] = {"flops_per_s": 4e8, "bytes_per_s": 1e9}
    (directory / "run.json").write_text(json.dumps(run))
    return load_run(directory)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_parts_fill_the_duration(tmp_path: Path, device: str) -> None:
    run = profiled_run(tmp_path / "run", device)
    profile = profile_figures(run)
    assert profile is not None
    duration_s = run.iterations["latency_ms"].sum() / 1000
    assert sum(profile.parts.values()) * len(run.iterations) == pytest.approx(duration_s)
    assert profile.parts["Schedule"] == pytest.approx(0.001)
    assert profile.parts.get("Launch") == (pytest.approx(0.00025) if device == "cuda" else None)
    assert profile.parts.get("Forward pass") == (pytest.approx(0.005) if device == "cpu" else None)
    assert profile.device_busy == pytest.approx(0.005 * len(run.iterations) / duration_s)


def test_what_the_device_reached(tmp_path: Path) -> None:
    profile = profile_figures(profiled_run(tmp_path / "run", "cuda"))
    assert profile is not None
    assert profile.bandwidth is not None
    assert profile.arithmetic is not None
    assert profile.bandwidth.share == pytest.approx(0.4)  # 2 MB in 5 ms, of 1 GB/s
    assert profile.arithmetic.share == pytest.approx(0.5)  # 1 M FLOPs in 5 ms, of 400 M
    sentence = profile_sentence(profile)
    assert "40 % of the speed of a large copy (MBU, 0.400 of 1.00 GB/s)" in sentence
    assert "50 % of the speed of a large matrix product (MFU, 200 of 400 MFLOP/s)" in sentence


def test_other_runs_have_no_profile(tmp_path: Path) -> None:
    assert profile_figures(load_run(write_documentation_run(tmp_path / "run"))) is None


@pytest.mark.parametrize("stored", ["inflight_unfused", "inflight"])
def test_runs_of_two_passes_are_named_also_those_of_earlier_versions(stored: str) -> None:
    """Before `inflight` meant one pass, run.json stored it for a pass for each phase."""
    words = [words for words, applies in BATCHING_TYPES.items() if applies({"type": stored})]
    assert words == ["a pass for each phase"]
