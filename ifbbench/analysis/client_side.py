"""What can be said of a run against an endpoint: where requests spent their time as their client saw it, its stalls,
and what the server reported of itself.
"""

from functools import cached_property
from typing import Any

import numpy as np

from ifbbench.analysis.number_texts import percent, significant, time_unit
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.analysis.token_times import TokenGaps
from ifbbench.rundir.client_figures import load_gauges
from ifbbench.rundir.client_side import CLIENT, GENERATION, UNTIL_FIRST_TOKEN
from ifbbench.rundir.rows import Id

PART_WORDS = {
    CLIENT: "in the client, before it was sent",
    UNTIL_FIRST_TOKEN: "in the server until the first token (queue and context phase)",
    GENERATION: "from the first token to the last",
}
UNKNOWN = ("iterations", "batches", "limits", "pauses", "KV blocks", "time in the server's queue")
# The fastest share of requests, whose time until the first token is taken for one without queue.
FASTEST_PERCENT = 5.0
STALL_RATIO = 5.0


class ClientFindings:
    """The answers about one run."""

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        self._rows = [row for row in run.row_of.values() if row.get("e2e_s") is not None]

    @cached_property
    def spent_s(self) -> dict[str, float]:
        """Request-seconds of the completed requests, by part."""
        return {part: sum(row["attribution_s"].get(part, 0.0) for row in self._rows) for part in PART_WORDS}

    @cached_property
    def waiting_at_most(self) -> float | None:
        """The share of the time until the first token that a queue may explain, with the fastest requests as those
        that did not wait; None if there are too few requests."""
        until_s = np.array([row["attribution_s"][UNTIL_FIRST_TOKEN] for row in self._rows])
        if len(until_s) < 100 / FASTEST_PERCENT or not until_s.sum():
            return None
        return float(1 - np.percentile(until_s, FASTEST_PERCENT) * len(until_s) / until_s.sum())

    @cached_property
    def stalls(self) -> dict[str, float]:
        """Gaps between tokens of more than STALL_RATIO times the median one, of those that are above 0."""
        gaps = TokenGaps.of(self.run.data).seconds
        gaps = gaps[gaps > 0]
        long = gaps[gaps > STALL_RATIO * np.median(gaps)] if len(gaps) else gaps
        return {
            "count": len(long),
            "seconds": float(long.sum()),
            "longest_s": float(long.max(initial=0.0)),
            "share_of_time": float(long.sum() / gaps.sum()) if len(gaps) else 0.0,
        }

    @cached_property
    def load(self) -> dict[str, dict[str, float]]:
        """Mean and maximum of the gauges of load in the server's metrics, by name; empty if they were not polled."""
        return {
            name: {"mean": float(values.mean()), "max": float(values.max())}
            for name, (_, values) in load_gauges(self.run.data).items()
        }

    @property
    def text(self) -> str:
        """The findings in sentences."""
        total = sum(self.spent_s.values())
        if not total:
            return "No request was completed."
        part, seconds = max(self.spent_s.items(), key=lambda item: item[1])
        found = [f"Requests spent most of their time ({percent(seconds / total)}) {PART_WORDS[part]}."]
        if self.waiting_at_most is not None:
            found.append(
                f"The fastest {FASTEST_PERCENT:g} % had their first token after {self._fastest}; waiting in the "
                f"server's queue explains up to {percent(max(self.waiting_at_most, 0.0))} of the time until the first "
                "token."
            )
        if self.stalls["count"]:
            unit, scale = time_unit([self.stalls["longest_s"]])
            found.append(
                f"{self.stalls['count']:,} gaps between tokens exceed {STALL_RATIO:g} times the median of those "
                f"above 0, the longest is {significant(self.stalls['longest_s'], scale)} {unit}; they are "
                f"{percent(self.stalls['share_of_time'])} of the time of generation."
            )
        found.append(f"Unknown, because the server is not ours: {', '.join(UNKNOWN)}.")
        return " ".join(found)

    @property
    def _fastest(self) -> str:
        until_s = [row["attribution_s"][UNTIL_FIRST_TOKEN] for row in self._rows]
        fastest_s = float(np.percentile(until_s, FASTEST_PERCENT))
        unit, scale = time_unit([fastest_s])
        return f"{significant(fastest_s, scale)} {unit}"

    def slowest(self, number: int) -> list[dict[str, Any]]:
        """The requests of the longest end-to-end latency, with the part that took longest and its share."""
        found = []
        for row in sorted(self._rows, key=lambda row: (-row["e2e_s"], row["index"]))[:number]:
            part, seconds = max(row["attribution_s"].items(), key=lambda item: item[1])
            share = seconds / row["e2e_s"] if row["e2e_s"] else 0.0
            found.append(
                {
                    "request_id": row["request_id"],
                    "e2e_s": row["e2e_s"],
                    "ttft_s": row["ttft_s"],
                    "cause": PART_WORDS[part],
                    "share": share,
                }
            )
        return found

    def life(self, request_id: Id) -> dict[str, Any]:
        """What one request did, for JSON: `life`, its spans, and `attribution_s`."""
        row, spans = self.run.row_of.get(request_id, {}), self.run.data.spans
        columns = ["phase", "start_s", "end_s", "tokens"]
        own = spans[spans["request_id"] == str(request_id)]
        return {
            "request_id": request_id,
            "outcome": row.get("outcome"),
            "error": row.get("error"),
            "retries": row.get("retries") or [],
            "life": own[columns].to_dict("records") if len(own) else [],
            "attribution_s": row.get("attribution_s") or {},
        }

    def as_dict(self, slowest: int) -> dict[str, Any]:
        """For JSON."""
        total = sum(self.spent_s.values()) or 1.0
        return {
            "run": str(self.run.data.path),
            "partial": self.run.data.partial,
            "endpoint": self.run.data.endpoint,
            "bound_by": None,
            "head_of_line_blocked_s": None,
            "spent_s": self.spent_s,
            "spent_shares": {part: seconds / total for part, seconds in self.spent_s.items()},
            "waiting_at_most": self.waiting_at_most,
            "stalls": self.stalls,
            "slowest": self.slowest(slowest),
            "server_load": self.load,
            "unknown": list(UNKNOWN),
            "advice": {"text": self.text},
        }
