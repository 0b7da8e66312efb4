"""`ifbbench bench throughput` and `bench latency`: trtllm-bench's command line, and the report that it prints."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ifbbench.cli.given_settings import given_config
from ifbbench.cli.gpt_manager import SPECULATIVE, ForeignOption, TraceCommand, unset
from ifbbench.settings.config import settings
from ifbbench.settings.trtllm_serve import read_arguments, with_attention_dp

MULTIMODAL = "models with images or video are not available; prompts are tokens."
HEURISTICS = "limits are not tuned to lengths; they are those that are given, or the defaults of `ifbbench run`."
OPTIONS = (
    ForeignOption("backend", "ifbbench computes the model, or simulates it (--device)."),
    ForeignOption("workspace", "no intermediate files are written; --output names the run directory."),
    ForeignOption("revision", "no model is downloaded."),
    ForeignOption("custom_module_dirs", "modules are not loaded from directories; --policy loads a policy."),
    ForeignOption("telemetry", "no telemetry is collected.", is_flag=True),
    ForeignOption("no_skip_tokenizer_init", "no tokenizer is used.", is_switch=True),
    ForeignOption("max_input_len", "it limits multimodal prompts only, and they are not available."),
    ForeignOption("image_data_format", MULTIMODAL),
    ForeignOption("data_device", MULTIMODAL),
    ForeignOption("modality", MULTIMODAL, is_refused=True),
    ForeignOption("mamba_ssm_cache_dtype", "models have no state space layers."),
    ForeignOption("target_input_len", HEURISTICS),
    ForeignOption("target_output_len", HEURISTICS),
    ForeignOption("cluster_size", "each part of --ep has whole experts."),
    ForeignOption("medusa_choices", SPECULATIVE, is_refused=True),
)
# Names of settings in trtllm-bench.
RENAMED = {
    "num_requests": "max_num_samples",
    "tp": "tp_size",
    "pp": "pp_size",
    "ep": "ep_size",
    "warmup": "warm_up",
    "output_json": "responses_json",
}
# Its own meaning of --max_input_len and --config is in OPTIONS and below.
NOT_TAKEN = ("max_input_len",)
SHOWN = (
    "max_num_samples", "request_rate", "concurrency", "streaming", "beam_width", "eos_id", "seed", "policy",
    "max_batch_size", "max_num_tokens", "max_seq_len", "enable_chunked_context", "kv_cache_free_gpu_mem_fraction",
    "enable_kv_cache_reuse", "device", "model", "dtype", "kv_cache_dtype", "tp_size", "pp_size", "ep_size", "warm_up",
    "output", "overwrite", "report_json", "request_json", "iteration_log", "responses_json", "quiet",
)  # fmt: skip
ARRIVALS = ("request_rate", "concurrency", "time_scale", "arrival", "rate_schedule")
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "throughput": {},
    "latency": {"max_batch_size": 1, "concurrency": 1, "streaming": True, "enable_chunked_context": False},
}
INSTEAD = {
    "build": "no engine is built; give --model, or --engine_dir of one that is.",
    "prepare-dataset": "use `ifbbench dataset synth`, which has its options.",
}
_log = logging.getLogger("ifbbench")


class BenchCommand(TraceCommand):
    """A command with the options of trtllm-bench, and the settings of `ifbbench run`."""

    foreign = OPTIONS
    tool = "trtllm-bench"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = [one.name for one in settings() if one.name not in NOT_TAKEN]
        super().__init__(*args, names=names, shown=SHOWN, **kwargs)
        options = {option.name: option for option in self.params}
        for name, setting in RENAMED.items():
            options[setting].opts.append(f"--{name}")
        options["model"].opts.append("-m")
        options["enable_chunked_context"].secondary_opts.append("--disable_chunked_context")
        self.params += [
            click.Option(["model_path", "--model_path"], metavar="DIR", help="The model's directory, before --model."),
            click.Option(
                ["llm_arguments", "--extra_llm_api_options", "--config"],
                metavar="FILE",
                help="YAML of arguments of TensorRT-LLM's LLM class, or of settings; options win.",
            ),
            click.Option(
                ["sampler_options", "--sampler_options"],
                metavar="FILE",
                help="YAML of sampling settings (temperature, top_k, top_p, …); options win.",
            ),
        ]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [*(ctx.obj or ()), *args])  # a later option wins


class BenchGroup(click.Group):
    """The group of both commands, which says what to use instead of the other commands of trtllm-bench."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0].replace("_", "-") in INSTEAD:
            ctx.fail(f"{args[0]}: {INSTEAD[args[0].replace('_', '-')]}")
        return super().resolve_command(ctx, args)


