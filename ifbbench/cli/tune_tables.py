"""What `ifbbench tune` prints of its answer."""

from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ifbbench.analysis.number_texts import count, percent, significant
from ifbbench.analysis.words import Words, words_of
from ifbbench.report import plain_table, print_fitting
from ifbbench.settings.config import RunConfig
from ifbbench.studies.tune_candidates import EQUAL_SHARE
from ifbbench.studies.tune_certainty import loss_text
from ifbbench.studies.tune_files import BURST_S, busiest, rate_interval_of
from ifbbench.studies.tune_search import Tuning

OF_DTYPES = " A data type may change answers; that is not measured here."
OF_SIDES = " With a +: prefill replicas, and decode replicas that get keys and values from them."
LATENCY_ROWS = [
    ("TTFT p99", "ttft_s.p99", " s", 1.0),
    ("TPOT p99", "tpot_s.p99", " ms", 1e3),
    ("ITL p99", "itl_s.p99", " ms", 1e3),
    ("end to end, mean", "e2e_s.mean", " s", 1.0),
]
THROUGHPUT = ("output tokens/s", "output_throughput_tokens_per_s", "", 1.0)
ROWS = {
    "goodput": [
        ("goodput (requests/s)", "goodput_requests_per_s", "", 1.0),
        ("share of requests", "goodput_share", " %", 100.0),
        THROUGHPUT,
    ],
    "output_throughput": [THROUGHPUT],
    "max_rate": [("highest rate (requests/s)", "max_rate_requests_per_s", "", 1.0), THROUGHPUT],
    "cost": [
        ("cost / million output tokens", "cost_per_million_output_tokens", "", 1.0),
        ("GPUs", "gpus", "", 1.0),
        THROUGHPUT,
    ],
    "energy": [
        ("energy / output token", "joules_per_output_token", " J", 1.0),
        ("GPUs", "gpus", "", 1.0),
        THROUGHPUT,
    ],
}


def rate_text(figures: dict[str, Any], tuning: Tuning) -> str:
    """How the highest rate was reached, and what its interval is of; empty with another goal."""
    if not (rate := figures.get("max_rate_requests_per_s")):
        return ""
    base, recorded = tuning.runs.base, tuning.runs.rate_per_s
    failed = figures["max_rate_failed_at_requests_per_s"]
    text = f"Found for these requests: {rate:.4g} requests/s meet the objectives"
    text += f", {failed:.4g} do not." if failed else "; no higher rate was tried."
    if base.request_rate is None and figures["time_scale"] != 1:
        is_faster = figures["time_scale"] < 1
        verb = "compressed" if is_faster else "stretched"
        before, after = busiest(tuning), busiest(tuning, 1 / figures["time_scale"])
        text += (
            f" The {_arrivals(base)} arrivals, {recorded:.4g} requests/s on average, were {verb} to that (--time_scale "
            f"{base.time_scale * figures['time_scale']:.4g}): traffic of such a rate was not recorded. "
            f"Bursts were {verb} with it: the "
            f"busiest {BURST_S:.0f} s have {after:,} requests, as {_arrivals(base)} {before:,}; real "
            f"traffic of this rate may have {'other' if is_faster else 'higher'} bursts."
        )
    return f"{text} {rate_interval_of(tuning)}"


def recorded_text(found: dict[str, Any] | None, tuning: Tuning) -> str:
    """Whether the traffic as it was recorded fits, and how many GPUs it needs; empty if that is not known."""
    best = tuning.best
    if found is None or best is None:
        return ""
    rate, device = found["rate_requests_per_s"], tuning.runs.base.hardware
    one = f"one {device}" if best.gpus == 1 else f"{best.gpus} {device}"
    how = _arrivals(tuning.runs.base)
    if found["fits"]:
        return f"As {how}, {rate:.3g} requests/s fit {one}; the highest rate is {best.score:.3g}."
    text = (
        f"The {how} {rate:.3g} requests/s do not fit {one} under any of these settings; the highest rate is "
        f"{best.score:.3g}."
    )
    if found["gpus"] is None:
        return f"{text} No number of replicas that was tried meets the objectives with these arrivals."
    return f"As {how} it needs {found['gpus']} {device}. {text}"


def _arrivals(base: RunConfig) -> str:
    """Whose the arrivals of a trace are: as recorded, or as --time_scale has made them."""
    return "recorded" if base.time_scale == 1 else "requested"


