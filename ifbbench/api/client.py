"""What a client exchanges with the batch manager: requests, response tensors, and the four callbacks that pass them."""

import json
import logging
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ifbbench.config import DEFAULT_PRIORITY
from ifbbench.engine.active import IntArray
from ifbbench.engine.in_flight import Response
from ifbbench.engine.kv_cache.eviction import NO_RETENTION, Retention
from ifbbench.engine.records import IterationRecord, IterationStatistics, Observer, Stretch, Unobserved
from ifbbench.engine.request import Request, ReuseIdentity
from ifbbench.engine.sampling_params import GREEDY, EarlyStopping, OutputOptions, SamplingParams, StopConditions
from ifbbench.errors import IfbbenchError, InputError
from ifbbench.fields import choice, integer, number, unexpected

MAX_REQUEST_ID = 2**64 - 1
# Of integers whose size does not matter: only the low bits of a seed count, and a top_k above the vocabulary is all.
MAX_WIDE_INTEGER = 2**127
NO_TOKEN = -1
TOKEN_LIMITS = np.iinfo(np.int32)

# Failures of one callback, or of the executor, in a row after which the batch manager ends.
MAX_FAILURES = 3

Tensors = dict[str, NDArray[Any]]
# The signatures that `BatchManager` describes.
GetInferenceRequests = Callable[[int], "Collection[InferenceRequest]"]
SendResponse = Callable[[int, Tensors, bool, str], Any]
PollStopSignals = Callable[[], Collection[int]]
ReturnStats = Callable[[str], Any]

