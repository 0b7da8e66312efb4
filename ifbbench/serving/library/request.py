"""A request as a client makes it, and the engine's request that is made of it."""

import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.arrays import FloatArray, IntArray
from ifbbench.engine.request import EarlierAttempts, Request, ReuseIdentity
from ifbbench.engine.retention import NO_RETENTION, Retention
from ifbbench.engine.sampling_params import GREEDY, EarlyStopping, OutputOptions, SamplingParams, StopConditions
from ifbbench.errors import InputError
from ifbbench.serving.library.request_tensors import fields_of_tensors
from ifbbench.settings.fields import boolean, choice, integer, number, unexpected
from ifbbench.settings.groups.replay import DEFAULT_PRIORITY

MAX_REQUEST_ID = 2**64 - 1
# Bounds integers of which the size does not matter: the low bits of a seed, a top_k above the vocabulary.
MAX_WIDE_INTEGER = 2**127
NO_TOKEN = -1
TOKEN_LIMITS = np.iinfo(np.int32)
FLAGS = (
    "streaming",
    "return_log_probs",
    "return_context_logits",
    "return_generation_logits",
    "exclude_input_from_output",
)


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A request. InputError for a flag that is neither True nor False; the response of a request with another invalid
    field is an error.

    request_id: 64-bit unsigned; may be used again after its final response (older texts call it correlation ID).
    input_ids: the prompt's token ids, a sequence or an array [length] or [1, length].
    max_new_tokens: output tokens to reserve, reduced to what max_seq_len leaves.
    end_id, stop_ids: token ids that end the output; None or -1 for none.
    pad_id: fills up shorter beams; None means end_id, or 0.
    stop_sequences: sequences of token ids that end it, within the output. The token or sequence that ended it is part
        of the output.
    priority: requests with a higher one run first.
    lora_task_id: its LoRA adapter, stored or brought with `lora_weights`.
    cache_salt, token_extra_ids: requests share KV cache blocks only if they have the same salt, and the same extra id
        (of a prompt-tuning table) with each token; one for each of input_ids.
    retention: priorities and durations of its blocks in the reuse cache.
    prompt_embedding_table: float [virtual tokens, hidden size], the embeddings of virtual tokens (prompt tuning): id
        vocabulary + n of the prompt has that in row n.
    prompt_vocab_size: number of its rows that count, all for None. Blocks with virtual tokens are shared only by
        requests with equal tables.
    lora_weights, lora_config: the adapter `lora_task_id`, [modules and layers, values] and [modules and layers, 3] as
        in TensorRT-LLM's documentation.
    draft_input_ids: [draft tokens], tokens to be verified.
    draft_logits: [draft tokens, vocabulary].
    index: index in the trace that is recorded; None means request_id.
    earlier: earlier attempts of a request that a router sends again.
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
    prompt_embedding_table: NDArray[Any] | None = None
    prompt_vocab_size: int | None = None
    lora_weights: NDArray[Any] | None = None
    lora_config: NDArray[Any] | None = None
    draft_input_ids: Sequence[int] | IntArray | None = None
    draft_logits: NDArray[Any] | None = None
    index: int | None = None
    earlier: EarlierAttempts | None = None

    def __post_init__(self) -> None:
        for name in FLAGS:
            value = getattr(self, name)
            if type(value) is not bool:
                value = value.item() if isinstance(value, np.bool_) else value
                object.__setattr__(self, name, boolean(value, name))

    @classmethod
    def from_tensors(cls, request_id: int, tensors: Mapping[str, Any]) -> "InferenceRequest":
        """The request with these tensors, by the names of TensorRT-LLM's documentation (input_ids, request_output_len,
        runtime_top_k and so on). See `fields_of_tensors`."""
        fields, sampling = fields_of_tensors(tensors)
        return cls(request_id, **fields, sampling=SamplingParams(**sampling))


