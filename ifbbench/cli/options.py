"""Click options made from the settings of `ifbbench.config`, and a `RunConfig` made from what was given."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ifbbench.cli.config_file import read_config_file
from ifbbench.config import RunConfig, from_mapping, settings
from ifbbench.setting import Setting

DEBUG = "ifbbench.debug"
# Names of options elsewhere (vLLM, SGLang, TensorRT-LLM, llama.cpp) that mean one of ours, or a sentence about them.
MEANINGS = {
    "max_num_samples": "num_requests num_prompts num_samples n_requests requests limit",
    "max_batch_size": "max_num_seqs max_running_requests batch_size max_batch parallel max_num_requests",
    "max_num_tokens": "max_num_batched_tokens chunked_prefill_size max_prefill_tokens token_budget n_batch",
    "max_seq_len": "max_model_len context_length ctx_size max_length max_sequence_length n_ctx",
    "max_input_len": "max_prompt_length max_input_length",
    "tp_size": "tp tensor_parallel_size tensor_parallel num_gpus",
    "pp_size": "pp pipeline_parallel_size pipeline_parallel",
    "kv_cache_free_gpu_mem_fraction": "gpu_memory_utilization mem_fraction_static kv_cache_free_gpu_memory_fraction",
    "max_tokens_in_paged_kvcache": "max_total_tokens kv_cache_tokens num_gpu_blocks_override kv_cache_size",
    "tokens_per_block": "block_size page_size kv_block_size",
    "enable_kv_cache_reuse": "enable_prefix_caching prefix_caching enable_radix_cache kv_cache_reuse",
    "no_enable_kv_cache_reuse": "no_enable_prefix_caching disable_radix_cache",
    "enable_chunked_context": "enable_chunked_prefill chunked_prefill",
    "no_enable_chunked_context": "no_enable_chunked_prefill disable_chunked_prefill",
    "policy": "scheduling_policy schedule_policy scheduler capacity_scheduler_policy",
    "context_chunking_policy": "chunking_policy",
    "type": "batching_type batching api",
    "enable_trt_overlap": "async_scheduling overlap enable_overlap enable_overlap_schedule",
    "concurrency": "max_concurrency num_concurrent users num_users",
    "request_rate": "rate qps rps request_rates",
    "enable_exp_delays": "poisson burstiness",
    "time_scale": "speed speedup scale replay_speed",
    "kv_host_cache_bytes": "swap_space cpu_offload_gb hicache_size host_cache secondary_cache_size",
    "kv_cache_dtype": "kv_dtype cache_dtype cache_type_k kv_cache_data_type",
    "dtype": "data_type precision quantization weight_dtype",
    "device": "gpu hardware backend accelerator",
    "model": "model_path model_dir tokenizer checkpoint engine_dir",
    "beam_width": "num_beams best_of use_beam_search",
    "max_beam_width": "max_beams",
    "max_attention_window": "sliding_window attention_window max_attention_window_size",
    "sink_token_len": "attention_sink sink_tokens",
    "cpu_threads": "threads num_threads n_threads",
    "stop_at_end_token": "no_ignore_eos",
    "output": "output_dir result_dir save_result out results",
    "output_csv": "csv result_filename",
    "log_iteration_data": "verbose log_stats log_requests",
    "eos_id": "eos_token_id end_token",
    "seed": "rng_seed",
}
SENTENCES = {
    "dataset trace dataset_path dataset_name input input_file": "Give the trace as an argument: ifbbench run TRACE.",
    "goodput slo request_goodput": "There is no goodput yet; requests.jsonl of a run has the latency of each request.",
    "ignore_eos": "Requests end at their recorded output length unless --stop_at_end_token is given.",
    "num_warmups warmup warm_up": "Every run on a real device warms up first; its requests are not measured.",
}

_METAVARS = {int: "N", float: "X", str: "TEXT"}


class SettingOption(click.Option):
    """The option of one setting. It hands its value on as typed, for `Setting.check` to judge."""

    def __init__(self, setting: Setting, help: str | None = None) -> None:
        names = [setting.name, *setting.aliases]
        is_pair = setting.type is bool
        super().__init__(
            [setting.name, *(_pair(name) if is_pair else f"--{name}" for name in names)],
            default=None,
            metavar=None if is_pair else _METAVARS[setting.type],
            help=help or _help_text(setting),
        )
        self.group = setting.group


def debug_option() -> click.Option:
    """`--debug`, which every command takes."""

    def remember(ctx: click.Context, option: click.Parameter, value: bool) -> None:
        ctx.meta[DEBUG] = value or ctx.meta.get(DEBUG, False)

    return click.Option(["--debug"], is_flag=True, expose_value=False, callback=remember,
                        help="Show the traceback of an error.")  # fmt: skip


class Command(click.Command):
    """A command that explains options it does not have, and takes no option for another's value."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(debug_option())

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = [arg.partition("=")[0] for arg in args]
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            spelt = next((name for name in given if name.replace("_", "-") == error.option_name), error.option_name)
            known = [name for option in self.params for name in (*option.opts, *option.secondary_opts)]
            hint = _suggestion(spelt, known)
            raise click.NoSuchOption(spelt, f"No such option: {spelt}.{hint}", ctx=ctx) from None
        for option in self.params:
            values = ctx.params.get(option.name or "")
            for value in values if isinstance(values, tuple) else (values,):
                if isinstance(option, click.Option) and str(value).startswith("--"):
                    name = next(name for name in option.opts if name.startswith("--"))
                    raise click.UsageError(f"{name} needs a value, but {value} follows it.", ctx=ctx)
        return rest


