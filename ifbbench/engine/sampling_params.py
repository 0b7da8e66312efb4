"""How the tokens of a request are chosen, what of them it wants back, and what ends it."""

import math
from dataclasses import dataclass
from enum import StrEnum


class EarlyStopping(StrEnum):
    """When beam search ends before its length does (the names of `transformers`).

    ALWAYS: as soon as there are as many complete beams as wanted. HEURISTIC: when no running beam, as long as it is
    now, would beat the worst complete one. NEVER: when none could, however long it grows.
    """

    ALWAYS = "always"
    HEURISTIC = "heuristic"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Temperature 0 is greedy; top_k 0 and top_p 1.0 leave all tokens in.

    repetition_penalty: logits of tokens that the prompt or the output has already are divided by it where positive and
    multiplied where negative (Keskar et al., arXiv:1909.05858); 1.0 is none.
    length_penalty, early_stopping: of beam search. A complete beam's score is its log-probability divided by
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
        """What is wrong with the parameters, in words that name the field, or None."""
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
            return "beam search goes by plain probabilities; leave out temperature and repetition_penalty"
        return None


GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What a request wants back beside its tokens, and how. pad_id: fills up beams that are shorter than others."""

    streaming: bool = False
    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = False
    pad_id: int = 0

    @property
    def returns_numbers(self) -> bool:
        """Whether anything must be kept beside the tokens."""
        return self.return_log_probs or self.return_context_logits or self.return_generation_logits


TOKENS_ONLY = OutputOptions()


@dataclass(frozen=True, slots=True)
class StopConditions:
    """What ends a request before its length does. The token or sequence that ended it is part of the output.

    end_tokens: ids that end it wherever they come. stop_sequences: token ids in a row, within the output alone.
    """

    end_tokens: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()


NO_STOP_CONDITIONS = StopConditions()
