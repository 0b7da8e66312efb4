"""The table of a sweep as text: a row a point, and what bound it."""

from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import Any

from rich.console import Console
from rich.markup import escape

from ifbbench.analysis.figures import neighbours
from ifbbench.analysis.number_texts import NOTHING, count, percent, significant, time_unit
from ifbbench.analysis.words import words_of
from ifbbench.report import plain_table, print_fitting
from ifbbench.settings.fields import as_text

SweepRow = Mapping[str, Any]
"""A point of a sweep: its settings and flattened summary (`ttft_s.p99`). A point that failed has no figures."""
GROWTH = "queue_growth_requests_per_s"
# Figures of a sweep: heading, function that formats a value (None for a time, in the unit that suits its column), and
# function that chooses the best value (None where neither low nor high is better).
SWEEP_COLUMNS: dict[str, tuple[str, Callable[[float | None], str] | None, Callable[[list[float]], float] | None]] = {
    "output_throughput_tokens_per_s": ("output\ntokens/s", significant, max),
    "request_throughput_per_s": ("\nrequests/s", significant, max),
    "ttft_s.p50": ("TTFT\np50", None, min),
    "ttft_s.p99": ("TTFT\np99", None, min),
    "tpot_s.p50": ("TPOT\np50", None, min),
    "tpot_s.p99": ("TPOT\np99", None, min),
    "goodput_requests_per_s": ("goodput\nrequests/s", significant, max),
    "goodput_share": ("good", percent, max),
    "prefix_hit_rate": ("prefix\nhit rate", percent, max),
    "pauses": ("pauses", count, None),
    GROWTH: ("queue\ngrows by", lambda value: f"{significant(value)}/s" if value else NOTHING, None),
    "requests.failed": ("failed", count, None),
}
# The limit with the largest share of the time, and of the waiting: prefix of the keys, and heading.
SHARES = {"bound_by_time": "bound by\n(time)", "waiting_by_limit": "waits for\n(request-s)"}
# Columns that are left out where no point has any.
WHERE_ANY = ("goodput_requests_per_s", "goodput_share", "prefix_hit_rate", "pauses", GROWTH, "requests.failed")
MAX_REASONS = 5
THROUGHPUT = "output_throughput_tokens_per_s"
# How many GPUs a point has: of a fleet, and of one simulated server.
GPUS = ("fleet.gpus", "energy.gpus")
# Throughput that differs by less is the same.
EQUAL_SHARE = 1e-3
# So many points beside the best one are named.
MAX_BESIDE = 6


