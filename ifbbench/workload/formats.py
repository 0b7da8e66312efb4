"""Trace formats: what identifies each kind of file, and how one of its rows becomes a request.

A format is a class with the keys that identify its rows and a method `request`; `reading` finds the rows in the file.
To add one, write the class and name it in FORMATS.
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TextIO

from ifbbench.compressed import open_to_write
from ifbbench.config import DEFAULT_PRIORITY
from ifbbench.errors import InputError
from ifbbench.fields import integer, integers, number, text, unexpected
from ifbbench.workload.prompts import MAX_PREFIX_ID
from ifbbench.workload.trace import MAX_ID, MAX_LENGTH, PREFIX_BLOCK, TraceRequest, num_blocks

MILLISECONDS = 1_000
NANOSECONDS = 1_000_000_000
NO_LORA = -1

Row = Mapping[str, Any]


class TraceFormat(Protocol):
    """One kind of trace file. An instance reads one file.

    keys: all in the rows of this format; the first rows of a file decide which format it has.
    """

    keys: frozenset[str]

    def request(self, row: Row, index: int) -> TraceRequest:
        """The request of a row, the `index`-th; InputError names the field that is wrong. Called in the rows' order."""
        ...


class IfbbenchFormat:
    """JSONL with `arrival_s` (seconds), `prompt_tokens` or `prompt_len`, and `output_len` or `max_new_tokens`.

    Either of the last two stands in for the other. Optional: `request_id` (default: the row's number, from 0),
    `priority`, `beam_width`, `lora_task_id`, `stop_ids`, `class`, `after` with `think_s`; beside `prompt_len`,
    `prefix_ids` and `prefix_lens`. Other keys are ignored. `write_trace` is the inverse.
    """

    keys = frozenset({"arrival_s"})
    number_keys = frozenset({"request_id", "arrival_s", "prompt_len", "max_new_tokens", "output_len"})

    def request(self, row: Row, index: int) -> TraceRequest:
        get = row.get
        request_id = index if (given := get("request_id")) is None else integer(given, "request_id", 0, MAX_ID)
        arrival_s = number(get("arrival_s"), "arrival_s", 0.0)
        prompt_tokens = None
        if get("prompt_tokens") is None:
            prompt_len = integer(get("prompt_len"), "prompt_len", 1, MAX_LENGTH)
        else:
            prompt_tokens = _token_ids(row, "prompt_tokens")
            prompt_len = len(prompt_tokens)
            if (given := get("prompt_len")) is not None and integer(given, "prompt_len", 1, MAX_LENGTH) != prompt_len:
                raise InputError(f"prompt_len is {given}; expected {prompt_len}, the number of prompt_tokens.")
        reserved = "output_len" if get("max_new_tokens") is None else "max_new_tokens"
        actual = "max_new_tokens" if get("output_len") is None else "output_len"
        max_new_tokens = integer(get(reserved), reserved, 1, MAX_LENGTH)
        output_len = integer(get(actual), actual, 1, MAX_LENGTH)
        if row.keys() <= self.number_keys:  # true of most rows in large traces
            return TraceRequest(request_id, arrival_s, prompt_len, max_new_tokens, output_len)
        priority, beam_width, task_id = get("priority"), get("beam_width"), get("lora_task_id")
        request_class, after, think_s = get("class"), get("after"), get("think_s")
        prefix_ids, prefix_lens = _prefix(row, prompt_len)
        return TraceRequest(
            request_id,
            arrival_s,
            prompt_len,
            max_new_tokens,
            output_len,
            prompt_tokens,
            priority=DEFAULT_PRIORITY if priority is None else number(priority, "priority", 0.0, 1.0),
            beam_width=1 if beam_width is None else integer(beam_width, "beam_width", 1, MAX_LENGTH),
            lora_task_id=None if task_id is None else integer(task_id, "lora_task_id", 0, MAX_ID),
            stop_ids=() if get("stop_ids") is None else _token_ids(row, "stop_ids"),
            prefix_ids=prefix_ids,
            prefix_lens=prefix_lens,
            request_class=None if request_class is None else text(request_class, "class"),
            after=None if after is None else integer(after, "after", 0, MAX_ID),
            think_s=0.0 if think_s is None else number(think_s, "think_s", 0.0),
        )


def _token_ids(row: Row, name: str) -> tuple[int, ...]:
    return integers(row.get(name), name, "token id", 0, MAX_LENGTH)


