"""`ifbbench compare`: runs side by side, or one trace under several settings."""

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from itertools import count as counted
from itertools import product, zip_longest
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

import click

from ifbbench.cli.given_settings import config_table, given_config
from ifbbench.cli.options import NOT_NEGATIVE_INTEGER, IntegerRange, SettingsCommand, json_instead_of_tables
from ifbbench.errors import InputError
from ifbbench.settings.config import settings
from ifbbench.settings.devices import SIMULATED
from ifbbench.settings.names import setting

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ifbbench.analysis.compare import Change, Comparison
    from ifbbench.analysis.figures import Figure
    from ifbbench.analysis.recorded import RecordedRun
    from ifbbench.analysis.repeats import Repeats, RepeatsComparison

FAILED = 1
DECISIONS_SHOWN = 6
# A smaller part of the figures that are compared is rounding, and printed as 0.
NEGLIGIBLE = 1e-6
MAX_REPEATS = 1000
# Blocks of different sizes cannot be compared; the tokens that they hold can.
KV_BLOCKS, KV_TOKENS = "kv_blocks.peak_used", "kv_tokens.peak_held"
HEADLINES = (
    "duration_s", "request_throughput_per_s", "output_throughput_tokens_per_s", "total_throughput_tokens_per_s",
    "queue_time_s.mean", "queue_time_s.p99", "ttft_s.mean", "ttft_s.p50", "ttft_s.p99", "itl_s.mean", "itl_s.p99",
    "tpot_s.mean", "tpot_s.p99", "e2e_s.mean", "e2e_s.p99", "iterations", "pauses", "recomputed_tokens",
    "prefix_hit_rate", KV_BLOCKS, "requests.failed", "energy.joules_per_output_token",
)  # fmt: skip
# Names of runs in tables.
RUN_NAMES = [*ascii_lowercase, *map("".join, product(ascii_lowercase, repeat=2))]
MARKS = {
    "~": "~ within noise: the interval holds 0.",
    "*": "* smaller than the expected error of the simulation: on real servers it may be the other way round.",
    "?": "? no interval of this difference.",
}


class Layout(Enum):
    """How the table of figures shows a change: with half of its interval, without, or below the value."""

    WIDE = auto()
    PLAIN = auto()
    STACKED = auto()


