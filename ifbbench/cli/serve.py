"""`ifbbench serve`: an OpenAI-style server in front of a model or a simulated device."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from ifbbench.cli.given_settings import given_config
from ifbbench.cli.options import SettingOption, SettingsCommand
from ifbbench.errors import InputError
from ifbbench.serving.routing.config import RouterConfig, serve_settings
from ifbbench.settings.config import settings

# The engine's settings, and those of the recording; of requests, only the defaults of what clients leave out. A server
# has its clients' traffic, and is no prediction of another's time.
GROUPS = ("scheduling", "kv cache", "lora", "execution")
NOT_TAKEN = (
    "static_emulated_batch_size",
    "static_emulated_timeout",
    "engine_overhead",
    "stop_at_end_token",
    # Whether a client comes back is not known.
    "kv_retention_priority",
    "kv_retention_s",
)
ALSO_TAKEN = (
    "warm_up",
    "seed",
    "slo",
    "overwrite",
    "recording_format",
    "iteration_stats_format",
    "iteration_stats_every",
    "quiet",
    "replicas",
    "router",
    "router_state_age",
    "request_retries",
)
# The settings among these that a router in front of servers has too.
OF_ROUTERS = (
    "router",
    "router_state_age",
    "request_retries",
    "seed",
    "slo",
    "overwrite",
    "recording_format",
    "quiet",
)
NAMES = [
    one.name for one in settings() if (one.group in GROUPS and one.name not in NOT_TAKEN) or one.name in ALSO_TAKEN
]
HELP = {
    "max_queue_size": "Requests that wait for a batch slot; more are refused with status 429. Default: 1024.",
    "replicas": "Engines behind a router, on one address; on the CPU they share the cores.",
    "num_loras": "Random adapters, which requests name lora-0, lora-1 and so on; without --lora_dir.",
}

engine_config_option = click.option(
    "config_file",
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Settings of the engine from a YAML or TOML file; options on the command line win.",
)


class ServeCommand(SettingsCommand):
    """A command with the settings of the server before those of the engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, names=NAMES, setting_help=HELP, **kwargs)
        self.params[:0] = [SettingOption(one) for one in serve_settings()]


@click.command(cls=ServeCommand)
@engine_config_option
def serve(config_file: Path | None, **options: Any) -> None:
    """Serve a model, or a simulated device at its pace, to OpenAI clients; or route to other servers.

    Endpoints: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics, /iterations, /openapi.json.
    """
    names = {one.name for one in serve_settings()}
    given = {name: options.pop(name) for name in names}
    server = RouterConfig(**{name: value for name, value in given.items() if value not in (None, ())})
    if server.router_only:
        _route(config_file, server, options)
        return
    config = given_config(config_file, options, runs_fleets=True)

    from ifbbench.cli.console import progress_line
    from ifbbench.serving.server import serve as run

    with ExitStack() as loading:

        def report(url: str) -> None:
            loading.close()
            replicas = f", {config.replicas} replicas," if config.is_fleet else ""
            click.echo(f"Serving {config.model} on {config.device}{replicas} at {url}; Ctrl-C ends it.", err=True)

        progress = loading.enter_context(progress_line("serve", config.quiet))
        summary = run(config, server, progress, report)
    _say_recorded(summary, server)


def _route(config_file: Path | None, server: RouterConfig, options: dict[str, Any]) -> None:
    """Serve as a router in front of other servers."""
    for name, value in options.items():
        if value not in (None, ()) and name not in OF_ROUTERS:
            raise InputError(f"--{name}: --router_only runs no engine; leave it out.")
    if config_file is not None:
        raise InputError("--config: is of an engine, and --router_only runs none; leave it out.")
    config = given_config(None, options, runs_fleets=True)

    from ifbbench.serving.routing.server import serve_router

    def report(url: str) -> None:
        routed = ", ".join(server.addresses)
        click.echo(f"Routing to {routed} at {url}; Ctrl-C ends it.", err=True)

    _say_recorded(serve_router(config, server, report), server)


def _say_recorded(summary: dict[str, Any] | None, server: RouterConfig) -> None:
    if summary is None:
        return
    counts, recording = summary["requests"], server.record
    click.echo(
        f"{counts['completed']} of {counts['total']} requests completed, {counts['failed']} failed. "
        f"The recording is in {recording}; `ifbbench run {recording}` replays it.",
        err=True,
    )
