"""Lower bounds: no schedule is faster, parts add up, and the work of each iteration is rebuilt exactly."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ifbbench.analysis.bounds import Bounds
from ifbbench.analysis.device_costs import MeasuredDevice
from ifbbench.analysis.findings import Findings
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.simulated.least_time import LeastTime
from ifbbench.simulated.step_work import StepWork, StepWorks
from tests.analysis.runs import POOL_TOKENS, SETTINGS, simulate, write_requests
from tests.simulated.batches import cost_model

# Besides SETTINGS, what changes the work of an iteration or the time of its device.
OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "window": {"max_attention_window": "200"},
    "windows": {"max_attention_window": "128,1024", "max_tokens_in_paged_kvcache": 20_000},
    "two stages": {"tp_size": 2, "pp_size": 2},
    "reuse": {"enable_kv_cache_reuse": True, "policy": "max_utilization"},
    "beams": {"beam_width": 2, "max_beam_width": 2, "max_tokens_in_paged_kvcache": 8_000},
    "pauses, short input": {"policy": "max_utilization", "max_input_len": 950, "max_tokens_in_paged_kvcache": 2_500},
    "one at a time": {"max_batch_size": 1},
    "closed loop": {"concurrency": 3},
    "overlap": {"enable_trt_overlap": True},
    "overlap async": {"overlap": "async"},
    "thinned": {"iteration_stats_every": 7, "policy": "max_utilization"},
}
# The recorded times of these are not those of the device alone.
INEXACT = ("two passes", "overlap", "overlap async", "two stages", "thinned")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_requests(tmp_path_factory.mktemp("traces") / "trace.jsonl", seed=5)


@pytest.fixture(scope="module", params=SETTINGS | OTHER_SETTINGS)
def run(request, trace: Path, tmp_path_factory) -> tuple[str, RecordedRun]:
    settings = (SETTINGS | OTHER_SETTINGS)[request.param]
    return request.param, simulate(tmp_path_factory.mktemp("runs"), "run", trace, **settings)


def test_the_parts_add_up_to_the_duration(run: tuple[str, RecordedRun]) -> None:
    name, recorded = run
    bound = Bounds(recorded).of_run
    assert recorded.data.summary is not None
    assert bound.duration_s == pytest.approx(recorded.data.summary["duration_s"], abs=1e-12)
    assert sum(bound.parts_s.values()) == pytest.approx(bound.duration_s, abs=1e-9)
    assert min(bound.parts_s.values()) > -1e-9
    assert 0 < bound.device_s <= bound.least_s <= bound.duration_s
    assert (bound.parts_s["recomputation"] > 0) == (recorded.data.summary["recomputed_tokens"] > 0)
    assert (bound.parts_s["padding"] > 0) == (name == "static")


def test_the_work_of_each_iteration_takes_its_recorded_time(run: tuple[str, RecordedRun]) -> None:
    name, recorded = run
    if name in INEXACT:
        pytest.skip("times of the device are recorded together with the host's")
    bounds = Bounds(recorded)
    iterations = recorded.iterations
    recorded_s = iterations.end_s - iterations.start_s - iterations.host_s
    assert bounds.predicted_s(bounds.work.computed) == pytest.approx(recorded_s, abs=1e-12)


def test_no_schedule_beats_the_bound(run: tuple[str, RecordedRun]) -> None:
    _, recorded = run
    bounds = Bounds(recorded)
    assert bounds.of_run.device_s <= bounds.predicted_s(bounds.work.computed).sum()
    for request_id, row in recorded.row_of.items():
        least_s = bounds.request_s(request_id)
        assert least_s is not None
        assert 0 < least_s <= row["e2e_s"]


def test_useful_work_is_that_of_the_trace(run: tuple[str, RecordedRun]) -> None:
    _, recorded = run
    work = Bounds(recorded).work
    rows = recorded.row_of.values()
    beams = recorded.config["beam_width"] or 1
    prompts = sum(row["prompt_len"] - row["reused_tokens"] for row in rows)
    if not recorded.config["enable_kv_cache_reuse"]:  # resumed requests find blocks of their own
        assert work.needed.context_tokens.sum() == prompts
    assert work.needed.generation_tokens.sum() == sum(row["output_len"] - 1 for row in rows) * beams
    for name in ("context_tokens", "attention_pairs", "generation_tokens", "outputs"):
        assert getattr(work.useful, name).sum() == pytest.approx(getattr(work.needed, name).sum(), rel=1e-6)
    again = work.unpadded.context_tokens + work.unpadded.generation_tokens
    again = again - work.useful.context_tokens - work.useful.generation_tokens
    assert again.sum() == sum(row["recomputed_tokens"] for row in rows) * beams


def test_the_bound_is_that_of_the_work(tmp_path: Path, trace: Path) -> None:
    """It does not depend on how the run was scheduled; a smaller cache raises it."""
    runs = [
        simulate(tmp_path, name, trace, **SETTINGS[name]) for name in ("unchunked", "max_utilization", "small batch")
    ]
    assert len({Bounds(run).of_run.device_s for run in runs}) == 1
    smaller = simulate(tmp_path, "smaller", trace, max_tokens_in_paged_kvcache=POOL_TOKENS // 2)
    assert Bounds(smaller).of_run.device_s > Bounds(runs[0]).of_run.device_s


def test_of_a_single_request_only_the_host_could_be_faster(tmp_path: Path) -> None:
    trace = write_requests(tmp_path / "trace.jsonl", seed=1, count=1)
    bound = Bounds(simulate(tmp_path, "run", trace)).of_run
    assert bound.gain_s == pytest.approx(bound.parts_s["host"], abs=1e-6)


MODELS = {
    "H100": cost_model("llama-3.1-8b", "h100-sxm", dtype="bf16"),
    "four stages": cost_model("llama-3.1-405b", "b200", dtype="fp8", tp_size=8, pp_size=4),
    "experts": cost_model("mixtral-8x7b", "h100-sxm", dtype="bf16", tp_size=4),
    "weights that fit the cache": cost_model("tiny", "h100-sxm", dtype="bf16"),
}


@pytest.mark.parametrize("name", MODELS)
def test_work_takes_at_least_its_bound_however_it_is_divided(name: str) -> None:
    model, draw = MODELS[name], random.Random(3)
    for _ in range(300):
        iterations = [_draw_work(draw) for _ in range(draw.choice([1, 2, 5, 20]))]
        time_ns = sum(model.device_ns(work) for work in iterations)
        total = StepWork(*map(sum, zip(*iterations, strict=True)))
        with_outputs = sum(work.outputs > 0 for work in iterations)
        assert LeastTime(model).least_ns(total, max(with_outputs, 1)) <= time_ns


def test_equal_iterations_are_at_the_bound() -> None:
    model = MODELS["H100"]
    work = StepWork.of_lengths(kv_lengths=[900] * 64)
    total = StepWork(*(100 * value for value in work))
    assert LeastTime(model).least_ns(total, 100) == pytest.approx(100 * model.device_ns(work), rel=1e-6)


def _draw_work(draw: random.Random) -> StepWork:
    chunks = [
        (draw.choice([0, 100, 5_000]), draw.choice([1, 60, 512, 8_192]), draw.random() < 0.5)
        for _ in range(draw.choice([0, 0, 1, 4]))
    ]
    lengths = [draw.randint(1, 8_000) for _ in range(draw.choice([0, 1, 30, 200]))]
    return StepWork.of_lengths(chunks, lengths or ([] if chunks else [1]))


@pytest.mark.parametrize("name", MODELS)
def test_times_of_many_iterations_are_those_of_each(name: str) -> None:
    draw = random.Random(4)
    works = [StepWork(), *(_draw_work(draw) for _ in range(200))]
    columns = StepWorks(*(np.array(column) for column in zip(*works, strict=True)))
    times = MODELS[name].times_ns(columns)
    assert times[0] == 0
    assert times[1:].tolist() == [MODELS[name].device_ns(work) for work in works[1:]]


def test_a_fit_of_measured_times_finds_what_they_depend_on() -> None:
    draw = random.Random(2)
    works = [_draw_work(draw) for _ in range(400)]
    columns = StepWorks(*(np.array(column) for column in zip(*works, strict=True)))
    seconds = np.array([2e-3, 1e-6, 0.0, 3e-5, 4e-9])
    noise = np.random.default_rng(0).normal(0, 1e-6, len(works))
    fitted = MeasuredDevice.fitted(columns, MeasuredDevice(seconds).times_s(columns) + noise)
    assert (fitted.seconds >= 0).all()
    assert fitted.seconds[[0, 1, 3, 4]] == pytest.approx(seconds[[0, 1, 3, 4]], rel=0.02)
    assert fitted.least_s(StepWork(generation_tokens=10, outputs=10), 5) == pytest.approx(5 * 2e-3 + 3e-4, rel=0.02)


def test_a_real_run_is_divided_by_its_measured_times(tmp_path: Path) -> None:
    trace = write_requests(tmp_path / "trace.jsonl", seed=2, count=6, longest=40)
    run = simulate(tmp_path, "run", trace, device="cpu", model="tiny", cpu_threads=1, max_batch_size=3)
    bound = Bounds(run).of_run
    assert sum(bound.parts_s.values()) == pytest.approx(bound.duration_s, abs=1e-9)
    assert 0 < bound.device_s <= bound.duration_s
    assert bound.parts_s["host"] > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "null"}, "computes nothing"),
        ({"device": "sim:abacus"}, "abacus"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_why_a_bound_is_unknown_is_said(tmp_path: Path, trace: Path, change: dict[str, object], reason: str) -> None:
    run = simulate(tmp_path, "run", trace)
    run.data.run["config"] |= change
    findings = Findings(run)
    assert isinstance(findings.lower_bound, str)
    assert reason in findings.lower_bound
    assert reason in findings.as_dict(1)["lower_bound"]["unknown"]
    assert findings.life(1000).least_s is None
