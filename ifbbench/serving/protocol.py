"""Bodies of requests in the OpenAI API: their fields, ranges and meaning; the schema of the API is made from them."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from ifbbench.engine.arrays import FloatArray, IntArray
from ifbbench.engine.sampling_params import EarlyStopping, SamplingParams
from ifbbench.errors import InputError
from ifbbench.serving.library.request import InferenceRequest
from ifbbench.serving.texts import Texts
from ifbbench.settings.config import RunConfig
from ifbbench.settings.groups.replay import DEFAULT_PRIORITY

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_BIAS = 100.0
MAX_BIASES = 300_000
MAX_LOG_PROBS = 20
# A lower temperature is greedy: dividing logits by less would overflow.
MIN_TEMPERATURE = 1e-3
DEFAULT_COMPLETION_TOKENS = 16

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Stop = Annotated[str, Meta(min_length=1, max_length=1000)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]

# Fields of other servers that never change an answer.
WITHOUT_EFFECT = (
    "cache_control",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
# Fields of other servers that this one does not have, and the values with which they do not change an answer; null
# never does. Any other value is refused, and so is any field that is neither here nor read.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "annotations": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "include_obfuscation": (True, False),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "min_p": (0,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "use_beam_search": (False,),
}


class StreamOptions(Struct):
    """include_usage: a last chunk has the token counts.
    continuous_usage_stats: every chunk has them.
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class ServerRequest(Struct, kw_only=True):
    """What all bodies have in common.

    model: this server's, or the name of a LoRA adapter.
    """

    model: str | None = None

    @property
    def num_requests(self) -> int:
        """Requests of the engine that answer it."""
        return 0

    def forget_prompts(self) -> None:
        """Leave out what is long and has been read; the number of prompts stays."""


