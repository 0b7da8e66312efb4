"""Formats of recorded traffic: tables of lengths and arrivals (Azure, BurstGPT, any other with named columns), and
traces with the hashes of prompt blocks (Mooncake, Bailian)."""

import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from ifbbench.errors import InputError
from ifbbench.settings.fields import did_you_mean, integer, integers, number, shown, text, unexpected
from ifbbench.settings.groups.replay import DEFAULT_PRIORITY
from ifbbench.workload.formats import ReadOptions, Row, TraceFormat, value_at
from ifbbench.workload.prompts import MAX_PREFIX_ID
from ifbbench.workload.texts import PromptTexts
from ifbbench.workload.trace import EPOCH_S, MAX_ID, MAX_LENGTH, PREFIX_BLOCK, TraceRequest

MILLISECONDS = 1_000
NANOSECONDS = 1_000_000_000
OTHER_FIELDS = ("request_id", "max_new_tokens", "priority", "class", "lora_task_id")
UNITS = {"arrival_s": 1, "arrival_ms": MILLISECONDS, "arrival_us": 1_000_000, "arrival_ns": NANOSECONDS}


# Arrivals.

_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parse_timestamp(text: str | None, name: str = "TIMESTAMP") -> int:
    """Nanoseconds since 1970 of `2023-11-16 18:15:46.6805900` or `2024-05-10 00:00:00.009930+00:00`; UTC if no zone."""
    match = _TIMESTAMP.fullmatch((text or "").strip())
    try:
        if match is not None:
            whole, fraction, zone = match.groups()
            return _whole_seconds(whole + (zone or "Z")) * NANOSECONDS + int((fraction or "").ljust(9, "0"))
    except ValueError:  # a month 13
        pass
    raise unexpected(name, text, "a time such as 2023-11-16 18:15:46.6805900")


@lru_cache(maxsize=1)  # rows are in order of time, several in most seconds
def _whole_seconds(text: str) -> int:
    """Seconds since 1970, of a time with its zone."""
    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(seconds=1)


class Times:
    """The column of arrival times of one file, as seconds.

    Times as text (`2023-11-16 18:15:46.68`) and time stamps since 1970 count from the first row; those of earlier rows
    are negative. Other numbers count from the first row if `from_first` is set, else they are taken as they are.
    """

    def __init__(self, name: str, per_second: int = 1, from_first: bool = True) -> None:
        self._name = name
        self._per_second = per_second
        self._from_first = from_first
        self._first_ns: int | None = None
        self._first: float | None = None

    def seconds(self, value: Any) -> float:
        """The arrival of the next row."""
        if isinstance(value, str) and value[4:5] == "-" and value[:4].isdigit():
            if self._first is not None:
                raise unexpected(self._name, value, "a number, as in the rows before")
            timestamp_ns = parse_timestamp(value, self._name)
            if self._first_ns is None:
                self._first_ns = timestamp_ns
            return (timestamp_ns - self._first_ns) / NANOSECONDS
        if self._first_ns is not None:
            raise unexpected(self._name, value, "a time such as 2023-11-16 18:15:46.6805900, as in the rows before")
        try:
            time = number(value, self._name, 0.0, from_text=True)
        except InputError:
            if isinstance(value, str) and not _is_number(value):
                raise unexpected(self._name, value, "a time: a number or a text such as 2023-11-16 18:15:46") from None
            raise
        if self._first is None:
            counts_from_first = self._from_first or time >= EPOCH_S * self._per_second
            self._first = time if counts_from_first else 0.0
        return (time - self._first) / self._per_second


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class SessionTimes:
    """Arrivals of rows with `timestamp` in milliseconds, counted from the first row, or with `delay`: milliseconds
    after the row before of the same `session_id`.

    A row with neither arrives with the row before of its session, else at 0.
    """

    def __init__(self, keys: Collection[str]) -> None:
        self._times = Times("timestamp", MILLISECONDS)
        self._needs_time = "timestamp" in keys and "delay" not in keys and "session_id" not in keys
        self._session_s: dict[str, float] = {}

    def seconds(self, row: Row, session: Any = None) -> float:
        """The arrival of a row; `session` stands in for its own `session_id`."""
        timestamp, delay = row.get("timestamp"), row.get("delay")
        if timestamp is not None or self._needs_time:
            arrival_s = self._times.seconds(timestamp)
        else:
            arrival_s = self._session_s.get(str(row.get("session_id", session)), 0.0)
            if delay is not None:
                arrival_s += number(delay, "delay", 0.0) / MILLISECONDS
        if (session := row.get("session_id", session)) is not None:
            self._session_s[str(session)] = arrival_s
        return arrival_s


# Tables: one column for each field.


