"""Directories of LoRA adapters: task ids, and one clear error for each thing that is wrong with them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.models.config import ModelConfig
from ifbbench.models.lora_modules import PageLayout, lora_modules, split
from ifbbench.models.named_models import load_model_config
from ifbbench.torch.model.lora_files import RandomAdapter, check_architecture, find_adapters

TINY = ModelConfig.tiny()
PREFIX = "base_model.model.model.layers"


def save_adapter(
    path: Path, rank: int = 4, changes: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None
) -> Path:
    """An adapter of q_proj in layer 1. changes: to its config. tensors: shapes that replace its own."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"]} | (changes or {})
    (path / "adapter_config.json").write_text(json.dumps(config))
    name = f"{PREFIX}.1.self_attn.q_proj.lora"
    shapes = {f"{name}_A.weight": (rank, 256), f"{name}_B.weight": (256, rank)} if tensors is None else tensors
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, path / "adapter_model.safetensors")
    return path


def test_one_adapter_is_task_0(tmp_path: Path) -> None:
    adapters = find_adapters(str(save_adapter(tmp_path)), TINY, 64)
    assert list(adapters) == [0]
    assert adapters[0].ranks.tolist() == [[0] * 7, [4, 0, 0, 0, 0, 0, 0], [0] * 7, [0] * 7]
    ((layer, module, lora_a, lora_b),) = adapters[0].pairs()
    assert (layer, module, lora_a.shape) == (1, 0, (4, 256))
    assert lora_b.unique().tolist() == [2.0], "alpha / r"


def test_names_that_are_numbers_are_task_ids_and_others_are_numbered(tmp_path: Path) -> None:
    for name in ("7", "30", "2"):
        save_adapter(tmp_path / "numbers" / name)
    assert list(find_adapters(str(tmp_path / "numbers"), TINY, 64)) == [2, 7, 30]
    for name in ("german", "7", "french"):
        save_adapter(tmp_path / "names" / name, rank=len(name))
    found = find_adapters(str(tmp_path / "names"), TINY, 64)
    assert [int(adapter.ranks.max()) for adapter in found.values()] == [1, 6, 6]


def test_arrays_of_tensorrt_llm(tmp_path: Path) -> None:
    weights = np.arange(2 * 4 * 512, dtype=np.float32).reshape(1, 2, -1)
    (tmp_path / "3").mkdir()
    np.save(tmp_path / "3" / "model.lora_weights.npy", weights)
    np.save(tmp_path / "3" / "model.lora_config.npy", np.array([[[1, 0, 4], [4, 2, 3]]], np.int32))
    adapter = find_adapters(str(tmp_path), TINY, 64)[3]
    assert (adapter.ranks[0, 0], adapter.ranks[2, 3], int(adapter.ranks.sum())) == (4, 3, 7)
    (_, _, lora_a, lora_b), (layer, module, *_) = adapter.pairs()
    assert torch.cat([lora_a.flatten(), lora_b.flatten()]).tolist() == weights[0, 0].tolist()
    assert (layer, module) == (2, 3)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999999999999999, 5)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,",
        "{'descr': ('<f4',), 'fortran_order': False, 'shape': (1, 5)}",
    ],
)
def test_headers_of_arrays_that_numpy_cannot_evaluate(header: str, tmp_path: Path) -> None:
    text = header.encode() + b"\n"
    for name in ("weights", "config"):
        (tmp_path / f"model.lora_{name}.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    with pytest.raises(InputError, match=r"model\.lora_weights\.npy cannot be read as an array"):
        find_adapters(str(tmp_path), TINY, 64)


Q = f"{PREFIX}.1.self_attn.q_proj.lora"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another model": (
        {"tensors": {f"{Q}_A.weight": (4, 64), f"{Q}_B.weight": (64, 4)}},
        "q_proj of layer 1 has lora_A of shape [4, 64] and lora_B of shape [64, 4]; the model asks for "
        "[rank, 256] and [256, rank]",
    ),
    "half a pair": ({"tensors": {f"{Q}_A.weight": (4, 256)}}, "lora_B of shape (missing)"),
    "more layers": ({"tensors": {f"{PREFIX}.9.mlp.up_proj.lora_A.weight": (4, 256)}}, "adapts layer 9"),
    "unknown module": (
        {"tensors": {"base_model.model.lm_head.lora_A.weight": (4, 256)}},
        "lm_head.lora_A.weight is not supported; expected lora_A and lora_B of q_proj, k_proj",
    ),
    "no tensors": ({"tensors": {}}, "has no tensors"),
    "rank": ({"rank": 80}, "has rank 80; expected at most 64 (--max_lora_rank)"),
    "DoRA": ({"changes": {"use_dora": True}}, "use_dora is true, which is not supported; expected false"),
    "biases": ({"changes": {"bias": "all"}}, 'bias is "all", which is not supported; expected "none"'),
    "PiSSA": ({"changes": {"init_lora_weights": "pissa"}}, 'init_lora_weights is "pissa"'),
    "other modules": ({"changes": {"modules_to_save": ["lm_head"]}}, "modules_to_save is"),
    "another method": ({"changes": {"peft_type": "IA3"}}, "expected peft_type LORA"),
    "alpha": ({"changes": {"lora_alpha": "large"}}, "lora_alpha is 'large'; expected a finite number"),
}


