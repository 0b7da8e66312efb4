"""gptManagerBenchmark's command line: the options of its versions (TensorRT-LLM 0.5 to 1.0) that are not settings.

Those that have a meaning here become settings, those in OPTIONS have no effect or are refused.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import click

from ifbbench.cli.options import SettingsCommand
from ifbbench.errors import InputError
from ifbbench.settings.fields import choice, number

LOG_LEVELS = {
    "verbose": logging.DEBUG,
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "internal_error": logging.CRITICAL,
}
KERNELS = "the kernels are those of ifbbench."
SPECULATIVE = (
    "draft tokens come from --draft_model or --draft_ngram only, and figures without this decoding would be "
    "those of another configuration."
)
ENCODER = "encoder-decoder models are not available."
_log = logging.getLogger("ifbbench")


@dataclass(frozen=True, slots=True)
class ForeignOption:
    """An option of another tool that sets nothing here.

    reason: why it has no effect, or is refused.
    is_flag: whether it takes no value, or true or false.
    is_switch: whether it never takes a value.
    is_refused: whether it would change what is measured, so that it is not ignored, except for the values in `harmless`
        (as texts, in lower case).
    """

    name: str
    reason: str
    is_flag: bool = False
    is_switch: bool = False
    is_refused: bool = False
    harmless: tuple[str, ...] = ()

    @property
    def metavar(self) -> str:
        return "" if self.is_flag or self.is_switch else " VALUE"

    def check(self, value: Any) -> None:
        """Say on standard error that the option has no effect, or raise InputError if it is refused."""
        is_harmless = not self.is_refused or value is False or str(value).lower() in self.harmless
        if not is_harmless:
            raise InputError(f"--{self.name}: {self.reason} Leave it out.")
        if not self.is_refused:
            _log.warning("--%s has no effect: %s", self.name, self.reason)


OPTIONS = (
    ForeignOption("api", "executor and gptManager are two interfaces of one batch manager; here there is one."),
    ForeignOption("first_batch_delay", "requests are offered when they arrive; --static_emulated_batch_size collects "
                  "them into batches."),
    ForeignOption("kv_onboard_blocks", "blocks in host memory are copied to the device before they are reused, which "
                  "is what true asks for.", is_flag=True),
    ForeignOption("kv_dont_onboard_blocks", "blocks in host memory are always copied to the device before they are "
                  "reused.", is_flag=True),
    ForeignOption("multi_block_mode", KERNELS, is_flag=True),
    ForeignOption("enable_context_fmha_fp32_acc", KERNELS, is_flag=True),
    ForeignOption("cuda_graph_mode", "on a GPU, generation always runs from CUDA graphs.", is_flag=True),
    ForeignOption("cuda_graph_cache_size", "the CUDA graphs of all batch sizes are kept."),
    ForeignOption("dump_profile", "--profile records where the time of each iteration goes.", is_flag=True),
    ForeignOption("cross_kv_cache_fraction", ENCODER),
    ForeignOption("encoder_engine_dir", ENCODER, is_refused=True),
    ForeignOption("gpu_weights_percent", "weights cannot stay in host memory.", is_refused=True, harmless=("1", "1.0")),
    ForeignOption("medusa_choices", SPECULATIVE, is_refused=True),
    ForeignOption("eagle_choices", SPECULATIVE, is_refused=True),
    ForeignOption("eagle_posterior_threshold", SPECULATIVE, is_refused=True),
    ForeignOption("eagle_use_dynamic_tree", SPECULATIVE, is_flag=True, is_refused=True),
    ForeignOption("eagle_dynamic_tree_max_top_k", SPECULATIVE, is_refused=True),
    ForeignOption("executor_lookahead_config", SPECULATIVE, is_refused=True),
    ForeignOption("request_lookahead_config", SPECULATIVE, is_refused=True),
    ForeignOption("lookahead_config", SPECULATIVE, is_refused=True),
    ForeignOption("decoding_mode", "top-k, top-p and beam search follow from --top_k, --top_p and --beam_width; other "
                  "modes are not available.", is_refused=True,
                  harmless=("auto", "top_k", "top_p", "top_k_top_p", "beam_search")),
)  # fmt: skip
# Early versions meant "not given" by this value.
UNSET = "-1"
UNSET_SETTINGS = ("max_batch_size", "max_tokens_in_paged_kvcache", "kv_cache_free_gpu_mem_fraction")


def click_option(option: ForeignOption) -> click.Option:
    """The hidden command line option of a foreign one."""
    declaration = f"--{option.name}/--no_{option.name}" if option.is_flag else f"--{option.name}"
    return click.Option(
        [option.name, declaration],
        is_flag=option.is_flag or option.is_switch,
        default=None,
        hidden=True,
        help=option.reason,
    )


class TraceCommand(SettingsCommand):
    """A command that replays TRACE and takes gptManagerBenchmark's command lines."""

    foreign: tuple[ForeignOption, ...] = OPTIONS
    tool = "gptManagerBenchmark"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # An option that has become a setting is that setting.
        names = {name for parameter in self.params for name in (parameter.name, *parameter.opts)}
        self.foreign = tuple(one for one in self.foreign if not {one.name, f"--{one.name}"} & names)
        self.params += [
            click.Option(["dataset", "--dataset"], metavar="TRACE", help="The same as the argument TRACE."),
            click.Option(
                ["engine_dir", "--engine_dir", "--decoder_engine_dir"],
                metavar="DIR",
                help="A TensorRT-LLM engine: its config.json gives the model's shape and the defaults of "
                "limits, on a simulated device also data types and parallelism.",
            ),
            click.Option(
                ["log_level", "--log_level"],
                metavar="LEVEL",
                help=f"What is printed to standard error. [{', '.join(LOG_LEVELS)}; default: warning]",
            ),
            click.Option(
                ["--help_compat"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=self._print,
                help=f"List the options of {self.tool} that have no effect or are refused.",
            ),
            *map(click_option, self.foreign),
        ]
        if kwargs.get("shown") is None:
            self.only_in_all |= {"dataset", "engine_dir", "log_level"}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        self.translate(ctx)
        return rest

    def translate(self, ctx: click.Context) -> None:
        """Turn the given options of gptManagerBenchmark into settings and the argument TRACE."""
        values = ctx.params
        level = values.pop("log_level")
        if level is not None:
            _set_log_level(ctx, LOG_LEVELS[choice(level, "--log_level", LOG_LEVELS)])
        given = {option: value for option in self.foreign if (value := values.pop(option.name)) is not None}
        for option, value in given.items():
            option.check(value)
        dataset = values.pop("dataset")
        if (given or dataset is not None) and values.get("benchmark_lines", True) is None:
            values["benchmark_lines"] = True
        if dataset is not None:
            if values["trace"] not in (None, dataset):
                raise click.UsageError(f"TRACE is {values['trace']} and --dataset is {dataset}; leave out one of them.")
            values["trace"] = dataset
        rate = values.get("request_rate")
        if rate is not None and number(rate, "--request_rate", from_text=True) < 0:
            _offer_all_at_once(values)
        unset(values, UNSET_SETTINGS, UNSET)

    def _print(self, ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            formatter = ctx.make_formatter()
            for title, is_refused in (("options without effect", False), ("options that are refused", True)):
                with formatter.section(f"{self.tool} {title}"):
                    formatter.write_dl(
                        [
                            (f"--{option.name}{option.metavar}", _capitalised(option.reason))
                            for option in self.foreign
                            if option.is_refused == is_refused
                        ]
                    )
            from ifbbench.settings.servers import SERVERS

            for server in SERVERS.values():
                with formatter.section(f"{server.usage} options without effect in `ifbbench config from`"):
                    names = sorted(server.others.no_effect)
                    formatter.write_text(", ".join(f"--{name}" for name in names))
            click.echo(formatter.getvalue().rstrip())
            ctx.exit()


def unset(values: dict[str, Any], names: Iterable[str], *texts: str) -> None:
    """Leave out those of `names` that have one of `texts` as value."""
    for name in names:
        if str(values.get(name)).removesuffix(".0") in texts:
            values[name] = None


def _capitalised(text: str) -> str:
    return text if text.startswith("--") else text[0].upper() + text[1:]


def _offer_all_at_once(values: dict[str, Any]) -> None:
    """A negative rate: all requests at once, as gptManagerBenchmark does then."""
    if values.get("time_scale") is not None and float(values["time_scale"]) != 0:
        raise click.UsageError(
            "--request_rate below 0 offers all requests at once, and --time_scale scales recorded "
            "arrivals; leave out one of them."
        )
    if values.get("enable_exp_delays"):
        _log.warning("--enable_exp_delays has no effect: --request_rate below 0 offers all requests at once.")
    values.update(request_rate=None, enable_exp_delays=None, time_scale="0")


def _set_log_level(ctx: click.Context, level: int) -> None:
    """Messages of ifbbench, which the handler of last resort prints, until the command ends."""
    levels: list[tuple[Any, int]] = [(_log, _log.level)]
    if logging.lastResort is not None:
        levels.append((logging.lastResort, logging.lastResort.level))
    for one, before in levels:
        one.setLevel(level)
        ctx.call_on_close(lambda one=one, before=before: one.setLevel(before))
