"""Products in eight-bit floats against float64, and a model of such products."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from ifbbench.models.config import ModelConfig
from ifbbench.torch.build import make_model
from ifbbench.torch.model.linear import Fp8Linear, MakeProduct, make_linear
from ifbbench.torch.model.llama import LlamaModel
from ifbbench.torch.model.weights import random_weights
from tests.torch.driving import CPU, driver_of
from tests.torch.test_attention_windows import asking_requests

SMALL = ModelConfig(
    vocab_size=211,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    max_position_embeddings=128,
)
# Three bits of mantissa give a relative error of up to 1/16, and of 1/40 in the mean square. A product of two such
# values, and a sum of many products, has √2 of that in the mean square.
PRODUCT_ERROR = 0.05
# The errors of three layers add up.
LOGITS_ERROR = 0.1


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def relative_norm(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 96), (3, 48, 32), (40, 256, 688)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_near_the_exact_one(rows: int, inputs: int, outputs: int, has_bias: bool) -> None:
    """Also if outputs and tokens have very different magnitudes, because each has its own scale."""
    output_sizes, row_sizes = (torch.logspace(-2, 2, count).bfloat16().unsqueeze(1) for count in (outputs, rows))
    weight, values = drawn(outputs, inputs, seed=1) * output_sizes, drawn(rows, inputs, seed=2) * row_sizes
    bias = drawn(outputs, seed=3) * output_sizes[:, 0] if has_bias else None
    product = Fp8Linear(weight, bias)(values)
    assert (product.dtype, product.shape) == (torch.bfloat16, (rows, outputs))
    exact = values.double() @ weight.double().t() + (0 if bias is None else bias.double())
    sizes = row_sizes.double() * output_sizes.double().t()
    assert relative_norm(product / sizes, exact / sizes) < PRODUCT_ERROR


def test_the_product_of_a_token_does_not_depend_on_other_tokens() -> None:
    linear, values = Fp8Linear(drawn(32, 48, seed=1)), drawn(5, 48, seed=2)
    louder = values.clone()
    louder[1:] *= 1000
    assert torch.equal(linear(values)[0], linear(louder)[0])


def test_scales_are_applied_after_the_product_if_no_kernel_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Hopper, where cuBLAS refuses few rows with many inputs; each number of rows is tried once."""
    multiply, refused = torch._scaled_mm, list[int]()

    def scaled_mm(rows: Tensor, weight: Tensor, *, scale_a: Tensor, scale_b: Tensor, **options: Any) -> Tensor:
        if scale_b.numel() > 1 and len(rows) < 5:
            refused.append(len(rows))
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic(")
        return multiply(rows, weight, scale_a=scale_a, scale_b=scale_b, **options)

    linear, values = Fp8Linear(drawn(32, 48, seed=1), drawn(32, seed=3)), drawn(6, 48, seed=2)
    expected = linear(values)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    for count in (6, 2, 4, 2, 4):
        found = linear(values[:count])
        assert found.dtype == torch.bfloat16
        assert relative_norm(found, expected[:count]) < 0.005
    assert refused == [2, 4]


def test_other_errors_of_a_product_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled_mm(*_: Tensor, **__: Any) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        Fp8Linear(drawn(32, 48))(drawn(2, 48))


def test_no_tokens() -> None:
    assert Fp8Linear(drawn(32, 48))(drawn(0, 48)).shape == (0, 32)


def context_logits(config: ModelConfig, make_product: MakeProduct, dtype: torch.dtype) -> Tensor:
    model = make_model(config, random_weights(config, 3, CPU, dtype, make_product))
    assert isinstance(model, LlamaModel)
    requests = asking_requests([(37, 4), (50, 3)])
    driver_of(model, 3, 8, 80).run(requests, largest_chunk=9)
    return torch.cat([torch.from_numpy(request.numbers.context_logits) for request in requests])


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        dataclasses.replace(SMALL, attention_bias=True, query_key_norm=True),
        dataclasses.replace(
            SMALL,
            architecture="gpt2",
            num_kv_heads=4,
            attention_bias=True,
            attention_output_bias=True,
            mlp_bias=True,
            activation="gelu_new",
        ),
    ],
    ids=["llama", "biases and normalised heads", "gpt2"],
)
def test_logits_of_a_model_are_close_to_those_in_bfloat16(config: ModelConfig) -> None:
    exact = context_logits(config, make_linear, torch.float32)
    in_bf16 = context_logits(config, make_linear, torch.bfloat16)
    in_fp8 = context_logits(config, Fp8Linear, torch.bfloat16)
    assert relative_norm(in_bf16, exact) < relative_norm(in_fp8, exact) < LOGITS_ERROR
    assert relative_norm(in_fp8, in_bf16) < LOGITS_ERROR


def test_embeddings_norms_and_output_layer_stay_in_16_bits() -> None:
    weights = random_weights(SMALL, 3, CPU, torch.bfloat16, Fp8Linear)
    assert weights.embedding.dtype == weights.final_norm.dtype == torch.bfloat16
    assert not isinstance(weights.lm_head, Fp8Linear)
    layer = weights.layers[0]
    for product in (layer.query_key_value, layer.attention_output, layer.gate_up, layer.down):
        assert isinstance(product, Fp8Linear)
