"""A fleet with prefill and decode apart: its run directory, and the figures of all requests together."""

import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from ifbbench.build.engine import Engine
from ifbbench.build.kv_tiers import DISK, REMOTE, has_tiers, make_tiers, remote_store
from ifbbench.build.resolve import kv_value_bytes
from ifbbench.errors import InputError, RunFailed
from ifbbench.fleet.events import ReplicaEvent, read_events
from ifbbench.fleet.links import Links
from ifbbench.fleet.router import PREFILLS, STATE, Router, make_router
from ifbbench.fleet.sides import check_sides, side_values
from ifbbench.models.config import ModelConfig
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.replay.client import ReplayClient
from ifbbench.replay.fleet import (
    NO_SIDE_OUTPUTS,
    SAME_IN_A_STORE,
    Ended,
    check_computing,
    check_settings,
    closed,
    outcome_of,
    price_of,
)
from ifbbench.replay.fleet_changes import Changes
from ifbbench.replay.replica_processes import ReplicaEngines
from ifbbench.replay.side_replica import SideReplica
from ifbbench.replay.single import (
    REPLAYING,
    RunResult,
    describe,
    engine_for,
    fleet_recording,
    places,
    recorder_of,
    summary_recorder_of,
    unlogged,
    write_fleet_end,
    write_responses,
)
from ifbbench.replay.stepped_sides import SteppedSides
from ifbbench.rundir import run_directory
from ifbbench.rundir.disaggregated import DECODE, PREFILL, SIDES, reserves_first, transfer_figures, write_lines
from ifbbench.rundir.fleet import Member, fleet_figures, imbalance, replica_directory, tier_figures
from ifbbench.rundir.metrics import BOUND_BY
from ifbbench.rundir.recorder import SummaryRecorder
from ifbbench.rundir.request_metrics import RequestMetrics
from ifbbench.rundir.servers import add_server
from ifbbench.settings.config import FLEET_SETTINGS, HOST_SETTINGS, TIER_SETTINGS, RunConfig
from ifbbench.settings.engines import ENGINES, SGLANG, TRTLLM, VLLM
from ifbbench.settings.groups.fleet import BY_LAYER, ROUTERS
from ifbbench.settings.modes import BatchingType
from ifbbench.simulated.energy import energy_of_replicas
from ifbbench.simulated.hardware import load_hardware
from ifbbench.simulated.interconnect import NETWORK_SHARE
from ifbbench.simulated.shard import Shard
from ifbbench.virtual_clock import VirtualClock
from ifbbench.workload.formats import write_trace
from ifbbench.workload.load import Source, load_trace
from ifbbench.workload.trace import Trace, columns_of

# What a request has beside its prompt's keys and values. The model's own draft layer (`--draft_mtp`) needs none of it.
NOT_BUILT = {
    "draft_model": "drafts are not sent",
    "draft_ngram": "drafts are not sent",
    "draft_len": "drafts are not sent",
    "beam_width": "the blocks of beams are not sent",
    "num_loras": "adapters of two engines are not built",
    "lora_dir": "adapters of two engines are not built",
    "kv_retention_priority": "retention of blocks that are sent is not built",
    "kv_retention_s": "retention of blocks that are sent is not built",
}
# Why the decode replicas of an engine have no stores.
NO_STORES_OF_DECODE = {
    TRTLLM: "TensorRT-LLM's KV cache connector is built for prefill replicas only",
    SGLANG: "SGLang's storage is built for prefill replicas only, not for decode replicas with HiCache",
}
# Settings that mean nothing where transfers are measured, and what does not go with keys and values there.
NOT_MEASURED = ("transfer_bandwidth", "transfer_latency")
NOT_SENT = ("return_log_probs", "return_context_logits", "return_generation_logits")


@dataclass(frozen=True)
class _Ran:
    """What is left of the replicas once they have ended.

    ended: each replica, those of prefill first.
    """

    fleet: SteppedSides
    ended: list[Ended]
    engines: list[Engine]
    bytes_per_token: float


