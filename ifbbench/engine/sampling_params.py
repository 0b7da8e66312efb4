"""How the tokens of a request are chosen, what ends them, and which numbers are returned with them."""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.active import FloatArray, Int64Array, IntArray


class EarlyStopping(StrEnum):
    """When beam search ends before its maximum length (the names of `transformers`).

    ALWAYS: as soon as `beam_width` beams are complete. HEURISTIC: when no running beam, at its present length, would
    score better than the worst complete one. NEVER: when none could at any length.
    """

    ALWAYS = "always"
    HEURISTIC = "heuristic"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Temperature 0 is greedy; top_k 0 and top_p 1.0 exclude no token.

    repetition_penalty: logits of tokens that are in the prompt or the output are divided by it if positive and
        multiplied if negative (Keskar et al., arXiv:1909.05858); 1.0 changes nothing.
    length_penalty, early_stopping: of beam search. The score of a complete beam is its log-probability divided by
        length ** length_penalty.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC

    def problem(self, beam_width: int = 1) -> str | None:
        """An error message that names the invalid field, or None."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            return f"temperature {self.temperature}: expected a number of at least 0"
        if self.top_k < 0:
            return f"top_k {self.top_k}: expected an integer of at least 0"
        if not 0 < self.top_p <= 1:
            return f"top_p {self.top_p}: expected a number above 0 and at most 1"
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            return f"repetition_penalty {self.repetition_penalty}: expected a number above 0"
        if not math.isfinite(self.length_penalty):
            return f"length_penalty {self.length_penalty}: expected a finite number"
        if beam_width > 1 and (self.temperature > 0 or self.repetition_penalty != 1.0):
            return "beam search uses plain probabilities; leave out temperature and repetition_penalty"
        return None


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What a request returns beside its tokens, and how; and what it brings beside its prompt.

    pad_id: pads beams that are shorter than others. draft_input_ids: int32 [draft tokens], a guess of its first output
    tokens. draft_logits: float32 [draft tokens, vocabulary], from which the guess was drawn.
    """

    streaming: bool = False
    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = False
    pad_id: int = 0
    draft_input_ids: IntArray | None = None
    draft_logits: FloatArray | None = None

    @property
    def returns_numbers(self) -> bool:
        return self.return_log_probs or self.return_context_logits or self.return_generation_logits


@dataclass(frozen=True, slots=True)
class StopConditions:
    """What ends a request before its maximum length. The token or sequence that ended it is part of the output.

    end_tokens: ids that end it at any position. stop_sequences: sequences of ids, matched within the output only.
    """

    end_tokens: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()


GREEDY = SamplingParams()
TOKENS_ONLY = OutputOptions()
NO_STOP_CONDITIONS = StopConditions()


class OutputNumbers:
    """The logits and log-probabilities that a request returns, kept by position until its response takes them.

    A resumed request that computes a position again overwrites it. Prompt positions beyond `prompt_len` (generated
    tokens that a pause joined to the prompt) are dropped.
    """

    def __init__(self, prompt_len: int) -> None:
        # [prompt length, vocabulary], or None.
        self.context_logits: FloatArray | None = None
        self._prompt_len = prompt_len
        self._log_probs: list[float] = []
        self._generation: list[FloatArray] = []

    def add_context(self, start: int, logits: FloatArray) -> None:
        """Logits [chunk, vocabulary] of the prompt positions from `start` on."""
        if self.context_logits is None:
            self.context_logits = np.zeros((self._prompt_len, logits.shape[1]), np.float32)
        stop = min(start + len(logits), self._prompt_len)
        if start < stop:
            self.context_logits[start:stop] = logits[: stop - start]

    def add_log_prob(self, position: int, log_prob: float) -> None:
        """Log-probability of the output token at `position`, at most one position behind the last."""
        self._log_probs[position:] = [log_prob]

    def add_generation(self, position: int, logits: FloatArray) -> None:
        """Logits [beams, vocabulary] from which the output token at `position` was chosen; positions as above."""
        self._generation[position:] = [logits]

    @property
    def cumulative_log_prob(self) -> float:
        return float(np.sum(self._log_probs, dtype=np.float64))

    def log_probs(self, start: int = 0) -> FloatArray:
        """[output tokens from `start` on]."""
        return np.array(self._log_probs[start:], np.float32)

    def generation_logits(self, start: int = 0, path: IntArray | None = None) -> FloatArray | None:
        """[output tokens from `start` on, vocabulary], with beams those of the beams in `path` [output tokens]; None if
        there are none."""
        if not self._generation:
            return None
        steps = self._generation[start:] if path is None else self._generation[: len(path)]
        beams = np.zeros(len(steps), np.int32) if path is None else path
        chosen = [logits[beam] for logits, beam in zip(steps, beams, strict=True)]
        return np.array(chosen, np.float32).reshape(len(chosen), self._generation[0].shape[1])


def uniform_numbers(seeds: NDArray[np.uint64], counters: Int64Array) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, counter), [rows]; equal pairs give equal numbers.

    Number `counter` of a SplitMix64 generator (Steele, Lea and Flood, OOPSLA 2014) that starts at the mixed seed; 53
    bits are kept.
    """
    gamma = np.uint64(0x9E37_79B9_7F4A_7C15)
    state = _mix(seeds + gamma) + (counters.astype(np.uint64) + np.uint64(1)) * gamma
    numbers: NDArray[np.float64] = np.ldexp((_mix(state) >> np.uint64(11)).astype(np.float64), -53)
    return numbers


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return values ^ (values >> np.uint64(31))
