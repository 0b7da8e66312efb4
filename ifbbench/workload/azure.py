"""The Azure LLM inference traces of 2023 and 2024 (github.com/Azure/AzurePublicDataset): CSV, lengths only."""

import csv
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from ifbbench.workload.columns import NOTHING_MORE, Recall, nothing_to_recall
from ifbbench.workload.fields import BadRow, integer_text, present
from ifbbench.workload.rows import LINE, Row, text_lines
from ifbbench.workload.trace import TraceRequest

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
NANOSECONDS = 1_000_000_000
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class AzureFormat:
    """TIMESTAMP, ContextTokens, GeneratedTokens. Arrivals count from the first row; a row before it is negative.

    The trace records no reservation: `max_new_tokens` is GeneratedTokens.
    """

    name = "Azure LLM inference"
    row_name = LINE

    def __init__(self) -> None:
        self._first_ns: int | None = None

    def rows(self, file: BinaryIO) -> Iterator[Row]:
        """Each row that is not empty, by column name."""
        reader = csv.reader(text_lines(file))
        header = next(reader, [])
        for row in reader:
            if row:
                yield reader.line_num, NOTHING_MORE, dict(zip(header, row, strict=False))

    def request(self, row: Any, index: int) -> TraceRequest:
        """The request of one row; BadRow says what is wrong with it. To be called in the rows' order."""
        timestamp_ns = parse_timestamp(present(row, "TIMESTAMP"))
        prompt_len = integer_text(row, "ContextTokens")
        output_len = integer_text(row, "GeneratedTokens")
        if self._first_ns is None:
            self._first_ns = timestamp_ns
        return TraceRequest(
            request_id=index,
            arrival_s=(timestamp_ns - self._first_ns) / NANOSECONDS,
            prompt_len=prompt_len,
            max_new_tokens=output_len,
            output_len=output_len,
        )

    def recall(self, file: BinaryIO, path: Path) -> Recall:
        """Rows are lengths and nothing more."""
        file.close()
        return nothing_to_recall


def parse_timestamp(text: str) -> int:
    """Nanoseconds since 1970 of `2023-11-16 18:15:46.6805900` or `2024-05-10 00:00:00.009930+00:00`; UTC if no zone."""
    match = _TIMESTAMP.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError(text)
        whole, fraction, zone = match.groups()
        return _whole_seconds(whole + (zone or "Z")) * NANOSECONDS + int((fraction or "").ljust(9, "0"))
    except ValueError:
        raise BadRow(f"field 'TIMESTAMP' is {text!r}; expected a time such as 2023-11-16 18:15:46.6805900") from None


# Rows come in order of time, several in most seconds.
@lru_cache(maxsize=1)
def _whole_seconds(text: str) -> int:
    """Seconds since 1970, of a time with its zone."""
    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(seconds=1)
