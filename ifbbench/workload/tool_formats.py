"""Formats of other benchmark tools: what they are given (data sets of prompts) and what they report (requests)."""

from collections.abc import Collection, Sequence
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.fields import integer, number, unexpected
from ifbbench.workload.formats import ReadOptions, Row, TraceFormat, token_ids, value_at
from ifbbench.workload.recorded_formats import MILLISECONDS, SessionTimes, Times, hashed_prompt
from ifbbench.workload.texts import PromptTexts, chat_text, content_text
from ifbbench.workload.trace import MAX_ID, MAX_LENGTH, PREFIX_BLOCK, TraceRequest

NO_LORA = -1
ANSWERER = "assistant"
# The roles of turns of a conversation that are no answers.
ASKERS = ("user", "human", "system", "developer", "tool", "function")
# The lowest status of HTTP that is an error.
BAD_REQUEST = 400
# Time stamps since 1970 from here on are milliseconds: as seconds, this is the year 5138.
MILLISECOND_STAMPS = 1e11


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
        return (
            TraceRequest(
                index,
                self._arrival_s,
                len(tokens),
                output_len,
                output_len,
                tokens,
                lora_task_id=None if task_id == NO_LORA else task_id,
            ),
        )


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

    def chat(self, messages: Any, name: str, row: Row, limit: str) -> tuple[int, tuple[int, ...] | None, int]:
        """Length and token ids of the prompt of a chat, and its output length, which is the field `limit` of `row`.

        In a log, which has no such field, the last message is the answer of the assistant: it is the output, and the
        messages before it are the prompt."""
        is_log = row.get(limit) is None and isinstance(messages, list) and len(messages) > 1
        if is_log and isinstance(messages[-1], dict) and messages[-1].get("role") == ANSWERER:
            prompt_len, tokens = self.texts.prompt(chat_text(messages[:-1], name), name)
            position = f"{name}[{len(messages) - 1}].content"
            answer = content_text(messages[-1].get("content"), position)
            return prompt_len, tokens, self.texts.output_len(answer, position)
        prompt_len, tokens = self.texts.prompt(chat_text(messages, name), name)
        return prompt_len, tokens, self.output_len(row, limit)


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
    """ShareGPT: a JSON list of {"conversations": [{"from", "value"}, …]}; also LMSYS-Chat-1M and WildChat: rows with
    `conversation`, a list of {"role", "content"}, and WildChat's `timestamp` of a conversation.

    A conversation gives one request, as in other benchmarks: the answer is the first turn behind the first one that is
    not of a user, the system or a tool, and the prompt is all before it, mostly one turn. Those without an answer are
    left out.
    """

    needs = ("conversations|conversation",)
    left_out = "conversations without an answer"

    def __init__(self, keys: Collection[str], options: ReadOptions) -> None:
        super().__init__(keys, options)
        self._has_times = "conversation" in keys and "timestamp" in keys
        self._times: Times | None = None

    def requests(self, row: Row, index: int) -> tuple[TraceRequest, ...]:
        name = "conversations" if row.get("conversation") is None else "conversation"
        turns = row.get(name)
        if not isinstance(turns, list):
            raise unexpected(name, turns, "a list of turns")
        for position, turn in enumerate(turns):
            if not isinstance(turn, dict):
                raise unexpected(f"{name}[{position}]", turn, "an object with from and value, or role and content")
        answer = next((number for number, turn in enumerate(turns) if number and _role(turn) not in ASKERS), None)
        if answer is None:
            return ()
        key = "value" if "value" in turns[0] else "content"
        texts = [
            (turn.get("value", turn.get("content")), f"{name}[{number}].{key}")
            for number, turn in enumerate(turns[: answer + 1])
        ]
        prompt = "\n".join(filter(None, (content_text(content, where) for content, where in texts[:-1])))
        if texts[-1][0] == "" or prompt == "":
            return ()
        prompt_len, tokens = self.texts.prompt(prompt, texts[0][1])
        output_len = self.texts.output_len(*texts[-1])
        arrival_s = self._arrival_s(row.get("timestamp")) if self._has_times else 0.0
        return (TraceRequest(index, arrival_s, prompt_len, output_len, output_len, tokens),)

    def _arrival_s(self, stamp: Any) -> float:
        if self._times is None:
            is_milliseconds = isinstance(stamp, int | float) and stamp >= MILLISECOND_STAMPS
            self._times = Times("timestamp", MILLISECONDS if is_milliseconds else 1)
        return self._times.seconds(stamp)


def _role(turn: Row) -> Any:
    """The role of a turn in lower case, None if it has none."""
    role = turn.get("from", turn.get("role"))
    return role.lower() if isinstance(role, str) else None


