"""KV cache sizing: cases of our own, TensorRT-LLM's golden cases, and what must hold for any sizes."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.sizing import (
    WindowBlocks,
    blocks_of_memory,
    max_attention_window,
    max_blocks,
    window_shares,
)

LENGTHS = st.integers(1, 500)
SINKS = st.integers(0, 100)
BLOCK_SIZES = st.sampled_from([1, 2, 8, 32, 64])
BEAMS = st.integers(1, 5)
WINDOWS = st.dictionaries(st.integers(1, 10_000), st.integers(1, 1000), min_size=1, max_size=4)


def shares_of_case(arguments: dict[str, Any]) -> dict[str, float]:
    sizes = arguments["cache_size_per_token_per_window"]
    shares = window_shares({int(window): size for window, size in sizes.items()})
    return {str(window): share for window, share in shares.items()}


GOLDEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "max_block_requirements_per_beam": lambda case: max_blocks(
        case["sequence_length"], 0, case["sink_token_length"], case["window_size"], 1, case["tokens_per_block"]
    ),
    "max_block_requirements": lambda case: max_blocks(
        case["input_length"],
        case["output_length"],
        case["sink_token_length"],
        case["window_size"],
        case["beam_width"],
        case["tokens_per_block"],
    ),
    "max_attention_window": lambda case: max_attention_window(
        case["input_length"],
        case["output_length"],
        case["sink_token_length"],
        case["block_capacity"],
        case["beam_width"],
        case["tokens_per_block"],
    ),
    "window_size_to_share": shares_of_case,
}


def test_golden_cases(shared_dir):
    document = json.loads((shared_dir / "golden" / "kvcache.json").read_text(encoding="utf-8"))
    cases = document if isinstance(document, list) else document["cases"]
    cases = [case for case in cases if case["kind"] == "function" and case["input"]["function"] in GOLDEN]
    assert {case["input"]["function"] for case in cases} == set(GOLDEN)
    for case in cases:
        found = GOLDEN[case["input"]["function"]](case["input"])
        assert found == pytest.approx(case["expected"], abs=1e-6), case["name"]


@pytest.mark.parametrize(
    ("length", "sink", "window", "blocks"),
    [
        (1, 0, 100, 1),
        (64, 0, 100, 2),
        (65, 0, 100, 3),
        (1000, 0, 100, 4),
        (1000, 32, 100, 4),
        (65, 33, 1000, 3),  # The 31 empty places behind the sink tokens fit into the third block.
        (66, 33, 1000, 4),
    ],
)
def test_blocks_of_a_beam(length, sink, window, blocks):
    assert max_blocks(length, 0, sink, window, 1, tokens_per_block=32) == blocks


@pytest.mark.parametrize(
    ("prompt", "output", "sink", "window", "beams", "blocks"),
    [
        (1096, 7000, 0, 100_000, 1, 253),
        (64, 32, 0, 1000, 4, 2 + 4 * 1),  # Two blocks of the prompt are shared.
        (65, 31, 0, 1000, 4, 2 + 4 * 1),
        (65, 32, 0, 1000, 4, 2 + 4 * 2),
        (10, 100, 0, 100, 4, 4 * 4),  # A window of output alone.
        (100, 50, 0, 100, 4, 1 + 4 * 3),  # 50 tokens of the prompt are in it: a block, and 18 with the output.
        (100, 50, 31, 1000, 4, 3 + 4 * 2),
    ],
)
def test_blocks_of_a_request(prompt, output, sink, window, beams, blocks):
    assert max_blocks(prompt, output, sink, window, beams, tokens_per_block=32) == blocks


@pytest.mark.parametrize(
    ("prompt", "output", "blocks", "beams", "window"),
    [
        (1000, 10, 100, 1, 1010),  # All of it fits.
        (1000, 10, 4, 1, 10 + 3 * 32),
        (1000, 64, 4, 4, 32),  # The output takes 8 blocks; a block a beam is left.
        (1000, 64, 9, 4, 64 + 32),
        (1000, 64, 3, 4, 0),
    ],
)
def test_longest_window_that_fits(prompt, output, blocks, beams, window):
    assert max_attention_window(prompt, output, 0, blocks, beams, tokens_per_block=32) == window


def test_windows_share_memory_so_that_each_holds_the_same_number_of_sequences():
    assert window_shares({1024: 8, 4096: 2}) == {1024: 0.5, 4096: 0.5}
    assert window_shares({7: 0.5}) == {7: 1.0}


def test_device_memory_is_rounded_up_to_blocks_and_host_memory_down():
    memory = 100 * 33  # 33 tokens
    assert blocks_of_memory(memory, {64: 100}, 32, host_bytes=memory) == {64: WindowBlocks(2, 1)}
    assert blocks_of_memory(memory, {64: 100}, 32, max_tokens=32) == {64: WindowBlocks(1, 0)}
    assert blocks_of_memory(memory - 1, {64: 100}, 32) == {64: WindowBlocks(1, 0)}
    assert blocks_of_memory(99, {64: 100}, 32) == {64: WindowBlocks(0, 0)}


def test_max_tokens_holds_for_each_window():
    assert blocks_of_memory(10**9, {100: 1, 200: 1}, 10, max_tokens=50) == {100: WindowBlocks(5), 200: WindowBlocks(5)}


@given(WINDOWS, st.integers(0, 2**62), BLOCK_SIZES)
def test_windows_stay_within_memory_but_for_the_last_block(sizes, memory, tokens_per_block):
    shares = window_shares(sizes)
    assert sum(shares.values()) == pytest.approx(1)
    blocks = blocks_of_memory(memory, sizes, tokens_per_block, host_bytes=memory)
    assert sum(blocks[window].secondary * tokens_per_block * size for window, size in sizes.items()) <= memory
    more = sum(tokens_per_block * size for size in sizes.values())
    assert sum(blocks[window].primary * tokens_per_block * size for window, size in sizes.items()) <= memory + more
    for window, size in sizes.items():
        tokens = memory * shares[window] / size
        assert blocks[window].primary == pytest.approx(tokens / tokens_per_block, rel=1e-9, abs=1.001)


@given(LENGTHS, LENGTHS, SINKS, LENGTHS, BLOCK_SIZES)
def test_agrees_with_the_estimates_of_an_engine(prompt, output, sink, window, tokens_per_block):
    assume(window > sink)
    attention_window = AttentionWindow(tokens_per_block, window, prompt + output, sink)
    expected = attention_window.blocks_to_completion(prompt, output)
    assert max_blocks(prompt, output, sink, window, 1, tokens_per_block) == expected


@given(LENGTHS, LENGTHS, BEAMS, BLOCK_SIZES)
def test_beams_agree_with_the_geometry_where_all_is_seen(prompt, output, beams, tokens_per_block):
    attention_window = AttentionWindow(tokens_per_block, prompt + output, prompt + output, max_beam_width=beams)
    expected = attention_window.blocks_to_completion(prompt, output, beam_width=beams)
    assert max_blocks(prompt, output, 0, prompt + output, beams, tokens_per_block) == expected


@given(LENGTHS, LENGTHS, st.integers(0, 60), BEAMS, BLOCK_SIZES)
def test_a_request_fits_with_the_reduced_window(prompt, output, blocks, beams, tokens_per_block):
    window = max_attention_window(prompt, output, 0, blocks, beams, tokens_per_block)
    assert window <= prompt + output
    if window:
        assert max_blocks(prompt, output, 0, window, beams, tokens_per_block) <= blocks


@pytest.mark.parametrize("sizes", [{}, {0: 1}, {8: 0}, {8: -1.0}, {8: float("nan")}])
def test_windows_that_are_none_are_refused(sizes):
    with pytest.raises(ValueError, match="window"):
        window_shares(sizes)
    with pytest.raises(ValueError, match="window"):
        blocks_of_memory(1, sizes, 32)


def test_less_than_no_memory_is_refused():
    with pytest.raises(ValueError, match="memory of -1 and 0 bytes"):
        blocks_of_memory(-1, {8: 1}, 32)
