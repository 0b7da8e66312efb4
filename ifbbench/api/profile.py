"""What a profiled run needs beside its executor: the work of its batches, and what the device could do."""

from dataclasses import dataclass

from ifbbench.api.cache_layout import windows_of_layers
from ifbbench.config import RunConfig
from ifbbench.engine.batch import Batch
from ifbbench.engine.kv_cache.sizing import CacheLayout
from ifbbench.execution.step_profile import StepProfile
from ifbbench.model.config import ModelConfig
from ifbbench.simulation.least_work import LeastWork, least_work
from ifbbench.simulation.shard import Shard
from ifbbench.simulation.step_work import StepWork


@dataclass(frozen=True, slots=True)
class Profile:
    """steps: where iterations' times go. flops_per_s, bytes_per_s: of large matrix products and copies here."""

    steps: StepProfile
    flops_per_s: float
    bytes_per_s: float


def step_profile(config: RunConfig, model: ModelConfig, layout: CacheLayout) -> StepProfile:
    """An empty profile of a run with these resolved settings."""
    shard = Shard(model, config.weight_dtype, config.kv_cache_dtype or config.weight_dtype)
    windows = windows_of_layers(layout, model)

    def work_of(batch: Batch) -> LeastWork:
        return least_work(shard, StepWork.of_windows(batch, windows))

    return StepProfile(work_of)
