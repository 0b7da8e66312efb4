"""What bound a run, by iterations, by time and by waiting; its slowest requests and its lower bound."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ifbbench.analysis.bounds import Bounds, LowerBound
from ifbbench.analysis.culprits import Culprit, culprits_of
from ifbbench.analysis.explain import RequestLife, request_life
from ifbbench.analysis.generation_time import GenerationTime
from ifbbench.analysis.number_texts import count, percent, significant
from ifbbench.analysis.pauses import PauseLedger, pause_ledger
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.analysis.turns import Turns
from ifbbench.analysis.waiting import HeadsOfLine
from ifbbench.analysis.words import BINDING, setting_of, words_of
from ifbbench.errors import InputError
from ifbbench.rundir.figures import recorded_figures
from ifbbench.rundir.metrics import TRANSFER, WAITING_ITERATION, limit_waited_for, own_seconds
from ifbbench.rundir.rows import Id

# The text names waiting that no limit caused from this share on: some requests of every run come during an iteration.
TOLD_SHARE = 0.01


@dataclass(frozen=True)
class SlowRequest:
    """A slow request and what it spent most of its time on.

    share: that part of e2e_s.
    """

    request_id: Id
    e2e_s: float
    ttft_s: float
    tpot_s: float | None
    cause: str
    share: float


class Findings:
    """The answers about one run."""

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        self.heads = HeadsOfLine(run)
        self.words = words_of(run.config)

    @cached_property
    def by_iterations(self) -> dict[str, float]:
        """Share of iterations that each limit bound."""
        if self.run.data.recorded_every > 1:
            return self._of_all["bound_by"]
        return self._shares(np.ones(len(self.run.iterations)))

    @cached_property
    def by_time(self) -> dict[str, float]:
        """Share of the time of all iterations that each limit bound."""
        if self.run.data.recorded_every > 1:
            return self._of_all["bound_by_time"]
        iterations = self.run.iterations
        return self._shares(own_seconds(iterations.start_s, iterations.delivered_s, self.run.data.num_micro_batches))

    @cached_property
    def _of_all(self) -> dict[str, dict[str, float]]:
        """Both shares where statistics were thinned: lines say nothing of the iterations between them, which
        `summary.json` counts too, and which are filled in where it is missing or of the steady state."""
        data = self.run.data
        known = data.summary if data.summary and not data.summary.get("steady_state") else recorded_figures(data)
        return {title: dict.fromkeys(BINDING, 0.0) | known[title] for title in ("bound_by", "bound_by_time")}

    def _shares(self, weights: "np.ndarray[Any, np.dtype[np.float64]]") -> dict[str, float]:
        iterations = self.run.iterations
        sums = np.bincount(iterations.limit, weights, len(iterations.limits))
        total = float(sums.sum()) or 1.0
        shares = dict.fromkeys(BINDING, 0.0)
        return shares | {name: float(spent) / total for name, spent in zip(iterations.limits, sums, strict=True)}

    @cached_property
    def waiting_s(self) -> dict[str, float]:
        """Request-seconds of waiting by the limit that caused it; waiting behind the head of the line is charged to the
        limit that held the head."""
        waited: dict[str, float] = {}
        if self.load_s is not None:  # spans do not say when keys and values came from stores
            for row in self.run.row_of.values():
                for part, seconds in (row.get("attribution_s") or {}).items():
                    waited_for = limit_waited_for(part)
                    if seconds and waited_for is not None and waited_for != "none":
                        waited[waited_for] = waited.get(waited_for, 0.0) + seconds
            return dict(sorted(waited.items(), key=lambda item: -item[1]))
        for (_, limit), seconds in self.heads.own_waiting_s.items():
            waited[limit] = waited.get(limit, 0.0) + seconds
        for blocker in self.heads.blockers:
            waited[blocker.limit] = waited.get(blocker.limit, 0.0) + blocker.waited_s
        return dict(sorted(waited.items(), key=lambda item: -item[1]))

    @cached_property
    def all_waiting_s(self) -> dict[str, float]:
        """`waiting_s`, and last, as "none", the request-seconds in queues that no limit caused: requests waited for the
        iteration in progress to end."""
        seconds = self._attributed_s(WAITING_ITERATION)
        return self.waiting_s | ({"none": seconds} if seconds else {})

    @cached_property
    def load_s(self) -> float | None:
        """Request-seconds in which keys and values came from stores; None without stores."""
        if not (self.run.data.summary or {}).get("kv_tiers"):
            return None
        return self._attributed_s(TRANSFER)

    def _attributed_s(self, part: str) -> float:
        """Request-seconds that all requests spent in `part` of their attribution."""
        rows = self.run.row_of.values()
        return float(sum((row.get("attribution_s") or {}).get(part, 0.0) for row in rows))

    @cached_property
    def turns(self) -> Turns:
        """What sessions lost of the KV cache between their turns."""
        return Turns(self.run)

    @property
    def head_of_line_blocked_s(self) -> float:
        """Request-seconds of waiting behind another request."""
        return sum(blocker.waited_s for blocker in self.heads.blockers)

    @cached_property
    def ledger(self) -> PauseLedger:
        return pause_ledger(self.run)

    @cached_property
    def culprits(self) -> list[Culprit]:
        """Bursts, giant prompts, and who holds the slots."""
        return culprits_of(self.run, self.heads)

    @cached_property
    def bounds(self) -> Bounds | str:
        """The lower bounds of the run and its requests, or why they are unknown."""
        try:
            return Bounds(self.run)
        except InputError as error:
            return str(error)

    @cached_property
    def generation(self) -> GenerationTime | None:
        """What the time between tokens was spent on; None if the costs of the device are unknown."""
        return None if isinstance(self.bounds, str) else GenerationTime(self.run, self.bounds)

    @property
    def lower_bound(self) -> LowerBound | str:
        """The parts of the duration of the run, or why they are unknown."""
        return self.bounds if isinstance(self.bounds, str) else self.bounds.of_run

    def life(self, request_id: Id) -> RequestLife:
        """What one request did and waited for, with the lower bound of its latency."""
        life = request_life(self.run, self.heads, request_id)
        if isinstance(self.bounds, str) or self.generation is None:
            return life
        least_s, generation_s = self.bounds.request_s(request_id), self.generation.of_request(request_id)
        return replace(life, least_s=least_s, generation_s=generation_s)

    def slowest(
        self, count: int, by: str = "e2e", of_class: str | None = None, missed: bool = False
    ) -> list[SlowRequest]:
        """The `count` requests with the largest `by`: e2e, ttft, tpot or queue_time.

        of_class: only those of this class.
        missed: only those that miss an objective.

        InputError if the run has no such class, or no objectives of each request.
        """
        rows = [row for row in self.run.row_of.values() if row.get(f"{by}_s") is not None]
        if of_class is not None:
            classes = {str(row["class"]) for row in self.run.row_of.values() if row.get("class") is not None}
            if of_class not in classes:
                known = ", ".join(sorted(classes)) or "none; its trace gives no classes"
                raise InputError(f"class {of_class} is not in {self.run.path}; its classes: {known}.")
            rows = [row for row in rows if str(row.get("class")) == of_class]
        if missed:
            if not any(row.get("slo_met") is not None for row in self.run.row_of.values()):
                raise InputError(
                    f"--missed: {self.run.path} has no objectives of each request; run with --slo, such as ttft=1s."
                )
            rows = [row for row in rows if row.get("slo_met") is False]
        slow = sorted(rows, key=lambda row: (-row[f"{by}_s"], row["index"]))[:count]
        return [_slow_request(request_life(self.run, self.heads, row["request_id"])) for row in slow]

    @cached_property
    def waiting_text(self) -> str:
        """What requests waited for, in words. A setting is named with its value; what another value would do is not
        known here, because no run tried it."""
        if self.run.lacks_requests:
            about = self.run.data.run["imported"]
            return f"What requests waited for is not known: {about['file']} ({about['format']}) has no requests."
        waited, lost_s = self.all_waiting_s, sum(entry.lost_s for entry in self.ledger.entries)
        pauses = ""
        if lost_s:
            freed = self.words.waits_for("kv_blocks")
            pauses = (
                f" {self.words.pauses.capitalize()}, which free {freed}, cost the {self.words.paused} requests "
                f"{significant(lost_s)} request-seconds."
            )
        if self.load_s:
            share = self.load_s / (sum(row.get("ttft_s") or 0.0 for row in self.run.row_of.values()) or 1.0)
            pauses += (
                f" Keys and values were on their way from stores for {significant(self.load_s)} request-seconds, "
                f"{percent(share)} of the time until first tokens."
            )
        if not any(self.waiting_s.values()):
            return f"No request waited for a limit.{pauses}"
        total = sum(waited.values())
        shares = [
            f"{percent(spent / total)} for {self._named(limit)}"
            for limit, spent in waited.items()
            if limit != "none" or spent >= TOLD_SHARE * total
        ]
        behind_s, mean_s = self.head_of_line_blocked_s, total / len(self.run.spans)
        return (
            f"Requests waited {significant(total)} request-seconds, {significant(mean_s)} s each on average: "
            f"{', '.join(shares)}. {significant(behind_s)} request-seconds of this waiting were behind another "
            f"request.{pauses}"
        )

    def _named(self, limit: str) -> str:
        """What a request that `limit` holds waits for, with the value of the limit."""
        words, blocks = self.words.waits_for(limit), self.run.data.run.get("num_kv_blocks")
        if limit == "kv_blocks" and blocks:
            return f"{words} ({count(blocks)} in all)"
        value = self.run.config.get(setting_of(limit))
        return words if value is None else f"{words} ({self.words.setting_name(limit)} {value})"

    def as_dict(
        self, slowest: int, by: str = "e2e", of_class: str | None = None, missed: bool = False
    ) -> dict[str, Any]:
        """For JSON; arguments as of `slowest`."""
        waited, bound = self.all_waiting_s, self.lower_bound
        total = sum(waited.values()) or 1.0
        return {
            "run": str(self.run.data.path),
            "partial": self.run.data.partial,
            "bound_by": self.by_iterations,
            "bound_by_time": self.by_time,
            "waiting_by_limit": waited,
            "waiting_shares": {limit: spent / total for limit, spent in waited.items()},
            "head_of_line_blocked_s": self.head_of_line_blocked_s,
            "head_of_line": [vars(blocker) for blocker in self.heads.blockers[:slowest]],
            "culprits": [one.as_dict() for one in self.culprits],
            "slowest": [vars(one) for one in self.slowest(slowest, by, of_class, missed)],
            "pauses": {
                "count": len(self.ledger.entries),
                "tokens_recomputed": self.ledger.tokens_recomputed,
                "lost_s": sum(entry.lost_s for entry in self.ledger.entries),
                "gained_s": sum(entry.gained_s for entry in self.ledger.entries),
                "thrashing": [{"request_id": one, "pauses": count} for one, count in self.ledger.thrashing()],
            },
            "turns": self.turns.as_dict() if self.turns.turns else None,
            "generation": self.generation and self.generation.as_dict(),
            "lower_bound": {"unknown": bound} if isinstance(bound, str) else bound.as_dict(),
            "advice": {"text": self.waiting_text, "limit": next(iter(self.waiting_s), None)},
        }


def _slow_request(life: RequestLife) -> SlowRequest:
    spent: dict[str, float] = {}
    for stretch in life.stretches:
        cause = (
            f"waiting for {life.words.waits_for(stretch.limit)}" if stretch.limit else life.words.phase(stretch.phase)
        )
        spent[cause] = spent.get(cause, 0.0) + stretch.duration_s
    # A run may be killed between writing the request and its spans.
    cause, longest_s = max(spent.items(), key=lambda item: item[1], default=("not recorded", 0.0))
    e2e_s = life.row["e2e_s"]
    return SlowRequest(
        life.request_id, e2e_s, life.row["ttft_s"], life.row.get("tpot_s"), cause, longest_s / e2e_s if e2e_s else 0.0
    )
