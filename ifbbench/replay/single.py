"""One run in this process: a trace through one engine into a run directory."""

import gc
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from msgspec.json import decode

from ifbbench.build.engine import Engine, build_engine, loop_maker, warm_up
from ifbbench.clock import WallClock
from ifbbench.compressed import open_to_read
from ifbbench.engine.arrays import IntArray
from ifbbench.engine.interfaces import Delivery, Observer
from ifbbench.engine.loop import TokenGenerationLoop
from ifbbench.engine.transferring_loop import TransferringLoop
from ifbbench.errors import RunFailed
from ifbbench.files import lost, new_file, replace_file
from ifbbench.kv.tiers import KvTiers
from ifbbench.models.named_models import built_in_shape
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.replay.client import IterationClient, ReplayClient, make_client
from ifbbench.replay.rank_runs import WRITING, leading
from ifbbench.replay.requests import advice, expected_refusals, request_maker
from ifbbench.replay.served import ServedClient
from ifbbench.rundir import run_directory
from ifbbench.rundir.lines import is_thinned_out
from ifbbench.rundir.printing import PrintingRecorder
from ifbbench.rundir.recorder import Recorder, SummaryRecorder
from ifbbench.schedulers.engines import check_scheduler
from ifbbench.settings.config import RunConfig
from ifbbench.settings.groups.replay import BY_ITERATION
from ifbbench.simulated.energy import energy_figures
from ifbbench.simulated.executor import SimulatedExecutor
from ifbbench.simulated.expected_error import NO_DRAFTS, NO_ENGINE, Compared, expected_error
from ifbbench.simulated.serving_process import ServingProcess
from ifbbench.workload.formats import write_trace
from ifbbench.workload.prompts import check_vocabulary
from ifbbench.workload.trace import Trace, columns_of

if TYPE_CHECKING:
    from ifbbench.build.ranks import RankLoop
    from ifbbench.schedulers.sglang.scheduler import SglangScheduler
    from ifbbench.schedulers.tensorrt_llm.scheduler import TensorRtLlmScheduler
    from ifbbench.schedulers.vllm.scheduler import VllmScheduler

PROGRESS_INTERVAL_S = 0.1
REPLAYING = "replaying"
LONG_RUN_S = 3600
FLUSH_BEFORE_WAIT_S = 0.05  # a shorter wait is too short: the next request would be late
_log = logging.getLogger("ifbbench")


@dataclass(frozen=True, slots=True)
class RunResult:
    """The run directory, the figures of its `summary.json`, the number of failed requests, and the content of its
    `run.json`, which repeats have not."""

    directory: Path
    summary: dict[str, Any]
    failed: int
    description: Mapping[str, Any] = field(default_factory=dict)


def run_loaded(
    trace: Trace,
    config: RunConfig,
    progress: Progress,
    owns_process: bool = False,
    on_recording: Callable[[Path], None] | None = None,
    on_recorded: Callable[[Path], None] | None = None,
    on_end: Callable[[SummaryRecorder], None] = lambda recorder: None,
) -> RunResult:
    """`run_trace` of the requests that `load_trace` returned, in this process. on_end: takes the recorder."""
    with engine_for(trace, config, progress, owns_process) as engine:
        client, description = client_of(trace, engine), describe(trace, engine, config)

        begin = beginning(trace, config, description, progress)
        with run_directory.begun(places(config, trace), config.overwrite, begin) as directory:
            say_number(config, trace, directory)
            recorder = recorder_of(trace, engine, client, directory, description)
            if on_recording:
                on_recording(directory)
            with ExitStack() as outputs:  # each is written, however the run ended and whether others can be written
                if on_recorded:
                    outputs.callback(on_recorded, directory)
                if config.responses_json:
                    outputs.callback(write_responses, Path(config.responses_json), trace, client.outputs)
                summary = _replay(trace, engine, client, recorder, progress, f"results are kept in {directory}")
                on_end(recorder)
                if config.enable_steady_state:
                    summary = steady_summary(directory)
                    _thin_iterations(directory, config.iteration_stats_every)
    return RunResult(directory, summary, summary["requests"]["failed"], description)