@click.command(cls=SettingsCommand, shown=())
@click.argument("paths", metavar="RUN RUN... | TRACE", nargs=-1)
@click.option(
    "--over",
    multiple=True,
    metavar="KEY=V1,V2,…",
    help="Replay TRACE with each of these values and compare; `--policy A,B` is the same as `--over "
    "policy=A,B`, and so on for each setting of a run.",
)
@click.option(
    "--repeat",
    type=IntegerRange(2, MAX_REPEATS),
    metavar="N",
    help="Simulate each run again with N seeds, the same ones for all, and compare the means. That measures "
    "the intervals where the runs themselves are too short or overloaded.",
)
@click.option(
    "--fail-if",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="Exit with status 1 if a condition on the second run holds: 'ttft_s.p99>+5%', 'pauses>+10' or "
    "'ttft_s.p99>1.5'. Each further run is judged in the same way.",
)
@click.option("--all", "all_figures", is_flag=True, help="All figures of summary.json, not the most used ones.")
@click.option(
    "--changes",
    type=NOT_NEGATIVE_INTEGER,
    default=5,
    show_default=True,
    metavar="N",
    help="How many of the requests that gained and lost most are listed.",
)
@json_instead_of_tables
@click.pass_context
def compare(
    context: click.Context,
    /,
    paths: tuple[str, ...],
    over: tuple[str, ...],
    conditions: tuple[str, ...],
    all_figures: bool,
    changes: int,
    as_json: bool,
    repeat: int | None,
    config_file: Path | None,
    **options: Any,
) -> None:
    """Compare runs with the first one: figures, the first decision that differs, and what gained and lost.

    With one TRACE and several values of a setting, run them first: `ifbbench compare --policy
    guaranteed_no_evict,max_utilization TRACE`.
    """
    from ifbbench.analysis.compare import Comparison
    from ifbbench.analysis.figures import failed_condition
    from ifbbench.analysis.recorded import RecordedRun
    from ifbbench.analysis.repeats import Repeats, RepeatsComparison, is_repeats
    from ifbbench.cli.console import report_console

    listed = [*over, *(f"{name}={value}" for name, value in _lists(options).items())]
    if listed:
        directories = _run_all(paths, listed, config_file, options, as_json)
    elif any(value not in (None, ()) for value in options.values()) or config_file is not None:
        raise click.UsageError("settings are for a new run: give several values of one, such as --policy A,B.")
    else:
        directories = [Path(path) for path in paths]
    if len(directories) < 2:
        raise click.UsageError("give at least two run directories, or a trace and several values of a setting.")
    comparisons: list[Comparison | RepeatsComparison] = []
    if any(map(is_repeats, directories)):
        if not all(map(is_repeats, directories)):
            raise click.UsageError("repeats are compared with repeats only: give directories of `run --repeat`.")
        if repeat is not None:
            raise click.UsageError("--repeat: these directories have repeats already; give run directories.")
        loaded = [Repeats.load(directory) for directory in directories]
        comparisons += [RepeatsComparison(loaded[0], other) for other in loaded[1:]]
    else:
        runs = [
            RecordedRun.load(directory, or_endpoint=True, or_empty=True, or_summary=True) for directory in directories
        ]
        trace = paths[0] if listed and paths else None
        repeats = [] if repeat is None else _simulate_again(runs, repeat, as_json, trace)
        for name, (run, again) in zip(RUN_NAMES[1:], zip_longest(runs[1:], repeats[1:]), strict=False):
            of_repeats = RepeatsComparison(repeats[0], again) if again else None
            comparisons.append(Comparison(runs[0], run, of_repeats, name))
    reasons = [
        reason
        for comparison in comparisons
        for condition in conditions
        if (reason := failed_condition(condition, comparison.figures)) is not None
    ]
    if as_json:
        documents = [
            (one.as_dict(changes) if isinstance(one, Comparison) else one.as_dict()) | {"failed_conditions": reasons}
            for one in comparisons
        ]
        click.echo(json.dumps(documents[0] if len(documents) == 1 else documents, indent=2))
    else:
        _print(comparisons, all_figures, changes, report_console(highlight=False))
    if reasons:
        for reason in reasons:
            click.echo(f"Condition holds: {reason}", err=True)
        context.exit(FAILED)


def _lists(options: Mapping[str, Any]) -> dict[str, str]:
    """Settings that are given as several values: texts with commas that are not one value."""
    found = {}
    for name, value in options.items():
        if not isinstance(value, str) or "," not in value:
            continue
        try:
            is_one = name not in ("policy", "engine") and setting(name).check(value) is not None
        except InputError:
            is_one = False
        if not is_one:
            found[name] = value
    return found


def _run_all(
    paths: Sequence[str], over: Sequence[str], config_file: Path | None, options: Mapping[str, Any], quiet: bool
) -> list[Path]:
    """Run the trace at each point, below results/ or --output; returns the run directories."""
    from ifbbench.cli.sweep import engine_configs, run_points, swept_names

    if len(paths) > 1:
        raise click.UsageError("give one trace to compare several values of a setting.")
    names = {one.name for one in settings()} - set(_lists(options))
    single = {name: value for name, value in options.items() if name in names}
    config = given_config(config_file, single, runs_fleets=True, swept=swept_names(over))
    config_of = engine_configs(config_file, single, over)
    return run_points(paths[0] if paths else None, config, over, quiet or config.quiet, config_of)


