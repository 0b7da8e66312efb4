"""The client's callbacks, guarded: one that raises is logged and costs no other request anything."""

import json
import logging
from collections.abc import Callable, Collection
from typing import Any

from ifbbench.api.inference_request import InferenceRequest, engine_request
from ifbbench.api.tensors import Tensors, response_tensors
from ifbbench.batching.records import IterationRecord
from ifbbench.batching.request import Request
from ifbbench.batching.response import Response
from ifbbench.batching.statistics import IterationStatistics
from ifbbench.errors import IfbbenchError, InputError

GetInferenceRequests = Callable[[int], Collection[InferenceRequest]]
SendResponse = Callable[[int, Tensors, bool, str], Any]
PollStopSignals = Callable[[], Collection[int]]
ReturnStats = Callable[[str], Any]

# So many failures of one callback in a row, and there is no client to work for any more.
MAX_FAILURES = 3

_log = logging.getLogger("ifbbench")


class CallbackFailed(IfbbenchError):
    """A callback raised several times in a row."""


class Callbacks:
    """What the loop calls, over what the client gave. Also the loop's observer, for the statistics."""

    def __init__(
        self,
        get_inference_requests: GetInferenceRequests,
        send_response: SendResponse,
        poll_stop_signals: PollStopSignals | None,
        return_batch_manager_stats: ReturnStats | None,
        statistics: IterationStatistics,
    ) -> None:
        self._get = get_inference_requests
        self._send = send_response
        self._poll = poll_stop_signals
        self._return_stats = return_batch_manager_stats
        self._statistics = statistics
        # Set when there is no point in going on; the loop looks at it between iterations, where all is in order.
        self.failure: CallbackFailed | None = None
        self._failures: dict[str, int] = {}
        self._undelivered: dict[int, str] = {}

    def get_requests(self, max_requests: int) -> list[Request]:
        """New requests; those that cannot even be read are answered here."""
        requests = []
        for item in self._guarded("get_inference_requests", self._get, max_requests) or ():
            if not isinstance(item, InferenceRequest):
                kind = type(item).__name__
                self._failed("get_inference_requests", TypeError(f"expected InferenceRequest, not {kind}"))
                continue
            try:
                requests.append(engine_request(item))
            except InputError as error:
                self._guarded("send_response", self._send, item.request_id, {}, True, str(error))
        return requests

    def send(self, response: Response) -> None:
        """Deliver a response. Where a stream cannot be delivered, its request is to be stopped."""
        request_id = response.request.request_id
        try:
            self._send(request_id, response_tensors(response), response.is_final, response.error or "")
        except Exception as error:
            _log.exception("send_response raised for request %d", request_id)
            if not response.is_final:
                self._undelivered[request_id] = f"send_response raised: {error}"

    def take_undelivered(self) -> list[tuple[int, str]]:
        """Requests whose stream broke since the last call, each with its error."""
        broken = list(self._undelivered.items())
        self._undelivered.clear()
        return broken

    def poll(self) -> Collection[int]:
        """Ids of requests to stop."""
        if self._poll is None:
            return ()
        return self._guarded("poll_stop_signals", self._poll) or ()

    def iteration(self, record: IterationRecord) -> None:
        """Tell the client the iteration's statistics."""
        if self._return_stats is not None:
            self._guarded("return_batch_manager_stats", self._return_stats, json.dumps(self._statistics.fields(record)))

    def left(self, request: Request, error: str | None) -> None:
        """Its response says it all."""

    def _guarded(self, name: str, callback: Callable[..., Any], *arguments: Any) -> Any:
        """What the callback returns, or None if it raises."""
        try:
            result = callback(*arguments)
        except Exception as error:
            self._failed(name, error)
            return None
        self._failures[name] = 0
        return result

    def _failed(self, name: str, error: Exception) -> None:
        self._failures[name] = self._failures.get(name, 0) + 1
        _log.error("%s failed: %s", name, error, exc_info=error)
        if self._failures[name] >= MAX_FAILURES:
            self.failure = CallbackFailed(f"{name} failed {MAX_FAILURES} times in a row: {error}")
            self.failure.__cause__ = error
