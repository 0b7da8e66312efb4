"""gptManagerBenchmark's dataset: one JSON document, `//` comments tolerated."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ifbbench.workload.columns import Recall
from ifbbench.workload.fields import MAX_ID, UnknownFormat, has, integer, json_object, number, token_ids
from ifbbench.workload.rows import Row, text_lines
from ifbbench.workload.trace import TraceRequest

_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*')
NO_LORA = -1


class GptManagerFormat:
    """`{"metadata": …, "samples": [{input_ids, output_len, task_id?, delay?}]}`, or the bare list of samples.

    `delay` is the gap in seconds since the sample before; without any, all requests come at once. `task_id` -1 is
    no LoRA. The samples record no reservation of their own: `max_new_tokens` is `output_len`.
    """

    name = "gptManagerBenchmark"
    row_name = "samples[{}]"

    def __init__(self) -> None:
        self._arrival_s = 0.0
        self._samples: list[Any] = []

    def rows(self, file: BinaryIO) -> Iterator[Row]:
        """Each sample; UnknownFormat if the document holds no list of samples."""
        text = "".join(text_lines(file))
        self._samples = samples(parse_commented_json(text) if text.strip() else [])
        for index, sample in enumerate(self._samples):
            yield index, index, sample

    def request(self, row: Any, index: int) -> TraceRequest:
        """The request of one sample; BadRow says what is wrong with it. To be called in the samples' order."""
        sample = json_object(row)
        if has(sample, "delay"):
            self._arrival_s += number(sample, "delay")
        prompt_tokens = token_ids(sample, "input_ids")
        output_len = integer(sample, "output_len")
        task_id = integer(sample, "task_id", NO_LORA, MAX_ID) if has(sample, "task_id") else NO_LORA
        return TraceRequest(
            request_id=index,
            arrival_s=self._arrival_s,
            prompt_len=len(prompt_tokens),
            max_new_tokens=output_len,
            output_len=output_len,
            prompt_tokens=prompt_tokens,
            lora_task_id=None if task_id == NO_LORA else task_id,
        )

    def recall(self, file: BinaryIO, path: Path) -> Recall:
        """The document has been parsed whole; its samples are kept."""
        file.close()
        return lambda index: self.request(self._samples[index], index)


def parse_commented_json(text: str) -> Any:
    """The JSON document in `text`, its `//` comments left out; UnknownFormat (with the line) if it is not JSON."""
    if "//" in text:
        text = _STRING_OR_COMMENT.sub(lambda match: match[0] if match[0].startswith('"') else "", text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnknownFormat(f"not valid JSON: {error}") from None


def samples(document: Any) -> list[Any]:
    """The list of samples in a dataset document; UnknownFormat if there is none, or if it is of something else."""
    if isinstance(document, dict) and "samples" not in document:
        raise UnknownFormat(f"an object with {', '.join(map(str, document)) or 'no keys'}")
    found = document["samples"] if isinstance(document, dict) else document
    if not isinstance(found, list):
        raise UnknownFormat("no list of samples")
    objects = [sample for sample in found if isinstance(sample, dict)]
    if objects and not any("input_ids" in sample or "output_len" in sample for sample in objects):
        raise UnknownFormat(f"samples with {', '.join(map(str, objects[0]))}")
    return found
