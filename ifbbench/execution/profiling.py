"""How much memory a batch takes beside the weights and the KV cache: found by running the largest one."""

import numpy as np
import torch

from ifbbench.engine.batch import Batch, ContextChunk
from ifbbench.engine.kv_cache.attention_window import ceil_div
from ifbbench.engine.request import Request
from ifbbench.engine.request_table import RequestTable
from ifbbench.execution.model_executor import ModelExecutor
from ifbbench.model.llama import LlamaModel

NO_ROWS = np.zeros(0, np.int32)


def activation_bytes(model: LlamaModel, num_tokens: int, tokens_per_block: int) -> int:
    """Bytes of CUDA memory that a prompt of `num_tokens` tokens takes at its peak, the cache that it fills left out.

    What is freed afterwards stays with PyTorch's allocator, so it is given back here: it counts as free again."""
    device = model.device
    num_blocks = ceil_div(num_tokens, tokens_per_block)
    executor = ModelExecutor(model, 1, num_blocks, tokens_per_block)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    executor.submit(_prompt(num_tokens, num_blocks))
    executor.collect()
    peak = torch.cuda.max_memory_allocated(device) - before
    executor.close()
    del executor
    torch.cuda.empty_cache()
    return max(0, peak)


def _prompt(num_tokens: int, num_blocks: int) -> Batch:
    request = Request(0, num_tokens, 1, prompt_tokens=np.zeros(num_tokens, np.int32))
    request.enter(RequestTable(1), 0)
    tables = np.arange(num_blocks, dtype=np.int32).reshape(1, 1, num_blocks)
    return Batch(0, (ContextChunk(request, 0, num_tokens),), NO_ROWS, NO_ROWS, tables)
