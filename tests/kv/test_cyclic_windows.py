"""Sequences longer than their attention window overwrite their own oldest blocks, and never the sink."""

import numpy as np
from hypothesis import strategies as st

from ifbbench.engine.request import Request, RequestTable
from ifbbench.engine.tokens import KnownTokens, TokenIds
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.manager import KvCacheManager
from ifbbench.kv.sequence import ReuseRules
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from tests.drawing import holds

SIZE = 4
PROMPT = [1, 2, 3, 4, 5]


def cache_of(window: int, beams: int = 1, sink: int = 0, size: int = SIZE, num_blocks: int = 64) -> KvCacheManager:
    return KvCacheManager(AttentionWindow(size, window, 64, sink, beams), num_blocks, 4, reuse=ReuseRules(True))


def add(cache: KvCacheManager, slot: int, tokens: list[int]) -> int:
    reused = cache.add_sequence(slot, len(tokens), known=KnownTokens(TokenIds(np.array(tokens, np.int32))))
    cache.store_context(slot)
    return reused


def grow(cache: KvCacheManager, slot: int, count: int) -> None:
    for _ in range(count):
        cache.add_tokens(np.array([slot]))
        cache.check_consistency()


def test_a_sequence_never_holds_more_blocks_than_its_window_needs():
    cache = cache_of(window=8)
    cache.add_sequence(0, 5)
    grow(cache, 0, 40)
    assert cache.num_used == 2
    cache.remove_sequence(0)
    assert cache.num_used == 0


def test_a_known_block_is_found_until_it_is_overwritten():
    cache = cache_of(window=8)
    add(cache, 0, PROMPT)
    grow(cache, 0, 3)
    assert add(cache, 1, PROMPT) == 4
    cache.remove_sequence(1)
    grow(cache, 0, 1)
    assert add(cache, 1, PROMPT) == 0


def test_a_sequence_that_overwrites_a_shared_block_takes_another_one():
    cache = cache_of(window=8)
    add(cache, 0, PROMPT)
    assert add(cache, 1, PROMPT) == 4
    shared = cache.sequences[0].beams[0][0]
    grow(cache, 0, 3)
    assert cache.sequences[0].beams[0][0] == shared
    grow(cache, 0, 1)
    assert cache.sequences[0].beams[0][0] != shared
    assert cache.sequences[1].beams[0][0] == shared
    assert int(cache.block_tables[0, 0, 0]) != int(cache.block_tables[1, 0, 0])
    # The block still has its content.
    assert add(cache, 2, PROMPT) == 4


def test_a_block_of_its_own_is_overwritten_and_no_longer_found():
    cache = cache_of(window=8)
    add(cache, 0, PROMPT)
    add(cache, 1, PROMPT)
    shared = cache.sequences[0].beams[0][0]
    grow(cache, 0, 4)
    grow(cache, 1, 4)
    assert cache.sequences[1].beams[0][0] == shared
    assert add(cache, 2, PROMPT) == 0


def test_a_sequence_that_has_wrapped_stores_nothing():
    cache = cache_of(window=8)
    add(cache, 0, PROMPT)
    grow(cache, 0, 4)
    cache.remove_sequence(0, store=9)
    assert add(cache, 1, PROMPT) == 0


def test_a_prompt_that_fills_its_window_neither_finds_nor_stores_anything():
    cache = cache_of(window=8)
    short, long = [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8]
    add(cache, 0, short)
    assert add(cache, 1, long) == 0
    cache.remove_sequence(0)
    cache.remove_sequence(1, store=8)
    assert add(cache, 2, short) == 4


def test_beams_take_private_blocks_when_they_overwrite_shared_ones():
    # Beams have a spare block: 12 cache positions for a window of 8.
    cache = cache_of(window=8, beams=2)
    cache.add_sequence(0, 6, beam_width=2)
    grow(cache, 0, 6)
    first, second = cache.sequences[0].beams
    assert (first[0] == second[0], first[1] == second[1], first[2] == second[2]) == (True, False, False)
    used = cache.num_used
    grow(cache, 0, 1)
    assert first[0] != second[0]
    assert cache.num_used == used + 1
    grow(cache, 0, 40)
    assert cache.num_used == used + 1


def test_beams_keep_sharing_the_sink():
    cache = cache_of(window=16, beams=2, sink=4)
    cache.add_sequence(0, 13, beam_width=2)
    grow(cache, 0, 60)
    first, second = cache.sequences[0].beams
    assert first[0] == second[0]
    assert set(first[1:]).isdisjoint(second[1:])


