"""The four callbacks of a client, guarded: an exception in one is logged and affects no other request."""

import json
import logging
import operator
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from ifbbench.api.inference_request import InferenceRequest, Tensors, engine_request, response_tensors
from ifbbench.engine.in_flight import Response
from ifbbench.engine.records import IterationRecord, IterationStatistics, Stretch
from ifbbench.engine.request import Request
from ifbbench.errors import IfbbenchError

GetInferenceRequests = Callable[[int], Collection[InferenceRequest]]
SendResponse = Callable[[int, Tensors, bool, str], Any]
PollStopSignals = Callable[[], Collection[int]]
ReturnStats = Callable[[str], Any]

# Failures of one callback in a row after which the batch manager ends.
MAX_FAILURES = 3

_log = logging.getLogger("ifbbench")


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
        statistics: IterationStatistics,
        may_stream: bool,
    ) -> None:
        self._get = get_inference_requests
        self._send = send_response
        self._poll = poll_stop_signals
        self._return_stats = return_batch_manager_stats
        self._statistics = statistics
        self._may_stream = may_stream
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
                requests.append(engine_request(self._as_allowed(item)))
            except Exception as error:  # an invalid request must not affect others
                self._deliver(item.request_id, {}, True, str(error))
        return requests

    def _as_allowed(self, item: InferenceRequest) -> InferenceRequest:
        """Static batches respond at their end: without streaming, but with new tokens only, as in a stream."""
        if self._may_stream or item.streaming is not True:
            return item
        _log.warning("request %s: static batches (V1) respond at their end; streaming is off", item.request_id)
        return replace(item, streaming=False, exclude_input_from_output=True)

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
        return self._guarded("poll_stop_signals", _ids_of, self._poll) or ()

    def iteration(self, record: IterationRecord) -> None:
        """Pass the iteration's statistics to the client."""
        self.num_iterations += 1
        if self._return_stats is not None:
            self._guarded("return_batch_manager_stats", self._return_stats, json.dumps(self._statistics.fields(record)))

    def stretch(self, stretch: Stretch) -> None:
        """Pass the statistics of each iteration of the stretch."""
        for record in stretch.records():
            self.iteration(record)

    def left(self, request: Request, error: str | None) -> None:
        """Nothing: the request's final response says the same."""

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
        try:
            self._send(request_id, tensors, is_final, error)
        except Exception as failure:
            self._failed("send_response", failure, f" for request {request_id}")
            return failure
        self._failures["send_response"] = 0
        return None

    def _guarded(self, name: str, callback: Callable[..., Any], *arguments: Any) -> Any:
        """The callback's result, or None if it raises."""
        try:
            result = callback(*arguments)
        except Exception as error:
            self._failed(name, error)
            return None
        self._failures[name] = 0
        return result

    def _failed(self, name: str, error: Exception, about: str = "") -> None:
        self._failures[name] = self._failures.get(name, 0) + 1
        _log.error("%s failed%s: %s", name, about, error, exc_info=error)
        if self._failures[name] >= MAX_FAILURES:
            self.failure = CallbackFailed(f"{name} failed {MAX_FAILURES} times in a row: {error}")
            self.failure.__cause__ = error


def _ids_of(poll: PollStopSignals) -> list[int]:
    ids = poll()
    return [] if ids is None else [operator.index(request_id) for request_id in ids]