@click.group(cls=BenchGroup)
@click.option("--model", "-m", metavar="NAME", help="As of the commands.")
@click.option("--model_path", metavar="DIR", help="As of the commands.")
@click.option("--workspace", "-w", metavar="DIR", help="No effect.")
@click.option("--log_level", metavar="LEVEL", help="As of the commands.")
@click.option("--revision", metavar="NAME", help="No effect.")
@click.option("--telemetry/--no-telemetry", default=None, expose_value=False, help="No effect.")
@click.pass_context
def bench(ctx: click.Context, /, **options: str | None) -> None:
    """Run with trtllm-bench's options, and print its report.

    Options before the command are the same as behind it: ifbbench bench --model NAME throughput --dataset TRACE.
    """
    given = [(f"--{name}", value) for name, value in options.items() if value is not None]
    ctx.obj = [word for pair in given for word in pair]


@bench.command(cls=BenchCommand)
@click.argument("trace", required=False)
@click.pass_context
def throughput(ctx: click.Context, /, trace: str | None, **options: Any) -> None:
    """Offer all requests of TRACE at once, or as --concurrency or --request_rate says."""
    _bench(ctx, trace, options)


@bench.command(cls=BenchCommand)
@click.argument("trace", required=False)
@click.pass_context
def latency(ctx: click.Context, /, trace: str | None, **options: Any) -> None:
    """Offer the requests of TRACE one after another, in batches of one, with streaming."""
    _bench(ctx, trace, options)


def _bench(ctx: click.Context, trace: str | None, options: dict[str, Any]) -> None:
    values = _values(str(ctx.command.name), options)
    config = given_config(None, values)

    from ifbbench.cli.report import print_result
    from ifbbench.cli.run import replay
    from ifbbench.report.compat.trtllm_bench import report
    from ifbbench.report.compat.trtllm_text import report_text
    from ifbbench.rundir.run_directory import find_lines

    result = replay(trace, config, f"bench {ctx.command.name}")
    print_result(result, lambda data: click.echo(report_text(report(data))))
    click.echo(f"Results are in {result.directory}; `ifbbench report {result.directory}` says more.")
    if result.failed:
        reasons = find_lines(result.directory, "requests")
        click.echo(f"{result.failed} requests failed; {reasons} has the reason of each.", err=True)
        ctx.exit(1)


def _values(command: str, options: dict[str, Any]) -> dict[str, Any]:
    """The settings that the options ask for, with the defaults of trtllm-bench."""
    values = dict(options)
    model_path = values.pop("model_path")
    from_files: dict[str, Any] = {}
    has_attention_dp = False
    for name in ("llm_arguments", "sampler_options"):
        if path := values.pop(name):
            found = read_arguments(Path(path))
            from_files |= found.values
            has_attention_dp = has_attention_dp or found.has_attention_dp
            if found.ignored:
                _log.warning("%s: %s have no effect here.", path, ", ".join(found.ignored))
    unset(values, ("max_num_samples", "concurrency"), "0", "-1")
    given = from_files | {name: value for name, value in values.items() if value is not None}
    if model_path is not None:
        given["model"] = model_path
    defaults = dict(DEFAULTS[command])
    if options["concurrency"] is not None:  # without a limit
        defaults.pop("concurrency", None)
    if not any(name in defaults | given for name in ARRIVALS):
        defaults["time_scale"] = 0
    return with_attention_dp(defaults | given, has_attention_dp)
