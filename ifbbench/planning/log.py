"""A log as calibration uses it: measured iterations and load tests, and the work of a batch from its counts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ifbbench.planning.fit import Observation
from ifbbench.planning.measure import Sample
from ifbbench.simulation.step_work import StepWork


@dataclass(slots=True)
class Log:
    """What was read from one file or run directory.

    samples: iterations, and whether the seconds of each include the host's time. observations: of several iterations
    together. facts: what the log says about model and engine, by name. overlaps: iterations were submitted before the
    one before had ended. notes: what limits its use, in sentences.
    """

    path: Path
    format: str = ""
    sha256: str = ""
    samples: list[tuple[Sample, bool]] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    overlaps: bool = False
    notes: list[str] = field(default_factory=list)


class BatchCounts(NamedTuple):
    """Counts of a batch. cached_tokens: tokens of the context requests that were computed before."""

    context_requests: int
    context_tokens: int
    generation_requests: int
    cached_tokens: int = 0


class KvTracker:
    """The work of successive batches, of which only counts are known: keys that generation reads are followed from the
    tokens that requests have computed. Requests that end are taken to be as long as the mean of all."""

    def __init__(self) -> None:
        self._requests = 0
        self._tokens = 0.0

    def correct(self, tokens: int) -> None:
        """The requests of the last batch have `tokens` keys in all."""
        self._tokens = float(tokens)

    def work(self, batch: BatchCounts, kv_tokens: int | None = None) -> StepWork:
        """The work of the next batch. kv_tokens: keys that its generation requests read, where known.

        Prompts are equally long and complete; those in chunks count as if they had begun at `cached_tokens`.
        """
        contexts, tokens, generating, cached = batch
        if kv_tokens is None:
            mean = self._tokens / self._requests if self._requests else 0.0
            kv_tokens = round(min(generating, self._requests) * mean) + generating
        self._requests = contexts + generating
        self._tokens = float(kv_tokens + tokens + cached)
        pairs = 0
        if contexts:
            length, start = tokens / contexts, cached / contexts
            pairs = round(contexts * (length * start + length * (length + 1) / 2))
        return StepWork(tokens, contexts, pairs, tokens + cached, generating, kv_tokens, generating + contexts)