def print_sweep(
    rows: Sequence[SweepRow], over: Sequence[str], console: Console, warnings: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Print a row for each point of a sweep over the settings `over`, the best of each column marked; then the errors
    of points, and `warnings`, by point.

    A value is not marked if several points share it, and no point is marked of which requests failed: figures of the
    others alone are no better. Figures that a point lacks are dashes. There is no column of WHERE_ANY where no point
    has any.
    """
    table = plain_table()
    table.padding = (0, 1)
    for name in over:
        table.add_column(name, style="bold", justify="right")
    cells = [[as_text(row.get(name)) for row in rows] for name in over]
    cells += [[largest_share(row, key) for row in rows] for key in SHARES]
    for heading in SHARES.values():
        table.add_column(heading)
    met = [meets_objectives(row) for row in rows]
    if any(one is not None for one in met):
        table.add_column("meets\nobjectives")
        cells.append([NOTHING if one is None else "[bold green]yes[/bold green]" if one else "no" for one in met])
    is_complete = [not number_in(row, "requests.failed") for row in rows]
    for key, (_, text, best_of) in SWEEP_COLUMNS.items():
        heading = heading_of(key, rows)
        values = [number_in(row, key) for row in rows]
        if key in WHERE_ANY and not any(values):
            continue
        # Percentiles of one latency have one unit.
        figure = key.partition(".")[0]
        unit, scale = time_unit(
            number_in(row, other) for row in rows for other in SWEEP_COLUMNS if other.startswith(f"{figure}.")
        )
        table.add_column(heading if text else f"{heading} {unit}", justify="right")
        texts = [text(value) if text else significant(value, scale) for value in values]
        known = {index: value for index, value in enumerate(values) if value is not None and is_complete[index]}
        best = best_of(list(known.values())) if best_of and len(known) > 1 else None
        marked = [index for index, value in known.items() if value == best]
        if len(marked) != 1 or [texts[index] for index in known].count(texts[marked[0]]) > 1:
            marked = []
        cells.append(
            [f"[bold green]{cell}*[/bold green]" if index in marked else f"{cell} " for index, cell in enumerate(texts)]
        )
    for line in zip(*cells, strict=True):
        table.add_row(*line)
    print_fitting(console, table, keys=len(over))
    complete = "" if all(is_complete) else ", of points without failed requests"
    console.print(f"[dim]* best of the column{complete}[/dim]", highlight=False)
    if any(number_in(row, GROWTH) for row in rows):
        console.print(
            "[dim]queue grows: more requests arrive than are served, so that latencies depend on the length "
            "of the trace[/dim]",
            highlight=False,
        )
    for sentence in filter(None, [best_in_words(rows, over), *objectives_in_words(rows, over)]):
        console.print(sentence, highlight=False, soft_wrap=True, markup=False)
    _print_reasons(rows, over, console, warnings or {})


def heading_of(key: str, rows: Sequence[SweepRow]) -> str:
    """The heading of a column, in the words of the engine of these points."""
    return words_of(*rows).pauses if key == "pauses" else SWEEP_COLUMNS[key][0]


def _print_reasons(
    rows: Sequence[SweepRow], over: Sequence[str], console: Console, warnings: Mapping[str, Sequence[str]]
) -> None:
    """Each error and warning once, with the first point that it is of."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.get("error"):
            reasons.setdefault(str(row["error"]), []).append(point_of(row, over))
    for point, of_point in warnings.items():
        for warning in of_point:
            reasons.setdefault(warning, []).append(point)
    for reason, points in list(reasons.items())[:MAX_REASONS]:
        others = f" and {len(points) - 1} more" if len(points) > 1 else ""
        console.print(f"[bold]{escape(points[0])}[/bold]{others}: {escape(reason)}", highlight=False, soft_wrap=True)
    if len(reasons) > MAX_REASONS:
        console.print(f"… and {len(reasons) - MAX_REASONS} other errors and warnings", highlight=False)


def meets_objectives(row: SweepRow) -> bool | None:
    """Whether a point meets all objectives of `--slo` and no request failed; of repeats, each of them. None without
    objectives, and for a point without figures."""
    met = [row[f"slo.{name}.met"] for name in objectives_of([row])]
    if not met or row.get("error"):
        return None
    return all(value is True for value in met) and not number_in(row, "requests.failed")


def objectives_of(rows: Sequence[SweepRow]) -> list[str]:
    """The names of the objectives of these points."""
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("slo.") and key.endswith(".met"))
    return [key[len("slo.") : -len(".met")] for key in keys]


def best_meeting(rows: Sequence[SweepRow]) -> SweepRow | None:
    """The point with the highest throughput of those that meet every objective, for each GPU where points have
    different numbers of them: more GPUs than the objectives need are no gain. Of equal ones (within a thousandth) that
    with the lowest TTFT p99. None if there is none."""
    met = [row for row in rows if meets_objectives(row) and number_in(row, THROUGHPUT) is not None]
    highest = max(map(_of_each_gpu, met), default=0.0)
    alike = [row for row in met if _of_each_gpu(row) >= highest * (1 - EQUAL_SHARE)]
    return min(alike, key=lambda row: number_in(row, "ttft_s.p99") or 0.0, default=None)


def have_unequal_gpus(rows: Sequence[SweepRow]) -> bool:
    """Whether points have different numbers of GPUs, so that their throughput is compared for each of them."""
    return len(set(map(gpus_of, rows))) > 1


def gpus_of(row: SweepRow) -> float:
    """How many GPUs a point has; one where that is not known."""
    return next((number for key in GPUS if (number := number_in(row, key))), 1.0)


def _of_each_gpu(row: SweepRow) -> float:
    """Output tokens/s of each GPU; of all of them where their number is not known."""
    return (number_in(row, THROUGHPUT) or 0.0) / gpus_of(row)


