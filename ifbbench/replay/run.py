"""One run: a trace through the engine into a run directory."""

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ifbbench.api.engine import Engine, Profile, Progress, build_engine, warm_up
from ifbbench.clock import WallClock
from ifbbench.config import RunConfig
from ifbbench.engine.admission import AdmissionLimits, Refusal
from ifbbench.engine.config import BatchingConfig
from ifbbench.engine.manager import TokenGenerationLoop
from ifbbench.engine.records import IterationRecord, IterationStatistics, Observer, Stretch
from ifbbench.engine.request import Request
from ifbbench.errors import IfbbenchError, InputError
from ifbbench.recording import environment, run_directory
from ifbbench.recording.recorder import Recorder
from ifbbench.replay.client import ReplayClient, make_client
from ifbbench.replay.make_request import request_maker
from ifbbench.workload.formats import write_trace
from ifbbench.workload.load import load_trace
from ifbbench.workload.prompts import check_vocabulary
from ifbbench.workload.trace import Trace, columns_of

PROGRESS_INTERVAL_S = 0.1
_log = logging.getLogger("ifbbench")


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where the results are, the figures of `summary.json`, and how many requests failed."""

    directory: Path
    summary: dict[str, Any]
    failed: int


class RunFailed(IfbbenchError):
    """The run broke off; what it had done is on disk."""


def run_trace(
    source: str | None, config: RunConfig, progress: Progress | None = None, *, owns_process: bool = False
) -> RunResult:
    """Replay `source` (see `load_trace`) with `config`.

    owns_process: see `build_engine`. Raises InputError before anything is written if the input or the settings are bad,
    and RunFailed if the run breaks off in the middle; its directory then holds what was done, marked partial."""
    trace = load_trace(source, config)
    _check_side_outputs(config)
    directory = _output_directory(config, trace)
    run_directory.check(directory, config.overwrite)
    engine = build_engine(config, columns_of(trace.requests).max_beam_width, owns_process=owns_process)
    try:
        for refusal, count in expected_refusals(trace, engine.config, engine.limits):
            advice = _advice(refusal.limit, engine.config)
            share = f"{count:,} of {len(trace):,}"
            _log.warning("%s requests will be refused: %s. %s", share, refusal.text, advice)
        if engine.makes_tokens:
            check_vocabulary(trace, engine.model.vocab_size)
        warm_up(engine, progress)
        run_directory.prepare(directory, config.overwrite)
        write_trace(trace.requests, directory / f"trace.{config.recording_format}")
        summary, client = _replay(trace, engine, directory, progress)
    finally:
        engine.executor.close()
    if config.responses_json:
        _write_responses(Path(config.responses_json), trace, client)
    return RunResult(directory, summary, summary["requests"]["failed"])


def expected_refusals(trace: Trace, config: RunConfig, limits: BatchingConfig) -> list[tuple[Refusal, int]]:
    """Which limits refuse how many requests by their size, as the engine will, each with an example."""
    admission = AdmissionLimits(limits)
    columns = columns_of(trace.requests)
    beams = np.full(len(columns), config.beam_width or 1)
    if columns.max_beam_width > 1 and config.beam_width is None:
        beams = np.fromiter((request.beam_width for request in trace), np.int64, len(trace))
    sizes = np.stack([beams, np.asarray(columns.prompt_len), np.asarray(columns.max_new_tokens)])
    # Of the requests with equal prompt lengths, only the longest output is looked at, unless that is refused.
    by_size = np.lexsort(sizes[::-1])
    sizes = sizes[:, by_size]
    is_longest = np.append((sizes[:2, 1:] != sizes[:2, :-1]).any(axis=0), True)
    groups = np.diff(np.flatnonzero(is_longest), prepend=-1)
    longest = sizes[:, is_longest]
    refused = [admission.refusal_by_size(prompt, new, beam, config.streaming) is not None
               for beam, prompt, new in zip(*longest.tolist(), strict=True)]  # fmt: skip
    found: dict[str, tuple[Refusal, int]] = {}
    distinct, counts = np.unique(sizes[:, np.repeat(refused, groups)], axis=1, return_counts=True)
    for beam, prompt, new, count in zip(*distinct.tolist(), counts.tolist(), strict=True):
        if refusal := admission.refusal_by_size(prompt, new, beam, config.streaming):
            first, so_far = found.get(refusal.limit, (refusal, 0))
            found[refusal.limit] = (first, so_far + count)
    return list(found.values())


def _advice(limit: str, config: RunConfig) -> str:
    """Which setting lets requests in that `limit` refuses."""
    if limit == "max_input_len" and not config.enable_chunked_context and config.max_input_len == config.max_num_tokens:
        can_chunk = config.type != "v1" and config.kv_cache_type == "paged"
        if can_chunk and config.max_num_tokens >= (config.context_chunk_unit or config.tokens_per_block):
            return "--enable_chunked_context lets them in."
        return "A larger --max_num_tokens lets them in."
    return {
        "max_input_len": "A larger --max_input_len lets them in.",
        "max_seq_len": "A larger --max_seq_len lets them in, or --max_prompt_len shortens them.",
        "max_beam_width": "A larger --max_beam_width lets them in.",
        "kv_blocks": "A larger KV cache (--max_tokens_in_paged_kvcache, --kv_cache_free_gpu_mem_fraction) or a smaller "
        "--reserve lets them in.",
        "streaming": "--enable_chunked_context lets them in.",
    }.get(limit, "")


def _replay(
    trace: Trace, engine: Engine, directory: Path, progress: Progress | None
) -> tuple[dict[str, Any], ReplayClient]:
    clock = engine.clock
    client = make_client(engine.config, trace, clock, request_maker(engine))
    description = _describe(trace, engine, directory)
    statistics = IterationStatistics(engine.limits.batching_type, engine.limits.max_batch_size)
    recorder = Recorder(
        directory, description, len(trace), statistics, client.arrival_s, engine.config.recording_format,
        engine.config.iteration_stats_every, profile=engine.profile.steps if engine.profile else None,
    )  # fmt: skip
    observer: Observer = _StatisticsPrinter(recorder, statistics) if engine.config.log_iteration_data else recorder
    manager = TokenGenerationLoop(
        engine.limits, engine.executor, clock, client.get_requests, client.send_response, observer, client.queued,
        next_change=client.next_arrival_s, next_priority=client.next_priority,
    )  # fmt: skip
    clock.restart()
    try:
        _loop(manager, client, recorder, progress, len(trace), isinstance(clock, WallClock))
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"{client.answered} of {len(trace)} requests were done; results are kept in {directory}.")
        raise
    except Exception as error:
        raise RunFailed(
            f"the run broke off after {manager.iteration} iterations: {error} "
            f"({client.answered} of {len(trace)} requests were done; what was recorded is in {directory})"
        ) from error
    finally:
        summary = recorder.close(partial=not client.done)
    return summary, client


class _StatisticsPrinter:
    """An observer that also prints each iteration's statistics, one line of JSON, to stderr."""

    def __init__(self, recorder: Recorder, statistics: IterationStatistics) -> None:
        self._recorder = recorder
        self._statistics = statistics

    def iteration(self, record: IterationRecord) -> None:
        self._recorder.iteration(record)
        print(json.dumps(self._statistics.fields(record)), file=sys.stderr)

    def stretch(self, stretch: Stretch) -> None:
        self._recorder.stretch(stretch)
        for record in stretch.records():
            print(json.dumps(self._statistics.fields(record)), file=sys.stderr)

    def left(self, request: Request, error: str | None) -> None:
        self._recorder.left(request, error)


