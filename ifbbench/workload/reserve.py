"""How many tokens a request reserves: the difference between `max_new_tokens` and `output_len`."""

from array import array
from dataclasses import replace
from fractions import Fraction
from functools import cache
from math import ceil

import numpy as np

from ifbbench.errors import InputError
from ifbbench.workload.columns import LENGTH, Integers, integers
from ifbbench.workload.fields import MAX_LENGTH
from ifbbench.workload.trace import TraceRequest

EXPECTED = "trace, actual, factor:F (a number above 0) or fixed:N (an integer of at least 1)"


class Reserve:
    """A rule such as `trace`, `actual`, `factor:1.5` or `fixed:256`; InputError if the text is none."""

    def __init__(self, text: str) -> None:
        self._kind, _, amount = text.partition(":")
        try:
            if self._kind == "factor":
                self._factor = Fraction(amount)  # exact: ceil(1.1 * 10) is 11, as a reader expects, not 12
            elif self._kind == "fixed":
                self._factor = Fraction(int(amount))
            elif text in ("trace", "actual"):
                self._factor = Fraction(1)
            else:
                raise ValueError(text)
        except (ValueError, ZeroDivisionError):
            raise _invalid(text) from None
        if not 0 < self._factor <= MAX_LENGTH:
            raise _invalid(text)

    def tokens(self, max_new_tokens: int, output_len: int) -> int:
        """What a request of these lengths reserves, at least 1."""
        if self._kind == "trace":
            return max_new_tokens
        if self._kind == "fixed":
            return int(self._factor)
        return min(ceil(self._factor * output_len), MAX_LENGTH)

    def apply(self, request: TraceRequest) -> TraceRequest:
        """`request` with its reservation; it makes no more tokens than it reserved."""
        reserved = self.tokens(request.max_new_tokens, request.output_len)
        return replace(request, max_new_tokens=reserved, output_len=min(request.output_len, reserved))

    def columns(self, max_new_tokens: Integers, output_len: Integers) -> tuple[Integers, Integers]:
        """`apply` to many requests: what they reserve, and what they make."""
        if self._kind == "trace":
            reserved = max_new_tokens
        else:
            # Lengths repeat, and exact arithmetic takes its time.
            once = cache(lambda length: self.tokens(0, length))
            reserved = array(LENGTH, map(once, output_len))
        return reserved, integers(np.minimum(reserved, output_len))


def _invalid(text: str) -> InputError:
    return InputError(f"reserve {text!r} is not valid; expected {EXPECTED}.")
