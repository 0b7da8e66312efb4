"""The APIs of endpoints: the body of a request, and what the events of its answer say of tokens.

Field names are those of OpenAI with the extensions that vLLM, SGLang and TensorRT-LLM share, and those of
tensorrtllm_backend behind Triton's generate extension.
"""

import json
from typing import Annotated, Any
from urllib.parse import quote

from msgspec import DecodeError, Meta, Raw, Struct, ValidationError
from msgspec.json import Decoder, encode

from ifbbench.endpoint.answer import PERHAPS, PERHAPS_END, UNKNOWN, Answer
from ifbbench.endpoint.connections import Connections
from ifbbench.endpoint.http import RequestFailed, message_of, printable
from ifbbench.errors import InputError
from ifbbench.settings.config import RunConfig
from ifbbench.settings.groups.execution import DEFAULT_MODEL
from ifbbench.workload.prompts import prompt_tokens
from ifbbench.workload.texts import load_tokenizer
from ifbbench.workload.trace import TraceRequest

DONE = b"[DONE]"
# Fields of --extra_body with which an answer may have more tokens than the trace says.
SETS_TOKENS = {"max_tokens", "max_completion_tokens", "request_output_len", "n", "best_of"}
NO_CHUNK = (DecodeError, ValidationError, UnicodeDecodeError, RecursionError)
# Words of one token in common vocabularies, for prompts without a tokenizer.
WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they")


# What a server may say: counts of tokens, far above those of any answer, and token ids.
MAX_TOKENS = 2**27
Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
TokenId = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


# OpenAI.


class _LogProbs(Struct):
    tokens: list[Raw] | None = None
    content: list[Raw] | None = None