def _simulate_again(
    runs: "Sequence[RecordedRun]", count: int, quiet: bool, trace: str | None = None
) -> "list[Repeats]":
    """Repeats of each run with `count` seeds from that of the first on. UsageError if one was not simulated.

    trace: the trace of all runs, if this command has run them; it may be standard input, which a later one cannot read.
    """
    from ifbbench.analysis.repeats import Repeats
    from ifbbench.cli.console import progress_line
    from ifbbench.studies.repeat import simulate_seeds

    asked = []
    for run in runs:
        config, source = (
            given_config(run.path, {}, is_noted=False, runs_fleets=True),
            trace or config_table(run.path).get("trace"),
        )
        if config.hardware is None:
            raise click.UsageError(f"--repeat: {run.path} was not simulated; repeat it with `ifbbench run --repeat`.")
        if source is None:
            raise click.UsageError(
                f"--repeat: the trace of {run.path} came from standard input; it cannot be read again."
            )
        asked.append((str(source), config))
    seeds = range(asked[0][1].seed, asked[0][1].seed + count)
    ended, total, found = counted(1), count * len(runs), []
    with progress_line("compare", quiet) as progress:
        progress.stage("simulating again")
        for run, (source, config) in zip(runs, asked, strict=True):
            summaries = simulate_seeds(source, config, seeds, lambda: progress.update(next(ended), total, ""))
            repeats = Repeats(run.path, seeds, summaries, [None] * count)
            if repeats.are_equal:
                raise InputError(
                    f"--repeat: the seed changes nothing in {run.path}, because its requests and their "
                    "arrivals are recorded. Leave it out; intervals are then over parts of the runs."
                )
            found.append(repeats)
    return found


def _print(
    comparisons: "Sequence[Comparison | RepeatsComparison]", all_figures: bool, changes: int, console: "Console"
) -> None:
    """One table of all runs, and for runs with decisions where each parts from the first."""
    from rich.markup import escape

    from ifbbench.analysis.compare import Comparison

    console.print()
    paths = [comparisons[0].a.path, *(one.b.path for one in comparisons)]
    for name, path in zip(RUN_NAMES, paths, strict=False):
        console.print(f"[bold]{name}[/bold]  {escape(str(path))}", soft_wrap=True)
    runs = [one for one in comparisons if isinstance(one, Comparison)]
    if runs:
        _print_notes(runs, console)
    if all(one.identical for one in comparisons):
        console.print(
            "\nThe runs are identical: all decisions and all times are the same.\n"
            if runs
            else "\nThe repeats are identical: all figures are the same.\n"
        )
        return
    console.print()
    _print_figures(comparisons, all_figures, console)
    for name, one in zip(RUN_NAMES[1:], runs, strict=False):
        if one.identical:
            console.print(f"a and {name} are identical: all decisions and all times are the same.\n")
        elif one.same_trace:
            _print_divergence(one, name, console)
    if len(runs) == 1:
        gained, lost = runs[0].changes(changes)
        for title, found in (("Gained most in b", gained), ("Lost most in b", lost)):
            if found:
                _print_changes(title, found, console)
    elif runs and changes:
        console.print("`ifbbench compare` of two of them lists the requests that gained and lost most.\n")


def _print_notes(comparisons: "Sequence[Comparison]", console: "Console") -> None:
    """Which runs are partial or have other requests, and the settings in which they differ."""
    runs = [comparisons[0].a, *(one.b for one in comparisons)]
    for name, run in zip(RUN_NAMES, runs, strict=False):
        if run.data.partial:
            console.print(f"[yellow]Run {name} is partial: it did not reach its end.[/yellow]")
    if others := [name for name, one in zip(RUN_NAMES[1:], comparisons, strict=False) if not one.same_trace]:
        console.print(
            f"[yellow]The trace of {' and '.join(others)} differs from that of a: requests are not compared "
            "one by one.[/yellow]"
        )
    different = []
    for name in dict.fromkeys(name for one in comparisons for name in one.different_settings):
        values = [str(run.config.get(name)) for run in runs]
        different.append(f"{name} {' → '.join(values) if len(values) == 2 else ', '.join(values)}")
    if different:
        console.print(f"Settings: {'; '.join(different)}", markup=False)


