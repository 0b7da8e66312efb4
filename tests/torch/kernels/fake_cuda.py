"""A fake GPU: tensors have shapes, data types and a device, but no values, and kernels do nothing.

It shows errors that do not depend on values: a tensor left on the host, a product of incompatible shapes, a value that
the host waits for, a blocking copy, a grid that exceeds the limits of a GPU.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.engine.batch import BeamCandidates, StepOutputs
from ifbbench.torch import cache_windows, cuda_graphs, logits_processors, model_executor, outputs, packing, sampling
from ifbbench.torch.kernels import rows
from ifbbench.torch.model import kernel_llama, tensors

CUDA = torch.device("cuda", 0)
MAX_ON_SHORT_AXES = 65_535
H100 = SimpleNamespace(multi_processor_count=132)


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let code for CUDA run within a `FakeTensorMode`. Returns a list that receives the names of started kernels."""
    started: list[str] = []

    def start(kernel: Any, *arguments: object, grid: tuple[int, ...], warmup: bool, **options: object) -> None:
        assert all(size > 0 for size in grid), grid
        assert all(size <= MAX_ON_SHORT_AXES for size in grid[1:]), grid
        assert all(argument.device == CUDA for argument in arguments if isinstance(argument, Tensor)), kernel
        started.append(kernel.fn.__name__)

    monkeypatch.setattr(type(rows._copy_kernel), "run", start)
    monkeypatch.setattr(torch, "Event", _Event)
    for name, value in (
        ("get_device_capability", (9, 0)),
        ("get_device_properties", H100),
        ("graph_pool_handle", (0, 0)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(cuda_graphs, "CudaGraphRecorder", lambda: _record)
    monkeypatch.setattr(outputs.OutputsInFlight, "wait", _zeros)
    _replace_functions_that_read_values(monkeypatch)
    return started


class _Event:
    def __init__(self, device: torch.device) -> None:
        assert device == CUDA

    def record(self) -> None:
        pass


def _record(work: Any) -> Any:
    work()
    return work


def _replace_functions_that_read_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cache_windows, logits_processors, model_executor, packing, sampling, kernel_llama):
        monkeypatch.setattr(module, "to_device", _to_device)
    monkeypatch.setattr(cache_windows.CacheWindows, "_tensor", lambda windows, array: _to_device(array, CUDA))
    for module in (cuda_graphs, tensors):
        monkeypatch.setattr(module, "packed_on_host", _packed_on_host)
    monkeypatch.setattr(
        kernel_llama, "addresses", lambda pools, device: torch.empty(len(pools), dtype=torch.int64, device=device)
    )
    monkeypatch.setattr(kernel_llama, "row_bytes", lambda pool: pool.stride(0) * pool.element_size())
    monkeypatch.setattr(Tensor, "data_ptr", lambda tensor: 1 << 40)
    # Unlike other operations, these require a CUDA device in a build of PyTorch without CUDA.
    index, copy = Tensor.__getitem__, Tensor.copy_
    monkeypatch.setattr(
        Tensor, "__getitem__", lambda tensor, key: _part(tensor, key) if _is_cuda(tensor) else index(tensor, key)
    )
    monkeypatch.setattr(
        Tensor,
        "copy_",
        lambda tensor, source, non_blocking=False: (
            _copied(tensor, source, non_blocking) if _is_cuda(tensor) else copy(tensor, source, non_blocking)
        ),
    )


def _is_cuda(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def _to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.empty(array.shape, dtype=getattr(torch, str(array.dtype)), device=device)


def _packed_on_host(arrays: list[NDArray[np.integer]], device: torch.device) -> Tensor:
    return torch.empty(sum(tensors.aligned(len(array)) for array in arrays), dtype=torch.int32)


def _part(tensor: Tensor, key: object) -> Tensor:
    """`tensor[key]` without access to the device: slices, integers, and an index for one dimension."""
    dimension = 0
    for part in key if isinstance(key, tuple) else (key,):
        if isinstance(part, slice):
            first, last, _ = part.indices(tensor.shape[dimension])
            tensor, dimension = tensor.narrow(dimension, first, max(0, last - first)), dimension + 1
        elif isinstance(part, int):
            tensor = tensor.select(dimension, part)
        else:
            assert isinstance(part, Tensor)
            assert part.device == tensor.device, "an index in host memory"
            tensor, dimension = tensor.index_select(dimension, part), dimension + 1
    return tensor


def _copied(tensor: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    assert _is_cuda(source) or non_blocking, "a blocking copy"
    assert torch.broadcast_shapes(tensor.shape, source.shape) == tensor.shape
    return tensor


def _zeros(outputs: outputs.OutputsInFlight) -> StepOutputs:
    """Zeros in the shapes of `outputs`, which are all on the host."""

    def zeros(tensor: Tensor) -> NDArray[Any]:
        assert not _is_cuda(tensor)
        return np.zeros(tensor.shape, str(tensor.dtype).removeprefix("torch."))

    tokens, log_probs, candidates = outputs._tokens, outputs._log_probs, outputs._candidates
    return StepOutputs(
        tokens=None if tokens is None else zeros(tokens),
        candidates=candidates and BeamCandidates(*map(zeros, candidates)),
        log_probs=None if log_probs is None else zeros(log_probs),
        context_logits={index: zeros(part) for index, part in outputs._context_logits.items()},
        generation_logits={index: zeros(part) for index, part in outputs._generation_logits.items()},
    )
