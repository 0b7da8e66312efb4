"""From settings to a loaded model and the size of its KV cache."""

import json
from pathlib import Path

import pytest
import torch

from ifbbench.build.engine import build_engine
from ifbbench.errors import InputError
from ifbbench.models.config import ModelConfig
from ifbbench.models.named_models import SHAPES
from ifbbench.settings.config import RunConfig
from ifbbench.torch import build, device, host
from ifbbench.torch.cache_windows import one_window_layout
from ifbbench.torch.model.llama import ForwardInputs, LlamaModel


def test_cuda_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="--device cpu"):
        build.load_model(RunConfig(device="cuda"))
    assert build.choose_device(RunConfig(device="auto")) == torch.device("cpu")


def test_null_has_no_model() -> None:
    with pytest.raises(InputError, match="null runs no model"):
        build.load_model(RunConfig(device="null"))


def test_weights_larger_than_memory_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "available_host_bytes", lambda: 20_000_000_000)
    with pytest.raises(InputError, match=r"llama-3\.1-8b take 29\.9 GiB in float32, but 18\.6 GiB are"):
        build_engine(RunConfig(device="cpu", model="llama-3.1-8b"))


def test_built_in_shapes_get_random_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {
        "model_type": "qwen3",
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
    }
    (tmp_path / "qwen3-none.json").write_text(json.dumps(shape))
    monkeypatch.setattr("ifbbench.models.named_models.SHAPES", tmp_path)
    loaded = build.load_model(RunConfig(device="cpu", model="qwen3-none"))
    assert loaded.config.query_key_norm


def test_a_config_without_weights_beside_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((SHAPES / "qwen3-0.6b.json").read_bytes())
    for path in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(InputError, match=r"has neither model\.safetensors"):
            build.load_model(RunConfig(device="cpu", model=str(path), dtype="bf16"))


@pytest.fixture(scope="module")
def loaded() -> LlamaModel:
    return build.load_model(RunConfig(device="cpu"))


def test_kv_memory_follows_the_fraction_of_free_memory_up_to_a_limit(
    loaded: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(kv_cache_free_gpu_mem_fraction=0.5)
    monkeypatch.setattr(device, "available_host_bytes", lambda: 1000)
    assert build.kv_memory(config, loaded, loaded.device) == 500
    monkeypatch.setattr(device, "available_host_bytes", lambda: 10**15)
    assert build.kv_memory(config, loaded, loaded.device) == host.MAX_CPU_KV_BYTES


def test_this_machine_has_memory(loaded: LlamaModel) -> None:
    assert build.kv_memory(RunConfig(), loaded, loaded.device) > 1_000_000


def test_what_the_largest_batch_takes_is_no_room_for_a_cache_on_a_gpu(
    loaded: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model runs on the CPU here, and a fake CUDA device reports its memory."""
    rows = []
    forward = LlamaModel.forward

    def spy(self: LlamaModel, inputs: ForwardInputs) -> torch.Tensor:
        rows.append(len(inputs.tokens))
        return forward(self, inputs)

    monkeypatch.setattr(LlamaModel, "forward", spy)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1_000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3_000)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12_000, 80_000))
    config = RunConfig(max_num_tokens=300, kv_cache_free_gpu_mem_fraction=0.5)
    assert build.kv_memory(config, loaded, torch.device("cuda")) == (12_000 - 2_000) // 2
    assert rows == [300]


def test_executor_from_a_loaded_model() -> None:
    loaded = build.load_model(RunConfig(device="cpu"))
    assert loaded.config == ModelConfig.tiny()
    build.make_executor(loaded, 2, 64, layout=one_window_layout(loaded.config, 4, 16)).close()
