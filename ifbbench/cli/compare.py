"""`ifbbench compare`: runs side by side, or one trace under several settings."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifbbench.cli.options import SettingsCommand, given_config
from ifbbench.config import settings
from ifbbench.errors import InputError
from ifbbench.settings import setting

if TYPE_CHECKING:
    from rich.console import Console

    from ifbbench.analysis.compare import Change, Comparison
    from ifbbench.analysis.figures import Figure
    from ifbbench.analysis.repeats import RepeatsComparison

FAILED = 1
DECISIONS_SHOWN = 6
# A smaller part of the figures that are compared is rounding, and printed as 0.
NEGLIGIBLE = 1e-6
HEADLINES = (
    "duration_s", "request_throughput_per_s", "output_throughput_tokens_per_s", "total_throughput_tokens_per_s",
    "queue_time_s.mean", "queue_time_s.p99", "ttft_s.mean", "ttft_s.p50", "ttft_s.p99", "itl_s.mean", "itl_s.p99",
    "tpot_s.mean", "tpot_s.p99", "e2e_s.mean", "e2e_s.p99", "iterations", "pauses", "recomputed_tokens",
    "prefix_hit_rate", "kv_blocks.peak_used", "requests.failed",
)  # fmt: skip


@click.command(cls=SettingsCommand, shown=())
@click.argument("paths", metavar="RUN RUN... | TRACE", nargs=-1)
@click.option("--over", multiple=True, metavar="KEY=V1,V2,…",
              help="Replay TRACE with each of these values and compare; `--policy A,B` is the same as `--over "
              "policy=A,B`, and so on for each setting of a run.")  # fmt: skip
@click.option("--fail-if", "conditions", multiple=True, metavar="CONDITION",
              help="Exit with status 1 if a condition on the second run holds: 'ttft_s.p99>+5%', 'pauses>+10' or "
              "'ttft_s.p99>1.5'. Each further run is judged in the same way.")  # fmt: skip
@click.option("--all", "all_figures", is_flag=True, help="All figures of summary.json, not the most used ones.")
@click.option("--changes", type=click.IntRange(min=0), default=5, show_default=True, metavar="N",
              help="How many of the requests that gained and lost most are listed.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.pass_context
def compare(
    context: click.Context, /, paths: tuple[str, ...], over: tuple[str, ...], conditions: tuple[str, ...],
    all_figures: bool, changes: int, as_json: bool, config_file: Path | None, **options: Any,
) -> None:  # fmt: skip
    """Compare runs with the first one: figures, the first decision that differs, and who gained and lost.

    With one TRACE and several values of a setting, run them first: `ifbbench compare --policy
    guaranteed_no_evict,max_utilization TRACE`.
    """
    from ifbbench.analysis.compare import Comparison
    from ifbbench.analysis.figures import failed_condition
    from ifbbench.analysis.recorded import RecordedRun
    from ifbbench.analysis.repeats import RepeatsComparison, is_repeats
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
    comparisons: list[Comparison | RepeatsComparison]
    if any(map(is_repeats, directories)):
        if not all(map(is_repeats, directories)):
            raise click.UsageError("repeats are compared with repeats only: give directories of `run --repeat`.")
        comparisons = [RepeatsComparison(directories[0], other) for other in directories[1:]]
    else:
        first, *others = [
            RecordedRun.load(directory, or_endpoint=True, or_empty=True, or_summary=True) for directory in directories
        ]
        comparisons = [Comparison(first, other) for other in others]
    reasons = [
        reason for comparison in comparisons for condition in conditions
        if (reason := failed_condition(condition, comparison.figures)) is not None
    ]  # fmt: skip
    if as_json:
        documents = [
            (one.as_dict(changes) if isinstance(one, Comparison) else one.as_dict()) | {"failed_conditions": reasons}
            for one in comparisons
        ]
        click.echo(json.dumps(documents[0] if len(documents) == 1 else documents, indent=2))
    else:
        console = report_console(highlight=False)
        for comparison in comparisons:
            if isinstance(comparison, Comparison):
                _print(comparison, all_figures, changes, console)
            else:
                a, b = (f"[bold]{side}[/bold]" for side in (comparison.a, comparison.b))
                counts = " and ".join(str(len(runs)) for runs in comparison.runs)
                console.print(f"\n{a} (a) and {b} (b): {counts} repeats\n")
                _print_figures(comparison, all_figures, console)
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
            is_one = name != "policy" and setting(name).check(value) is not None
        except InputError:
            is_one = False
        if not is_one:
            found[name] = value
    return found


def _run_all(
    paths: Sequence[str], over: Sequence[str], config_file: Path | None, options: Mapping[str, Any], quiet: bool
) -> list[Path]:
    """Run the trace at each point, below results/ or --output; returns the run directories."""
    from ifbbench.cli.run import run_points

    if len(paths) > 1:
        raise click.UsageError("give one trace to compare several values of a setting.")
    names = {one.name for one in settings()} - set(_lists(options))
    config = given_config(config_file, {name: value for name, value in options.items() if name in names})
    if config.output is None:
        keys = "-".join(text.partition("=")[0].strip() for text in over)
        config = config.with_values(output=f"results/compare-{keys}")
    return run_points(paths[0] if paths else None, config, over, quiet=quiet or config.quiet)


def _print(comparison: "Comparison", all_figures: bool, changes: int, console: "Console") -> None:
    a, b = comparison.a.data, comparison.b.data
    console.print(f"\n[bold]{a.path}[/bold] (a) and [bold]{b.path}[/bold] (b)")
    for run, name in ((a, "a"), (b, "b")):
        if run.partial:
            console.print(f"[yellow]Run {name} is partial: it did not reach its end.[/yellow]")
    if comparison.identical:
        console.print("\nThe runs are identical: all decisions and all times are the same.\n")
        return
    if not comparison.same_trace:
        console.print("[yellow]The traces differ: requests are not compared one by one.[/yellow]")
    if different := comparison.different_settings:
        console.print("Settings: " + "; ".join(f"{name} {one} → {two}" for name, (one, two) in different.items()))
    console.print()
    _print_figures(comparison, all_figures, console)
    _print_divergence(comparison, console)
    gained, lost = comparison.changes(changes)
    for title, found in (("Gained most in b", gained), ("Lost most in b", lost)):
        if found:
            _print_changes(title, found, console)


def _print_figures(comparison: "Comparison | RepeatsComparison", all_figures: bool, console: "Console") -> None:
    from ifbbench.report import plain_table

    table = plain_table("Figure", numbers=["a", "b", "difference", "ratio"])
    table.add_column("95 % interval of the difference")
    figures = comparison.figures
    # Of several attention windows, requests wait for the fullest one, which the sum over the windows hides.
    windows = [name for name in figures if re.fullmatch(r"kv_blocks\.per_window_size\.\d+\.peak_used", name)]
    for name in figures if all_figures else [name for name in (*HEADLINES, *windows) if name in figures]:
        table.add_row(name, *_cells(name, figures[name]))
    console.print(table)
    console.print()


def _cells(name: str, figure: "Figure") -> tuple[str, ...]:
    from ifbbench.report import NOTHING, significant

    is_time = name.split(".")[0].endswith("_s") and not name.endswith("per_s")
    scale, unit = (1000, " ms") if is_time and max(abs(figure.a), abs(figure.b)) < 1 else (1, " s" if is_time else "")

    def text(value: float, signed: bool = False) -> str:
        if signed and abs(value) < NEGLIGIBLE * max(abs(figure.a), abs(figure.b)):
            value = 0.0
        sign = "+" if signed and value > 0 else ""
        return sign + (f"{value:,.0f}" if not is_time and value == int(value) else significant(value, scale)) + unit

    ratio = NOTHING if figure.ratio is None else f"{figure.ratio:.3f}"
    interval = ""
    if figure.low is not None and figure.high is not None:
        interval = f"{text(figure.low, True)} to {text(figure.high, True)}"
        interval += "  within noise" if figure.is_noise else ""
    if figure.is_undecided and figure.difference:
        interval += "  within the simulation's expected error"
    return text(figure.a), text(figure.b), text(figure.difference, True), ratio, interval


def _print_divergence(comparison: "Comparison", console: "Console") -> None:
    divergence = comparison.first_divergence
    if not comparison.has_decisions and not comparison.same_schedule:
        runs = [one for one in (comparison.a, comparison.b) if not one.data.has_only_summary]
        why = "--recording summary leaves them out"
        if comparison.has_endpoint:
            why = "those of a server that is not ours are unknown"
        elif empty := next((one for one in runs if one.nothing_ran), None):
            why = f"of {empty.data.path} {empty.nothing_ran}"
        differ = " They differ somewhere." if comparison.has_digests else ""
        console.print(f"Decisions are not compared: {why}.{differ}\n")
        return
    if divergence is None:
        console.print("All decisions are the same; only times differ.\n")
        return
    console.print(f"The first decision that differs is that of iteration {divergence.iteration:,}:")
    sides = (("a", divergence.a_start_s, divergence.a), ("b", divergence.b_start_s, divergence.b))
    for (name, start_s, decisions), state in zip(sides, divergence.states, strict=True):
        when = "the run had ended" if start_s is None else f"at {start_s:,.3f} s"
        more = f"; and {len(decisions) - DECISIONS_SHOWN} more" if len(decisions) > DECISIONS_SHOWN else ""
        what = "; ".join(decisions[:DECISIONS_SHOWN]) + more or "nothing beside what both did"
        console.print(f"  {name} ({when}): {what}. It had {state}.", soft_wrap=True)
    console.print()


def _print_changes(title: str, changes: "Sequence[Change]", console: "Console") -> None:
    from ifbbench.report import plain_table, significant

    table = plain_table(title, numbers=["E2E a s", "E2E b s", "difference s"])
    table.add_column("in b it" if title.startswith("Lost") else "in a it")
    for change in changes:
        sign = "+" if change.difference_s > 0 else ""
        table.add_row(str(change.request_id), significant(change.e2e_a_s), significant(change.e2e_b_s),
                      sign + significant(change.difference_s), change.cause)  # fmt: skip
    console.print(table)
    console.print()
