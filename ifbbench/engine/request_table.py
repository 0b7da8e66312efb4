"""The table that holds the counters of all active requests, and their output tokens."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]

_NO_TOKEN = -1
_INITIAL_OUTPUT_COLUMNS = 64
_INITIAL_END_TOKEN_COLUMNS = 2


class RequestTable:
    """Counters that change every iteration, one row an active request, in flat arrays.

    An iteration in which 500 requests each make a token is then a few additions. A row is also the request's sequence
    slot in the executor.

    generated: [rows], output tokens scheduled since the prompt (or the resumed prompt) was complete.
    confirmed: [rows], how many of these the executor has answered for. The two differ while a batch is under way.
    reserved: [rows], most tokens that `generated` may reach.
    stop_after: [rows], value of `confirmed` at which the request has all its output tokens.
    draft_tokens: [rows], draft tokens of the next generation step.
    step_tokens: [rows], tokens that a generation step puts into the batch: beam width + draft tokens.
    any_wide_steps: whether that was ever another number than 1.
    original_prompt_len: [rows], tokens of the prompt that the request came with.
    joined: [rows], output tokens that pauses have joined to the prompt.
    cached_before_pause: [rows], tokens of the sequence that had been through the model when it was paused.
    end_tokens: [rows, most of any request], token ids that end the request early, filled up with -1.
    any_paused: whether any request ever was.
    makes_tokens: whether the executor does: else output tokens have no ids.
    is_special: [rows], whether each new token needs more than being written down (see `Request.is_special`).
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
        self.end_tokens = np.full((rows, _INITIAL_END_TOKEN_COLUMNS), _NO_TOKEN, np.int64)
        self.any_end_tokens = False
        self.is_special = np.zeros(rows, np.bool_)
        self.num_special = 0
        self.makes_tokens = False
        self._outputs = np.zeros((rows, _INITIAL_OUTPUT_COLUMNS), np.int32)
        self._free_rows = list(range(rows - 1, -1, -1))

    @property
    def rows(self) -> int:
        return len(self.generated)

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def take_row(self, is_special: bool = False) -> int:
        """A row nobody uses; IndexError when all are taken, which admission prevents."""
        row = self._free_rows.pop()
        self.generated[row] = self.confirmed[row] = 0
        self.is_special[row] = is_special
        self.num_special += is_special
        return row

    def return_row(self, row: int) -> None:
        self.num_special -= int(self.is_special[row])
        self._free_rows.append(row)

    def write_outputs(self, rows: NDArray[np.int64], columns: NDArray[np.int64], tokens: IntArray) -> None:
        """Store one output token for each of `rows`, at that request's output position `columns`."""
        if len(columns) and (last := int(columns.max())) >= self._outputs.shape[1]:
            self._outputs = _widened(self._outputs, max(last + 1, 2 * self._outputs.shape[1]), 0)
        self._outputs[rows, columns] = tokens

    def set_end_tokens(self, row: int, end_tokens: tuple[int, ...]) -> None:
        """The tokens that end the request in `row`."""
        if not (end_tokens or self.any_end_tokens):
            return
        if len(end_tokens) > self.end_tokens.shape[1]:
            self.end_tokens = _widened(self.end_tokens, len(end_tokens), _NO_TOKEN)
        self.end_tokens[row] = _NO_TOKEN
        self.end_tokens[row, : len(end_tokens)] = end_tokens
        self.any_end_tokens |= bool(end_tokens)

    def outputs(self, row: int, start: int, stop: int) -> IntArray:
        """Output tokens `start` to `stop - 1` of the request in `row`, a copy."""
        return self._outputs[row, start:stop].copy()


_Integer = TypeVar("_Integer", np.int32, np.int64)


def _widened(array: NDArray[_Integer], columns: int, fill: int) -> NDArray[_Integer]:
    """A copy of `array` [rows, fewer columns] with more columns."""
    wide = np.full((len(array), columns), fill, array.dtype)
    wide[:, : array.shape[1]] = array
    return wide
