"""Lines of the files of a run as reports need them: typed rows, in large pieces, or one found by bisection."""

from collections.abc import Iterator
from contextlib import suppress
from os import SEEK_END
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from msgspec import DecodeError as NotJson
from msgspec import Meta, Struct, ValidationError, field
from msgspec.json import Decoder
from msgspec.structs import replace

from ifbbench.compressed import DamagedFile, large_pieces, read_pieces
from ifbbench.errors import InputError
from ifbbench.rundir.drafts import stretches_of
from ifbbench.settings.config import DEFAULT_PRIORITY

Id = int | str
Number = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Count = Annotated[int, Meta(ge=0, le=10**9)]
"""A number of iterations: more than any run has."""
Seconds = Annotated[float, Meta(ge=-9e9, le=9e9)]
Milliseconds = Annotated[float, Meta(ge=-9e12, le=9e12)]
"""Times which 64 bits hold in nanoseconds."""
SCANNED_BYTES = 1 << 15
LINE_END = ord("\n")


class _LeftOut(Struct, gc=False):
    request_id: Id
    reason: str


class _Paused(Struct, gc=False):
    request_id: Id
    beneficiary: Id = field(name="for")


class WindowRow(Struct, gc=False):
    """The blocks of one of several attention windows."""

    blocks: Number = field(name="primaryMaxNumBlocks")
    used: Number = field(name="primaryUsedNumBlocks")


class IterationDetails(Struct, gc=False):
    """What is under "ifbbench" in a line of `iterations.jsonl`, as far as it is used here and in the live view."""

    start_s: Seconds
    latency_ms: Milliseconds
    queued: Number
    waiting: Number
    bound_by: str
    first_left_out: _LeftOut | None
    paused: tuple[_Paused, ...]
    budget_used: Number
    host_ms: Milliseconds = 0.0
    windows: dict[str, WindowRow] = field(name="kv_cache_iteration_stats", default_factory=dict)
    delivery_ms: Milliseconds = 0.0


class IterationRow(Struct, gc=False):
    """The fields of a line of `iterations.jsonl` that analyses use."""

    details: IterationDetails = field(name="ifbbench")
    number: Count = field(name="Iteration Counter")
    active: Number = field(name="Active Request Count")
    used_blocks: Number | None = field(name="Used KV cache blocks", default=None)


class _CacheStatistics(Struct, gc=False):
    used_blocks: Number | None = field(name="usedNumBlocks", default=None)


class ExecutorRow(Struct, gc=False):
    """A line with the executor's statistics (`--iteration_stats_format trtllm`)."""

    details: IterationDetails = field(name="ifbbench")
    number: Count = field(name="iter")
    active: Number = field(name="numActiveRequests")
    cache: _CacheStatistics | None = field(name="kvCacheStats", default=None)

    @property
    def used_blocks(self) -> int | None:
        return None if self.cache is None else self.cache.used_blocks


class Span(Struct, gc=False):
    """A line of `spans.jsonl`: in each `every`-th iteration from `first` to `last` the request did one thing; see
    SpanLine."""

    request_id: Id
    phase: str
    first: Count = field(name="first_iteration")
    last: Count = field(name="last_iteration")
    tokens: Number
    cause: Id | None = None
    chunks: list[Number] = field(default_factory=list)
    produced: Number = 0
    first_output: Number = 0
    every: Count = 1
    steps: list[Count] = field(default_factory=list)

    @property
    def waits_for(self) -> str | None:
        """What the request waits for in this span; None if it does not wait."""
        return str(self.cause) if self.phase == "waiting" else None


def single_steps(span: Span) -> list[Span]:
    """A span that produced output tokens, cut into parts that produce one in each of their last iterations: itself,
    unless draft tokens make several in an iteration."""
    if span.phase != "generation":
        return [span] if span.produced == 1 else [replace(span, produced=1)] * span.produced
    if not span.steps:
        return [span]
    parts = stretches_of(span.first, span.steps, span.produced)
    return [replace(span, first=first, last=last, produced=last - first + 1) for first, last in parts]


