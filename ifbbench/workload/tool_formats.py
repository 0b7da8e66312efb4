"""Formats of other benchmark tools: what they are given (data sets of prompts) and what they report (requests)."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ifbbench.errors import InputError
from ifbbench.fields import integer, number, unexpected
from ifbbench.workload.formats import ReadOptions, Row, TraceFormat, token_ids
from ifbbench.workload.recorded_formats import SessionTimes, Times, hashed_prompt
from ifbbench.workload.texts import PromptTexts, chat_text
from ifbbench.workload.trace import MAX_ID, MAX_LENGTH, PREFIX_BLOCK, TraceRequest

NO_LORA = -1
ASKERS, ANSWERERS = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard", "model")


class GptManagerFormat(TraceFormat):
    """gptManagerBenchmark's dataset: JSON `{"metadata": …, "samples": [{input_ids, output_len, task_id?, delay?}]}`, or
    the list of samples alone.

    `delay` is the gap in seconds since the sample before; without any, all requests arrive at once. `task_id` -1 is no
    LoRA. The samples record no reservation: `max_new_tokens` is `output_len`.
    """

    needs = ("input_ids", "output_len")

    def __init__(self, keys: Collection[str], options: ReadOptions) -> None:
        super().__init__(keys, options)
        self._arrival_s = 0.0

    def requests(self, row: Row, index: int) -> tuple[TraceRequest]:
        if (delay := row.get("delay")) is not None:
            self._arrival_s += number(delay, "delay", 0.0)
        tokens = token_ids(row, "input_ids")
        output_len = self.output_len(row, "output_len")
        task_id = NO_LORA if (given := row.get("task_id")) is None else integer(given, "task_id", NO_LORA, MAX_ID)
        return (TraceRequest(
            index, self._arrival_s, len(tokens), output_len, output_len, tokens,
            lora_task_id=None if task_id == NO_LORA else task_id,
        ),)  # fmt: skip


class TextFormat(TraceFormat):
    """Rows with prompts as text; all arrive at once unless a subclass says when."""

    def __init__(self, keys: Collection[str], options: ReadOptions) -> None:
        super().__init__(keys, options)
        self.texts = PromptTexts(options)

    def notes(self) -> list[str]:
        return self.texts.notes()

    def prompt(self, value: Any, name: str) -> tuple[int, tuple[int, ...] | None]:
        """Length and token ids of a prompt: a text, a list of token ids, or a list of one text."""
        if isinstance(value, list) and value and isinstance(value[0], str):
            if len(value) > 1:
                raise InputError(f"{name} has {len(value)} texts; expected one prompt a request.")
            value = value[0]
        if isinstance(value, list):
            tokens = token_ids({name: value}, name)
            return len(tokens), tokens
        return self.texts.prompt(value, name)


class TrtllmBenchFormat(TextFormat):
    """trtllm-bench's dataset: JSONL with task_id, output_tokens, and prompt, input_ids or logits (token ids too).

    `task_id` numbers the rows; the LoRA task of a row is `lora_request.lora_int_id`.
    """

    needs = ("task_id", "prompt|input_ids|logits", "output_tokens")

    def requests(self, row: Row, index: int) -> tuple[TraceRequest]:
        name = next((one for one in ("input_ids", "logits") if row.get(one) is not None), None)
        if name is None:
            prompt_len, tokens = self.texts.prompt(row.get("prompt"), "prompt")
        else:
            tokens = token_ids(row, name)
            prompt_len = len(tokens)
        output_len = self.output_len(row, "output_tokens")
        lora, task_id = row.get("lora_request"), None
        if lora is not None:
            if not isinstance(lora, dict):
                raise unexpected("lora_request", lora, "an object with lora_int_id")
            task_id = integer(lora.get("lora_int_id"), "lora_request.lora_int_id", 0, MAX_ID)
        return (TraceRequest(index, 0.0, prompt_len, output_len, output_len, tokens, lora_task_id=task_id),)


class VllmDatasetFormat(TextFormat):
    """`vllm bench serve --dataset-name custom`: JSONL with prompt and perhaps output_tokens."""

    needs = ("prompt",)

    def requests(self, row: Row, index: int) -> tuple[TraceRequest]:
        prompt_len, tokens = self.prompt(row.get("prompt"), "prompt")
        output_len = self.output_len(row, "output_tokens")
        return (TraceRequest(index, 0.0, prompt_len, output_len, output_len, tokens),)


class ShareGptFormat(TextFormat):
    """ShareGPT: a JSON list of {"conversations": [{"from", "value"}, …]}.

    As in other benchmarks, a conversation gives one request: its first two turns are the prompt and the answer. Those
    without an answer are left out.
    """

    needs = ("conversations",)
    left_out = "conversations without an answer"

    def requests(self, row: Row, index: int) -> tuple[TraceRequest, ...]:
        turns = row.get("conversations")
        if not isinstance(turns, list):
            raise unexpected("conversations", turns, "a list of turns")
        for position, turn in enumerate(turns):
            if not isinstance(turn, dict):
                raise unexpected(f"conversations[{position}]", turn, "an object with from and value")
        if len(turns) < 2:
            return ()
        prompt, answer = (turn.get("value", turn.get("content")) for turn in turns[:2])
        if answer == "" or prompt == "":
            return ()
        prompt_len, tokens = self.texts.prompt(prompt, "conversations[0].value")
        output_len = self.texts.output_len(answer, "conversations[1].value")
        return (TraceRequest(index, 0.0, prompt_len, output_len, output_len, tokens),)


class OpenAiBatchFormat(TextFormat):
    """The input of OpenAI's batch API: JSONL with custom_id, method, url, and a body with messages, prompt or input."""

    needs: tuple[str, ...] = ("custom_id", "body")

    def requests(self, row: Row, index: int) -> Sequence[TraceRequest]:
        return (self.api_request(row.get("body"), "body", index, 0.0),)

    def api_request(self, body: Any, name: str, index: int, arrival_s: float) -> TraceRequest:
        """The request with the body `body` of an OpenAI-style API, the field `name`."""
        if not isinstance(body, dict):
            raise unexpected(name, body, "an object")
        limit = next((one for one in ("max_completion_tokens", "max_output_tokens", "max_tokens")
                      if body.get(one) is not None), "max_tokens")  # fmt: skip
        chat = next((one for one in ("messages", "input") if isinstance(body.get(one), list)
                     and any(isinstance(item, dict) for item in body[one])), None)  # fmt: skip
        if chat is not None:
            prompt_len, tokens = self.texts.prompt(chat_text(body[chat], f"{name}.{chat}"), f"{name}.{chat}")
        else:
            field = next((one for one in ("prompt", "input", "messages") if body.get(one) is not None), "messages")
            prompt_len, tokens = self.prompt(body.get(field), f"{name}.{field}")
        output_len = self.output_len({f"{name}.{limit}": body.get(limit)}, f"{name}.{limit}")
        return TraceRequest(index, arrival_s, prompt_len, output_len, output_len, tokens)