class TableFormat(TraceFormat):
    """Rows of a CSV or JSONL file with a column for each field of a request; numbers may be texts.

    columns: the column of each field. Fields: prompt_len or prompt (a text), output_len, max_new_tokens, request_id,
        priority, class, lora_task_id, and one of arrival_s, arrival_ms, arrival_us, arrival_ns. Those of `needs` must
        be there. The reservation is the output length if it has no column.
    """

    columns: Mapping[str, str] = MappingProxyType(
        {name: name for name in (*OTHER_FIELDS, "prompt_len", "output_len", "arrival_s")}
    )
    needs: tuple[str, ...] = ("prompt_len", "output_len")
    from_first = False

    def __init__(self, keys: Collection[str], options: ReadOptions) -> None:
        super().__init__(keys, options)
        columns = {field: name for field, name in self.columns.items() if name in keys or name in self.needs}
        self._times = next(
            (
                Times(columns[field], per_second, self.from_first)
                for field, per_second in UNITS.items()
                if field in columns
            ),
            None,
        )
        self._time_column = next((columns[field] for field in UNITS if field in columns), "")
        self._prompt, self._prompt_len = columns.get("prompt"), columns.get("prompt_len", "prompt_len")
        self._output_len = columns.get("output_len", "output_len")
        self._others = {field: name for field, name in columns.items() if field in OTHER_FIELDS}
        self._texts = PromptTexts(options)

    def notes(self) -> list[str]:
        return self._texts.notes()

    def requests(self, row: Row, index: int) -> tuple[TraceRequest, ...]:
        times, prompt_tokens = self._times, None
        arrival_s = 0.0 if times is None else times.seconds(row.get(self._time_column))
        if self._prompt is None:
            prompt_len = integer(row.get(self._prompt_len), self._prompt_len, 1, MAX_LENGTH, from_text=True)
        else:
            prompt_len, prompt_tokens = self._texts.prompt(row.get(self._prompt), self._prompt)
        output_len = integer(row.get(self._output_len), self._output_len, 1, MAX_LENGTH, from_text=True)
        if prompt_tokens is None and not self._others:
            return (TraceRequest(index, arrival_s, prompt_len, output_len, output_len),)
        return (self._with_others(row, index, arrival_s, prompt_len, output_len, prompt_tokens),)

    def _with_others(
        self,
        row: Row,
        index: int,
        arrival_s: float,
        prompt_len: int,
        output_len: int,
        prompt_tokens: tuple[int, ...] | None,
    ) -> TraceRequest:
        """The request with the fields that few tables have; an empty cell counts as missing."""
        cells = ((field, name, row.get(name)) for field, name in self._others.items())
        given = {field: (name, value) for field, name, value in cells if value not in (None, "")}

        def whole(field: str, default: Any, minimum: int = 0, maximum: int = MAX_ID) -> Any:
            name, value = given.get(field, (field, None))
            return default if value is None else integer(value, name, minimum, maximum, from_text=True)

        name, priority = given.get("priority", ("priority", DEFAULT_PRIORITY))
        return TraceRequest(
            whole("request_id", index),
            arrival_s,
            prompt_len,
            whole("max_new_tokens", output_len, 1, MAX_LENGTH),
            output_len,
            prompt_tokens,
            priority=number(priority, name, 0.0, 1.0, from_text=True),
            lora_task_id=whole("lora_task_id", None),
            request_class=text(str(given["class"][1]), given["class"][0]) if "class" in given else None,
        )


class _NestedTable(TableFormat):
    """A table of which some columns are fields of nested objects, such as `usage.input`."""

    def requests(self, row: Row, index: int) -> tuple[TraceRequest, ...]:
        return super().requests({name: value_at(row, name) for name in self.needs}, index)


def _columns(arrival_s: str, prompt_len: str, output_len: str) -> Mapping[str, str]:
    return MappingProxyType({"arrival_s": arrival_s, "prompt_len": prompt_len, "output_len": output_len})


class AzureFormat(TableFormat):
    """The Azure LLM inference traces of 2023 and 2024 (github.com/Azure/AzurePublicDataset): CSV with TIMESTAMP,
    ContextTokens and GeneratedTokens. Arrivals count from the first row."""

    needs = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    columns = _columns(*needs)


class BurstGptFormat(TableFormat):
    """BurstGPT (github.com/HPMLL/BurstGPT): CSV with Timestamp (seconds), Model, Request tokens, Response tokens, Total
    tokens, Log Type. Arrivals count from the first row. A row with 0 response tokens is a failed request."""

    needs = ("Timestamp", "Request tokens", "Response tokens")
    columns = _columns(*needs)
    from_first = True

    def requests(self, row: Row, index: int) -> tuple[TraceRequest, ...]:
        if row.get("Response tokens") in ("0", 0):
            return ()
        return super().requests(row, index)


class LengthsFormat(TableFormat):
    """Vidur's processed traces (github.com/microsoft/vidur): CSV with num_prefill_tokens, num_decode_tokens and
    perhaps arrived_at (seconds)."""

    needs = ("num_prefill_tokens", "num_decode_tokens")
    columns = _columns("arrived_at", *needs)


