"""ifbbench's own trace format, its writer, and what every trace format has.

A format is a class with the keys that identify its rows and a method `requests`; `reading` finds the rows in the file.
To add one, write the class, name it in `reading.FORMATS` and in `config.TRACE_FORMATS`.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import msgspec

from ifbbench.compressed import MAX_LINE
from ifbbench.errors import InputError
from ifbbench.files import new_file
from ifbbench.settings.fields import integer, integers, number, shown, text, unexpected
from ifbbench.settings.groups.replay import DEFAULT_PRIORITY
from ifbbench.settings.json_text import check_keys
from ifbbench.workload.prompts import MAX_PREFIX_ID
from ifbbench.workload.trace import MAX_ID, MAX_LENGTH, PREFIX_BLOCK, TraceRequest, num_blocks

Row = Mapping[str, Any]
TOO_LONG = f"longer than {MAX_LINE >> 20} MiB; expected one request a line."


def checked_object(value: Any) -> dict[str, Any]:
    """`value`, a JSON object."""
    if not isinstance(value, dict):
        raise InputError(f"{shown(value)} is not valid; expected a JSON object.")
    return value


_decode = msgspec.json.Decoder().decode


def json_value(text: bytes | msgspec.Raw) -> Any:
    """The JSON value in `text`, or InputError."""
    try:
        return _decode(text)
    except (ValueError, RecursionError):
        try:
            return json.loads(bytes(text))  # takes NaN as well, and has the better messages
        except (ValueError, RecursionError) as error:
            raise InputError(f"not valid JSON ({str(error)[:200]}); expected one JSON object.") from None


def json_object(line: bytes | None) -> dict[str, Any]:
    """The JSON object in `line`, which is None for a line that is too long."""
    if line is None:
        raise InputError(TOO_LONG)
    return checked_object(json_value(line))


def json_row(line: bytes | None) -> dict[str, Any]:
    """`json_object`, InputError also if a key is there twice, of which JSON libraries keep the last."""
    row = json_object(line)
    if line is not None and line.count(b'":') + line.count(b'" :') != len(row):  # so it is not for most rows of numbers
        try:
            check_keys(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"not valid JSON ({str(error)[:200]}); expected one JSON object.") from None
    return row


@dataclass(frozen=True)
class ReadOptions:
    """How a trace file is read: the settings of the same names."""

    trace_format: str | None = None
    columns: str | None = None
    tokenizer: str | None = None
    characters_per_token: float = 4.0
    default_output_len: int | None = None


def value_at(row: Row, path: str) -> Any:
    """The field `path` of a row: a key, or keys of nested objects, joined by dots. None if the row lacks it."""
    if path in row:
        return row[path]
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def objects(row: Row, name: str, prefix: str = "") -> list[dict[str, Any]]:
    """The field `name` of a row, a list of objects; empty if the row lacks it. prefix: of its name in messages."""
    values = row.get(name, [])
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise unexpected(f"{prefix}{name}", values, "a list of objects")
    return values


class TraceFormat(ABC):
    """One kind of trace file. An instance reads one file.

    needs: keys that the rows of this format have; `a|b` is one of two. The first rows of a file decide which format it
        has.
    mark: a key that suffices instead of `needs`; empty if there is none.
    left_out: what the rows without a request are.
    """

    needs: tuple[str, ...]
    mark: str = ""
    left_out: str = "rows of failed requests"

    def __init__(self, keys: Collection[str], options: ReadOptions) -> None:
        """keys: those of the first rows."""
        self.options = options

    @abstractmethod
    def requests(self, row: Row, index: int) -> Sequence[TraceRequest]:
        """The requests of a row, the first one the `index`-th of the file; none if the row is to be left out.

        InputError names the field that is wrong. Called in the order of the rows."""

    def notes(self) -> list[str]:
        """What a user must know of the requests, such as a rule for lengths; complete when all rows are read."""
        return []

    def output_len(self, row: Row, name: str) -> int:
        """The output length in the field `name`; `--default_output_len` if the row has none."""
        value = row.get(name)
        if value is not None:
            return integer(value, name, 1, MAX_LENGTH)
        if self.options.default_output_len is None:
            raise InputError(f"{name} is missing; expected an integer of at least 1, or --default_output_len.")
        return self.options.default_output_len


class IfbbenchFormat(TraceFormat):
    """JSONL with `arrival_s` (seconds), `prompt_tokens` or `prompt_len`, and `output_len` or `max_new_tokens`.

    Either of the last two stands in for the other. If the first rows have no `arrival_s`, all requests arrive at once.
    Optional: `request_id` (default: the row's number, from 0), `priority`, `beam_width`, `lora_task_id`, `stop_ids`,
    `class`, `after` with `think_s` and `also_after`, `has_next_turn`, `session_id`, `added_in`, `added_with`,
    `stopped_in`; beside `prompt_len`, `prefix_ids` and `prefix_lens`. Other keys are ignored.
    `write_trace` is the inverse.
    """

    needs = ("prompt_len|prompt_tokens", "output_len|max_new_tokens")
    mark = "arrival_s"
    number_keys = frozenset({"request_id", "arrival_s", "prompt_len", "max_new_tokens", "output_len"})

    def __init__(self, keys: Collection[str], options: ReadOptions) -> None:
        super().__init__(keys, options)
        self._default_arrival_s = None if "arrival_s" in keys else 0.0

    def requests(self, row: Row, index: int) -> tuple[TraceRequest]:
        get = row.get
        request_id = index if (given := get("request_id")) is None else integer(given, "request_id", 0, MAX_ID)
        arrival_s = number(get("arrival_s", self._default_arrival_s), "arrival_s", 0.0)
        prompt_tokens = None
        if get("prompt_tokens") is None:
            prompt_len = integer(get("prompt_len"), "prompt_len", 1, MAX_LENGTH)
        else:
            prompt_tokens = token_ids(row, "prompt_tokens")
            prompt_len = len(prompt_tokens)
            if (given := get("prompt_len")) is not None and integer(given, "prompt_len", 1, MAX_LENGTH) != prompt_len:
                raise InputError(f"prompt_len is {given}; expected {prompt_len}, the number of prompt_tokens.")
        reserved = "output_len" if get("max_new_tokens") is None else "max_new_tokens"
        actual = "max_new_tokens" if get("output_len") is None else "output_len"
        max_new_tokens = integer(get(reserved), reserved, 1, MAX_LENGTH)
        output_len = integer(get(actual), actual, 1, MAX_LENGTH)
        if row.keys() <= self.number_keys:  # true of most rows in large traces
            return (TraceRequest(request_id, arrival_s, prompt_len, max_new_tokens, output_len),)
        priority, beam_width, task_id = get("priority"), get("beam_width"), get("lora_task_id")
        request_class, after, think_s = get("class"), get("after"), get("think_s")
        added_in, stopped_in, session_id = get("added_in"), get("stopped_in"), get("session_id")
        prefix_ids, prefix_lens = _prefix(row, prompt_len, output_len)
        return (
            TraceRequest(
                request_id,
                arrival_s,
                prompt_len,
                max_new_tokens,
                output_len,
                prompt_tokens,
                priority=DEFAULT_PRIORITY if priority is None else number(priority, "priority", 0.0, 1.0),
                beam_width=1 if beam_width is None else integer(beam_width, "beam_width", 1, MAX_LENGTH),
                lora_task_id=None if task_id is None else integer(task_id, "lora_task_id", 0, MAX_ID),
                stop_ids=() if get("stop_ids") is None else token_ids(row, "stop_ids"),
                prefix_ids=prefix_ids,
                prefix_lens=prefix_lens,
                request_class=None if request_class is None else text(request_class, "class"),
                after=None if after is None else integer(after, "after", 0, MAX_ID),
                think_s=0.0 if think_s is None else number(think_s, "think_s", 0.0),
                added_in=None if added_in is None else integer(added_in, "added_in", 0, MAX_ID),
                added_with=0 if (given := get("added_with")) is None else integer(given, "added_with", 0, MAX_LENGTH),
                stopped_in=None if stopped_in is None else integer(stopped_in, "stopped_in", 0, MAX_ID),
                also_after=_also_after(row),
                has_next_turn=_has_next_turn(row),
                session_id=None if session_id is None else integer(session_id, "session_id", 0, MAX_ID),
            ),
        )


def _also_after(row: Row) -> tuple[int, ...]:
    """`also_after` of a row in ifbbench's format."""
    if row.get("also_after") is None:
        return ()
    if row.get("after") is None:
        raise InputError("also_after is given without after; expected both, or `after` alone.")
    return integers(row["also_after"], "also_after", "request id", 0, MAX_ID)


def _has_next_turn(row: Row) -> bool:
    """`has_next_turn` of a row in ifbbench's format."""
    given = row.get("has_next_turn")
    if given is not None and not isinstance(given, bool):
        raise InputError(f"has_next_turn is {given!r}; expected true or false.")
    return bool(given)


def token_ids(row: Row, name: str) -> tuple[int, ...]:
    """The field `name`, a list of token ids."""
    return integers(row.get(name), name, "token id", 0, MAX_LENGTH)


def _prefix(row: Row, prompt_len: int, output_len: int) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
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
    if sum(lens) > prompt_len + output_len:
        raise InputError(
            f"prefix_lens adds up to {sum(lens)}; expected at most the {prompt_len + output_len} tokens of prompt and "
            "output."
        )
    return ids, lens


# Writing.

_encode = json.JSONEncoder(separators=(",", ":")).encode


def write_trace(requests: Iterable[TraceRequest], target: str | Path | TextIO, overwrite: bool = False) -> None:
    """Write `requests`, one after another, as ifbbench JSONL: `write_lines` of their lines."""
    write_lines(trace_lines(requests), target, overwrite)


def write_lines(lines: Iterable[str], target: str | Path | TextIO, overwrite: bool = False) -> None:
    """Write `lines` to a path or to an open text file.

    The file is made by `new_file`, with its errors.
    """
    if not isinstance(target, str | Path):
        target.writelines(lines)
        return
    with new_file(Path(target), overwrite) as writer:
        for line in lines:
            writer.write(line.encode())


def trace_lines(requests: Iterable[TraceRequest]) -> Iterator[str]:
    """The lines of `requests` in ifbbench JSONL."""
    return map(_line, requests)


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
    if request.also_after:
        record["also_after"] = request.also_after
    if request.has_next_turn:
        record["has_next_turn"] = True
    for name in ("session_id", "added_in", "added_with", "stopped_in"):
        if (value := getattr(request, name)) is not None and (name, value) != ("added_with", 0):
            record[name] = value
    return _encode(record) + "\n"
