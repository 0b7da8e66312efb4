"""Iterations of a plan that is certain to be decided again: how many they are, and the blocks that they take."""

from ifbbench.engine.arrays import Rows
from ifbbench.engine.records import Growth
from ifbbench.engine.request import RequestTable
from ifbbench.kv.attention_window import ceil_div
from ifbbench.schedulers.tensorrt_llm.config import BatchingConfig
from ifbbench.schedulers.vllm.cache import VllmCache


def certain_steps(
    limits: BatchingConfig, table: RequestTable, cache: VllmCache, rows: Rows, computed: Rows, slack: int
) -> int:
    """For how many iterations the generation requests in `rows` run again: up to the one with which the first of them
    ends, and while blocks last.

    computed: [rows], their tokens before the first of these iterations, which has its blocks. slack: blocks that may be
    taken before another limit holds the head of the queue."""
    generated = table.generated[rows]
    # The last iteration to be collected completes a request; others may be scheduled behind it.
    steps = int((table.stop_after[rows] - generated).min()) + limits.max_in_flight - 1
    if limits.is_async:  # a request whose last token is scheduled does not run again
        steps = min(steps, int((table.reserved[rows] - generated).min()))
    steps = max(steps, 1)
    size, free = limits.tokens_per_block, min(cache.pool.num_free, slack)
    if len(rows) * ceil_div(steps, size) <= free:
        return steps
    taken = 0
    for step, indices in _starting(computed, size, steps):
        taken += len(indices)
        if taken > free:
            return step
    return steps


def repeat(
    limits: BatchingConfig, table: RequestTable, cache: VllmCache, rows: Rows, computed: Rows, count: int
) -> Growth:
    """Take the blocks of `count` iterations of `rows`, those of the first one excepted, and hash the blocks that they
    fill, in the order of single iterations. Arguments are as those of `certain_steps`."""
    size = limits.tokens_per_block
    known = 0 if limits.is_async else 1  # whether the token that a step computes is known when it is scheduled
    growing = dict(_starting(computed, size, count))
    filling = dict(_starting(computed + known, size, count)) if limits.reuse.enabled else {}
    more_blocks, more_new = [0] * count, [0] * count
    table.confirmed[rows] += count  # so that their symbolic tokens are made
    before, before_new = cache.pool.num_free, cache.pool.counters.allocated_new
    for step in sorted(growing.keys() | filling.keys()):
        if step in growing:
            cache.grow_each(rows[growing[step]])
        more_blocks[step], more_new[step] = (
            before - cache.pool.num_free,
            cache.pool.counters.allocated_new - before_new,
        )
        for index in filling.get(step, ()):
            row = int(rows[index])
            cache.set_hashes(table.requests[row], int(computed[index]) + step + known)
    for step in range(1, count):
        if step not in growing:
            more_blocks[step], more_new[step] = more_blocks[step - 1], more_new[step - 1]
    table.confirmed[rows] -= count
    cache.filled_tokens += len(rows) * (count - 1)
    return Growth(cache.state(), more_blocks, [step * len(rows) for step in range(count)], more_new)


def _starting(tokens: Rows, size: int, steps: int) -> list[tuple[int, list[int]]]:
    """The steps after the first one, of `steps`, in which sequences of `tokens` tokens begin a block, each with their
    indices."""
    starting: dict[int, list[int]] = {}
    for index, first in enumerate((-tokens % size).tolist()):
        for step in range(first or size, steps, size):
            starting.setdefault(step, []).append(index)
    return sorted(starting.items())