def engine_request(request: InferenceRequest, vocab_size: int | None = None) -> Request:
    """The engine's request. InputError if a field has a type that the engine cannot read; the engine itself refuses
    values that it does not allow. vocab_size: ids from there on are virtual tokens; None if it is not known."""
    tokens = _token_ids("input_ids", request.input_ids)
    end_id = NO_TOKEN if request.end_id is None else _token_id("end_id", request.end_id)
    stop_ids = _token_ids("stop_ids", request.stop_ids).tolist()
    end_tokens = tuple(token for token in (end_id, *stop_ids) if token >= 0)
    pad_id = max(end_id, 0) if request.pad_id is None else _token_id("pad_id", request.pad_id)
    options = _options(request, pad_id)
    made = Request(
        integer(request.request_id, "request_id", 0, MAX_REQUEST_ID),
        len(tokens),
        integer(request.max_new_tokens, "max_new_tokens"),
        prompt_tokens=tokens,
        index=request.request_id if request.index is None else request.index,
        priority=number(request.priority, "priority"),
        beam_width=integer(request.beam_width, "beam_width"),
        lora_task_id=None if request.lora_task_id is None else integer(request.lora_task_id, "lora_task_id"),
        sampling=_sampling(request.sampling),
        options=options,
        stop=StopConditions(end_tokens, _sequences("stop_sequences", request.stop_sequences)),
        reuse=_reuse_identity(request, tokens, options.prompt_embedding_table, vocab_size),
        retention=_retention(request.retention),
    )
    made.earlier = request.earlier
    return made


def _sampling(params: Any) -> SamplingParams:
    """`params` with plain numbers of the expected types."""
    if not isinstance(params, SamplingParams):
        raise unexpected("sampling", params, "SamplingParams")
    numbers = ("temperature", "top_p", "repetition_penalty", "length_penalty", "presence_penalty", "frequency_penalty")
    return replace(
        params,
        top_k=min(integer(params.top_k, "top_k", -MAX_WIDE_INTEGER, MAX_WIDE_INTEGER), TOKEN_LIMITS.max),
        seed=integer(params.seed, "seed", -MAX_WIDE_INTEGER, MAX_WIDE_INTEGER),
        min_length=integer(params.min_length, "min_length"),
        early_stopping=EarlyStopping(choice(params.early_stopping, "early_stopping", EarlyStopping)),
        bad_words=_sequences("bad_words", params.bad_words),
        embedding_bias=_floats("embedding_bias", params.embedding_bias, 1),
        **{name: number(getattr(params, name), name) for name in numbers},
    )


def _options(request: InferenceRequest, pad_id: int) -> OutputOptions:
    """What the request returns, and the arrays that it brings."""
    flags = (
        request.streaming,
        request.return_log_probs,
        request.return_context_logits,
        request.return_generation_logits,
        request.exclude_input_from_output,
    )
    table = _floats("prompt_embedding_table", request.prompt_embedding_table, 2)
    if request.prompt_vocab_size is not None:
        size = integer(request.prompt_vocab_size, "prompt_vocab_size", 0)
        if size > (rows := 0 if table is None else len(table)):
            raise InputError(f"prompt_vocab_size: {size} virtual tokens, but {rows} rows of prompt_embedding_table.")
        table = None if table is None else table[:size]
    weights, config = _floats("lora_weights", request.lora_weights, 2), None
    if request.lora_config is not None:
        config = _array("lora_config", request.lora_config, 2, "iu").astype(np.int32)
    if (weights is None) != (config is None) or (weights is not None and request.lora_task_id is None):
        raise InputError(
            "lora_weights: an adapter needs lora_task_id, lora_weights and lora_config together; give all "
            "three, or lora_task_id alone."
        )
    if weights is not None and config is not None and (len(config) != len(weights) or config.shape[1] not in (3, 4)):
        raise InputError(
            f"lora_config: shape {list(config.shape)}; expected [{len(weights)}, 3], a row for each of lora_weights."
        )
    draft, logits = request.draft_input_ids, _floats("draft_logits", request.draft_logits, 2)
    drafted = None if draft is None else _token_ids("draft_input_ids", draft)
    if logits is not None and (drafted is None or len(logits) != len(drafted)):
        raise InputError(
            f"draft_logits: {len(logits)} rows for {0 if drafted is None else len(drafted)} "
            "draft_input_ids; expected one for each."
        )
    return OutputOptions(*flags, pad_id, table, weights, config, drafted, logits)


