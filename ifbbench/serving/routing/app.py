"""The HTTP application of a router: requests go to backends, and their answers come back as they are."""

import asyncio
import hmac
import logging
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from ifbbench.clock import WallClock
from ifbbench.endpoint.http import RequestFailed
from ifbbench.fleet.front import Front, Sent
from ifbbench.fleet.router import RoutedRequest, Router
from ifbbench.serving.answers import encode, error_object
from ifbbench.serving.app import CLIENT_LEFT, JSON, RETRY_AFTER_S, while_connected
from ifbbench.serving.metrics import CONTENT_TYPE, Metric, histogram_family
from ifbbench.serving.routing.asked import Asked, read_asked
from ifbbench.serving.routing.backends import Backend
from ifbbench.serving.routing.config import RouterConfig
from ifbbench.serving.routing.forward import Attempt, Reading, request_head
from ifbbench.serving.routing.record import RouterRecording
from ifbbench.serving.sessions import Sessions
from ifbbench.serving.statistics import SECONDS, DeliveryLag, Histogram
from ifbbench.settings.fields import memory_size

# Kinds of failures after which a backend gets no further requests until it is healthy.
FAULTS = frozenset(("connect", "tls", "timeout", "closed_early", "malformed_http"))
GENERATING = ("/v1/completions", "/v1/chat/completions")
_log = logging.getLogger("ifbbench")


class _Refused(Exception):
    """An answer of the router itself."""

    def __init__(self, status: int, message: str, kind: str = "server_error") -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind


class _Forwarding:
    """A request until its answer is complete.

    attempts: kinds of the failures before the latest one.
    sent: that one, until it is over.
    session: its number, None before the first attempt.
    seen: what the router saw then.
    begun: whether the client has got the beginning of an answer.
    """

    def __init__(self, number: int, asked: Asked, arrival_s: float) -> None:
        self.number, self.asked, self.arrival_s = number, asked, arrival_s
        self.attempts: list[str] = []
        self.attempt: Attempt | None = None
        self.backend: Backend | None = None
        self.sent: Sent | None = None
        self.session: int | None = None
        self.seen: dict[str, list[float]] = {}
        self.reading = Reading()
        self.has_first = self.begun = False
        self.failure: RequestFailed | None = None


