"""Bodies of requests in the OpenAI API: their fields, ranges and meaning; the schema of the API is made from them."""

from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct, field
from msgspec.structs import asdict

from ifbbench.api.request import InferenceRequest
from ifbbench.config import DEFAULT_PRIORITY, RunConfig
from ifbbench.engine.active import FloatArray
from ifbbench.engine.sampling_params import EarlyStopping, SamplingParams
from ifbbench.errors import InputError
from ifbbench.serving.texts import Texts

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_BIAS = 100.0
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


class StreamOptions(Struct):
    """include_usage: a last chunk has the token counts. continuous_usage_stats: every chunk has them."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Generating(Struct, kw_only=True):
    """What completions and chats have in common. Fields that are left out, or null, have the settings of the server.

    n: choices, each with a seed of its own; with use_beam_search the beams. stop: texts that end a choice and are not
    part of it. ignore_eos: the model's end token does not end it. min_tokens: no end token before so many.
    return_token_ids: choices also have the ids of their tokens. prompt_logprobs: list the log-probability of each token
    of the prompt, and of so many of the most likely tokens there. priority: higher ones run first; 0.5 without. model:
    the name of a LoRA adapter uses it.
    """

    model: str | None = None
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
    logit_bias: dict[str, float] | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOG_PROBS)] | None = None
    priority: Annotated[float, Meta(ge=-1e9, le=1e9)] | None = None
    user: str | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

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

    prompt: a text, the ids of its tokens, or a list of either. logprobs: how many of the most likely tokens to list
    with each token. echo: the text begins with the prompt; then max_tokens may be 0.
    """

    prompt: str | Annotated[list[str | int | list[TokenId]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOG_PROBS)] | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    echo: bool | None = None
    best_of: Choices | None = None
    suffix: str | None = None

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


class Message(Struct):
    """A message of a conversation. content: a text, or parts of which those with `text` count."""

    role: Annotated[str, Meta(min_length=1)]
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(Generating, kw_only=True):
    """A conversation to continue. logprobs: whether to list log-probabilities, and top_logprobs of how many of the most
    likely tokens."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOG_PROBS)] | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = field(default=None)

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

    def prompts(self, texts: Texts) -> list[list[int]]:
        return [texts.encode_chat([asdict(message) for message in self.messages])]


def _checked_ids(ids: Any) -> list[int]:
    if not ids:
        raise InputError("prompt: a list without token ids; expected at least one.")
    if not all(isinstance(one, int) and 0 <= one < 2**31 for one in ids):
        raise InputError("prompt: expected token ids of at least 0 and below 2**31.")
    return list(ids)


def check_supported(body: Generating, makes_tokens: bool) -> None:
    """InputError for a field that would change the answer, and that this server does not have. makes_tokens: whether a
    model runs."""
    response_format = getattr(body, "response_format", None) or {}
    unsupported = {
        "logit_bias": bool(body.logit_bias) and not makes_tokens,
        "suffix": bool(getattr(body, "suffix", None)),
        "tools": bool(getattr(body, "tools", None)),
        "response_format": response_format.get("type", "text") != "text",
        "best_of": (getattr(body, "best_of", None) or body.num_choices) != body.num_choices,
    }
    for name, is_given in unsupported.items():
        if is_given:
            raise InputError(f"{name}: is not supported; leave it out.")
    if body.use_beam_search and not makes_tokens:
        raise InputError("use_beam_search: a simulated device has no beams to compare; leave it out.")
    if body.scores_prompt and body.stream:
        name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise InputError(f"{name}: those of a prompt are complete only at the end; leave out stream.")
    if body.use_beam_search and body.max_new_tokens == 0:
        raise InputError("max_tokens: beams need at least 1.")
    if body.use_beam_search and body.stream:
        raise InputError("use_beam_search: beams are ordered only at the end; leave out stream.")


def engine_requests(
    body: Generating, prompts: list[list[int]], texts: Texts, config: RunConfig, end_tokens: tuple[int, ...],
    default_max_tokens: int, vocab_size: int | None, lora_task_id: int | None,
) -> list[InferenceRequest]:  # fmt: skip
    """The requests of the batch manager for `body`: of each prompt one, or with several seeds one for each choice.

    config: has the defaults of sampling. end_tokens, vocab_size: of the model, None if none runs. lora_task_id: of the
    adapter that `body` names."""
    top, with_beams = body.top_log_probs, bool(body.use_beam_search) and body.num_choices > 1
    asked, has_model = body.max_new_tokens, vocab_size is not None
    stop_sequences = [sequence for stop in body.stops if (sequence := texts.stop_sequence(stop))]
    requests = []
    for tokens in prompts:
        for choice in range(1 if with_beams else body.num_choices):
            requests.append(InferenceRequest(
                0, tokens, default_max_tokens if asked is None else max(asked, 1),
                stop_ids=(*(() if body.ignore_eos else end_tokens), *(body.stop_token_ids or ())),
                stop_sequences=stop_sequences,
                sampling=_sampling(body, config, choice, vocab_size),
                beam_width=body.num_choices if with_beams else 1,
                # A stop text may also begin within a token, which only the text itself shows while it grows.
                streaming=bool(body.stream or body.stops) and not with_beams,
                return_log_probs=top is not None, return_generation_logits=bool(top) and has_model,
                return_context_logits=body.scores_prompt and has_model, exclude_input_from_output=True,
                priority=DEFAULT_PRIORITY if body.priority is None else body.priority, lora_task_id=lora_task_id,
            ))  # fmt: skip
    return requests


def _sampling(body: Generating, config: RunConfig, choice: int, vocab_size: int | None) -> SamplingParams:
    if vocab_size is None:  # nothing is sampled
        return SamplingParams()
    temperature = config.temperature if body.temperature is None else body.temperature
    return SamplingParams(
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_k=config.top_k if body.top_k is None else max(body.top_k, 0),
        top_p=config.top_p if body.top_p is None else body.top_p,
        seed=(config.seed if body.seed is None else body.seed) + choice,
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
