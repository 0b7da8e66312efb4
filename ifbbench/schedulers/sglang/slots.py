"""Slots for the next tokens of decode batches (`check_decode_mem` and `alloc_for_decode` of SGLang 0.5.23)."""

from ifbbench.engine.arrays import Rows
from ifbbench.schedulers.sglang.state import SglangState


def has_room(state: SglangState, rows: Rows) -> bool:
    """Whether the next decode step of these requests has room. What no request uses is evicted for it."""
    cache = state.kv_cache
    if state.limits.drafts.max_len:
        return cache.make_room(int((_with_drafts(state, rows) - cache.held[rows]).sum()) * cache.page_size)
    joint = state.generation
    beginning = joint.num_growing if joint.is_active else len(_beginning(state, rows))
    return cache.make_room(beginning * cache.page_size)


def take_slots(state: SglangState, rows: Rows) -> None:
    """Take pages for the next tokens of these requests, and for their drafts."""
    cache = state.kv_cache
    if state.limits.drafts.max_len:
        if has_room(state, rows):
            cache.grow_to(rows, _with_drafts(state, rows) * cache.page_size)
        return
    if cache.page_size > 1:  # SGLang counts a page for each request
        cache.make_room(len(rows) * cache.page_size)
    if state.generation.is_active:
        count = state.generation.num_growing
        cache.make_room(count * cache.page_size)
        cache.reserve(count)
        state.generation.take()
        return
    if len(beginning := _beginning(state, rows)):
        cache.make_room(len(beginning) * cache.page_size)
        cache.grow_each(beginning)


def _beginning(state: SglangState, rows: Rows) -> Rows:
    """The part of `rows` whose next tokens begin a page."""
    page = state.kv_cache.page_size
    if page == 1:
        return rows
    beginning: Rows = rows[state.computed(rows) % page == 0]
    return beginning


def _with_drafts(state: SglangState, rows: Rows) -> Rows:
    """[rows], pages that each of them holds with its next token and its drafts. What was taken for drafts that were
    rejected stays."""
    cache = state.kv_cache
    tokens = state.computed(rows) + 1 + state.limits.drafts.max_len
    pages: Rows = (-(-tokens // cache.page_size)).clip(min=cache.held[rows])
    return pages
