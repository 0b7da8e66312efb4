"""The ladder of graph sizes, padding, and inputs in fixed memory; on a GPU, CUDA graphs themselves."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.build import engine as engine_module
from ifbbench.build.engine import build_engine, generate, warm_up
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.sizing import CacheLayout, WindowLayout
from ifbbench.settings.config import RunConfig
from ifbbench.torch import build, cuda_graphs
from ifbbench.torch.cuda_graphs import LARGEST_SIZE, CudaGraphRecorder, Recorder, ladder, padded
from ifbbench.torch.model import tensors
from ifbbench.torch.model.kernel_llama import KernelLlama
from ifbbench.torch.model.weights import random_weights
from ifbbench.torch.model_executor import ModelExecutor
from tests.torch.driving import MICRO, Driver, driver_of, layout_driver, requests_of

LENGTHS = [(9, 5), (20, 3), (2, 4)]


class Repeater:
    """Replaces CUDA graphs: repeats the work. Every input must be in the same memory each time."""

    def __init__(self) -> None:
        self.recorded = 0
        self.repeated = 0

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.recorded += 1
        assert work().isfinite().all(), "a batch of nothing but padding"

        def again() -> Tensor:
            self.repeated += 1
            return work()

        return again


@pytest.fixture(scope="module")
def model(device: torch.device) -> KernelLlama:
    return KernelLlama(MICRO, random_weights(MICRO, 3, device, torch.float32))


def recorders(device: torch.device) -> list[Recorder]:
    return [Repeater(), CudaGraphRecorder()] if device.type == "cuda" else [Repeater()]


def outputs_with(driver: Driver, record: Recorder | None) -> list[list[int]]:
    driver.executor._graphs = None
    if record is not None:
        with torch.inference_mode():
            driver.executor.use_graphs(3, 48, record)
    requests = requests_of(LENGTHS, MICRO.vocab_size)
    driver.run(requests)
    return [request.outputs for request in requests]


def test_graphs_give_the_same_tokens(model: KernelLlama, device: torch.device) -> None:
    expected = outputs_with(driver_of(model, 3, 8, 40), None)
    for record in recorders(device):
        assert outputs_with(driver_of(model, 3, 8, 40), record) == expected
        if isinstance(record, Repeater):
            # Batches of three (padded to four) and two, then one request alone.
            assert (record.recorded, record.repeated) == (3, 4)


@pytest.mark.parametrize("is_cyclic", [True, False])
def test_graphs_with_windows(model: KernelLlama, device: torch.device, is_cyclic: bool) -> None:
    attention_window = AttentionWindow(8, 14, 48, sink=3, is_cyclic=is_cyclic)
    layout = CacheLayout((WindowLayout((0,), attention_window, 3 * attention_window.max_blocks_per_sequence + 2),))
    expected = outputs_with(layout_driver(model, layout, 3), None)
    for record in recorders(device):
        assert outputs_with(layout_driver(model, layout, 3), record) == expected


def test_a_batch_copies_the_blocks_that_it_has(
    model: KernelLlama, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 blocks for 23 tokens, not the 8 columns of the table."""
    copied: list[int] = []

    def packed_on_host(arrays: list[NDArray[np.integer]], device: torch.device) -> Tensor:
        copied.append(len(arrays[-1]))
        return tensors.packed_on_host(arrays, device)

    monkeypatch.setattr(cuda_graphs, "packed_on_host", packed_on_host)
    driver = driver_of(model, 1, 8, 40)
    driver.executor._graphs = None
    with torch.inference_mode():
        driver.executor.use_graphs(1, 64, Repeater())
    driver.run(requests_of([(20, 4)], MICRO.vocab_size))
    width = driver.tables.shape[-1]
    assert width > 3
    # The first batch, the graph's initial inputs, and two more batches.
    assert copied == [3, width, 3, 3]