def beginning(
    trace: Trace, config: RunConfig, description: dict[str, Any], progress: Progress
) -> run_directory.WriteStart:
    """The function that writes the first files of a run directory: the trace, and `run.json` with `description`, which
    gets the name of the run."""

    def begin(directory: Path, name: str) -> None:
        description["name"] = name
        progress.stage("writing trace")
        write_trace(trace.requests, directory / f"trace.{config.recording_format}", overwrite=True)
        run_directory.write_begun(directory, description)

    return begin


@contextmanager
def fleet_recording(
    trace: Trace,
    config: RunConfig,
    description: dict[str, Any],
    progress: Progress,
    on_recording: Callable[[Path], None] | None,
    on_recorded: Callable[[Path], None] | None,
) -> Iterator[Path]:
    """The run directory of a fleet, while it runs; see `run_trace`. description: the content of run.json."""
    begin = beginning(trace, config, description, progress)
    with run_directory.begun(places(config, trace), config.overwrite, begin) as directory:
        say_number(config, trace, directory)
        if on_recording:
            on_recording(directory)
        with ExitStack() as outputs:
            if on_recorded:
                outputs.callback(on_recorded, directory)
            yield directory


def write_fleet_end(directory: Path, description: dict[str, Any], summary: dict[str, Any]) -> RunResult:
    """Write the figures of a fleet that has run, and complete its run.json, which had `description`."""
    run_directory.write_json(directory / "summary.json", summary)
    digest = {"schedule_digest": summary["schedule_digest"], "partial": summary["partial"]}
    run_directory.write_json(directory / run_directory.RUN, {**description, **digest})
    return RunResult(directory, summary, summary["requests"]["failed"], description)


def summarise_loaded(
    trace: Trace,
    config: RunConfig,
    progress: Progress,
    owns_process: bool = False,
    on_end: Callable[[SummaryRecorder], None] = lambda recorder: None,
) -> dict[str, Any]:
    """`summarise_run` of the requests that `load_trace` returned, in this process."""
    with engine_for(trace, config, progress, owns_process) as engine:
        client = client_of(trace, engine)
        recorder = summary_recorder_of(trace, engine, client)
        summary = _replay(trace, engine, client, recorder, progress, "nothing was recorded")
        on_end(recorder)
        return summary


@contextmanager
def engine_for(
    trace: Trace,
    config: RunConfig,
    progress: Progress = NO_PROGRESS,
    owns_process: bool = False,
    sends: bool = False,
) -> Iterator[Engine]:
    """An engine that is ready for `trace`, until the end of the block. sends: see `build_engine`."""
    progress.stage("loading model")
    beam_width = columns_of(trace.requests).max_beam_width
    with leading(config, beam_width) if config.num_ranks > 1 else nullcontext() as communicator:
        engine = build_engine(config, beam_width, owns_process=owns_process, communicator=communicator, sends=sends)
        with closing(engine.executor):
            check_scheduler(engine.limits, engine.clock)
            warn_of_refusals(trace, engine)
            if engine.makes_tokens:
                check_vocabulary(trace, engine.model.vocab_size)
            _tell_last_arrival(trace, engine)
            warm_up(engine, progress)
            yield engine


def warn_of_refusals(trace: Trace, engine: Engine) -> None:
    """Warn of the requests that the engine will refuse."""
    for refusal, count in expected_refusals(trace, engine.config, engine.limits):
        share = f"{count:,} of {len(trace):,}"
        _log.warning("%s requests will be refused: %s. %s", share, refusal.text, advice(refusal, engine.config))


@contextmanager
def unlogged() -> Iterator[None]:
    """Leave out the warnings of a replica: the fleet's own engine has given them."""
    was_disabled, _log.disabled = _log.disabled, True
    try:
        yield
    finally:
        _log.disabled = was_disabled


def _tell_last_arrival(trace: Trace, engine: Engine) -> None:
    """Warn of a run that takes very long because it waits for the arrivals on the wall clock."""
    last_s = columns_of(trace.requests).arrival_s[-1] if engine.config.keeps_arrivals else 0.0
    last_s = min(last_s, engine.config.duration or last_s)
    if last_s >= LONG_RUN_S and isinstance(engine.clock, WallClock):
        _log.warning(
            "the last request arrives after %s h on the wall clock, on which device %s runs; --time_scale 0 "
            "offers all at once, and --duration ends earlier.",
            f"{last_s / 3600:,.1f}",
            engine.device,
        )


