"""What the time from the first token of a request to its last one was spent on, also where no limit held the request.

A batch takes as long as all of its work, so that each prompt in an iteration delays the token of every request that
generates there. What it costs is the time of the device that the iteration would have saved without its prompts.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ifbbench.analysis.bounds import Bounds
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.rundir.rows import Id
from ifbbench.rundir.timeline import Floats

TOKENS, PROMPTS, HOST, HELD = "tokens", "prompts", "host", "held"
PARTS = {
    TOKENS: "tokens of the batch",
    PROMPTS: "prompts in the same iterations",
    HOST: "host",
    HELD: "held back, or computed again",
}
# The share of requests with the highest TPOT, of which the parts are given apart.
SLOWEST_SHARE = 0.1


class GenerationTime:
    """The parts of the time between the first and the last token of each request.

    bounds: bounds of `run`.
    """

    def __init__(self, run: RecordedRun, bounds: Bounds) -> None:
        self._run = run
        work = bounds.work.computed
        zero = np.zeros_like(work.context_tokens)
        without = work._replace(
            context_tokens=zero,
            context_requests=zero,
            attention_pairs=zero,
            context_kv_tokens=zero,
            outputs=work.generation_tokens,
        )
        whole_s, rest_s = bounds.predicted_s(work), bounds.predicted_s(without)
        share = np.divide(whole_s - rest_s, whole_s, out=np.zeros_like(whole_s), where=whole_s > 0)
        self._device_s = _cumulated(bounds.device_s)
        self._prompts_s = _cumulated(bounds.device_s * share.clip(0.0, 1.0))
        self._done_s = np.concatenate(([bounds.begin_s], bounds.done_s))

    @cached_property
    def _ids(self) -> list[Id]:
        """The requests that have a TPOT, the one with the highest first."""
        rows = [row for row in self._run.row_of.values() if row.get("tpot_s")]
        return [row["request_id"] for row in sorted(rows, key=lambda row: -row["tpot_s"])]

    def of_request(self, request_id: Id) -> dict[str, float]:
        """Seconds by part of PARTS, which add up to the time between the tokens; empty without two tokens."""
        return self._seconds([request_id]) if self._run.row_of.get(request_id, {}).get("tpot_s") else {}

    @cached_property
    def of_run(self) -> dict[str, float]:
        """The request-seconds of all requests, by part."""
        return self._seconds(self._ids)

    @cached_property
    def of_slowest(self) -> dict[str, float]:
        """The request-seconds of the SLOWEST_SHARE with the highest TPOT, by part."""
        return self._seconds(self._ids[: round(len(self._ids) * SLOWEST_SHARE) or 1])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"seconds": self.of_run, "shares": shares(self.of_run), "shares_of_slowest": shares(self.of_slowest)}

    def _seconds(self, request_ids: Sequence[Id]) -> dict[str, float]:
        between_s = np.array([self._between_s(request_id) for request_id in request_ids])
        spans = [
            (index, span.first, span.last + 1)
            for index, request_id in enumerate(request_ids)
            for span in self._run.spans.get(request_id, ())
            if span.phase == "generation"
        ]
        owner, first, end = np.array(spans, np.int64).reshape(-1, 3).T

        def summed(cumulated_s: Floats) -> Floats:
            """The sum over the iterations in which each request generates."""
            sums: Floats = np.bincount(owner, cumulated_s[end] - cumulated_s[first], len(request_ids)).astype(float)
            return sums

        generating_s = np.minimum(summed(self._done_s), between_s)
        device_s = np.minimum(summed(self._device_s), generating_s)
        prompts_s = np.minimum(summed(self._prompts_s), device_s)
        return {
            TOKENS: float((device_s - prompts_s).sum()),
            PROMPTS: float(prompts_s.sum()),
            HOST: float((generating_s - device_s).sum()),
            HELD: float((between_s - generating_s).sum()),
        }

    def _between_s(self, request_id: Id) -> float:
        row = self._run.row_of[request_id]
        return float(row["e2e_s"] - row["ttft_s"])


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Each part as a share of their sum."""
    total = sum(seconds.values()) or 1.0
    return {part: spent / total for part, spent in seconds.items()}


def _cumulated(values: Floats) -> Floats:
    """The sum of the values before each position, and of all."""
    return np.concatenate(([0.0], values.cumsum()))
