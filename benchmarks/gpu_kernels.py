"""How near the attention kernels come to what a GPU can do.

`python -m benchmarks.gpu_kernels` prints one JSON object: the machine and its copy bandwidth; what share of that
attention of generation tokens reaches, among others in a batch of 64 with 4,096 tokens each; and how fast attention of
an 8,192-token prompt is beside PyTorch's fused one. All with 32 heads on 8 KV heads of 128, in bfloat16. Some rows of
each result are compared with attention in float32: `relative_difference` is 0.01 at most if the kernel is right.
"""

import json
import sys
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.rundir.run_directory import hardware, versions

HEADS, KV_HEADS, HEAD_SIZE, TOKENS_PER_BLOCK = 32, 8, 128, 32
NO_WINDOW = AttentionWindow(TOKENS_PER_BLOCK)
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
GENERATION = ((64, 4096), (256, 1024), (8, 4096), (1, 32_768))
PROMPT = 8192
COPIED_BYTES = 2**31
REPEATS = 30
TFLOP = 1e12
GIGABYTE = 1e9
# Read between repeats: more than any cache holds, so that no repeat finds its keys there, and for longer than the host
# takes to launch what is timed. Not written, for what is timed would then have to write the cache back.
READ_BETWEEN_BYTES = 2**30
# Rows of a result that are compared with a reference.
COMPARED = 16


def seconds(work: Callable[[], object]) -> float:
    """The median time on the GPU, after warming up, with nothing in its caches."""
    other = torch.zeros(READ_BETWEEN_BYTES // 4, device=DEVICE)
    times = []
    for repeat in range(REPEATS + 3):
        other.sum()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end) / 1e3)
    return median(times)


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy within the GPU's memory."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=DEVICE).random_()
    destination = torch.empty_like(source)
    return 2 * COPIED_BYTES / seconds(lambda: destination.copy_(source))


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def relative_difference(output: Tensor, queries: Tensor, keys: Tensor, values: Tensor, first_position: int) -> float:
    """Of `output`, attention of queries at `first_position` and behind over all keys before them, in relative norm."""
    from tests.torch.kernels.references import attend_reference

    positions = torch.arange(len(keys), device=DEVICE)
    visible = positions <= first_position + torch.arange(len(queries), device=DEVICE)[:, None]
    expected = attend_reference(queries.float(), keys, values, visible, HEAD_SIZE**-0.5)
    return round(((output.float() - expected).norm() / expected.norm()).item(), 5)


def generation(batch: int, length: int, bandwidth: float) -> dict[str, object]:
    """Attention of one token for each of `batch` sequences, whose blocks lie in random order."""
    from ifbbench.torch.kernels.generation_attention import generation_attention
    from ifbbench.torch.kernels.launch import choose_num_splits, generation_tiles, multiprocessors

    blocks = batch * length // TOKENS_PER_BLOCK
    keys, values = (drawn(blocks, TOKENS_PER_BLOCK, KV_HEADS, HEAD_SIZE) for _ in range(2))
    tables = torch.randperm(blocks, device=DEVICE).int().view(batch, -1)
    queries, output = drawn(batch, HEADS, HEAD_SIZE), drawn(batch, HEADS, HEAD_SIZE)
    rows = torch.arange(batch, device=DEVICE, dtype=torch.int32)
    lengths = torch.full_like(rows, length)
    shape = generation_tiles(HEAD_SIZE, HEADS // KV_HEADS, DTYPE.itemsize)
    splits = choose_num_splits(KV_HEADS, length, batch * length, multiprocessors(queries.device))
    took = seconds(
        lambda: generation_attention(queries, keys, values, tables, rows, lengths, output, shape, splits, NO_WINDOW)
    )
    moved = 2 * keys.numel() * DTYPE.itemsize
    last_keys, last_values = (cache[tables[-1].long()].flatten(0, 1) for cache in (keys, values))
    return {
        "batch": batch,
        "tokens_each": length,
        "splits": splits,
        "microseconds": round(took * 1e6, 1),
        "gigabytes_per_s": round(moved / took / GIGABYTE),
        "share_of_copy_bandwidth": round(moved / took / bandwidth, 3),
        "relative_difference": relative_difference(output[-1:], queries[-1:], last_keys, last_values, length - 1),
    }


def context(chunk: int, cached: int) -> dict[str, object]:
    """Attention of a chunk behind `cached` tokens, and PyTorch's of a whole prompt where nothing is cached."""
    from ifbbench.torch.kernels.context_attention import context_attention
    from ifbbench.torch.kernels.launch import context_tiles
    from ifbbench.torch.model.attention_plan import QuerySpans
    from ifbbench.torch.model.kernel_llama import plan_tiles

    fused = drawn(chunk, HEADS + 2 * KV_HEADS, HEAD_SIZE)
    queries, keys, values = fused.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    blocks = max(1, cached // TOKENS_PER_BLOCK)
    key_cache, value_cache = (drawn(blocks, TOKENS_PER_BLOCK, KV_HEADS, HEAD_SIZE) for _ in range(2))
    tables = torch.randperm(blocks, device=DEVICE).int().view(1, -1)
    shape = context_tiles(HEAD_SIZE, DTYPE.itemsize, torch.cuda.get_device_capability())
    zero = np.zeros(1, np.int64)
    planned = plan_tiles(QuerySpans(zero, zero + chunk, zero + cached, zero), shape.rows // (HEADS // KV_HEADS))
    tiles = torch.from_numpy(planned).to(DEVICE)
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    took = seconds(
        lambda: context_attention(
            queries, keys, values, key_cache, value_cache, tables, tiles, output, shape, NO_WINDOW
        )
    )
    pairs = chunk * cached + chunk * (chunk + 1) / 2
    cached_keys, cached_values = (cache[tables[0].long()].flatten(0, 1)[:cached] for cache in (key_cache, value_cache))
    seen = torch.cat([cached_keys, keys]), torch.cat([cached_values, values])
    first = max(0, chunk - COMPARED)
    row: dict[str, object] = {
        "chunk": chunk,
        "cached": cached,
        "milliseconds": round(took * 1e3, 3),
        "tflop_per_s": round(4 * pairs * HEADS * HEAD_SIZE / took / TFLOP, 1),
        "relative_difference": relative_difference(output[first:], queries[first:], *seen, cached + first),
    }
    if not cached:
        q, k, v = (part.transpose(0, 1).unsqueeze(0).contiguous() for part in (queries, keys, values))
        torch_took = seconds(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        row |= {"torch_milliseconds": round(torch_took * 1e3, 3), "share_of_torch_speed": round(torch_took / took, 3)}
    return row


def generation_figures() -> dict[str, object]:
    """All figures of attention of generation tokens."""
    bandwidth = copy_bandwidth()
    return {
        "repeats": REPEATS,
        "copy_gigabytes_per_s": round(bandwidth / GIGABYTE),
        "rows": [generation(batch, length, bandwidth) for batch, length in GENERATION],
    }


def context_figures() -> dict[str, object]:
    """All figures of attention of prompts."""
    return {"repeats": REPEATS, "rows": [context(PROMPT, 0), context(PROMPT // 4, PROMPT * 3 // 4)]}


def main() -> None:
    """Measure, and print the result as JSON."""
    if not torch.cuda.is_available():
        sys.exit("This measures a GPU, and PyTorch finds none here. Run it on a machine with one.")
    result = {
        "benchmark": "attention kernels against what the GPU can do",
        "gpu": torch.cuda.get_device_name(),
        "hardware": hardware(),
        "versions": versions(),
        "generation": generation_figures(),
        "context": context_figures(),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
