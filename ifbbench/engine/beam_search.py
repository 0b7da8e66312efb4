"""Beam search of one request, by the rule of `transformers` (`GenerationMixin._beam_search`).

Each step takes the best continuations over all running beams. Those that end complete a beam if they are among the best
`beam_width`; the best that do not end are the beams of the next step. Complete beams are ordered by their score,
log-probability / length ** length_penalty.
"""

from dataclasses import dataclass

import numpy as np

from ifbbench.engine.arrays import BoolArray, FloatArray, IntArray
from ifbbench.engine.sampling_params import EarlyStopping, SamplingParams, StopConditions

# The score of a beam that pads too few continuations. It is finite, so that sums with it stay ordered, and so low that
# any score below half of it descends from such a dead beam.
DEAD = np.float32(-1e9)
DEAD_BELOW = DEAD / 2

# Range of a score's divisor: an extreme length penalty must give neither an overflow nor a division by zero.
SMALLEST_DIVISOR, LARGEST_DIVISOR = 1e-100, 1e100


@dataclass(frozen=True, slots=True)
class FinalBeam:
    """One beam of the result. Arrays are [output length].

    tokens: the end token or stop sequence included.
    log_probs: log-probability of each token.
    path: the beam, among the inputs of its step, from which each token was chosen; 0 for the first.
    score: cumulative log-probability / output length ** length_penalty.
    """

    tokens: IntArray
    log_probs: FloatArray
    path: IntArray
    score: float

    @property
    def cumulative_log_prob(self) -> float:
        return float(self.log_probs.sum(dtype=np.float64))


@dataclass(frozen=True, slots=True)
class _Beams:
    """The running beams after a step, best first; all are [beams].

    parents: index of each beam's predecessor among the beams of the step before.
    scores: cumulative log-probabilities.
    """

    tokens: IntArray
    parents: IntArray
    scores: FloatArray

    def select(self, chosen: BoolArray) -> "_Beams":
        """The beams where `chosen` [beams] is true, in their order."""
        return _Beams(self.tokens[chosen], self.parents[chosen], self.scores[chosen])

    @property
    def alive(self) -> BoolArray:
        """[beams], whether each has a log-probability that is neither a dead beam's, nor minus infinity or NaN."""
        return self.scores > DEAD_BELOW


@dataclass(frozen=True, slots=True)
class _Ending:
    """The last token of an output of `length` tokens, which continues the beam `parent`."""

    length: int
    token: int
    parent: int
    cumulative_log_prob: float
    score: float


