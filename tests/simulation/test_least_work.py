"""What a batch asks for at the least."""

import pytest

from ifbbench.model.named_models import load_model_config
from ifbbench.simulation.cost_model import CostModel
from ifbbench.simulation.hardware import load_hardware
from ifbbench.simulation.least_work import least_work
from ifbbench.simulation.step_work import StepWork

WORKS = [
    StepWork.of_lengths([], [500, 20]),
    StepWork.of_lengths([(0, 1000, True), (64, 30, False)], [500]),
    StepWork.of_lengths([(0, 8, False)], []),
]


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("name", ["tiny", "llama-3.1-8b", "qwen3-0.6b"])
def test_flops_are_those_of_all_operations_and_bytes_are_fewer(name: str, work: StepWork) -> None:
    model = CostModel(load_model_config(name), load_hardware("h100-sxm"), dtype="bf16")
    operations = model.operations(work)
    least = least_work(model.shard, work)
    assert least.flops == pytest.approx(sum(operation.flops for operation in operations), rel=1e-12)
    assert 0 < least.bytes < sum(operation.bytes for operation in operations) + work.num_tokens * 65_536 * 2


def test_bytes_of_one_generation_step_by_hand() -> None:
    shard = CostModel(load_model_config("llama-3.1-8b"), load_hardware("h100-sxm"), dtype="bf16").shard
    weights = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14_336) + 4096 * 128_256
    assert least_work(shard, StepWork.of_lengths([], [500])).bytes == 2 * weights + 501 * 131_072


def test_nothing_asks_for_nothing() -> None:
    shard = CostModel(load_model_config("tiny"), load_hardware("h100-sxm"), dtype="bf16").shard
    assert least_work(shard, StepWork()) == (0.0, 0.0)