def _prefix(row: Row, prompt_len: int) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """`prefix_ids` and `prefix_lens` of a row in ifbbench's format."""
    ids, lens = row.get("prefix_ids"), row.get("prefix_lens")
    if ids is None:
        if lens is not None:
            raise InputError("prefix_lens is given without prefix_ids; expected both or neither.")
        return None, None
    if row.get("prompt_tokens") is not None:
        raise InputError("prefix_ids is given beside prompt_tokens; expected one of the two.")
    ids = integers(ids, "prefix_ids", "prefix id", 0, MAX_PREFIX_ID)
    if lens is None:
        if len(ids) > num_blocks(prompt_len):
            raise InputError(
                f"prefix_ids has {len(ids)} ids; expected at most {num_blocks(prompt_len)} for a prompt of "
                f"{prompt_len} tokens, one for each {PREFIX_BLOCK} and one for the rest."
            )
        return ids, None
    lens = integers(lens, "prefix_lens", "number of tokens", 1, PREFIX_BLOCK)
    if len(lens) != len(ids):
        raise InputError(f"prefix_lens has {len(lens)} numbers; expected {len(ids)}, one for each of prefix_ids.")
    if sum(lens) > prompt_len:
        raise InputError(f"prefix_lens adds up to {sum(lens)}; expected at most the prompt's {prompt_len} tokens.")
    return ids, lens


class MooncakeFormat:
    """The Mooncake traces (FAST'25; github.com/kvcache-ai/Mooncake): JSONL with timestamp (ms), input_length,
    output_length, and hash_ids, one for each 512 tokens: equal ids, equal tokens.

    Arrivals count from the first row; those of earlier time stamps are negative. The trace records no reservation:
    `max_new_tokens` is output_length.
    """

    keys = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})

    def __init__(self) -> None:
        self._first_ms: float | None = None

    def request(self, row: Row, index: int) -> TraceRequest:
        timestamp_ms = number(row.get("timestamp"), "timestamp", 0.0)
        prompt_len = integer(row.get("input_length"), "input_length", 1, MAX_LENGTH)
        output_len = integer(row.get("output_length"), "output_length", 1, MAX_LENGTH)
        hash_ids = integers(row.get("hash_ids"), "hash_ids", "prefix id", 0, MAX_PREFIX_ID)
        if len(hash_ids) != num_blocks(prompt_len):
            raise InputError(
                f"hash_ids has {len(hash_ids)} ids; expected {num_blocks(prompt_len)} for an input_length of "
                f"{prompt_len}, one for each {PREFIX_BLOCK} tokens and one for the rest."
            )
        if self._first_ms is None:
            self._first_ms = timestamp_ms
        arrival_s = (timestamp_ms - self._first_ms) / MILLISECONDS
        return TraceRequest(index, arrival_s, prompt_len, output_len, output_len, prefix_ids=hash_ids)


class AzureFormat:
    """The Azure LLM inference traces of 2023 and 2024 (github.com/Azure/AzurePublicDataset): CSV with TIMESTAMP,
    ContextTokens and GeneratedTokens.

    Arrivals count from the first row; those of earlier time stamps are negative. The trace records no reservation:
    `max_new_tokens` is GeneratedTokens.
    """

    keys = frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"})

    def __init__(self) -> None:
        self._first_ns: int | None = None

    def request(self, row: Row, index: int) -> TraceRequest:
        timestamp_ns = parse_timestamp(row.get("TIMESTAMP"))
        prompt_len = integer(row.get("ContextTokens"), "ContextTokens", 1, MAX_LENGTH, from_text=True)
        output_len = integer(row.get("GeneratedTokens"), "GeneratedTokens", 1, MAX_LENGTH, from_text=True)
        if self._first_ns is None:
            self._first_ns = timestamp_ns
        return TraceRequest(index, (timestamp_ns - self._first_ns) / NANOSECONDS, prompt_len, output_len, output_len)


_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parse_timestamp(text: str | None) -> int:
    """Nanoseconds since 1970 of `2023-11-16 18:15:46.6805900` or `2024-05-10 00:00:00.009930+00:00`; UTC if no zone."""
    match = _TIMESTAMP.fullmatch((text or "").strip())
    try:
        if match is not None:
            whole, fraction, zone = match.groups()
            return _whole_seconds(whole + (zone or "Z")) * NANOSECONDS + int((fraction or "").ljust(9, "0"))
    except ValueError:  # a month 13
        pass
    raise unexpected("TIMESTAMP", text, "a time such as 2023-11-16 18:15:46.6805900")


