"""From settings to a loaded model and the size of its KV cache."""

import pytest
import torch

from ifbbench.config import RunConfig
from ifbbench.errors import InputError
from ifbbench.execution import build
from ifbbench.model.config import ModelConfig


def test_cuda_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="--device cpu"):
        build.load_model(RunConfig(device="cuda"))
    assert build.choose_device(RunConfig(device="auto")) == torch.device("cpu")


def test_null_has_no_model() -> None:
    with pytest.raises(InputError, match="null runs no model"):
        build.load_model(RunConfig(device="null"))


def test_kv_memory_follows_the_fraction_of_free_memory_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(kv_cache_free_gpu_mem_fraction=0.5)
    monkeypatch.setattr(build, "available_host_bytes", lambda: 1000)
    assert build.kv_memory(config, torch.device("cpu")) == 500
    monkeypatch.setattr(build, "available_host_bytes", lambda: 10**15)
    assert build.kv_memory(config, torch.device("cpu")) == 2 * 1024**3


def test_this_machine_has_memory() -> None:
    assert build.kv_memory(RunConfig(), torch.device("cpu")) > 1_000_000


def test_executor_from_a_loaded_model() -> None:
    loaded = build.load_model(RunConfig(device="cpu"))
    assert loaded.config == ModelConfig.tiny()
    build.make_executor(loaded, num_slots=2, num_blocks=4, tokens_per_block=16, max_seq_len=64).close()