def run_disaggregated(
    source: Source,
    config: RunConfig,
    progress: Progress = NO_PROGRESS,
    *,
    on_recording: Callable[[Path], None] | None = None,
    on_recorded: Callable[[Path], None] | None = None,
) -> RunResult:
    """`run_trace` of a fleet with prefill and decode apart: a run directory, with those of the replicas in it."""
    trace = load_trace(source, config, progress)
    routers, own = _checked(config)
    run_directory.check_some(places(config, trace), config.overwrite)
    with ExitStack() as stack:
        engines = _engines(stack, trace, config, own, progress)
        description = _description(trace, config, engines[-1], own[1])
        directory = stack.enter_context(
            fleet_recording(trace, config, description, progress, on_recording, on_recorded)
        )

        def write(ran: _Ran) -> RunResult:
            write_lines(directory, config.recording_format, ran.fleet.lines)
            summary, _ = _summary(trace, config, ran)
            return write_fleet_end(directory, description, summary)

        with _running(trace, config, routers, own, engines, directory, progress, write) as ran:
            ran.fleet.run()
        if config.responses_json:
            write_responses(Path(config.responses_json), trace, ran.fleet.outputs)
        return write(ran)


def summarise_disaggregated(
    source: Source,
    config: RunConfig,
    progress: Progress = NO_PROGRESS,
    on_end: Callable[[SummaryRecorder], None] = lambda recorder: None,
) -> dict[str, Any]:
    """`summarise_run` of such a fleet. on_end: takes a recorder of all replicas together."""
    trace = load_trace(source, config, progress)
    routers, own = _checked(config)
    with ExitStack() as stack:
        engines = _engines(stack, trace, config, own, progress)
        with _running(trace, config, routers, own, engines, None, progress) as ran:
            ran.fleet.run()
        summary, recorder = _summary(trace, config, ran)
    on_end(recorder)
    return summary


def _checked(config: RunConfig) -> tuple[tuple[Router, Router], tuple[RunConfig, RunConfig]]:
    """The routers and the settings of both sides. InputError for what they cannot have."""
    check_sides(config)
    check_settings(config)
    _events(config)
    if config.engine not in ENGINES:
        raise InputError(
            f"--engine {config.engine}: prefill and decode apart are built for {', '.join(ENGINES)} only; choose one, "
            "or use --replicas."
        )
    usual = RunConfig()
    for name, why in NOT_BUILT.items():
        if getattr(config, name) != getattr(usual, name):
            raise InputError(f"--{name}: {why} with --prefill_replicas and --decode_replicas; leave it out.")
    router = config.router or ROUTERS[0]
    routers = (
        make_router(router, config.prefill_replicas, config.seed),
        make_router(config.decode_router or router, config.decode_replicas, config.seed),
    )
    for chosen, name in zip(routers, (router, config.decode_router or router), strict=True):
        if PREFILLS in chosen.looks_at:
            raise InputError(
                f"--router {name}: looks at {PREFILLS!r}, which is not built with --prefill_replicas and "
                "--decode_replicas; give another one, or leave that out of looks_at of your own."
            )
    if config.router_state_age and not any(STATE in one.looks_at for one in routers):
        raise InputError("--router_state_age: no router reads states of replicas; leave it out.")
    own = config.of_one_replica(concurrency=None, duration=None, output=None, **NO_SIDE_OUTPUTS)
    prefill, decode = (own.with_values(**own_values(config, side)) for side in SIDES)
    for one in (prefill, decode):
        if not one.makes_no_tokens:
            _check_computing(one, config)
        if one.type == BatchingType.V1 or one.kv_cache_type != "paged":
            raise InputError(
                "--type v1, --kv_cache_type contiguous: are not built with --prefill_replicas and --decode_replicas; "
                "leave them out."
            )
    _check_stores(config, prefill, decode)
    return routers, (prefill, decode)