class AiperfFormat(OpenAiBatchFormat):
    """Inputs of genai-perf and aiperf: JSONL with text, text_input, texts, messages or payload, and perhaps
    output_length, timestamp or delay (ms) and session_id; sessions as one row with `turns`, or as `payloads` in
    aiperf's inputs.json. Rows may have input_length and hash_ids instead, as in Mooncake's traces.

    A delay counts from the arrival of the turn before, because the answer's end is not known before the replay.
    """

    needs = ("text|text_input|texts|messages|payload|turns|payloads",)

    def __init__(self, keys: Collection[str], options: ReadOptions) -> None:
        super().__init__(keys, options)
        self._times = SessionTimes(keys)

    def requests(self, row: Row, index: int) -> Sequence[TraceRequest]:
        name = next((one for one in ("turns", "payloads") if row.get(one) is not None), None)
        if name is None:
            return (self._turn(row, index, self._times.seconds(row)),)
        turns, session = row[name], row.get("session_id", f"row {index}")
        if not isinstance(turns, list) or not turns:
            raise unexpected(name, turns, "a list of at least one turn")
        found = []
        for position, turn in enumerate(turns):
            if not isinstance(turn, dict):
                raise unexpected(f"{name}[{position}]", turn, "an object")
            arrival_s = self._times.seconds(turn, session)
            number = index + position
            found.append(self._turn(turn, number, arrival_s) if name == "turns"
                         else self.api_request(turn, f"{name}[{position}]", number, arrival_s))  # fmt: skip
        return found

    def _turn(self, row: Row, index: int, arrival_s: float) -> TraceRequest:
        if row.get("payload") is not None:
            return self.api_request(row["payload"], "payload", index, arrival_s)
        if row.get("messages") is not None:
            prompt_len, tokens = self.texts.prompt(chat_text(row["messages"], "messages"), "messages")
        elif row.get("input_length") is not None:
            prompt_len, hash_ids = hashed_prompt(row, PREFIX_BLOCK, needs_ids=False)
            output_len = self.output_len(row, "output_length")
            return TraceRequest(index, arrival_s, prompt_len, output_len, output_len, prefix_ids=hash_ids)
        else:
            name = next((one for one in ("text_input", "texts") if row.get(one) is not None), "text")
            value = row.get(name)
            if name == "texts" and isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
                value = value[0].get("contents", value[0].get("text"))  # a named text, with its contents in a list
            prompt_len, tokens = self.prompt(value, name)
        output_len = self.output_len(row, "output_length")
        return TraceRequest(index, arrival_s, prompt_len, output_len, output_len, tokens)


