"""Pipeline stages of the simulated device: batches pass through them one after the other."""

from itertools import pairwise

import pytest

from ifbbench.simulated.executor import SimulatedExecutor
from ifbbench.simulated.step_work import StepWork
from ifbbench.virtual_clock import VirtualClock
from tests.simulated.batches import batch_of, cost_model

MODEL = "llama-3.1-8b", "h100-sxm", "bf16"
WORK = StepWork.of_lengths([(0, 900, True)], [500] * 20)


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 32])
def test_the_stages_add_up_to_the_time_of_a_batch(stages):
    model = cost_model(*MODEL, pp_size=stages)
    times = model.stages_ns(WORK)
    assert len(times) == stages
    assert sum(times) == model.device_ns(WORK)
    assert min(times) > 0
    # All layers are equal: stages differ by a layer at most, and the last one samples too.
    a_layer = model.device_ns(WORK) / 32
    assert max(times[:-1], default=0) - min(times[:-1], default=0) <= a_layer + 1
    assert times[-1] == max(times) or stages == 3


def finished(model, batches, clock):
    """When each of the batches, submitted at once, is done."""
    executor = SimulatedExecutor(model, clock)
    for batch in batches:
        executor.submit(batch)
    ends = []
    for _ in batches:
        executor.collect()
        ends.append(clock.now_ns)
    return ends


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_latency_is_that_of_all_stages_and_throughput_that_of_the_slowest(stages):
    model, clock = cost_model(*MODEL, pp_size=stages), VirtualClock()
    batch = batch_of([], [4000] * 64)
    work = StepWork.of_batch(batch)
    host_ns = model.host_ns(64)
    ends = finished(model, [batch] * 6, clock)
    assert ends[0] == host_ns + model.device_ns(work)
    assert host_ns < min(model.stages_ns(work))
    for before, after in pairwise(ends):
        assert after - before == max(model.stages_ns(work))


def test_a_small_batch_waits_behind_a_large_one_in_each_stage():
    model, clock = cost_model(*MODEL, pp_size=2), VirtualClock()
    large, small = batch_of([(0, 4096, True)], []), batch_of([], [10])
    ends = finished(model, [large, small], clock)
    assert ends[1] - ends[0] == model.stages_ns(StepWork.of_batch(small))[-1]
