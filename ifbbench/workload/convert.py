"""Traces in the formats of other tools, written one request after another.

A format is a function from requests to lines of text, named in FORMATS with the fields that it can express. The rows
are those of the tool's own data sets; the readers of `formats` take them back.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from ifbbench.settings.groups.replay import DEFAULT_PRIORITY
from ifbbench.workload.formats import trace_lines
from ifbbench.workload.prompts import prompt_tokens
from ifbbench.workload.tool_formats import NO_LORA
from ifbbench.workload.trace import PREFIX_BLOCK, TraceRequest

_encode = json.JSONEncoder(separators=(",", ":")).encode
MILLISECONDS = 1_000
MICROSECONDS = 6  # decimals of seconds
Lines = Iterator[str]


@dataclass(frozen=True)
class Tokens:
    """Where prompts without recorded token ids get theirs from, for formats that hold token ids."""

    vocab_size: int
    seed: int

    def of(self, request: TraceRequest) -> list[int]:
        """The token ids of the prompt, recorded or drawn; shared beginnings are equal."""
        if request.prompt_tokens is not None:
            return list(request.prompt_tokens)
        ids: list[int] = prompt_tokens(request, self.vocab_size, self.seed).tolist()
        return ids


def gpt_manager_lines(requests: Iterable[TraceRequest], tokens: Tokens) -> Lines:
    """One JSON object with `metadata` and `samples`; `delay` is the gap in seconds since the sample before."""
    yield '{"metadata":{"workload_name":"ifbbench"},"samples":['
    position_s, separator = 0.0, "\n"
    for request in requests:
        delay_s = round(request.arrival_s - position_s, 2 * MICROSECONDS)
        position_s += delay_s  # as a reader adds them up
        task_id = NO_LORA if request.lora_task_id is None else request.lora_task_id
        sample = {
            "input_len": request.prompt_len,
            "input_ids": tokens.of(request),
            "output_len": request.output_len,
            "task_id": task_id,
            "delay": delay_s,
        }
        yield separator + _encode(sample)
        separator = ",\n"
    yield "\n]}\n"


def trtllm_bench_lines(requests: Iterable[TraceRequest], tokens: Tokens) -> Lines:
    """JSONL with `task_id` (the request's), `input_ids` and `output_tokens`."""
    for request in requests:
        row = {"task_id": request.request_id, "input_ids": tokens.of(request), "output_tokens": request.output_len}
        yield _encode(row) + "\n"


def lengths_lines(requests: Iterable[TraceRequest], tokens: Tokens) -> Lines:
    """CSV with num_prefill_tokens, num_decode_tokens and arrived_at (s)."""
    yield "num_prefill_tokens,num_decode_tokens,arrived_at\n"
    for request in requests:
        yield f"{request.prompt_len},{request.output_len},{request.arrival_s!r}\n"


def mooncake_lines(requests: Iterable[TraceRequest], tokens: Tokens) -> Lines:
    """JSONL with timestamp (ms), input_length, output_length and hash_ids, numbered in order of appearance.

    A block of 512 tokens has the id of an earlier one if the trace names the same tokens for it, or if it and all
    tokens before it are recorded and equal; every other block has an id of its own.
    """
    numbers: dict[object, int] = {}
    next_number = count()
    for request in requests:
        hash_ids = []
        for key in _block_keys(request):
            number = numbers.get(key) if key is not None else None
            if number is None:
                number = next(next_number)
                if key is not None:
                    numbers[key] = number
            hash_ids.append(number)
        timestamp = round(request.arrival_s * MILLISECONDS, MICROSECONDS - 3)
        row = {
            "timestamp": int(timestamp) if timestamp.is_integer() else timestamp,
            "input_length": request.prompt_len,
            "output_length": request.output_len,
            "hash_ids": hash_ids,
        }
        yield _encode(row) + "\n"


def _block_keys(request: TraceRequest) -> Iterator[object]:
    """A key for each PREFIX_BLOCK tokens of the prompt and for the rest: equal ones for equal tokens, None for tokens
    that no other request has."""
    starts = range(0, request.prompt_len, PREFIX_BLOCK)
    if request.prompt_tokens is not None:
        ids, key = np.asarray(request.prompt_tokens, dtype=np.int32), b""
        for start in starts:
            key = blake2b(key + ids[start : start + PREFIX_BLOCK].tobytes(), digest_size=16).digest()
            yield key
        return
    pieces = request.prefix_runs()
    at = piece = used = 0
    for start in starts:
        end = min(start + PREFIX_BLOCK, request.prompt_len)
        parts: list[tuple[int, int, int]] = []  # (prefix id, its first token here, number of tokens)
        while at < end and piece < len(pieces):
            prefix_id, length = pieces[piece]
            taken = min(length - used, end - at)
            parts.append((prefix_id, used, taken))
            at, used = at + taken, used + taken
            if used == length:
                piece, used = piece + 1, 0
        if at < end:
            yield None
        elif len(parts) == 1 and parts[0][1] == 0:
            yield parts[0][0]  # whole, or cut off by the end of the prompt
        else:
            yield tuple(parts)


@dataclass(frozen=True)
class OutputFormat:
    """A format to convert to.

    carries: the optional fields of TraceRequest that it can express.
    """

    lines: Callable[[Iterable[TraceRequest], Tokens], Lines]
    suffix: str
    carries: frozenset[str]


ALL_FIELDS = frozenset(
    {
        "arrival_s",
        "max_new_tokens",
        "prompt_tokens",
        "prefix_ids",
        "priority",
        "beam_width",
        "lora_task_id",
        "stop_ids",
        "request_class",
        "after",
    }
)
FORMATS: dict[str, OutputFormat] = {
    "ifbbench": OutputFormat(lambda requests, _: trace_lines(requests), ".jsonl", ALL_FIELDS),
    "gpt-manager": OutputFormat(
        gpt_manager_lines, ".json", frozenset({"arrival_s", "prompt_tokens", "prefix_ids", "lora_task_id"})
    ),
    "trtllm-bench": OutputFormat(trtllm_bench_lines, ".jsonl", frozenset({"prompt_tokens", "prefix_ids"})),
    "lengths": OutputFormat(lengths_lines, ".csv", frozenset({"arrival_s"})),
    "mooncake": OutputFormat(mooncake_lines, ".jsonl", frozenset({"arrival_s", "prompt_tokens", "prefix_ids"})),
}


def format_of(path: Path) -> str | None:
    """The first format with the suffix of `path`, without `.gz`; None if there is none."""
    name = path.name.lower().removesuffix(".gz")
    return next((name_of for name_of, one in FORMATS.items() if name.endswith(one.suffix)), None)


class Losses:
    """Counts the fields of requests that a format cannot express, as they pass."""

    def __init__(self, requests: Iterable[TraceRequest], carries: frozenset[str]) -> None:
        self._requests = requests
        self._dropped = ALL_FIELDS - carries
        self.counts: dict[str, int] = {}

    def __iter__(self) -> Iterator[TraceRequest]:
        counts, dropped = self.counts, self._dropped
        for request in self._requests:
            for name, has in _FIELDS.items():
                if name in dropped and has(request):
                    counts[name] = counts.get(name, 0) + 1
            yield request


_FIELDS: dict[str, Callable[[TraceRequest], Any]] = {
    "arrival_s": lambda request: request.arrival_s > 0,
    "max_new_tokens": lambda request: request.max_new_tokens != request.output_len,
    "prompt_tokens": lambda request: request.prompt_tokens is not None,
    "prefix_ids": lambda request: request.prefix_ids is not None,
    "priority": lambda request: request.priority != DEFAULT_PRIORITY,
    "beam_width": lambda request: request.beam_width != 1,
    "lora_task_id": lambda request: request.lora_task_id is not None,
    "stop_ids": lambda request: request.stop_ids,
    "request_class": lambda request: request.request_class is not None,
    "after": lambda request: request.after is not None,
}
