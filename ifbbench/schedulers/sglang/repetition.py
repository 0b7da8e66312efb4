"""Decode batches that are certain to be decided again: how many they are, and the pages that they take."""

from itertools import accumulate

import numpy as np

from ifbbench.engine.arrays import Rows
from ifbbench.engine.stretch import Growth
from ifbbench.kv.attention_window import ceil_div
from ifbbench.schedulers.queueing import steps_to_first_end
from ifbbench.schedulers.sglang.state import SglangState


def certain_steps(state: SglangState, rows: Rows) -> int:
    """For how many iterations the generation requests in `rows`, which have their slots for the first one, run again:
    up to the one with which the first of them ends, and while pages are free or evictable."""
    page, room = state.kv_cache.page_size, state.kv_cache.available // state.kv_cache.page_size
    if state.generation.is_active:
        return state.generation.horizon(room)
    steps = steps_to_first_end(state.limits, state.table, rows)
    if len(rows) * ceil_div(steps, page) <= room:
        return steps
    taken = _begun(state, rows, steps)[1:].cumsum()
    return 1 + int(taken.searchsorted(room, side="right"))


def repeat(state: SglangState, rows: Rows, count: int, num_decided: int) -> Growth:
    """Take the pages of `count` iterations of `rows`, all at once: nothing that is evicted for a later one would have
    been used before. num_decided: how many of them the decision has taken pages for, 1 or 0."""
    cache, page, joint = state.kv_cache, state.kv_cache.page_size, state.generation
    more = more_pages(state, rows, count, num_decided)
    if count > num_decided:
        # Each of them makes room for a page of each request.
        before_last = more[count - 2] if count > 1 else 0
        cache.make_room((before_last + len(rows)) * page)
        if joint.is_active:
            cache.reserve(more[-1])
        elif page == 1:
            cache.grow_each(rows, count - num_decided)
        elif more[count - 1]:
            cache.grow_to(rows, state.computed(rows) + count)
    cache.filled_tokens += len(rows) * count
    if joint.is_active:
        joint.advance(count)
    else:
        state.table.generated[rows] += count
    return Growth(cache.state(), more, [step * len(rows) for step in range(count)], more)


def more_pages(state: SglangState, rows: Rows, count: int, num_decided: int) -> list[int]:
    """[count], the pages that `repeat` takes up to each of the iterations."""
    if state.generation.is_active:
        return list(accumulate(state.generation.starting(count)))
    begun = _begun(state, rows, count)
    begun[:num_decided] = 0
    more: list[int] = begun.cumsum().tolist()
    return more


def _begun(state: SglangState, rows: Rows, count: int) -> Rows:
    """[count], how many of the requests begin a page in each iteration. Each begins one in every `page` iterations."""
    page = state.kv_cache.page_size
    if page == 1:
        return np.full(count, len(rows))
    begins = np.bincount(-state.computed(rows) % page, minlength=page)
    begun: Rows = begins[np.arange(count) % page]
    return begun
