"""Reading prefix ids, and how much of each block, from a trace row."""

from collections.abc import Mapping
from typing import Any

from ifbbench.workload.fields import BadRow, has, integers
from ifbbench.workload.prefix import MAX_PREFIX_ID, PREFIX_BLOCK, num_blocks

Numbers = tuple[int, ...]


def block_ids(row: Mapping[str, Any], field: str) -> Numbers:
    """`row[field]` as a non-empty list of prefix ids; BadRow if it is none."""
    return integers(row, field, "prefix id", f"an integer from 0 to {MAX_PREFIX_ID}", maximum=MAX_PREFIX_ID)


def prefix_fields(row: Mapping[str, Any], prompt_len: int) -> tuple[Numbers | None, Numbers | None]:
    """`prefix_ids` and `prefix_lens` of a row of ifbbench's format, each None if not given; BadRow says what is wrong.

    `prompt_len` in tokens, as the row has it.
    """
    if not has(row, "prefix_ids"):
        if has(row, "prefix_lens"):
            raise BadRow("field 'prefix_lens' is given without 'prefix_ids'; expected both or neither")
        return None, None
    if has(row, "prompt_tokens"):
        raise BadRow("field 'prefix_ids' is given beside 'prompt_tokens'; expected one of the two")
    ids = block_ids(row, "prefix_ids")
    if has(row, "prefix_lens"):
        return ids, _lens(row, len(ids), prompt_len)
    if len(ids) > num_blocks(prompt_len):
        raise BadRow(
            f"field 'prefix_ids' has {len(ids)} ids; expected at most {num_blocks(prompt_len)} for a prompt of "
            f"{prompt_len} tokens, one for each {PREFIX_BLOCK} and one for what is left"
        )
    return ids, None


def _lens(row: Mapping[str, Any], num_ids: int, prompt_len: int) -> Numbers:
    lens = integers(row, "prefix_lens", "number of tokens", f"an integer from 1 to {PREFIX_BLOCK}", 1, PREFIX_BLOCK)
    if len(lens) != num_ids:
        raise BadRow(f"field 'prefix_lens' has {len(lens)} numbers; expected {num_ids}, one for each of 'prefix_ids'")
    if sum(lens) > prompt_len:
        raise BadRow(f"field 'prefix_lens' adds up to {sum(lens)}; expected at most the prompt's {prompt_len} tokens")
    return lens
