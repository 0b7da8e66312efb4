"""Lines of the files of a run: their text in large pieces, and as dictionaries or typed rows, checked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from os import SEEK_END
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from msgspec import DecodeError as NotJson
from msgspec import Meta, Struct, ValidationError, field
from msgspec.json import Decoder
from msgspec.structs import replace

from ifbbench.compressed import DamagedFile, content_path, is_compressed, large_pieces
from ifbbench.errors import InputError
from ifbbench.rundir.checking import ExactLines, as_object, check_line
from ifbbench.rundir.drafts import stretches_of
from ifbbench.settings.groups.replay import DEFAULT_PRIORITY

Id = int | str
Number = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Count = Annotated[int, Meta(ge=0, le=10**9)]
"""A number of iterations: more than any run has."""
SCANNED_BYTES = 1 << 15
LINE_END = ord("\n")
_decode_lines = Decoder().decode_lines


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


UNREADABLE = (ValidationError, NotJson, UnicodeDecodeError, RecursionError)
Row = TypeVar("Row", bound=Struct)
Parsed = TypeVar("Parsed")


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


def read_lines(path: Path, required: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects in `path`, one a line, each with the fields `required`. What a killed run was writing is left
    out; see `parsed_lines`."""
    exact = ExactLines(content_path(path).name)
    for line_number, lines, is_cut in pieces_of_lines(path):
        try:
            exact.decode(lines)
            yield from _decode_lines(lines)
        except (ValueError, RecursionError):
            yield from _parsed(
                lines, line_number, is_cut, lambda number, line: parse_line(path, number, line, required)
            )


def parsed_lines(path: Path, parse: Callable[[int, bytes], Parsed]) -> Iterator[Parsed]:
    """What `parse` makes of the number and the text of each line of `path`; compressed if the name says so.

    What a killed run was writing is left out: a last line without line end for which `parse` raises InputError, and the
    rest of a compressed file that was cut off. Every other bad line raises it. A missing file is an empty one: the run
    was killed before it wrote to it.
    """
    for line_number, lines, is_cut in pieces_of_lines(path):
        yield from _parsed(lines, line_number, is_cut, parse)


def _parsed(
    lines: memoryview, line_number: int, is_cut: bool, parse: Callable[[int, bytes], Parsed]
) -> Iterator[Parsed]:
    with suppress(InputError) if is_cut else nullcontext():
        for number, line in enumerate(bytes(lines).split(b"\n"), start=line_number):
            if line.strip():
                yield parse(number, line)


def parse_line(path: Path, line_number: int, line: bytes, required: Sequence[str]) -> dict[str, Any]:
    """The JSON object in a line of `path`, checked; InputError if it is not one with the fields `required`."""
    try:
        row = as_object(line)
        for name in required:
            if name not in row:
                raise ValueError(f"field {name!r} is missing")
        check_line(content_path(path).name, row)
    except (ValueError, RecursionError) as error:
        expected = " with ".join(filter(None, ("a JSON object", ", ".join(required))))
        raise InputError(
            f"{path}, line {line_number}: {error}; expected {expected}. "
            "Restore the file, or remove the line to continue without it."
        ) from error
    return row


def find_iteration(path: Path, number: int) -> dict[str, Any] | None:
    """The line of iteration `number` in a file in which numbers ascend; None if it has none, or was cut off there.

    In a plain file by bisection down to SCANNED_BYTES, which are read line by line."""
    if is_compressed(path):
        lines = (row for row in read_lines(path, ()) if _iteration(row) == number)
        return next(lines, None)
    with path.open("rb") as file, suppress(ValueError, KeyError, RecursionError):  # of a last line that was cut off
        low, high = 0, file.seek(0, SEEK_END)
        while high - low > SCANNED_BYTES:
            middle = (low + high) // 2
            file.seek(middle)
            file.readline()  # the rest of a line
            begin, line = file.tell(), file.readline()
            if line and _iteration(as_object(line)) <= number:
                low = begin
            else:
                high = middle
        file.seek(low)
        for line in file:
            row = as_object(line)
            if _iteration(row) >= number:
                return row if _iteration(row) == number else None
    return None


def _iteration(row: Mapping[str, Any]) -> int:
    """The number of an iteration, of its line in either form."""
    return int(row["iter"] if "iter" in row else row["Iteration Counter"])
