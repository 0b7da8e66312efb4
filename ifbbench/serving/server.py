"""The server: an engine, its service and its recording behind uvicorn, from start to drain."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from math import ceil
from pathlib import Path
from typing import Any

import uvicorn

from ifbbench.build.adapters import adapter_names
from ifbbench.build.engine import Engine, build_engine, warm_up
from ifbbench.clock import WallClock
from ifbbench.endpoint.loop import allow_many_connections, new_event_loop
from ifbbench.endpoint.server import first_key
from ifbbench.errors import InputError
from ifbbench.processes import usable_cores
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.replay.rank_processes import run_in_ranks
from ifbbench.replay.rank_runs import WRITING, leading, starts_ranks
from ifbbench.replay.replica_processes import engines_in_processes
from ifbbench.replay.run import check_no_fleet
from ifbbench.rundir import run_directory
from ifbbench.rundir.fleet import replica_directory
from ifbbench.serving.app import DRAINED, Endpoints
from ifbbench.serving.config import FrontDoorConfig, ServerConfig, metrics_names_of
from ifbbench.serving.connections import BoundedRate, LimitedConnection
from ifbbench.serving.fleet import AnyService, FleetMetrics, FleetService, served_router
from ifbbench.serving.fleet_recording import FleetRecording
from ifbbench.serving.metrics import ServerMetrics
from ifbbench.serving.reading import BodyReader, ReadingProcess, ReadingRules
from ifbbench.serving.recording import TrafficRecording
from ifbbench.serving.service import Service, SyntheticTokens
from ifbbench.serving.statistics import LiveStatistics
from ifbbench.serving.texts import SAMPLE_TEXT, Texts
from ifbbench.settings.config import RunConfig
from ifbbench.virtual_clock import PacedClock

API_KEY_VARIABLE = "IFBBENCH_API_KEY"
BACKLOG = 4096
DEFAULT_MAX_QUEUE_SIZE = 1024
WATCH_INTERVAL_S = 0.1
# After the drain, how long clients may take to read what they are sent.
FLUSH_S = 2.0
# After the engine has failed, how long clients may take to read what they are sent, in whole seconds.
FAILED_DRAIN_S = 1
# How long the engine's thread waits for the interpreter while the event loop runs; Python's default is 5 ms, as long as
# an iteration of a GPU.
SWITCH_INTERVAL_S = 0.0005


def serve(
    config: RunConfig,
    server: ServerConfig,
    progress: Progress = NO_PROGRESS,
    on_started: Callable[[str], None] = lambda url: None,
    on_recording: Callable[[Path], None] | None = None,
) -> dict[str, Any] | None:
    """Serve one engine, or a fleet, until SIGTERM or SIGINT, then drain; returns the summary of the recording, None
    without one. In several processes if `config` needs them, of which rank 0 serves. To be called in the main thread.

    on_started: is called with the address when requests are taken.
    on_recording: is called with the run directory when the recording begins.

    InputError before anything is written if the settings are bad or the port is taken; RunFailed if a rank has failed,
    BatchManagerFailed if the engine of a single process has.
    """
    check_no_fleet(config)
    if config.is_fleet:
        served_router(config)
    if not config.makes_no_tokens and starts_ranks(config):
        callbacks: dict[str, Any] = {"on_started": on_started, "on_recording": on_recording}
        run = partial(serve, config, server)
        summary: dict[str, Any] | None = run_in_ranks(
            run, config, progress, callbacks, subject="the server", passed_on=(signal.SIGTERM, signal.SIGINT)
        )
        return summary
    with closing(listen(server)) as listener:
        _model_name(config, server)
        api_key(server)
        if server.record is not None:
            run_directory.check(Path(server.record), config.overwrite)
        with serving_engines(config, progress) as engines, asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_serve(engines, config, server, listener, progress, on_started, on_recording))


@contextmanager
def serving_engines(config: RunConfig, progress: Progress = NO_PROGRESS) -> Iterator[list[Engine]]:
    """The engine of `config`, or those of all replicas, as `serving_engine`. Those that compute do so in processes of
    their own, which share the cores."""
    own = config.of_one_replica()
    with ExitStack() as stack:
        if config.replicas > 1 and not config.makes_no_tokens:
            threads = config.cpu_threads or max(usable_cores() // config.replicas, 1)
            own = own.with_values(device="cpu", cpu_threads=threads, max_queue_size=None)
            progress.stage("loading model")
            yield engines_in_processes(stack, own, config.replicas)
            return
        yield [stack.enter_context(serving_engine(own, progress)) for _ in range(config.replicas)]


@contextmanager
def serving_engine(config: RunConfig, progress: Progress = NO_PROGRESS) -> Iterator[Engine]:
    """The engine of `config` for live traffic, warmed up, until the end of the block; that of rank 0 with several. A
    simulated device keeps the pace of real time, and has the tokens of a sample text."""
    progress.stage("loading model")
    # The service refuses what exceeds the queue before the engine has it.
    config = config.with_values(max_queue_size=None)
    with leading(config, beam_width=1) if config.num_ranks > 1 else nullcontext() as communicator:
        engine = build_engine(config, owns_process=True, communicator=communicator, make_simulated_clock=PacedClock)
        if engine.tiers is not None:
            raise InputError("--kv_disk_bytes, --kv_remote_bytes: a server has no such stores yet; leave them out.")
        if not engine.makes_tokens:
            texts = Texts(config.model, engine.model.vocab_size)
            sample = texts.tokenizer.encode(SAMPLE_TEXT, add_special_tokens=False)
            engine = replace(engine, executor=SyntheticTokens(engine.executor, sample, engine.limits.num_slots))
        with closing(engine.executor):
            warm_up(engine, progress)
            yield engine


async def _serve(
    engines: list[Engine],
    config: RunConfig,
    server: ServerConfig,
    listener: socket.socket,
    progress: Progress,
    on_started: Callable[[str], None],
    on_recording: Callable[[Path], None] | None,
) -> dict[str, Any] | None:
    async with running(engines, config, server) as service:
        if server.record is not None and on_recording is not None:
            on_recording(Path(server.record))
        endpoints = endpoints_of(service, config, server)
        application = application_server(endpoints.app(), service.end_all, server)
        watching = asyncio.create_task(_end_with_engine(application, service, progress))
        listener.listen(BACKLOG)
        on_started(address_of(listener))
        with closing(endpoints):
            await application.serve([listener])
        watching.cancel()
    return service.summary


def application_server(app: Any, end_all: Callable[[str], None], server: ServerConfig) -> uvicorn.Server:
    """What serves the ASGI application `app` until a signal. end_all(problem): ends what has not ended then."""
    # uvicorn takes a class here; what it calls is its constructor.
    connection: Any = partial(LimitedConnection, limits=server)
    settings = uvicorn.Config(
        app,
        http=connection,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_keep_alive=ceil(server.receive_timeout),
        timeout_graceful_shutdown=ceil(server.drain_timeout + FLUSH_S),
        server_header=False,
    )
    logging.getLogger("uvicorn.error").addFilter(BoundedRate(WallClock().now))
    allow_many_connections()
    return _Server(settings, end_all, server.drain_timeout)


@asynccontextmanager
async def running(engines: list[Engine], config: RunConfig, door: FrontDoorConfig) -> AsyncIterator[AnyService]:
    """A service of one engine, or of a fleet: see `running_service`."""
    if not config.is_fleet:
        async with running_service(engines[0], config, door) as service:
            yield service
        return
    recording, ids, recorded = None, count(), list[TrafficRecording]()
    with ExitStack() as kept:
        if door.record is not None:
            recording = FleetRecording(Path(door.record), engines, config)
            kept.enter_context(run_directory.begun([recording.directory], config.overwrite, recording.write_begin))
        fleet = None
        try:
            async with AsyncExitStack() as stack:
                services = []
                for number, engine in enumerate(engines):
                    own = door
                    if recording is not None:
                        own = replace(door, record=str(replica_directory(recording.directory, number)))
                    services.append(
                        await stack.enter_async_context(running_service(engine, config, own, ids, recorded.append))
                    )
                fleet = FleetService(services, served_router(config), config.router_state_age, config.request_retries)
                yield fleet
        finally:
            ended = [one.ended for one in recorded if one.ended is not None]
            if recording is not None and fleet is not None and len(ended) == len(engines):
                fleet.summary = recording.close(ended, fleet)


@asynccontextmanager
async def running_service(
    engine: Engine,
    config: RunConfig,
    door: FrontDoorConfig,
    ids: Iterator[int] | None = None,
    on_recording: Callable[[TrafficRecording], None] = lambda recording: None,
) -> AsyncIterator[Service]:
    """A service of `engine`, which ends with the block; then it has the summary of the recording that `door` asks for.

    ids: see Service.
    on_recording: takes the recording.
    """
    recording = None
    if door.record is not None:
        recording = TrafficRecording(
            Path(door.record), engine, overwrite=config.overwrite, lengths_only=door.record_lengths_only
        )
        on_recording(recording)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    max_queue_size = DEFAULT_MAX_QUEUE_SIZE if config.max_queue_size is None else config.max_queue_size
    service = Service(engine, LiveStatistics(recording), max_queue_size, recording, ids)
    watching = asyncio.create_task(_watch(service))
    is_partial = True
    try:
        yield service
        is_partial = not service.is_running
        await service.close()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        sys.setswitchinterval(interval_s)
        if is_partial:
            with suppress(Exception):
                await service.close()
        if recording is not None:
            service.summary = recording.close(is_partial, service.statistics.delivery_lag_s.summary())


async def _watch(service: Service) -> None:
    """End what waits for an engine that has failed."""
    while True:
        await asyncio.sleep(WATCH_INTERVAL_S)
        service.fail_queued()


async def _end_with_engine(application: uvicorn.Server, service: AnyService, progress: Progress) -> None:
    """End the server when its engine has failed, which has answered what it had."""
    while not service.has_failed:
        await asyncio.sleep(WATCH_INTERVAL_S)
    progress.stage(WRITING)
    application.config.timeout_graceful_shutdown = FAILED_DRAIN_S
    application.should_exit = True


def endpoints_of(service: AnyService, config: RunConfig, server: ServerConfig) -> Endpoints:
    """The HTTP endpoints of `service`. InputError if the served name of the model is also one of an adapter."""
    engine = service.engine
    name = _model_name(config, server)
    metrics = _metrics_of(service, name, metrics_names_of(server, config.engine))
    adapters = adapter_names(config)
    rules = ReadingRules(
        config.model,
        engine.model.vocab_size,
        (name, *adapters),
        engine.makes_tokens,
        service.max_requests,
        engine.limits.max_seq_len,
        server.ignore_unknown_fields,
    )
    return Endpoints(
        service,
        BodyReader(rules),
        ReadingProcess(rules),
        server,
        metrics,
        name,
        adapters,
        api_key(server),
        int(WallClock().timestamp()),
    )


def _metrics_of(service: AnyService, model: str, names: str) -> ServerMetrics | FleetMetrics:
    if isinstance(service, FleetService):
        of_replicas = [_metrics_of(one, model, names) for one in service.services]
        own = [one for one in of_replicas if isinstance(one, ServerMetrics)]
        return FleetMetrics(service, own, "engine" if names == "vllm" else "replica")
    return ServerMetrics(
        service.engine, service.statistics, model, names, lambda: service.num_live, lambda: service.num_queued
    )


def _model_name(config: RunConfig, server: ServerConfig) -> str:
    """What clients call the model. InputError if an adapter has the same name."""
    name = server.served_model_name or Path(config.model).name
    if name in adapter_names(config):
        raise InputError(f"--served_model_name: {name} is also the name of an adapter; give another.")
    return name


def api_key(server: ServerConfig) -> str | None:
    """What clients must send; None if they need not. InputError if no client could."""
    return first_key("--api_key", server.api_key, (API_KEY_VARIABLE,))


class _Server(uvicorn.Server):
    """A uvicorn server that does not raise the signal again that has ended it, so that the recording is completed, and
    that answers what has not ended `drain_s` after it with an error."""

    def __init__(self, config: uvicorn.Config, end_all: Callable[[str], None], drain_s: float) -> None:
        super().__init__(config)
        self._end_all, self._drain_s = end_all, drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        ending = loop.call_later(self._drain_s, self._end_all, DRAINED)
        await super().shutdown(sockets)
        ending.cancel()
        self._end_all(DRAINED)  # after a second Ctrl-C
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=FLUSH_S)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT begin the drain, a second SIGINT ends it."""
        loop, installed = asyncio.get_running_loop(), []
        for one in (signal.SIGTERM, signal.SIGINT):
            with suppress(ValueError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(one, self.handle_exit, one, None)
                installed.append(one)
        try:
            yield
        finally:
            for one in installed:
                loop.remove_signal_handler(one)


def listen(server: ServerConfig) -> socket.socket:
    """A socket on the address of `server`. InputError if it cannot be had."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((server.host, server.port))
    except OSError as error:
        listener.close()
        raise InputError(
            f"--port: {server.host}:{server.port} cannot be listened on ({error.strerror}); give another "
            "--port or --host."
        ) from error
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
