"""Draft tokens in a recording: spans whose iterations yield several tokens each, and the figures of a run."""

from collections.abc import Sequence
from typing import Any

from ifbbench.engine.drafts import DraftCounts


def steps_of(first: int, last: int, extra: Sequence[tuple[int, int]]) -> list[int]:
    """Tokens of each iteration from `first` to `last`. extra: iterations with several, and how many beyond one."""
    steps = [1] * (last - first + 1)
    for iteration, more in extra:
        steps[iteration - first] += more
    return steps


def stretches_of(first: int, steps: Sequence[int], produced: int) -> list[tuple[int, int]]:
    """The last `produced` tokens of `steps`, iterations from `first` on, as [first, last] stretches of iterations with
    a token in each. Tokens that come together make several stretches, so that the gaps between them are 0."""
    again, stretches = sum(steps) - produced, list[tuple[int, int]]()
    for iteration, count in enumerate(steps, start=first):
        skipped = min(again, count)
        again -= skipped
        if count == skipped:
            continue
        if stretches and stretches[-1][1] == iteration - 1:
            stretches[-1] = (stretches[-1][0], iteration)
        else:
            stretches.append((iteration, iteration))
        stretches += [(iteration, iteration)] * (count - skipped - 1)
    return stretches


class DraftTotals:
    """The draft tokens of a run."""

    def __init__(self) -> None:
        self._drafted = self._accepted = self._steps = 0
        self._draft_s = 0.0

    def add(self, counts: DraftCounts) -> None:
        """Take in one iteration."""
        self._drafted += counts.drafted
        self._accepted += counts.accepted
        self._steps += counts.requests
        self._draft_s += counts.draft_s

    def add_totals(self, other: "DraftTotals") -> None:
        """Take in another run."""
        self._drafted += other._drafted
        self._accepted += other._accepted
        self._steps += other._steps
        self._draft_s += other._draft_s

    def figures(self) -> dict[str, Any]:
        """The entry of `summary.json`.

        acceptance_rate: share of the draft tokens that became output.
        acceptance_length: tokens that a step of a request with drafts yielded.
        draft_s: device time of the draft model, in seconds.
        """
        return {
            "draft_tokens": self._drafted,
            "accepted_tokens": self._accepted,
            "acceptance_rate": self._accepted / self._drafted if self._drafted else 0.0,
            "acceptance_length": 1 + self._accepted / self._steps if self._steps else 0.0,
            "draft_s": self._draft_s,
        }