def best_in_words(rows: Sequence[SweepRow], over: Sequence[str]) -> str:
    """How many points meet every objective, and which of them is best; empty if there is none."""
    best = best_meeting(rows)
    if best is None:
        return ""
    met = [row for row in rows if meets_objectives(row)]
    meet = "meets every objective:" if len(met) == 1 else "meet every objective; the best of them is"
    rate = f"{significant(number_in(best, THROUGHPUT))} output tokens/s"
    if have_unequal_gpus(met):
        rate += f" on {count(gpus_of(best))} GPUs, the most for each GPU"
    text = f"{len(met)} of {len(rows)} points {meet} {point_of(best, over)}, with {rate}."
    beside = [f"{name}={as_text(row.get(name))} {_against(best, row)}" for name, row in _beside(best, rows, over)]
    return f"{text} Of the points beside it, {'; '.join(beside)}." if beside else text


def _beside(best: SweepRow, rows: Sequence[SweepRow], over: Sequence[str]) -> list[tuple[str, SweepRow]]:
    """The points that differ from `best` in one setting, with its name: of a number the nearest smaller and larger."""
    found = []
    for name in over:
        same = [other for other in over if other != name]
        alone = [
            row
            for row in rows
            if meets_objectives(row) is not None
            and row.get(name) != best.get(name)
            and all(row.get(other) == best.get(other) for other in same)
        ]
        value, values = number_in(best, name), [number_in(row, name) for row in alone]
        if value is not None:
            numbers = [nan if one is None else one for one in values]
            alone = [alone[index] for index in neighbours(numbers, value)]
        found += [(name, row) for row in alone]
    return found[:MAX_BESIDE]


def _against(best: SweepRow, row: SweepRow) -> str:
    """What a point does in place of the best one."""
    missed = [
        f"{name} ({significant(number_in(row, f'slo.{name}.value'))} s)"
        for name in objectives_of([row])
        if not row[f"slo.{name}.met"]
    ]
    if missed:
        return f"misses {', '.join(missed)}"
    if failed := number_in(row, "requests.failed"):
        return f"fails {count(failed)} requests"
    highest, other = _of_each_gpu(best), _of_each_gpu(row)
    each = " for each GPU" if have_unequal_gpus([best, row]) else ""
    if abs(highest - other) <= EQUAL_SHARE * highest:
        return f"has the same throughput{each}"
    return f"has a throughput{each} that is {percent(1 - other / highest, 1)} lower"


def objectives_in_words(rows: Sequence[SweepRow], over: Sequence[str]) -> list[str]:
    """Whether no point meets an objective, with the nearest one, or every point meets all of them."""
    known = {name: [row for row in rows if row.get(f"slo.{name}.met") is not None] for name in objectives_of(rows)}
    found = []
    for name, some in known.items():
        # An objective of each request has the share of requests that meet it.
        shares_met = [number_in(row, f"slo.{name}.share") for row in some]
        values = [number_in(row, f"slo.{name}.value") for row in some]
        if any(row[f"slo.{name}.met"] for row in some) or any(shares_met) or None in values or not some:
            continue
        nearest = min(some, key=lambda row: number_in(row, f"slo.{name}.value") or 0.0)
        value, target = (significant(number_in(nearest, f"slo.{name}.{part}")) for part in ("value", "target"))
        found.append(
            f"No point meets {name}: the nearest has {value} s, with {point_of(nearest, over)}; the target is "
            f"{target} s."
        )
    if known and all(some and all(row[f"slo.{name}.met"] for row in some) for name, some in known.items()):
        found.append("Every point meets every objective, so that the objectives do not tell the points apart.")
    return found


def point_of(row: SweepRow, over: Sequence[str]) -> str:
    """The values of the swept settings: `max_batch_size=8,seed=1`."""
    return ",".join(f"{name}={as_text(row.get(name))}" for name in over)


def number_in(row: SweepRow, key: str) -> float | None:
    """The number in a row; None for anything else, such as NaN and the empty cells of a point that failed."""
    value = row.get(key)
    try:
        number = None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
    return number if number == number else None


def largest_share(row: SweepRow, key: str) -> str:
    """The limit with the largest share of `key`, such as `KV 83 %`; a dash if no limit has any."""
    amounts = shares(row, key)
    largest = max((name for name in amounts if name != "none"), key=amounts.__getitem__, default=None)
    if largest is None or not amounts[largest]:
        return NOTHING
    return f"{escape(words_of(row).column(largest))} {percent(amounts[largest] / sum(amounts.values()))}"


def shares(row: SweepRow, key: str) -> dict[str, float]:
    """The amounts below `key` by limit, `none` included."""
    return {name.partition(".")[2]: number_in(row, name) or 0.0 for name in row if name.startswith(f"{key}.")}
