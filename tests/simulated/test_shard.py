"""How the memory of a simulated device is divided, and models that do not fit."""

import json

import pytest

from ifbbench.errors import InputError
from ifbbench.models.named_models import load_model_config
from ifbbench.settings.config import RunConfig
from ifbbench.simulated.hardware import load_hardware
from ifbbench.simulated.shard import Shard, kv_memory_bytes, plan_memory


def _plan(model="llama-3.1-8b", hardware="h100-sxm", dtype="fp8", fraction=0.9, **options):
    shard = Shard(load_model_config(model), dtype, "fp8" if dtype == "fp8" else "bf16", **options)
    return plan_memory(shard, load_hardware(hardware), _config(kv_cache_free_gpu_mem_fraction=fraction))


def _config(**values) -> RunConfig:
    return RunConfig(**{"dtype": "bf16", "max_batch_size": 2048, **values})


def test_weights_in_16_bits_take_two_bytes_a_parameter():
    for name in ("llama-3.1-8b", "qwen3-0.6b", "qwen2.5-7b"):
        assert _plan(name, dtype="bf16").weights == 2 * load_model_config(name).num_parameters


def test_gpt2_has_no_gate(tmp_path):
    values = {
        "model_type": "gpt2",
        "vocab_size": 50_257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    gpt2 = load_model_config(tmp_path)

    assert gpt2.num_parameters == 124_439_808
    assert _plan(tmp_path, dtype="bf16").weights == 2 * gpt2.num_parameters


def test_quantised_weights_leave_embeddings_and_output_layer_in_16_bits():
    tables = 2 * 128_256 * 4096
    layers = load_model_config("llama-3.1-8b").num_parameters - tables

    assert _plan(dtype="fp8").weights == pytest.approx(layers + 2 * tables, rel=1e-3)
    assert _plan(dtype="int4").weights == pytest.approx(layers * (0.5 + 2 / 128) + 2 * tables, rel=1e-3)


def test_devices_share_the_weights():
    whole = _plan(model="llama-3.3-70b", hardware="h200-sxm").weights

    assert _plan(model="llama-3.3-70b", tp_size=4).weights == pytest.approx(whole / 4, rel=0.01)
    assert _plan(model="llama-3.3-70b", pp_size=4).weights == pytest.approx(whole / 4, rel=0.07)


def test_the_cache_gets_its_fraction_of_what_is_left():
    plan = _plan(fraction=0.5)
    assert plan.kv_cache == int(0.5 * (plan.total - plan.runtime - plan.weights - plan.activations))


def test_more_tokens_and_requests_an_iteration_leave_less():
    model, hardware = load_model_config("llama-3.1-8b"), load_hardware("h100-sxm")
    sizes = [
        kv_memory_bytes(model, hardware, _config(**values))
        for values in ({}, {"max_num_tokens": 65_536}, {"max_batch_size": 65_536})
    ]
    assert sizes[0] > max(sizes[1:])


def test_each_key_counts_once_over_all_devices():
    """Eight devices have eight times the cache; with sixteen, two of them keep the same key heads."""
    model, hardware = load_model_config("llama-3.3-70b"), load_hardware("b200")
    plans = {size: _plan("llama-3.3-70b", "b200", "bf16", tp_size=size).kv_cache for size in (8, 16)}

    for size in plans:
        assert kv_memory_bytes(model, hardware, _config(tp_size=size)) == pytest.approx(8 * plans[size], rel=1e-9)


def test_the_published_pool_of_an_h100_is_met():
    """Llama-3.1-8B in fp8 leaves about 1 million tokens on 80 GB."""
    size = kv_memory_bytes(load_model_config("llama-3.1-8b"), load_hardware("h100-sxm"), _config(dtype="fp8"))
    assert 0.95e6 < size / 65_536 < 1.05e6


def test_a_model_that_does_not_fit_is_refused_with_its_size():
    with pytest.raises(InputError, match=r"h100-sxm has 79\.1 GiB, .* 131 GiB for weights in bf16.*--tp_size"):
        kv_memory_bytes(load_model_config("llama-3.3-70b"), load_hardware("h100-sxm"), _config())
