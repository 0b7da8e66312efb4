"""A run against an endpoint: the client of a replay sends its requests to a server that is not ours."""

import asyncio
import json
import logging
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from ifbbench.analysis.number_texts import significant
from ifbbench.clock import WallClock
from ifbbench.endpoint.api import EndpointApi, prompt_form
from ifbbench.endpoint.connections import Address, Connections
from ifbbench.endpoint.http import RequestFailed
from ifbbench.endpoint.loop import (
    Alarm,
    allow_many_connections,
    cancelled_by_signals,
    new_event_loop,
    undisturbed,
)
from ifbbench.endpoint.request import EndpointRequest
from ifbbench.endpoint.server import MetricsPoll, api_key, model_name
from ifbbench.engine.request import Request
from ifbbench.engine.responses import Response
from ifbbench.errors import InputError
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.replay.client import ReplayClient, make_client
from ifbbench.rundir import run_directory
from ifbbench.rundir.client_side import ClientRecorder
from ifbbench.settings.config import RunConfig, settings
from ifbbench.settings.objectives import parse_objectives
from ifbbench.workload.formats import write_trace
from ifbbench.workload.trace import Trace, TraceRequest, columns_of

PROGRESS_INTERVAL_S = 1.0
ERRORS_SHOWN = 3
# Bodies of so many bytes are made before the run, and later ones ahead while no request is due within this time.
BYTES_AHEAD, IDLE_S = 2**25, 0.0003
# Connections that are there before the first arrival, of a run that does not say how many requests it has at a time.
MAX_WARM_CONNECTIONS = 256
# A request without --endpoint_max_time or --duration fails if its answer is not complete then.
LONGEST_ANSWER_S = 6 * 3600.0
# Files that a process has open beside its connections.
OTHER_FILES = 32
DEFAULT_WARM_UP = 2
WARM_UP_PROMPT_LEN, WARM_UP_OUTPUT_LEN, WARM_UP_ID = 16, 4, 2**62
# Names of fields of --extra_body whose values are not written to the run directory. Counts of tokens are no secrets.
SECRET = re.compile(r"key$|secret|passw|credential|authorization|bearer|cookie|token$", re.IGNORECASE)
NOT_RECORDED = "(not recorded)"
_log = logging.getLogger("ifbbench")


def run_endpoint(
    trace: Trace,
    config: RunConfig,
    places: Iterable[Path],
    progress: Progress = NO_PROGRESS,
    on_recorded: Callable[[Path], None] | None = None,
) -> tuple[Path, dict[str, Any], ReplayClient, dict[str, Any]]:
    """Replay `trace` against `config.endpoint` into the first of `places` that is free (see `run_directory.begun`);
    returns the run directory, the summary, the client with the outputs, and the content of `run.json`.

    InputError before anything is written if the settings are bad, the server cannot be reached, or refuses a request
    of the warm-up. A run that is interrupted keeps what it has.
    """
    _check(trace, config, allow_many_connections())
    replay = _EndpointReplay(trace, config, places, progress)
    try:
        with undisturbed(), asyncio.Runner(loop_factory=new_event_loop) as runner:
            try:
                summary = runner.run(replay.run())
            except asyncio.CancelledError:  # by a signal, unless there was a defect
                raise replay.defect or KeyboardInterrupt from None
    except KeyboardInterrupt as interrupt:
        if replay.client is not None:
            interrupt.add_note(
                f"{replay.client.answered} of {len(trace)} requests were done; results are kept in {replay.directory}."
            )
        raise
    finally:
        if replay.client is not None and on_recorded is not None:
            on_recorded(replay.directory)
    assert replay.client is not None
    return replay.directory, summary, replay.client, replay.description(replay.directory.name)


def _check(trace: Trace, config: RunConfig, max_files: int | None) -> None:
    """InputError for what cannot be sent; a warning for what will not be."""
    columns = columns_of(trace.requests)
    at_a_time = min(config.concurrency or 0, len(trace))
    if max_files is not None and at_a_time > max_files - OTHER_FILES:
        raise InputError(
            f"--concurrency {config.concurrency}: each has a connection, and this process may open "
            f"{max_files:,} files; raise the limit with ulimit -n, or ask for fewer."
        )
    if columns.max_beam_width > 1:
        raise InputError(
            "--endpoint: the trace has requests with several beams, which are not streamed; replay a "
            "trace without beams."
        )
    if config.slo and any(one.name == "queue_time" for one in parse_objectives(config.slo)):
        raise InputError("--slo queue_time: only the server knows it; give objectives of ttft, tpot or e2e.")
    has_ids = config.endpoint_type in ("openai", "openai-chat", "trtllm-serve") or prompt_form(config) == "tokens"
    if config.responses_json is not None and not has_ids:
        raise InputError("--responses_json: the answers are text; add --endpoint_prompts tokens, or leave it out.")
    if columns.priority is not None:
        _log.warning("The priorities of the trace order requests in the client only; the server does not get them.")


