"""The table of the counters that change in every iteration, one row for each active request, and the array types.

With flat arrays, an iteration in which 500 requests each generate a token is a few additions. The row of a request is
also its sequence slot in the executor and in the KV cache.
"""

from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int32]
Int64Array: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
Rows: TypeAlias = Int64Array  # indices into the table

NO_ROWS: Rows = np.zeros(0, np.int64)
_NO_TOKEN = -1
_INITIAL_OUTPUT_COLUMNS = 64
_INITIAL_END_TOKEN_COLUMNS = 2


class RequestTable:
    """Counters and output tokens of all active requests. Arrays are [rows] unless stated otherwise.

    generated: output tokens scheduled since the prompt (or the resumed prompt) was complete.
    confirmed: how many of them the executor has returned. The two differ while an iteration is in flight.
    reserved: maximum of `generated`.
    stop_after: value of `confirmed` at which the request has all its output tokens.
    draft_tokens: draft tokens of the next generation step.
    step_tokens: tokens that a generation step adds to the batch: beam width + draft tokens.
    any_wide_steps: whether `step_tokens` was ever not 1.
    original_prompt_len: tokens of the prompt as it arrived.
    joined: output tokens that pauses have joined to the prompt.
    cached_before_pause: tokens of the sequence with keys and values computed before it was paused.
    any_paused: whether any request was ever paused.
    end_tokens: [rows, maximum of any request], token ids that end the request early, padded with -1.
    makes_tokens: whether the executor returns token ids; otherwise output tokens are symbolic.
    is_special: whether a new token needs more than to be stored (see `Request.is_special`).
    """

    def __init__(self, rows: int) -> None:
        self.generated = np.zeros(rows, np.int64)
        self.confirmed = np.zeros(rows, np.int64)
        self.reserved = np.zeros(rows, np.int64)
        self.stop_after = np.zeros(rows, np.int64)
        self.draft_tokens = np.zeros(rows, np.int64)
        self.step_tokens = np.ones(rows, np.int64)
        self.any_wide_steps = False
        self.original_prompt_len = np.zeros(rows, np.int64)
        self.joined = np.zeros(rows, np.int64)
        self.cached_before_pause = np.zeros(rows, np.int64)
        self.any_paused = False
        # Ids that users give need not fit 32 bits.
        self.end_tokens = np.full((rows, _INITIAL_END_TOKEN_COLUMNS), _NO_TOKEN, np.int64)
        self.any_end_tokens = False
        self.is_special = np.zeros(rows, np.bool_)
        self.num_special = 0
        self.makes_tokens = False
        self._outputs = np.zeros((rows, _INITIAL_OUTPUT_COLUMNS), np.int32)
        self._free_rows = list(range(rows - 1, -1, -1))

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def take_row(self, is_special: bool = False) -> int:
        """A free row. IndexError if there is none, which admission prevents."""
        row = self._free_rows.pop()
        self.generated[row] = self.confirmed[row] = 0
        self.is_special[row] = is_special
        self.num_special += is_special
        return row

    def return_row(self, row: int) -> None:
        self.num_special -= int(self.is_special[row])
        self._free_rows.append(row)

    def write_outputs(self, rows: Rows, columns: Int64Array, tokens: IntArray) -> None:
        """Store one output token for each of `rows`, at the output position in `columns`."""
        if len(columns) and (last := int(columns.max())) >= self._outputs.shape[1]:
            self._outputs = _widened(self._outputs, max(last + 1, 2 * self._outputs.shape[1]), 0)
        self._outputs[rows, columns] = tokens

    def outputs(self, row: int, start: int, stop: int) -> IntArray:
        """Output tokens `start` to `stop - 1` of the request in `row`, a copy."""
        return self._outputs[row, start:stop].copy()

    def set_end_tokens(self, row: int, end_tokens: tuple[int, ...]) -> None:
        if not (end_tokens or self.any_end_tokens):
            return
        if len(end_tokens) > self.end_tokens.shape[1]:
            self.end_tokens = _widened(self.end_tokens, len(end_tokens), _NO_TOKEN)
        self.end_tokens[row] = _NO_TOKEN
        self.end_tokens[row, : len(end_tokens)] = end_tokens
        self.any_end_tokens |= bool(end_tokens)


_Integer = TypeVar("_Integer", np.int32, np.int64)


def _widened(array: NDArray[_Integer], columns: int, fill: int) -> NDArray[_Integer]:
    """A copy of `array` [rows, fewer columns] with more columns."""
    wide = np.full((len(array), columns), fill, array.dtype)
    wide[:, : array.shape[1]] = array
    return wide
