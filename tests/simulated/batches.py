"""Batches by their lengths alone, and cost models by the names of model and device."""

import numpy as np

from ifbbench.engine.batch import Batch
from ifbbench.engine.plan import ContextChunk
from ifbbench.engine.request import Request
from ifbbench.models.named_models import load_model_config
from ifbbench.simulated.cost_model import CostModel
from ifbbench.simulated.hardware import load_hardware
from ifbbench.simulated.shard import Shard


def cost_model(
    model: str,
    hardware: str,
    dtype: str,
    kv_cache_dtype: str | None = None,
    tp_size: int = 1,
    pp_size: int = 1,
    cuda_graphs: bool = True,
) -> CostModel:
    kv_cache_dtype = kv_cache_dtype or ("bf16" if dtype == "int4" else dtype)
    shard = Shard(load_model_config(model), dtype, kv_cache_dtype, tp_size, pp_size)
    return CostModel(shard, load_hardware(hardware), cuda_graphs)


def batch_of(chunks, kv_lengths, beam_width=1, padded=False) -> Batch:
    """Context chunks by start, length and whether they are their prompt's last; generation requests by KV length."""
    context = tuple(
        ContextChunk(Request(index, start + length + (not is_last), 8, index=index), start, length)
        for index, (start, length, is_last) in enumerate(chunks)
    )
    slots = np.arange(len(kv_lengths), dtype=np.int32)
    positions = np.array(kv_lengths, dtype=np.int32) - 1
    tables = np.zeros((len(kv_lengths), beam_width, 1), np.int32)
    return Batch(0, context, slots, positions, tables, beam_width=beam_width, padded=padded)