def _print_figures(
    comparisons: "Sequence[Comparison | RepeatsComparison]", all_figures: bool, console: "Console"
) -> None:
    """The widest table that fits: with half of each interval, without, or with each change below its value."""
    from ifbbench.analysis.compare import Comparison

    names = [name for name in comparisons[0].figures if all(name in one.figures for one in comparisons)]
    if not all_figures:
        # With several attention windows, requests wait for the fullest one, which the sum over the windows hides.
        windows = [name for name in names if re.fullmatch(r"kv_blocks\.per_window_size\.\d+\.peak_used", name)]
        headlines = [
            KV_TOKENS if name == KV_BLOCKS and _block_sizes_differ(comparisons) else name for name in HEADLINES
        ]
        names = [name for name in (*headlines, *windows) if name in names]
    unlimited = console.options.update(max_width=10_000)
    for layout in Layout:
        table = _figure_table(comparisons, names, layout)
        if console.measure(table, options=unlimited).maximum <= console.width:
            break
    console.print(table)
    console.print()
    of_each = [one.interval_of for one in comparisons]
    if len(set(of_each)) > 1:
        of_each = [f"{name}: {text}" for name, text in zip(RUN_NAMES[1:], of_each, strict=False)]
    hints = [_repeat_hint(one) for one in comparisons if isinstance(one, Comparison) and one.is_too_short]
    marks = {_mark(one.figures[name]) for one in comparisons for name in names}
    explained = [text for mark, text in MARKS.items() if mark in marks]
    for sentence in dict.fromkeys([*of_each, *hints[:1], *explained]):
        console.print(sentence, style="dim", markup=False)
    console.print()


def _block_sizes_differ(comparisons: "Sequence[Comparison | RepeatsComparison]") -> bool:
    sizes = [one.figures.get("kv_blocks.tokens_per_block") for one in comparisons]
    return any(size is not None and size.difference for size in sizes)


def _repeat_hint(comparison: "Comparison") -> str:
    """What gives the intervals of runs that are too short."""
    if all(str(run.config.get("device")).startswith(SIMULATED) for run in (comparison.a, comparison.b)):
        return "--repeat 10 simulates each run with 10 seeds, and compares their means with intervals."
    return "Longer runs have intervals, and so have directories of `ifbbench run --repeat`."


def _figure_table(
    comparisons: "Sequence[Comparison | RepeatsComparison]", names: Sequence[str], layout: Layout
) -> "Table":
    """A row for each figure, with a column for each run and its change against the first."""
    from ifbbench.report import plain_table

    others = RUN_NAMES[1 : len(comparisons) + 1]
    if layout is Layout.STACKED:
        headings = ["a", *others]
    else:
        headings = ["a", *(heading for name in others for heading in (name, "change"))]
    table = plain_table("Figure", numbers=headings)
    for name in names:
        figures = [one.figures[name] for one in comparisons]
        texts = _value_texts(name, [figures[0].a, *(one.b for one in figures)])
        cells = [texts[0]]
        for text, figure in zip(texts[1:], figures, strict=True):
            change = _change(name, figure, has_interval=layout is Layout.WIDE)
            cells += [f"{text}\n{change}"] if layout is Layout.STACKED else [text, change]
        table.add_row(name, *cells)
    return table


def _value_texts(name: str, values: Sequence[float], is_signed: bool = False) -> list[str]:
    """Values of a figure, in the same unit."""
    from ifbbench.analysis.number_texts import significant

    is_time = name.split(".")[0].endswith("_s") and not name.endswith("per_s")
    scale, unit = (1000, " ms") if is_time and max(map(abs, values)) < 1 else (1, " s" if is_time else "")
    return [
        ("+" if is_signed and value > 0 else "")
        + (f"{value:,.0f}" if not is_time and value == int(value) else significant(value, scale))
        + unit
        for value in values
    ]


def _is_equal(figure: "Figure") -> bool:
    """Whether the difference is none, or rounding."""
    return abs(figure.difference) <= NEGLIGIBLE * max(abs(figure.a), abs(figure.b))


