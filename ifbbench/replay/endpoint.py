"""A run against an endpoint: the client of a replay sends its requests to a server that is not ours."""

import asyncio
import gc
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ifbbench.clock import NO_PROGRESS, Progress, WallClock
from ifbbench.config import DEFAULT_PRIORITY, ENDPOINT_GROUPS, ENDPOINT_REFUSES, ENDPOINT_TAKES, RunConfig, settings
from ifbbench.engine.in_flight import Response
from ifbbench.engine.request import Request
from ifbbench.errors import InputError
from ifbbench.objectives import parse_objectives
from ifbbench.recording import run_directory
from ifbbench.recording.client_side import (
    CLIENT,
    GENERATION,
    UNTIL_FIRST_TOKEN,
    ChunkTokens,
    ClientRecorder,
    ClientRequestLine,
)
from ifbbench.replay.client import ReplayClient, make_client
from ifbbench.replay.endpoint_answer import Answer, EventLines
from ifbbench.replay.endpoint_api import EndpointApi, prompt_form
from ifbbench.replay.endpoint_http import (
    Address,
    Connections,
    Exchange,
    RequestFailed,
    allow_many_connections,
    new_event_loop,
)
from ifbbench.replay.endpoint_server import KEY_VARIABLES, MetricsPoll, model_name
from ifbbench.workload.formats import write_trace
from ifbbench.workload.trace import Trace, TraceRequest, columns_of

PROGRESS_INTERVAL_S = 1.0
# Timers of an event loop are this late at most; the rest of a wait is spent looking for events without sleeping.
TIMER_S = 0.0015
# The first pause before another attempt, if the server asks for none; each further one is twice as long.
RETRY_PAUSE_S = 0.5
DEFAULT_WARM_UP = 2
WARM_UP_PROMPT_LEN, WARM_UP_OUTPUT_LEN, WARM_UP_ID = 16, 4, 2**62
_log = logging.getLogger("ifbbench")


def run_endpoint(
    trace: Trace, config: RunConfig, places: Iterable[Path], progress: Progress = NO_PROGRESS,
    on_recorded: Callable[[Path], None] | None = None,
) -> tuple[Path, dict[str, Any], ReplayClient]:  # fmt: skip
    """Replay `trace` against `config.endpoint` into the first of `places` that is free (see `run_directory.begun`);
    returns the run directory, the summary, and the client with the outputs.

    InputError before anything is written if the settings are bad, the server cannot be reached, or refuses a request
    of the warm-up. A run that is interrupted keeps what it has.
    """
    _check(trace, config)
    allow_many_connections()
    replay = _EndpointReplay(trace, config, places, progress)
    is_frozen = False
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            gc.collect()
            gc.freeze()  # a collection of all objects takes longer than a request may be late
            is_frozen = True
            summary = runner.run(replay.run())
    except KeyboardInterrupt as interrupt:
        if replay.client is not None:
            interrupt.add_note(f"{replay.client.answered} of {len(trace)} requests were done; results are kept in "
                               f"{replay.directory}.")  # fmt: skip
        raise
    finally:
        if is_frozen:
            gc.unfreeze()
        if replay.client is not None and on_recorded is not None:
            on_recorded(replay.directory)
    assert replay.client is not None
    return replay.directory, summary, replay.client


def _check(trace: Trace, config: RunConfig) -> None:
    """InputError for what cannot be sent; a warning for what will not be."""
    columns = columns_of(trace.requests)
    if columns.max_beam_width > 1:
        raise InputError("--endpoint: the trace has requests with several beams, which are not streamed; replay a "
                         "trace without beams.")  # fmt: skip
    if config.slo and any(one.name == "queue_time" for one in parse_objectives(config.slo)):
        raise InputError("--slo queue_time: only the server knows it; give objectives of ttft, tpot or e2e.")
    has_ids = config.endpoint_type in ("openai", "openai-chat", "trtllm-serve") or prompt_form(config) == "tokens"
    if config.responses_json is not None and not has_ids:
        raise InputError("--responses_json: the answers are text; add --endpoint_prompts tokens, or leave it out.")
    if columns.priority is not None:
        _log.warning("The priorities of the trace order requests in the client only; the server does not get them.")


