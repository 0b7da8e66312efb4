"""A request, its state machine, and its tokens as the reuse tree of the KV cache needs them."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from mypy_extensions import mypyc_attr

from ifbbench.engine.active import Int64Array, IntArray, RequestTable
from ifbbench.engine.beam_search import BeamSearch
from ifbbench.engine.sampling_params import (
    GREEDY,
    NO_STOP_CONDITIONS,
    TOKENS_ONLY,
    OutputNumbers,
    OutputOptions,
    SamplingParams,
    StopConditions,
)
from ifbbench.kv.eviction import NO_RETENTION, Retention
from ifbbench.kv.token_keys import KnownTokens, SymbolicTokens, TokenIds
from ifbbench.settings.config import DEFAULT_PRIORITY


class RequestState(IntEnum):
    """States in the order in which a request reaches them (numbers of TensorRT-LLM's `LlmRequestState`).

    GENERATION_TO_COMPLETE: its last step is in flight, so that nothing is left to schedule.
    """

    CONTEXT_INIT = 10
    GENERATION_IN_PROGRESS = 13
    GENERATION_TO_COMPLETE = 14
    GENERATION_COMPLETE = 20


@dataclass(frozen=True, slots=True)
class ReuseIdentity:
    """What decides, beside token ids, whether two requests may share blocks.

    extra_ids: [prompt length], one for each prompt token. cache_salt: requests with different salts share nothing.
    runs: the prompt as symbolic tokens (no ids recorded), runs of (first number, length); the output is then the run
        that starts with `output_symbol`.
    """

    extra_ids: Int64Array | None = None
    cache_salt: Hashable = None
    runs: Sequence[tuple[int, int]] | None = None
    output_symbol: int = 0


NO_IDENTITY = ReuseIdentity()


@mypyc_attr(allow_interpreted_subclasses=True)
class Request:
    """One request in the engine.

    `prompt_len` (L in the spec) is the current prompt: when a paused request is resumed, its generated tokens have
    joined the prompt, and `max_new_tokens` (N) is smaller by as much. `position` is the context cursor and `chunk` the
    size of the next context chunk. Only the stop check uses `output_len`. `num_draft_tokens` are those that the client
    brings, until they are verified with the prompt's last chunk; those of generation steps are in the table.
    """

    __slots__ = (
        "_known", "accepted_drafts", "beam_width", "cached_before_pause", "chunk", "index", "lora_task_id",
        "max_new_tokens", "num_draft_tokens", "num_drafted", "num_sent", "numbers", "options", "order",
        "original_prompt_len", "output_len", "pauses", "position", "prepopulated", "priority", "prompt_len",
        "prompt_tokens", "recomputed_tokens", "request_id", "retention", "reuse", "reused_tokens", "sampling", "search",
        "slot", "state", "stop", "table",
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
        self.num_draft_tokens = num_draft_tokens if options.draft_input_ids is None else len(options.draft_input_ids)
        self.sampling = sampling
        self.options = options
        self.stop = stop
        self.reuse = reuse
        self._known: KnownTokens | None = None
        self.retention = retention
        self.search: BeamSearch | None = None
        self.numbers = OutputNumbers(prompt_len) if options.returns_numbers else None
        self.num_sent = 0
        self.state = RequestState.CONTEXT_INIT
        self.position = self.prepopulated = 0
        self.pauses = self.recomputed_tokens = self.cached_before_pause = self.reused_tokens = 0
        # Draft tokens verified so far, and those that became output.
        self.num_drafted = self.accepted_drafts = 0
        self.order: tuple[float, int] = (-priority, 0)
        self.slot = -1
        self.table: RequestTable | None = None

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.state.name}, {self.position}/{self.prompt_len})"

    # State and progress.

    @property
    def in_context(self) -> bool:
        return self.state is RequestState.CONTEXT_INIT

    @property
    def in_generation(self) -> bool:
        return self.state is RequestState.GENERATION_IN_PROGRESS

    @property
    def has_left(self) -> bool:
        """Whether the request is complete, failed or stopped: the engine keeps no state of it."""
        return self.state is RequestState.GENERATION_COMPLETE

    @property
    def is_first_chunk(self) -> bool:
        return self.position == self.prepopulated

    @property
    def has_started(self) -> bool:
        """Whether the request holds KV blocks and can be paused: in generation, or in context past its first chunk."""
        return not self.in_context or not self.is_first_chunk

    @property
    def remaining_context(self) -> int:
        return self.prompt_len - self.position

    @property
    def is_last_chunk(self) -> bool:
        return self.position + self.chunk == self.prompt_len

    def goes_before(self, other: "Request") -> bool:
        """Whether schedulers take this active request before `other`: by priority, then in the order of entering."""
        mine, others = self.order, other.order
        return mine[0] < others[0] or (mine[0] == others[0] and mine[1] < others[1])

    @property
    def step_tokens(self) -> int:
        """Tokens of the next generation step: one for each beam, and the draft tokens."""
        return self.beam_width + self.num_draft_tokens if self.table is None else int(self.table.step_tokens[self.slot])

    @property
    def num_generated(self) -> int:
        """Output tokens scheduled since the (resumed) prompt was complete."""
        return 0 if self.table is None else int(self.table.generated[self.slot]) + self._unsettled

    @property
    def num_outputs(self) -> int:
        """Output tokens that exist, those that a pause joined to the prompt included."""
        confirmed = 0 if self.table is None else int(self.table.confirmed[self.slot]) + self._unsettled
        return self.prompt_len - self.original_prompt_len + confirmed

    @property
    def _unsettled(self) -> int:
        return self.table.unsettled if self.table is not None and self.in_generation else 0

    @property
    def is_special(self) -> bool:
        """Whether each new token needs more than to be stored: streaming, beam search, stop sequences, or numbers."""
        return self.options.streaming or self.reads_tokens

    @property
    def reads_tokens(self) -> bool:
        """Whether what a new token is decides something, or it comes with numbers: beam search, stop sequences."""
        return self.beam_width > 1 or bool(self.stop.stop_sequences) or self.options.returns_numbers

    def tokens_between(self, start: int, stop: int) -> IntArray:
        """Token ids at positions `start` to `stop - 1` of prompt and output. ValueError if the prompt is symbolic."""
        if self.prompt_tokens is None or self.table is None:
            raise ValueError(f"request {self.request_id} has no token ids: it was made for an executor without a model")
        border = self.original_prompt_len
        prompt = self.prompt_tokens[start : min(stop, border)]
        if stop <= border:
            return prompt
        return np.concatenate([prompt, self.table.outputs(self.slot, max(start - border, 0), stop - border)])

    # Transitions.

    def enter(self, table: RequestTable, sequence_number: int) -> None:
        """Become active: take a row of `table`. `sequence_number` orders requests of equal priority."""
        self.table = table
        self.slot = table.take_row(self.is_special)
        self.order = (-self.priority, sequence_number)
        # Beam search finds the ends of beams itself.
        table.set_end_tokens(self.slot, self.stop.end_tokens if self.beam_width == 1 else ())
        table.lora_tasks[self.slot] = -1 if self.lora_task_id is None else self.lora_task_id
        self._write_row()

    def set_chunk(self, size: int) -> None:
        """Set the size of the next context chunk, at most what remains of the prompt."""
        self.chunk = min(size, self.remaining_context)

    def set_draft_tokens(self, count: int) -> None:
        """Set the number of draft tokens of the coming steps. ValueError if it is negative."""
        if count < 0:
            raise ValueError(f"request {self.request_id}: {count} draft tokens; expected at least 0")
        self.num_draft_tokens = count
        self._write_row()

    def clamp_new_tokens(self, limit: int) -> None:
        self.max_new_tokens = min(self.max_new_tokens, limit)
        self.output_len = min(self.output_len, limit)

    def set_prepopulated(self, num_tokens: int, tokens_per_block: int) -> None:
        """The first `num_tokens` of the prompt were found in the cache. Context starts after them, and a first chunk
        that does not complete the prompt is cut to end with a block, so that it may be no multiple of the chunk unit.
        (TensorRT-LLM's `LlmRequest::setPrepopulatedPromptLen`, which finds them after the chunks are sized, too.)"""
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
        """The chunk was submitted. Returns how many of its tokens had been computed before a pause."""
        end, recomputed = self.position + self.chunk, 0
        if self.position < self.cached_before_pause:
            recomputed = min(end, self.cached_before_pause) - self.position
            self.recomputed_tokens += recomputed
        self.position, self.chunk = end, 0
        if self.table is not None:
            self.table.started[self.slot] = self
        return recomputed

    def start_generation(self) -> None:
        """The prompt is complete, which yields the first token."""
        assert self.table is not None
        self.state = RequestState.GENERATION_IN_PROGRESS
        self.table.generated[self.slot] = 1
        self.table.started.pop(self.slot, None)

    def finish_scheduling(self) -> None:
        """The last step is in flight."""
        self.state = RequestState.GENERATION_TO_COMPLETE

    def pause(self, max_input_len: int) -> None:
        """Return to the context phase.

        With one beam, generated tokens join the prompt, up to `max_input_len` tokens in all; tokens beyond that are
        generated again. With several beams, all generated tokens are dropped."""
        if self.in_context:
            cached = self.position
        else:
            # The newest token has not been through the model, so its keys and values are not cached.
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
            self.table.started.pop(self.slot, None)
        self._write_row()

    def leave(self) -> None:
        """Return the row. Counters and tokens must have been read before."""
        assert self.table is not None
        self.table.started.pop(self.slot, None)
        self.table.return_row(self.slot)
        self.table, self.slot = None, -1

    def complete(self) -> None:
        self.state = RequestState.GENERATION_COMPLETE
        self.search = self.numbers = None

    def _write_row(self) -> None:
        if self.table is None:
            return
        table, row = self.table, self.slot
        joined = self.prompt_len - self.original_prompt_len
        step_tokens = self.beam_width + self.num_draft_tokens
        table.draft_tokens[row] = self.num_draft_tokens
        table.step_tokens[row] = step_tokens
        table.any_wide_steps |= step_tokens != 1
        if self.num_draft_tokens > table.max_draft_tokens:
            table.max_draft_tokens = self.num_draft_tokens
        table.original_prompt_len[row] = self.original_prompt_len
        table.joined[row] = joined
        table.cached_before_pause[row] = self.cached_before_pause
        table.any_paused |= self.pauses > 0
        table.stop_after[row] = self.output_len - joined
        table.reserved[row] = self.max_new_tokens

    # Tokens as the reuse tree needs them.

    @property
    def num_known_tokens(self) -> int:
        """How many tokens of the sequence are known, from its first on."""
        known = self.known_tokens()
        return 0 if known is None else len(known.tokens)

    def known_tokens(self) -> KnownTokens | None:
        """Prompt and output so far; None if the prompt has neither token ids nor symbols. Made on first use."""
        known = self._known = self._known or self._known_prompt()
        if known is None or self.table is None or self.beam_width > 1:
            return known
        appended = len(known.tokens) - self.original_prompt_len
        if self.num_outputs <= appended:
            return known
        if isinstance(known.tokens, SymbolicTokens):
            known.tokens.append(self.reuse.output_symbol + appended, self.num_outputs - appended)
        elif self.table.makes_tokens:
            known.tokens.append(self.table.outputs(self.slot, appended, self.num_outputs))
        return known

    def _known_prompt(self) -> KnownTokens | None:
        if self.reuse.runs is not None:
            tokens: TokenIds | SymbolicTokens = SymbolicTokens(self.reuse.runs)
        elif self.prompt_tokens is not None:
            tokens = TokenIds(self.prompt_tokens[: self.original_prompt_len], self.reuse.extra_ids)
        else:
            return None
        return KnownTokens(tokens, (tokens.kind, self.lora_task_id, self.reuse.cache_salt))
