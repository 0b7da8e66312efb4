"""`ifbbench dataset synth`: draw traces, with the names and options of TensorRT-LLM's prepare_dataset.py."""

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifbbench.cli.options import COUNT, NOT_NEGATIVE, NOT_NEGATIVE_INTEGER, POSITIVE, Command, FloatRange, IntegerRange
from ifbbench.files import check_new_file
from ifbbench.progress import Progress
from ifbbench.settings.fields import MAX_INTEGER_SETTING

if TYPE_CHECKING:
    from ifbbench.workload.sample import Sample
    from ifbbench.workload.trace import Trace, TraceRequest

PROGRESS_EVERY = 4096
DEVIATION = "Its standard deviation."
FORMATS = ("ifbbench", "gpt-manager", "trtllm-bench", "lengths", "mooncake")
ARRIVALS = ("all_at_once", "constant", "poisson")
# prepare_dataset.py's names of the same.
DELAYS = {"constant": "constant", "exponential_dist": "poisson"}
Function = Callable[..., Any]
Document = dict[str, Any]


class Group(click.Group):
    command_class = Command
    group_class = type  # groups in it are of this class as well


@click.group(cls=Group)
@click.option("--output", type=click.Path(path_type=Path), help="As --output of the command.")
@click.option("--random-seed", type=NOT_NEGATIVE_INTEGER, metavar="K", help="As --random-seed of the command.")
@click.option(
    "--request-rate", type=FloatRange(min=-1), metavar="R", help="As --request-rate of the command; -1: all at once."
)
@click.option(
    "--time-delay-dist",
    type=click.Choice(list(DELAYS)),
    default="exponential_dist",
    show_default=True,
    help="Arrivals at --request-rate: as --arrival constant or poisson.",
)
@click.option("--task-id", type=IntegerRange(min=-1), metavar="N", help="LoRA task of all requests; -1: none.")
@click.option(
    "--rand-task-id",
    type=(NOT_NEGATIVE_INTEGER, NOT_NEGATIVE_INTEGER),
    metavar="MIN MAX",
    help="Range of random LoRA tasks.",
)
@click.option("--stdout", is_flag=True, help="As -o - --to trtllm-bench of the command.")
@click.option("--tokenizer", metavar="NAME", help="Not needed: the replay draws token ids of the model's vocabulary.")
@click.option("--trust-remote-code", is_flag=True, help="Not needed: see --tokenizer.")
@click.option("--lora-dir", metavar="DIR", help="Not needed: LoRA tasks are known by their ids.")
@click.pass_context
def synth(
    ctx: click.Context,
    /,
    output: Path | None,
    random_seed: int | None,
    request_rate: float | None,
    time_delay_dist: str,
    task_id: int | None,
    rand_task_id: tuple[int, int] | None,
    stdout: bool,
    **_: Any,
) -> None:
    """Draw a trace of lengths and arrivals, and write it as ifbbench JSONL or in another format.

    The options before the command are those of prepare_dataset.py, so that its command lines run as they are.
    """
    given: Document = {"output": output, "random_seed": random_seed}
    if stdout:
        given |= {"output": "-", "to": "trtllm-bench"}
    if request_rate not in (None, -1):
        given |= {"request_rate": request_rate, "arrival": DELAYS[time_delay_dist]}
    tasks = rand_task_id or (None if task_id in (None, -1) else (task_id, task_id))
    if tasks is not None:
        given |= {"min_task_id": tasks[0], "max_task_id": tasks[1]}
    defaults = {name: value for name, value in given.items() if value is not None}
    ctx.default_map = dict.fromkeys(synth.list_commands(ctx), defaults)