def _check_stores(config: RunConfig, prefill: RunConfig, decode: RunConfig) -> None:
    """InputError for stores that the replicas of a side cannot have, and for settings of stores that no side has."""
    if config.engine != VLLM and decode.tier_settings:
        raise InputError(f"--decode {decode.tier_settings[0]}: {NO_STORES_OF_DECODE[config.engine]}; leave it out.")
    if (given := config.tier_settings) and not has_tiers(prefill) and not has_tiers(decode):
        raise InputError(
            f"--{given[0]}: there is no store on either side; give --kv_disk_bytes or --kv_remote_bytes, or leave this "
            "out."
        )
    if prefill.kv_remote_bytes and decode.kv_remote_bytes:
        for name in (*SAME_IN_A_STORE, "kv_remote_bytes", "kv_remote_bandwidth", "kv_remote_latency"):
            if getattr(prefill, name) != getattr(decode, name):
                raise InputError(
                    f"--prefill, --decode: both sides share the remote store, and need the same {name}; give it once."
                )


def _check_computing(own: RunConfig, config: RunConfig) -> None:
    """InputError for settings that replicas of a side cannot have if they compute. own: of the replica."""
    check_computing(own)
    if config.transfer_by == BY_LAYER:
        raise InputError(f"--transfer_by {BY_LAYER}: is simulated only; leave it out, or choose --device sim:PROFILE.")
    usual = RunConfig()
    for name in NOT_MEASURED:
        if getattr(config, name) != getattr(usual, name):
            raise InputError(f"--{name}: transfers between processes are measured; leave it out.")
    for name in NOT_SENT:
        if getattr(own, name) != getattr(usual, name):
            raise InputError(f"--{name}: is not sent between the processes of two replicas; leave it out.")


def own_values(config: RunConfig, side: str) -> dict[str, Any]:
    """The settings in which the replicas of a side differ. A decode engine of SGLang keeps prefixes, on device or host,
    only with `--disaggregation-decode-enable-radix-cache`. Only prefill replicas have stores; with vLLM, which has its
    MultiConnector on both sides, decode replicas have them too."""
    given, values = side_values(config, side), dict[str, Any]()
    without: Sequence[str] = _absent_stores(config, given)
    if side == DECODE and config.engine == SGLANG and not given.get("enable_kv_cache_reuse"):
        values, without = {"enable_kv_cache_reuse": False}, (*without, *HOST_SETTINGS)
    if side == DECODE and config.engine != VLLM and config.tier_settings:
        without = TIER_SETTINGS if config.engine != SGLANG else (*TIER_SETTINGS, *HOST_SETTINGS)
    return values | {name: getattr(RunConfig, name) for name in without} | given


def _absent_stores(config: RunConfig, given: dict[str, Any]) -> Sequence[str]:
    """The settings of stores that the `given` settings of a side give it none of (`kv_disk_bytes=0`)."""
    absent = [kind for kind in (DISK, REMOTE) if given.get(f"kv_{kind}_bytes") == 0]
    if absent and not has_tiers(config.with_values(**given)):
        return TIER_SETTINGS
    return [name for name in TIER_SETTINGS if any(name.startswith(f"kv_{kind}_") for kind in absent)]


def _engines(
    stack: ExitStack, trace: Trace, config: RunConfig, own: tuple[RunConfig, RunConfig], progress: Progress
) -> list[Engine]:
    """An engine for each replica, those of prefill first."""
    if not own[0].makes_no_tokens:
        return _computing_engines(stack, trace, config, own, progress)
    engines, remote = list[Engine](), None
    for side, count in zip(own, (config.prefill_replicas, config.decode_replicas), strict=True):
        for number in range(count):
            if number:
                with unlogged():
                    engine = stack.enter_context(engine_for(trace, side, sends=True))
            else:
                engine = stack.enter_context(engine_for(trace, side, progress, sends=True))
            if engine.config.kv_remote_bytes:
                if remote is None:
                    remote = remote_store(engine.config, engine.model)
                own_number, resolved = len(engines) + 1, engine.config
                engine = replace(engine, tiers=make_tiers(resolved, engine.model, engine.clock, remote, own_number))
            # The null device takes no time on the one clock of a fleet.
            is_real_time = not isinstance(engine.clock, VirtualClock)
            engines.append(replace(engine, clock=VirtualClock()) if is_real_time else engine)
    kinds = {engine.config.kv_cache_dtype or engine.config.weight_dtype for engine in engines}
    if len(kinds) > 1:
        raise InputError(
            f"--prefill, --decode: keys and values are {' and '.join(sorted(kinds))}; expected the same on both sides. "
            "Give --kv_cache_dtype."
        )
    return engines


