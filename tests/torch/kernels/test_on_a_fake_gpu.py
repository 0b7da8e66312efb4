"""All paths of the executor on a fake GPU: no tensor stays on the host, and nothing waits for the GPU."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from ifbbench.engine.batch import BlockCopy, CopyKind
from ifbbench.engine.sampling_params import OutputOptions, SamplingParams
from ifbbench.kv.sizing import CacheLayout
from ifbbench.models.config import ModelConfig
from ifbbench.torch.model.kernel_llama import KernelLlama
from ifbbench.torch.model.layer_weights import LayerWeights
from ifbbench.torch.model.linear import Fp8Linear, MakeProduct, Product, make_linear
from ifbbench.torch.model.weights import ModelWeights
from tests.torch.driving import driver_of, layout_driver, requests_of
from tests.torch.kernels.fake_cuda import CUDA, install
from tests.torch.kernels.test_model_executor import layout_of

HIDDEN, FFN, HEAD = 64, 48, 16
MICRO = ModelConfig(
    vocab_size=64,
    hidden_size=HIDDEN,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=HEAD,
    intermediate_size=FFN,
    max_position_embeddings=256,
)
LENGTHS = [(20, 5), (9, 6), (3, 7)]
SAMPLED = SamplingParams(
    temperature=0.8,
    top_k=3,
    top_p=0.9,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.1,
    min_length=3,
    bad_words=((5,), (6, 7), (6, 7, 8)),
)
EVERYTHING = OutputOptions(return_log_probs=True, return_context_logits=True, return_generation_logits=True)


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the kernels that were started."""
    kernels = install(monkeypatch)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield kernels


def model_of(config: ModelConfig = MICRO, make_product: MakeProduct = make_linear) -> KernelLlama:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=CUDA)

    def product(outputs: int, inputs: int, has_bias: bool = False) -> Product:
        return make_product(empty(outputs, inputs), empty(outputs) if has_bias else None)

    norm = empty(HEAD) if config.query_key_norm else None
    layers = tuple(
        LayerWeights(
            empty(HIDDEN),
            product(2 * HIDDEN, HIDDEN, config.attention_bias),
            product(HIDDEN, HIDDEN),
            empty(HIDDEN),
            product(2 * FFN, HIDDEN),
            product(HIDDEN, FFN),
            norm,
            norm,
        )
        for _ in range(config.num_layers)
    )
    return KernelLlama(config, ModelWeights(empty(64, HIDDEN), layers, empty(HIDDEN), make_linear(empty(64, HIDDEN))))


@pytest.mark.parametrize("options", [OutputOptions(), EVERYTHING], ids=["tokens", "all numbers"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_mixed_batches_and_graphs(sampling: SamplingParams, options: OutputOptions, started: list[str]) -> None:
    driver, requests = driver_of(model_of(), 3, 8, 64), requests_of(LENGTHS, 64, sampling=sampling)
    requests[0].options = options
    driver.run(requests, 7)
    assert all(len(request.outputs) == count for request, (_, count) in zip(requests, LENGTHS, strict=True))
    driver.executor.warm_up(lambda done, total: None)
    assert {"_context_kernel", "_generation_kernel", "_choice_kernel", "_copy_kernel"} <= set(started)
    assert ("_log_probs_kernel" in started) == options.return_log_probs


@pytest.mark.parametrize(
    "config", [replace(MICRO, query_key_norm=True), replace(MICRO, attention_bias=True)], ids=["Qwen 3", "biases"]
)
def test_other_families(config: ModelConfig) -> None:
    driver_of(model_of(config), 3, 8, 64).run(requests_of(LENGTHS, 64), 7)


def test_weights_and_cache_in_eight_bits(started: list[str]) -> None:
    """PyTorch checks the memory layout of factors and scales."""
    layout = layout_of(layers=2, is_cyclic=False)
    driver = layout_driver(model_of(make_product=Fp8Linear), layout, 2, kv_cache_dtype=torch.float8_e4m3fn)
    driver.run(requests_of([(9, 4), (30, 3)], 64), 11)
    assert {"_quantise_kernel", "_context_kernel", "_generation_kernel"} <= set(started)


@pytest.mark.parametrize(
    "layout",
    [
        layout_of(layers=2),
        layout_of(layers=2, sink=3),
        layout_of(layers=2, is_contiguous=True),
    ],
    ids=["cyclic", "sinks", "contiguous"],
)
def test_windows(layout: CacheLayout) -> None:
    layout_driver(model_of(), layout, 2).run(requests_of([(9, 4), (30, 3)], 64), 11)


@pytest.mark.parametrize("is_contiguous", [False, True])
def test_beams(is_contiguous: bool) -> None:
    driver = layout_driver(model_of(), layout_of(beams=2, layers=2, is_contiguous=is_contiguous), 2)
    driver.run(requests_of([(9, 5), (5, 4)], 64, sampling=SAMPLED, beam_width=2), 7)


def test_copies_of_blocks(started: list[str]) -> None:
    driver, (request,) = driver_of(model_of(), 1, 8, 40), requests_of([(12, 2)], 64)
    request.slot = 0
    driver.copies = (BlockCopy(CopyKind.DEVICE, 1, 2, 8), BlockCopy(CopyKind.DEVICE, 2, 3, 8))
    driver.step([(request, 12)], [])
    assert started.count("_copy_kernel") == 4


def test_errors_that_a_fake_gpu_shows() -> None:
    """A value that the host waits for, and an operation on tensors of different devices."""
    with pytest.raises(DataDependentOutputException):
        torch.zeros(3, device=CUDA).sum().item()
    with pytest.raises(RuntimeError, match="device"):
        torch.zeros(3, device=CUDA) + torch.zeros(3)