class OpenAiBatchFormat(TextFormat):
    """The input of OpenAI's batch API: JSONL with custom_id, method, url, and a body with messages, prompt or input."""

    needs: tuple[str, ...] = ("custom_id", "body")

    def requests(self, row: Row, index: int) -> Sequence[TraceRequest]:
        return (self.api_request(row.get("body"), "body", index, 0.0),)

    def api_request(self, body: Any, name: str, index: int, arrival_s: float) -> TraceRequest:
        """The request with the body `body` of an OpenAI-style API, the field `name`."""
        if not isinstance(body, dict):
            raise unexpected(name, body, "an object")
        limit = next(
            (one for one in ("max_completion_tokens", "max_output_tokens", "max_tokens") if body.get(one) is not None),
            "max_tokens",
        )
        chat = next(
            (
                one
                for one in ("messages", "input")
                if isinstance(body.get(one), list) and any(isinstance(item, dict) for item in body[one])
            ),
            None,
        )
        output, limit = {f"{name}.{limit}": body.get(limit)}, f"{name}.{limit}"
        if chat is not None:
            prompt_len, tokens, output_len = self.chat(body[chat], f"{name}.{chat}", output, limit)
        else:
            field = next((one for one in ("prompt", "input", "messages") if body.get(one) is not None), "messages")
            prompt_len, tokens = self.prompt(body.get(field), f"{name}.{field}")
            output_len = self.output_len(output, limit)
        return TraceRequest(index, arrival_s, prompt_len, output_len, output_len, tokens)


class OpenAiBatchOutputFormat(TraceFormat):
    """The output of OpenAI's batch API, and of vLLM's `run-batch`: JSONL with custom_id and a response, whose body has
    the `usage` of the request: prompt_tokens and completion_tokens, or input_tokens and output_tokens.

    The requests of a batch are submitted together: all arrive at once. Failed ones are left out.
    """

    needs = ("custom_id", "response")

    def requests(self, row: Row, index: int) -> tuple[TraceRequest, ...]:
        status = value_at(row, "response.status_code")
        if row.get("error") is not None or (isinstance(status, int) and status >= BAD_REQUEST):
            return ()
        usage = value_at(row, "response.body.usage")
        if not isinstance(usage, dict):
            raise unexpected("response.body.usage", usage, "an object with prompt_tokens and completion_tokens")
        names = [("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens")]
        prompt, output = next((pair for pair in names if usage.get(pair[0]) is not None), names[0])
        prompt_len = integer(usage.get(prompt), f"response.body.usage.{prompt}", 1, MAX_LENGTH)
        output_len = integer(usage.get(output), f"response.body.usage.{output}", 1, MAX_LENGTH)
        return (TraceRequest(index, 0.0, prompt_len, output_len, output_len),)


class AiperfFormat(OpenAiBatchFormat):
    """Inputs of genai-perf and aiperf: JSONL with text, text_input, texts, messages or payload, and perhaps
    output_length, timestamp or delay (ms) and session_id; sessions as one row with `turns`, or as `payloads` in
    aiperf's inputs.json. In genai-perf's inputs.json, the `payload` of a row, its timestamp and its delay are lists of
    one. Rows may have input_length and hash_ids instead, as in Mooncake's traces.

    Rows of `messages` without output_length are also those of chat logs, whose last message is the answer.

    A delay counts from the arrival of the turn before, because the answer's end is not known before the replay.
    """

    needs = ("text|text_input|texts|messages|payload|turns|payloads",)

    def __init__(self, keys: Collection[str], options: ReadOptions) -> None:
        super().__init__(keys, options)
        self._times = SessionTimes(keys)

    def requests(self, row: Row, index: int) -> Sequence[TraceRequest]:
        name = next((one for one in ("turns", "payloads") if row.get(one) is not None), None)
        if isinstance(row.get("payload"), list):
            only = {key: value[0] for key, value in row.items() if isinstance(value, list) and len(value) == 1}
            row = {**row, **only}
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
            found.append(
                self._turn(turn, number, arrival_s)
                if name == "turns"
                else self.api_request(turn, f"{name}[{position}]", number, arrival_s)
            )
        return found

    def _turn(self, row: Row, index: int, arrival_s: float) -> TraceRequest:
        if row.get("payload") is not None:
            return self.api_request(row["payload"], "payload", index, arrival_s)
        if row.get("messages") is not None:
            prompt_len, tokens, output_len = self.chat(row["messages"], "messages", row, "output_length")
            return TraceRequest(index, arrival_s, prompt_len, output_len, output_len, tokens)
        if row.get("input_length") is not None:
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
    "request_start_time",
    "start_time",
    "info.timings.request_start",
    "info.timings.resolve_start",
    "scheduler_info.request_timings.request_start",
    "scheduler_info.started_at",
)
"""Where versions 0.2 to 0.5 record the start of a request."""


def _guidellm_start(row: Row) -> tuple[str, Any]:
    for path in _GUIDELLM_STARTS:
        if (value := value_at(row, path)) is not None:
            return path, value
    return _GUIDELLM_STARTS[0], None