def _computing_engines(
    stack: ExitStack, trace: Trace, config: RunConfig, own: tuple[RunConfig, RunConfig], progress: Progress
) -> list[Engine]:
    """The engines of replicas that compute, in processes."""
    if columns_of(trace.requests).max_beam_width > 1:
        raise InputError(f"{trace.name}: requests have beams, and {NOT_BUILT['beam_width']}; leave them out.")
    progress.stage("loading model")
    configs = [own[0]] * config.prefill_replicas + [own[1]] * config.decode_replicas
    processes = ReplicaEngines(stack, trace, configs, sends=True)
    engines = [processes.make(one) for one in configs]
    if any(window.is_limited for engine in engines for window, _ in engine.limits.pools):
        raise InputError(
            "--prefill_replicas, --decode_replicas: attention windows are not sent between processes; choose a model "
            "without, or a simulated device."
        )
    return engines


def _events(config: RunConfig) -> Sequence[ReplicaEvent]:
    """The events of --replica_events."""
    if config.replica_events is None:
        return ()
    count = config.prefill_replicas + config.decode_replicas
    return read_events(Path(config.replica_events), count, can_grow=False, has_sides=True)


def _no_replica(number: int, like: int) -> None:
    raise AssertionError("no replica of a side starts")


def _description(trace: Trace, config: RunConfig, engine: Engine, own: RunConfig) -> dict[str, Any]:
    """The content of run.json: what the decode replicas have but for their own settings, which are in `decode`."""
    description = describe(trace, engine, own)
    given = config.as_dict()
    names = {*FLEET_SETTINGS, *own_values(config, DECODE), "concurrency", "duration"}
    description["config"] |= {name: given[name] for name in names} | {"router": config.router or ROUTERS[0]}
    description["derived"] = [name for name in description["derived"] if name not in names]
    description["derived"] += ["router"] if config.router is None else []
    return description


def _links(config: RunConfig, engines: Sequence[Engine]) -> Links:
    """The link of each replica: what all of its devices send or receive at once, of the same tokens."""
    rates, latency_s = list[float](), config.transfer_latency
    for engine in engines:
        if (name := engine.config.hardware) is not None and latency_s is None:
            latency_s = load_hardware(name).network_latency_s
        rates.append(link_rate(config, engine.config, engine.model))
    number = config.prefill_replicas
    return Links(rates[:number], rates[number:], latency_s or 0.0)


def link_rate(config: RunConfig, own: RunConfig, model: ModelConfig) -> float:
    """Tokens per second whose keys and values all devices of a replica send, or receive, at once; infinite on a device
    without a network. own: the resolved settings of the replica."""
    per_gpu = config.transfer_bandwidth
    if own.hardware is not None:
        per_gpu = per_gpu or NETWORK_SHARE * load_hardware(own.hardware).network_bandwidth
    return inf if per_gpu is None else per_gpu / Shard.of_config(model, own).kv_bytes_per_token