FILE_OPTIONS = (
    click.option(
        "-o",
        "--output",
        type=click.Path(path_type=Path),
        required=True,
        metavar="FILE",
        help="File to write, compressed if its name ends in .gz; - for standard output.",
    ),
    click.option("--overwrite", is_flag=True, help="Replace an existing file."),
    click.option(
        "--vocab-size",
        type=IntegerRange(1, MAX_INTEGER_SETTING),
        default=32_000,
        show_default=True,
        metavar="N",
        help="Token ids are drawn below it where the trace records none and the format needs them.",
    ),
)
FORMAT_OPTION = click.option(
    "--to", type=click.Choice(FORMATS), help="Format; default: gpt-manager for .json, lengths for .csv, else ifbbench."
)
OUTPUT_OPTIONS = (
    click.option("--random-seed", "--seed", type=NOT_NEGATIVE_INTEGER, default=0, show_default=True, metavar="K"),
    FORMAT_OPTION,
    *FILE_OPTIONS,
)
COMMON_OPTIONS = (
    click.option("--num-requests", type=COUNT, required=True, metavar="N", help="Requests to draw."),
    click.option(
        "--arrival", type=click.Choice(ARRIVALS), default="all_at_once", show_default=True, help="When requests arrive."
    ),
    click.option("--request-rate", type=POSITIVE, metavar="R", help="Requests/s of constant or Poisson arrivals."),
    click.option(
        "--reserve",
        default="actual",
        show_default=True,
        metavar="TEXT",
        help="max_new_tokens of each request: actual (its output length), factor:F or fixed:N.",
    ),
    click.option("--min-task-id", type=NOT_NEGATIVE_INTEGER, metavar="N", help="Lowest LoRA task (random)."),
    click.option("--max-task-id", type=NOT_NEGATIVE_INTEGER, metavar="N", help="Highest LoRA task."),
    *OUTPUT_OPTIONS,
)


def _counted(trace: "Trace | Sample", progress: Progress) -> "Iterator[TraceRequest]":
    """The requests of `trace`; `progress` follows their use."""
    for index, request in enumerate(trace):
        if index % PROGRESS_EVERY == 0:
            progress.update(index, len(trace), "requests")
        yield request


def check_output(output: Path, overwrite: bool) -> None:
    """InputError if `write` would refuse `output`."""
    if str(output) != "-":
        check_new_file(output, "--output", overwrite)


def write(trace: "Trace | Sample", output: Path, overwrite: bool, seed: int, to: str | None, vocab_size: int) -> None:
    """Write `trace` in the format `to`, by default that of the suffix, and say so; to standard output if `output` is -.

    seed, vocab_size: what token ids are drawn with, where the trace records none and the format needs them.
    """
    from ifbbench.cli.console import progress_line
    from ifbbench.workload.convert import FORMATS as OUTPUT_FORMATS
    from ifbbench.workload.convert import Losses, Tokens, format_of
    from ifbbench.workload.formats import write_lines

    name = to or format_of(output) or FORMATS[0]
    chosen, is_stdout = OUTPUT_FORMATS[name], str(output) == "-"
    with progress_line("dataset", quiet=False) as progress:
        progress.stage("writing trace")
        losses = Losses(_counted(trace, progress), chosen.carries)
        write_lines(chosen.lines(losses, Tokens(vocab_size, seed)), sys.stdout if is_stdout else output, overwrite)
    if not is_stdout:
        click.echo(f"{len(trace)} requests written to {output}{'' if name == FORMATS[0] else f' ({name})'}")
    for field, number in losses.counts.items():
        click.echo(f"{name} cannot express {field}: left out of {number:,} requests", err=True)


def add_options(function: Function, options: tuple[Function, ...]) -> Function:
    for option in reversed(options):
        function = option(function)
    return function


def _workload(name: str, *options: Function) -> Callable[[Function], click.Command]:
    """Makes a command of `synth` from a function that returns the distributions of a workload specification."""

    def decorate(function: Function) -> click.Command:
        @wraps(function)
        def command(
            num_requests: int,
            arrival: str,
            request_rate: float | None,
            reserve: str,
            min_task_id: int | None,
            max_task_id: int | None,
            random_seed: int,
            output: Path,
            overwrite: bool,
            to: str | None,
            vocab_size: int,
            **own_options: Any,
        ) -> None:
            from ifbbench.cli.console import progress_line
            from ifbbench.workload.draw import draw_trace
            from ifbbench.workload.spec import parse_spec

            check_output(output, overwrite)
            if (arrival == "all_at_once") != (request_rate is None):
                needs = "needs a" if request_rate is None else "takes no"
                raise click.UsageError(f"--arrival {arrival} {needs} --request-rate.")
            document = function(**own_options) | {
                "num_requests": num_requests,
                "arrival": {"process": arrival} | ({} if request_rate is None else {"rate": request_rate}),
                "reserve": reserve,
            }
            if min_task_id is not None or max_task_id is not None:
                document["lora_task_id"] = {"min": min_task_id or 0, "max": max_task_id or min_task_id or 0}
            with progress_line("dataset", quiet=False) as progress:
                progress.stage("drawing requests")
                trace = draw_trace(parse_spec(document, name), random_seed, source=str(output))
            write(trace, output, overwrite, random_seed, to, vocab_size)

        return synth.command(name)(add_options(command, (*options, *COMMON_OPTIONS)))

    return decorate