# Results: the requests that a tool measured, as a trace.


class VllmResultFormat(TraceFormat):
    """`vllm bench serve --save-result --save-detailed`, also SGLang's: JSON with input_lens, output_lens, and perhaps
    start_times (seconds), one value a request.

    Failed requests have an error or no output; they are left out. Without start_times all requests arrive at once.
    """

    needs = ("input_lens", "output_lens")

    def __init__(self, keys: Collection[str], options: ReadOptions) -> None:
        super().__init__(keys, options)
        self._times = Times("start_times") if "start_times" in keys else None

    def requests(self, row: Row, index: int) -> tuple[TraceRequest, ...]:
        if row.get("errors") or row.get("output_lens") == 0:
            return ()
        arrival_s = 0.0 if self._times is None else self._times.seconds(row.get("start_times"))
        prompt_len = integer(row.get("input_lens"), "input_lens", 1, MAX_LENGTH)
        output_len = integer(row.get("output_lens"), "output_lens", 1, MAX_LENGTH)
        return (TraceRequest(index, arrival_s, prompt_len, output_len, output_len),)


class GuidellmFormat(TraceFormat):
    """guidellm's report: JSON with benchmarks[].requests of successful, incomplete and errored ones, each with
    prompt_tokens, output_tokens and the time of its start.

    The requests of all benchmarks of the report are one trace. Those that are not successful are left out. Times count
    from the first request; without any, all requests arrive at once.
    """

    needs = ("prompt_tokens", "output_tokens")

    def __init__(self, keys: Collection[str], options: ReadOptions) -> None:
        super().__init__(keys, options)
        self._times: Times | None = None
        self._has_times: bool | None = None

    def requests(self, row: Row, index: int) -> tuple[TraceRequest, ...]:
        if row.get("status", "successful") not in ("successful", "completed"):
            return ()
        prompt_len = integer(row.get("prompt_tokens"), "prompt_tokens", 1, MAX_LENGTH)
        output_len = integer(row.get("output_tokens"), "output_tokens", 1, MAX_LENGTH)
        name, start_s = _guidellm_start(row)
        if self._has_times is None:
            self._has_times, self._times = start_s is not None, Times(name)
        arrival_s = self._times.seconds(start_s) if self._has_times and self._times is not None else 0.0
        return (TraceRequest(index, arrival_s, prompt_len, output_len, output_len),)


_GUIDELLM_STARTS = (
    "request_start_time", "start_time", "info.timings.request_start", "info.timings.resolve_start",
    "scheduler_info.request_timings.request_start", "scheduler_info.started_at",
)  # fmt: skip
"""Where versions 0.2 to 0.5 record the start of a request."""


def _guidellm_start(row: Row) -> tuple[str, Any]:
    for path in _GUIDELLM_STARTS:
        value: Any = row
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            return path, value
    return _GUIDELLM_STARTS[0], None
