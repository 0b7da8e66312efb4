"""One request to an endpoint: its attempts, and the line that records it."""

import asyncio
from collections.abc import Callable
from typing import Any

from ifbbench.endpoint.answer import Answer, EventLines
from ifbbench.endpoint.api import EndpointApi
from ifbbench.endpoint.connections import Connections
from ifbbench.endpoint.http import Exchange, RequestFailed, compression, defect, printable, refusal
from ifbbench.rundir.client_side import CLIENT, GENERATION, UNTIL_FIRST_TOKEN, ClientRequestLine
from ifbbench.settings.fields import memory_size
from ifbbench.settings.groups.replay import DEFAULT_PRIORITY
from ifbbench.workload.trace import TraceRequest

# The first pause before another attempt, if the server asks for none; each further one is twice as long, up to
# `--endpoint_timeout`. A request whose server asks for more than that has failed.
RETRY_PAUSE_S = 0.5
# The longest answer that is read: chunks of one token have some 300 bytes, and a few thousand with log-probabilities.
BYTES, BYTES_PER_TOKEN = 2**20, 2**14


class EndpointRequest(Exchange):
    """A request from `begin` until `on_ended(self)`, which is called once. There are thousands at a time, so that they
    are no tasks: they continue in the callbacks of their connection.

    index: index in the trace.
    retries: kinds of the failures of earlier attempts.
    failure: why it is not complete.
    answer: answer of the last attempt.
    """

    __slots__ = (
        "_api",
        "_connections",
        "_content",
        "_events",
        "_max_bytes",
        "_num_bytes",
        "_on_ended",
        "answer",
        "failure",
        "index",
        "retries",
        "row",
    )

    def __init__(
        self,
        api: EndpointApi,
        connections: Connections,
        index: int,
        row: TraceRequest,
        body: bytes,
        on_ended: "Callable[[EndpointRequest], None]",
    ) -> None:
        super().__init__()
        self.index, self.row = index, row
        self.retries: list[str] = []
        self._api, self._connections, self._on_ended = api, connections, on_ended
        self._max_bytes = BYTES + BYTES_PER_TOKEN * api.max_tokens(row)
        self._content = b"%b%d\r\n\r\n%b" % (api.head, len(body), body)

    def begin(self) -> None:
        """Make an attempt."""
        self.failure: RequestFailed | None = None
        self.answer, self._events, self._num_bytes = Answer(), EventLines(), 0
        self.is_open = True
        try:
            self._connections.send(self._content, self)
        except Exception as error:  # later, because the caller does not expect that the request ends meanwhile
            asyncio.get_running_loop().call_soon(self.end, defect(error))

    def on_part(self, part: bytes) -> None:
        self._num_bytes += len(part)
        if self._num_bytes > self._max_bytes:
            limit = f"{memory_size(self._max_bytes)}, for {self.row.output_len} tokens"
            raise RequestFailed("endless", f"the answer has more than {limit}")
        read, answer, arrived_s = self._api.read, self.answer, self.active_s
        for data in self._events.feed(part):
            read(data, answer, arrived_s)

    def on_end(self, failure: RequestFailed | None) -> None:
        try:
            self.failure = failure or self._problem()
        except Exception as error:
            self.failure = defect(error)
        failure = self.failure
        if failure is not None:
            failure.__traceback__ = failure.__context__ = None  # their frames refer to this request
        config = self._api.config
        if failure is not None and failure.may_retry and len(self.retries) < config.endpoint_retries:
            pause_s = failure.retry_after_s
            if pause_s is None:
                pause_s = min(RETRY_PAUSE_S * 2 ** len(self.retries), config.endpoint_timeout)
            if pause_s <= config.endpoint_timeout:
                self.retries.append(failure.kind)
                asyncio.get_running_loop().call_later(pause_s, self.begin)
                return
        self._on_ended(self)

    def _problem(self) -> RequestFailed | None:
        """Why a response that has ended well as HTTP is no complete answer."""
        if self.status != 200:
            return refusal(self)
        answer, kind = self.answer, self.header("content-type") or "no content type"
        if encoding := compression(self):
            return RequestFailed("compressed", f"the answer is {encoding}")
        if not answer.chunk_s and not kind.startswith("text/event-stream"):
            return RequestFailed("malformed_stream", f"expected server-sent events, but got {printable(kind)}")
        if not answer.is_ended or not self._events.is_empty:
            return RequestFailed("closed_early", "the stream ended before the answer was complete")
        if not answer.chunk_s:
            return RequestFailed("no_output", "the answer has no token")
        return None

    def line(self, arrival_s: float) -> tuple[ClientRequestLine, list[float], list[int]]:
        """The line of a request that has ended, and the times and tokens of the chunks of its answer. An answer that
        cannot be counted is a failure without tokens."""
        try:
            return self._line(arrival_s)
        except Exception as error:
            self.failure, self.answer = defect(error), Answer()
            return self._line(arrival_s)

    def _line(self, arrival_s: float) -> tuple[ClientRequestLine, list[float], list[int]]:
        row, answer, sent_s = self.row, self.answer, self.sent_s
        times_s, tokens, source, warnings = answer.count(self._api.tokenizer, self._api.max_tokens(row))
        if self.failure is None and not times_s:  # the server counts none in what it sent
            self.failure = RequestFailed("no_output", "the answer has no token")
        optional: dict[str, Any] = {} if row.priority == DEFAULT_PRIORITY else {"priority": row.priority}
        line = ClientRequestLine(
            request_id=row.request_id,
            index=self.index,
            arrival_s=arrival_s,
            prompt_len=answer.prompt_tokens or row.prompt_len,
            output_len=sum(tokens),
            max_new_tokens=row.output_len,
            reused_tokens=answer.cached_tokens,
            sent_s=sent_s,
            chunks=len(times_s),
            retries=self.retries,
            **optional,
        )
        if self.failure is not None:
            line.error, line.kind = str(self.failure), self.failure.kind
            return line, times_s, tokens
        assert sent_s is not None
        first_s, last_s = times_s[0], times_s[-1]
        line.outcome, line.chunk_tokens = "completed", source
        if warnings:
            line.warnings = warnings
        line.first_token_s, line.end_s = first_s, last_s
        line.ttft_s, line.e2e_s = first_s - arrival_s, last_s - arrival_s
        line.tpot_s = (last_s - first_s) / (line.output_len - 1) if line.output_len > 1 else None
        line.attribution_s = {
            CLIENT: sent_s - arrival_s,
            UNTIL_FIRST_TOKEN: first_s - sent_s,
            GENERATION: last_s - first_s,
        }
        return line, times_s, tokens
