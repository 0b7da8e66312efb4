"""`ifbbench dataset`: make, convert, sample and describe traces."""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifbbench.cli.given_settings import given_config
from ifbbench.cli.options import COUNT, FloatRange, SettingOption, json_instead_of_tables
from ifbbench.cli.synth import FILE_OPTIONS, FORMAT_OPTION, FORMATS, Group, add_options, check_output, synth, write
from ifbbench.errors import InputError
from ifbbench.files import check_new_directory
from ifbbench.settings.fields import MAX_NUMBER
from ifbbench.settings.names import setting

if TYPE_CHECKING:
    from ifbbench.workload.statistics import TraceStatistics

SECONDS = FloatRange(0, MAX_NUMBER)  # arrivals may count from the year 1970
READING = (
    "max_num_samples",
    "skip_bad_rows",
    "seed",
    "trace_format",
    "columns",
    "tokenizer",
    "characters_per_token",
    "default_output_len",
)


@click.group(cls=Group)
def dataset() -> None:
    """Make, convert, sample and describe traces.

    A TRACE is a trace file, a workload specification, a run directory or the name of a bundled dataset.
    """


dataset.add_command(synth)


def _reads_a_trace(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the argument TRACE and the settings of reading it as options."""
    return add_options(function, (click.argument("trace"), *map(_setting_option, READING)))


def _setting_option(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__dict__.setdefault("__click_params__", []).append(SettingOption(setting(name)))
        return function

    return decorate


@dataset.command()
@_reads_a_trace
@partial(add_options, options=(FORMAT_OPTION, *FILE_OPTIONS))
def convert(trace: str, output: Path, overwrite: bool, to: str | None, vocab_size: int, **reading: Any) -> None:
    """Write the requests of TRACE in another format.

    \b
    ifbbench: JSONL with all that a trace can say.
    gpt-manager: gptManagerBenchmark's JSON.
    trtllm-bench: its JSONL.
    lengths: CSV with num_prefill_tokens, num_decode_tokens, arrived_at.
    mooncake: JSONL with hash_ids.
    """
    from ifbbench.workload.convert import format_of
    from ifbbench.workload.load import load_trace

    if to is None and format_of(output) is None:
        raise InputError(f"{output} does not say which format to write; give --to {'|'.join(FORMATS)}.")
    check_output(output, overwrite)
    config = given_config(None, reading)
    write(load_trace(trace, config), output, overwrite, config.seed, to, vocab_size)


@dataset.command()
@_reads_a_trace
@partial(add_options, options=FILE_OPTIONS)
@click.option("--num-requests", type=COUNT, metavar="N", help="Keep N requests, chosen at random.")
@click.option("--stratified", is_flag=True, help="Choose them one from each of N groups of equal size by length.")
@click.option("--every", type=COUNT, default=1, metavar="K", help="Keep the first request and each K-th after it.")
@click.option("--from", "from_s", type=SECONDS, default=0.0, metavar="S", help="Keep what arrives from second S …")
@click.option("--to", "to_s", type=SECONDS, metavar="S", help="… until before second S.")
@click.option(
    "--preserve-rate/--no-preserve-rate",
    default=True,
    show_default=True,
    help="Move arrivals together, so that the sample has the rate of the trace.",
)
def sample(
    trace: str,
    output: Path,
    overwrite: bool,
    num_requests: int | None,
    stratified: bool,
    every: int,
    from_s: float,
    to_s: float | None,
    preserve_rate: bool,
    vocab_size: int,
    **reading: Any,
) -> None:
    """Write a part of TRACE: a window of time, of it every K-th request, of these N at random.

    Requests keep their ids; arrivals count from the first one kept. The format is that of the suffix of FILE.
    """
    from ifbbench.workload.load import load_trace
    from ifbbench.workload.sample import Sample, Selection

    if stratified and num_requests is None:
        raise click.UsageError("--stratified needs --num-requests.")
    if to_s is not None and to_s <= from_s:
        raise click.UsageError(f"--to {to_s:g} is not after --from {from_s:g}.")
    end_s = float("inf") if to_s is None else to_s
    selection = Selection(from_s, end_s, every, num_requests, stratified, preserve_rate)
    check_output(output, overwrite)
    config = given_config(None, reading)
    kept = Sample(load_trace(trace, config), selection, config.seed)
    write(kept, output, overwrite, config.seed, to=None, vocab_size=vocab_size)


@dataset.command()
@_reads_a_trace
@json_instead_of_tables
@click.option(
    "--plot",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Draw charts of lengths, arrivals and reuse into this directory (PNG, SVG).",
)
def info(trace: str, as_json: bool, directory: Path | None, **reading: Any) -> None:
    """Describe TRACE: lengths, arrivals, classes, and the prompt tokens that requests have in common."""
    from ifbbench.cli.console import progress_line
    from ifbbench.workload.load import load_trace
    from ifbbench.workload.statistics import trace_statistics

    if directory is not None:
        check_new_directory(directory, "--plot")
    with progress_line("dataset info", quiet=False) as progress:
        loaded = load_trace(trace, given_config(None, reading), progress)
        progress.stage("describing trace")
        statistics = trace_statistics(loaded)
    if as_json:
        identity = {"name": loaded.name, "source": loaded.source, "sha256": loaded.sha256}
        click.echo(json.dumps(identity | asdict(statistics)))
    else:
        _print(f"{loaded.name} ({loaded.source})", statistics)
    if directory is not None:
        from ifbbench.report.trace_charts import plot_trace

        for path in plot_trace(loaded, statistics, directory):
            click.echo(str(path), err=as_json)


def _print(title: str, statistics: "TraceStatistics") -> None:
    from rich.table import Column, Table

    from ifbbench.analysis.number_texts import percent
    from ifbbench.cli.console import report_console
    from ifbbench.report import print_fitting
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
    if statistics.length_correlation is not None:
        facts.add_row("correlation", f"{statistics.length_correlation:.2f} of prompt and output lengths")
    console.print(facts)
    lengths = {
        "prompt": statistics.prompt_tokens,
        "output": statistics.output_tokens,
        "reserved": statistics.max_new_tokens,
    }
    columns = ("mean", "min", "p10", "p25", "p50", "p75", "p90", "p99", "max", "total")
    table = Table("tokens", *(Column(column, justify="right") for column in columns), box=None)
    for name, length in lengths.items():
        table.add_row(name, *(f"{getattr(length, column):,.0f}" for column in columns))
    print_fitting(console, table)
    if statistics.classes:
        headers = ("requests", "share", "prompt mean", "output mean")
        classes = Table("class", *(Column(header, justify="right") for header in headers), box=None)
        for name, one in statistics.classes.items():
            classes.add_row(
                name, f"{one.requests:,}", percent(one.share, 1), f"{one.prompt_mean:,.0f}", f"{one.output_mean:,.0f}"
            )
        console.print(classes)
    if statistics.seen_before_share is not None:
        share = percent(statistics.seen_before_share, 1)
        console.print(f"prompt tokens seen before: {share} (the maximum that a prefix cache can reuse)")
    if statistics.blocks_seen_before_share is not None:
        console.print(f"prompt blocks seen before: {percent(statistics.blocks_seen_before_share, 1)}")
    for name in ("prompt", "output"):
        console.print(f"\n{name} tokens: requests", style="bold")
        for line in histogram_lines(lengths[name].histogram):
            console.print(line, markup=False)