def print_deployments(rows: list[dict[str, Any]], tuning: Tuning, console: Console) -> None:
    """Print how many GPUs the traffic needs, and a row for each deployment."""
    first, rate = rows[0], tuning.runs.rate_per_s
    base = tuning.runs.base
    is_recorded = base.request_rate is None and _arrivals(base) == "recorded"
    how = "As recorded" if is_recorded else "At the rate that was asked for"
    of_rate = f" ({rate:.3g} requests/s)" if rate is not None else ""
    console.print(
        f"\n[bold]{how}{of_rate} it needs {first['gpus']} {first['device']}: {first['price_per_hour']:,.2f} an hour."
        "[/bold]"
    )
    has_routers = any(row["router"] for row in rows)
    table = plain_table("device", "dtype", *(("router",) if has_routers else ()))
    for heading in (
        "GPUs",
        "replicas\n× TP × PP",
        "price\nan hour",
        "price\na month",
        "per million\ntokens in",
        "per million\ntokens out",
        "nearest\nobjective",
        "spare\nrate",
    ):
        table.add_column(heading, justify="right")
    fitting = [row for row in rows if row["gpus"] is not None]
    for row in fitting:
        nearest = row["nearest_objective"]
        table.add_row(
            row["device"],
            row["dtype"] or "",
            *((row["router"] or "",) if has_routers else ()),
            str(row["gpus"]),
            replicas_text(row),
            f"{row['price_per_hour']:,.2f}",
            f"{row['price_per_month']:,.0f}",
            significant(row["cost_per_million_input_tokens"]),
            significant(row["cost_per_million_output_tokens"]),
            f"{nearest['name']} {percent(nearest['share_of_limit'])}" if nearest else "",
            percent(row["spare_rate"]) if row["spare_rate"] is not None else "–",
        )
    print_fitting(console, table)
    console.print(
        "The rows with a spare rate were searched, the others have the settings from which a search starts. "
        "Per million tokens: the price of all GPUs over the tokens of that kind alone. Nearest objective: its value as "
        "a share of the limit. Spare rate: how much faster requests may come before these GPUs miss an objective."
        f"{OF_DTYPES if len({row['dtype'] for row in rows}) > 1 else ''}"
        f"{OF_SIDES if any('prefill_replicas' in row for row in rows) else ''}",
        style="dim",
        markup=False,
    )
    _print_left_out(rows, console)


def replicas_text(row: dict[str, Any]) -> str:
    """How many replicas of how many GPUs: `4 × 1 × 1`, and of both sides `2 × 1 × 1 + 1 × 2 × 1`."""
    of_each = f"{row['tp_size']} × {row['pp_size']}"
    if "prefill_replicas" not in row:
        return f"{row['replicas']} × {of_each}"
    decode = f"{row['decode_replicas']} × {row['decode_tp_size']} × {row['pp_size']}"
    return f"{row['prefill_replicas']} × {of_each} + {decode}"


def print_sides(found: dict[str, Any] | None, console: Console) -> None:
    """Print whether prefill and decode apart pay, where both forms were compared."""
    if found is not None and found["text"]:
        console.print(f"\n{found['text']}", markup=False, highlight=False)