_log = logging.getLogger("ifbbench")


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A request. Fields are not checked here: the response of an invalid request is an error.

    request_id: 64-bit unsigned; may be used again after its final response (older texts call it correlation ID).
    input_ids: the prompt's token ids, a sequence or an array [length] or [1, length].
    max_new_tokens: output tokens to reserve, reduced to what max_seq_len leaves.
    end_id, stop_ids: token ids that end the output; None or -1 for none. stop_sequences: sequences of token ids that
        end it, within the output. The token or sequence that ended it is part of the output.
    pad_id: fills up shorter beams; None means end_id, or 0.
    priority: higher ones run first. lora_task_id: counts in scheduling; adapters are not executed.
    cache_salt, token_extra_ids: requests share KV cache blocks only if they have the same salt, and the same extra id
        (of a prompt-tuning table) with each token; one for each of input_ids.
    retention: priorities and durations of its blocks in the reuse cache.
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
    """The engine's request. InputError if a field has a type that the engine cannot read; the engine itself refuses
    values that it does not allow."""
    tokens = _token_ids("input_ids", request.input_ids)
    end_id = NO_TOKEN if request.end_id is None else _token_id("end_id", request.end_id)
    stop_ids = _token_ids("stop_ids", request.stop_ids).tolist()
    end_tokens = tuple(token for token in (end_id, *stop_ids) if token >= 0)
    pad_id = max(end_id, 0) if request.pad_id is None else _token_id("pad_id", request.pad_id)
    return Request(
        integer(request.request_id, "request_id", 0, MAX_REQUEST_ID),
        len(tokens),
        integer(request.max_new_tokens, "max_new_tokens"),
        prompt_tokens=tokens,
        index=request.request_id,
        priority=number(request.priority, "priority"),
        beam_width=integer(request.beam_width, "beam_width"),
        lora_task_id=None if request.lora_task_id is None else integer(request.lora_task_id, "lora_task_id"),
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
    """`params` with plain numbers of the expected types."""
    if not isinstance(params, SamplingParams):
        raise unexpected("sampling", params, "SamplingParams")
    numbers = ("temperature", "top_p", "repetition_penalty", "length_penalty")
    return replace(
        params,
        top_k=min(integer(params.top_k, "top_k", -MAX_WIDE_INTEGER, MAX_WIDE_INTEGER), TOKEN_LIMITS.max),
        seed=integer(params.seed, "seed", -MAX_WIDE_INTEGER, MAX_WIDE_INTEGER),
        early_stopping=EarlyStopping(choice(params.early_stopping, "early_stopping", EarlyStopping)),
        **{name: number(getattr(params, name), name) for name in numbers},
    )


def _stop_sequences(sequences: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(sequences, Iterable):
        raise unexpected("stop_sequences", sequences, "sequences of token ids")
    read = tuple(tuple(_token_ids("stop_sequences", sequence).tolist()) for sequence in sequences)
    if not all(read):
        raise InputError("stop_sequences: one is empty; expected at least one token id in each.")
    return read


def _reuse_identity(request: InferenceRequest, prompt_len: int) -> ReuseIdentity:
    try:
        hash(request.cache_salt)
    except TypeError as error:
        raise unexpected("cache_salt", request.cache_salt, f"a hashable value such as a text ({error})") from error
    if request.token_extra_ids is None:
        return ReuseIdentity(cache_salt=request.cache_salt)
    extra_ids = _token_ids("token_extra_ids", request.token_extra_ids).astype(np.int64)
    if len(extra_ids) != prompt_len:
        raise InputError(f"token_extra_ids: {len(extra_ids)} for {prompt_len} input_ids; expected one for each.")
    return ReuseIdentity(extra_ids, request.cache_salt)


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
        raise InputError(f"{name}: expected integers of shape [length] or [1, length], not {array.dtype} of shape "
                         f"{list(array.shape)}.")
    tokens: IntArray = np.clip(array, TOKEN_LIMITS.min, TOKEN_LIMITS.max).astype(np.int32)
    return tokens


def response_tensors(response: Response) -> Tensors:
    """A response as NumPy arrays under the tensor names of TensorRT-LLM's batch manager; none for an error.

    output_ids: int32 [1, beams, longest sequence], padded with the pad id. The prompt comes first, unless the request
        excludes it or streams (a streamed response contains new tokens only).
    sequence_length: int32 [1, beams], the length of each beam's output_ids without padding.
    context_logits: float32 [1, prompt length, vocabulary]; zeros [1, 1, 1] if not requested, and in all but the final
        response of a stream.
    generation_logits: float32 [1, beams, output length, vocabulary], or zeros [1, 1, 1, 1].
    output_log_probs: float32 [1, beams, output length], and cum_log_probs: float32 [1, beams], if requested.
    """
    if response.error is not None:
        return {}
    options = response.request.options
    sequences = [_sequence(response, tokens) for tokens in response.tokens or (np.zeros(0, np.int32),)]
    context, generation = response.context_logits, response.generation_logits
    tensors: Tensors = {
        "output_ids": _padded(sequences, options.pad_id),
        "sequence_length": np.array([[len(sequence) for sequence in sequences]], np.int32),
        "context_logits": np.zeros((1, 1, 1), np.float32) if context is None else context[None],
        "generation_logits": _padded(generation) if generation else np.zeros((1, 1, 1, 1), np.float32),
    }
    if options.return_log_probs:
        cumulative = response.cumulative_log_probs
        tensors["output_log_probs"] = _padded(response.log_probs or (np.zeros(0, np.float32),))
        tensors["cum_log_probs"] = np.zeros((1, 1), np.float32) if cumulative is None else cumulative[None]
    return tensors


def _sequence(response: Response, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    request = response.request
    if request.options.streaming or request.options.exclude_input_from_output or request.prompt_tokens is None:
        return tokens
    return np.concatenate([request.prompt_tokens[: request.original_prompt_len], tokens])


def _padded(rows: Sequence[NDArray[Any]], fill: float = 0) -> NDArray[Any]:
    """[1, rows, longest, …] from arrays [length, …]."""
    padded = np.full((1, len(rows), max(map(len, rows)), *rows[0].shape[1:]), fill, rows[0].dtype)
    for index, row in enumerate(rows):
        padded[0, index, : len(row)] = row
    return padded


class CallbackFailed(IfbbenchError):
    """A callback raised several times in a row."""


class Callbacks:
    """The callbacks of the token generation loop, made from those of the client. Also the loop's observer."""

    def __init__(
        self, get_inference_requests: GetInferenceRequests, send_response: SendResponse,
        poll_stop_signals: PollStopSignals | None, return_batch_manager_stats: ReturnStats | None,
        statistics: IterationStatistics, may_stream: bool, observer: Observer | None = None,
    ) -> None:
        """may_stream: whether requests may stream. Static batches (V1) respond at their end. observer: is notified of
        all that the loop reports."""
        self._get = get_inference_requests
        self._send = send_response
        self._poll = poll_stop_signals
        self._return_stats = return_batch_manager_stats
        self._statistics = statistics
        self._may_stream = may_stream
        self._observer = observer or Unobserved()
        # Set when a callback has failed too often. Checked between iterations, where the loop's state is consistent.
        self.failure: CallbackFailed | None = None
        # Whether the last call for requests returned any, or raised: there may be more then.
        self.expects_requests = False
        # Iterations that have ended, failed ones included.
        self.num_iterations = 0
        self._failures: dict[str, int] = {}
        self._undelivered: dict[int, str] = {}

    def get_requests(self, max_requests: int) -> list[Request]:
        """New requests. Those that cannot be converted get their error response here."""
        items = self._fetch(max_requests)
        self.expects_requests = items is None or len(items) > 0
        requests = []
        for item in items or ():
            try:
                if item.streaming is True and not self._may_stream:
                    _log.warning("request %s: static batches (V1) respond at their end; streaming is off",
                                 item.request_id)
                    # With new tokens only, as in a stream.
                    item = replace(item, streaming=False, exclude_input_from_output=True)
                requests.append(engine_request(item))
            except Exception as error:  # an invalid request must not affect others
                self._deliver(item.request_id, {}, True, str(error))
        return requests

    def send(self, response: Response) -> None:
        """Deliver a response. A request whose streamed response cannot be delivered is to be stopped."""
        request_id = response.request.request_id
        if response.is_final:
            # A stream with a missing response is of no use: its final response is an error.
            error = self._undelivered.pop(request_id, "")
            error = response.error or error
            self._deliver(request_id, {} if error else response_tensors(response), True, error)
        elif request_id not in self._undelivered:
            failure = self._deliver(request_id, response_tensors(response), False, "")
            if failure is not None:
                self._undelivered[request_id] = f"send_response raised: {failure}"

    def take_undelivered(self) -> list[tuple[int, str]]:
        """Requests whose stream broke since the last call, each with its error."""
        broken = list(self._undelivered.items())
        self._undelivered.clear()
        return broken

    def poll(self) -> Collection[int]:
        """Ids of requests to stop."""
        if self._poll is None:
            return ()
        return self._guarded("poll_stop_signals", _ids_of, self._poll)[0] or ()

    def iteration(self, record: IterationRecord) -> None:
        """Pass the iteration's statistics to the client."""
        self.num_iterations += 1
        self._observer.iteration(record)
        if self._return_stats is not None:
            self._guarded("return_batch_manager_stats", self._return_stats, json.dumps(self._statistics.fields(record)))

    def stretch(self, stretch: Stretch) -> None:
        """Pass the statistics of each iteration of the stretch."""
        for record in stretch.records():
            self.iteration(record)

    def left(self, request: Request, error: str | None) -> None:
        """Pass it on; to the client, the request's final response says the same."""
        self._observer.left(request, error)

    def _fetch(self, max_requests: int) -> list[InferenceRequest] | None:
        """The client's requests, None if the callback raises. Items of another type are left out and count as a
        failure."""
        name = "get_inference_requests"
        try:
            given = self._get(max_requests)
            items = [] if given is None else list(given)
        except Exception as error:
            self._failed(name, error)
            return None
        wrong = [item for item in items if not isinstance(item, InferenceRequest)]
        if wrong:
            self._failed(name, TypeError(f"expected InferenceRequest, not {type(wrong[0]).__name__}"))
        else:
            self._failures[name] = 0
        return [item for item in items if isinstance(item, InferenceRequest)]

    def _deliver(self, request_id: int, tensors: Tensors, is_final: bool, error: str) -> Exception | None:
        """Call send_response; returns its exception."""
        arguments = request_id, tensors, is_final, error
        return self._guarded("send_response", self._send, *arguments, about=f" for request {request_id}")[1]

    def _guarded(
        self, name: str, callback: Callable[..., Any], *arguments: Any, about: str = ""
    ) -> tuple[Any, Exception | None]:
        """The callback's result, and the exception that it raised instead."""
        try:
            result = callback(*arguments)
        except Exception as error:
            self._failed(name, error, about)
            return None, error
        self._failures[name] = 0
        return result, None

    def _failed(self, name: str, error: Exception, about: str = "") -> None:
        self._failures[name] = self._failures.get(name, 0) + 1
        _log.error("%s failed%s: %s", name, about, error, exc_info=error)
        if self._failures[name] >= MAX_FAILURES:
            self.failure = CallbackFailed(f"{name} failed {MAX_FAILURES} times in a row: {error}")
            self.failure.__cause__ = error


def _ids_of(poll: PollStopSignals) -> list[int]:
    ids = poll()
    return [] if ids is None else [operator.index(request_id) for request_id in ids]
