"""A request and its state machine."""

from enum import IntEnum

import numpy as np

from ifbbench.config import DEFAULT_PRIORITY
from ifbbench.engine.beam_search import BeamSearch
from ifbbench.engine.kv_cache.eviction import NO_RETENTION, Retention
from ifbbench.engine.output_numbers import OutputNumbers
from ifbbench.engine.request_table import IntArray, RequestTable
from ifbbench.engine.reuse_tokens import NO_IDENTITY, ReuseIdentity, ReuseTokens
from ifbbench.engine.sampling_params import (
    GREEDY,
    NO_STOP_CONDITIONS,
    TOKENS_ONLY,
    OutputOptions,
    SamplingParams,
    StopConditions,
)


class RequestState(IntEnum):
    """States in the order in which a request reaches them (numbers of TensorRT-LLM's `LlmRequestState`).

    GENERATION_TO_COMPLETE: its last step is under way, so there is nothing left to schedule.
    """

    CONTEXT_INIT = 10
    GENERATION_IN_PROGRESS = 13
    GENERATION_TO_COMPLETE = 14
    GENERATION_COMPLETE = 20


class Request:
    """One request on its way through the engine.

    `prompt_len` (L in the spec) is the current prompt: it grows when a paused request is resumed with its generated
    tokens joined to it, and `max_new_tokens` (N) shrinks by as much. `position` is the context cursor and `chunk` the
    size of the next context chunk. `output_len` is known to the stop check alone.
    """

    __slots__ = (
        "beam_width", "cached_before_pause", "chunk", "index", "lora_task_id", "max_new_tokens", "num_draft_tokens",
        "num_sent", "numbers", "options", "order", "original_prompt_len", "output_len", "pauses", "position",
        "prepopulated", "priority", "prompt_len", "prompt_tokens", "recomputed_tokens", "request_id", "retention",
        "reuse", "reused_tokens", "sampling", "search", "slot", "state", "stop", "table",
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
        options: OutputOptions = TOKENS_ONLY,
        stop: StopConditions = NO_STOP_CONDITIONS,
        reuse: ReuseIdentity = NO_IDENTITY,
        retention: Retention = NO_RETENTION,
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
        self.options = options
        self.stop = stop
        self.reuse = ReuseTokens(self, reuse)
        self.retention = retention
        self.search: BeamSearch | None = None
        self.numbers = OutputNumbers(prompt_len) if options.returns_numbers else None
        self.num_sent = 0
        self.state = RequestState.CONTEXT_INIT
        self.position = self.prepopulated = 0
        self.pauses = self.recomputed_tokens = self.cached_before_pause = self.reused_tokens = 0
        self.order: tuple[float, int] = (-priority, 0)
        self.slot = -1
        self.table: RequestTable | None = None

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.state.name}, {self.position}/{self.prompt_len})"

    # Entering and leaving the engine.

    def enter(self, table: RequestTable, sequence_number: int) -> None:
        """Take a row of `table`; `sequence_number` says who came first among equal priorities."""
        self.table = table
        self.slot = table.take_row(self.is_special)
        self.order = (-self.priority, sequence_number)
        # The ends of beams are found by their search.
        table.set_end_tokens(self.slot, self.stop.end_tokens if self.beam_width == 1 else ())
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
        table, row = self.table, self.slot
        joined = self.prompt_len - self.original_prompt_len
        step_tokens = self.beam_width + self.num_draft_tokens
        table.draft_tokens[row] = self.num_draft_tokens
        table.step_tokens[row] = step_tokens
        table.any_wide_steps |= step_tokens != 1
        table.original_prompt_len[row] = self.original_prompt_len
        table.joined[row] = joined
        table.cached_before_pause[row] = self.cached_before_pause
        table.any_paused |= self.pauses > 0
        table.stop_after[row] = self.output_len - joined
        table.reserved[row] = self.max_new_tokens

    # Where it stands.

    @property
    def num_generated(self) -> int:
        """Output tokens scheduled since the (resumed) prompt was complete."""
        return 0 if self.table is None else int(self.table.generated[self.slot])

    @property
    def num_outputs(self) -> int:
        """Output tokens that are there, those joined to the prompt by a pause included."""
        confirmed = 0 if self.table is None else int(self.table.confirmed[self.slot])
        return self.prompt_len - self.original_prompt_len + confirmed

    @property
    def is_special(self) -> bool:
        """Whether each of its tokens needs more than being written down: to be sent, searched in, or kept with its
        numbers."""
        options = self.options
        return (
            self.beam_width > 1 or bool(self.stop.stop_sequences) or options.streaming or options.returns_numbers
        )

    @property
    def in_context(self) -> bool:
        return self.state is RequestState.CONTEXT_INIT

    @property
    def has_left(self) -> bool:
        """Complete, failed or stopped: the engine holds nothing of it any more."""
        return self.state is RequestState.GENERATION_COMPLETE

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

    def set_prepopulated(self, num_tokens: int, tokens_per_block: int) -> None:
        """The first `num_tokens` of the prompt were found in the cache: context starts behind them, and its first chunk
        ends with a block if it does not end the prompt."""
        if self.pauses == 0:
            self.reused_tokens = num_tokens
        if num_tokens == 0:
            return
        self.position = self.prepopulated = num_tokens
        end = num_tokens + self.chunk
        if end < self.prompt_len:
            end -= end % tokens_per_block
        self.set_chunk(max(end - num_tokens, 1))

    def advance_context(self) -> int:
        """The chunk has been computed. Returns how many of its tokens were computed before a pause already."""
        end, again = self.position + self.chunk, 0
        if self.position < self.cached_before_pause:
            again = min(end, self.cached_before_pause) - self.position
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
        self.search = None
        self.state = RequestState.CONTEXT_INIT
        self.position = self.prepopulated = 0
        self.chunk = self.prompt_len
        self.pauses += 1
        if self.table is not None:
            self.table.generated[self.slot] = self.table.confirmed[self.slot] = 0
        self._refresh_row()

    def park(self) -> None:
        """Its last step has been submitted."""
        self.state = RequestState.GENERATION_TO_COMPLETE

    def complete(self) -> None:
        """It has left the engine; what was kept for it is let go."""
        self.state = RequestState.GENERATION_COMPLETE
        self.search = self.numbers = None
