"""From samples to points: what iterations of one kind take, whatever else the machine did meanwhile."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from ifbbench.calibration.measure import Sample
from ifbbench.simulation.step_work import StepWork

# Steps of generation whose KV lengths differ by less than this are taken together.
KV_TOKENS_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class Point:
    """The median of samples with the same work. seconds: of the whole iteration; loop_s: see Sample."""

    work: StepWork
    seconds: float
    loop_s: float
    samples: int

    @property
    def kind(self) -> str:
        """Which phases its batch has."""
        if not self.work.generation_tokens:
            return "context"
        return "mixed" if self.work.context_tokens else "generation"

    @property
    def num_requests(self) -> int:
        """Of the batch; each generation request has one token."""
        return self.work.context_requests + self.work.generation_tokens


def points_of(samples: Iterable[Sample]) -> list[Point]:
    """Samples of like work together: equal but for a few tokens in the KV cache of generation requests."""
    alike: defaultdict[tuple[int, ...], list[Sample]] = defaultdict(list)
    for sample in samples:
        work = sample.work
        mean_kv_len = work.generation_kv_tokens // max(work.generation_tokens, 1)
        alike[
            work.context_tokens, work.context_requests, work.attention_pairs, work.outputs, work.generation_tokens,
            mean_kv_len // KV_TOKENS_TOGETHER,
        ].append(sample)  # fmt: skip
    return [_point(group) for group in alike.values()]


def _point(group: list[Sample]) -> Point:
    by_kv_tokens = sorted(group, key=lambda sample: sample.work.generation_kv_tokens)
    return Point(
        work=by_kv_tokens[len(group) // 2].work,
        seconds=median(sample.seconds for sample in group),
        loop_s=median(sample.loop_s for sample in group),
        samples=len(group),
    )