class TraceRow(Struct, gc=False):
    """What analyses use of a line of `trace.jsonl`."""

    request_id: Id
    arrival_s: float
    max_new_tokens: Number
    output_len: Number = 0
    prompt_len: Number = 0
    priority: float = DEFAULT_PRIORITY
    beam_width: Number = 1


AnyIterationRow = IterationRow | ExecutorRow
UNREADABLE = (ValidationError, NotJson, UnicodeDecodeError, RecursionError)
Row = TypeVar("Row", bound=Struct)


def iteration_decoder(path: Path) -> "Decoder[Any]":
    """The decoder of the lines of this `iterations.jsonl`, IterationRow or ExecutorRow, by its first line."""
    first = b""
    if path.exists():
        with suppress(EOFError, DamagedFile):
            first = next(read_pieces(path), b"").partition(b"\n")[0]
    return Decoder(ExecutorRow if b'"numActiveRequests"' in first else IterationRow)


def pieces_of_lines(path: Path) -> Iterator[tuple[int, memoryview, bool]]:
    """Consecutive lines of `path`: the number of the first, their text, and whether it is one without its line end."""
    if not path.exists():
        return
    line_number, rest = 1, b""
    try:
        for piece in large_pieces(path):
            piece = rest + piece
            end = piece.rfind(b"\n") + 1
            rest = piece[end:]
            if end:
                yield line_number, memoryview(piece)[:end], False
                # In a quarter of the time of `piece.count`, which looks at one byte after the other.
                line_number += int(np.count_nonzero(np.frombuffer(piece, np.uint8) == LINE_END))
    except EOFError:
        pass  # cut off behind the last whole line
    except DamagedFile as error:
        raise InputError(f"{path}: {error}. Restore the file, or remove it to continue without it.") from error
    if rest.strip():
        yield line_number, memoryview(rest), True


def read_rows(path: Path, decoder: "Decoder[Row]") -> Iterator[list[Row]]:
    """The rows of a file of JSON lines, in lists of consecutive ones. A last line that was cut off is left out; a
    missing file is an empty one. InputError names the line that is not as `ifbbench run` writes it."""
    for line_number, lines, is_cut in pieces_of_lines(path):
        if is_cut:
            return
        try:
            rows = decoder.decode_lines(lines)
        except UNREADABLE:
            raise bad_line(path, bytes(lines), line_number, decoder) from None
        yield rows


def bad_line(path: Path, lines: bytes, line_number: int, decoder: "Decoder[Row]") -> InputError:
    """The error for the first of `lines` that cannot be decoded; `line_number` is that of the first of all."""
    for number, line in enumerate(lines.split(b"\n"), start=line_number):
        try:
            if line.strip():
                decoder.decode(line)
        except UNREADABLE as error:
            return InputError(
                f"{path}, line {number}: {error}; expected a line as `ifbbench run` writes it. Run again, or remove "
                "the line."
            )
    return InputError(f"{path}: not as `ifbbench run` writes it. Run again.")


def find_row(path: Path, decoder: "Decoder[Any]", number: int) -> AnyIterationRow | None:
    """The row of iteration `number` of a plain file in which numbers ascend; None if it has none.

    By bisection down to SCANNED_BYTES, which are read line by line."""
    with path.open("rb") as file:
        low, high = 0, file.seek(0, SEEK_END)
        try:
            while high - low > SCANNED_BYTES:
                middle = (low + high) // 2
                file.seek(middle)
                file.readline()  # the rest of a line
                begin, line = file.tell(), file.readline()
                if line and decoder.decode(line).number <= number:
                    low = begin
                else:
                    high = middle
            file.seek(low)
            for line in file:
                row = decoder.decode(line)
                if row.number >= number:
                    return row if row.number == number else None
        except UNREADABLE:
            pass  # a last line that was cut off
    return None
