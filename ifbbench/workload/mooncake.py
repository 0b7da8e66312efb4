"""The Mooncake traces (FAST'25; github.com/kvcache-ai/Mooncake): JSONL, lengths and which blocks are equal."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ifbbench.workload.columns import Recall
from ifbbench.workload.fields import BadRow, integer, json_object, number
from ifbbench.workload.jsonl import parse_json
from ifbbench.workload.prefix import PREFIX_BLOCK, num_blocks
from ifbbench.workload.prefix_fields import block_ids
from ifbbench.workload.rows import LINE, Row, stored_lines
from ifbbench.workload.stored_rows import StoredRows
from ifbbench.workload.trace import TraceRequest

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
MILLISECONDS = 1_000


class MooncakeFormat:
    """timestamp (ms), input_length, output_length and hash_ids, one for each 512 tokens: equal ids, equal tokens.

    Arrivals count from the first row; a row before it is negative. The trace records no reservation: `max_new_tokens`
    is output_length.
    """

    name = "Mooncake"
    row_name = LINE

    def __init__(self) -> None:
        self._first_ms: float | None = None

    def rows(self, file: BinaryIO) -> Iterator[Row]:
        """Each line that is not blank."""
        return stored_lines(file)

    def request(self, row: Any, index: int) -> TraceRequest:
        """The request of one line; BadRow says what is wrong with it. To be called in the rows' order."""
        record = json_object(parse_json(row))
        timestamp_ms = number(record, "timestamp")
        prompt_len = integer(record, "input_length")
        output_len = integer(record, "output_length")
        hash_ids = block_ids(record, "hash_ids")
        if len(hash_ids) != num_blocks(prompt_len):
            raise BadRow(
                f"field 'hash_ids' has {len(hash_ids)} ids; expected {num_blocks(prompt_len)} for an 'input_length' of "
                f"{prompt_len}, one for each {PREFIX_BLOCK} tokens and one for what is left"
            )
        if self._first_ms is None:
            self._first_ms = timestamp_ms
        return TraceRequest(
            request_id=index,
            arrival_s=(timestamp_ms - self._first_ms) / MILLISECONDS,
            prompt_len=prompt_len,
            max_new_tokens=output_len,
            output_len=output_len,
            prefix_ids=hash_ids,
        )

    def recall(self, file: BinaryIO, path: Path) -> Recall:
        """Reads lines again."""
        return StoredRows(file, partial(self.request, index=0), path)
