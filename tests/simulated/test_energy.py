"""Energy of simulated runs: watts by hand, and the same work however the iterations ran."""

import dataclasses
import json

import numpy as np
import pytest

from ifbbench.engine.interfaces import IterationWork
from ifbbench.engine.stretch import Positions
from ifbbench.errors import InputError
from ifbbench.progress import NO_PROGRESS
from ifbbench.replay.run import run_trace, summarise_run
from ifbbench.settings.config import RunConfig
from ifbbench.simulated.cost_model import CostModel
from ifbbench.simulated.energy import joules_of_work
from ifbbench.simulated.executor import SimulatedExecutor
from ifbbench.simulated.hardware import Watts, hardware_names, load_hardware
from ifbbench.simulated.step_work import StepWork, WorkDone
from ifbbench.studies.points import summarise_replicas
from ifbbench.studies.tune import Tuner
from ifbbench.studies.tune_candidates import Goal
from ifbbench.virtual_clock import VirtualClock
from ifbbench.workload.load import in_memory, load_trace
from tests.simulated.batches import batch_of, cost_model

WORK_DONE = (
    "iterations_by_tokens",
    "iterations_by_outputs",
    "attention_pairs",
    "context_kv_tokens",
    "generation_kv_tokens",
)
WATTS = Watts(idle=100, memory=500, compute=1000, limit=700)


def watts_of(name: str) -> Watts:
    watts = load_hardware(name).watts
    assert watts is not None
    return watts


def joules(model: CostModel, work: StepWork, watts: Watts = WATTS) -> float:
    done = WorkDone()
    done.add(work)
    return joules_of_work(model, done, watts)


def test_every_gpu_has_watts_in_the_order_that_physics_gives_them():
    assert load_hardware("cpu").watts is None
    for name in hardware_names():
        if name != "cpu":
            watts = watts_of(name)
            assert 0 < watts.idle < 0.4 * watts.limit
            assert watts.idle + watts.memory < 1.5 * watts.limit
            assert watts.limit < watts.idle + watts.memory + watts.compute


def test_reading_the_cache_takes_the_watts_of_its_share_of_the_bandwidth():
    model, work = cost_model("llama-3.1-8b", "h100-sxm", "bf16"), StepWork(generation_kv_tokens=10**6)
    operation = model.of_attention(work)[1]

    seconds = operation.bytes / model.hardware.memory_bandwidth
    flops_s = operation.flops / model.hardware.peak_flops["bf16"]
    moved = joules(model, work) - joules(model, StepWork())
    assert moved == pytest.approx(500 * seconds + 1000 * flops_s)


def test_no_operation_takes_more_than_the_limit():
    model = cost_model("llama-3.1-8b", "h100-sxm", "bf16")
    work = StepWork.of_lengths([(0, 8192, True)])
    products_s = sum(one.seconds for one in model.operations(work))

    low, high = (joules(model, work, dataclasses.replace(WATTS, compute=watts)) for watts in (1000, 10**6))
    assert low < high <= (WATTS.limit - WATTS.idle) * products_s


def test_eight_bits_take_half_the_energy_of_sixteen():
    work = StepWork.of_lengths([(0, 8192, True)])
    watts = dataclasses.replace(WATTS, limit=10**6, memory=0)
    sixteen, eight = (joules(cost_model("llama-3.1-8b", "h100-sxm", dtype), work, watts) for dtype in ("bf16", "fp8"))
    assert eight == pytest.approx(sixteen / 2, rel=0.03)


def test_all_devices_of_a_stage_count_and_each_stage_once():
    one = joules(cost_model("llama-3.3-70b", "h100-sxm", "fp8", tp_size=4), StepWork(generation_kv_tokens=10**6))
    two = joules(
        cost_model("llama-3.3-70b", "h100-sxm", "fp8", tp_size=4, pp_size=2), StepWork(generation_kv_tokens=10**6)
    )
    assert one == pytest.approx(two, rel=1e-3)


@pytest.mark.parametrize("windows", [((None, 1.0),), ((64, 0.5), (None, 0.5)), ((64, 1.0),)])
def test_iterations_together_do_the_work_of_one_by_one(windows):
    model, steps, lengths = cost_model("llama-3.1-8b", "h100-sxm", "bf16"), 30, [50, 100, 7]
    alone = SimulatedExecutor(model, VirtualClock(), windows)
    for step in range(steps):
        alone.submit(batch_of([], [length + step for length in lengths]))
        alone.collect()
    together = SimulatedExecutor(model, VirtualClock(), windows)
    first = batch_of([], lengths).positions
    positions = Positions(len(first), int(first.sum()), lambda: first.astype(np.int64))
    together.run([IterationWork((), positions)], steps, 0)

    for name in WORK_DONE:
        assert getattr(together.done, name) == getattr(alone.done, name)


def run_config(**changes) -> RunConfig:
    return RunConfig(device="sim:h100-sxm", model="llama-3.1-8b", max_num_samples=20, quiet=True, **changes)


def test_the_summary_has_the_idle_time_and_the_work(tmp_path):
    config = run_config(output=str(tmp_path / "run"))
    summary = run_trace("chat", config).summary
    energy, watts = summary["energy"], watts_of("h100-sxm")

    assert json.loads((tmp_path / "run" / "summary.json").read_text())["energy"] == energy
    assert watts.idle < energy["power_w_per_gpu"] < watts.limit
    assert energy["joules"] == pytest.approx(energy["power_w_per_gpu"] * summary["duration_s"])
    assert energy["joules_per_output_token"] == pytest.approx(energy["joules"] / summary["output_tokens"])
    assert energy["joules_per_request"] == pytest.approx(energy["joules"] / 20)


def test_a_profile_without_watts_has_no_energy():
    assert "energy" not in summarise_run("chat", run_config().with_values(device="sim:cpu", model="tiny"))


def test_replicas_take_what_each_takes_and_wait_for_the_last():
    config = run_config()
    trace = in_memory(load_trace("chat", config))
    alone = [summarise_run(trace, config.with_values(replica=f"{number}/2")) for number in (1, 2)]
    both, _ = summarise_replicas(trace, config, NO_PROGRESS, replicas=2)

    idle_s = sum(both["duration_s"] - one["duration_s"] for one in alone)
    joules = sum(one["energy"]["joules"] for one in alone) + idle_s * watts_of("h100-sxm").idle
    assert both["energy"]["gpus"] == 2
    assert both["energy"]["joules"] == pytest.approx(joules)
    assert both["energy"]["power_w_per_gpu"] == pytest.approx(joules / 2 / both["duration_s"])


def test_the_goal_energy_needs_watts():
    with pytest.raises(InputError, match="--goal energy: the power of cpu is not known"):
        Tuner("chat", run_config().with_values(device="sim:cpu", model="tiny"), frozenset(), Goal.of("energy", None))


def test_tuning_for_energy_finds_settings_that_take_no_more_than_the_defaults():
    slo = "ttft.p99=5s"
    goal, fixed = Goal.of("energy", slo), frozenset({"tp_size"})
    tuning = Tuner("chat", run_config(tp_size=1, slo=slo), fixed, goal, max_gpus=2).run()
    default = summarise_run("chat", run_config(tp_size=1))

    assert tuning.best is not None
    assert -tuning.best.score <= default["energy"]["joules_per_output_token"] * 1.01
    assert tuning.best.summary["energy"]["joules_per_output_token"] == -tuning.best.score
