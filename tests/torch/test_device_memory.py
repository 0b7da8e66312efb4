"""A device that runs out of memory: every place where it can says what was being done, and what to lower."""

from collections.abc import Callable

import pytest
import torch

from ifbbench.build.engine import build_engine, warm_up
from ifbbench.errors import InputError
from ifbbench.settings.config import RunConfig
from ifbbench.torch import build, device
from ifbbench.torch.device import OutOfMemory, is_out_of_memory, needing_memory
from ifbbench.torch.model.llama import LlamaModel
from ifbbench.torch.model_executor import ModelExecutor
from tests.torch.driving import driver_of, requests_of

CPU = torch.device("cpu")
TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.09 GiB is free."
)
SMALL_RUN = RunConfig(device="cpu", max_tokens_in_paged_kvcache=640, max_seq_len=64, max_batch_size=2)


def out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError(TORCH_SAYS)


@pytest.fixture(autouse=True)
def _free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "available_host_bytes", lambda: 123_456_789)


def expect(work: Callable[[], object], *words: str) -> None:
    with pytest.raises(InputError) as caught:
        work()
    for text in (*words, "2.50 GiB more were asked for", "118 MiB are free"):
        assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_loading_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "random_weights", out_of_memory)
    expect(lambda: build.load_model(SMALL_RUN), "loading the weights of tiny in float32", "--dtype", "smaller model")


def test_the_largest_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build.load_model(SMALL_RUN)
    monkeypatch.setattr(build, "activation_bytes", out_of_memory)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123_456_789, 10**12))
    expect(
        lambda: build.kv_memory(SMALL_RUN, model, torch.device("cuda")),
        "the largest batch, 8,192 tokens",
        "--max_num_tokens",
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("paged", ["KV cache of 20 blocks", "--kv_cache_free_gpu_mem_fraction", "--max_tokens_in_paged_kvcache"]),
        ("contiguous", ["KV cache of 2 sequences", "--max_batch_size", "--max_seq_len"]),
    ],
)
def test_making_the_cache(kind: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "ModelExecutor", out_of_memory)
    expect(lambda: build_engine(SMALL_RUN.with_values(kv_cache_type=kind)), *words)


def test_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driver_of(build.load_model(SMALL_RUN), 2, 8, 40)
    first, second = requests_of([(9, 2), (5, 1)], 100)
    first.slot, second.slot = 0, 1
    driver.step([(first, 9)], [])
    monkeypatch.setattr(LlamaModel, "forward", out_of_memory)
    doing = "running 5 context and 1 generation tokens"
    expect(lambda: driver.step([(second, 5)], [first]), doing, "--max_num_tokens", "--max_batch_size")


def test_warming_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(SMALL_RUN)
    with monkeypatch.context() as patch:
        patch.setattr(LlamaModel, "forward", out_of_memory)
        expect(lambda: warm_up(engine), "running 8 context and 0 generation tokens", "--max_num_tokens")
    engine = build_engine(SMALL_RUN)
    assert isinstance(engine.executor, ModelExecutor)
    monkeypatch.setattr(type(engine.executor._cache), "warm_up", out_of_memory)
    expect(lambda: warm_up(engine), "recording CUDA graphs", "--kv_cache_free_gpu_mem_fraction")


def test_what_is_about_memory() -> None:
    """Among others what a CPU says, cuBLAS, and the end of a capture that failed for it."""
    for error in (
        torch.OutOfMemoryError("any"),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
        RuntimeError("DefaultCPUAllocator: can't allocate"),
    ):
        assert is_out_of_memory(error)
    after = RuntimeError("operation failed due to a previous error during capture")
    assert not is_out_of_memory(after)
    after.__context__ = torch.OutOfMemoryError(TORCH_SAYS)
    assert is_out_of_memory(after)
    assert not is_out_of_memory(ValueError("out of memory"))
    assert not is_out_of_memory(RuntimeError("device lost"))


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="device lost"), needing_memory("working", "rest", CPU):
        raise RuntimeError("device lost")


def test_the_memory_of_this_cpu_is_as_limited_as_any() -> None:
    with (
        pytest.raises(OutOfMemory, match=r"cpu is out of memory while making it: .* more were? asked for"),
        needing_memory("making it", "make less", CPU),
    ):
        torch.zeros(1 << 62, dtype=torch.uint8)
