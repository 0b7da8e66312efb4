"""Plain PyTorch versions of the kernels, which define what they compute."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ifbbench.kv.attention_window import AttentionWindow


def keys_seen(first_query: int, last_query: int, window: AttentionWindow, device: torch.device) -> Tensor:
    """Positions that queries at `first_query` to `last_query` see together, int64 [keys], ascending."""
    positions = torch.arange(last_query + 1)
    return positions[torch.from_numpy(window.sees(positions.numpy(), np.int64(first_query)))].to(device)


def is_seen(keys: Tensor, queries: Tensor, window: AttentionWindow) -> Tensor:
    """Whether the query at each position [queries] sees the key at each position [keys]: [queries, keys]."""
    keys, by_query = keys.cpu(), queries.cpu()[:, None]
    return (torch.from_numpy(window.sees(keys.numpy(), by_query.numpy())) & (keys <= by_query)).to(queries.device)


def gather_cached(cache: Tensor, table: Tensor, positions: Tensor, window: AttentionWindow) -> Tensor:
    """Content of the cache [blocks, tokens per block, KV heads, head size] at the `positions` [keys] of the sequence
    with the blocks `table` [blocks of a sequence]: [keys, KV heads, head size]."""
    stored = torch.from_numpy(window.cache_positions(positions.cpu().numpy())).to(positions.device)
    size = cache.shape[1]
    return cache[table[stored // size].long(), stored % size]


def attend_reference(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    """softmax(queries · keysᵀ · scale, where visible) · values, in float32 at least: [queries, heads, head size].

    queries: [queries, heads, head size]. keys, values: [keys, KV heads, head size], of any type. visible: [queries,
    keys]. Query head h uses KV head h // (heads / KV heads).
    """
    wide = torch.promote_types(queries.dtype, torch.float32)
    group = queries.shape[1] // keys.shape[1]
    keys, values = (part.to(wide).repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.to(wide), keys) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(queries.dtype)


def context_attention_reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    tiles: Tensor,
    output: Tensor,
    window: AttentionWindow,
) -> None:
    """`context_attention`, tile by tile."""
    for first_row, num_queries, position, num_cached, table_row in tiles.tolist():
        rows = slice(first_row, first_row + num_queries)
        query_positions = position + torch.arange(num_queries, device=queries.device)
        positions = keys_seen(position, position + num_queries - 1, window, queries.device)
        earlier, own = positions[positions < num_cached], positions[positions >= num_cached]
        own_rows = own - position + first_row
        seen_keys, seen_values = (
            torch.cat([gather_cached(cache, block_tables[table_row], earlier, window).to(part.dtype), part[own_rows]])
            for cache, part in ((key_cache, keys), (value_cache, values))
        )
        visible = is_seen(positions, query_positions, window)
        output[rows] = attend_reference(queries[rows], seen_keys, seen_values, visible, queries.shape[2] ** -0.5)


def generation_attention_reference(
    queries: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    lengths: Tensor,
    output: Tensor,
    window: AttentionWindow,
) -> None:
    """`generation_attention`, sequence by sequence."""
    for sequence, (table_row, length) in enumerate(zip(table_rows.tolist(), lengths.tolist(), strict=True)):
        if length == 0:
            output[sequence] = 0
            continue
        positions = keys_seen(length - 1, length - 1, window, queries.device)
        keys, values = (
            gather_cached(cache, block_tables[table_row], positions, window) for cache in (key_cache, value_cache)
        )
        everything = torch.ones((1, len(positions)), dtype=torch.bool, device=queries.device)
        query = queries[sequence : sequence + 1]
        output[sequence] = attend_reference(query, keys, values, everything, queries.shape[2] ** -0.5)[0]


def rotate_and_write_reference(
    heads: Tensor,
    cosines: Tensor,
    sines: Tensor,
    positions: Tensor,
    cache_rows: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    rotates: bool = True,
) -> None:
    """`rotate_and_write`."""
    num_kv_heads = key_cache.shape[2]
    rotated = heads[:, : heads.shape[1] - num_kv_heads]
    if rotates:
        cosine, sine = (table[positions.long()].unsqueeze(1) for table in (cosines, sines))
        first, second = rotated.float().chunk(2, dim=-1)
        rotated.copy_(torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1))
    stored = cache_rows >= 0
    blocks, positions = cache_rows[stored] // key_cache.shape[1], cache_rows[stored] % key_cache.shape[1]
    limits = torch.finfo(key_cache.dtype)
    for cache, part in ((key_cache, rotated[:, -num_kv_heads:]), (value_cache, heads[:, -num_kv_heads:])):
        chosen = part[stored]
        if cache.dtype.itemsize == 1:
            chosen = chosen.float().clamp(limits.min, limits.max)
        cache[blocks.long(), positions.long()] = chosen.to(cache.dtype)


def copy_rows_reference(sources: Sequence[Tensor], destinations: Sequence[Tensor], moves: Tensor) -> None:
    """`copy_rows_buffered` between the pools themselves."""
    for source, destination in zip(sources, destinations, strict=True):
        pieces = [source[first : first + count].clone() for first, _, count in moves.tolist()]
        for piece, (_, first, count) in zip(pieces, moves.tolist(), strict=True):
            destination[first : first + count] = piece


def add_rms_norm_reference(hidden: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """`add_rms_norm`."""
    values = hidden.float()
    if added is not None:
        values = values + added.float()
        hidden.copy_(values)
    scale = (values.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt()
    return (values * scale * weight.float()).to(hidden.dtype)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """`swiglu`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def choose_tokens_reference(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, uniforms: Tensor
) -> Tensor:
    """`choose_tokens` by sorting, with all sums in float64."""
    size = logits.shape[1]
    wide = logits.float()
    distances = wide.amax(dim=-1, keepdim=True) - wide
    distances = distances / temperatures.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    limits = torch.where(top_k > 0, top_k.long(), size).clamp(max=size).unsqueeze(1)
    ordered = distances.sort(dim=-1).values
    weights = (-ordered.double()).exp()
    weights = weights.masked_fill(torch.arange(size, device=logits.device) >= limits, 0.0)
    before = weights.cumsum(dim=-1) - weights
    is_before = before < top_p.unsqueeze(1) * weights.sum(dim=-1, keepdim=True)
    kept = torch.where(top_p.unsqueeze(1) < 1.0, is_before.sum(dim=-1, keepdim=True).clamp(min=1), size)
    reach = ordered.gather(1, torch.minimum(kept, limits) - 1)
    sums = (-distances.double()).exp().masked_fill(distances > reach, 0.0).cumsum(dim=-1)
    targets = uniforms.unsqueeze(1) * sums[:, -1:]
    sampled = torch.searchsorted(sums, targets, right=True).squeeze(1).clamp(max=size - 1)
    return torch.where(temperatures > 0, sampled, wide.argmax(dim=-1))


def log_probs_reference(logits: Tensor, tokens: Tensor) -> Tensor:
    """`log_probs_of`."""
    return logits.float().log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