def _loop(
    manager: TokenGenerationLoop,
    client: ReplayClient,
    recorder: Recorder,
    progress: Progress | None,
    total: int,
    passes_by_itself: bool,
) -> None:
    """Step until every request is answered. passes_by_itself: whether the run's time does, so that waits take long."""
    # Whoever watches the run lives in real time, whatever its own clock says.
    clock, shown_s = WallClock(), -PROGRESS_INTERVAL_S
    idle_at: tuple[int, int] | None = None
    while not client.done:
        if not manager.step() and not client.done:
            if passes_by_itself:
                recorder.flush()
            counts = (client.handed_out, client.answered)
            if client.wait():
                idle_at = None
            elif counts == idle_at:
                raise _no_progress(manager, client, total)
            else:
                idle_at = counts
        if progress and clock.now() - shown_s >= PROGRESS_INTERVAL_S:
            shown_s = clock.now()
            blocks = f"{manager.kv_cache.num_used}/{manager.kv_cache.num_blocks} KV blocks"
            progress.update(client.answered, total, f"{len(manager.active)} active, {blocks}")
    # With overlap, an iteration may still be under way for nobody.
    while manager.step():
        pass


def _no_progress(manager: TokenGenerationLoop, client: ReplayClient, total: int) -> RunFailed:
    return RunFailed(
        f"no progress: no request is active, and the engine fetches none. Of {total} requests {client.handed_out} "
        f"were fetched and {client.answered} answered; {manager.num_waiting} wait in the engine and "
        f"{client.queued()} in the client. This is a defect of ifbbench: please report it with the command."
    )


