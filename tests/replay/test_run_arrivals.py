"""When requests of a run arrive: the schedule kept in real time, the figures of arrivals, the duration, warming up."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from ifbbench.clock import WallClock
from ifbbench.engine.loop import TokenGenerationLoop
from ifbbench.replay.run import run_trace
from ifbbench.report.tables import print_report
from ifbbench.rundir.reader import load_run
from ifbbench.settings.config import RunConfig
from tests.engine.engine import scheduler_of

pytestmark = pytest.mark.usefixtures("small_model")


def trace_file(tmp_path: Path, count: int, output_len: int = 2, **fields: Any) -> str:
    rows = [
        {"request_id": index, "arrival_s": index * 0.0002, "prompt_len": 9, "output_len": output_len} | fields
        for index in range(count)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(trace: str, tmp_path: Path, name: str = "run", **settings: Any) -> dict[str, Any]:
    return run_trace(trace, RunConfig(**settings, output=str(tmp_path / name))).summary


def arrivals_of(tmp_path: Path, name: str = "run") -> dict[int, float]:
    lines = (tmp_path / name / "requests.jsonl").read_text().splitlines()
    return {line["request_id"]: line["arrival_s"] for line in map(json.loads, lines)}


@pytest.mark.slow
def test_the_mean_rate_of_a_minute_of_poisson_arrivals(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "null", "request_rate": 50.0, "enable_exp_delays": True, "duration": 60.0}
    summary = run(trace_file(tmp_path, 3_500), tmp_path, **settings)
    schedule = [json.loads(line)["arrival_s"] for line in (tmp_path / "run" / "trace.jsonl").open()]
    rate = (len(schedule) - 1) / (schedule[-1] - schedule[0])
    assert schedule[-1] > 59
    assert summary["arrivals"]["requested_rate_per_s"] == pytest.approx(rate)
    assert summary["arrivals"]["achieved_rate_per_s"] == pytest.approx(rate, rel=0.005)
    assert sorted(arrivals_of(tmp_path).values()) == schedule


@pytest.mark.slow
def test_waits_end_within_a_tenth_of_a_millisecond() -> None:
    clock = WallClock()
    late_s = []
    for step in range(1, 2_001):
        clock.wait_until(step * 0.002)
        late_s.append(clock.now() - step * 0.002)
    assert min(late_s) >= 0
    assert np.median(late_s) < 0.0001


def test_a_wait_never_ends_early() -> None:
    clock = WallClock()
    for seconds in (0.0001, 0.0005, 0.0009, 0.003):
        clock.wait_until(seconds)
        assert clock.now() >= seconds


def test_gaps_of_a_fifth_of_a_millisecond_are_kept_in_real_time(tmp_path: Path) -> None:
    summary = run(trace_file(tmp_path, 60), tmp_path, device="null")
    assert arrivals_of(tmp_path) == {index: index * 0.0002 for index in range(60)}
    assert summary["arrivals"]["requested_rate_per_s"] == pytest.approx(5_000)
    assert summary["arrivals"]["lateness_s"]["min"] >= 0
    assert summary["arrivals"]["lateness_s"]["max"] > 0


def test_a_virtual_clock_is_never_late(tmp_path: Path) -> None:
    summary = run(trace_file(tmp_path, 60), tmp_path, device="sim:h100-sxm", request_rate=700.0, burstiness=0.3)
    assert summary["arrivals"]["requested_rate_per_s"] == summary["arrivals"]["achieved_rate_per_s"]
    assert set(summary["arrivals"]["lateness_s"].values()) == {0.0}


def test_a_rate_with_a_limit_of_concurrency_counts_from_the_schedule(tmp_path: Path) -> None:
    trace = trace_file(tmp_path, 60, output_len=40)
    limited = run(trace, tmp_path, device="sim:h100-sxm", request_rate=5_000.0, concurrency=2)
    run(trace, tmp_path, "free", device="sim:h100-sxm", request_rate=5_000.0)
    assert arrivals_of(tmp_path) == arrivals_of(tmp_path, "free")
    assert limited["arrivals"]["requested_rate_per_s"] == pytest.approx(5_000)
    assert limited["arrivals"]["achieved_rate_per_s"] < 500
    assert limited["queue_time_s"]["max"] >= limited["arrivals"]["lateness_s"]["max"] > 0.1
    recorded = run(trace, tmp_path, "recorded", device="sim:h100-sxm", arrival="recorded", concurrency=2)
    closed = run(trace, tmp_path, "closed", device="sim:h100-sxm", concurrency=2)
    assert recorded["queue_time_s"]["max"] > 0.1
    assert closed["queue_time_s"]["max"] < 0.01
    assert closed["arrivals"]["requested_rate_per_s"] is None


def test_waiting_for_a_place_is_attributed_to_the_limit_of_concurrency(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "sim:h100-sxm", "request_rate": 5_000.0, "concurrency": 2}
    run(trace_file(tmp_path, 20, output_len=40), tmp_path, **settings)
    lines = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
    for line in lines[4:]:
        assert line["attribution_s"]["waiting_concurrency"] == pytest.approx(line["queue_time_s"], rel=0.05)
        assert "waiting_batch_size" not in line["attribution_s"]
    spans = [json.loads(line) for line in (tmp_path / "run" / "spans.jsonl").read_text().splitlines()]
    held = [span for span in spans if span["cause"] == "concurrency"]
    assert {span["phase"] for span in held} == {"waiting"}
    assert len(held) == len({span["request_id"] for span in held}) >= 16


def test_a_closed_loop_ends_after_the_duration(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "sim:h100-sxm", "concurrency": 2}
    whole = run(trace_file(tmp_path, 60, output_len=40), tmp_path, **settings)
    summary = run(str(tmp_path / "trace.jsonl"), tmp_path, "short", duration=whole["duration_s"] / 2, **settings)
    assert not summary["partial"]
    assert 28 <= summary["requests"]["total"] == summary["requests"]["completed"] <= 34
    assert max(arrivals_of(tmp_path, "short").values()) <= whole["duration_s"] / 2


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"request_rate": 500.0}, "Arrivals 500 requests/s of 500 Lateness none"),
        ({"concurrency": 60}, ""),
        ({"time_scale": 0.0}, ""),
    ],
)
def test_the_report_states_the_rate_asked_and_achieved(tmp_path: Path, settings: dict[str, Any], line: str) -> None:
    run(trace_file(tmp_path, 60), tmp_path, device="sim:h100-sxm", **settings)
    out = io.StringIO()
    print_report(load_run(tmp_path / "run"), Console(file=out, width=120))
    lines = [" ".join(text.split()) for text in out.getvalue().splitlines()]
    assert [text for text in lines if text.startswith("Arrivals")] == [line] * bool(line)


def test_the_report_of_a_closed_loop_says_what_set_the_rate(tmp_path: Path) -> None:
    run(trace_file(tmp_path, 60), tmp_path, device="sim:h100-sxm", concurrency=2)
    out = io.StringIO()
    print_report(load_run(tmp_path / "run"), Console(file=out, width=120))
    assert "requests/s (set by responses)" in out.getvalue()


# Warming up.


def caches_after(monkeypatch: pytest.MonkeyPatch, trace: str, tmp_path: Path, **settings: Any) -> list[Any]:
    """The KV cache manager of each loop: those of the warm-up, if there is one, and of the run."""
    caches: list[Any] = []
    make = TokenGenerationLoop.__init__

    def noted(self: TokenGenerationLoop, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        cache = scheduler_of(self).kv_cache
        assert cache.num_used == 0
        caches.append(cache)

    monkeypatch.setattr(TokenGenerationLoop, "__init__", noted)
    run(trace, tmp_path, **settings)
    return caches


@pytest.mark.parametrize("warm_up", [None, 0, 1, 5])
def test_warm_up_requests_are_no_part_of_the_run(
    warm_up: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tokens of warm-up requests: a block of them left in the cache would be reused.
    trace = trace_file(tmp_path, 3, prompt_len=None, prompt_tokens=[0] * 9)
    settings: dict[str, Any] = {
        "device": "cpu",
        "warm_up": warm_up,
        "enable_kv_cache_reuse": True,
        "tokens_per_block": 4,
        "time_scale": 0.0,
        "max_tokens_in_paged_kvcache": 400,
        "max_seq_len": 64,
        "max_batch_size": 1,
    }
    caches = caches_after(monkeypatch, trace, tmp_path, **settings)
    assert len(caches) == (1 if warm_up == 0 else 2)
    assert all(cache.num_used == 0 for cache in caches)
    lines = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
    assert [line["reused_tokens"] for line in lines] == [0, 8, 8], "the first finds nothing"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["warm_up"] == (
        2 if warm_up is None else warm_up
    )


def test_a_device_without_a_model_says_that_it_does_not_warm_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = trace_file(tmp_path, 3)
    first = run(trace, tmp_path, device="sim:h100-sxm")
    assert caplog.text == ""
    assert run(trace, tmp_path, "warm", device="sim:h100-sxm", warm_up=4) == first
    assert "device sim:h100-sxm has no state to warm up" in caplog.text


class TickingClock(WallClock):
    """Each look at it takes 30 µs."""

    def restart(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        self._now_s += 3e-5
        return self._now_s

    def wait_until(self, seconds: float) -> None:
        self._now_s = max(self._now_s, seconds)


@pytest.mark.parametrize("settings", [{}, {"concurrency": 3}, {"enable_trt_overlap": True}])
def test_a_request_arrives_before_the_iteration_that_first_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Also one that arrives while the engine fetches requests."""
    monkeypatch.setattr("ifbbench.build.engine.WallClock", TickingClock)
    run(trace_file(tmp_path, 300), tmp_path, device="null", **settings)
    starts = [line["ifbbench"]["start_s"] for line in map(json.loads, (tmp_path / "run" / "iterations.jsonl").open())]
    for line in map(json.loads, (tmp_path / "run" / "requests.jsonl").open()):
        assert line["first_scheduled_s"] in starts
        assert line["queue_time_s"] == line["first_scheduled_s"] - line["arrival_s"] >= 0