def _normal(mean: float, stdev: float) -> Document:
    return {"distribution": "normal", "mean": mean, "stdev": stdev}


def _normal_options(prompt: str) -> tuple[Function, ...]:
    """Options of normally distributed lengths; `prompt` is what the input length is of."""
    return (
        click.option("--input-mean", type=POSITIVE, required=True, metavar="M", help=f"Mean {prompt} length (tokens)."),
        click.option("--input-stdev", type=NOT_NEGATIVE, required=True, metavar="S", help=DEVIATION),
        click.option("--output-mean", type=POSITIVE, required=True, metavar="M", help="Mean output length (tokens)."),
        click.option("--output-stdev", type=NOT_NEGATIVE, required=True, metavar="S", help=DEVIATION),
    )


def _normal_lengths(input_mean: float, input_stdev: float, output_mean: float, output_stdev: float) -> Document:
    return {"prompt_len": _normal(input_mean, input_stdev), "output_len": _normal(output_mean, output_stdev)}


@_workload("token-norm-dist", *_normal_options("prompt"))
def token_norm_dist(**lengths: float) -> Document:
    """Normally distributed lengths, rounded and at least 1."""
    return _normal_lengths(**lengths)


@_workload(
    "token-unif-dist",
    click.option("--input-min", type=COUNT, required=True, metavar="N", help="Shortest prompt (tokens)."),
    click.option("--input-max", type=COUNT, required=True, metavar="N", help="Longest prompt (tokens)."),
    click.option("--output-min", type=COUNT, required=True, metavar="N", help="Shortest output (tokens)."),
    click.option("--output-max", type=COUNT, required=True, metavar="N", help="Longest output (tokens)."),
)
def token_unif_dist(input_min: int, input_max: int, output_min: int, output_max: int) -> Document:
    """Uniformly distributed lengths, both ends included."""
    return {
        "prompt_len": {"distribution": "uniform", "min": input_min, "max": input_max},
        "output_len": {"distribution": "uniform", "min": output_min, "max": output_max},
    }


@_workload(
    "token-from-histogram",
    click.option(
        "--histogram",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Histogram file (.csv with min, max, prompts, outputs; or .json).",
    ),
    click.option("--trace", metavar="TRACE", help="Measure the histograms of this trace instead."),
)
def token_from_histogram(histogram: Path | None, trace: str | None) -> Document:
    """Lengths from histograms: of a file, or measured from a trace. Prompts and outputs are drawn independently."""
    from ifbbench.settings.config import RunConfig
    from ifbbench.workload.histograms import MEASURED_BINS, measured, read_histograms
    from ifbbench.workload.load import load_trace
    from ifbbench.workload.trace import columns_of

    if (histogram is None) == (trace is None):
        raise click.UsageError("give one of --histogram FILE and --trace TRACE.")
    if histogram is not None:
        found = read_histograms(histogram)
    else:
        columns = columns_of(load_trace(trace, RunConfig()).requests)
        found = {name: measured(getattr(columns, name), MEASURED_BINS) for name in ("prompt_len", "output_len")}
    return {
        name: {"distribution": "histogram", "edges": list(one.edges), "counts": list(one.counts)}
        for name, one in found.items()
    }


@_workload(
    "lognormal",
    click.option("--input-median", type=POSITIVE, required=True, metavar="M", help="Median prompt length (tokens)."),
    click.option("--input-mean", type=POSITIVE, required=True, metavar="M", help="Its mean, at least the median."),
    click.option("--input-max", type=COUNT, metavar="N", help="Longest prompt; longer ones are cut off there."),
    click.option("--output-median", type=POSITIVE, required=True, metavar="M", help="Median output length (tokens)."),
    click.option("--output-mean", type=POSITIVE, required=True, metavar="M", help="Its mean, at least the median."),
    click.option("--output-max", type=COUNT, metavar="N", help="Longest output; longer ones are cut off there."),
)
def lognormal(**options: float | None) -> Document:
    """Log-normal lengths: many short ones, few very long ones."""
    document: Document = {}
    for name, prefix in (("prompt_len", "input"), ("output_len", "output")):
        numbers = {key: options[f"{prefix}_{key}"] for key in ("median", "mean", "max")}
        given = {key: value for key, value in numbers.items() if value is not None}
        document[name] = {"distribution": "lognormal", **given}
    return document