def steady_summary(directory: Path) -> dict[str, Any]:
    """Restrict the summary of a run that has ended to its steady state. Every iteration is still there. OutputError if
    the directory was removed meanwhile."""
    # Imported here because other runs need no data frames.
    from ifbbench.rundir.figures import restrict_summary
    from ifbbench.rundir.reader import RunData, load_run

    if run_directory.is_lost(directory):
        raise lost(directory)
    run = load_run(directory)
    whole = run.run | {"config": run.config | {"iteration_stats_every": 1}}
    return restrict_summary(RunData(run.path, whole, run.summary))


def _thin_iterations(directory: Path, every: int) -> None:
    """Leave only the lines of every so many iterations, in place of those of all, which the steady state needed."""
    path = run_directory.find_iterations(directory)
    if every == 1 or not path.exists():
        return
    with new_file(path, overwrite=True) as file, closing(open_to_read(path)) as whole:
        for line in _thinned(whole, every):
            file.write(line)


def _thinned(lines: Iterable[bytes], every: int) -> Iterator[bytes]:
    """The lines that `IterationLines` writes with `every`, out of the lines of all iterations."""
    before, latest = "", None
    for line in lines:
        row = decode(line)
        details = row["ifbbench"]
        number = row["iter"] if "iter" in row else row["Iteration Counter"]
        latest = None
        if not details["paused"] and is_thinned_out(number, every, details["bound_by"], before):
            latest = line
        else:
            yield line
        before = details["bound_by"]
    if latest is not None:
        yield latest


def client_of(
    trace: Trace,
    engine: Engine,
    plain: Callable[..., ReplayClient] = ReplayClient,
    served: Callable[..., ServedClient] = ServedClient,
) -> ReplayClient:
    """The client of a run, made by `plain`; by `served`, behind a serving process, with --engine_overhead."""
    names_loras = columns_of(trace.requests).names_loras
    if names_loras and engine.limits.lora is None:
        _log.warning(
            "Requests name LoRA tasks, and no adapters are given: all run the base model. --lora_dir or "
            "--num_loras adds adapters."
        )
    make_request = request_maker(engine, draws_loras=not names_loras)
    if engine.config.arrival == BY_ITERATION:
        return make_client(engine.config, trace, engine.clock, make_request, IterationClient)
    if engine.overhead is None:
        return make_client(engine.config, trace, engine.clock, make_request, plain)
    client = make_client(engine.config, trace, engine.clock, make_request, served)
    assert isinstance(client, ServedClient)
    token_out_s = engine.overhead.serving_token_out_s / engine.config.stream_interval
    client.pass_through(ServingProcess(replace(engine.overhead, serving_token_out_s=token_out_s)))
    return client


def _delivery(client: ReplayClient) -> Delivery | None:
    return client if isinstance(client, ServedClient) else None


def summary_recorder_of(trace: Trace, engine: Engine, client: ReplayClient) -> SummaryRecorder:
    """The recorder of a run that writes no file."""
    return SummaryRecorder(
        engine.config.as_dict(),
        len(trace),
        client.arrival_s,
        client.held_until_s,
        columns_of(trace.requests).class_at,
        _delivery(client),
    )


def recorder_of(
    trace: Trace, engine: Engine, client: ReplayClient, directory: Path, description: dict[str, Any]
) -> Recorder:
    """The recorder of a run into `directory`."""
    config = engine.config
    make_recorder: type[Recorder] = PrintingRecorder if config.log_iteration_data else Recorder
    return make_recorder(
        directory,
        description,
        len(trace),
        engine.limits.batching_type,
        engine.limits.max_active,
        client.arrival_s,
        config.recording_format,
        1 if config.enable_steady_state else config.iteration_stats_every,
        profile=engine.profile.steps if engine.profile else None,
        iteration_stats_format=config.iteration_stats_format,
        held_until_s=client.held_until_s,
        class_of=columns_of(trace.requests).class_at,
        delivery=_delivery(client),
        recording=config.recording,
    )


