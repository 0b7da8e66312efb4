"""`ifbbench triton`: a model or a simulated device behind NVIDIA Triton Inference Server."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from ifbbench.cli.given_settings import given_config
from ifbbench.cli.options import SettingOption, SettingsCommand
from ifbbench.cli.serve import NAMES, engine_config_option
from ifbbench.serving.triton_repository import TritonConfig, triton_settings, write_repository

HELP = {
    "max_queue_size": "Requests that wait for a batch slot; more have the error UNAVAILABLE. Default: 1024.",
    "num_loras": "Random adapters, LoRA tasks 0, 1 and so on of requests; without --lora_dir.",
}


class TritonCommand(SettingsCommand):
    """A command with the settings of Triton before those of the engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, names=NAMES, setting_help=HELP, **kwargs)
        self.params[:0] = [SettingOption(one) for one in triton_settings()]


@click.command(cls=TritonCommand)
@engine_config_option
@click.option(
    "--model_repository",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIRECTORY",
    help="Write the model repository there and end, for a Triton server that is started otherwise.",
)
def triton(config_file: Path | None, model_repository: Path | None, **options: Any) -> None:
    """Serve a model, or a simulated device at its pace, through NVIDIA Triton Inference Server.

    The model has the inputs and outputs of `tensorrt_llm` of TensorRT-LLM's backend.
    """
    names = {one.name for one in triton_settings()}
    given = {name: options.pop(name) for name in names}
    server = TritonConfig(**{name: value for name, value in given.items() if value is not None})
    config = given_config(config_file, options)
    if model_repository is not None:
        click.echo(
            f"Wrote {write_repository(model_repository, config, server)}; Triton needs the package ifbbench in "
            "the Python of its backend.",
            err=True,
        )
        return

    from ifbbench.cli.console import progress_line
    from ifbbench.serving.triton_server import address, serve_triton

    with ExitStack() as loading:

        def report(started: TritonConfig) -> None:
            loading.close()
            click.echo(
                f"Serving {config.model} on {config.device} at {address(started)} (HTTP), gRPC on port "
                f"{started.grpc_port}, metrics on port {started.metrics_port}; Ctrl-C ends it.",
                err=True,
            )

        progress = loading.enter_context(progress_line("triton", config.quiet))
        summary = serve_triton(config, server, progress, report)
    if summary is not None:
        counts = summary["requests"]
        click.echo(
            f"{counts['completed']} of {counts['total']} requests completed, {counts['failed']} failed. "
            f"The recording is in {server.record}; `ifbbench run {server.record}` replays it.",
            err=True,
        )