class BeamSearch:
    """The beams of one request. `advance` takes one step; `final` gives the result.

    max_len: maximum output length, at which EarlyStopping.NEVER scores running beams.
    """

    def __init__(self, beam_width: int, sampling: SamplingParams, stop: StopConditions, max_len: int) -> None:
        self.beam_width = beam_width
        self.over = False
        self._sampling = sampling
        self._stop = stop
        self._max_len = max_len
        # Item n: the beams after n tokens, item 0 the prompt. The parents point from each item into the one before.
        self._steps = [_Beams(np.empty(0, np.int32), np.empty(0, np.int32), np.zeros(1, np.float32))]
        self._complete: list[_Ending] = []  # at most beam_width, best first

    @staticmethod
    def num_candidates(beam_width: int, stop: StopConditions) -> int:
        """How many candidates `advance` needs so that at least `beam_width` of them do not end: each end token and each
        stop sequence ends at most one continuation of a beam."""
        return max(2, 1 + len(stop.end_tokens) + len(stop.stop_sequences)) * beam_width

    @property
    def num_tokens(self) -> int:
        return len(self._steps) - 1

    @property
    def tokens(self) -> IntArray:
        """[beams], the newest token of each running beam; empty before the first step."""
        return self._steps[-1].tokens

    @property
    def parents(self) -> IntArray:
        """[beams], the beam of the step before that each running beam continues; empty before the first step."""
        return self._steps[-1].parents

    @property
    def scores(self) -> FloatArray:
        """[beams], cumulative log-probability of each running beam; before the first step the prompt's [1], of 0."""
        return self._steps[-1].scores

    def advance(self, tokens: IntArray, beams: IntArray, scores: FloatArray, *, is_last: bool) -> bool:
        """Choose the next beams from the best continuations, and return whether the search is over.

        tokens, beams, scores: [candidates], best first, at least one: the best continuations over all running beams,
        or of the prompt (beams all 0) in the first step. Scores are cumulative log-probabilities. If fewer than
        `beam_width` can continue, dead beams with a score of -1e9 are added; their continuations never complete.
        is_last: these tokens complete the maximum output length.
        """
        candidates = _Beams(tokens.astype(np.int32), beams.astype(np.int32), scores.astype(np.float32))
        alive = candidates.alive
        ends = self._ends(candidates) | is_last
        # Candidates after the best beam_width may replace those that end, but do not complete a beam themselves.
        among_best = np.arange(len(tokens)) < self.beam_width
        self._steps.append(self._fill_up(candidates.select(alive & ~ends), candidates))
        self._complete = self._best_with(self._endings(candidates.select(alive & ends & among_best)))
        self.over = not self._can_improve()
        return self.over

    def final(self) -> list[FinalBeam]:
        """The best `beam_width` beams, or as many as exist, best score first.

        Of a search that is stopped early, running beams count as complete at their present length.
        """
        best = self._complete
        if not self.over and self.num_tokens > 0:
            running = self._steps[-1]
            best = self._best_with(self._endings(running.select(running.alive)))
        return [self._trace_back(ending) for ending in best]

    def _ends(self, candidates: _Beams) -> BoolArray:
        """[candidates], whether each is ended by an end token or a stop sequence."""
        ends = np.isin(candidates.tokens, self._stop.end_tokens)
        for sequence in self._stop.stop_sequences:
            ends |= self._ends_with(candidates, sequence)
        return ends

    def _ends_with(self, candidates: _Beams, sequence: tuple[int, ...]) -> BoolArray:
        """[candidates], whether the newest tokens of each are `sequence`."""
        if len(sequence) > self.num_tokens + 1:
            return np.zeros(len(candidates.tokens), np.bool_)
        matches: BoolArray = candidates.tokens == sequence[-1]
        beams = candidates.parents
        for token, step in zip(reversed(sequence[:-1]), reversed(self._steps), strict=False):
            matches &= step.tokens[beams] == token
            beams = step.parents[beams]
        return matches

    def _fill_up(self, unfinished: _Beams, candidates: _Beams) -> _Beams:
        """The best `beam_width` unfinished candidates, with dead beams after them if there are too few."""
        missing = max(0, self.beam_width - len(unfinished.tokens))
        return _Beams(
            np.append(unfinished.tokens[: self.beam_width], np.repeat(candidates.tokens[:1], missing)),
            np.append(unfinished.parents[: self.beam_width], np.repeat(candidates.parents[:1], missing)),
            np.append(unfinished.scores[: self.beam_width], np.repeat(DEAD, missing)),
        )

    def _endings(self, beams: _Beams) -> list[_Ending]:
        length = self.num_tokens
        columns = zip(beams.tokens.tolist(), beams.parents.tolist(), beams.scores.tolist(), strict=True)
        return [_Ending(length, *column, self._score(column[-1], length)) for column in columns]

    def _score(self, log_prob: float, length: int) -> float:
        with np.errstate(over="ignore", under="ignore"):
            divisor = float(np.float64(length) ** self._sampling.length_penalty)
        return log_prob / min(max(divisor, SMALLEST_DIVISOR), LARGEST_DIVISOR)

    def _best_with(self, endings: list[_Ending]) -> list[_Ending]:
        """The best `beam_width` of the complete beams and `endings`; of equal scores the first complete one."""
        merged = sorted(self._complete + endings, key=lambda ending: ending.score, reverse=True)
        return merged[: self.beam_width]

    def _can_improve(self) -> bool:
        """Whether a running beam may still become one of the best."""
        running = self._steps[-1]
        if not running.alive.any():
            return False
        if len(self._complete) < self.beam_width:
            return True
        if self._sampling.early_stopping is EarlyStopping.ALWAYS:
            return False
        scored_at_end = self._sampling.early_stopping is EarlyStopping.NEVER and self._sampling.length_penalty > 0
        length = self._max_len if scored_at_end else self.num_tokens
        return self._score(float(running.scores[0]), length) > self._complete[-1].score

    def _trace_back(self, ending: _Ending) -> FinalBeam:
        """The whole output that ends with `ending`, read backwards along the parents."""
        tokens, path = np.empty(ending.length, np.int32), np.empty(ending.length, np.int32)
        cumulative = np.zeros(ending.length + 1)
        tokens[-1], path[-1], cumulative[-1] = ending.token, ending.parent, ending.cumulative_log_prob
        for position in range(ending.length - 2, -1, -1):
            beam, step = path[position + 1], self._steps[position + 1]
            tokens[position], path[position] = step.tokens[beam], step.parents[beam]
            cumulative[position + 1] = step.scores[beam]
        return FinalBeam(tokens, np.diff(cumulative).astype(np.float32), path, ending.score)