class _EndpointReplay:
    """One run. client: None until it begins. directory: the one of `places` that it is recorded in."""

    def __init__(self, trace: Trace, config: RunConfig, places: Iterable[Path], progress: Progress) -> None:
        self.client: ReplayClient | None = None
        self.directory = Path()
        self._trace, self._config, self._places, self._progress = trace, config, places, progress
        self._clock = WallClock()
        self._in_flight: set[asyncio.Task[None]] = set()

    async def run(self) -> dict[str, Any]:
        """The whole run; returns the summary."""
        assert self._config.endpoint is not None
        self._progress.stage("connecting")
        self._address = Address.of(self._config.endpoint)
        key = self._config.endpoint_api_key or next(filter(None, map(os.environ.get, KEY_VARIABLES)), None)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._connections = Connections(self._address, headers, self._config.endpoint_timeout, self._clock)
        try:
            self._api = EndpointApi(self._config, await model_name(self._connections, self._config))
            await self._warm_up()
            return await self._record()
        finally:
            self._connections.close()

    async def _warm_up(self) -> None:
        """Send the requests before the measured ones. InputError if one fails, because all others would."""
        warm_up = self._config.warm_up
        self._progress.stage("warming up")
        for one in range(DEFAULT_WARM_UP if warm_up is None else warm_up):
            row = TraceRequest(WARM_UP_ID + one, 0.0, WARM_UP_PROMPT_LEN, WARM_UP_OUTPUT_LEN, WARM_UP_OUTPUT_LEN)
            try:
                await self._exchange(self._api.body(row), Answer(), Exchange())
            except RequestFailed as error:
                raise InputError(f"--endpoint {self._config.endpoint}: the warm-up request failed: {error}. Mend that, "
                                 "or add --warm_up 0 to run nevertheless.") from None  # fmt: skip

    # The run.

    async def _record(self) -> dict[str, Any]:
        with run_directory.begun(self._places, self._config.overwrite, self._begin) as self.directory:
            return await self._replay()

    def _begin(self, directory: Path, name: str) -> None:
        self._progress.stage("writing trace")
        write_trace(self._trace.requests, directory / f"trace.{self._config.recording_format}", overwrite=True)
        run_directory.write_begun(directory, self._description(name))

    async def _replay(self) -> dict[str, Any]:
        config, trace = self._config, self._trace
        self._recorder = ClientRecorder(
            self.directory, self._description(self.directory.name), config.as_dict(), config.recording_format,
            columns_of(trace.requests).class_at,
        )  # fmt: skip
        client = self.client = make_client(config, trace, self._clock, self._make_request)
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._next: asyncio.Handle | None = None
        self._progress.stage("replaying")
        opened, cpu_s = self._connections.opened, _cpu_s()
        self._clock.restart()
        beside = [asyncio.create_task(self._show_progress())]
        poll = None
        if config.poll_metrics:
            name = f"{run_directory.METRICS}.{config.recording_format}"
            poll = MetricsPoll(self._connections, config, self.directory / name)
            beside.append(asyncio.create_task(poll.run()))
        try:
            self._offer()
            await self._ended
        finally:
            wall_s, cpu_s = self._clock.now(), _cpu_s() - cpu_s
            for task in (*beside, *self._in_flight):
                task.cancel()
            await asyncio.gather(*beside, *self._in_flight, return_exceptions=True)
            facts = {
                "connections": self._connections.opened - opened, "resent": self._connections.resent,
                "client_cpu_s": cpu_s, "client_cpu_share": cpu_s / wall_s if wall_s else 0.0,
            }  # fmt: skip
            if poll is not None:
                facts |= {"metrics_samples": poll.samples, "metrics_errors": poll.errors}
            total = client.submitted if client.done else len(trace)
            summary = self._recorder.close(total, not client.done, lambda found: _add(found, client, facts))
        return summary

    def _make_request(self, index: int, row: TraceRequest) -> Request:
        return Request(row.request_id, row.prompt_len, row.max_new_tokens, output_len=row.output_len, index=index,
                       priority=row.priority)  # fmt: skip

    def _offer(self) -> None:
        """Send the requests that are due, and look again when the next one is."""
        client = self.client
        assert client is not None
        self._next = None
        try:
            for request in client.get_requests(-1):
                task = self._loop.create_task(self._send(request))
                self._in_flight.add(task)
                task.add_done_callback(self._sent)
            if client.done and not self._in_flight:
                self._end(None)
                return
            event_s = client.next_event_s
            if event_s is None:
                return  # a response is waited for
            delay_s = event_s - self._clock.now()
            if delay_s > TIMER_S:
                self._next = self._loop.call_later(delay_s - TIMER_S, self._offer)
            else:
                self._next = self._loop.call_soon(self._offer)
        except Exception as error:
            self._end(error)

    def _sent(self, task: "asyncio.Task[None]") -> None:
        """A request has its answer, or failed."""
        self._in_flight.discard(task)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._end(error)
            return
        if self._next is not None:
            self._next.cancel()
        self._offer()

    def _end(self, error: BaseException | None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    async def _send(self, request: Request) -> None:
        """One request with its attempts, to its end."""
        row = self._trace.requests[request.index]
        body, retries = self._api.body(row), list[str]()
        while True:
            answer, exchange = Answer(), Exchange()
            failure: RequestFailed | None = None
            try:
                await self._exchange(body, answer, exchange)
            except RequestFailed as error:
                failure = error
            if failure is None or not failure.may_retry or len(retries) >= self._config.endpoint_retries:
                break
            pause_s = RETRY_PAUSE_S * 2 ** len(retries) if failure.retry_after_s is None else failure.retry_after_s
            retries.append(failure.kind)
            await asyncio.sleep(pause_s)
        self._take(request, row, answer, exchange.sent_s, failure, retries)

    async def _exchange(self, body: bytes, answer: Answer, exchange: Exchange) -> None:
        """One attempt. RequestFailed if it has no complete answer."""
        lines, read, now = EventLines(), self._api.read, self._clock.now

        def on_part(part: bytes) -> None:
            arrived_s = now()
            for data in lines.feed(part):
                read(data, answer, arrived_s)

        exchange.on_part = on_part
        await self._connections.post(self._api.path, body, exchange)
        kind = exchange.headers.get("content-type", "no content type")
        if not answer.chunk_s and not kind.startswith("text/event-stream"):
            raise RequestFailed("malformed_stream", f"expected server-sent events, but got {kind}")
        if not answer.is_ended or not lines.is_empty:
            raise RequestFailed("closed_early", "the stream ended before the answer was complete")
        if not answer.chunk_s:
            raise RequestFailed("no_output", "the answer has no token")

    def _take(
        self, request: Request, row: TraceRequest, answer: Answer, sent_s: float | None,
        failure: RequestFailed | None, retries: list[str],
    ) -> None:  # fmt: skip
        """Record a request that has ended, and answer the client."""
        client = self.client
        assert client is not None
        arrival_s = client.arrival_s(request)
        times_s, tokens, source = answer.count(self._api.tokenizer)
        line = ClientRequestLine(
            request_id=row.request_id, index=request.index, arrival_s=arrival_s,
            prompt_len=answer.prompt_tokens or row.prompt_len, output_len=sum(tokens), max_new_tokens=row.output_len,
            reused_tokens=answer.cached_tokens, sent_s=sent_s, chunks=len(times_s), retries=retries,
        )  # fmt: skip
        if row.priority != DEFAULT_PRIORITY:
            line.priority = row.priority
        if failure is not None:
            line.error, line.kind = str(failure), failure.kind
        else:
            assert sent_s is not None
            self._complete(line, arrival_s, sent_s, times_s, source)
        self._recorder.add(line, times_s, tokens)
        error = None if failure is None else str(failure)
        output = (np.array(answer.ids, np.int32),) if answer.ids else ()
        client.send_response(Response(request, True, output, error=error))

    @staticmethod
    def _complete(
        line: ClientRequestLine, arrival_s: float, sent_s: float, times_s: list[float], source: ChunkTokens
    ) -> None:
        first_s, last_s = times_s[0], times_s[-1]
        line.outcome, line.chunk_tokens = "completed", source
        line.first_token_s, line.end_s = first_s, last_s
        line.ttft_s, line.e2e_s = first_s - arrival_s, last_s - arrival_s
        line.tpot_s = (last_s - first_s) / (line.output_len - 1) if line.output_len > 1 else None
        line.attribution_s = {CLIENT: sent_s - arrival_s, UNTIL_FIRST_TOKEN: first_s - sent_s,
                              GENERATION: last_s - first_s}  # fmt: skip

    # Beside the run.

    async def _show_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            assert self.client is not None
            self._progress.update(self.client.answered, len(self._trace), f"{len(self._in_flight)} in flight")

    def _description(self, name: str) -> dict[str, Any]:
        """The content of run.json: the settings of the client; of the server what is known."""
        config = self._config
        names = [one.name for one in settings() if one.name in ENDPOINT_TAKES
                 or (one.group in ENDPOINT_GROUPS and one.name not in ENDPOINT_REFUSES)]  # fmt: skip
        known = {name: getattr(config, name) for name in names if name != "endpoint_api_key"}
        return {
            "name": name,
            "config": known | {"model": self._api.model, "endpoint_prompts": prompt_form(config), "streaming": True},
            "derived": [],
            "endpoint": {"url": str(self._address), "type": config.endpoint_type, "model": self._api.model},
            "num_kv_blocks": None,
            "seed": config.seed,
            "trace": run_directory.trace_identity(self._trace),
            "model": None,
            "versions": run_directory.versions(),
            "hardware": run_directory.hardware(),
            "git_revision": run_directory.git_revision(),
        }


def _add(summary: dict[str, Any], client: ReplayClient, facts: dict[str, Any]) -> None:
    summary["arrivals"] = client.arrivals()
    per_request = facts["client_cpu_s"] / client.submitted if client.submitted else None
    summary["endpoint"] |= {**facts, "client_cpu_s_per_request": per_request}


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system
