"""How fast a CPU could answer the requests of `cpu_engines` at most.

An iteration can take no less than its FLOPs take at the speed of large matrix products, and no less than its weights,
keys and values take to be read from memory; the larger of the two counts. The iterations are those of this project's
own schedule. Weights that stay in the caches from one iteration to the next need not come from memory, so a model as
small as the caches may beat its limit.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.cpu_own_engine import DTYPE_NAMES, serve, settings
from benchmarks.cpu_task import MAX_NUM_TOKENS, Task
from ifbbench.build.engine import build_engine
from ifbbench.engine.batch import Batch
from ifbbench.engine.passes import NullExecutor
from ifbbench.models.named_models import load_model_config
from ifbbench.simulated.shard import Shard
from ifbbench.simulated.step_work import StepWork, least_work
from ifbbench.torch.model.linear import make_linear

# Weights of [SIZE, SIZE]: together far more than the caches hold.
SIZE = 2048
NUM_WEIGHTS = 32
REPEATS = 5


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Of large operations. flops_per_s: of a square matrix product. bytes_per_s: read from memory."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Limit:
    """Output tokens a second at most: in all, if only matrix products took time, and if only memory did."""

    tokens_per_s: float
    matrix_tokens_per_s: float
    memory_tokens_per_s: float


class WorkCounter(NullExecutor):
    """Runs nothing, and keeps the work of each batch."""

    def __init__(self) -> None:
        self.works: list[StepWork] = []

    def submit(self, batch: Batch) -> None:
        """Note what the batch asks for."""
        self.works.append(StepWork.of_batch(batch))


def schedule(task: Task) -> list[StepWork]:
    """The work of each iteration."""
    counter = WorkCounter()
    serve(task, build_engine(settings(task, "null")).limits, counter)
    return counter.works


def limit(task: Task, speed: DeviceSpeed) -> Limit:
    """Of `task` on a device of that speed."""
    dtype = DTYPE_NAMES[task.dtype]
    shard = Shard(load_model_config(task.directory), dtype, dtype)
    least = [least_work(shard, work) for work in schedule(task)]
    by_matrix = [work.flops / speed.flops_per_s for work in least]
    by_memory = [work.bytes / speed.bytes_per_s for work in least]
    seconds = sum(map(max, by_matrix, by_memory)), sum(by_matrix), sum(by_memory)
    return Limit(*(sum(task.lengths) / duration for duration in seconds))


def matrix_flops_per_s(dtype: str, threads: int) -> float:
    """Of products of 512 rows with packed weights in `dtype`."""
    torch.set_num_threads(threads)
    values = torch.ones(SIZE, SIZE, dtype=getattr(torch, dtype))
    rows = torch.ones(MAX_NUM_TOKENS, SIZE, dtype=values.dtype)
    with torch.inference_mode():
        products = [make_linear(values.clone()) for _ in range(NUM_WEIGHTS)]
        seconds = _best_s(threads, lambda: [product(rows) for product in products])
    return 2.0 * NUM_WEIGHTS * rows.numel() * SIZE / seconds


def read_bytes_per_s(threads: int) -> float:
    """Of adding up weights, which asks for no more than to read them."""
    torch.set_num_threads(threads)
    weights = [torch.ones(SIZE, SIZE) for _ in range(NUM_WEIGHTS)]
    return sum(weight.nbytes for weight in weights) / _best_s(threads, lambda: [weight.sum() for weight in weights])


def _best_s(threads: int, work: Callable[[], object]) -> float:
    """Seconds of the fastest of several times, from the CPU seconds of `threads` that share it evenly: in wall time,
    other work on the machine would count too."""
    times = []
    for _ in range(1 + REPEATS):
        start_s = time.process_time()
        work()
        times.append(time.process_time() - start_s)
    return min(times[1:]) / threads