def loop_of(engine: Engine, client: ReplayClient, recorder: Observer, **more: Any) -> TokenGenerationLoop:
    """The loop of a run. more: arguments of TokenGenerationLoop."""
    arguments, tiers, change = {"is_open_loop": client.is_open_loop} | more, engine.tiers, client.next_arrival_s
    if tiers is not None:
        arguments = {"loop_class": TransferringLoop} | arguments | {"is_open_loop": False}
        change = partial(next_change, tiers, client)
    if isinstance(client, IterationClient):
        arguments["poll_stop_signals"] = client.stops
    manager = loop_maker(engine.config, engine.communicator)(
        engine.limits,
        engine.executor,
        engine.clock,
        client.get_requests,
        client.send_response,
        recorder,
        client.queued,
        next_change=change,
        next_priority=client.next_priority,
        **arguments,
    )
    if isinstance(client, IterationClient):
        by_arrival = engine.limits.vllm is not None and engine.limits.vllm.is_priority
        client.follow(lambda: manager.iteration, lambda: manager.num_in_flight, by_arrival)
    if tiers is not None:
        use_tiers(cast(TransferringLoop, manager), tiers)
    return manager


def use_tiers(loop: TransferringLoop, tiers: KvTiers) -> None:
    """Let an engine load from stores and write there. Called once, before the first step of its loop, which is no open
    one, so that what is written, and when, does not depend on how many iterations run together."""
    cast("VllmScheduler | SglangScheduler | TensorRtLlmScheduler", loop.scheduler).use_tiers(tiers)
    loop.transfers, loop.sees_first_tokens = tiers, True


def next_change(tiers: KvTiers, client: ReplayClient, now_s: float) -> float | None:
    """When a request may arrive, or what one waits for come from a store, or others may change what the queue finds
    there; None if nothing will."""
    arrival_s, next_s = client.next_arrival_s(now_s), tiers.next_s
    if tiers.has_queue and now_s < tiers.others_s < next_s:
        next_s = tiers.others_s
    if next_s == inf:
        return arrival_s
    return next_s if arrival_s is None else min(arrival_s, next_s)


def next_event_s(engine: Engine, client: ReplayClient, seen_s: float) -> float | None:
    """When an engine that does nothing may have something to do again: see ReplayClient. seen_s: what had arrived by
    then it has left, because what it has waits for keys and values."""
    event_s, next_s = client.next_event_s, inf if engine.tiers is None else engine.tiers.next_s
    if event_s is not None and event_s > seen_s:
        next_s = min(event_s, next_s)
    return None if next_s == inf else next_s


def wait(engine: Engine, client: ReplayClient) -> bool:
    """Wait until then; for when nothing is active. False, at once, if that is now or takes a response."""
    event_s = next_event_s(engine, client, engine.clock.now())
    if event_s is None or event_s == client.next_event_s:
        return client.wait()
    engine.clock.wait_until(event_s)
    return True


def _replay(
    trace: Trace, engine: Engine, client: ReplayClient, recorder: SummaryRecorder, progress: Progress, kept: str
) -> dict[str, Any]:
    """Replay all of `trace`; returns the summary. kept: what becomes of the results of a run that ends early."""
    clock = engine.clock
    manager = loop_of(engine, client, recorder)
    progress.stage(REPLAYING)
    clock.restart()
    gc.freeze()  # what exists now stays until the end, so that collections need not look at it
    try:
        _loop(manager, engine, client, recorder, progress, len(trace))
        if engine.communicator is not None:
            cast("RankLoop", manager).end_others()
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"{client.answered} of {len(trace)} requests were done; {kept}.")
        raise
    except Exception as error:
        raise RunFailed(
            f"the run ended after {manager.iteration} iterations: {error}",
            f"{client.answered} of {len(trace)} requests were done; {kept}",
        ) from error
    finally:
        gc.unfreeze()
        progress.stage(WRITING)
        if client.done:  # with --duration, not each request of the trace was submitted
            recorder.metrics.total = client.submitted
        summary = recorder.close(partial=not client.done, complete=partial(more_figures, engine, client, manager))
    return summary


def more_figures(
    engine: Engine, client: ReplayClient, manager: TokenGenerationLoop, summary: dict[str, Any]
) -> dict[str, Any]:
    """Figures of the client and of LoRA adapters, and how far those of a simulated run may be from a real server's."""
    figures: dict[str, Any] = {"arrivals": client.arrivals()}
    figures |= manager.scheduler.figures()
    if (config := engine.config).hardware is None:
        return figures
    if isinstance(engine.executor, SimulatedExecutor):
        figures |= energy_figures(engine.executor, summary)
    if engine.limits.lora is not None:
        return figures | {"expected_error": {"compared": False, "reason": "no run with LoRA adapters was compared"}}
    name = NO_ENGINE if engine.overhead is None else engine.overhead.name
    hardware = Path(config.hardware or "").name.lower().replace("_", "-")
    model = built_in_shape(config.model) or config.model
    draft = ("mtp" if config.draft_mtp else "drafts") if config.has_drafts else NO_DRAFTS
    run = Compared(name, config.engine, hardware, model, config.weight_dtype, config.tp_size, config.pp_size, draft)
    # By Little's law.
    requests = summary["request_throughput_per_s"] * (summary["e2e_s"]["mean"] or 0.0)
    return figures | {"expected_error": expected_error(run, round(requests))}


