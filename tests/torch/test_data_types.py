"""Which device can have which data types. What CUDA says of itself is made up."""

from typing import Any

import pytest
import torch

from ifbbench.build.engine import build_engine
from ifbbench.errors import InputError
from ifbbench.models.config import ModelConfig
from ifbbench.models.layers import LayerKind
from ifbbench.settings.config import RunConfig
from ifbbench.simulated.shard import Shard
from ifbbench.torch import build
from ifbbench.torch.build import check_data_types
from ifbbench.torch.model.linear import Fp8Linear, make_linear
from ifbbench.torch.model.weights import random_weights

TINY = ModelConfig.tiny()
CUDA = torch.device("cuda")


def check(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], settings: dict[str, Any], model: ModelConfig = TINY
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Example")
    check_data_types(RunConfig(**settings), model, CUDA)


@pytest.mark.parametrize("name", ["dtype", "kv_cache_dtype"])
def test_fp8_needs_a_gpu_that_knows_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ((8, 9), (9, 0), (10, 0)):
        check(monkeypatch, capability, {name: "fp8"})
    for capability in ((7, 5), (8, 0), (8, 6)):
        with pytest.raises(InputError) as caught:
            check(monkeypatch, capability, {name: "fp8"})
        found = ".".join(map(str, capability))
        for words in (f"--{name}:", "8.9 or higher", f"NVIDIA Example has {found}", "bf16"):
            assert words in str(caught.value)
        check(monkeypatch, capability, {name: "bf16"})


def test_fp8_needs_sizes_that_matrix_units_take(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = ModelConfig(
        vocab_size=10,
        hidden_size=40,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=10,
        intermediate_size=64,
        max_position_embeddings=8,
    )
    with pytest.raises(InputError, match=r"multiples of 16.* 40, 40, 20, 64"):
        check(monkeypatch, (9, 0), {"dtype": "fp8"}, odd)
    check(monkeypatch, (9, 0), {"dtype": "bf16", "kv_cache_dtype": "fp8"}, odd)


def test_a_cpu_has_fp8_in_its_cache_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_data_types(RunConfig(kv_cache_dtype="fp8"), TINY, torch.device("cpu"))
    with pytest.raises(InputError, match=r"--dtype: fp8 weights need a GPU.* this run is on cpu"):
        build_engine(RunConfig(device="auto", dtype="fp8"))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("fp8", (torch.bfloat16, Fp8Linear)),
        ("bf16", (torch.bfloat16, make_linear)),
        ("float32", (torch.float32, make_linear)),
    ],
)
def test_a_model_is_loaded_in_these_types(dtype: str, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(build, "check_data_types", lambda *arguments: None)
    monkeypatch.setattr(build, "random_weights", lambda *arguments: asked.append(arguments[3:5]))
    monkeypatch.setattr(build, "make_model", lambda config, weights: None)
    build.load_model(RunConfig(device="cpu", dtype=dtype))
    assert asked == [expected]


def test_what_the_weights_are_made_of() -> None:
    weights = random_weights(TINY, 0, torch.device("cpu"), torch.bfloat16, Fp8Linear)
    layer = weights.layers[0]
    products = (layer.query_key_value, layer.attention_output, layer.gate_up, layer.down)
    narrow = sum(product._weight.nbytes for product in products if isinstance(product, Fp8Linear))
    assert narrow == TINY.matrix_parameters(LayerKind())
    in_bf16, in_fp8, in_float32 = (Shard(TINY, dtype, "bf16").parameter_bytes for dtype in ("bf16", "fp8", "float32"))
    assert in_bf16 - in_fp8 == TINY.num_layers * narrow
    assert in_float32 == 4 * TINY.num_parameters