def table_format(columns: str, keys: Collection[str]) -> type[TableFormat]:
    """The format that `--columns` describes: `prompt_len=ContextTokens,output_len=GeneratedTokens,arrival_ms=t`. A
    column of nested objects is named by their keys, joined by dots.

    InputError if the text is not valid, or names a column that is not among `keys`.
    """
    known = (*TableFormat.columns, *UNITS, "prompt")
    named: dict[str, str] = {}
    for part in filter(None, columns.split(",")):
        field, equals, name = (word.strip() for word in part.partition("="))
        if not equals or not name:
            raise InputError(f"--columns has {part!r}; expected FIELD=COLUMN, such as prompt_len=ContextTokens.")
        if field not in known:
            fields = ", ".join(dict.fromkeys(known))
            raise InputError(f"--columns has the field {field!r}; expected {fields}.{did_you_mean(field, known)}")
        if keys and name not in keys and name.partition(".")[0] not in keys:
            there = ", ".join(shown(key)[1:-1] for key in sorted(keys))[:300]
            hint = did_you_mean(name, list(keys))
            raise InputError(f"--columns names the column {name!r}; the file has {there}.{hint}")
        named[field] = name
    if ("prompt_len" in named) == ("prompt" in named):
        raise InputError("--columns needs prompt_len (a number of tokens) or prompt (a text), one of the two.")
    if "output_len" not in named:
        raise InputError("--columns needs output_len, the column of output tokens.")
    if len(named.keys() & UNITS.keys()) > 1:
        raise InputError(f"--columns has several columns of arrivals; expected one of {', '.join(UNITS)}.")
    given = {"columns": named, "needs": tuple(named.values())}
    if all(name in keys for name in named.values()):
        return type("NamedColumns", (TableFormat,), given)
    return type("NestedColumns", (_NestedTable,), given)


# Traces that name the blocks of prompts.


class MooncakeFormat(TraceFormat):
    """The Mooncake traces (FAST'25; github.com/kvcache-ai/Mooncake): JSONL with timestamp (ms), input_length,
    output_length, and hash_ids, one for each 512 tokens: equal ids, equal tokens.

    Without timestamp all requests arrive at once, without hash_ids no prefix is shared; `session_id` and `delay` (ms)
    are those of aiperf. The trace records no reservation: `max_new_tokens` is output_length.
    """

    needs = ("input_length", "output_length")

    def __init__(self, keys: Collection[str], options: ReadOptions) -> None:
        super().__init__(keys, options)
        self._times = SessionTimes(keys)
        self._needs_ids = "hash_ids" in keys

    def requests(self, row: Row, index: int) -> tuple[TraceRequest]:
        arrival_s = self._times.seconds(row)
        prompt_len, hash_ids = hashed_prompt(row, PREFIX_BLOCK, self._needs_ids)
        output_len = self.output_len(row, "output_length")
        return (TraceRequest(index, arrival_s, prompt_len, output_len, output_len, prefix_ids=hash_ids),)


class BailianFormat(TraceFormat):
    """The Qwen-Bailian traces (github.com/alibaba-edu/qwen-bailian-usagetraces-anon): JSONL like Mooncake's, with
    chat_id, timestamp in seconds, and one hash id for each 16 tokens."""

    needs = ("chat_id", "timestamp", "input_length", "output_length")
    block = 16

    def __init__(self, keys: Collection[str], options: ReadOptions) -> None:
        super().__init__(keys, options)
        self._times = Times("timestamp")
        self._needs_ids = "hash_ids" in keys

    def requests(self, row: Row, index: int) -> tuple[TraceRequest]:
        arrival_s = self._times.seconds(row.get("timestamp"))
        prompt_len, hash_ids = hashed_prompt(row, self.block, self._needs_ids)
        output_len = self.output_len(row, "output_length")
        request = TraceRequest(index, arrival_s, prompt_len, output_len, output_len)
        if hash_ids is None:
            return (request,)
        lens = (self.block,) * (len(hash_ids) - 1) + ((prompt_len - 1) % self.block + 1,)
        return (replace(request, prefix_ids=hash_ids, prefix_lens=lens),)


def hashed_prompt(row: Row, block: int, needs_ids: bool) -> tuple[int, tuple[int, ...] | None]:
    """`input_length` and `hash_ids` of a row, one id for each `block` tokens."""
    prompt_len = integer(row.get("input_length"), "input_length", 1, MAX_LENGTH)
    if not needs_ids and row.get("hash_ids") is None:
        return prompt_len, None
    hash_ids = integers(row.get("hash_ids"), "hash_ids", "prefix id", 0, MAX_PREFIX_ID)
    expected = -(-prompt_len // block)
    if len(hash_ids) != expected:
        raise InputError(
            f"hash_ids has {len(hash_ids)} ids; expected {expected} for an input_length of {prompt_len}, one for each "
            f"{block} tokens and one for the rest."
        )
    return prompt_len, hash_ids
