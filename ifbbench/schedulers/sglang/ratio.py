"""The share of their outputs that running requests are expected to need (`NewTokenRatioTracker` of SGLang 0.5.23)."""

from collections.abc import Iterable

INITIAL, MINIMUM_FACTOR, DECAY_STEPS = 0.7, 0.14, 600
# Outputs that each request may have after a retraction before the next one (SGLANG_RETRACT_DECODE_STEPS).
RETRACT_STEPS = 20


class NewTokenRatio:
    """Falls with each decode step and rises when requests had to be retracted.

    current: the present share.
    """

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(INITIAL * conservativeness, 1.0)
        self._minimum = min(self._initial * MINIMUM_FACTOR, 1.0)
        self._decay = (self._initial - self._minimum) / DECAY_STEPS
        self.current = self._initial

    def decay(self, steps: int = 1) -> None:
        """So many decode steps had room."""
        for _ in range(steps):
            if self.current == self._minimum:
                return
            self.current = max(self.current - self._decay, self._minimum)

    def retracted(self, remaining: Iterable[tuple[int, int]]) -> None:
        """Requests were retracted; (outputs, maximum of outputs) of those that remain."""
        pairs = list(remaining)
        expected = sum([outputs for outputs, _most in pairs]) + RETRACT_STEPS * len(pairs)
        self.current = min(1.0, expected / (sum([most for _outputs, most in pairs]) + 1))

    def reset(self) -> None:
        """Nothing runs any more."""
        self.current = self._initial
