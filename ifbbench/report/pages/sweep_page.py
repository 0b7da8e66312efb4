"""The page of a sweep: its points as a table and as charts, and of each point its settings, figures and command."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ifbbench.analysis.words import BINDING, words_of
from ifbbench.build.engines import engine_defaults
from ifbbench.errors import InputError
from ifbbench.report.colours import limit_colours
from ifbbench.report.pages.page import write_html
from ifbbench.report.sweep_metrics import BOUND_BY, METRICS, is_complete, knee_of, subject_of, ticks_of, varied_in
from ifbbench.report.sweep_table import (
    GROWTH,
    SWEEP_COLUMNS,
    WHERE_ANY,
    SweepRow,
    best_in_words,
    best_meeting,
    heading_of,
    meets_objectives,
    number_in,
    shares,
)
from ifbbench.settings.command_line import option_words
from ifbbench.settings.config import settings
from ifbbench.settings.fields import as_text
from ifbbench.settings.names import usual_settings

FILE = "sweep.html"
SCRIPTS = ("common.js", "sweep_charts.js", "sweep.js")


def write_sweep_page(
    name: str, rows: Sequence[SweepRow], over: Sequence[str], runs: Mapping[str, Sequence[str]], into: Path
) -> Path:
    """Write the page of a sweep over the settings `over` as `sweep.html` into a directory.

    runs: the name of a run directory to the addresses of its run pages, relative to this page. InputError if the file
    cannot be written.
    """
    rows = [{**row, **{key: as_text(None) for key in over if row.get(key) is None}} for row in rows]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    known = {item.name for item in settings()} | {"trace"}
    varied = varied_in(rows, over)
    first = rows[0]
    best = best_meeting(rows)
    content = {
        "name": name,
        "over": list(over),
        "varied": varied,
        "subject": subject_of(rows),
        "common": {
            key: first[key]
            for key in columns
            if key in known
            and key not in over
            and first[key] is not None
            and all(row.get(key) == first[key] for row in rows)
        },
        "best": best_in_words(rows, over),
        "points": [
            {
                "values": [row.get(key) for key in over],
                "error": row.get("error"),
                "complete": is_complete(row),
                "meets": meets_objectives(row),
                "best": row is best,
                "shares": shares(row, BOUND_BY),
                "command": command_of(row),
                "runs": runs.get(Path(str(row.get("output"))).name, []),
            }
            for row in rows
        ],
        "figures": {
            key: [number_in(row, key) for row in rows]
            for key in columns
            if key not in known
            and key not in ("error", "output")
            and any(number_in(row, key) is not None for row in rows)
        },
        "ticks": {key: ticks_of(rows, key) for key in over},
        "columns": _columns(rows),
        "metrics": _metrics(rows),
        "knees": {key: knee_of(rows, key) for key in varied} if len(varied) == 1 else {},
        "limits": {limit: (words_of(*rows).limit_name(limit), colour) for limit, colour in _limits(rows).items()},
    }
    return write_html(into / FILE, "sweep", SCRIPTS, f"sweep {name}", content)


def _limits(rows: Sequence[SweepRow]) -> dict[str, str]:
    return limit_colours((*BINDING, *(limit for row in rows for limit in shares(row, BOUND_BY))))


def _columns(rows: Sequence[SweepRow]) -> list[dict[str, Any]]:
    """The columns of figures in the table: key, heading, kind of value, and whether low or high is best."""
    return [
        {
            "key": key,
            "heading": " ".join([*heading_of(key, rows).split(), *(["requests/s"] if key == GROWTH else [])]),
            "kind": "time" if text is None else _kind(key),
            "best": None if best is None else "high" if best is max else "low",
        }
        for key, (_, text, best) in SWEEP_COLUMNS.items()
        if any(number_in(row, key) for row in rows) or key not in WHERE_ANY
    ]


def _metrics(rows: Sequence[SweepRow]) -> list[dict[str, Any]]:
    """What is drawn against settings, a chart each: of percentiles the one that most depends on them."""
    found = []
    for metric in METRICS:
        if metric.is_in(rows):
            key, statistic = list(metric.keys.items())[-1]
            kind = "time" if metric.unit is None else _kind(key)
            # The page finds units of times and shares itself.
            unit = f" ({metric.unit})" if kind == "number" and metric.unit else ""
            found.append(
                {
                    "key": key,
                    "label": f"{metric.label} {statistic}".strip() + unit,
                    "kind": kind,
                    "best": "low" if metric.is_better_low else "high",
                }
            )
    return found


def _kind(key: str) -> str:
    return "share" if key.endswith(("_share", "hit_rate")) else "number"


def command_of(row: SweepRow) -> str:
    """The `ifbbench run` of a point: the settings that differ from the defaults of its engine."""
    known = {item.name: row.get(item.name) for item in settings() if item.group != "recording"}
    try:
        usual = usual_settings(engine_defaults({name: value for name, value in known.items() if value is not None}))
    except InputError:  # the profile of its device is not here
        usual = {}
    values = {name: value for name, value in known.items() if name not in usual or value != usual[name]}
    return shlex.join(["ifbbench", "run", str(row.get("trace")), *option_words(values, row.get("engine"))])
