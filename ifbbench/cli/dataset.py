"""`ifbbench dataset`: make traces and describe them."""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifbbench.cli.options import Command

if TYPE_CHECKING:
    from ifbbench.workload.statistics import TraceStatistics

LENGTH = click.IntRange(min=1)
POSITIVE = click.FloatRange(min=0, min_open=True)
NOT_NEGATIVE = click.FloatRange(min=0)
DEVIATION = "Its standard deviation."
Function = Callable[..., Any]
Document = dict[str, Any]


class Group(click.Group):
    command_class = Command
    group_class = type  # groups in it are of this class as well


@click.group(cls=Group)
def dataset() -> None:
    """Make, convert and describe traces."""


@dataset.group()
def synth() -> None:
    """Draw a trace of lengths and arrivals, and write it as ifbbench JSONL."""


COMMON_OPTIONS = (
    click.option("--num-requests", type=LENGTH, required=True, metavar="N", help="Requests to draw."),
    click.option("--arrival", type=click.Choice(["all_at_once", "constant", "poisson"]), default="all_at_once",
                 show_default=True, help="When requests arrive."),
    click.option("--request-rate", type=POSITIVE, metavar="R", help="Requests/s of constant or Poisson arrivals."),
    click.option("--reserve", default="actual", show_default=True, metavar="TEXT",
                 help="max_new_tokens of each request: actual (its output length), factor:F or fixed:N."),
    click.option("--random-seed", "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="K"),
    click.option("-o", "--output", type=click.Path(path_type=Path), required=True,
                 help="File to write (.jsonl, .jsonl.gz)."),
    click.option("--overwrite", is_flag=True, help="Replace an existing file."),
)  # fmt: skip


def _normal_options(prompt: str) -> tuple[Function, ...]:
    """Options of normally distributed lengths; `prompt` is what the input length is of."""
    return (
        click.option("--input-mean", type=POSITIVE, required=True, metavar="M", help=f"Mean {prompt} length (tokens)."),
        click.option("--input-stdev", type=NOT_NEGATIVE, required=True, metavar="S", help=DEVIATION),
        click.option("--output-mean", type=POSITIVE, required=True, metavar="M", help="Mean output length (tokens)."),
        click.option("--output-stdev", type=NOT_NEGATIVE, required=True, metavar="S", help=DEVIATION),
    )


def _workload(name: str, *options: Function) -> Callable[[Function], click.Command]:
    """Makes a command of `synth` from a function that returns the distributions of a workload specification."""

    def decorate(function: Function) -> click.Command:
        @wraps(function)
        def command(
            num_requests: int, arrival: str, request_rate: float | None, reserve: str, random_seed: int, output: Path,
            overwrite: bool, **own_options: Any,
        ) -> None:  # fmt: skip
            from ifbbench.cli.console import progress_line
            from ifbbench.workload.formats import write_trace
            from ifbbench.workload.spec import draw_trace, parse_spec

            if (arrival == "all_at_once") != (request_rate is None):
                needs = "needs a" if request_rate is None else "takes no"
                raise click.UsageError(f"--arrival {arrival} {needs} --request-rate.")
            document = function(**own_options) | {
                "num_requests": num_requests,
                "arrival": {"process": arrival} | ({} if request_rate is None else {"rate": request_rate}),
                "reserve": reserve,
            }
            with progress_line("dataset synth", quiet=False) as progress:
                progress.stage("drawing requests")
                trace = draw_trace(parse_spec(document, name), random_seed, source=str(output))
                progress.stage("writing trace")
                write_trace(trace, output, overwrite)
            click.echo(f"{len(trace)} requests written to {output}")

        decorated: Function = command
        for option in reversed((*options, *COMMON_OPTIONS)):
            decorated = option(decorated)
        return synth.command(name)(decorated)

    return decorate


def _normal(mean: float, stdev: float) -> Document:
    return {"distribution": "normal", "mean": mean, "stdev": stdev}


def _normal_lengths(input_mean: float, input_stdev: float, output_mean: float, output_stdev: float) -> Document:
    return {"prompt_len": _normal(input_mean, input_stdev), "output_len": _normal(output_mean, output_stdev)}


@_workload("token-norm-dist", *_normal_options("prompt"))
def token_norm_dist(**lengths: float) -> Document:
    """Normally distributed lengths, rounded and at least 1."""
    return _normal_lengths(**lengths)


@_workload(
    "token-unif-dist",
    click.option("--input-min", type=LENGTH, required=True, metavar="N", help="Shortest prompt (tokens)."),
    click.option("--input-max", type=LENGTH, required=True, metavar="N", help="Longest prompt (tokens)."),
    click.option("--output-min", type=LENGTH, required=True, metavar="N", help="Shortest output (tokens)."),
    click.option("--output-max", type=LENGTH, required=True, metavar="N", help="Longest output (tokens)."),
)
def token_unif_dist(input_min: int, input_max: int, output_min: int, output_max: int) -> Document:
    """Uniformly distributed lengths, both ends included."""
    return {
        "prompt_len": {"distribution": "uniform", "min": input_min, "max": input_max},
        "output_len": {"distribution": "uniform", "min": output_min, "max": output_max},
    }


@_workload(
    "shared-prefix",
    click.option("--pools", type=LENGTH, required=True, metavar="N", help="Different prefixes (system prompts)."),
    click.option("--prefix-mean", type=POSITIVE, required=True, metavar="M", help="Mean length of a prefix (tokens)."),
    click.option("--prefix-stdev", type=NOT_NEGATIVE, default=0, show_default=True, metavar="S", help=DEVIATION),
    click.option("--share", type=click.FloatRange(0, 1), default=1, show_default=True, metavar="F",
                 help="Share of the requests that have a prefix."),
    click.option("--skew", type=NOT_NEGATIVE, default=0, show_default=True, metavar="Z",
                 help="Popularity of the k-th prefix: k to the power of -Z; 0: all alike."),
    *_normal_options("whole prompt"),
)  # fmt: skip
def shared_prefix(
    pools: int, prefix_mean: float, prefix_stdev: float, share: float, skew: float, **lengths: float
) -> Document:
    """Prompts that share prefixes. Lengths are normal; a prompt has at least one token after its prefix."""
    prefix = {"pools": pools, "len": _normal(prefix_mean, prefix_stdev), "share": share, "skew": skew}
    return _normal_lengths(**lengths) | {"shared_prefix": prefix}


@_workload(
    "multi-turn",
    click.option("--turns-mean", type=click.FloatRange(min=1), required=True, metavar="M",
                 help="Mean number of turns (geometric)."),
    click.option("--think-time-mean", type=NOT_NEGATIVE, required=True, metavar="S",
                 help="Mean time from a turn to the next (s, exponential)."),
    *_normal_options("new message"),
)  # fmt: skip
def multi_turn(turns_mean: float, think_time_mean: float, **lengths: float) -> Document:
    """Conversations: each prompt is all previous turns and a new message.

    N counts turns; --arrival is that of conversations. Answers in prompts are placeholders for those of a model.
    """
    sessions = {
        "turns": {"distribution": "geometric", "mean": turns_mean},
        "think_time": {"distribution": "exponential", "mean": think_time_mean},
    }
    return _normal_lengths(**lengths) | {"sessions": sessions}


@dataset.command()
@click.argument("trace")
@click.option("--max-num-samples", type=LENGTH, metavar="N", help="Describe only the first N requests.")
@click.option("--skip-bad-rows", is_flag=True, help="Skip and count bad rows.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of a drawn workload.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def info(trace: str, max_num_samples: int | None, skip_bad_rows: bool, seed: int, as_json: bool) -> None:
    """Describe TRACE: a trace file, a workload specification, a run directory or the name of a bundled dataset."""
    from ifbbench.cli.console import progress_line
    from ifbbench.config import RunConfig
    from ifbbench.workload.load import load_trace
    from ifbbench.workload.statistics import trace_statistics

    config = RunConfig(max_num_samples=max_num_samples, skip_bad_rows=skip_bad_rows, seed=seed)
    with progress_line("dataset info", quiet=False) as progress:
        loaded = load_trace(trace, config, progress)
        progress.stage("describing trace")
        statistics = trace_statistics(loaded)
    if as_json:
        identity = {"name": loaded.name, "source": loaded.source, "sha256": loaded.sha256}
        click.echo(json.dumps(identity | asdict(statistics)))
    else:
        _print(f"{loaded.name} ({loaded.source})", statistics)


def _print(title: str, statistics: "TraceStatistics") -> None:
    from rich.table import Column, Table

    from ifbbench.cli.console import report_console
    from ifbbench.workload.statistics import histogram_lines, sparkline

    console = report_console(highlight=False)
    console.print(title, style="bold", markup=False)
    skipped = f" ({statistics.skipped_rows:,} bad rows skipped)" if statistics.skipped_rows else ""
    facts = Table(show_header=False, box=None)
    facts.add_row("requests", f"{statistics.requests:,}{skipped}")
    facts.add_row("span", f"{statistics.span_s:,.1f} s")
    rate, variation = statistics.request_rate_per_s, statistics.gap_cv
    facts.add_row("rate", "- (all at once)" if rate is None else f"{rate:,.2f} requests/s")
    facts.add_row("gap cv", "- (all at once)" if variation is None else f"{variation:.2f}")
    if statistics.rates_per_s:
        peak = f"up to {max(statistics.rates_per_s):,.1f}/s"
        facts.add_row("rate over time", f"{sparkline(statistics.rates_per_s)} {peak}")
    console.print(facts)
    lengths = {"prompt": statistics.prompt_tokens, "output": statistics.output_tokens,
               "reserved": statistics.max_new_tokens}  # fmt: skip
    columns = ("mean", "p50", "p90", "p99", "max", "total")
    table = Table("tokens", *(Column(column, justify="right") for column in columns), box=None)
    for name, length in lengths.items():
        table.add_row(name, *(f"{getattr(length, column):,.0f}" for column in columns))
    console.print(table)
    if statistics.seen_before_share is not None:
        share = f"{statistics.seen_before_share:.1%}"
        console.print(f"prompt tokens seen before: {share} (the maximum that a prefix cache can reuse)")
    for name in ("prompt", "output"):
        console.print(f"\n{name} tokens: requests", style="bold")
        for line in histogram_lines(lengths[name].histogram):
            console.print(line, markup=False)
