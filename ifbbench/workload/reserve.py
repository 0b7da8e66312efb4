"""How many tokens a request reserves: the difference between `max_new_tokens` and `output_len`."""

from dataclasses import replace
from fractions import Fraction
from math import ceil

from ifbbench.errors import InputError
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

    def tokens(self, request: TraceRequest) -> int:
        """What `request` reserves, at least 1."""
        if self._kind == "trace":
            return request.max_new_tokens
        if self._kind == "fixed":
            return int(self._factor)
        return min(ceil(self._factor * request.output_len), MAX_LENGTH)

    def apply(self, request: TraceRequest) -> TraceRequest:
        """`request` with its reservation; it makes no more tokens than it reserved."""
        reserved = self.tokens(request)
        return replace(request, max_new_tokens=reserved, output_len=min(request.output_len, reserved))


def _invalid(text: str) -> InputError:
    return InputError(f"reserve {text!r} is not valid; expected {EXPECTED}.")
