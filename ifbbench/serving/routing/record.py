"""The recording of a router: a trace of what it was asked, and what it saw of each answer."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ifbbench.endpoint.answer import Answer
from ifbbench.endpoint.http import RequestFailed
from ifbbench.fleet.front import offers
from ifbbench.rundir import run_directory
from ifbbench.rundir.client_side import CLIENT, GENERATION, UNTIL_FIRST_TOKEN, ClientRecorder, ClientRequestLine
from ifbbench.rundir.traffic_trace import TrafficTrace
from ifbbench.serving.recording import SOURCE
from ifbbench.serving.routing.asked import Asked
from ifbbench.serving.routing.config import RouterConfig
from ifbbench.settings.config import RunConfig
from ifbbench.settings.groups.fleet import ROUTERS
from ifbbench.workload.trace import Trace

# Answers are counted whole: a request may ask for several choices.
UNLIMITED = 2**27


class RouterRecording:
    """Writes the run directory of a router: that of a client which measures servers, with the replica of each request
    and what the router saw. No other process records there until `close`.

    model: as the servers call it.
    """

    def __init__(self, directory: Path, config: RunConfig, server: RouterConfig, model: str) -> None:
        self.directory = directory
        self._has_tokens = not server.record_lengths_only
        self._file = f"trace.{config.recording_format}"
        taken = ("seed", "slo", "recording_format", "router_state_age", "request_retries")
        url = ",".join(server.addresses)
        router = config.router or ROUTERS[0]
        self._description: dict[str, Any] = {
            "name": directory.name,
            "config": {name: getattr(config, name) for name in taken} | {"model": model, "streaming": True},
            "derived": [],
            "endpoint": {
                "url": url,
                "type": "router",
                "model": model,
                "router": router,
                "backends": server.addresses,
            },
            "num_kv_blocks": None,
            "seed": config.seed,
            "trace": run_directory.trace_identity(Trace(directory.name, [], "", SOURCE)),
            "model": None,
            "versions": run_directory.versions(),
            "hardware": run_directory.hardware(),
            "git_revision": run_directory.git_revision(),
        }
        self._open = ExitStack()
        self._open.enter_context(run_directory.begun([directory], config.overwrite, self._begin))
        self._trace = TrafficTrace(directory / self._file)
        self._recorder = ClientRecorder(
            directory, self._description, config.as_dict(), config.recording_format, lambda index: None
        )

    def _begin(self, directory: Path, name: str) -> None:
        (directory / self._file).touch()
        run_directory.write_begun(directory, self._description)

    def add(
        self,
        number: int,
        asked: Asked,
        arrival_s: float,
        sent_s: float | None,
        answer: Answer,
        failure: RequestFailed | None,
        attempts: Sequence[str],
        replica: int | None,
        seen: Mapping[str, list[float]],
        session: int | None,
    ) -> None:
        """A request has ended.

        attempts: kinds of the failures before the last attempt.
        replica: replica of the last attempt.
        seen: what the router saw then.
        session: number of its session, if others may be of the same one.
        """
        times_s, tokens, source, warnings = answer.count(None, UNLIMITED)
        if failure is None and not times_s:
            failure = RequestFailed("no_output", "the answer has no token")
        prompt_len, output_len = answer.prompt_tokens or asked.prompt_len, sum(tokens)
        line = ClientRequestLine(
            request_id=number,
            index=number,
            arrival_s=arrival_s,
            prompt_len=prompt_len,
            output_len=output_len,
            max_new_tokens=asked.max_tokens or output_len,
            reused_tokens=answer.cached_tokens,
            sent_s=sent_s,
            chunks=len(times_s),
            retries=list(attempts),
        )
        if replica is not None:
            line.replica = replica
        if seen:
            line.offers = offers(dict(seen))
        if failure is not None:
            line.error, line.kind = str(failure), failure.kind
        else:
            assert sent_s is not None
            first_s, last_s = times_s[0], times_s[-1]
            line.outcome, line.chunk_tokens = "completed", source
            if warnings:
                line.warnings = warnings
            line.first_token_s, line.end_s = first_s, last_s
            line.ttft_s, line.e2e_s = first_s - arrival_s, last_s - arrival_s
            line.tpot_s = (last_s - first_s) / (output_len - 1) if output_len > 1 else None
            line.attribution_s = {
                CLIENT: sent_s - arrival_s,
                UNTIL_FIRST_TOKEN: first_s - sent_s,
                GENERATION: last_s - first_s,
            }
        self._recorder.add(line, times_s, tokens)
        self._trace.add(asked.row(number, arrival_s, prompt_len, max(output_len, 1), self._has_tokens, session))

    def flush(self) -> None:
        """Make everything up to here readable."""
        self._trace.flush()
        self._recorder.flush()

    def close(self, total: int, facts: Mapping[str, Any], lag_s: Mapping[str, float]) -> dict[str, Any]:
        """End the recording; returns the summary. facts: for the figures of the endpoint."""
        self._description["trace"] |= self._trace.close(total)

        def complete(summary: dict[str, Any]) -> None:
            summary["endpoint"] |= facts
            summary["delivery_lag_s"] = dict(lag_s)

        with self._open:
            return self._recorder.close(total, False, complete)
