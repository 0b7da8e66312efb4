"""`ifbbench serve`: an OpenAI-style server in front of a model or a simulated device."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from ifbbench.cli.options import SettingOption, SettingsCommand, given_config
from ifbbench.serving.config import ServerConfig, server_settings
from ifbbench.settings.config import settings

# The engine's settings, and those of the recording; of requests, only the defaults of what clients leave out. A server
# has its clients' traffic, and is no prediction of another's time.
GROUPS = ("scheduling", "kv cache", "lora", "execution")
NOT_TAKEN = ("static_emulated_batch_size", "static_emulated_timeout", "engine_overhead", "stop_at_end_token")
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
        self.params[:0] = [SettingOption(one) for one in server_settings()]


@click.command(cls=ServeCommand)
@engine_config_option
def serve(config_file: Path | None, **options: Any) -> None:
    """Serve a model, or a simulated device at its pace, to OpenAI clients.

    Endpoints: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics, /iterations, /openapi.json.
    """
    names = {one.name for one in server_settings()}
    given = {name: options.pop(name) for name in names}
    server = ServerConfig(**{name: value for name, value in given.items() if value is not None})
    config = given_config(config_file, options, runs_fleets=True)

    from ifbbench.cli.console import progress_line
    from ifbbench.serving.server import serve as run

    with ExitStack() as loading:

        def report(url: str) -> None:
            loading.close()
            click.echo(f"Serving {config.model} on {config.device} at {url}; Ctrl-C ends it.", err=True)

        progress = loading.enter_context(progress_line("serve", config.quiet))
        summary = run(config, server, progress, report)
    if summary is not None:
        counts, recording = summary["requests"], server.record
        click.echo(
            f"{counts['completed']} of {counts['total']} requests completed, {counts['failed']} failed. "
            f"The recording is in {recording}; `ifbbench run {recording}` replays it.",
            err=True,
        )