def test_sink_tokens_that_do_not_fill_a_block_are_kept_with_the_bubble():
    cache = cache_of(window=12, beams=2, sink=2)
    cache.add_sequence(0, 9, beam_width=2)
    assert cache.registered[0] == 11
    grow(cache, 0, 60)
    first, second = cache.sequences[0].beams
    assert first[0] == second[0]
    assert set(first[1:]).isdisjoint(second[1:])


def test_the_last_block_of_a_prompt_that_fills_the_capacity_is_each_beams_own():
    """TensorRT-LLM's sink token test: 579 tokens and a bubble of 60 are the 639 of a window of 515 with beams."""
    cache = KvCacheManager(AttentionWindow(64, 515, 640, 4, 4), 296, 8)
    cache.add_sequence(0, 579, beam_width=4)
    assert cache.free_blocks == 283
    beams = cache.sequences[0].beams
    assert [len({beam[index] for beam in beams}) for index in range(10)] == [1] * 9 + [4]
    # The next token overwrites the first block behind the sink, which was shared.
    grow(cache, 0, 1)
    assert cache.free_blocks == 280
    assert [len({beam[index] for beam in beams}) for index in range(10)] == [1, 4] + [1] * 7 + [4]


@holds(
    100,
    2000,
    size=st.sampled_from([1, 2, 4]),
    window=st.integers(6, 20),
    sink=st.integers(0, 5),
    beams=st.sampled_from([1, 2, 3]),
    prompt_len=st.integers(1, 50),
    new_tokens=st.integers(1, 60),
)
def test_beams_take_exactly_the_blocks_that_they_are_estimated_to_take(
    size, window, sink, beams, prompt_len, new_tokens
):
    # A request of one beam, too, has the spare block of a window with beams.
    cache = KvCacheManager(AttentionWindow(size, window, 64, sink, max(beams, 2)), 200, 1)
    request = Request(0, prompt_len, new_tokens, beam_width=beams)
    active = ActiveRequests(RequestTable(rows=1))
    active.add(request)
    rows = np.array([request.slot])
    at_start, until_end = cache.first_chunk_need(request), cache.blocks_to_completion(request)
    cache.add_request(request)
    assert cache.num_used == at_start
    for _ in range(new_tokens):
        assert cache.num_used + cache.reserved_blocks(rows) == until_end
        used, need = cache.num_used, int(cache.step_needs(rows)[0])
        cache.add_tokens(rows)
        cache.check_consistency()
        assert cache.num_used == used + need
    assert cache.num_used == until_end
    assert cache.reserved_blocks(rows) == 0


@holds(
    40,
    1000,
    size=st.sampled_from([1, 2, 4]),
    window=st.integers(6, 20),
    sink=st.integers(0, 5),
    beams=st.sampled_from([1, 2]),
    data=st.data(),
)
def test_sink_tokens_and_tokens_of_the_window_are_stored_in_every_beam(size, window, sink, beams, data):
    cache = cache_of(window, beams, sink, size)
    attention_window = cache.attention_window
    places_in_all, kept = attention_window.capacity, sink + attention_window.bubble
    prompt_len = data.draw(st.integers(1, 50), "prompt length")
    cache.add_sequence(0, prompt_len, beams)
    memory: dict[tuple[int, int], tuple[int, int]] = {}

    def place_of(beam: int, position: int) -> tuple[int, int]:
        place = position if position < sink else position + attention_window.bubble
        if place >= places_in_all:
            place = kept + (place - kept) % (places_in_all - kept)
        return int(cache.block_tables[0, beam, place // size]), place % size

    def content(beam: int, position: int) -> tuple[int, int]:
        return (position, beam) if position >= prompt_len else (position, 0)

    # The prompt is computed once; the executor copies its part in private blocks to all beams.
    for position in range(prompt_len):
        for beam in range(beams):
            memory[place_of(beam, position)] = content(beam, position)
    for position in range(prompt_len, 60):
        cache.add_tokens(np.array([0]))
        cache.check_consistency()
        for beam in range(beams):
            memory[place_of(beam, position)] = content(beam, position)
        attended = {*range(min(sink, position + 1)), *range(max(position - (window - sink) + 1, 0), position + 1)}
        for beam in range(beams):
            for at in attended:
                assert memory.get(place_of(beam, at)) == content(beam, at), f"position {at} of beam {beam}"
