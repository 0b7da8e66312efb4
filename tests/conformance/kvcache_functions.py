"""Replays single functions with their arguments and expected results."""

from collections.abc import Callable, Mapping
from typing import Any

from ifbbench.engine.retention import Retention, RetentionRange
from ifbbench.engine.tokens import block_ranges
from ifbbench.kv.attention_window import AttentionWindow, ceil_div
from ifbbench.kv.sizing import max_attention_window, max_blocks, window_shares
from tests.conformance.outcome import Case, Skip, expect_equal

SHARE_TOLERANCE = 1e-6


def replay(case: Case) -> None:
    """Raise Skip or Mismatch, or return when the case passes."""
    arguments = dict(case["input"])
    name = arguments.pop("function")
    if name not in FUNCTIONS:
        raise Skip(f"function {name}")
    expect_equal(name, FUNCTIONS[name](arguments, case["expected"]), case["expected"])


def _blocks_per_beam(arguments: Mapping[str, Any], expected: Any) -> int:
    length, window = arguments["sequence_length"], arguments["window_size"]
    attention_window = AttentionWindow(arguments["tokens_per_block"], window, length, arguments["sink_token_length"])
    return attention_window.prompt_blocks(length)


def _blocks(arguments: Mapping[str, Any], expected: Any) -> int:
    return max_blocks(
        arguments["input_length"],
        arguments["output_length"],
        arguments["sink_token_length"],
        arguments["window_size"],
        arguments["beam_width"],
        arguments["tokens_per_block"],
    )


def _window(arguments: Mapping[str, Any], expected: Any) -> int:
    return max_attention_window(
        arguments["input_length"],
        arguments["output_length"],
        arguments["sink_token_length"],
        arguments["block_capacity"],
        arguments["beam_width"],
        arguments["tokens_per_block"],
    )


def _shares(arguments: Mapping[str, Any], expected: Mapping[str, float]) -> Mapping[str, float]:
    sizes = {int(window): float(size) for window, size in arguments["cache_size_per_token_per_window"].items()}
    shares = {str(window): share for window, share in window_shares(sizes).items()}
    near = shares.keys() == expected.keys() and all(
        abs(shares[window] - expected[window]) <= SHARE_TOLERANCE for window in expected
    )
    return expected if near else shares


def _chop(arguments: Mapping[str, Any], expected: Any) -> list[list[Any]]:
    values = arguments["values"]
    ranges = block_ranges(arguments["usable_size"], arguments["block_size"], arguments["allow_partial"])
    return [values[start:stop] for start, stop in ranges]


def _retention_per_block(arguments: Mapping[str, Any], expected: Any) -> list[int | None]:
    size = arguments["block_size"]
    retention = _retention(arguments)
    return [retention.of_block(index, size)[0] for index in range(ceil_div(arguments["sequence_length"], size))]


def _retention_validate(arguments: Mapping[str, Any], expected: Any) -> dict[str, bool]:
    return {"error": _retention(arguments).problem() is not None}


def _retention(arguments: Mapping[str, Any]) -> Retention:
    ranges = [RetentionRange(item["start"], item["end"], item["priority"]) for item in arguments["ranges"]]
    return Retention(ranges, arguments["decode_priority"])


FUNCTIONS: dict[str, Callable[[Mapping[str, Any], Any], Any]] = {
    "max_block_requirements_per_beam": _blocks_per_beam,
    "max_block_requirements": _blocks,
    "max_attention_window": _window,
    "window_size_to_share": _shares,
    "chop_into_blocks": _chop,
    "retention_per_block": _retention_per_block,
    "retention_validate": _retention_validate,
}
