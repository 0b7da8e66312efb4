"""`ifbbench generate`: what a model answers to a prompt."""

from pathlib import Path
from typing import Any

import click

from ifbbench.cli.given_settings import given_config
from ifbbench.cli.options import COUNT, SettingsCommand
from ifbbench.errors import InputError


@click.command(cls=SettingsCommand)
@click.argument("prompts", nargs=-1, required=True)
@click.option(
    "--max_new_tokens",
    type=COUNT,
    default=64,
    show_default=True,
    metavar="N",
    help="Maximum output length of each prompt.",
)
def generate(prompts: tuple[str, ...], max_new_tokens: int, config_file: Path | None, **options: Any) -> None:
    """Continue PROMPTS with a model that has a tokenizer, all in one batch, and print the texts.

    To check that a model is read correctly before it is measured.
    """
    config = given_config(config_file, options)
    if config.makes_no_tokens:
        raise InputError(f"--device: {config.device} runs no model; expected auto, cpu or cuda here.")

    from ifbbench.build.engine import build_engine
    from ifbbench.build.engine import generate as run
    from ifbbench.cli.console import progress_line
    from ifbbench.models.named_models import load_tokenizer

    tokenizer = load_tokenizer(config.model)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    with progress_line("generate", config.quiet) as progress:
        progress.stage("loading model")
        engine = build_engine(config, owns_process=True)
        try:
            progress.stage("generating")
            outputs = run(engine, encoded, max_new_tokens)
        finally:
            engine.executor.close()
    for prompt, tokens in zip(prompts, outputs, strict=True):
        click.echo(click.style(prompt, bold=True) + tokenizer.decode(tokens.tolist()))
