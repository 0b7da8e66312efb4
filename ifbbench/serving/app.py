"""The HTTP application: endpoints, limits, errors and clients that go away."""

import asyncio
import hmac
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ifbbench import __version__
from ifbbench.clock import WallClock
from ifbbench.errors import InputError
from ifbbench.serving.answers import Answer, Choice, GenerationFailed, encode, error_object
from ifbbench.serving.config import ServerConfig
from ifbbench.serving.fleet import AnyService, FleetMetrics
from ifbbench.serving.library.request import InferenceRequest
from ifbbench.serving.metrics import CONTENT_TYPE, ServerMetrics
from ifbbench.serving.openapi import openapi
from ifbbench.serving.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generating,
    TokenizeRequest,
    engine_requests,
)
from ifbbench.serving.reading import BodyReader, Prompts, ReadingFailed, ReadingProcess, UnknownModel
from ifbbench.serving.service import QueueFull, ServiceEnded
from ifbbench.serving.sessions import session_key
from ifbbench.settings.fields import memory_size
from ifbbench.settings.modes import BatchingType

JSON = "application/json"
CLIENT_LEFT = 499
RETRY_AFTER_S = 1
DRAINED = "the server has ended before the answer was complete (--drain_timeout)"
# Longer bodies, and those with more requests, are read in a thread, so that other clients need not wait for it; and in
# another process, if a thread would leave the interpreter to no other for more than some 20 ms.
LONG_BODY, VERY_LONG_BODY = 16_000, 2**18
MANY_REQUESTS = 16
# The limit of the bytes of all bodies that are received or wait to be read.
MAX_HELD_BYTES = 2**28
# What a client may send as X-Request-Id.
REQUEST_ID = re.compile("[!-~]{1,256}")
Result = TypeVar("Result")


class BadRequest(Exception):
    """A response with an error instead of an answer.

    param: the field that is wrong.
    """

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param = status, message, kind, param


