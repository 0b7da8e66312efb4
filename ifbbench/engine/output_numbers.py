"""The numbers that a request wants back beside its tokens: logits and log-probabilities, by position."""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]


class OutputNumbers:
    """Keeps what the executor answers until the response takes it.

    Everything lies by position, so a resume that computes a position again writes the same place again, and chunks may
    come in any cut. Prompt positions beyond `prompt_len` (generated tokens that a pause joined to it) are dropped.
    """

    def __init__(self, prompt_len: int) -> None:
        self._prompt_len = prompt_len
        self._context: FloatArray | None = None
        self._log_probs: list[float] = []
        self._generation: list[FloatArray] = []

    def add_context(self, start: int, logits: FloatArray) -> None:
        """Logits [chunk, vocabulary] of the prompt positions from `start` on."""
        if self._context is None:
            self._context = np.zeros((self._prompt_len, logits.shape[1]), np.float32)
        stop = min(start + len(logits), self._prompt_len)
        if start < stop:
            self._context[start:stop] = logits[: stop - start]

    def add_log_prob(self, position: int, log_prob: float) -> None:
        """Log-probability of the output token at `position`; positions come without gaps."""
        self._log_probs[position:] = [log_prob]

    def add_generation(self, position: int, logits: FloatArray) -> None:
        """Logits [beams, vocabulary] that the output token at `position` was chosen by; without gaps."""
        self._generation[position:] = [logits]

    @property
    def context_logits(self) -> FloatArray | None:
        """[prompt length, vocabulary], or None."""
        return self._context

    @property
    def cumulative_log_prob(self) -> float:
        return float(np.sum(self._log_probs, dtype=np.float64))

    def log_probs(self, start: int = 0) -> FloatArray:
        """[output tokens from `start` on]."""
        return np.array(self._log_probs[start:], np.float32)

    def generation_logits(self, start: int = 0, path: NDArray[np.int32] | None = None) -> FloatArray | None:
        """[output tokens from `start` on, vocabulary]; with beams those of the beams that `path` [output tokens] names.
        None if there are none."""
        if not self._generation:
            return None
        steps = self._generation[start:] if path is None else self._generation[: len(path)]
        beams = np.zeros(len(steps), np.int32) if path is None else path
        chosen = [logits[beam] for logits, beam in zip(steps, beams, strict=True)]
        return np.array(chosen, np.float32).reshape(len(chosen), self._generation[0].shape[1])
