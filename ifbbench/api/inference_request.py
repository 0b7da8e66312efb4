"""A request as a client makes it, and its way into the engine."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ifbbench.config import DEFAULT_PRIORITY
from ifbbench.engine.kv_cache.eviction import NO_RETENTION, Retention
from ifbbench.engine.request import Request
from ifbbench.engine.request_table import IntArray
from ifbbench.engine.reuse_tokens import ReuseIdentity
from ifbbench.engine.sampling_params import GREEDY, EarlyStopping, OutputOptions, SamplingParams, StopConditions
from ifbbench.errors import InputError

MAX_REQUEST_ID = 2**64 - 1
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One request. Nothing is checked here: a bad one gets an error response, like any other answer.

    request_id: 64-bit unsigned; may be used again after its final response (older texts call it correlation ID).
    input_ids: the prompt's token ids, a sequence or an array [length] or [1, length].
    max_new_tokens: output tokens to reserve; clamped to what max_seq_len leaves.
    end_id, stop_ids: token ids that end it; None or -1 is none. stop_sequences: token ids in a row that do, in the
        output alone. What ended it is part of the output.
    pad_id: fills up shorter beams; None means end_id, or 0.
    priority: higher ones go first. lora_task_id: counts in scheduling; adapters are not executed.
    cache_salt, token_extra_ids: requests share KV cache blocks only if they have the same salt, and the same extra id
        (of a prompt-tuning table) with each token; one for each of input_ids.
    retention: how long its blocks are worth keeping.
    """

    request_id: int
    input_ids: Sequence[int] | IntArray
    max_new_tokens: int
    end_id: int | None = None
    pad_id: int | None = None
    stop_ids: Sequence[int] = ()
    stop_sequences: Sequence[Sequence[int]] = ()
    sampling: SamplingParams = GREEDY
    beam_width: int = 1
    streaming: bool = False
    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = False
    priority: float = DEFAULT_PRIORITY
    lora_task_id: int | None = None
    cache_salt: Hashable = None
    token_extra_ids: Sequence[int] | None = None
    retention: Retention = NO_RETENTION


def engine_request(request: InferenceRequest) -> Request:
    """The engine's request. InputError if a field is of a kind that the engine cannot even refuse by itself."""
    request_id = _integer("request_id", request.request_id)
    if not 0 <= request_id <= MAX_REQUEST_ID:
        raise InputError(f"request_id {request_id}: expected an unsigned 64-bit integer")
    tokens = _token_ids("input_ids", request.input_ids)
    end_id = NO_TOKEN if request.end_id is None else _token_id("end_id", request.end_id)
    stop_ids = _token_ids("stop_ids", request.stop_ids).tolist()
    end_tokens = tuple(token for token in (end_id, *stop_ids) if token >= 0)
    pad_id = max(end_id, 0) if request.pad_id is None else _token_id("pad_id", request.pad_id)
    return Request(
        request_id,
        len(tokens),
        _integer("max_new_tokens", request.max_new_tokens),
        prompt_tokens=tokens,
        priority=_number("priority", request.priority),
        beam_width=_integer("beam_width", request.beam_width),
        lora_task_id=None if request.lora_task_id is None else _integer("lora_task_id", request.lora_task_id),
        sampling=_sampling(request.sampling),
        options=OutputOptions(
            request.streaming, request.return_log_probs, request.return_context_logits,
            request.return_generation_logits, request.exclude_input_from_output, pad_id,
        ),
        stop=StopConditions(end_tokens, _stop_sequences(request.stop_sequences)),
        reuse=_reuse_identity(request, len(tokens)),
        retention=_retention(request.retention),
    )  # fmt: skip


def _sampling(params: Any) -> SamplingParams:
    """The parameters with numbers in the place of numbers; whether they make sense is for the engine to say."""
    if not isinstance(params, SamplingParams):
        raise InputError(f"sampling: expected SamplingParams, not {type(params).__name__}")
    if params.early_stopping not in list(EarlyStopping):
        raise InputError(f"early_stopping {params.early_stopping!r}: expected one of {', '.join(EarlyStopping)}")
    numbers = ("temperature", "top_p", "repetition_penalty", "length_penalty")
    return replace(
        params,
        # More than any vocabulary has is all of it.
        top_k=min(_integer("top_k", params.top_k), np.iinfo(np.int32).max),
        seed=_integer("seed", params.seed),
        early_stopping=EarlyStopping(params.early_stopping),
        **{name: _number(name, getattr(params, name)) for name in numbers},
    )


def _stop_sequences(sequences: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(sequences, Iterable):
        raise InputError(f"stop_sequences: expected sequences of token ids, not {type(sequences).__name__}")
    read = tuple(tuple(_token_ids("stop_sequences", sequence).tolist()) for sequence in sequences)
    if not all(read):
        raise InputError("stop_sequences: one is empty; expected at least one token id in each")
    return read


def _reuse_identity(request: InferenceRequest, prompt_len: int) -> ReuseIdentity:
    try:
        hash(request.cache_salt)
    except TypeError as error:
        raise InputError(f"cache_salt: expected something hashable, such as a text ({error})") from error
    if request.token_extra_ids is None:
        return ReuseIdentity(cache_salt=request.cache_salt)
    extra_ids = _token_ids("token_extra_ids", request.token_extra_ids).astype(np.int64)
    if len(extra_ids) != prompt_len:
        raise InputError(f"token_extra_ids: {len(extra_ids)} for {prompt_len} input_ids; expected one for each")
    return ReuseIdentity(extra_ids, request.cache_salt)


def _retention(retention: Any) -> Retention:
    if not isinstance(retention, Retention):
        raise InputError(f"retention: expected Retention, not {type(retention).__name__}")
    if (problem := retention.problem()) is not None:
        raise InputError(problem)
    return retention


def _token_id(name: str, value: Any) -> int:
    token, limits = _integer(name, value), np.iinfo(np.int32)
    if not limits.min <= token <= limits.max:
        raise InputError(f"{name} {token}: expected a token id")
    return token


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InputError(f"{name} {value!r}: expected an integer")
    return int(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise InputError(f"{name} {value!r}: expected a number")
    try:
        return float(value)
    except OverflowError as error:
        raise InputError(f"{name}: expected a finite number") from error


def _token_ids(name: str, values: Any) -> IntArray:
    """[length]. Ids that do not fit 32 bits stay recognisable as outside of every vocabulary."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: expected token ids in a row ({error})") from error
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(f"{name}: expected integers in a row, not {array.dtype} of shape {list(array.shape)}")
    limits = np.iinfo(np.int32)
    tokens: IntArray = np.clip(array, limits.min, limits.max).astype(np.int32)
    return tokens