@pytest.mark.parametrize(("changes", "error"), BAD.values(), ids=BAD.keys())
def test_bad_adapters(changes: dict[str, Any], error: str, tmp_path: Path) -> None:
    save_adapter(tmp_path / "0", **changes)
    with pytest.raises(InputError) as raised:
        find_adapters(str(tmp_path), TINY, 64)
    assert error in str(raised.value)
    assert str(raised.value).startswith("--lora_dir: ")


def test_missing_and_broken_files(tmp_path: Path) -> None:
    for change, error in (
        (lambda path: (path / "adapter_config.json").unlink(), "adapter_config.json is missing"),
        (lambda path: (path / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is missing"),
        (lambda path: (path / "adapter_model.safetensors").write_bytes(b"\x09"), "cannot be read as safetensors"),
        (lambda path: (path / "adapter_config.json").write_text("["), "cannot be read as JSON"),
    ):
        path = save_adapter(tmp_path / "adapter")
        change(path)
        with pytest.raises(InputError, match=error):
            find_adapters(str(path), TINY, 64)
    for path, error in ((tmp_path / "nowhere", "is not a directory"), (tmp_path / "empty", "nor subdirectories")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(InputError, match=error):
            find_adapters(str(path), TINY, 64)


CONTRADICTIONS = {
    "--lora_rank 4": "--lora_rank: is the rank of random adapters",
    "--num_loras 2 --lora_rank 70": "--lora_rank: 70 is above --max_lora_rank 64",
    "--num_loras 2 --lora_rank 64 --lora_num_device_mod_layers 1": "--lora_device_mem_fraction: the device cache has 1",
    "--lora_dir DIR --num_loras 2": "--num_loras: 2 is more than the 1 adapters",
}


@pytest.mark.parametrize(("options", "error"), CONTRADICTIONS.items())
@pytest.mark.parametrize("device", ["cpu", "sim:h100-sxm"])
def test_contradictions_end_with_exit_code_2(options: str, error: str, device: str, tmp_path: Path) -> None:
    words = options.replace("DIR", str(save_adapter(tmp_path / "adapter"))).split()
    command = ["run", "default", "--device", device, "--model", "tiny", "--output", str(tmp_path / "run"), *words]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2, done.output
    assert error in done.stderr
    assert not (tmp_path / "run").exists()


def test_models_without_adapters() -> None:
    for changes in ({"architecture": "gpt2"}, {"num_experts": 8, "experts_per_token": 2}):
        with pytest.raises(InputError, match="adapters are available for models of the Llama family without experts"):
            check_architecture(replace(TINY, **changes))


def test_random_adapters_are_seeded() -> None:
    first, again, other = (RandomAdapter(task, 2, TINY, 5) for task in (1, 1, 2))
    pairs = [next(iter(adapter.pairs())) for adapter in (first, again, other)]
    assert torch.equal(pairs[0][3], pairs[1][3])
    assert not torch.equal(pairs[0][3], pairs[2][3])


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_shares_of_ranks_add_up(world: int) -> None:
    """Column splits side by side, row splits summed, are the whole product; with more ranks than KV heads several have
    the same."""
    generator = torch.Generator().manual_seed(0)
    for index, module in enumerate(lora_modules(TINY)):
        lora_a = torch.randn((3, module.inputs), generator=generator)
        lora_b = torch.randn((module.outputs, 3), generator=generator)
        rows = torch.randn((2, module.inputs), generator=generator)
        whole, local = rows @ lora_a.t() @ lora_b.t(), lora_modules(TINY, world)[index]
        parts = []
        for rank in range(world):
            own_a, own_b = split(TINY, index, lora_a, lora_b, rank, world)
            assert (own_a.shape[1], own_b.shape[0]) == (local.inputs, local.outputs)
            own = rows[:, rank * local.inputs : (rank + 1) * local.inputs] if module.splits_inputs else rows
            parts.append(own @ own_a.t() @ own_b.t())
        if module.splits_inputs:
            joined = torch.stack(parts).sum(0)
        else:
            step = max(1, world // TINY.num_kv_heads) if module.name in ("k_proj", "v_proj") else 1
            joined = torch.cat(parts[::step], dim=1)
        torch.testing.assert_close(joined, whole, atol=1e-3, rtol=1e-4)


def test_pages_are_those_of_tensorrt_llm() -> None:
    """A page holds an adapter of rank 8 of all modules, or the largest pair at the maximum rank; a pair takes whole
    slots of one page. (`PeftCacheManager::getPageManagerConfig`, `LoraCache::determineNumPages`.)"""
    model = load_model_config("llama-3.1-8b")
    layout = PageLayout(lora_modules(model), model.num_layers, 64)
    # Widths of rank 1: q, o 8,192; k, v 5,120; gate, up, down 18,432 values: slots of the smallest.
    assert layout.width == 5120
    assert layout.slots == 32 * 8 * (2 * 2 + 2 * 1 + 3 * 4)
    ranks = np.full((32, 7), 8, np.int32)
    # At rank 64 a layer takes 2 · 103 + 2 · 64 + 3 · 231 slots.
    assert [sum(layout.place(ranks * factor).used) for factor in (1, 8)] == [32 * (2 * 13 + 2 * 8 + 3 * 29), 32 * 1027]
    assert [len(layout.place(ranks * factor).used) for factor in (1, 2, 8)] == [1, 2, 8]
    narrow = PageLayout(lora_modules(TINY), 4, 64)
    place = narrow.place(np.full((4, 7), 64, np.int32))
    assert max(place.used) <= narrow.slots
    assert place.values == 64 * 4 * sum(module.values_of_rank for module in narrow.modules)
