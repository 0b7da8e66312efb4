"""`ifbbench dataset`: make traces and describe them."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifbbench.cli.options import Command

if TYPE_CHECKING:
    from rich.table import Table

    from ifbbench.workload.statistics import LengthStatistics, TraceStatistics

TRACE_FILE = click.Path(path_type=Path)
LENGTH = click.IntRange(min=1)
POSITIVE = click.FloatRange(min=0, min_open=True)
NOT_NEGATIVE = click.FloatRange(min=0)
SHARE = click.FloatRange(0, 1)
DEVIATION = "Its standard deviation."
ZIPF = "Popularity of the k-th prefix: k to the power of -Z; 0: all alike."
THINK_TIME = "Mean time from a turn to the next (s, exponential)."
Callback = Callable[..., None]
Document = dict[str, Any]


class _Group(click.Group):
    command_class = Command
    group_class = type


@click.group(cls=_Group)
def dataset() -> None:
    """Make, convert and describe traces."""


@dataset.group()
def synth() -> None:
    """Draw a trace of lengths and arrivals, and write it as ifbbench JSONL."""


def _options_of_every_workload(command: Callback) -> Callback:
    options = [
        click.option("--num-requests", type=LENGTH, required=True, metavar="N", help="Requests to draw."),
        click.option(
            "--arrival",
            type=click.Choice(["all_at_once", "constant", "poisson"]),
            default="all_at_once",
            show_default=True,
            help="When requests come.",
        ),
        click.option("--request-rate", type=POSITIVE, metavar="R", help="Requests/s of constant or Poisson arrivals."),
        click.option(
            "--reserve",
            default="actual",
            show_default=True,
            metavar="TEXT",
            help="max_new_tokens of each request: actual (its output length), factor:F or fixed:N.",
        ),
        click.option("--random-seed", "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="K"),
        click.option("-o", "--output", type=TRACE_FILE, required=True, help="File to write (.jsonl, .jsonl.gz)."),
        click.option("--overwrite", is_flag=True, help="Replace an existing file."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _normal_lengths(prompt: str) -> Callable[[Callback], Callback]:
    """Options for normally distributed lengths; the command gets them as `lengths`. `prompt` is what input means."""

    def decorate(command: Callback) -> Callback:
        @click.option("--input-mean", type=POSITIVE, required=True, metavar="M", help=f"Mean {prompt} length (tokens).")
        @click.option("--input-stdev", type=NOT_NEGATIVE, required=True, metavar="S", help=DEVIATION)
        @click.option("--output-mean", type=POSITIVE, required=True, metavar="M", help="Mean output length (tokens).")
        @click.option("--output-stdev", type=NOT_NEGATIVE, required=True, metavar="S", help=DEVIATION)
        @wraps(command)
        def with_lengths(
            input_mean: float, input_stdev: float, output_mean: float, output_stdev: float, **options: Any
        ) -> None:
            prompt_len, output_len = _normal(input_mean, input_stdev), _normal(output_mean, output_stdev)
            command(lengths={"prompt_len": prompt_len, "output_len": output_len}, **options)

        return with_lengths

    return decorate


@synth.command("token-norm-dist")
@_normal_lengths("prompt")
@_options_of_every_workload
def token_norm_dist(lengths: Document, **options: Any) -> None:
    """Normally distributed lengths, rounded and at least 1."""
    _write_drawn("token-norm-dist", lengths, **options)


@synth.command("token-unif-dist")
@click.option("--input-min", type=LENGTH, required=True, metavar="N", help="Shortest prompt (tokens).")
@click.option("--input-max", type=LENGTH, required=True, metavar="N", help="Longest prompt (tokens).")
@click.option("--output-min", type=LENGTH, required=True, metavar="N", help="Shortest output (tokens).")
@click.option("--output-max", type=LENGTH, required=True, metavar="N", help="Longest output (tokens).")
@_options_of_every_workload
def token_unif_dist(input_min: int, input_max: int, output_min: int, output_max: int, **options: Any) -> None:
    """Uniformly distributed lengths, both ends included."""
    _write_drawn(
        "token-unif-dist",
        {
            "prompt_len": {"distribution": "uniform", "min": input_min, "max": input_max},
            "output_len": {"distribution": "uniform", "min": output_min, "max": output_max},
        },
        **options,
    )


@synth.command("shared-prefix")
@click.option("--pools", type=LENGTH, required=True, metavar="N", help="Different prefixes (system prompts).")
@click.option("--prefix-mean", type=POSITIVE, required=True, metavar="M", help="Mean length of a prefix (tokens).")
@click.option("--prefix-stdev", type=NOT_NEGATIVE, default=0, show_default=True, metavar="S", help=DEVIATION)
@click.option("--share", type=SHARE, default=1, show_default=True, metavar="F", help="Requests with a prefix.")
@click.option("--skew", type=NOT_NEGATIVE, default=0, show_default=True, metavar="Z", help=ZIPF)
@_normal_lengths("whole prompt")
@_options_of_every_workload
def shared_prefix(
    pools: int, prefix_mean: float, prefix_stdev: float, share: float, skew: float, lengths: Document, **options: Any
) -> None:
    """Prompts that begin with a prefix many share. Lengths are normal; a prompt has a token beside its prefix."""
    prefix = {"pools": pools, "len": _normal(prefix_mean, prefix_stdev), "share": share, "skew": skew}
    _write_drawn("shared-prefix", lengths | {"shared_prefix": prefix}, **options)


@synth.command("multi-turn")
@click.option("--turns-mean", type=click.FloatRange(min=1), required=True, metavar="M", help="Mean turns (geometric).")
@click.option("--think-time-mean", type=NOT_NEGATIVE, required=True, metavar="S", help=THINK_TIME)
@_normal_lengths("new message")
@_options_of_every_workload
def multi_turn(turns_mean: float, think_time_mean: float, lengths: Document, **options: Any) -> None:
    """Conversations: each prompt is all that was said before, and a new message.

    N counts turns, --arrival says when conversations begin. What was answered is a stand-in for what a model will say.
    """
    sessions = {
        "turns": {"distribution": "geometric", "mean": turns_mean},
        "think_time": {"distribution": "exponential", "mean": think_time_mean},
    }
    _write_drawn("multi-turn", lengths | {"sessions": sessions}, **options)


def _normal(mean: float, stdev: float) -> Document:
    return {"distribution": "normal", "mean": mean, "stdev": stdev}


def _write_drawn(
    name: str,
    figures: Document,
    *,
    num_requests: int,
    arrival: str,
    request_rate: float | None,
    reserve: str,
    random_seed: int,
    output: Path,
    overwrite: bool,
) -> None:
    from ifbbench.workload.formats import write_trace
    from ifbbench.workload.spec import draw_trace, parse_spec

    if (arrival == "all_at_once") != (request_rate is None):
        needs = "needs a" if request_rate is None else "takes no"
        raise click.UsageError(f"--arrival {arrival} {needs} --request-rate.")
    document = figures | {
        "num_requests": num_requests,
        "arrival": {"process": arrival} | ({} if request_rate is None else {"rate": request_rate}),
        "reserve": reserve,
    }
    trace = draw_trace(parse_spec(document, name), random_seed, source=str(output))
    write_trace(trace, output, overwrite)
    click.echo(f"{len(trace)} requests written to {output}")


@dataset.command()
@click.argument("trace")
@click.option("--max-num-samples", type=LENGTH, metavar="N", help="Describe only the first N requests.")
@click.option("--skip-bad-rows", is_flag=True, help="Go on past bad rows, counting them.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of a drawn workload.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def info(trace: str, max_num_samples: int | None, skip_bad_rows: bool, seed: int, as_json: bool) -> None:
    """Describe TRACE: a trace file, a workload specification, a run directory or the name of a bundled dataset."""
    import json
    from dataclasses import asdict

    from ifbbench.config import RunConfig
    from ifbbench.workload.load import load_trace
    from ifbbench.workload.statistics import trace_statistics

    config = RunConfig(max_num_samples=max_num_samples, skip_bad_rows=skip_bad_rows, seed=seed)
    loaded = load_trace(trace, config)
    statistics = trace_statistics(loaded)
    if as_json:
        identity = {"name": loaded.name, "source": loaded.source, "sha256": loaded.sha256}
        click.echo(json.dumps(identity | asdict(statistics)))
    else:
        _print(f"{loaded.name} ({loaded.source})", statistics)


def _print(title: str, statistics: "TraceStatistics") -> None:
    from rich.table import Table

    from ifbbench.cli.console import report_console
    from ifbbench.workload.statistics import histogram_lines, sparkline

    console = report_console(highlight=False)
    console.print(title, style="bold", markup=False)
    facts = Table(show_header=False, box=None)
    facts.add_row("requests", f"{statistics.requests:,}" + _skipped(statistics.skipped_rows))
    facts.add_row("span", f"{statistics.span_s:,.1f} s")
    facts.add_row("rate", _or_at_once(statistics.request_rate_per_s, "{:,.2f} requests/s"))
    facts.add_row("gap cv", _or_at_once(statistics.gap_cv, "{:.2f}"))
    if statistics.rates_per_s:
        peak = f"up to {max(statistics.rates_per_s):,.1f}/s"
        facts.add_row("rate over time", f"{sparkline(statistics.rates_per_s)} {peak}")
    console.print(facts)
    lengths = {
        "prompt": statistics.prompt_tokens,
        "output": statistics.output_tokens,
        "reserved": statistics.max_new_tokens,
    }
    console.print(_length_table(lengths))
    if statistics.seen_before_share is not None:
        console.print(f"prompt tokens seen before: {statistics.seen_before_share:.1%} (no prefix cache hits more)")
    for name in ("prompt", "output"):
        console.print(f"\n{name} tokens: requests", style="bold")
        for line in histogram_lines(lengths[name].histogram):
            console.print(line, markup=False)


def _length_table(lengths: "dict[str, LengthStatistics]") -> "Table":
    from rich.table import Table

    table = Table("tokens", box=None)
    for column in ("mean", "p50", "p90", "p99", "max", "total"):
        table.add_column(column, justify="right")
    for name, length in lengths.items():
        figures = (length.mean, length.p50, length.p90, length.p99, length.max, length.total)
        table.add_row(name, *(f"{figure:,.0f}" for figure in figures))
    return table


def _skipped(rows: int) -> str:
    return f" ({rows:,} bad rows skipped)" if rows else ""


def _or_at_once(figure: float | None, template: str) -> str:
    return "- (all at once)" if figure is None else template.format(figure)