def _suggestion(name: str, known: Sequence[str]) -> str:
    """What to write instead of `name`, in its spelling; `known` are the names of the command's options."""
    word = name.lstrip("-").replace("-", "_").lower()
    for words, sentence in SENTENCES.items():
        if word in words.split():
            return f" {sentence}"
    names = {option.lstrip("-").replace("-", "_"): option for option in known if option.startswith("--")}
    near = [ours for ours, others in MEANINGS.items() if word in others.split() and ours in names]
    near = near or difflib.get_close_matches(word, names, n=3, cutoff=0.6)
    spelt = [names[ours] for ours in near]
    if "_" in name:
        spelt = [f"--{ours}" for ours in near]
    elif "-" in name[2:]:
        spelt = [f"--{ours.replace('_', '-')}" for ours in near]
    return f" Did you mean {', '.join(spelt)}?" if spelt else ""


class SettingsCommand(Command):
    """A command that takes `--config` and every setting; `setting_help` replaces the help text of some settings."""

    def __init__(self, *args: Any, setting_help: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += _setting_options(setting_help or {})

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List options under the groups of their settings."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                sections.setdefault(getattr(parameter, "group", "command"), []).append(record)
        for group, records in sections.items():
            with formatter.section(f"{group.upper()} OPTIONS"):
                formatter.write_dl(records)


def given_config(config_file: Path | None, options: Mapping[str, Any]) -> RunConfig:
    """The settings of `config_file`, then of the options that were given; InputError names the one that is wrong."""
    from_file = read_config_file(config_file) if config_file else {}
    from_command_line = {name: value for name, value in options.items() if value is not None}
    return from_mapping({**from_file, **from_command_line}, command_line=True)


def _setting_options(setting_help: Mapping[str, str]) -> Iterator[click.Option]:
    yield click.Option(
        ["config_file", "--config"],
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Settings from a YAML or TOML file; options on the command line win.",
    )
    for setting in settings():
        yield SettingOption(setting, setting_help.get(setting.name))


def _pair(name: str) -> str:
    return f"--{name}/--no_{name}"


def _help_text(setting: Setting) -> str:
    facts = [", ".join(setting.choices) or _range(setting)]
    if setting.others:
        facts.append(f"or {setting.others}")
    if setting.type is bool:
        facts.append(f"default: {'off' if setting.command_line_default is False else 'on'}")
    elif setting.default is not None:
        facts.append(f"default: {setting.default}")
    told = "; ".join(fact for fact in facts if fact)
    return setting.help + (f" [{told}]" if told else "")


def _range(setting: Setting) -> str:
    """The unit and the bounds, in the fewest words: `tokens, at least 1`."""
    facts = [setting.unit]
    if setting.minimum is not None:
        facts.append(f"{'above' if setting.exclusive_minimum else 'at least'} {setting.minimum:g}")
    if setting.maximum is not None:
        facts.append(f"at most {setting.maximum:g}")
    return ", ".join(fact for fact in facts if fact)
