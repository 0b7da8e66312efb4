"""The fit recovers the times of a known machine, with and without noise and disturbances."""

from pathlib import Path
from statistics import median

import numpy as np
import pytest

from ifbbench.simulated.hardware import load_hardware
from ifbbench.simulated.step_work import StepWork
from ifbbench.studies.calibrate import calibrated
from ifbbench.studies.fit import FitError, points_of
from ifbbench.studies.measure import Scenario, measure, scenarios
from tests.studies.synthetic import cost_model_of, synthetic_engine, true_hardware

# None of them is in a scenario: prompts alone, chunks behind a start, generation, and both.
UNSEEN = [
    ([(0, 300, True)], []),
    ([(0, 3000, True)], []),
    ([(700, 700, False)], []),
    ([(0, 150, True)] * 5, []),
    ([], [90] * 6),
    ([], [700] * 12),
    ([], [3000] * 3),
    ([(0, 800, True)], [400] * 7),
    ([(100, 50, True), (0, 40, True)], [40] * 14),
]


def seconds(cost_model, work: StepWork) -> float:
    return (cost_model.host_ns(work.context_requests + work.generation_tokens) + cost_model.device_ns(work)) / 1e9


@pytest.mark.parametrize(("noise", "disturbances", "allowed"), [(0.0, 0.0, 0.02), (0.03, 0.1, 0.06)])
def test_times_of_unseen_batches_are_found_again(noise, disturbances, allowed):
    engine = synthetic_engine(noise, disturbances)
    points = points_of(measure(engine, scenarios(engine.limits, seed=0), rounds=3))
    assert {point.kind for point in points} == {"context", "generation", "mixed"}
    found = calibrated(engine, load_hardware("cpu"), points, Path("here.toml"))
    truth, fitted = cost_model_of(engine, true_hardware()), cost_model_of(engine, found.profile)
    built_in = cost_model_of(engine, load_hardware("cpu"))
    works = [StepWork.of_lengths(*lengths) for lengths in UNSEEN]
    errors = [abs(seconds(fitted, work) / seconds(truth, work) - 1) for work in works]
    assert max(errors) < allowed
    # The test means nothing if the start were as good.
    assert median(abs(seconds(built_in, work) / seconds(truth, work) - 1) for work in works) > 5 * allowed
    assert found.profile.calibration["median_error"] < allowed
    assert found.profile.calibration["points"] == len(points)


def test_what_nothing_measures_stays_as_it_was():
    engine = synthetic_engine()
    generation_only = [
        point
        for point in points_of(measure(engine, [Scenario(((64, 40),) * count) for count in (1, 4, 16)], rounds=1))
        if point.kind == "generation"
    ]
    profile = calibrated(engine, load_hardware("cpu"), generation_only, Path("here.toml")).profile
    assert profile.constants.context_attention == pytest.approx(load_hardware("cpu").constants.context_attention)
    assert profile.constants.network == load_hardware("cpu").constants.network


def test_disturbed_samples_do_not_move_a_point():
    engine = synthetic_engine(disturbances=0.1)
    calm = synthetic_engine()
    workload = [Scenario(((64, 17),) * 4)]
    disturbed_points, calm_points = (points_of(measure(one, workload, rounds=9)) for one in (engine, calm))
    assert len(calm_points) == len(disturbed_points) >= 2
    for disturbed, expected in zip(disturbed_points, calm_points, strict=True):
        assert disturbed.work == expected.work
        assert disturbed.seconds == pytest.approx(expected.seconds, rel=0.02)


def test_scenarios_keep_to_the_limits():
    engine = synthetic_engine()
    for scenario in scenarios(engine.limits, seed=0):
        at_once = scenario.concurrency or len(scenario.lengths)
        assert at_once <= engine.limits.max_batch_size
        assert max(map(sum, scenario.lengths)) <= engine.limits.max_seq_len


def test_errors_are_shares_of_what_was_measured():
    engine = synthetic_engine()
    points = points_of(measure(engine, [Scenario(((16, 8),))], rounds=1))
    measured = np.array([point.seconds for point in points])
    error = FitError.of(points, 1.1 * measured)
    assert (error.median, error.worst) == pytest.approx((0.1, 0.1))
