"""The executor gives the same tokens with kernels as without."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ifbbench.engine.batch import BlockCopy, CopyKind
from ifbbench.engine.sampling_params import OutputOptions, SamplingParams
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.sizing import CacheLayout, WindowLayout
from ifbbench.models.config import YarnRopeScaling
from ifbbench.torch.model.kernel_llama import KernelLlama
from ifbbench.torch.model.linear import FP8, Fp8Linear
from ifbbench.torch.model.llama import LlamaModel
from ifbbench.torch.model.part import ModelPart
from ifbbench.torch.model.weights import random_weights
from tests.torch.driving import CPU, MICRO, Driver, FakeRequest, driver_of, layout_driver, requests_of
from tests.torch.ranks_in_threads import Ranks

LENGTHS = [(9, 4), (20, 3), (1, 3)]


@pytest.fixture(scope="module")
def plain() -> LlamaModel:
    return LlamaModel(MICRO, random_weights(MICRO, 3, CPU, torch.float32))


@pytest.fixture(scope="module")
def with_kernels(device: torch.device) -> KernelLlama:
    return KernelLlama(MICRO, random_weights(MICRO, 3, device, torch.float32))


def outputs_of(driver: Driver, requests: list[FakeRequest], largest_chunk: int | None = 7) -> list[object]:
    """The tokens of each request, or those of its beams."""
    driver.run(requests, largest_chunk)
    return [
        request.outputs or (request.search.tokens.tolist(), request.search.scores.round(3).tolist())
        for request in requests
    ]


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.9, top_k=9, top_p=0.8, seed=5)])
def test_mixed_batches(plain: LlamaModel, with_kernels: KernelLlama, sampling: SamplingParams) -> None:
    outputs = [
        outputs_of(driver_of(model, 3, 8, 40), requests_of(LENGTHS, MICRO.vocab_size, sampling=sampling))
        for model in (plain, with_kernels)
    ]
    assert outputs[0] == outputs[1]
    assert all(outputs[1])


@pytest.mark.parametrize(
    "changes",
    [
        {"query_key_norm": True},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_scaling": YarnRopeScaling(4.0, 64, attention_factor=1.2)},
    ],
    ids=["Qwen 3", "biases", "YaRN"],
)
def test_other_families(changes: dict[str, Any], device: torch.device) -> None:
    config = replace(MICRO, num_layers=2, **changes)
    outputs = []
    for model_class, place in ((LlamaModel, CPU), (KernelLlama, device)):
        weights = random_weights(config, 3, place, torch.float32)
        for layer in weights.layers:  # random ones are all 1
            if layer.query_norm is not None and layer.key_norm is not None:
                layer.query_norm.copy_(torch.linspace(0.5, 3, config.head_dim))
                layer.key_norm.copy_(torch.linspace(2, 0.2, config.head_dim))
        model = model_class(config, weights)
        outputs.append(outputs_of(driver_of(model, 3, 8, 40), requests_of(LENGTHS, MICRO.vocab_size)))
    assert outputs[0] == outputs[1]


def layout_of(
    *, is_contiguous: bool = False, is_cyclic: bool = True, sink: int = 0, beams: int = 1, layers: int = 1
) -> CacheLayout:
    attention_window = AttentionWindow(8, 14, 48, sink=sink, max_beam_width=beams, is_cyclic=is_cyclic)
    num_blocks = 3 * beams * attention_window.max_blocks_per_sequence + 2
    return CacheLayout((WindowLayout(tuple(range(layers)), attention_window, num_blocks),), is_contiguous)


@pytest.mark.parametrize(
    "layout",
    [
        layout_of(layers=2),
        layout_of(layers=2, sink=3),
        layout_of(layers=2, is_cyclic=False),
        layout_of(layers=2, is_cyclic=False, sink=3),
        layout_of(layers=2, is_contiguous=True),
    ],
    ids=["cyclic", "cyclic with sinks", "linear", "linear with sinks", "contiguous"],
)
def test_windows(layout: CacheLayout, device: torch.device) -> None:
    """With two layers, because the keys that the middle of a chunk sees affect keys of the second layer."""
    config = replace(MICRO, num_layers=2)
    outputs = []
    for model_class, place in ((LlamaModel, CPU), (KernelLlama, device)):
        model = model_class(config, random_weights(config, 3, place, torch.float32))
        requests = requests_of([(9, 4), (30, 3)], MICRO.vocab_size)
        outputs.append(outputs_of(layout_driver(model, layout, 2), requests, 11))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    "layout", [layout_of(beams=2), layout_of(beams=2, is_contiguous=True)], ids=["cyclic", "contiguous"]
)
def test_beams(plain: LlamaModel, with_kernels: KernelLlama, layout: CacheLayout) -> None:
    outputs = []
    for model in (plain, with_kernels):
        requests = requests_of([(9, 5), (5, 4)], MICRO.vocab_size, beam_width=2)
        outputs.append(outputs_of(layout_driver(model, layout, 2), requests))
    assert outputs[0] == outputs[1]


def test_padded_prompts(plain: LlamaModel, with_kernels: KernelLlama) -> None:
    outputs = []
    for model in (plain, with_kernels):
        driver = driver_of(model, 3, 8, 40)
        driver.padded = True
        outputs.append(outputs_of(driver, requests_of(LENGTHS, MICRO.vocab_size), largest_chunk=None))
    assert outputs[0] == outputs[1]


def test_numbers_and_copied_blocks(plain: LlamaModel, with_kernels: KernelLlama) -> None:
    """A prompt's first block is copied to the table of another request."""
    log_probs = []
    for model in (plain, with_kernels):
        first, second = requests_of([(12, 2), (12, 2)], MICRO.vocab_size)
        second.prompt = first.prompt.copy()
        first.slot, second.slot = 0, 1
        second.options = OutputOptions(return_log_probs=True)
        driver = driver_of(model, 2, 8, 24)
        driver.step([(first, 12)], [])
        driver.copies = (BlockCopy(CopyKind.DEVICE, int(driver.tables[0, 0, 0]), int(driver.tables[1, 0, 0]), 8),)
        second.computed = 8
        driver.step([(second, 4)], [first])
        driver.step([], [second])
        assert first.outputs[:2] == second.outputs
        log_probs.append(second.numbers.log_probs())
    assert len(log_probs[0]) == 2
    assert np.allclose(log_probs[0], log_probs[1], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_near_the_same_logits(dtype: torch.dtype, device: torch.device) -> None:
    logits = []
    for model_class in (LlamaModel, KernelLlama):
        model = model_class(MICRO, random_weights(MICRO, 3, device, dtype))
        (request,) = requests_of([(20, 2)], MICRO.vocab_size)
        request.options = OutputOptions(return_context_logits=True)
        driver_of(model, 1, 8, 40).run([request], 7)
        assert request.numbers.context_logits is not None
        logits.append(torch.from_numpy(request.numbers.context_logits))
    difference = (logits[0] - logits[1]).norm() / logits[0].norm()
    assert difference < 2e-2


def test_eight_bits_stay_near_the_logits_in_16(device: torch.device) -> None:
    """Of weights, and then of keys and values too, compared with PyTorch's products on a CPU."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("this GPU has no eight-bit floats")
    config = replace(MICRO, intermediate_size=48)
    kernels = KernelLlama(config, random_weights(config, 3, device, torch.bfloat16, Fp8Linear))
    layout = layout_of(is_cyclic=False)
    drivers = [
        driver_of(LlamaModel(config, random_weights(config, 3, CPU, torch.bfloat16)), 1, 8, 40),
        driver_of(kernels, 1, 8, 40),
        layout_driver(kernels, layout, 1, kv_cache_dtype=FP8),
    ]
    logits = []
    for driver in drivers:
        (request,) = requests_of([(14, 2)], MICRO.vocab_size)
        request.options = OutputOptions(return_context_logits=True)
        driver.run([request], 7)
        assert request.numbers.context_logits is not None
        logits.append(torch.from_numpy(request.numbers.context_logits))
    for found in logits[1:]:
        assert 0 < (found - logits[0]).norm() / logits[0].norm() < 0.1


@pytest.mark.parametrize("split", [(2, 1), (1, 2)], ids=str)
def test_parts_of_a_model(device: torch.device, split: tuple[int, int]) -> None:
    """Of two layers, on two ranks."""
    config, lengths = replace(MICRO, num_layers=2), [(9, 2), (3, 2)]

    def outputs(model: LlamaModel) -> list[object]:
        with torch.inference_mode():
            return outputs_of(driver_of(model, 2, 8, 40), requests_of(lengths, MICRO.vocab_size))

    def outputs_of_part(part: ModelPart) -> list[object]:
        return outputs(KernelLlama(part.config, random_weights(config, 3, device, torch.float32, part=part)))

    expected = outputs(LlamaModel(config, random_weights(config, 3, CPU, torch.float32)))
    assert Ranks(*split).run(config, outputs_of_part) == [expected, expected]