def test_padding_writes_nothing(model: KernelLlama) -> None:
    """Three sequences run as four: no block changes but those of the three."""
    driver = driver_of(model, 3, 8, 40)
    requests = requests_of(LENGTHS, MICRO.vocab_size)
    for slot, request in enumerate(requests):
        request.slot = slot
    driver.step([(request, request.prompt_len) for request in requests], [])
    with torch.inference_mode():
        driver.executor.use_graphs(3, 40, Repeater())
    (window,) = driver.executor._cache.windows
    before = [part.clone() for part in window.cache.blocks(0)]
    driver.step([], requests)
    places = {
        (int(driver.tables[request.slot, 0, (request.num_cached - 1) // 8]), (request.num_cached - 1) % 8)
        for request in requests
    }
    for part, old in zip(window.cache.blocks(0), before, strict=True):
        changed = (part != old).flatten(2).any(dim=-1).nonzero().tolist()
        assert {(block, place) for block, place in changed} == places


class RecordedProgress:
    """Records progress."""

    def __init__(self) -> None:
        self.updates: list[tuple[int, int | None, str]] = []

    def stage(self, label: str) -> None:
        assert label == "warming up"

    def update(self, completed: int, total: int | None, text: str) -> None:
        self.updates.append((completed, total, text))


def test_a_warm_up_leaves_nothing_to_record(model: KernelLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of every size use a recorded graph afterwards."""
    monkeypatch.setattr(build, "load_model", lambda config, _: model)
    monkeypatch.setattr(engine_module, "load_model_config", lambda name: MICRO)
    engine = build_engine(
        RunConfig(
            device=model.device.type,
            max_batch_size=3,
            max_tokens_in_paged_kvcache=320,
            max_seq_len=48,
            tokens_per_block=8,
        )
    )
    record, progress, slots = Repeater(), RecordedProgress(), engine.limits.num_slots
    assert isinstance(engine.executor, ModelExecutor)
    with torch.inference_mode():
        engine.executor.use_graphs(slots, 48, record)
    warm_up(engine, progress)
    assert record.recorded == len(ladder(slots))
    assert progress.updates == [(done + 1, record.recorded, "") for done in range(record.recorded)]
    repeated = record.repeated
    outputs = generate(engine, [[1, 2, 3], [4], [5, 6, 7, 8]], 4)
    assert [len(output) for output in outputs] == [4, 4, 4]
    assert record.repeated == repeated + 3
    assert record.recorded == len(ladder(slots))
    engine.executor.close()


def test_nothing_is_recorded_before_a_batch_has_run(model: KernelLlama) -> None:
    """The number of blocks per sequence is not known yet."""
    driver, record = driver_of(model, 3, 8, 40), Repeater()
    driver.executor.use_graphs(3, 40, record)
    driver.executor.warm_up(lambda done, total: None)
    assert record.recorded == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: kernels are interpreted here, not compiled")
def test_a_warm_up_leaves_nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(RunConfig(device="cuda", dtype="bf16", max_batch_size=8, max_seq_len=1024))
    try:
        warm_up(engine)
        compiled: list[object] = []

        def note(**facts: object) -> bool:
            compiled.append(facts["repr"])
            return False  # do compile it

        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
        generate(engine, [[1] * length for length in (1, 7, 300, 900)], 20)
        assert not compiled
    finally:
        engine.executor.close()


def test_ladder() -> None:
    assert ladder(1) == [1]
    assert ladder(3) == [1, 2, 4]
    assert ladder(50) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
    assert ladder(10_000)[-1] == LARGEST_SIZE
    sizes = np.array(ladder(10_000))
    assert (np.diff(sizes) > 0).all()
    assert (sizes[4:] <= 1.5 * sizes[3:-1]).all()


def test_padded() -> None:
    assert padded(np.array([5, 6]), 4, -1).tolist() == [5, 6, -1, -1]
    assert padded(np.array([[1], [2]]), 2, 0).tolist() == [1, 0, 2, 0]
