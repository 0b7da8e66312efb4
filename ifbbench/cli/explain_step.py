"""`ifbbench explain-step`: where the time of one iteration goes."""

from pathlib import Path
from typing import Any

import click

from ifbbench.cli.options import SettingOption, SettingsCommand, given_config
from ifbbench.config import SIMULATED

# Settings that change the answer. The others are taken too, so that the options of a run can be given as they are.
SHOWN_SETTINGS = ("device", "dtype", "kv_cache_dtype", "tp_size", "pp_size", "kv_cache_free_gpu_mem_fraction",
                  "max_num_tokens", "max_batch_size", "max_attention_window", "window_mode")  # fmt: skip
SETTING_HELP = {
    "device": "The simulated device: a hardware profile (h100-sxm, or sim:h100-sxm) or a profile's .toml file.",
    "max_num_tokens": "Tokens of the largest iteration, which memory must hold.",
    "max_batch_size": "Requests of the largest iteration, which memory must hold. Default: 2048.",
}


class ExplainStepCommand(SettingsCommand):
    """Takes every setting, and shows those that change what an iteration costs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, setting_help=SETTING_HELP, **kwargs)
        for option in self.params:
            if isinstance(option, SettingOption):
                option.hidden = option.name not in SHOWN_SETTINGS


@click.command(cls=ExplainStepCommand)
@click.argument("model_name", metavar="MODEL")
@click.option(
    "--context",
    multiple=True,
    metavar="LENGTH@START",
    help="Context chunks: 512@0 is the first 512 tokens of a prompt. Repeat it, or put commas between.",
)
@click.option(
    "--generation",
    multiple=True,
    metavar="NxKV",
    help="Requests in generation: 64x2048 is 64 of them, each with 2,048 tokens in its KV cache.",
)
@click.option("--no-cuda-graphs", is_flag=True, help="Launch the kernels of generation one by one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def explain_step(
    model_name: str,
    config_file: Path | None,
    context: tuple[str, ...],
    generation: tuple[str, ...],
    no_cuda_graphs: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Where the time of one iteration of MODEL goes on a simulated device, operation by operation.

    MODEL is a built-in model (llama-3.1-8b, …), a directory with config.json, or such a file.

    Example: ifbbench explain-step llama-3.1-8b --device h100-sxm --context 512@0 --generation 64x2048
    """
    from ifbbench.planning.explain import explain, parse_step

    if options["device"] is not None:
        options["device"] = SIMULATED + options["device"].removeprefix(SIMULATED)
    config = given_config(config_file, {**options, "model": model_name})
    explanation = explain(config, parse_step(context, generation), cuda_graphs=not no_cuda_graphs)
    if as_json:
        import json

        click.echo(json.dumps(explanation.as_dict()))
        return
    from ifbbench.cli.console import report_console
    from ifbbench.planning.explain import print_explanation

    print_explanation(explanation, report_console())
