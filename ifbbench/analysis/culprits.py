"""Which requests a run suffered from: bursts, giant prompts, and a class or priority that holds the slots."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from ifbbench.analysis.number_texts import count, percent, significant
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.analysis.waiting import HeadsOfLine
from ifbbench.settings.groups.replay import DEFAULT_PRIORITY

# A burst: intervals of so many mean gaps in which at least so many times as many requests arrive.
GAPS_OF_INTERVAL, BURST_RATIO, MIN_OF_BURST = 10, 3, 10
# A giant prompt: so many times the median, of at least so many tokens, and few such ones.
GIANT_RATIO, GIANT_TOKENS, GIANT_SHARE = 8, 1024, 0.05
# A group of requests holds the slots with this share of their time, while others wait for this share of theirs.
HOLDING_SHARE, WAITING_SHARE = 0.5, 0.1
NAMED = 5
GROUPS = ("class", "priority")


@dataclass(frozen=True)
class Culprit:
    """What a run suffered from.

    kind: burst, giant_prompts or holds_slots.
    facts: facts of that kind, for JSON.
    """

    kind: str
    text: str
    facts: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": self.kind, "text": self.text} | self.facts


def culprits_of(run: RecordedRun, heads: HeadsOfLine) -> list[Culprit]:
    """All of a run, bursts first."""
    rows = list(run.row_of.values())
    return [*_bursts(rows), *_giants(rows, heads), *_holders(rows)]


def _group(row: dict[str, Any], name: str) -> str:
    """The class or priority of a request as text; empty for one of no class."""
    if name == "priority":
        return f"{row.get(name, DEFAULT_PRIORITY):g}"
    return str(row.get(name) or "")


def _bursts(rows: list[dict[str, Any]]) -> list[Culprit]:
    arrivals = sorted((float(row["arrival_s"]), index) for index, row in enumerate(rows))
    times = np.array([time_s for time_s, _ in arrivals])
    if len(times) < 2 * MIN_OF_BURST or times[-1] <= times[0]:
        return []
    interval_s = GAPS_OF_INTERVAL * (times[-1] - times[0]) / (len(times) - 1)
    intervals = ((times - times[0]) // interval_s).astype(np.int64)
    dense = np.flatnonzero(np.bincount(intervals) >= max(BURST_RATIO * GAPS_OF_INTERVAL, MIN_OF_BURST))
    found = []
    for group in np.split(dense, np.flatnonzero(np.diff(dense) > 1) + 1):
        if not len(group):
            continue
        chosen = np.flatnonzero((intervals >= group[0]) & (intervals <= group[-1]))
        members = [rows[arrivals[index][1]] for index in chosen]
        start_s, end_s = float(times[chosen[0]]), float(times[chosen[-1]])
        facts: dict[str, Any] = {"start_s": start_s, "end_s": end_s, "requests": len(members)}
        text = f"Burst: {count(len(members))} requests arrived from {start_s:,.2f} to {end_s:,.2f} s"
        for name in GROUPS:
            of_all = {_group(row, name) for row in rows}
            value, number = Counter(_group(row, name) for row in members).most_common(1)[0]
            if len(of_all) > 1 and value:
                facts[name], facts[f"of_{name}"] = value, number
                text += f", {count(number)} of them of {name} {value}"
        found.append(Culprit("burst", f"{text}.", facts))
    return sorted(found, key=lambda one: -one.facts["requests"])[:NAMED]


def _giants(rows: list[dict[str, Any]], heads: HeadsOfLine) -> list[Culprit]:
    lengths = np.array([row["prompt_len"] for row in rows])
    if not len(lengths):
        return []
    least = max(GIANT_RATIO * float(np.median(lengths)), GIANT_TOKENS)
    giants = sorted((row for row in rows if row["prompt_len"] >= least), key=lambda row: -row["prompt_len"])
    if not giants or len(giants) > max(GIANT_SHARE * len(rows), min(NAMED, len(rows) / 4)):
        return []
    ids = {row["request_id"] for row in giants}
    behind_s = sum(blocker.waited_s for blocker in heads.blockers if blocker.request_id in ids)
    named = ", ".join(f"{row['request_id']} ({count(row['prompt_len'])} tokens)" for row in giants[:NAMED])
    more = f" and {count(len(giants) - NAMED)} more" if len(giants) > NAMED else ""
    text = f"Giant prompt{'s' if len(giants) > 1 else ''}: {named}{more}, where the median has "
    text += f"{count(float(np.median(lengths)))}"
    text += f"; others waited {significant(behind_s)} request-seconds behind them." if behind_s else "."
    facts = {
        "requests": [{"request_id": row["request_id"], "prompt_len": row["prompt_len"]} for row in giants],
        "waited_behind_s": behind_s,
    }
    return [Culprit("giant_prompts", text, facts)]


def _holders(rows: list[dict[str, Any]]) -> list[Culprit]:
    done = [row for row in rows if row.get("e2e_s") is not None and row.get("queue_time_s") is not None]
    found = []
    for name in GROUPS:
        held, waited, all_s, number = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
        for row in done:
            group = _group(row, name)
            held[group] += row["e2e_s"] - row["queue_time_s"]
            waited[group] += row["queue_time_s"]
            all_s[group] += row["e2e_s"]
            number[group] += 1
        if len(number) < 2:
            continue
        group = max(held, key=held.__getitem__)
        share = held[group] / (sum(held.values()) or 1.0)
        others_wait_s = sum(waited.values()) - waited[group]
        others_s = sum(all_s.values()) - all_s[group]
        if not group or share < HOLDING_SHARE or others_wait_s < WAITING_SHARE * others_s:
            continue
        text = (
            f"Requests of {name} {group}, {count(number[group])} of {count(len(done))}, hold {percent(share)} of the "
            f"time in slots; the others waited {significant(others_wait_s)} request-seconds for their first iteration, "
            f"{percent(others_wait_s / others_s)} of their time."
        )
        facts = {name: group, "share": float(share), "others_waited_s": float(others_wait_s)}
        found.append(Culprit("holds_slots", text, facts))
    return found