def _sequences(name: str, sequences: Any) -> tuple[tuple[int, ...], ...]:
    """Sequences of token ids, each of at least one."""
    if not isinstance(sequences, Iterable):
        raise unexpected(name, sequences, "sequences of token ids")
    read = tuple(tuple(_token_ids(name, sequence).tolist()) for sequence in sequences)
    if not all(read):
        raise InputError(f"{name}: one is empty; expected at least one token id in each.")
    return read


def _reuse_identity(
    request: InferenceRequest, tokens: IntArray, table: FloatArray | None, vocab_size: int | None
) -> ReuseIdentity:
    try:
        hash(request.cache_salt)
    except TypeError as error:
        raise unexpected("cache_salt", request.cache_salt, f"a hashable value such as a text ({error})") from error
    if request.token_extra_ids is None and table is None:
        return ReuseIdentity(cache_salt=request.cache_salt)
    extra_ids = np.zeros(len(tokens), np.int64)
    if request.token_extra_ids is not None:
        extra_ids = _token_ids("token_extra_ids", request.token_extra_ids).astype(np.int64)
        if len(extra_ids) != len(tokens):
            raise InputError(f"token_extra_ids: {len(extra_ids)} for {len(tokens)} input_ids; expected one for each.")
    if table is not None:
        extra_ids[tokens >= (vocab_size or 0)] ^= _digest(table)
    return ReuseIdentity(extra_ids, request.cache_salt)


def _digest(table: FloatArray) -> np.int64:
    """Made of shape and content: the same virtual token of another table has another extra id."""
    content = hashlib.blake2b(repr(table.shape).encode(), digest_size=8)
    content.update(table.tobytes())
    return np.int64(int.from_bytes(content.digest(), "big", signed=True))


def _retention(retention: Any) -> Retention:
    if not isinstance(retention, Retention):
        raise unexpected("retention", retention, "Retention")
    if (problem := retention.problem()) is not None:
        raise InputError(problem)
    return retention


def _token_id(name: str, value: Any) -> int:
    return integer(value, name, TOKEN_LIMITS.min, TOKEN_LIMITS.max)


def _token_ids(name: str, values: Any) -> IntArray:
    """[length]. Ids beyond 32 bits become the nearest 32-bit number, which is in no vocabulary."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: expected token ids of shape [length] or [1, length] ({error}).") from error
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(
            f"{name}: expected integers of shape [length] or [1, length], not {array.dtype} of shape "
            f"{list(array.shape)}."
        )
    tokens: IntArray = np.clip(array, TOKEN_LIMITS.min, TOKEN_LIMITS.max).astype(np.int32)
    return tokens


def _floats(name: str, value: Any, num_dimensions: int) -> FloatArray | None:
    """Finite numbers as float32; None for None."""
    if value is None:
        return None
    floats: FloatArray = _array(name, value, num_dimensions, "f").astype(np.float32)
    if not np.isfinite(floats).all():
        raise InputError(f"{name}: contains NaN or an infinite number; expected finite ones.")
    return floats


def _array(name: str, value: Any, num_dimensions: int, kinds: str) -> NDArray[Any]:
    """`value` as an array of this many dimensions. kinds: of its data type, letters of NumPy."""
    expected = f"{'integers' if kinds == 'iu' else 'floats'} in {num_dimensions} dimensions"
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: expected {expected} ({error}).") from error
    if array.ndim == num_dimensions + 1 and len(array) == 1:
        array = array[0]
    if array.ndim != num_dimensions or array.dtype.kind not in kinds:
        raise InputError(f"{name}: expected {expected}, not {array.dtype} of shape {list(array.shape)}.")
    return array