class Generating(ServerRequest, kw_only=True):
    """What completions and chats have in common. Fields that are left out, or null, have the settings of the server.

    n: choices, each with a seed of its own; with use_beam_search the beams.
    stop: texts that end a choice and are not part of it.
    ignore_eos: the model's end token does not end it.
    min_tokens: no end token before so many.
    return_token_ids: choices also have the ids of their tokens.
    prompt_logprobs: list the log-probability of each token of the prompt, and of so many of the most likely tokens
        there.
    priority: higher ones run first; 0.5 without.
    request_id: ends the id of the answer.
    """

    max_tokens: Count | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1000)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Meta(ge=-100.0, le=100.0)] | None = None
    early_stopping: Literal["always", "heuristic", "never"] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_BIASES)] | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOG_PROBS)] | None = None
    priority: Annotated[float, Meta(ge=-1e9, le=1e9)] | None = None
    request_id: Annotated[str, Meta(pattern=r"^[!-~]{1,256}$")] | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_prompts(self) -> int:
        """Prompts, each of which has its own choices."""
        return 1

    @property
    def num_requests(self) -> int:
        """One for each choice of each prompt; all beams are one."""
        return self.num_prompts * (1 if self.use_beam_search else self.num_choices)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def top_log_probs(self) -> int | None:
        """How many of the most likely tokens are listed with each token; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def scores_prompt(self) -> bool:
        """Whether the answer has log-probabilities of the prompt."""
        return self.prompt_logprobs is not None

    def prompts(self, texts: Texts) -> list[list[int]]:
        """The token ids of each prompt. InputError if one is empty or cannot be read."""
        raise NotImplementedError


class CompletionRequest(Generating, kw_only=True):
    """A text to continue.

    prompt: a text, the ids of its tokens, or a list of either.
    logprobs: how many of the most likely tokens to list with each token.
    echo: the text begins with the prompt; then max_tokens may be 0.
    """

    prompt: str | Annotated[list[str | int | list[TokenId]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOG_PROBS)] | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    echo: bool | None = None
    best_of: Choices | None = None

    @property
    def num_prompts(self) -> int:
        return 1 if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else len(self.prompt)

    @property
    def top_log_probs(self) -> int | None:
        return self.logprobs

    @property
    def max_new_tokens(self) -> int | None:
        if self.max_tokens == 0 and not self.echo:
            raise InputError("max_tokens: 0 leaves nothing to answer; expected at least 1, or echo.")
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def scores_prompt(self) -> bool:
        return self.prompt_logprobs is not None or (bool(self.echo) and self.logprobs is not None)

    def forget_prompts(self) -> None:
        self.prompt = [""] * self.num_prompts

    def prompts(self, texts: Texts) -> list[list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [texts.encode(prompt)]
        kinds = {type(one) for one in prompt}
        if len(kinds) > 1:
            raise InputError("prompt: a list of mixed types; expected texts, token ids, or lists of token ids.")
        if kinds == {int}:
            return [_checked_ids(prompt)]
        return [texts.encode(one) if isinstance(one, str) else _checked_ids(one) for one in prompt]


class TextPart(Struct):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Struct, omit_defaults=True):
    """A message of a conversation.

    content: a text, or several.
    name: name of the participant, for the chat template.
    """

    role: Annotated[str, Meta(min_length=1)]
    content: str | list[TextPart] | None = None
    name: str | None = None


class ChatRequest(Generating, kw_only=True):
    """A conversation to continue.

    logprobs: whether to list log-probabilities, and top_logprobs of how many of the most likely tokens.
    """

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOG_PROBS)] | None = None

    @property
    def top_log_probs(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise InputError("top_logprobs: needs logprobs to be true.")
            return None
        return self.top_logprobs or 0

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def forget_prompts(self) -> None:
        self.messages = []

    def prompts(self, texts: Texts) -> list[list[int]]:
        return [texts.encode_chat(msgspec.to_builtins(self.messages))]


class TokenizeRequest(ServerRequest, kw_only=True):
    """A text or a chat whose token ids are wanted.

    add_special_tokens: those of the model around a text; true without.
    return_token_strs: also the text of each token.
    """

    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def forget_prompts(self) -> None:
        self.prompt = self.messages = None

    def ids(self, texts: Texts) -> list[int]:
        """The token ids. InputError if there is neither a text nor a chat, or both."""
        if (self.prompt is None) == (self.messages is None):
            raise InputError("prompt: expected either prompt or messages.")
        if self.prompt is not None:
            return texts.tokenizer.encode(self.prompt, self.add_special_tokens is not False)
        return texts.encode_chat(msgspec.to_builtins(self.messages))


class DetokenizeRequest(ServerRequest, kw_only=True):
    """Token ids whose text is wanted."""

    tokens: list[TokenId]

    def forget_prompts(self) -> None:
        self.tokens = []


def _checked_ids(ids: Any) -> list[int]:
    if not ids:
        raise InputError("prompt: a list without token ids; expected at least one.")
    if not all(isinstance(one, int) and 0 <= one < 2**31 for one in ids):
        raise InputError("prompt: expected token ids of at least 0 and below 2**31.")
    return list(ids)


Body = TypeVar("Body", bound=ServerRequest)


def read_body(content: bytes | bytearray, body_type: type[Body], ignore_unknown_fields: bool = False) -> Body:
    """The body of a request. InputError if it is not valid, or has a field that would change the answer and that this
    server does not have."""
    try:
        fields = msgspec.json.decode(content)
        body = msgspec.convert(fields, body_type)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:  # also ValidationError
        problem, _, path = str(error).partition(" - at `$")
        raise InputError(f"{path.strip('.`') or 'body'}: {problem[:300]}.") from None
    if not ignore_unknown_fields:
        for path, name, value in _unread_fields(fields, body, ""):
            if value is not None and name not in WITHOUT_EFFECT and value not in NEUTRAL_VALUES.get(name, ()):
                raise InputError(
                    f"{path}: is not supported; leave it out, or start the server with --ignore_unknown_fields."
                )
    return body


def _unread_fields(fields: Any, read: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """The path, name and value of each field of an object and of the objects in it that `read`, which was made from
    them, does not have."""
    if isinstance(fields, list) and isinstance(read, list) and read and isinstance(read[0], Struct):
        for index, (of_one, one) in enumerate(zip(fields, read, strict=True)):
            yield from _unread_fields(of_one, one, f"{path}[{index}]")
    elif isinstance(read, Struct):
        prefix = f"{path}." if path else ""
        for name, value in fields.items():
            if name in read.__struct_fields__:
                yield from _unread_fields(value, getattr(read, name), prefix + name)
            else:
                yield f"{prefix}{name[:100]}", name, value


def check_supported(body: Generating, makes_tokens: bool) -> None:
    """InputError for fields that do not work together, or not with this engine. makes_tokens: whether a model runs."""
    if body.logit_bias and not makes_tokens:
        raise InputError("logit_bias: a simulated device has no logits; leave it out.")
    if isinstance(body, CompletionRequest) and (body.best_of or body.num_choices) != body.num_choices:
        raise InputError(
            f"best_of: {body.best_of} is not n ({body.num_choices}), and choices are not ranked; leave it out."
        )
    if body.use_beam_search and not makes_tokens:
        raise InputError("use_beam_search: a simulated device has no beams to compare; leave it out.")
    if body.scores_prompt and body.stream:
        name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise InputError(f"{name}: those of a prompt are complete only at the end; leave out stream.")
    if body.stream_options is not None and not body.stream:
        raise InputError("stream_options: only a stream has them; leave it out, or add stream.")
    if not body.use_beam_search:
        for name, value, neutral in (
            ("length_penalty", body.length_penalty, 1.0),
            ("early_stopping", body.early_stopping, None),
        ):
            if value not in (None, neutral):
                raise InputError(f"{name}: only beams have it; leave it out, or add use_beam_search.")
    if body.min_tokens and body.max_new_tokens is not None and body.min_tokens > body.max_new_tokens:
        raise InputError(f"min_tokens: {body.min_tokens} is more than the {body.max_new_tokens} tokens of the answer.")
    if body.use_beam_search and body.max_new_tokens == 0:
        raise InputError("max_tokens: beams need at least 1.")
    if body.use_beam_search and body.stream:
        raise InputError("use_beam_search: beams are ordered only at the end; leave out stream.")


def engine_requests(
    body: Generating,
    prompts: Sequence[IntArray],
    texts: Texts,
    config: RunConfig,
    end_tokens: tuple[int, ...],
    default_max_tokens: int,
    vocab_size: int | None,
    lora_task_id: int | None,
) -> list[InferenceRequest]:
    """The requests of the batch manager for `body`: of each prompt one, or with several seeds one for each choice.

    config: settings, with the defaults of sampling.
    end_tokens, vocab_size: facts of the model, None if none runs.
    lora_task_id: task of the adapter that `body` names.
    """
    top, with_beams = body.top_log_probs, bool(body.use_beam_search) and body.num_choices > 1
    asked, has_model = body.max_new_tokens, vocab_size is not None
    sampling = _sampling(body, config, vocab_size)
    stop_sequences = [sequence for stop in body.stops if (sequence := texts.stop_sequence(stop))]
    requests = []
    for tokens in prompts:
        for choice in range(1 if with_beams else body.num_choices):
            requests.append(
                InferenceRequest(
                    0,
                    tokens,
                    default_max_tokens if asked is None else max(asked, 1),
                    stop_ids=(*(() if body.ignore_eos else end_tokens), *(body.stop_token_ids or ())),
                    stop_sequences=stop_sequences,
                    sampling=replace(sampling, seed=sampling.seed + choice),
                    beam_width=body.num_choices if with_beams else 1,
                    # A stop text may also begin within a token, which only the text itself shows while it grows.
                    streaming=bool(body.stream or body.stops) and not with_beams,
                    return_log_probs=top is not None,
                    return_generation_logits=bool(top) and has_model,
                    return_context_logits=body.scores_prompt and has_model,
                    exclude_input_from_output=True,
                    priority=DEFAULT_PRIORITY if body.priority is None else body.priority,
                    lora_task_id=lora_task_id,
                )
            )
    return requests


def _sampling(body: Generating, config: RunConfig, vocab_size: int | None) -> SamplingParams:
    """The sampling of the first choice. A seed that the request leaves out is random."""
    if vocab_size is None:  # nothing is sampled
        return SamplingParams()
    temperature = config.temperature if body.temperature is None else body.temperature
    return SamplingParams(
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_k=config.top_k if body.top_k is None else max(body.top_k, 0),
        top_p=config.top_p if body.top_p is None else body.top_p,
        seed=secrets.randbits(62) if body.seed is None else body.seed,
        repetition_penalty=config.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty,
        length_penalty=config.length_penalty if body.length_penalty is None else body.length_penalty,
        early_stopping=EarlyStopping(body.early_stopping or config.early_stopping),
        presence_penalty=config.presence_penalty if body.presence_penalty is None else body.presence_penalty,
        frequency_penalty=config.frequency_penalty if body.frequency_penalty is None else body.frequency_penalty,
        min_length=config.min_length if body.min_tokens is None else body.min_tokens,
        embedding_bias=_bias(body.logit_bias, vocab_size) if body.logit_bias else None,
    )


def _bias(logit_bias: dict[str, float], vocab_size: int) -> FloatArray:
    """[vocabulary], what is added to each logit. Keys are token ids as text."""
    bias = np.zeros(vocab_size, np.float32)
    for key, value in logit_bias.items():
        if not key.isdecimal() or not key.isascii() or len(key) > 9 or int(key) >= vocab_size:
            raise InputError(f"logit_bias: {key[:20]!r} is not a token id; expected 0 to {vocab_size - 1}.")
        bias[int(key)] = min(max(value, -MAX_BIAS), MAX_BIAS)
    return bias