def _mark(figure: "Figure") -> str:
    """The key of MARKS that applies to a change, empty if none does."""
    if _is_equal(figure):
        return ""
    if figure.low is None:
        return "?"
    return "~" if figure.is_noise else "*" if figure.is_undecided else ""


def _change(name: str, figure: "Figure", has_interval: bool) -> str:
    """`+3.1 ± 4.0 % ~`: the difference relative to the first run, absolute where that is 0."""
    mark = _mark(figure)
    if _is_equal(figure):
        return "0 %"
    half = None if figure.high is None else figure.high - figure.b + figure.a
    if figure.a:
        text = _percent(figure.difference / figure.a, sign="+")
        text += f" ± {_percent(half / abs(figure.a))} %" if has_interval and half is not None else " %"
    else:
        text, *halves = _value_texts(name, [figure.difference, *([half] if half is not None else [])], is_signed=True)
        text += f" ± {halves[0].lstrip('+')}" if has_interval and halves else ""
    style = "dim" if mark == "~" else "" if mark else "bold"
    return f"[{style}]{text}[/{style}] {mark or ' '}" if style else f"{text} {mark}"


def _percent(share: float, sign: str = "") -> str:
    """A share in percent without the unit: one decimal, two below 0.1 and none from 100 on."""
    value = 100 * share
    decimals = 2 if abs(value) < 0.1 else 0 if abs(value) >= 100 else 1
    text = f"{value:{sign},.{decimals}f}"
    return text if text.strip("+-0.") else "0.0"


def _print_divergence(comparison: "Comparison", name: str, console: "Console") -> None:
    """name: name of the second run."""
    if comparison.routing is not None:
        console.print(comparison.routing.sentence(("a", name)), markup=False, soft_wrap=True)
    divergence = comparison.first_divergence
    if not comparison.has_decisions and not comparison.same_schedule:
        runs = {"a": comparison.a, name: comparison.b}
        why = "--recording summary leaves them out"
        if comparison.a.data.is_fleet or comparison.b.data.is_fleet:
            why = "a fleet has none, its replicas have"
        if comparison.has_endpoint:
            why = "those of a server that is not ours are unknown"
        elif not any(one.data.has_only_summary for one in runs.values()):
            why = " and ".join(f"of run {which} {one.nothing_ran}" for which, one in runs.items() if one.nothing_ran)
        differ = " They differ somewhere." if comparison.has_digests else ""
        console.print(f"Decisions of a and {name} are not compared: {why}.{differ}\n")
        return
    if divergence is None:
        console.print(f"All decisions of a and {name} are the same; only times differ.\n")
        return
    console.print(f"The first decision in which {name} differs from a is that of iteration {divergence.iteration:,}:")
    sides = (("a", divergence.a_start_s, divergence.a), (name, divergence.b_start_s, divergence.b))
    for (side, start_s, decisions), state in zip(sides, divergence.states, strict=True):
        when = "the run had ended" if start_s is None else f"at {start_s:,.3f} s"
        more = f"; and {len(decisions) - DECISIONS_SHOWN} more" if len(decisions) > DECISIONS_SHOWN else ""
        what = "; ".join(decisions[:DECISIONS_SHOWN]) + more or "nothing beside what both did"
        console.print(f"  {side} ({when}): {what}. It had {state}.", soft_wrap=True)
    for text in divergence.parted:
        console.print(f"  {text[0].upper()}{text[1:]}.", soft_wrap=True)
    console.print()


def _print_changes(title: str, changes: "Sequence[Change]", console: "Console") -> None:
    from ifbbench.analysis.number_texts import significant
    from ifbbench.report import plain_table

    table = plain_table(title, numbers=["E2E a s", "E2E b s", "difference s"])
    table.add_column("in b it" if title.startswith("Lost") else "in a it")
    for change in changes:
        sign = "+" if change.difference_s > 0 else ""
        table.add_row(
            str(change.request_id),
            significant(change.e2e_a_s),
            significant(change.e2e_b_s),
            sign + significant(change.difference_s),
            change.cause,
        )
    console.print(table)
    console.print()