def _describe(trace: Trace, engine: Engine, directory: Path) -> dict[str, Any]:
    return {
        "name": directory.name,
        "config": engine.config.as_dict() | {"device": engine.device},
        "num_kv_blocks": engine.limits.num_blocks,
        "seed": engine.config.seed,
        "trace": {
            "name": trace.name,
            "source": trace.source,
            "sha256": trace.sha256,
            "requests": len(trace),
            "skipped_rows": trace.skipped_rows,
        },
        "model": engine.describe_model(),
        "versions": environment.versions(),
        "hardware": environment.hardware(),
        "git_revision": environment.git_revision(),
    } | _limits_of(engine.profile)


def _limits_of(profile: Profile | None) -> dict[str, Any]:
    """What a profiled run is to be compared with."""
    if profile is None:
        return {}
    return {"device_limits": {"flops_per_s": profile.flops_per_s, "bytes_per_s": profile.bytes_per_s}}


def _output_directory(config: RunConfig, trace: Trace) -> Path:
    """The directory asked for; else results/<trace name>, with a number where that is taken."""
    if config.output:
        return Path(config.output)
    directory, number = run_directory.RESULTS / trace.name, 2
    while directory.exists() and not config.overwrite:
        directory, number = run_directory.RESULTS / f"{trace.name}-{number}", number + 1
    return directory


def _check_side_outputs(config: RunConfig) -> None:
    """Refuse before the run what could not be written after it."""
    if config.responses_json and config.makes_no_tokens:
        raise InputError(f"--responses_json: --device {config.device} makes no tokens; leave one of them out.")
    for name in ("responses_json", "output_csv"):
        value = getattr(config, name)
        if not value:
            continue
        path = Path(value)
        if path.is_dir() or not path.parent.is_dir():
            raise InputError(f"--{name} {path}: expected a file in a directory that exists.")
        if path.exists() and not config.overwrite:
            raise InputError(f"--{name} {path}: already exists; add --overwrite, or give another file.")


def _write_responses(path: Path, trace: Trace, client: ReplayClient) -> None:
    """The generated tokens of each request that completed, in the order of the trace."""
    responses = [
        {"response_id": request.request_id, "response_tokens": client.outputs[request.request_id].tolist()}
        for request in trace
        if request.request_id in client.outputs
    ]
    path.write_text(json.dumps(responses) + "\n", encoding="utf-8")
