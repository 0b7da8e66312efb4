"""One run: a trace through the engine into a run directory."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ifbbench.batching.manager import BatchManager
from ifbbench.batching.request import NO_END_TOKENS, Request, SamplingParams
from ifbbench.clock import WallClock
from ifbbench.config import RunConfig
from ifbbench.errors import IfbbenchError, InputError
from ifbbench.recording import environment, run_directory
from ifbbench.recording.recorder import Recorder
from ifbbench.replay.client import ReplayClient
from ifbbench.replay.engine import Engine, build_engine, warm_up
from ifbbench.workload.jsonl import write_trace
from ifbbench.workload.load import load_trace
from ifbbench.workload.tokens import check_vocabulary, prompt_tokens
from ifbbench.workload.trace import Trace, TraceRequest

PROGRESS_INTERVAL_S = 0.1


class Progress(Protocol):
    """Hears how far a run is."""

    def update(self, completed: int, total: int, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where the results are, the figures of `summary.json`, and how many requests failed."""

    directory: Path
    summary: dict[str, Any]
    failed: int


class RunFailed(IfbbenchError):
    """The run broke off; what it had done is on disk."""


def run_trace(source: str | None, config: RunConfig, progress: Progress | None = None) -> RunResult:
    """Replay `source` (see `load_trace`) with `config`.

    Raises InputError before anything is written if the input or the settings are bad, and RunFailed if the run breaks
    off in the middle; its directory then holds what was done, marked partial."""
    trace = load_trace(source, config)
    _check_side_outputs(config)
    directory = _output_directory(config, trace)
    run_directory.check(directory, config.overwrite)
    engine = build_engine(config)
    if engine.makes_tokens:
        check_vocabulary(trace, engine.model.vocab_size)
    run_directory.prepare(directory, config.overwrite)
    write_trace(trace.requests, directory / "trace.jsonl")
    try:
        summary, client = _replay(trace, engine, directory, progress)
    finally:
        engine.executor.close()
    if config.responses_json:
        _write_responses(Path(config.responses_json), trace, client)
    return RunResult(directory, summary, summary["requests"]["failed"])


def _replay(
    trace: Trace, engine: Engine, directory: Path, progress: Progress | None
) -> tuple[dict[str, Any], ReplayClient]:
    warm_up(engine)
    clock = WallClock()
    client = ReplayClient(trace, clock, _request_factory(engine))
    description = _describe(trace, engine, directory)
    recorder = Recorder(directory, description, len(trace), engine.limits.max_batch_size, client.arrival_s)
    manager = BatchManager(
        engine.limits, engine.executor, clock, client.get_requests, client.send_response, recorder, client.queued
    )
    clock.restart()
    try:
        _loop(manager, client, clock, recorder, progress, len(trace))
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"{client.answered} of {len(trace)} requests were done; results are kept in {directory}.")
        raise
    except Exception as error:
        raise RunFailed(
            f"the run broke off in iteration {manager.iteration}: {error} "
            f"({client.answered} of {len(trace)} requests were done; what was recorded is in {directory})"
        ) from error
    finally:
        summary = recorder.close(partial=not client.done)
    return summary, client


def _loop(
    manager: BatchManager,
    client: ReplayClient,
    clock: WallClock,
    recorder: Recorder,
    progress: Progress | None,
    total: int,
) -> None:
    shown_s = 0.0
    while not client.done:
        if not manager.step() and client.next_arrival_s is not None:
            recorder.flush()
            clock.wait_until(client.next_arrival_s)
        if progress and clock.now() - shown_s >= PROGRESS_INTERVAL_S:
            shown_s = clock.now()
            blocks = f"{manager.kv_cache.pool.num_used}/{manager.kv_cache.num_blocks} KV blocks"
            progress.update(client.answered, total, f"{len(manager.active)} active, {blocks}")


def _request_factory(engine: Engine) -> Callable[[int, TraceRequest], Request]:
    config = engine.config
    end_tokens = engine.model.eos_token_ids if config.stop_at_end_token else NO_END_TOKENS

    def make_request(index: int, request: TraceRequest) -> Request:
        tokens = prompt_tokens(request, engine.model.vocab_size, config.seed) if engine.makes_tokens else None
        # One seed a request, so that its tokens do not depend on the others.
        sampling = SamplingParams(config.temperature, config.top_k, config.top_p, config.seed + request.request_id)
        return Request(
            request.request_id, request.prompt_len, request.max_new_tokens, output_len=request.output_len,
            prompt_tokens=tokens, index=index, priority=request.priority, beam_width=request.beam_width,
            lora_task_id=request.lora_task_id, sampling=sampling, end_tokens=end_tokens,
        )  # fmt: skip

    return make_request


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
    }


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
    if config.responses_json and config.device == "null":
        raise InputError("--responses_json: --device null makes no tokens; leave one of them out.")
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
