"""`ifbbench serve --router_only`: a router behind uvicorn, from start to drain."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ifbbench.clock import WallClock
from ifbbench.endpoint.loop import Alarm, new_event_loop
from ifbbench.fleet.router import make_router
from ifbbench.rundir import run_directory
from ifbbench.serving.routing.app import RouterApp
from ifbbench.serving.routing.backends import Backend, watch
from ifbbench.serving.routing.config import RouterConfig
from ifbbench.serving.routing.record import RouterRecording
from ifbbench.serving.server import BACKLOG, address_of, api_key, application_server, listen
from ifbbench.settings.config import RunConfig
from ifbbench.settings.groups.fleet import ROUTERS

# State is read so often where the settings do not say.
DEFAULT_STATE_AGE_S = 1.0
FLUSH_EVERY_S = 1.0


def serve_router(
    config: RunConfig,
    server: RouterConfig,
    on_started: Callable[[str], None] = lambda url: None,
) -> dict[str, Any] | None:
    """Route requests until SIGTERM or SIGINT, then drain; returns the summary of the recording, None without one. To be
    called in the main thread.

    InputError before anything is written if the settings are bad or the port is taken."""
    with closing(listen(server)) as listener:
        api_key(server)
        make_router(config.router or ROUTERS[0], len(server.addresses), config.seed)
        if server.record is not None:
            run_directory.check(Path(server.record), config.overwrite)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_serve(config, server, listener, on_started))


async def _serve(
    config: RunConfig, server: RouterConfig, listener: socket.socket, on_started: Callable[[str], None]
) -> dict[str, Any] | None:
    clock = WallClock()
    alarm = Alarm(asyncio.get_running_loop(), clock, lambda: None)
    backends = [Backend(number, url, server, clock, alarm) for number, url in enumerate(server.addresses)]
    router = make_router(config.router or ROUTERS[0], len(backends), config.seed)
    await asyncio.gather(*(one.check() for one in backends))
    recording = None
    if server.record is not None:
        model = server.served_model_name or await _model_of(backends)
        recording = RouterRecording(Path(server.record), config, server, model)
    app = RouterApp(backends, router, config.request_retries, server, api_key(server), clock, recording)
    beside = [asyncio.create_task(watch(backends, server.health_interval, scrapes=False))]
    if app.front.sees_state or app.front.sees_prefixes:
        every_s = config.router_state_age or DEFAULT_STATE_AGE_S
        await asyncio.gather(*(one.scrape() for one in backends))
        beside.append(asyncio.create_task(watch(backends, every_s, scrapes=True)))
    if recording is not None:
        beside.append(asyncio.create_task(_flush(recording)))
    try:
        application = application_server(app, app.end_all, server)
        listener.listen(BACKLOG)
        on_started(address_of(listener))
        await application.serve([listener])
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        for one in backends:
            one.close()
        alarm.close()
        summary = None
        if recording is not None:
            facts = {
                "connections": sum(one.connections.opened for one in backends),
                "resent": sum(one.connections.resent for one in backends),
                "router": config.router or ROUTERS[0],
                "backends": [
                    {
                        "replica": one.number,
                        "url": one.url,
                        "sent": one.sent,
                        "failed": one.failed,
                        "completed": app.completed[one.number],
                        "is_up": one.is_up,
                    }
                    for one in backends
                ],
            }
            summary = recording.close(app.num_requests, facts, app.lag_s.summary())
    return summary


async def _model_of(backends: Sequence[Backend]) -> str:
    """The model that the backends list; `unknown` if none does without a key."""
    for one in backends:
        if names := await one.models():
            return names[0]
    return "unknown"


async def _flush(recording: RouterRecording) -> None:
    while True:
        await asyncio.sleep(FLUSH_EVERY_S)
        recording.flush()
