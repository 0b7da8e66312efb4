"""The time that the cost model adds for LoRA adapters."""

import json
from pathlib import Path

import numpy as np
import pytest

from ifbbench.build.adapters import lora_config
from ifbbench.build.resolve import resolve_limits
from ifbbench.engine.batch import NO_ADAPTER, AdapterLoad, AdapterUse, Batch
from ifbbench.models.lora_modules import lora_modules
from ifbbench.models.named_models import load_model_config
from ifbbench.replay.run import run_trace, summarise_run
from ifbbench.settings.config import RunConfig
from ifbbench.simulated.cost_model import HOST_LINK_SHARE, CostModel
from ifbbench.simulated.hardware import load_hardware
from ifbbench.simulated.lora_cost import STORAGE_BYTES_PER_S, LoraCost
from ifbbench.simulated.shard import Shard, plan_memory

NO_ROWS = np.zeros(0, np.int32)


def cost_of(rank: int = 16, tp_size: int = 1, device: str = "h100-sxm", num_loras: int = 50) -> LoraCost:
    model, hardware = load_model_config("llama-3.1-8b"), load_hardware(device)
    config = RunConfig(
        device=f"sim:{device}",
        model="llama-3.1-8b",
        num_loras=num_loras,
        lora_rank=rank,
        tp_size=tp_size,
        max_lora_rank=128,
        lora_device_mem_fraction=0.5,
    )
    resolved = resolve_limits(config, 8192, on_cpu=False)
    shard = Shard.of_config(model, resolved)
    lora = lora_config(resolved, model, plan_memory(shard, hardware, resolved).beside_weights, 2)
    return LoraCost(CostModel(shard, hardware), lora)


def test_products_read_each_adapter_once_whatever_shares_it() -> None:
    cost = cost_of()
    one, shared, two = (cost.products_s(tokens) for tokens in ({0: 1}, {0: 30}, {0: 15, 1: 15}))
    assert shared == pytest.approx(one, rel=0.02)
    values = 16 * 32 * sum(module.values_of_rank for module in lora_modules(load_model_config("llama-3.1-8b")))
    hardware = load_hardware("h100-sxm")
    read_s = values * 2 / (hardware.memory_bandwidth * hardware.constants.memory)
    assert two - one == pytest.approx(read_s, rel=0.05)


def test_products_grow_with_rank_and_with_the_tokens_of_prompts() -> None:
    assert cost_of(64).products_s({0: 8}) > 1.2 * cost_of(8).products_s({0: 8})
    cost = cost_of()
    assert cost.products_s({0: 16_000}) > 1.8 * cost.products_s({0: 8_000}) > 10 * cost.products_s({0: 1})
    assert cost_of(tp_size=2).products_s({0: 8_000}) < 0.8 * cost.products_s({0: 8_000})


def test_a_miss_costs_a_copy_over_the_host_link() -> None:
    cost = cost_of()
    size = 2 * 16 * 32 * sum(module.values_of_rank for module in lora_modules(load_model_config("llama-3.1-8b")))
    copy_s = size / (HOST_LINK_SHARE * 6.4e10)
    assert cost.load_s([AdapterLoad(0, (0,))]) == pytest.approx(copy_s)
    from_storage = AdapterLoad(1, (1,), from_host=False)
    assert cost.load_s([AdapterLoad(0, (0,)), from_storage]) == pytest.approx(2 * copy_s + size / STORAGE_BYTES_PER_S)


def test_batches_and_steps_ahead_take_the_same_time() -> None:
    cost = cost_of()
    tasks = np.array([NO_ADAPTER, 3, 3, 4], np.int64)
    batch = Batch(0, (), np.arange(4, dtype=np.int32), NO_ROWS, NO_ROWS.reshape(0, 1, 0), adapters=AdapterUse(tasks))
    assert batch.adapters is not None
    ahead = cost.repeated_ns(batch.adapters, (), (), np.array([5_000_000, 7_000_000]))
    assert [cost.batch_ns(batch, batch.adapters, base) for base in (5_000_000, 7_000_000)] == ahead.tolist()
    without = AdapterUse(np.full(4, NO_ADAPTER, np.int64))
    assert cost.batch_ns(batch._replace(adapters=without), without, 5_000_000) == 5_000_000


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"request_id": i, "arrival_s": 0.0, "prompt_len": 5 + 7 * i % 40, "output_len": 3 + 5 * i % 17}
        for i in range(30)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_a_simulated_run_has_the_schedule_and_the_misses_of_a_real_one(policy: str, trace: Path) -> None:
    """With few pages, so that adapters are evicted and requests wait for pages."""
    settings = RunConfig(
        policy=policy,
        num_loras=7,
        lora_rank=4,
        max_lora_rank=4,
        lora_num_device_mod_layers=200,
        max_batch_size=6,
        enable_chunked_context=True,
        max_num_tokens=64,
        max_seq_len=128,
    )
    real, simulated = (
        summarise_run(str(trace), settings.with_values(device=device, dtype="float32")) for device in ("cpu", "sim:cpu")
    )
    assert real["lora"]["evictions"] > 0
    assert real["bound_by"]["lora_pages"] > 0
    assert real["lora"] == simulated["lora"]
    assert real["schedule_digest"] == simulated["schedule_digest"]


def test_stretches_give_the_same_as_single_iterations(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RunConfig(
        device="sim:h100-sxm", model="llama-3.1-8b", num_loras=7, lora_num_device_mod_layers=4000, max_lora_rank=8
    )
    together = summarise_run(str(trace), settings)
    monkeypatch.setattr("ifbbench.schedulers.tensorrt_llm.repetition.RepeatingScheduler.horizon", lambda *_: 0)
    single = summarise_run(str(trace), settings)
    assert together["lora"]["evictions"] > 0
    assert together == single


def test_adapters_take_memory_from_the_kv_cache() -> None:
    hardware, model = load_hardware("h100-sxm"), load_model_config("llama-3.1-8b")
    plain, with_adapters = (
        plan_memory(Shard.of_config(model, config), hardware, config)
        for config in (
            resolve_limits(RunConfig(device="sim:h100-sxm", model="llama-3.1-8b", num_loras=number), 8192, False)
            for number in (None, 3)
        )
    )
    assert plain.adapters == 0
    assert with_adapters.adapters >= 0.02 * plain.beside_weights
    expected = plain.kv_cache - 0.9 * with_adapters.adapters
    assert with_adapters.kv_cache == pytest.approx(expected, abs=2)


def test_a_run_records_loads(trace: Path, tmp_path: Path) -> None:
    config = RunConfig(device="sim:h100-sxm", model="llama-3.1-8b", num_loras=3, output=str(tmp_path / "run"))
    result = run_trace(str(trace), config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "iterations.jsonl").read_text().splitlines()]
    loads = [task for line in lines for task in line["ifbbench"].get("lora_loads", [])]
    assert loads == [0, 1, 2]
    assert result.summary["lora"]["misses"] == 3