def _loop(
    manager: TokenGenerationLoop,
    engine: Engine,
    client: ReplayClient,
    recorder: SummaryRecorder,
    progress: Progress,
    total: int,
) -> None:
    """Step until every request is answered. Before waits in real time that are long enough, the recorder is flushed."""
    clock = engine.clock
    is_real_time, is_shown = isinstance(clock, WallClock), progress is not NO_PROGRESS
    real_clock, shown_s = WallClock(), -PROGRESS_INTERVAL_S  # progress is shown in real time, whatever the run's clock
    idle_at: tuple[int, int] | None = None
    while not client.done:
        if not manager.step() and not client.done:
            next_s = client.next_event_s
            if is_real_time and next_s is not None and next_s - clock.now() > FLUSH_BEFORE_WAIT_S:
                recorder.flush()
            counts = (client.handed_out, client.answered)
            if wait(engine, client):
                idle_at = None
            elif counts == idle_at:
                raise RunFailed(
                    "no progress: no request is active, and the engine fetches none. "
                    f"Of {total} requests {client.handed_out} were fetched and {client.answered} answered; "
                    f"{len(manager.scheduler.waiting)} wait in the engine and {client.queued()} in the client. "
                    "This is a defect of ifbbench: please report it with the command."
                )
            else:
                idle_at = counts
        if is_shown and real_clock.now() - shown_s >= PROGRESS_INTERVAL_S:
            shown_s = real_clock.now()
            cache, active = manager.scheduler.cache_state(), len(manager.scheduler.table.requests)
            blocks = f"{cache.used_blocks or 0}/{cache.max_blocks or 0} KV blocks"
            progress.update(client.answered, total, f"{active} active, {blocks}")
    while manager.step():  # with overlap, an iteration of no outstanding request may still be in flight
        pass


def describe(trace: Trace, engine: Engine, asked: RunConfig) -> dict[str, Any]:
    """The content of run.json, but for the name. asked: the settings before they were resolved."""
    profile, config = engine.profile, engine.config.as_dict() | {"device": engine.device}
    more: dict[str, Any] = {} if engine.communicator is None else {"ranks": engine.communicator.ranks}
    if profile:
        more["device_limits"] = {"flops_per_s": profile.flops_per_s, "bytes_per_s": profile.bytes_per_s}
    if engine.limits.vllm is not None:
        tokens, concurrency = engine.limits.vllm_capacity(engine.limits.num_blocks)
        more["kv_cache_capacity"] = {"tokens": tokens, "max_concurrency": concurrency}
    return {
        "name": "",
        "config": config,
        "derived": [name for name, value in asked.as_dict().items() if value is None and config[name] is not None],
        "num_kv_blocks": engine.limits.num_blocks,
        "seed": engine.config.seed,
        "trace": run_directory.trace_identity(trace),
        "model": engine.describe_model(),
        "versions": run_directory.versions(),
        "hardware": run_directory.hardware(engine.device),
        "git_revision": run_directory.git_revision(),
    } | more


def places(config: RunConfig, trace: Trace) -> Iterable[Path]:
    """The directory asked for; else results/<trace name>, with numbers unless it is to be replaced."""
    if config.output:
        return [Path(config.output)]
    directory = run_directory.RESULTS / trace.name
    return [directory] if config.overwrite else run_directory.numbered(directory)


def say_number(config: RunConfig, trace: Trace, directory: Path) -> None:
    if not config.output:
        run_directory.say_number(run_directory.RESULTS / trace.name, directory)


def write_responses(path: Path, trace: Trace, outputs: Mapping[int, IntArray]) -> None:
    """The generated tokens of each request that completed, in the order of the trace. outputs: by id."""
    responses = [
        {"response_id": request.request_id, "response_tokens": outputs[request.request_id].tolist()}
        for request in trace
        if request.request_id in outputs
    ]
    replace_file(path, json.dumps(responses) + "\n")