class _Delta(Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[TokenId] | None = None
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None

    @property
    def output(self) -> str:
        """The text of a completion, or of a message and its reasoning."""
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or self.delta.reasoning or ""


class _Details(Struct):
    cached_tokens: Count | None = None


class _Usage(Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    message: str | None = None
    object: str | None = None


_decode_chunk = Decoder(_Chunk).decode


def read_openai(data: bytes, answer: Answer, now_s: float) -> None:
    """Take in an event of a completion or a chat. RequestFailed for an error, and for what is no such event."""
    if data == DONE:
        answer.is_ended = True
        return
    try:
        chunk = _decode_chunk(data)
    except NO_CHUNK as error:
        raise _malformed(data, error) from None
    if chunk.error is not None or chunk.object == "error":
        problem = data if chunk.error is None else encode(chunk.error)
        raise RequestFailed("server_error", message_of(problem.decode(errors="replace")))
    known = UNKNOWN if chunk.usage is None else _take_usage(chunk.usage, answer)
    for choice in chunk.choices:
        if choice.finish_reason is not None:
            answer.is_ended = True
        if choice.token_ids is not None:
            answer.ids += choice.token_ids
        if tokens := _tokens_of(choice, UNKNOWN if answer.has_unknown else known):
            answer.add(now_s, tokens, choice.output)


def _take_usage(usage: _Usage, answer: Answer) -> int:
    """Take in what a chunk says of all tokens so far. Returns how many of the output are not counted yet, UNKNOWN if
    it does not say."""
    if usage.prompt_tokens is not None:
        answer.prompt_tokens = usage.prompt_tokens
    if usage.prompt_tokens_details is not None:
        answer.cached_tokens = usage.prompt_tokens_details.cached_tokens
    if usage.completion_tokens is None:
        return UNKNOWN
    answer.output_tokens = usage.completion_tokens
    return usage.completion_tokens - answer.num_counted


def _tokens_of(choice: _Choice, known: int) -> int:
    """How many tokens a chunk has of `choice`: UNKNOWN, PERHAPS or PERHAPS_END if it does not say. known: by the usage
    in the chunk, negative if it does not say."""
    if choice.token_ids is not None:
        return len(choice.token_ids)
    if known >= 0:
        return known
    if choice.logprobs is not None:
        return len(choice.logprobs.tokens or choice.logprobs.content or ())
    if choice.output:
        return UNKNOWN
    if choice.delta is not None and choice.delta.role is not None:  # the first chunk of a chat
        return 0
    return PERHAPS if choice.finish_reason is None else PERHAPS_END


# Triton.


class _TritonChunk(Struct):
    text_output: str | None = None
    output_ids: list[TokenId] | TokenId | None = None
    error: str | None = None


_decode_triton = Decoder(_TritonChunk).decode


def read_triton(data: bytes, answer: Answer, now_s: float) -> None:
    """Take in an event of generate_stream. RequestFailed as `read_openai`."""
    try:
        chunk = _decode_triton(data)
    except NO_CHUNK as error:
        raise _malformed(data, error) from None
    if chunk.error is not None:
        raise RequestFailed("server_error", printable(chunk.error[:300]))
    if chunk.output_ids is not None:
        ids = [chunk.output_ids] if isinstance(chunk.output_ids, int) else chunk.output_ids
        answer.ids += ids
        if ids:
            answer.add(now_s, len(ids), chunk.text_output or "")
    elif chunk.text_output:
        answer.add(now_s, UNKNOWN, chunk.text_output)
    elif chunk.text_output is not None:
        answer.add(now_s, PERHAPS, "")
    answer.is_ended = True  # nothing but the end of the response ends it


def _malformed(data: bytes, error: Exception) -> RequestFailed:
    shown = printable(data[:80].decode(errors="replace"))
    return RequestFailed("malformed_stream", f"an event is no chunk of the API ({error}): {shown}")


# Bodies.


class EndpointApi:
    """The requests of one endpoint.

    model: the name that the server has for it.

    tokenizer: the tokenizer of --tokenizer.
    read: takes in an event of an answer.
    head: head of the requests, as HTTP.
    """

    def __init__(self, config: RunConfig, model: str, connections: Connections) -> None:
        self.model = model
        self.config = config
        self.is_triton = config.endpoint_type == "triton"
        self.is_chat = config.endpoint_type == "openai-chat"
        self.sends_text = prompt_form(config) == "text"
        self.tokenizer = None if config.tokenizer is None else load_tokenizer(config.tokenizer)
        path = "/v1/chat/completions" if self.is_chat else "/v1/completions"
        self.read = read_openai
        if self.is_triton:
            path, self.read = f"/v2/models/{quote(model, safe='')}/generate_stream", read_triton
        self.head = connections.head(path)
        self._extra: dict[str, Any] = json.loads(config.extra_body or "{}")
        vocab_size = config.endpoint_vocab_size if self.tokenizer is None else self.tokenizer.get_vocab_size()
        self._vocab_size = vocab_size

    def max_tokens(self, row: TraceRequest) -> int:
        """The most tokens that an answer may have."""
        return MAX_TOKENS if SETS_TOKENS & self._extra.keys() else row.output_len

    def body(self, row: TraceRequest) -> bytes:
        """The body of one request."""
        fields = self._of_triton(row) if self.is_triton else self._of_openai(row)
        for name, value in self._extra.items():
            if value is None:
                fields.pop(name, None)
            elif isinstance(value, dict) and isinstance(fields.get(name), dict):
                fields[name] = fields[name] | value
            else:
                fields[name] = value
        return encode(fields)

    def _of_openai(self, row: TraceRequest) -> dict[str, Any]:
        config, has_extensions = self.config, self.config.ignore_eos
        options: dict[str, Any] = {"include_usage": True}
        if has_extensions:
            options["continuous_usage_stats"] = True
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": row.output_len,
            "temperature": config.temperature,
            "stream": True,
            "stream_options": options,
        }
        if config.temperature:
            fields |= {"top_p": config.top_p, "seed": config.seed + row.request_id}
        if self.is_chat:
            fields["messages"] = [{"role": "user", "content": self._text(row)}]
        else:
            fields["prompt"] = self._text(row) if self.sends_text else self._ids(row)
        if has_extensions:
            fields["ignore_eos"] = True
            if config.top_k and config.temperature:
                fields["top_k"] = config.top_k
            if config.repetition_penalty != 1.0:
                fields["repetition_penalty"] = config.repetition_penalty
            if row.stop_ids:
                fields["stop_token_ids"] = list(row.stop_ids)
        if config.responses_json is not None:
            # trtllm-serve has ids in the place of text, other servers beside it.
            fields |= {"detokenize": False} if config.endpoint_type == "trtllm-serve" else {"return_token_ids": True}
        return fields

    def _of_triton(self, row: TraceRequest) -> dict[str, Any]:
        config, length = self.config, row.output_len
        fields: dict[str, Any] = {}
        if config.temperature:
            fields |= {"temperature": config.temperature, "top_p": config.top_p, "seed": config.seed + row.request_id}
        if self.sends_text:
            fields |= {
                "text_input": self._text(row),
                "max_tokens": length,
                "stream": True,
                "bad_words": "",
                "stop_words": "",
            }
            top_k = "top_k"
        else:
            fields |= {
                "input_ids": self._ids(row),
                "input_lengths": row.prompt_len,
                "request_output_len": length,
                "streaming": True,
            }
            top_k = "runtime_top_k"
        if config.top_k and config.temperature:
            fields[top_k] = config.top_k
        if config.repetition_penalty != 1.0:
            fields["repetition_penalty"] = config.repetition_penalty
        if config.ignore_eos:
            # The name in earlier and in later models; Triton takes the other one for a parameter.
            fields |= {"min_length": length, "min_tokens": length}
        return fields

    def _ids(self, row: TraceRequest) -> list[int]:
        vocab_size = self._vocab_size if row.prompt_tokens is None else 2**31
        ids: list[int] = prompt_tokens(row, vocab_size, self.config.seed).tolist()
        return ids

    def _text(self, row: TraceRequest) -> str:
        ids = self._ids(row)
        if self.tokenizer is None:
            return " ".join([WORDS[one % len(WORDS)] for one in ids])
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text


def prompt_form(config: RunConfig) -> str:
    """How prompts are sent: `tokens` or `text`. InputError if the API has no such form."""
    form = config.endpoint_prompts
    if config.endpoint_type == "openai-chat":
        if form == "tokens":
            raise InputError("--endpoint_prompts tokens: a chat has text; leave it out, or use --endpoint_type openai.")
        return "text"
    return form or ("text" if config.endpoint_type == "triton" else "tokens")


def default_model(config: RunConfig) -> str | None:
    """The name that the settings give the model; None if the server is to be asked."""
    if config.model != DEFAULT_MODEL:
        return config.model
    if config.endpoint_type != "triton":
        return None
    return "ensemble" if prompt_form(config) == "text" else "tensorrt_llm"
