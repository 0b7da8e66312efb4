"""What the batch manager exchanges with a client: response tensors, and the four callbacks."""

import json
import logging
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.interfaces import Observer, Unobserved
from ifbbench.engine.records import IterationRecord
from ifbbench.engine.request import Request
from ifbbench.engine.responses import Response
from ifbbench.engine.stretch import Stretch
from ifbbench.errors import IfbbenchError
from ifbbench.rundir.statistics import IterationStatistics
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.serving.library.request import InferenceRequest, engine_request
from ifbbench.settings.modes import BatchingType

MAX_FAILURES = 3  # of one callback, or of the executor, in a row, after which the batch manager ends

Tensors = dict[str, NDArray[Any]]
# The signatures that `BatchManager` describes.
GetInferenceRequests = Callable[[int], Collection[InferenceRequest]]
SendResponse = Callable[[int, Tensors, bool, str], Any]
PollStopSignals = Callable[[], Collection[int]]
ReturnStats = Callable[[str], Any]

_log = logging.getLogger("ifbbench")


def response_tensors(response: Response) -> Tensors:
    """A response as NumPy arrays under the tensor names of TensorRT-LLM's batch manager; none for an error.

    output_ids: int32 [1, beams, longest sequence], padded with the pad id. The prompt comes first, unless the request
        excludes it or streams (a streamed response contains new tokens only).
    sequence_length: int32 [1, beams], the length of each beam's output_ids without padding.
    reused_tokens: int32 [1, 1], tokens of the prompt that were found in the KV cache when it was first run.
    context_logits: float32 [1, prompt length, vocabulary]; zeros [1, 1, 1] if not requested, and in all but the final
        response of a stream.
    generation_logits: float32 [1, beams, output length, vocabulary], or zeros [1, 1, 1, 1].
    output_log_probs: float32 [1, beams, output length], and cum_log_probs: float32 [1, beams], if requested.
    replaces_output: bool [1], True; in the responses of a stream of several beams. Each has all beams so far, best
        first, as a whole, in the place of those of the response before, because a beam may yet be replaced.
    """
    if response.error is not None:
        return {}
    options = response.request.options
    sequences = [_sequence(response, tokens) for tokens in response.tokens or (np.zeros(0, np.int32),)]
    context, generation = response.context_logits, response.generation_logits
    tensors: Tensors = {
        "output_ids": _padded(sequences, options.pad_id),
        "sequence_length": np.array([[len(sequence) for sequence in sequences]], np.int32),
        "reused_tokens": np.array([[response.request.reused_tokens]], np.int32),
        "context_logits": np.zeros((1, 1, 1), np.float32) if context is None else context[None],
        "generation_logits": _padded(generation) if generation else np.zeros((1, 1, 1, 1), np.float32),
    }
    if options.return_log_probs:
        cumulative = response.cumulative_log_probs
        tensors["output_log_probs"] = _padded(response.log_probs or (np.zeros(0, np.float32),))
        tensors["cum_log_probs"] = np.zeros((1, 1), np.float32) if cumulative is None else cumulative[None]
    if options.streaming and response.request.beam_width > 1:
        tensors["replaces_output"] = np.array([True])
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
        self,
        get_inference_requests: GetInferenceRequests,
        send_response: SendResponse,
        poll_stop_signals: PollStopSignals | None,
        return_batch_manager_stats: ReturnStats | None,
        limits: BatchingConfig,
        observer: Observer | None = None,
    ) -> None:
        """limits: limits of the engine.
        observer: is notified of all that the loop reports.
        """
        self._get = get_inference_requests
        self._send = send_response
        self._poll = poll_stop_signals
        self._return_stats = return_batch_manager_stats
        self._statistics = IterationStatistics(limits.batching_type, limits.max_active)
        self._may_stream = limits.batching_type is not BatchingType.V1
        self._observer = observer or Unobserved()
        self._vocab_size = limits.vocab_size
        # Set when a callback has failed too often, or asked the program to end (SystemExit, KeyboardInterrupt). Checked
        # between iterations, where the loop's state is consistent.
        self.failure: BaseException | None = None
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
                if item.streaming and not self._may_stream:
                    _log.warning(
                        "request %s: static batches (V1) respond at their end; streaming is off", item.request_id
                    )
                    # With new tokens only, as in a stream.
                    item = replace(item, streaming=False, exclude_input_from_output=True)
                requests.append(engine_request(item, self._vocab_size))
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
        if self._return_stats is None:
            return
        for reported in self._statistics.reported(record):
            text = json.dumps(self._statistics.fields(reported))
            self._guarded("return_batch_manager_stats", self._return_stats, text)

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
        except BaseException as error:
            self._failed(name, error)
            return None
        wrong = [item for item in items if not isinstance(item, InferenceRequest)]
        if wrong:
            self._failed(name, TypeError(f"expected InferenceRequest, not {type(wrong[0]).__name__}"))
        else:
            self._failures[name] = 0
        return [item for item in items if isinstance(item, InferenceRequest)]

    def _deliver(self, request_id: int, tensors: Tensors, is_final: bool, error: str) -> BaseException | None:
        """Call send_response; returns its exception."""
        arguments = request_id, tensors, is_final, error
        return self._guarded("send_response", self._send, *arguments, about=f" for request {request_id}")[1]

    def _guarded(
        self, name: str, callback: Callable[..., Any], *arguments: Any, about: str = ""
    ) -> tuple[Any, BaseException | None]:
        """The callback's result, and the exception that it raised instead."""
        try:
            result = callback(*arguments)
        except BaseException as error:  # what it interrupts would leave the loop's state inconsistent
            self._failed(name, error, about)
            return None, error
        self._failures[name] = 0
        return result, None

    def _failed(self, name: str, error: BaseException, about: str = "") -> None:
        self._failures[name] = self._failures.get(name, 0) + 1
        if not isinstance(error, Exception):
            _log.error("%s raised %s%s", name, type(error).__name__, about)
            self.failure = error
            return
        _log.error("%s failed%s: %s", name, about, error, exc_info=error)
        if self._failures[name] >= MAX_FAILURES and self.failure is None:
            self.failure = CallbackFailed(f"{name} failed {MAX_FAILURES} times in a row: {error}")
            self.failure.__cause__ = error


def _ids_of(poll: PollStopSignals) -> list[int]:
    ids = poll()
    return [] if ids is None else [operator.index(request_id) for request_id in ids]