def _print_left_out(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the deployments that were not searched, and why."""
    left_out = {True: list[str](), False: list[str]()}
    for row in rows:
        if row["gpus"] is None:
            tp = f"TP{row['tp_size']}" + (f" + TP{row['decode_tp_size']} apart" if "decode_tp_size" in row else "")
            tp += f" PP{row['pp_size']}" if row["pp_size"] > 1 else ""
            words = " ".join(filter(None, (row["device"], row["dtype"], tp, row["router"])))
            needs = row["needs_gpus"]
            left_out[needs is not None].append(f"{words} ({needs})" if needs else f"{words}: {row['reason']}")
    if left_out[True]:
        console.print(
            "Left out, with the GPUs that they need at least, because others of their device need clearly fewer: "
            f"{', '.join(left_out[True])}.",
            style="dim",
            markup=False,
        )
    for text in left_out[False]:
        console.print(text, style="dim", markup=False, soft_wrap=True)


def print_answer(found: dict[str, Any], tuning: Tuning, console: Console) -> None:
    """Print the recommendation beside what users get without a search."""
    best, words = found["recommendation"], words_of(tuning.runs.base.as_dict())
    console.print(f"\n[bold]{found['verdict']}[/bold]")
    if text := recorded_text(best["as_recorded"], tuning):
        console.print(text, markup=False, highlight=False)
    print_fitting(console, _answer_table(found, tuning, words))
    matters = "Matters: the largest loss among the values beside the best one."
    console.print(" ".join(filter(None, (best["interval_of"], matters))), style="dim", markup=False)
    _print_certainty(found, tuning, words, console)
    work = found["work"]
    console.print(
        f"[dim]{work['simulated_requests']:,} requests were simulated in {work['runs']} runs; a grid of "
        f"{work['grid_points']} points takes {work['grid_requests']:,}.[/dim]"
    )
    if len(best["commands"]) > 1:
        click.echo(
            f"\nThe figures are of all requests of {len(best['commands'])} replicas together; each replays its "
            "share with one of these commands:"
        )
    click.echo(f"\n{best['command']}")  # never broken into lines, so that it can be copied


def _answer_table(found: dict[str, Any], tuning: Tuning, words: Words) -> Table:
    """The settings and the figures of the recommendation and of what there is without a search."""
    best, baselines = found["recommendation"], found["baselines"]
    table = plain_table("", "recommended", *(one["name"] for one in baselines), "matters")
    for name, value in best["settings"].items():
        effect = found["importance"].get(name)
        matters = "given" if name in tuning.space.fixed else percent(effect["effect"]) if effect else ""
        others = [str(one["settings"].get(name, "")) for one in baselines]
        table.add_row(words.own_name(name), f"[bold]{value}[/bold]", *others, matters)
    if tuners := {name for one in baselines for name in one["settings"]} - set(best["settings"]):
        table.add_row("tuners", "", *("on" if tuners & set(one["settings"]) else "" for one in baselines), "")
    figures = [one["figures"] for one in (best, *baselines)]
    if max(one["replicas"] for one in figures) > 1:
        numbers = (
            (one["prefill_replicas"], one["decode_replicas"]) if "prefill_replicas" in one else (one["replicas"],)
            for one in figures
        )
        first, *others = (" + ".join(map(str, one)) for one in numbers)
        table.add_row("replicas", f"[bold]{first}[/bold]", *others, "")
    for label, path, unit, scale in ROWS[tuning.goal.name] + LATENCY_ROWS:
        values = [_at(one["figures"], path) for one in (best, *baselines)]
        if any(value is not None for value in values):
            interval = best["intervals_95"].get(path)
            if path == "max_rate_requests_per_s":
                interval = best["figures"].get("max_rate_interval")
            low, high = (significant(limit, scale) for limit in interval or (None, None))
            between = f" [dim]({low}–{high})[/dim]" if interval else ""
            first, *others = (
                count(value) if isinstance(value, int) else f"{significant(value, scale)}{unit}" for value in values
            )
            table.add_row(label, f"[bold]{first}[/bold]{between}", *others, "")
    return table


def _print_certainty(found: dict[str, Any], tuning: Tuning, words: Words, console: Console) -> None:
    """Print what bounds the recommendation, how near others come, and what is not certain on a real server."""
    best, baselines = found["recommendation"], found["baselines"]
    if binding := found["binding"]:
        console.print(f"\n{binding['advice']}", markup=False)
    if other := best["next_best"]:
        changed, loss = words.with_values(other["changed"]), loss_text(other, tuning.goal.name)
        varies = f", less than other requests like these vary (±{percent(other['noise'], 1)})"
        is_equal = abs(other["loss"]) < EQUAL_SHARE and not other["misses"]
        noise = varies if other["is_noise"] and not is_equal else ""
        if other["is_undecided"] and abs(other["loss"]) >= EQUAL_SHARE:
            noise += "; within the simulation's error, it may be as good on a real server"
        console.print(f"Next best: {changed or 'other tuning'}; it {loss}{noise}.", markup=False)
    if text := rate_text(best["figures"], tuning):
        console.print(text, markup=False)
    equal = [one["name"] for one in baselines if abs(one["loss"]) < EQUAL_SHARE and one["meets_slo"]]
    if equal:
        console.print(f"Without a search, the result is the same: {' and '.join(equal)}.")
    if names := [one["name"] for one in baselines if one["is_undecided"] and one["name"] not in equal]:
        console.print(
            f"The gain over {' and '.join(names)} is within the simulation's error: not certain on a real server."
        )
    for name, (low, high) in best["at_risk"].items():
        console.print(f"{name} is met, but within the simulation's error a real server has {low:.3g} to {high:.3g} s.")


def _at(figures: dict[str, Any], path: str) -> float | None:
    value: Any = figures
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, int | float) else None
