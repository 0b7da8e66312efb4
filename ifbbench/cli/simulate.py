"""`ifbbench explain-step` and `ifbbench calibrate`: what a simulated device takes for an iteration, and its profile."""

import json
from pathlib import Path
from typing import Any

import click

from ifbbench.cli.given_settings import given_config
from ifbbench.cli.options import SettingsCommand, json_instead_of_tables
from ifbbench.errors import InputError
from ifbbench.settings.devices import SIMULATED
from ifbbench.settings.names import from_mapping

# Settings that change the answer. The others are taken too, so that the options of a run can be given unchanged.
USED_TO_EXPLAIN = (
    "device",
    "dtype",
    "kv_cache_dtype",
    "tp_size",
    "pp_size",
    "kv_cache_free_gpu_mem_fraction",
    "max_num_tokens",
    "max_batch_size",
    "max_attention_window",
    "window_mode",
    "engine_overhead",
    "enable_trt_overlap",
    "overlap",
)
HELP_TO_EXPLAIN = {
    "device": "The simulated device: a hardware profile (h100-sxm, or sim:h100-sxm) or a profile's .toml file.",
    "max_num_tokens": "Tokens of the largest iteration, which memory must hold.",
    "max_batch_size": "Requests of the largest iteration, which memory must hold. Default: 2048.",
}
USED_TO_CALIBRATE = (
    "device",
    "model",
    "dtype",
    "kv_cache_dtype",
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
    "tokens_per_block",
    "max_tokens_in_paged_kvcache",
    "seed",
    "quiet",
    "tp_size",
    "pp_size",
    "kv_cache_free_gpu_mem_fraction",
    "enable_chunked_context",
    "enable_trt_overlap",
    "overlap",
)
HELP_TO_CALIBRATE = {
    "dtype": "Data type of the weights. [float32, bf16, fp16, with --from also fp8 and int4; default: float32, with "
    "--from that of the log, else bf16]",
    "device": "What to measure. [auto, cpu, cuda; default: auto] With --from: the profile that the fit starts from, as "
    "sim:h100-sxm.",
    "tp_size": "With --from: GPUs of the logged server that share each layer. [default: 1]",
    "pp_size": "With --from: pipeline stages of the logged server. [default: 1]",
    "max_batch_size": "Measure batches up to this size. Default: 16 on a CPU, else 2048.",
    "seed": "Seed of the measured requests and of their order, of weights and prompts. [at least 0; default: 0]",
}


@click.command("explain-step", cls=SettingsCommand, shown=USED_TO_EXPLAIN, setting_help=HELP_TO_EXPLAIN)
@click.argument("model_name", metavar="MODEL")
@click.option(
    "--context",
    multiple=True,
    metavar="LENGTH@START",
    help="Context chunks: 512@0 is the first 512 tokens of a prompt. Repeat it, or separate by commas.",
)
@click.option(
    "--generation",
    multiple=True,
    metavar="NxKV",
    help="Requests in generation: 64x2048 is 64 of them, each with 2,048 tokens in its KV cache.",
)
@click.option("--no-cuda-graphs", is_flag=True, help="Launch the kernels of generation one by one.")
@json_instead_of_tables
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
    from ifbbench.studies.explain import explain, parse_step

    if options["device"] is not None:  # `cpu` is the profile here
        options["device"] = SIMULATED + options["device"].removeprefix(SIMULATED)
    config = given_config(config_file, {**options, "model": model_name})
    explanation = explain(config, parse_step(context, generation), cuda_graphs=not no_cuda_graphs)
    if as_json:
        click.echo(json.dumps(explanation.as_dict()))
        return
    from ifbbench.cli.console import report_console
    from ifbbench.studies.explain import print_explanation

    print_explanation(explanation, report_console())


@click.command(cls=SettingsCommand, names=USED_TO_CALIBRATE, setting_help=HELP_TO_CALIBRATE)
@click.option(
    "--from",
    "logs",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    metavar="LOG",
    help="Fit to this log instead of measuring: a run directory, TensorRT-LLM's iteration statistics, vLLM's or "
    "SGLang's log, or a CSV file of load tests. Repeat it for several.",
)
@click.option("--gpu", metavar="NAME", help="With --from: the same as --device sim:NAME.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The profile (.toml); its chart goes beside it (.png). Default: DEVICE-MODEL.toml, or LOG.toml.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing profile and chart.")
@click.option("--quick", is_flag=True, help="Measure a few batches once: seconds instead of minutes, and less exact.")
def calibrate(
    logs: tuple[Path, ...], gpu: str | None, output: Path | None, overwrite: bool, quick: bool, **options: Any
) -> None:
    """Measure the executor on this machine, and write a hardware profile for simulated runs.

    Iterations of all kinds and sizes run as in `ifbbench run`, and the constants of the cost model are fitted to their
    times. The profile is then a device:

        ifbbench calibrate --device cpu --output here.toml

        ifbbench run trace.jsonl --device sim:here.toml

    With --from, nothing runs: the constants are fitted to what a server has logged, and --device is the profile that
    the fit starts from:

        ifbbench calibrate --from iterations.log --model llama-3.1-8b --dtype fp8 --gpu h100-sxm --output ours.toml
    """
    given = {name: value for name, value in options.items() if value is not None}
    if logs or gpu:
        _calibrate_from_logs(logs, gpu, given, output, overwrite)
        return
    config = from_mapping(given)

    from ifbbench.cli.console import progress_line, report_console
    from ifbbench.studies.calibrate import calibrate as run_calibration
    from ifbbench.studies.calibrate import print_calibration

    with progress_line("calibrate", config.quiet) as progress:
        found = run_calibration(config, output, overwrite=overwrite, quick=quick, progress=progress, owns_process=True)
    print_calibration(found, report_console())
    _echo_profile(found.path)


def _calibrate_from_logs(
    logs: tuple[Path, ...], gpu: str | None, given: dict[str, Any], output: Path | None, overwrite: bool
) -> None:
    if not logs:
        raise InputError("--gpu: is for --from; to measure this machine, give --device cpu or cuda.")
    if gpu and given.setdefault("device", f"{SIMULATED}{gpu}") != f"{SIMULATED}{gpu}":
        raise InputError(f"--gpu: is {gpu}, but --device is {given['device']}; give one of them.")

    from ifbbench.cli.console import report_console
    from ifbbench.studies.calibrate_from_logs import calibrate_from_logs, print_log_calibration

    calibration = calibrate_from_logs(logs, given, output, overwrite=overwrite)
    print_log_calibration(calibration, report_console())
    _echo_profile(calibration.found.path)


def _echo_profile(path: Path) -> None:
    click.echo(f"The profile is {path}, its chart {path.with_suffix('.png')}; simulate it with `--device sim:{path}`.")
