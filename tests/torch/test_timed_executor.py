"""An executor that notes where the time goes does the same as one that does not."""

import pytest
import torch

from ifbbench.engine.batch import Batch
from ifbbench.engine.step_profile import StepProfile, StepTimes
from ifbbench.torch.cache_windows import one_window_layout
from ifbbench.torch.model.llama import LlamaModel
from ifbbench.torch.model.weights import random_weights
from ifbbench.torch.timed_executor import TimedExecutor
from tests.torch.driving import CPU, SMALL, Driver, driver_of, requests_of


def work_of(batch: Batch) -> tuple[float, float]:
    return float(batch.num_tokens), 2.0 * batch.num_tokens


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return LlamaModel(SMALL, random_weights(SMALL, 3, CPU, torch.float32))


def test_the_same_tokens_and_a_time_for_each_part(model: LlamaModel) -> None:
    plain, timed = (requests_of([(9, 3), (20, 3)], SMALL.vocab_size) for _ in range(2))
    driver_of(model, 2, 4, 40).run(plain)
    profile = StepProfile(work_of)
    driver = Driver(TimedExecutor(model, one_window_layout(model.config, 40, 4), 2, profile=profile), 2, 40)
    driver.run(timed)
    assert [request.outputs for request in timed] == [request.outputs for request in plain]
    steps = [profile.take(iteration) for iteration in range(driver.iteration)]
    assert len(steps) >= 3
    for step in steps:
        assert step.launch_s == 0  # a CPU is its own device
        assert min(step.prepare_s, step.device_s, step.collect_s, step.flops) > 0
        assert step.bytes == 2 * step.flops
    assert profile.take(0) == StepTimes()


def test_passes_of_one_iteration_add_up(model: LlamaModel) -> None:
    first, second = requests_of([(9, 3), (5, 3)], SMALL.vocab_size)
    first.slot, second.slot = 0, 1
    profile = StepProfile(work_of)
    driver = Driver(TimedExecutor(model, one_window_layout(model.config, 40, 4), 2, profile=profile), 2, 40)
    driver.submit([(first, 9)], [])
    driver.iteration -= 1
    driver.submit([(second, 5)], [])
    driver.collect()
    alone_s = profile.of(0).device_s
    driver.collect()
    assert profile.of(0).device_s > alone_s > 0
    assert profile.take(0).flops == 14
