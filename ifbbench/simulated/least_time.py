"""A lower bound of the device time of given work, however it is divided into iterations."""

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import cached_property

from ifbbench.clock import NANOSECONDS
from ifbbench.simulated.cost_model import EXPERT_ROWS, CostModel
from ifbbench.simulated.step_work import StepWork

ROUNDING_NS = 0.5
ALL_REDUCES = "all-reduces"
OF_EXPERTS = ("expert gate and up product", "expert down product", EXPERT_ROWS)


class LeastTime:
    """The bound for one cost model.

    The time of most operations is a convex function of the number of tokens (or outputs), so that iterations of equal
    size cost least. How many cost least is searched for: a further one reads the weights again, but activations of
    fewer tokens fit the cache. All-reduces choose the quicker of two algorithms, and the products of experts read more
    weights the more experts are hit: the time a token of these never grows with the number of tokens, so that together
    they take at least as long as all tokens in one iteration. Times of attention are proportional to its work. With
    pipeline parallelism a time is that of all stages together.
    """

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model
        self._times: dict[int, tuple[float, float]] = {}
        self._known: dict[tuple[int, int, int], float] = {}

    @cached_property
    def _falling(self) -> frozenset[str]:
        """Operations whose time a token never grows with the number of tokens."""
        return frozenset((ALL_REDUCES, *OF_EXPERTS))

    def least_ns(self, work: StepWork, min_iterations: int) -> float:
        """Nanoseconds of all iterations that do `work` together, if at least so many have outputs."""
        model, key = self._cost_model, (work.num_tokens, work.outputs, min_iterations)
        if key not in self._known:  # many requests have the same lengths, and only attention depends on more
            self._known[key] = self._least_without_attention(*key)
        least = self._known[key]
        least += NANOSECONDS * sum(one.seconds for one in model.of_attention(work))
        if work.context_tokens:
            least += model.hardware.constants.context_s * NANOSECONDS
        return max(least, 0.0)

    def _least_without_attention(self, tokens: int, outputs: int, min_iterations: int) -> float:
        def of_tokens(iterations: int) -> float:
            return iterations * (_interpolated(self._convex_ns, tokens / iterations) - ROUNDING_NS)

        # The first number of iterations from which one more costs more. Each has a token at least.
        range_of = range(min_iterations, max(min_iterations, tokens))
        best = bisect_left(range_of, 0.0, key=lambda number: of_tokens(number + 1) - of_tokens(number))
        least = of_tokens(min_iterations + best) + self._times_ns(tokens)[1]
        if outputs:
            least += min_iterations * _interpolated(self._outputs_ns, outputs / min_iterations)
        return least

    def _convex_ns(self, tokens: int) -> float:
        return self._times_ns(tokens)[0]

    def _times_ns(self, tokens: int) -> tuple[float, float]:
        """Times of the operations on all tokens: of those that are convex, and of those whose time a token falls."""
        if tokens not in self._times:
            operations = self._cost_model.of_tokens(tokens)
            falling = NANOSECONDS * sum(one.seconds for one in operations if one.name in self._falling)
            convex = NANOSECONDS * sum(one.seconds for one in operations if one.name not in self._falling)
            self._times[tokens] = convex, falling
        return self._times[tokens]

    def _outputs_ns(self, outputs: int) -> float:
        return NANOSECONDS * sum(operation.seconds for operation in self._cost_model.of_outputs(outputs))


def _interpolated(time_of: Callable[[int], float], number: float) -> float:
    """The time of a number of tokens between two whole ones, on the line between theirs."""
    if number <= 1:
        return time_of(1)
    low = math.floor(number)
    return time_of(low) + (number - low) * (time_of(low + 1) - time_of(low)) if number > low else time_of(low)
