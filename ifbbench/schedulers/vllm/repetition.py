"""Iterations of a plan that is certain to be decided again: the blocks that they take."""

from itertools import accumulate

import numpy as np

from ifbbench.engine.arrays import Rows
from ifbbench.engine.stretch import Growth
from ifbbench.schedulers.vllm.state import VllmState


def repeat(state: VllmState, rows: Rows, count: int) -> Growth:
    """Take the blocks of `count` iterations of `rows`, all generation requests, in the order of single iterations, but
    those that the decision took for the first one."""
    cache, generation = state.kv_cache, state.generation
    if not cache.is_plain:
        return _repeat_with_windows(state, rows, count)
    more_blocks, num_new = list(accumulate(generation.starting(count))), 0
    if cache.pool.has_ids:
        generation.settle()
        computed = state.computed[rows]
        _, indices, begun = _starts(cache.room(rows, computed), count, cache.tokens_per_block)
        if len(indices):
            num_new = cache.grow_each(rows[indices], begun)
    elif more_blocks[-1]:
        _, num_new = cache.pool.take(more_blocks[-1])
    more_new = more_blocks if num_new == more_blocks[-1] else [min(blocks, num_new) for blocks in more_blocks]
    cache.filled_tokens += len(rows) * count
    generation.advance(count)
    return Growth(cache.state(), more_blocks, [step * len(rows) for step in range(count)], more_new)


def _repeat_with_windows(state: VllmState, rows: Rows, count: int) -> Growth:
    """`repeat` where windows release blocks, which have their hashes by then."""
    state.generation.settle()
    cache, table, computed = state.kv_cache, state.table, state.computed[rows]
    size, pool, counters = cache.tokens_per_block, cache.pool, cache.pool.counters
    known = 0 if state.limits.is_async else 1  # tokens of an iteration that are known when it is scheduled
    cache.filled_tokens += len(rows)
    free, filled, taken, new = pool.num_free, cache.filled_positions, counters.allocated_total, counters.allocated_new
    more_blocks, more_tokens, more_taken, more_new = ([0] * count for _ in range(4))
    table.confirmed[rows] += count  # so that their symbolic tokens are made
    for step in range(1, count):
        computed += 1
        processed = computed + known - 1  # of which none is in flight
        is_growing = computed == cache.held[rows] * size
        due = is_growing | cache.leaves(rows, processed)
        cache.follow_windows(rows[due], processed[due], is_growing[due])
        state.set_hashes(rows, computed + known)
        cache.filled_tokens += len(rows)
        more_blocks[step], more_tokens[step] = free - pool.num_free, cache.filled_positions - filled
        more_taken[step], more_new[step] = counters.allocated_total - taken, counters.allocated_new - new
    table.confirmed[rows] -= count
    state.generation.advance(count)
    return Growth(cache.state(), more_blocks, more_tokens, more_new, more_taken=more_taken)


def _starts(room: Rows, count: int, size: int) -> tuple[Rows, Rows, Rows]:
    """The blocks of `size` tokens that requests begin in `count` iterations, in order: [blocks] the iteration of each,
    the index of its request, and how many of these blocks it has begun before. room: see `VllmCache.room`."""
    indices = (room < count).nonzero()[0]
    if not len(indices):
        return indices, indices, indices
    first, begun = room[indices], np.zeros(len(indices), np.int64)
    if count > size:  # further blocks
        times = (count - 1 - first) // size + 1
        begun = np.arange(times.sum()) - np.repeat(times.cumsum() - times, times)
        indices, first = np.repeat(indices, times), np.repeat(first, times)
    steps = first + begun * size
    order = steps.argsort(kind="stable")
    return steps[order], indices[order], begun[order]