@dataclass
class Endpoints:
    """The endpoints of one service.

    reader, process: what reads bodies.
    adapters: LoRA tasks by the name by which clients know them.
    key: what clients must send, None if they need not.
    created: when it started, in seconds since the Unix epoch.
    """

    service: AnyService
    reader: BodyReader
    process: ReadingProcess
    config: ServerConfig
    metrics: ServerMetrics | FleetMetrics
    model: str
    adapters: dict[str, int]
    key: str | None
    created: int

    def __post_init__(self) -> None:
        self._reading = asyncio.Lock()
        self._held_bytes = 0

    def close(self) -> None:
        """End the process that reads long bodies."""
        self.process.close()

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/v1/models", self._guarded(self.models)),
            Route("/v1/models/{name:path}", self._guarded(self.model_of_name)),
            Route("/tokenize", self._guarded(self.tokenize), methods=["POST"]),
            Route("/detokenize", self._guarded(self.detokenize), methods=["POST"]),
            Route("/health", self.health),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/load", self.load),
            Route("/version", self.version),
            Route("/metrics", self.scrape),
            Route("/iterations", self.iterations),
            Route("/openapi.json", self.description),
        ]
        handlers: dict[Any, Any] = {BadRequest: _bad_request, HTTPException: _http_error, Exception: _defect}
        return Starlette(routes=routes, exception_handlers=handlers, middleware=self._middleware())

    def _middleware(self) -> list[Middleware]:
        """With --allowed_origins: what lets pages of these origins call the server from a browser."""
        if self.config.allowed_origins is None:
            return []
        origins = [origin.strip() for origin in self.config.allowed_origins.split(",")]
        return [Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])]

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest)

    async def models(self, _request: Request) -> Response:
        return _json({"object": "list", "data": [self._model(name) for name in (self.model, *self.adapters)]})

    async def model_of_name(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.model and name not in self.adapters:
            raise BadRequest(404, str(self.reader.unknown(name)), param="model")
        return _json(self._model(name))

    async def health(self, _request: Request) -> Response:
        if self.service.is_running:
            return _json({"status": "ok"})
        return _json({"status": "the engine has ended"}, 503)

    async def load(self, _request: Request) -> Response:
        return _json({"server_load": self.service.num_live})

    async def version(self, _request: Request) -> Response:
        return _json({"version": __version__})

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a text or a chat, in vLLM's form."""
        return Response((await self._read(request, TokenizeRequest, BodyReader.answer)).used, media_type=JSON)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, in vLLM's form."""
        return Response((await self._read(request, DetokenizeRequest, BodyReader.answer)).used, media_type=JSON)

    async def scrape(self, _request: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def iterations(self, _request: Request) -> Response:
        """The statistics of the latest iterations, oldest first, in the form of TensorRT-LLM's executor."""
        return _json(self.service.latest_iterations())

    async def description(self, _request: Request) -> Response:
        return _json(openapi(self.service.engine.limits.vocab_size))

    def _model(self, name: str) -> dict[str, Any]:
        longest = self.service.engine.limits.max_seq_len
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "ifbbench",
            "max_model_len": longest,
            "parent": self.model if name in self.adapters else None,
        }

    def _guarded(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """`endpoint` for clients that send the key."""

        async def checked(request: Request) -> Response:
            if self.key is not None:
                scheme, _, given = request.headers.get("authorization", "").partition(" ")
                is_right = hmac.compare_digest(given.strip().encode(), self.key.encode())
                if scheme.lower() != "bearer" or not is_right:
                    raise BadRequest(
                        401,
                        "the API key is missing or wrong; send it as `Authorization: Bearer KEY`.",
                        "authentication_error",
                    )
            try:
                return await endpoint(request)
            except asyncio.CancelledError:  # uvicorn has waited for long enough, for a body too
                raise BadRequest(500, DRAINED, "server_error") from None

        return checked

    async def _generate(self, request: Request, body_type: type[Generating]) -> Response:
        read = await self._read(request, body_type, BodyReader.prompts)
        body, prompts = read.body, read.used
        requests = await _checked(read.is_long, self._requests, body, prompts)
        request_id = request.headers.get("x-request-id", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = body.request_id or uuid.uuid4().hex
        try:
            answer = self._submit(read, requests, request_id, request.headers)
        except QueueFull as error:
            raise BadRequest(429, str(error), "rate_limit_error") from None
        except ServiceEnded as error:
            raise BadRequest(503, str(error), "server_error") from None
        headers = {"x-request-id": request_id}
        if body.stream:
            return EventStream(answer, self.service, headers)
        try:
            result = await while_connected(request.receive, answer.complete())
        except GenerationFailed as error:
            raise BadRequest(500, str(error), "server_error") from None
        finally:
            self.service.cancel(answer.generations)
        return Response(status_code=CLIENT_LEFT) if result is None else _json(result, headers=headers)

    async def _read(
        self, request: Request, body_type: type[Body], use: Callable[[BodyReader, Body], Result]
    ) -> "ReadBody[Body, Result]":
        """The body of a request, and what `use` makes of it. BadRequest if it is not valid.

        Work that grows with the body leaves the event loop free: long bodies are read in a thread, longer ones in
        another process, one at a time."""
        content = bytearray()
        try:
            await self._receive(request, content)
            received_s, size = self.service.real_now(), len(content)
            if size > VERY_LONG_BODY:
                async with self._reading:
                    if await request.is_disconnected():
                        raise BadRequest(CLIENT_LEFT, "the client left.")
                    return ReadBody(received_s, True, *await _checked(True, self.process.read, content, body_type, use))
            body = await _checked(size > LONG_BODY, self.reader.body, content, body_type)
            is_long = size > LONG_BODY or body.num_requests > MANY_REQUESTS
            return ReadBody(received_s, is_long, body, await _checked(is_long, use, self.reader, body))
        finally:
            self._held_bytes -= len(content)

    async def _receive(self, request: Request, content: bytearray) -> None:
        """Add the body of a request, of limited size, to `content`."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise BadRequest(415, f"Content-Encoding: {encoding[:100]!r} is not supported; send the body as it is.")
        limit, max_held = self.config.max_body_bytes, max(MAX_HELD_BYTES, 2 * self.config.max_body_bytes)
        try:
            async with asyncio.timeout(self.config.receive_timeout):
                async for piece in request.stream():
                    content += piece
                    self._held_bytes += len(piece)
                    if len(content) > limit:
                        raise BadRequest(
                            413,
                            f"the body has more than {memory_size(limit)} (--max_body_bytes); send a shorter prompt.",
                        )
                    if self._held_bytes > max_held:
                        size = memory_size(max_held)
                        raise BadRequest(503, f"the bodies of all clients have more than {size}; try again later.")
        except ClientDisconnect:
            raise BadRequest(CLIENT_LEFT, "the client left.") from None
        except TimeoutError:
            raise BadRequest(
                408, f"the body did not arrive within {self.config.receive_timeout:g} s (--receive_timeout)."
            ) from None

    def _requests(self, body: Generating, prompts: Prompts) -> list[InferenceRequest]:
        """The requests of the engine for `body`. InputError if the engine would refuse one."""
        engine = self.service.engine
        for tokens in prompts.token_ids:
            self.service.check_length(len(tokens))
        requests = engine_requests(
            body,
            prompts.token_ids,
            self.reader.texts,
            engine.config,
            engine.model.eos_token_ids,
            self.config.default_max_tokens,
            engine.limits.vocab_size,
            self.adapters.get(body.model or ""),
        )
        if engine.limits.batching_type is BatchingType.V1:  # static batches respond at their end
            requests = [replace(one, streaming=False) for one in requests]
        for one in requests:
            self.service.check(one)
        return requests

    def _submit(
        self,
        read: "ReadBody[Generating, Prompts]",
        requests: list[InferenceRequest],
        request_id: str,
        headers: Mapping[str, str],
    ) -> Answer:
        engine, tokenizer, body = self.service.engine, self.reader.texts.tokenizer, read.body
        choices, index = [], 0
        session = session_key(headers, getattr(body, "messages", None))
        generations = self.service.submit(
            requests, received_s=read.received_s, session=session, streams=bool(body.stream)
        )
        for generation in generations:
            one = generation.request
            longest = min(one.max_new_tokens, engine.limits.max_seq_len - len(one.input_ids))
            if body.max_new_tokens == 0:
                longest = 0
            choices.append(Choice(index, generation, tokenizer, body, longest))
            index += one.beam_width
        return Answer(
            body,
            body.model or self.model,
            request_id,
            int(WallClock().timestamp()),
            choices,
            sum(map(len, read.used.token_ids)),
            read.used.echoes,
            self.service.cancel,
            self.service.statistics_of(generations[0]).answered,
        )


@dataclass(frozen=True, slots=True)
class ReadBody(Generic[Body, Result]):
    """A body that was received at `received_s`, and what was made of it.

    is_long: whether it takes long to work on.
    """

    received_s: float
    is_long: bool
    body: Body
    used: Result


class EventStream(Response):
    """The answer as server-sent events, until it is complete or the client goes away."""

    def __init__(self, answer: Answer, service: AnyService, headers: dict[str, str]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._answer = answer
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        finally:
            self._service.cancel(self._answer.generations)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        events: AsyncIterator[bytes] = self._answer.events()
        async for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, work: Awaitable[Result]) -> Result | None:
    """The result of `work`; None, with the work cancelled, if the client goes away before."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError, GenerationFailed, OSError):
                await task


async def _checked(aside: bool, work: Callable[..., Result], *arguments: Any) -> Result:
    """The result of `work`, which runs in a thread if it is to leave the event loop free. BadRequest for its errors."""
    try:
        return await asyncio.to_thread(work, *arguments) if aside else work(*arguments)
    except InputError as error:
        param, colon, _ = str(error).partition(":")
        status = 404 if isinstance(error, UnknownModel) else 400
        raise BadRequest(status, str(error), param=param if colon and param.isidentifier() else None) from None
    except ReadingFailed as error:
        raise BadRequest(503, str(error), "server_error") from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(content), status, headers, JSON)


async def _bad_request(_request: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    headers = {"retry-after": str(RETRY_AFTER_S)} if error.status in (429, 503) else None
    if error.status == 401:
        headers = {"www-authenticate": "Bearer"}
    content = error_object(error.message, error.kind, error.status, error.param)
    return _json({"error": content}, error.status, headers)


async def _http_error(_request: Request, error: Exception) -> Response:
    """An unknown path or method."""
    assert isinstance(error, HTTPException)
    content = error_object(error.detail, "invalid_request_error", error.status_code)
    return _json({"error": content}, error.status_code, dict(error.headers or {}))


async def _defect(_request: Request, error: Exception) -> Response:
    content = error_object("a defect of the server; its log has more", "server_error", 500)
    return _json({"error": content}, 500)