@lru_cache(maxsize=1)  # rows are in order of time, several in most seconds
def _whole_seconds(text: str) -> int:
    """Seconds since 1970, of a time with its zone."""
    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(seconds=1)


class GptManagerFormat:
    """gptManagerBenchmark's dataset: JSON `{"metadata": …, "samples": [{input_ids, output_len, task_id?, delay?}]}`, or
    the list of samples alone.

    `delay` is the gap in seconds since the sample before; without any, all requests arrive at once. `task_id` -1 is no
    LoRA. The samples record no reservation: `max_new_tokens` is `output_len`.
    """

    keys = frozenset({"input_ids", "output_len"})

    def __init__(self) -> None:
        self._arrival_s = 0.0

    def request(self, row: Row, index: int) -> TraceRequest:
        if (delay := row.get("delay")) is not None:
            self._arrival_s += number(delay, "delay", 0.0)
        tokens = _token_ids(row, "input_ids")
        output_len = integer(row.get("output_len"), "output_len", 1, MAX_LENGTH)
        task_id = NO_LORA if (given := row.get("task_id")) is None else integer(given, "task_id", NO_LORA, MAX_ID)
        return TraceRequest(
            index, self._arrival_s, len(tokens), output_len, output_len, tokens,
            lora_task_id=None if task_id == NO_LORA else task_id,
        )  # fmt: skip


FORMATS: dict[str, tuple[type[TraceFormat], ...]] = {
    ".jsonl": (IfbbenchFormat, MooncakeFormat),
    ".csv": (AzureFormat,),
    ".json": (GptManagerFormat,),
}
"""By suffix, in the order in which they are tried. The first one also reads files without a row to recognise."""

UNDERSTOOD = (
    ".jsonl with arrival_s (ifbbench) or with timestamp, input_length, output_length, hash_ids (Mooncake), .json with "
    "`samples` or a list of {input_ids, output_len} (gptManagerBenchmark), .csv with TIMESTAMP, ContextTokens, "
    "GeneratedTokens (Azure LLM inference); each may be compressed (.gz)"
)


# Writing.

_encode = json.JSONEncoder(separators=(",", ":")).encode


def write_trace(requests: Iterable[TraceRequest], target: str | Path | TextIO, overwrite: bool = False) -> None:
    """Write `requests`, one after another, as ifbbench JSONL to a path or to an open text file.

    Missing directories of the path are made; a file with a name that ends in .gz is compressed. InputError if the path
    exists and `overwrite` is not set, or cannot be written.
    """
    if not isinstance(target, str | Path):
        target.writelines(map(_line, requests))
        return
    path = Path(target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(open_to_write(path, "w" if overwrite else "x")) as writer:
            for line in map(_line, requests):
                writer.write(line.encode())
    except FileExistsError:
        raise InputError(f"{path} already exists. Give another name, or --overwrite to replace it.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}. Give a path that you can write to.") from error


def _line(request: TraceRequest) -> str:
    if request.has_only_numbers:
        return (
            f'{{"request_id":{request.request_id},"arrival_s":{request.arrival_s!r},"prompt_len":{request.prompt_len},'
            f'"max_new_tokens":{request.max_new_tokens},"output_len":{request.output_len}}}\n'
        )
    record: dict[str, Any] = {"request_id": request.request_id, "arrival_s": request.arrival_s}
    if request.prompt_tokens is None:
        record["prompt_len"] = request.prompt_len
    for name in ("prompt_tokens", "prefix_ids", "prefix_lens"):
        if (value := getattr(request, name)) is not None:
            record[name] = value
    record |= {"max_new_tokens": request.max_new_tokens, "output_len": request.output_len}
    if request.priority != DEFAULT_PRIORITY:
        record["priority"] = request.priority
    if request.beam_width != 1:
        record["beam_width"] = request.beam_width
    if request.lora_task_id is not None:
        record["lora_task_id"] = request.lora_task_id
    if request.stop_ids:
        record["stop_ids"] = request.stop_ids
    if request.request_class is not None:
        record["class"] = request.request_class
    if request.after is not None:
        record |= {"after": request.after, "think_s": request.think_s}
    return _encode(record) + "\n"
