"""The Azure LLM inference traces of 2023 and 2024 (github.com/Azure/AzurePublicDataset): CSV, lengths only."""

import csv
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, TextIO

from ifbbench.workload.fields import BadRow, integer_text, present
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

    def __init__(self) -> None:
        self._first_ns: int | None = None

    def rows(self, file: TextIO) -> Iterator[tuple[str, Any]]:
        """Each row by column name, with its line."""
        reader = csv.DictReader(file)
        for row in reader:
            yield f"line {reader.line_num}", row

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


def parse_timestamp(text: str) -> int:
    """Nanoseconds since 1970 of `2023-11-16 18:15:46.6805900` or `2024-05-10 00:00:00.009930+00:00`; UTC if no zone."""
    match = _TIMESTAMP.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError(text)
        whole, fraction, zone = match.groups()
        moment = datetime.fromisoformat(whole + (zone or "Z"))
    except ValueError:
        raise BadRow(f"field 'TIMESTAMP' is {text!r}; expected a time such as 2023-11-16 18:15:46.6805900") from None
    return (moment - _EPOCH) // timedelta(seconds=1) * NANOSECONDS + int((fraction or "").ljust(9, "0"))