@_workload(
    "fixed",
    click.option("--input-len", type=COUNT, required=True, metavar="N", help="Tokens of every prompt."),
    click.option("--output-len", type=COUNT, required=True, metavar="N", help="Tokens of every output."),
)
def fixed(input_len: int, output_len: int) -> Document:
    """The same lengths in every request."""
    lengths = {"prompt_len": input_len, "output_len": output_len}
    return {name: {"distribution": "fixed", "value": length} for name, length in lengths.items()}


@_workload(
    "shared-prefix",
    click.option("--pools", type=COUNT, required=True, metavar="N", help="Different prefixes (system prompts)."),
    click.option("--prefix-mean", type=POSITIVE, required=True, metavar="M", help="Mean length of a prefix (tokens)."),
    click.option("--prefix-stdev", type=NOT_NEGATIVE, default=0, show_default=True, metavar="S", help=DEVIATION),
    click.option(
        "--share",
        type=FloatRange(0, 1),
        default=1,
        show_default=True,
        metavar="F",
        help="Share of the requests that have a prefix.",
    ),
    click.option(
        "--skew",
        type=NOT_NEGATIVE,
        default=0,
        show_default=True,
        metavar="Z",
        help="Popularity of the k-th prefix: k to the power of -Z; 0: all alike.",
    ),
    *_normal_options("whole prompt"),
)
def shared_prefix(
    pools: int, prefix_mean: float, prefix_stdev: float, share: float, skew: float, **lengths: float
) -> Document:
    """Prompts that share prefixes. Lengths are normal; a prompt has at least one token after its prefix."""
    prefix = {"pools": pools, "len": _normal(prefix_mean, prefix_stdev), "share": share, "skew": skew}
    return _normal_lengths(**lengths) | {"shared_prefix": prefix}


@_workload(
    "multi-turn",
    click.option(
        "--turns-mean", type=FloatRange(min=1), required=True, metavar="M", help="Mean number of turns (geometric)."
    ),
    click.option(
        "--think-time-mean",
        type=NOT_NEGATIVE,
        required=True,
        metavar="S",
        help="Mean time from a turn to the next (s, exponential).",
    ),
    click.option(
        "--think-from",
        type=click.Choice(["arrival", "answer"]),
        default="arrival",
        show_default=True,
        help="What the think time follows: the arrival of the turn before, or the end of its answer.",
    ),
    *_normal_options("new message"),
)
def multi_turn(turns_mean: float, think_time_mean: float, think_from: str, **lengths: float) -> Document:
    """Conversations: each prompt is all previous turns and a new message.

    N counts turns; --arrival is that of conversations. Answers in prompts are placeholders for those of a model.
    """
    sessions = {
        "turns": {"distribution": "geometric", "mean": turns_mean},
        "think_time": {"distribution": "exponential", "mean": think_time_mean},
        "think_from": think_from,
    }
    return _normal_lengths(**lengths) | {"sessions": sessions}


def spec(
    file: str,
    num_requests: int | None,
    random_seed: int,
    output: Path,
    overwrite: bool,
    to: str | None,
    vocab_size: int,
) -> None:
    """The requests of a workload specification FILE (.yaml, .toml), or of a bundled one by its name."""
    from ifbbench.errors import InputError
    from ifbbench.settings.config import RunConfig
    from ifbbench.workload.load import SPEC_SUFFIXES, bundled_path, load_trace

    check_output(output, overwrite)
    path = Path(file) if Path(file).exists() else bundled_path(file) or Path(file)
    if path.suffix.lower() not in SPEC_SUFFIXES:
        raise InputError(
            f"{file} is not a workload specification; expected a file ending in {', '.join(SPEC_SUFFIXES)}."
        )
    trace = load_trace(path, RunConfig(max_num_samples=num_requests, seed=random_seed))
    write(trace, output, overwrite, random_seed, to, vocab_size)


synth.command("spec")(
    add_options(
        spec,
        (
            click.argument("file"),
            click.option("--num-requests", type=COUNT, metavar="N", help="Draw only the first N."),
            *OUTPUT_OPTIONS,
        ),
    )
)