class _EndpointReplay:
    """One run.

    client: None until it begins.
    directory: the one of `places` that it is recorded in.
    defect: an exception in a callback that has ended it.
    """

    def __init__(self, trace: Trace, config: RunConfig, places: Iterable[Path], progress: Progress) -> None:
        self.client: ReplayClient | None = None
        self.directory = Path()
        self.defect: Exception | None = None
        self._trace, self._config, self._places, self._progress = trace, config, places, progress
        self._clock = WallClock()
        self._in_flight: set[EndpointRequest] = set()
        # Bodies that were made ahead, by the index of their request, and the index of the next one to make.
        self._bodies: dict[int, bytes] = {}
        self._next_body = self._bytes_ahead = 0

    async def run(self) -> dict[str, Any]:
        """The whole run; returns the summary."""
        assert self._config.endpoint is not None
        self._progress.stage("connecting")
        self._task = asyncio.current_task()
        asyncio.get_running_loop().set_exception_handler(self._end_by_defect)
        self._address = Address.of(self._config.endpoint)
        key = api_key(self._config)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._alarm = Alarm(asyncio.get_running_loop(), self._clock, self._offer)
        config = self._config
        max_time_s = config.endpoint_max_time or max(config.duration or LONGEST_ANSWER_S, config.endpoint_timeout)
        self._connections = Connections(
            self._address, headers, config.endpoint_timeout, max_time_s, self._clock, self._alarm
        )
        try:
            with cancelled_by_signals():
                name = await model_name(self._connections, self._config)
                self._api = EndpointApi(self._config, name, self._connections)
                await self._warm_up()
                return await self._record()
        finally:
            self._connections.close()
            self._alarm.close()

    def _end_by_defect(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in a callback or task that is not awaited: the run would wait for ever for its effect.
        Errors of the system are those of a connection, which is notified of them itself."""
        error = context.get("exception")
        if not isinstance(error, Exception) or isinstance(error, OSError):
            loop.default_exception_handler(context)
        elif self.defect is None and self._task is not None:
            self.defect = error
            self._task.cancel()

    async def _warm_up(self) -> None:
        """Send the requests before the measured ones. InputError if one fails, because all others would."""
        warm_up = self._config.warm_up
        self._progress.stage("warming up")
        for one in range(DEFAULT_WARM_UP if warm_up is None else warm_up):
            row = TraceRequest(WARM_UP_ID + one, 0.0, WARM_UP_PROMPT_LEN, WARM_UP_OUTPUT_LEN, WARM_UP_OUTPUT_LEN)
            end: asyncio.Future[EndpointRequest] = asyncio.get_running_loop().create_future()
            request = EndpointRequest(self._api, self._connections, -1, row, self._api.body(row), end.set_result)
            request.begin()
            if (failure := (await end).failure) is not None:
                raise InputError(
                    f"--endpoint {self._config.endpoint}: the warm-up request failed: {failure}."
                    f"{self._about_token_ids(failure)} Mend that, or add --warm_up 0 to run nevertheless."
                )

    def _about_token_ids(self, failure: RequestFailed) -> str:
        """A reason for which a server may refuse prompts that are drawn; empty if it cannot be the reason."""
        if not failure.kind.startswith("http_") or self._api.sends_text or self._api.tokenizer is not None:
            return ""
        return (
            f" Prompts are random token ids below --endpoint_vocab_size {self._config.endpoint_vocab_size}; if the "
            "server's vocabulary is smaller, give its size, or --tokenizer."
        )

    # The run.

    async def _record(self) -> dict[str, Any]:
        with run_directory.begun(self._places, self._config.overwrite, self._begin) as self.directory:
            return await self._replay()

    def _begin(self, directory: Path, name: str) -> None:
        self._progress.stage("writing trace")
        write_trace(self._trace.requests, directory / f"trace.{self._config.recording_format}", overwrite=True)
        run_directory.write_begun(directory, self.description(name))

    async def _replay(self) -> dict[str, Any]:
        config, trace = self._config, self._trace
        self._recorder = ClientRecorder(
            self.directory,
            self.description(self.directory.name),
            config.as_dict(),
            config.recording_format,
            columns_of(trace.requests).class_at,
        )
        client = self.client = make_client(config, trace, self._clock, self._make_request)
        self._ended = asyncio.get_running_loop().create_future()
        self._progress.stage("preparing requests")
        while self._make_body():
            pass
        await self._connections.open(self._requests_at_once())
        self._progress.stage("replaying")
        cpu_s = _cpu_s()
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
            self._alarm.set(inf)
            self._in_flight.clear()
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            facts = {
                "connections": self._connections.opened,
                "resent": self._connections.resent,
                "client_cpu_s": cpu_s,
                "client_cpu_share": cpu_s / wall_s if wall_s else 0.0,
            }
            if poll is not None:
                facts |= {"metrics_samples": poll.samples, "metrics_errors": poll.errors}
            total = client.submitted if client.done else len(trace)
            summary = self._recorder.close(total, not client.done, lambda found: _add(found, client, facts))
        return summary

    def _make_request(self, index: int, row: TraceRequest) -> Request:
        return Request(
            row.request_id,
            row.prompt_len,
            row.max_new_tokens,
            output_len=row.output_len,
            index=index,
            priority=row.priority,
        )

    def _offer(self) -> None:
        """Send the requests that are due, and look again when the next one is."""
        client = self.client
        assert client is not None
        try:
            for request in client.get_requests(-1):
                self._send(request)
            if client.done and not self._in_flight:
                self._end(None)
                return
            event_s = client.next_event_s
            self._alarm.set(inf if event_s is None else event_s)
            if self._alarm.at_s - self._clock.now() > IDLE_S:
                self._make_body()
        except Exception as error:
            self._end(error)

    def _send(self, request: Request) -> None:
        index, row = request.index, self._trace.requests[request.index]
        if (body := self._bodies.pop(index, None)) is None:
            body, self._next_body = self._api.body(row), max(self._next_body, index + 1)
        else:
            self._bytes_ahead -= len(body)
        sending = EndpointRequest(self._api, self._connections, index, row, body, partial(self._take, request))
        self._in_flight.add(sending)
        sending.begin()

    def _make_body(self) -> bool:
        """Make the body of a later request, so that it is sent at once when it arrives. False if there are enough."""
        if self._bytes_ahead >= BYTES_AHEAD or self._next_body == len(self._trace):
            return False
        body = self._bodies[self._next_body] = self._api.body(self._trace.requests[self._next_body])
        self._bytes_ahead += len(body)
        self._next_body += 1
        return True

    def _take(self, request: Request, ended: EndpointRequest) -> None:
        """Record a request that has ended, and answer the client."""
        client = self.client
        assert client is not None
        if ended not in self._in_flight:  # the run is over
            return
        self._in_flight.remove(ended)
        try:
            line, times_s, tokens = ended.line(client.arrival_s(request))
            self._recorder.add(line, times_s, tokens)
            output = (np.array(ended.answer.ids, np.int32),) if ended.answer.ids else ()
            client.send_response(Response(request, True, output, error=line.error))
        except Exception as error:
            self._end(error)
        else:
            self._offer()

    def _end(self, error: BaseException | None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def _requests_at_once(self) -> int:
        """How many there may be soon: those of a closed loop, else those that arrive in the first second."""
        concurrency, arrival_s = self._config.concurrency, columns_of(self._trace.requests).arrival_s
        if concurrency is not None and not self._config.keeps_arrivals:
            return min(concurrency, len(self._trace))
        return min(bisect_right(arrival_s, 1.0), concurrency or MAX_WARM_CONNECTIONS, MAX_WARM_CONNECTIONS)

    # Beside the run.

    async def _show_progress(self) -> None:
        known, metrics = 0, self._recorder.metrics
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            assert self.client is not None
            parts, delays_s = [f"{len(self._in_flight)} in flight"], metrics.send_delay_s[known:]
            known += len(delays_s)
            if delays_s:
                parts.append(f"sent up to {significant(max(delays_s) * 1000)} ms late")
            parts += [f"{number} {kind}" for kind, number in metrics.errors.most_common(ERRORS_SHOWN)]
            self._progress.update(self.client.answered, len(self._trace), ", ".join(parts))

    def description(self, name: str) -> dict[str, Any]:
        """The content of run.json: the settings of the client; of the server what is known."""
        config = self._config
        names = [one.name for one in settings() if one.is_of_client and one.name != "endpoint_api_key"]
        known = {name: getattr(config, name) for name in names}
        if config.extra_body is not None:
            known["extra_body"] = json.dumps(without_secrets(json.loads(config.extra_body)))
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


def without_secrets(value: Any) -> Any:
    """`value`, of JSON, with NOT_RECORDED for what fields that look like secrets hold."""
    if isinstance(value, list):
        return [without_secrets(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {name: NOT_RECORDED if SECRET.search(name) else without_secrets(one) for name, one in value.items()}


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system
