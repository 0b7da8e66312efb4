"""`ifbbench capacity`: what fits, before anything is run."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifbbench.cli.given_settings import given_config, read_config_file
from ifbbench.cli.options import COUNT, POSITIVE, SettingsCommand, json_instead_of_tables, size_option
from ifbbench.progress import Progress
from ifbbench.settings.config import RunConfig, settings

if TYPE_CHECKING:
    from ifbbench.studies.capacity_sides import SidesStudy
    from ifbbench.workload.trace import TraceRequest

    Requests = list[TraceRequest]

BYTES_PER_GIB = 1024**3
# Settings that change the answer. The others are taken too, so that the options of a run can be given unchanged.
USED = {one.name for one in settings() if one.group in ("scheduling", "kv cache")} - {
    "enable_trt_overlap",
    "overlap",
    "static_emulated_batch_size",
    "static_emulated_timeout",
    "context_chunking_policy",
    "enable_kv_cache_reuse",
    "enable_partial_reuse",
    "copy_on_partial_reuse",
} | {
    "reserve",
    "max_num_samples",
    "max_prompt_len",
    "skip_bad_rows",
    "beam_width",
    "seed",
    "device",
    "model",
    "dtype",
    "tp_size",
    "pp_size",
    "prefill_replicas",
    "decode_replicas",
    "prefill",
    "decode",
    "transfer_bandwidth",
}
SETTING_HELP = {
    "reserve": "max_new_tokens of each request: trace (as recorded; with --output-len that many), actual (its output "
    "length), factor:F or fixed:N.",
    "seed": "Seed of a drawn workload.",
}


@click.command(cls=SettingsCommand, shown=USED, setting_help=SETTING_HELP)
@click.argument("model_name", metavar="[MODEL]", required=False)
@click.option("--input-len", type=COUNT, metavar="N", help="Requests with this prompt length (tokens).")
@click.option("--output-len", type=COUNT, metavar="N", help="Their output length (tokens).")
@click.option("--trace", metavar="TRACE", help="The requests of a trace instead, as `ifbbench run` takes it.")
@click.option(
    "--memory-gib",
    type=POSITIVE,
    metavar="X",
    help="Free memory in GiB, instead of what is free here.",
)
@click.option("--memory-bytes", callback=size_option, metavar="SIZE", help="The same in bytes, as 80GB or 80GiB.")
@json_instead_of_tables
def capacity(
    model_name: str | None,
    config_file: Path | None,
    input_len: int | None,
    output_len: int | None,
    trace: str | None,
    memory_gib: float | None,
    memory_bytes: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """How much KV cache fits beside MODEL, and how many requests run in it at once.

    MODEL is a built-in model (llama-3.1-8b, …), the name of a published one (openai/gpt-oss-120b), or a directory with
    config.json. Nothing is loaded or run; requests are assumed to share no blocks. With --prefill_replicas and
    --decode_replicas: what each replica of both sides holds, and which ratio of them balances.
    """
    if model_name is not None:
        if options["model"] not in (None, model_name):
            raise click.UsageError(f"MODEL {model_name} and --model {options['model']} differ; leave out one of them.")
        options["model"] = model_name
    if (input_len is None) != (output_len is None):
        given, missing = ("--output-len", "--input-len") if input_len is None else ("--input-len", "--output-len")
        raise click.UsageError(f"{given} needs {missing}.")
    if trace is not None and input_len is not None:
        raise click.UsageError("--trace takes the lengths of its requests; leave out --input-len and --output-len.")
    if memory_gib is not None and memory_bytes is not None:
        raise click.UsageError("--memory-gib and --memory-bytes exclude each other; leave out one of them.")
    if memory_gib is not None:
        memory_bytes = int(memory_gib * BYTES_PER_GIB)
    from_file = read_config_file(config_file) if config_file else {}
    has_sides = any(options.get(name) or from_file.get(name) for name in ("prefill_replicas", "decode_replicas"))
    config = given_config(config_file, options, needs_model=False, runs_fleets=has_sides)

    from ifbbench.cli.console import progress_line
    from ifbbench.replay.run import check_no_fleet
    from ifbbench.studies.capacity import study

    check_no_fleet(config)
    with progress_line("capacity", config.quiet) as progress:
        requests = _requests(config, input_len, output_len, trace, progress)
        progress.stage("calculating")
        if config.is_disaggregated:
            from ifbbench.studies.capacity_sides import study_sides

            sides = study_sides(config, requests, memory_bytes)
        else:
            found = study(config, requests, memory_bytes)
    if config.is_disaggregated:
        _show_sides(sides, as_json)
        return
    if as_json:
        from ifbbench.studies.capacity_tables import figures

        click.echo(json.dumps(figures(found)))
        return
    from ifbbench.cli.console import report_console
    from ifbbench.studies.capacity_tables import print_study

    print_study(found, report_console())


def _show_sides(sides: "SidesStudy", as_json: bool) -> None:
    """Print the answer for a fleet with prefill and decode apart."""
    from ifbbench.studies.capacity_tables import figures_of_sides, print_sides

    if as_json:
        click.echo(json.dumps(figures_of_sides(sides)))
        return
    from ifbbench.cli.console import report_console

    print_sides(sides, report_console())


def _requests(
    config: RunConfig, input_len: int | None, output_len: int | None, trace: str | None, progress: Progress
) -> "Requests":
    """The requests of the trace, or one that represents all of these lengths; none where neither is given."""
    if trace is not None:
        from ifbbench.workload.load import load_trace

        return list(load_trace(trace, config, progress))
    if input_len is None or output_len is None:
        return []
    from ifbbench.workload.trace import Reserve, TraceRequest

    request = TraceRequest(0, 0.0, input_len, max_new_tokens=output_len, output_len=output_len)
    return [Reserve(config.reserve).apply(request)]
