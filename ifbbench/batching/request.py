"""A request, its state machine, and the table that holds the counters of all active requests."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ifbbench.config import DEFAULT_PRIORITY

IntArray = NDArray[np.int32]

NO_END_TOKENS: tuple[int, ...] = ()
MAX_END_TOKENS = 8
_NO_TOKEN = -1
_INITIAL_OUTPUT_COLUMNS = 64


class RequestState(IntEnum):
    """States in the order in which a request reaches them (numbers of TensorRT-LLM's `LlmRequestState`)."""

    CONTEXT_INIT = 10
    GENERATION_IN_PROGRESS = 13
    GENERATION_COMPLETE = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Temperature 0 is greedy; top_k 0 and top_p 1.0 leave all tokens in."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


GREEDY = SamplingParams()


class RequestTable:
    """Counters that change every iteration, one row an active request, in flat arrays.

    An iteration in which 500 requests each make a token is then one addition. A row is also the request's sequence slot
    in the executor.

    generated: [rows], output tokens since the prompt (or the resumed prompt) was complete.
    stop_after: [rows], value of `generated` at which the request has all its output tokens.
    draft_tokens: [rows], draft tokens of the next generation step.
    step_tokens: [rows], tokens that a generation step puts into the batch: beam width + draft tokens.
    joined: [rows], output tokens that pauses have joined to the prompt.
    cached_before_pause: [rows], tokens of the sequence that had been through the model when it was paused.
    end_tokens: [rows, MAX_END_TOKENS], token ids that end the request early, filled up with -1.
    """

    def __init__(self, rows: int) -> None:
        self.generated = np.zeros(rows, np.int64)
        self.stop_after = np.zeros(rows, np.int64)
        self.draft_tokens = np.zeros(rows, np.int64)
        self.step_tokens = np.ones(rows, np.int64)
        self.joined = np.zeros(rows, np.int64)
        self.cached_before_pause = np.zeros(rows, np.int64)
        self.end_tokens = np.full((rows, MAX_END_TOKENS), _NO_TOKEN, np.int64)
        self.any_end_tokens = False
        self._outputs = np.zeros((rows, _INITIAL_OUTPUT_COLUMNS), np.int32)
        self._free_rows = list(range(rows - 1, -1, -1))

    @property
    def rows(self) -> int:
        return len(self.generated)

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def take_row(self) -> int:
        """A row nobody uses; IndexError when all are taken, which admission prevents."""
        return self._free_rows.pop()

    def return_row(self, row: int) -> None:
        self._free_rows.append(row)

    def write_outputs(self, rows: IntArray, columns: IntArray, tokens: IntArray) -> None:
        """Store one output token for each of `rows`, at that request's output position `columns`."""
        if len(columns) and (last := int(columns.max())) >= self._outputs.shape[1]:
            grown = np.zeros((self.rows, max(last + 1, 2 * self._outputs.shape[1])), np.int32)
            grown[:, : self._outputs.shape[1]] = self._outputs
            self._outputs = grown
        self._outputs[rows, columns] = tokens

    def set_end_tokens(self, row: int, end_tokens: tuple[int, ...]) -> None:
        """The tokens that end the request in `row`: at most MAX_END_TOKENS of them."""
        self.end_tokens[row] = _NO_TOKEN
        self.end_tokens[row, : len(end_tokens)] = end_tokens
        self.any_end_tokens |= bool(end_tokens)

    def outputs(self, row: int, start: int, stop: int) -> IntArray:
        """Output tokens `start` to `stop - 1` of the request in `row`, a copy."""
        return self._outputs[row, start:stop].copy()


class Request:
    """One request on its way through the engine.

    `prompt_len` (L in the spec) is the current prompt: it grows when a paused request is resumed with its generated
    tokens joined to it, and `max_new_tokens` (N) shrinks by as much. `position` is the context cursor and `chunk` the
    size of the next context chunk. `output_len` is known to the stop check alone.
    """

    __slots__ = (
        "beam_width", "cached_before_pause", "chunk", "end_tokens", "index", "lora_task_id", "max_new_tokens",
        "num_draft_tokens", "order", "original_prompt_len", "output_len", "pauses", "position", "prepopulated",
        "priority", "prompt_len", "prompt_tokens", "recomputed_tokens", "request_id", "sampling", "slot", "state",
        "table",
    )  # fmt: skip

    def __init__(
        self,
        request_id: int,
        prompt_len: int,
        max_new_tokens: int,
        *,
        output_len: int | None = None,
        prompt_tokens: IntArray | None = None,
        index: int = -1,
        priority: float = DEFAULT_PRIORITY,
        beam_width: int = 1,
        lora_task_id: int | None = None,
        num_draft_tokens: int = 0,
        sampling: SamplingParams = GREEDY,
        end_tokens: tuple[int, ...] = NO_END_TOKENS,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.original_prompt_len = self.prompt_len = self.chunk = prompt_len
        self.prompt_tokens = prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.output_len = max_new_tokens if output_len is None else min(output_len, max_new_tokens)
        self.priority = priority
        self.beam_width = beam_width
        self.lora_task_id = lora_task_id
        self.num_draft_tokens = num_draft_tokens
        self.sampling = sampling
        self.end_tokens = end_tokens
        self.state = RequestState.CONTEXT_INIT
        self.position = self.prepopulated = 0
        self.pauses = self.recomputed_tokens = self.cached_before_pause = 0
        self.order: tuple[float, int] = (-priority, 0)
        self.slot = -1
        self.table: RequestTable | None = None

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.state.name}, {self.position}/{self.prompt_len})"

    # Entering and leaving the engine.

    def enter(self, table: RequestTable, sequence_number: int) -> None:
        """Take a row of `table`; `sequence_number` says who came first among equal priorities."""
        self.table = table
        self.slot = table.take_row()
        self.order = (-self.priority, sequence_number)
        table.generated[self.slot] = 0
        table.set_end_tokens(self.slot, self.end_tokens)
        self._refresh_row()

    def leave(self) -> None:
        """Give the row back. Counters and tokens must have been read before."""
        assert self.table is not None
        self.table.return_row(self.slot)
        self.table, self.slot = None, -1

    def set_draft_tokens(self, count: int) -> None:
        """Change the number of draft tokens of the coming steps; discarding more than there are is an error."""
        if count < 0:
            raise ValueError(f"request {self.request_id}: {count} draft tokens")
        self.num_draft_tokens = count
        self._refresh_row()

    def clamp_new_tokens(self, limit: int) -> None:
        """Reserve, and make, at most `limit` tokens."""
        self.max_new_tokens = min(self.max_new_tokens, limit)
        self.output_len = min(self.output_len, limit)

    def _refresh_row(self) -> None:
        if self.table is None:
            return
        joined = self.prompt_len - self.original_prompt_len
        self.table.draft_tokens[self.slot] = self.num_draft_tokens
        self.table.step_tokens[self.slot] = self.beam_width + self.num_draft_tokens
        self.table.joined[self.slot] = joined
        self.table.cached_before_pause[self.slot] = self.cached_before_pause
        self.table.stop_after[self.slot] = self.output_len - joined

    # Where it stands.

    @property
    def num_generated(self) -> int:
        """Output tokens since the (resumed) prompt was complete."""
        return 0 if self.table is None else int(self.table.generated[self.slot])

    @property
    def num_outputs(self) -> int:
        """Output tokens in all, those joined to the prompt by a pause included."""
        return self.prompt_len - self.original_prompt_len + self.num_generated

    @property
    def in_context(self) -> bool:
        return self.state is RequestState.CONTEXT_INIT

    @property
    def is_first_chunk(self) -> bool:
        return self.position == self.prepopulated

    @property
    def has_started(self) -> bool:
        """In generation, or in context past the first chunk: it holds KV blocks and can be paused."""
        return not self.in_context or not self.is_first_chunk

    @property
    def remaining_context(self) -> int:
        return self.prompt_len - self.position

    @property
    def is_last_chunk(self) -> bool:
        return self.position + self.chunk == self.prompt_len

    def tokens_between(self, start: int, stop: int) -> IntArray:
        """Token ids at positions `start` to `stop - 1` of prompt and output; ValueError when the prompt is symbolic."""
        if self.prompt_tokens is None or self.table is None:
            raise ValueError(f"request {self.request_id} has no token ids: it was made for an executor without a model")
        border = self.original_prompt_len
        prompt = self.prompt_tokens[start : min(stop, border)]
        if stop <= border:
            return prompt
        return np.concatenate([prompt, self.table.outputs(self.slot, max(start - border, 0), stop - border)])

    # What happens to it.

    def set_chunk(self, size: int) -> None:
        """Size of the next context chunk, clamped to what is left of the prompt."""
        self.chunk = min(size, self.remaining_context)

    def advance_context(self) -> int:
        """The chunk has been computed. Returns how many of its tokens were computed before a pause already."""
        end = self.position + self.chunk
        again = min(end, self.cached_before_pause) - min(self.position, self.cached_before_pause)
        self.recomputed_tokens += again
        self.position, self.chunk = end, 0
        return again

    def start_generation(self) -> None:
        """The prompt is complete and has yielded its first token."""
        assert self.table is not None
        self.state = RequestState.GENERATION_IN_PROGRESS
        self.table.generated[self.slot] = 1

    def pause(self, max_input_len: int) -> None:
        """Back to context: with one beam, generated tokens join the prompt (up to `max_input_len` tokens in all, the
        rest will be generated again); with several, they are thrown away."""
        if self.in_context:
            cached = self.position
        else:
            # The newest token has not been through the model yet, so its keys and values are not cached.
            cached = self.prompt_len + self.num_generated - 1
        self.cached_before_pause = max(self.cached_before_pause, cached)
        if self.beam_width == 1:
            grown = min(max_input_len, self.prompt_len + self.num_generated)
            self.max_new_tokens -= grown - self.prompt_len
            self.prompt_len = grown
        self.state = RequestState.CONTEXT_INIT
        self.position = self.prepopulated = 0
        self.chunk = self.prompt_len
        self.pauses += 1
        if self.table is not None:
            self.table.generated[self.slot] = 0
        self._refresh_row()

    def complete(self) -> None:
        self.state = RequestState.GENERATION_COMPLETE
