"""ifbbench's own trace format: one JSON object a line. `write_trace` and `JsonlFormat` are each other's inverse."""

import json
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ifbbench.compressed import open_to_write
from ifbbench.config import DEFAULT_PRIORITY
from ifbbench.errors import InputError
from ifbbench.workload.columns import Recall, has_more
from ifbbench.workload.fields import MAX_ID, BadRow, has, integer, json_object, number, token_ids
from ifbbench.workload.prefix_fields import prefix_fields
from ifbbench.workload.rows import LINE, Row, stored_lines
from ifbbench.workload.stored_rows import StoredRows
from ifbbench.workload.trace import TraceRequest

NUMBERS = frozenset({"request_id", "arrival_s", "prompt_len", "max_new_tokens", "output_len"})
_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().decode


class JsonlFormat:
    """Rows with `arrival_s` (seconds), `prompt_tokens` or `prompt_len`, and `output_len` or `max_new_tokens`.

    Either of the last two stands in for the other. Optional: `request_id` (default: the row's number, from 0),
    `priority`, `beam_width`, `lora_task_id`, `stop_ids`; beside `prompt_len`, `prefix_ids` and `prefix_lens`. Other
    keys are ignored.
    """

    name = "ifbbench"
    row_name = LINE

    def rows(self, file: BinaryIO) -> Iterator[Row]:
        """Each line that is not blank."""
        return stored_lines(file)

    def request(self, row: Any, index: int) -> TraceRequest:
        """The request of one line; BadRow says what is wrong with it."""
        record = json_object(parse_json(row))
        request_id = integer(record, "request_id", 0, MAX_ID) if has(record, "request_id") else index
        arrival_s = number(record, "arrival_s")
        prompt_tokens = token_ids(record, "prompt_tokens") if has(record, "prompt_tokens") else None
        prompt_len = _prompt_len(record, prompt_tokens)
        reserved, actual = "max_new_tokens", "output_len"
        max_new_tokens = integer(record, reserved if has(record, reserved) else actual)
        output_len = integer(record, actual if has(record, actual) else reserved)
        if record.keys() <= NUMBERS:  # most rows are no more than that, and there are many
            return TraceRequest(request_id, arrival_s, prompt_len, max_new_tokens, output_len)
        prefix_ids, prefix_lens = prefix_fields(record, prompt_len)
        return TraceRequest(
            request_id,
            arrival_s,
            prompt_len,
            max_new_tokens,
            output_len,
            prompt_tokens=prompt_tokens,
            priority=number(record, "priority", 0.0, 1.0) if has(record, "priority") else DEFAULT_PRIORITY,
            beam_width=integer(record, "beam_width") if has(record, "beam_width") else 1,
            lora_task_id=integer(record, "lora_task_id", 0, MAX_ID) if has(record, "lora_task_id") else None,
            stop_ids=token_ids(record, "stop_ids") if has(record, "stop_ids") else (),
            prefix_ids=prefix_ids,
            prefix_lens=prefix_lens,
        )

    def recall(self, file: BinaryIO, path: Path) -> Recall:
        """Reads lines again."""
        return StoredRows(file, partial(self.request, index=0), path)


def parse_json(text: str) -> Any:
    """The JSON value in `text`, or BadRow."""
    try:
        return _decode(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"not valid JSON ({error}); expected one JSON object") from None


def _prompt_len(record: Any, prompt_tokens: tuple[int, ...] | None) -> int:
    if prompt_tokens is None:
        return integer(record, "prompt_len")
    if has(record, "prompt_len") and integer(record, "prompt_len") != len(prompt_tokens):
        raise BadRow(
            f"field 'prompt_len' is {record['prompt_len']}, but 'prompt_tokens' has {len(prompt_tokens)} ids; "
            "expected them to agree"
        )
    return len(prompt_tokens)


def write_trace(requests: Iterable[TraceRequest], target: str | Path | TextIO, overwrite: bool = False) -> None:
    """Write `requests`, one after another, as ifbbench JSONL to a path or to an open text file.

    The path's folders are made; a file whose name ends in .gz is compressed.

    InputError if the path exists and `overwrite` is not set, or cannot be written.
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
    if not has_more(request):
        return (
            f'{{"request_id":{request.request_id},"arrival_s":{request.arrival_s!r},"prompt_len":{request.prompt_len},'
            f'"max_new_tokens":{request.max_new_tokens},"output_len":{request.output_len}}}\n'
        )
    record: dict[str, Any] = {"request_id": request.request_id, "arrival_s": request.arrival_s}
    if request.prompt_tokens is None:
        record["prompt_len"] = request.prompt_len
    else:
        record["prompt_tokens"] = request.prompt_tokens
    if request.prefix_ids is not None:
        record["prefix_ids"] = request.prefix_ids
    if request.prefix_lens is not None:
        record["prefix_lens"] = request.prefix_lens
    record |= {"max_new_tokens": request.max_new_tokens, "output_len": request.output_len}
    if request.priority != DEFAULT_PRIORITY:
        record["priority"] = request.priority
    if request.beam_width != 1:
        record["beam_width"] = request.beam_width
    if request.lora_task_id is not None:
        record["lora_task_id"] = request.lora_task_id
    if request.stop_ids:
        record["stop_ids"] = request.stop_ids
    return _encode(record) + "\n"
