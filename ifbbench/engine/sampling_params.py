"""How the tokens of a request are chosen, what ends them, and what the request brings and returns beside them."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.arrays import FloatArray, Int64Array, IntArray


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
    presence_penalty, frequency_penalty: subtracted from the logits of tokens that are in the prompt or the output:
        the first once, the second as often as the token occurs.
    min_length: no end token (of StopConditions) is chosen before so many output tokens.
    bad_words: sequences of token ids that the output never contains. As in `transformers`, a word may begin in the
        prompt, and a word that is one end token is ignored.
    embedding_bias: [vocabulary], is added to the logits.
    length_penalty, early_stopping: rules of beam search. The score of a complete beam is its log-probability divided by
        length ** length_penalty. Beam search takes the most likely tokens: it has no top_k and top_p, and its
        temperature divides the logits; 0 is 1.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_length: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    embedding_bias: FloatArray | None = field(default=None, compare=False)

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens of the sequence change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether the model's logits are changed before a token is chosen."""
        return self.has_penalties or self.min_length > 0 or bool(self.bad_words) or self.embedding_bias is not None

    def problem(self, vocab_size: int | None = None) -> str | None:
        """An error message that names the invalid field, or None."""
        for name, is_valid, expected in (
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a number of at least 0"),
            ("top_k", self.top_k >= 0, "an integer of at least 0"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            (
                "repetition_penalty",
                math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
                "a number above 0",
            ),
            ("length_penalty", math.isfinite(self.length_penalty), "a finite number"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "a finite number"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number"),
            ("min_length", self.min_length >= 0, "an integer of at least 0"),
        ):
            if not is_valid:
                return f"{name} {getattr(self, name)}: expected {expected}"
        if self.bad_words and vocab_size is not None:
            ids = [token for word in self.bad_words for token in word]
            if outside := [token for token in ids if not 0 <= token < vocab_size]:
                return f"bad_words: token id {outside[0]} is not in the vocabulary; expected 0 to {vocab_size - 1}"
        bias = self.embedding_bias
        if bias is not None and vocab_size is not None and len(bias) != vocab_size:
            return f"embedding_bias: {len(bias)} numbers; expected {vocab_size}, one for each token id"
        return None


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What a request returns beside its tokens, and how; and the arrays that only some requests bring.

    pad_id: pads beams that are shorter than others.
    prompt_embedding_table: float [virtual tokens, hidden size]. Prompt ids from the size of the vocabulary on are
        virtual tokens: id vocabulary + n has the embedding in row n.
    lora_weights, lora_config: an adapter as in TensorRT-LLM's documentation: float [modules and layers, values], and
        int32 [modules and layers, 3] of module id, layer and rank.
    draft_input_ids: int32 [draft tokens].
    draft_logits: float32 [draft tokens, vocabulary].
    """

    streaming: bool = False
    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = False
    pad_id: int = 0
    prompt_embedding_table: FloatArray | None = field(default=None, compare=False)
    lora_weights: FloatArray | None = field(default=None, compare=False)
    lora_config: IntArray | None = field(default=None, compare=False)
    draft_input_ids: IntArray | None = field(default=None, compare=False)
    draft_logits: FloatArray | None = field(default=None, compare=False)

    @property
    def num_virtual_tokens(self) -> int:
        return 0 if self.prompt_embedding_table is None else len(self.prompt_embedding_table)

    def problem(self, vocab_size: int, hidden_size: int | None) -> str | None:
        """An error message that names an array that does not fit the model, or None."""
        table, draft, logits = self.prompt_embedding_table, self.draft_input_ids, self.draft_logits
        if table is not None and hidden_size is not None and table.shape[1] != hidden_size:
            found = f"prompt_embedding_table: rows of {table.shape[1]} numbers"
            return f"{found}; expected {hidden_size}, the hidden size of the model"
        if draft is not None and len(draft) and not 0 <= int(draft.min()) <= int(draft.max()) < vocab_size:
            outside = next(token for token in draft.tolist() if not 0 <= token < vocab_size)
            return f"draft_input_ids: token id {outside} is not in the vocabulary; expected 0 to {vocab_size - 1}"
        if logits is not None and logits.shape[1] != vocab_size:
            return f"draft_logits: rows of {logits.shape[1]} numbers; expected {vocab_size}, the size of the vocabulary"
        return None


@dataclass(frozen=True, slots=True)
class StopConditions:
    """What ends a request before its maximum length. The token or sequence that ended it is part of the output.

    end_tokens: ids that end it at any position.
    stop_sequences: sequences of ids, matched within the output only.
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