class RouterApp:
    """The ASGI application.

    retries: how often a request may be sent to another backend.
    key: what clients must send, None if they need not.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        router: Router,
        retries: int,
        server: RouterConfig,
        key: str | None,
        clock: WallClock,
        recording: RouterRecording | None,
    ) -> None:
        self.backends, self.front = backends, Front(router)
        self._retries, self._server, self._key = retries, server, key
        self._clock, self._recording = clock, recording
        self._sessions = Sessions()
        self._open: set[_Forwarding] = set()
        self.num_requests = self.num_retried = 0
        self.completed = [0 for _ in backends]
        self.lag_s, self.ttft_s = DeliveryLag(), Histogram(SECONDS)
        self._metrics = _RouterMetrics(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, headers = scope["path"], Headers(scope=scope)
        try:
            if path in ("/health", "/ping"):
                await self._health(send)
            elif path == "/metrics":
                await _answer(send, 200, generate_latest(self._metrics), CONTENT_TYPE)
            else:
                self._check_key(headers)
                body = await self._receive(receive)
                number = -1
                if path in GENERATING and scope["method"] == "POST":
                    number, self.num_requests = self.num_requests, self.num_requests + 1
                asked = read_asked(body, headers, number) if number >= 0 else Asked()
                await self._forward(_Forwarding(number, asked, self._clock.now()), scope, body, receive, send)
        except _Refused as refused:
            content = encode({"error": error_object(refused.message, refused.kind, refused.status)})
            await _answer(send, refused.status, content, JSON)

    def end_all(self, problem: str) -> None:
        """End what has not ended, with the error `problem`."""
        for one in list(self._open):
            if one.attempt is not None and one.backend is not None and not one.attempt.is_done:
                one.backend.connections.abandon(one.attempt)
                one.attempt.on_end(RequestFailed("interrupted", problem))

    def _check_key(self, headers: Mapping[str, str]) -> None:
        if self._key is None:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._key.encode()):
            raise _Refused(
                401, "the API key is missing or wrong; send it as `Authorization: Bearer KEY`.", "authentication_error"
            )

    async def _health(self, send: Send) -> None:
        states = {one.url: one.problem or "ok" for one in self.backends}
        is_up = any(one.is_up for one in self.backends)
        status = "ok" if is_up else "no backend takes requests"
        await _answer(send, 200 if is_up else 503, encode({"status": status, "backends": states}), JSON)

    async def _receive(self, receive: Receive) -> bytes:
        """The body of a request, of limited size."""
        content, limit, more = bytearray(), self._server.max_body_bytes, True
        try:
            async with asyncio.timeout(self._server.receive_timeout):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Refused(CLIENT_LEFT, "the client left.")
                    content += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(content) > limit:
                        raise _Refused(
                            413,
                            f"the body has more than {memory_size(limit)} (--max_body_bytes).",
                            "invalid_request_error",
                        )
        except TimeoutError:
            within = f"within {self._server.receive_timeout:g} s (--receive_timeout)"
            raise _Refused(408, f"the body did not arrive {within}.", "invalid_request_error") from None
        return bytes(content)

    async def _forward(self, one: _Forwarding, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        self._open.add(one)
        try:
            is_done = await while_connected(receive, self._attempts(one, scope, body, send))
            if is_done is None and one.failure is None:
                one.failure = RequestFailed("client_left", "the client left before its answer was complete")
        finally:
            self._open.discard(one)
            if one.backend is not None and one.attempt is not None and not one.attempt.is_done:
                one.backend.connections.abandon(one.attempt)
            self._leave(one)
            if one.number >= 0:
                self._record(one)

    async def _attempts(self, one: _Forwarding, scope: Scope, body: bytes, send: Send) -> bool:
        """Send a request to one backend after another, until one answers, and pass the answer on."""
        tried = set[int]()
        target = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
        if query := scope.get("query_string", b""):
            target += "?" + query.decode("latin-1")
        headers = Headers(scope=scope)
        while True:
            backend = self._choose(one, tried)
            if backend is None:
                await self._give_up(one, send)
                return True
            tried.add(backend.number)
            backend.sent += 1
            address = backend.connections.address
            head = request_head(scope["method"], address.prefix + target, address.host_header, headers, len(body))
            attempt, one.reading = Attempt(self._clock.now), Reading()
            one.attempt = attempt
            backend.connections.send(head + body, attempt)
            await self._pass_on(one, attempt, send)
            failure = one.failure = attempt.problem() or (one.reading.problem() if one.begun else None)
            if attempt.failure is not None:
                backend.failed += 1
                if attempt.failure.kind in FAULTS:
                    backend.mark(str(attempt.failure))
            if one.begun:
                return True
            if not (attempt.was_refused or attempt.failure is not None) or len(one.attempts) >= self._retries:
                await self._answer_as(one, attempt, send)
                return True
            assert failure is not None
            one.attempts.append(failure.kind)
            self.num_retried += 1
            self._leave(one)

    def _choose(self, one: _Forwarding, tried: set[int]) -> Backend | None:
        """The backend of the next attempt; None if all have been tried or take no requests."""
        there = [backend for backend in self.backends if backend.is_up and backend.number not in tried]
        if not there:
            return None
        asked, front = one.asked, self.front
        if one.number < 0:  # no request of tokens: the router need not know
            one.backend = there[0]
            return there[0]
        if one.session is None:
            one.session = self._sessions.number(asked.session)
        routed = RoutedRequest(
            front.routed,
            one.number,
            self._clock.now(),
            asked.prompt_len,
            one.session,
            asked.pieces if front.sees_prefixes else (),
        )
        one.sent = front.route(routed, [backend.view for backend in there], len(self.backends))
        one.backend, one.has_first = self.backends[one.sent.replica.number], False
        return one.backend

    async def _pass_on(self, one: _Forwarding, attempt: Attempt, send: Send) -> None:
        """Pass a stream on as it comes, and wait for the end of the answer. An answer that is no stream is held."""
        while True:
            attempt.changed.clear()
            if attempt.is_stream and attempt.parts:
                parts = attempt.take()
                if not one.begun:
                    if (failure := self._failed_at_once(one, attempt, parts)) is not None:
                        attempt.on_end(failure)
                        return
                    one.begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": attempt.response_headers()})
                data = parts[0][0] if len(parts) == 1 else b"".join([part for part, _ in parts])
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self.lag_s.add(self._clock.now() - parts[0][1])
                for part, arrived_s in parts:
                    one.reading.feed(part, arrived_s)
                if not one.has_first and one.reading.answer.chunk_s:
                    self._note_first(one)
                continue
            if attempt.is_done:
                break
            await attempt.changed.wait()
        if one.begun:
            if attempt.failure is not None:
                content = error_object(f"the backend failed: {attempt.failure}", "server_error", 502)
                await send(
                    {
                        "type": "http.response.body",
                        "body": b"data: " + encode({"error": content}) + b"\n\n",
                        "more_body": True,
                    }
                )
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _failed_at_once(
        self, one: _Forwarding, attempt: Attempt, parts: Sequence[tuple[bytes, float]]
    ) -> RequestFailed | None:
        """The error with which a stream begins; None if it begins with something else, or none may try again."""
        if one.number < 0 or len(one.attempts) >= self._retries:
            return None
        reading = Reading()
        for part, arrived_s in parts:
            reading.feed(part, arrived_s)
        if reading.failure is None or reading.answer.chunk_s:
            return None
        if not attempt.is_done and one.backend is not None:
            one.backend.connections.abandon(attempt)
        return reading.failure

    async def _answer_as(self, one: _Forwarding, attempt: Attempt, send: Send) -> None:
        """Answer as the backend has, or that it has not."""
        if attempt.failure is not None:
            content = error_object(f"the backend failed: {attempt.failure}", "server_error", 502)
            await _answer(send, 502, encode({"error": content}), JSON)
            return
        body = b"".join(part for part, _ in attempt.take()) or attempt.body
        if attempt.status == 200 and one.number >= 0:
            one.reading.whole(body, attempt.active_s)
            one.failure = one.reading.problem()
        headers = [*attempt.response_headers(), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": attempt.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _give_up(self, one: _Forwarding, send: Send) -> None:
        """No backend is left: pass on what the last one has answered, if one has."""
        attempt = one.attempt
        if attempt is not None and attempt.failure is None:
            await self._answer_as(one, attempt, send)
            return
        status, kind = (503, "no_backend") if attempt is None else (502, "backends_failed")
        why = "; ".join(f"{backend.url}: {backend.problem}" for backend in self.backends if backend.problem)
        if not why and attempt is not None:
            why = str(attempt.failure)
        one.failure = RequestFailed(kind, f"no backend takes the request ({why})" if why else "no backend is left")
        content = encode({"error": error_object(f"{one.failure}; try again later.", "server_error", status)})
        await _answer(send, status, content, JSON)

    def _note_first(self, one: _Forwarding) -> None:
        """The first token of a request has come."""
        if not one.has_first and one.sent is not None:
            one.has_first = True
            one.sent.replica.prefill_tokens -= one.sent.prefill_tokens

    def _leave(self, one: _Forwarding) -> None:
        """The latest attempt is over: the router counts it no longer."""
        sent, one.sent = one.sent, None
        if sent is None:
            return
        if not one.has_first:
            sent.replica.prefill_tokens -= sent.prefill_tokens
        sent.replica.requests -= 1
        sent.replica.tokens -= sent.prompt_len
        one.seen = sent.seen

    def _record(self, one: _Forwarding) -> None:
        backend, answer = one.backend, one.reading.answer
        number = None if backend is None else backend.number
        if one.failure is None and number is not None:
            self.completed[number] += 1
            if answer.chunk_s:
                self.ttft_s.add(answer.chunk_s[0] - one.arrival_s)
        if self._recording is not None:
            sent_s = None if one.attempt is None else one.attempt.sent_s
            session = one.session if one.asked.session is not None else None
            self._recording.add(
                one.number,
                one.asked,
                one.arrival_s,
                sent_s,
                answer,
                one.failure,
                one.attempts,
                number,
                one.seen,
                session,
            )


async def _answer(send: Send, status: int, content: bytes, kind: str) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(content)).encode())]
    if status in (429, 503):
        headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": False})


class _RouterMetrics(Collector):
    """The metrics of a router for Prometheus."""

    def __init__(self, app: RouterApp) -> None:
        self._app = app

    def collect(self) -> Iterator[Metric]:
        app = self._app
        of_backends: dict[str, tuple[str, list[float]]] = {
            "sent": ("Attempts that were sent to a backend.", [one.sent for one in app.backends]),
            "failed": ("Attempts without an answer.", [one.failed for one in app.backends]),
            "completed": ("Requests that a backend answered.", [float(one) for one in app.completed]),
        }
        gauges: dict[str, tuple[str, list[float]]] = {
            "up": ("Whether a backend takes requests.", [float(one.is_up) for one in app.backends]),
            "in_flight": ("Requests that are not answered.", [one.view.requests for one in app.backends]),
            "prompt_tokens_in_flight": ("Their prompt tokens.", [one.view.tokens for one in app.backends]),
            "backend_queued": ("Requests that wait there.", [one.view.state.queued for one in app.backends]),
            "backend_kv_use": ("Share of its KV cache in use.", [one.view.state.kv_use for one in app.backends]),
        }
        labels = [[str(one.number), one.url] for one in app.backends]
        for family_of, families in ((CounterMetricFamily, of_backends), (GaugeMetricFamily, gauges)):
            for name, (help_text, values) in families.items():
                family = family_of(f"ifbbench_router_{name}", help_text, labels=["replica", "backend"])
                for label, value in zip(labels, values, strict=True):
                    family.add_metric(label, value)
                yield family
        retried = CounterMetricFamily("ifbbench_router_retries", "Attempts after a failed one.")
        retried.add_metric([], app.num_retried)
        yield retried
        yield histogram_family("ifbbench_router_time_to_first_token_seconds", "From arrival.", {}, app.ttft_s)