@contextmanager
def _running(
    trace: Trace,
    config: RunConfig,
    routers: tuple[Router, Router],
    own: tuple[RunConfig, RunConfig],
    engines: list[Engine],
    directory: Path | None,
    progress: Progress,
    write: Callable[[_Ran], object] = lambda ran: None,
) -> Iterator[_Ran]:
    """Replicas that are ready; their recordings end with the block. write: takes what was done by a fleet whose run
    ends early."""
    descriptions: dict[int, dict[str, Any]] = {}
    with ExitStack() as stack:

        def make_recorder(number: int, share: Trace, engine: Engine, client: ReplayClient) -> SummaryRecorder:
            if directory is None:
                return summary_recorder_of(share, engine, client)
            path = replica_directory(directory, number)
            of_replica = replace(engine, config=engine.config.with_values(output=str(path)))
            side = own[number >= config.prefill_replicas]
            description = descriptions[number] = describe(share, of_replica, side)
            description["name"] = path.name

            def begin(there: Path, _name: str) -> None:
                write_trace(share.requests, there / f"trace.{side.recording_format}", overwrite=True)
                run_directory.write_begun(there, description)

            stack.enter_context(run_directory.begun([path], False, begin))
            return recorder_of(share, engine, client, path, description)

        count = config.prefill_replicas
        is_by_layer = config.transfer_by == BY_LAYER
        is_reserved = reserves_first(config.engine, config.transfer_by)
        replicas = [
            SideReplica(number, engine, trace, make_recorder, number < count, is_reserved)
            for number, engine in enumerate(engines)
        ]
        sides = replicas[:count], replicas[count:]
        fleet = SteppedSides(
            trace,
            config,
            routers,
            sides,
            None if engines[0].makes_tokens else _links(config, engines),
            Changes(_events(config), None, 0.0, _no_replica),
            progress,
            reserves_first=is_reserved,
            layers=engines[0].model.num_layers if is_by_layer else None,
        )
        if config.responses_json:
            for one in replicas:
                one.client.keep_outputs()
        per_token = engines[0].model.kv_bytes_per_token(kv_value_bytes(engines[0].config))
        ran = _Ran(fleet, [], engines, per_token)
        progress.stage(REPLAYING)
        gc.freeze()
        try:
            yield ran
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"{outcome_of(fleet.front, trace, directory)}.")
            raise
        except Exception as error:
            done = outcome_of(fleet.front, trace, directory)
            raise RunFailed(f"the fleet's run ended early: {error}", done) from error
        finally:
            gc.unfreeze()
            for number, one in enumerate(replicas):
                ran.ended.append(closed(one, not fleet.front.done, descriptions.get(number), directory))
            if not fleet.front.done:
                write(ran)


def _summary(trace: Trace, config: RunConfig, ran: _Ran) -> tuple[dict[str, Any], SummaryRecorder]:
    """The summary of all requests, from their arrival to their end, with the iterations of all replicas; and its
    recorder."""
    settings = ran.engines[-1].config.as_dict() | {"concurrency": config.concurrency}
    class_of = columns_of(trace.requests).class_at
    whole = SummaryRecorder(settings, 0, lambda request: 0.0, class_of=class_of)
    total = len(ran.fleet.lines) if ran.fleet.front.done else len(trace)
    metrics = RequestMetrics(total, class_of, settings, BOUND_BY)
    for line in ran.fleet.lines:
        metrics.add_line(line)
    for _, parts in ran.ended:
        metrics.add_gaps(parts[0], whole.totals.iterations)
        add_server(whole, parts)
    whole.metrics = metrics
    summaries = [summary for summary, _ in ran.ended]
    digest = hashlib.sha256(" ".join(one["schedule_digest"] for one in summaries).encode()).hexdigest()
    summary = whole.summary(any(one["partial"] for one in summaries), digest)
    summary |= {"arrivals": ran.fleet.front.arrivals()}
    own, end_s = [engine.config for engine in ran.engines], metrics.last_end_s
    changes = ran.fleet.changes
    services, events = changes.service_times(end_s), changes.figures()
    up_s = [one_end_s - begin_s if events else summary["duration_s"] for begin_s, one_end_s, _ in services]
    summary |= energy_of_replicas(summaries, summary, [one.hardware for one in own], up_s)
    members = [
        Member({}, one.tp_size * one.pp_size, price_of(one), *service)
        for one, service in zip(own, services, strict=True)
    ]
    figures = fleet_figures(config.router or ROUTERS[0], summaries, members) | events
    for number, one in enumerate(figures["replicas"]):
        one["side"] = PREFILL if number < config.prefill_replicas else DECODE
    count = config.prefill_replicas
    of_sides = imbalance(summaries[:count]), imbalance(summaries[count:])
    figures["imbalance"] = {name: max(one[name] for one in of_sides) for name in of_sides[0]}
    figures["transfers"] = transfer_figures(ran.fleet.lines, ran.bytes_per_token)
    if ran.engines[0].makes_tokens:
        figures["transfers"]["bytes"] = ran.fleet.moved_bytes
    if tiers := tier_figures(summaries):
        summary |= {"kv_tiers": tiers}
    return summary | {"fleet": figures}, whole
