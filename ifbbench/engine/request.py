"""A request, its state machine, its tokens as a KV cache with reuse needs them; and the table of requests that run."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from mypy_extensions import mypyc_attr

from ifbbench.engine.arrays import Int64Array, IntArray, Rows
from ifbbench.engine.beam_search import BeamSearch
from ifbbench.engine.retention import NO_RETENTION, Retention
from ifbbench.engine.sampling_params import (
    GREEDY,
    NO_STOP_CONDITIONS,
    TOKENS_ONLY,
    OutputNumbers,
    OutputOptions,
    SamplingParams,
    StopConditions,
)
from ifbbench.engine.tokens import KnownTokens, SymbolicTokens, TokenIds
from ifbbench.settings.groups.replay import DEFAULT_PRIORITY

_NO_TOKEN = -1
NO_MICRO_BATCH = -1
_INITIAL_OUTPUT_COLUMNS = 64
_INITIAL_END_TOKEN_COLUMNS = 2


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

    extra_ids: [prompt length], one for each prompt token.
    cache_salt: requests with different salts share nothing.
    runs: the prompt as symbolic tokens (no ids recorded), runs of (first number, length); the output then begins with
        `output_runs` and goes on with the run that starts with `output_symbol`.
    num_shared: no other request has prompt tokens beyond this many, nor the output; None if one may have them.
    """

    extra_ids: Int64Array | None = None
    cache_salt: Hashable = None
    runs: Sequence[tuple[int, int]] | None = None
    output_symbol: int = 0
    output_runs: Sequence[tuple[int, int]] = ()
    num_shared: int | None = None


NO_IDENTITY = ReuseIdentity()


class KvLoad(NamedTuple):
    """Keys and values that a request waited for: from when to when, in seconds, and how many tokens from each store.
    is_again: whether the request had run before, and was paused.
    """

    begin_s: float
    end_s: float
    tokens: dict[str, int]
    is_again: bool


class EarlierAttempts(NamedTuple):
    """What became of a request before a router sent it here: how often it had been sent to a replica that failed, when
    it first arrived, in seconds, and how many of its tokens had been computed for nothing."""

    retries: int
    arrival_s: float
    lost_tokens: int


@mypyc_attr(allow_interpreted_subclasses=True)
class Request:
    """One request in the engine.

    prompt_len: length of the current prompt. When a paused request is resumed, its generated tokens have joined the
        prompt, and `max_new_tokens` (N) is smaller by as much.
    chunk: size of the next context chunk.
    output_len: number of tokens after which the request stops; nothing but the stop check uses it.
    num_draft_tokens: draft tokens that the client brings, until they are verified with the prompt's last chunk; those
        of generation steps are in the table.
    name: what a recorded engine calls the request.
    earlier: earlier attempts of a request that a router sends again, or later than it arrived.
    remote_len: tokens of the prompt whose keys and values come from another engine, or a store; 0 for a prompt that is
        computed here.
    loads: keys and values loaded from stores so far.
    is_sent_on: whether keys and values are sent to another engine once the prompt is complete.
    position: the context cursor, in tokens of the prompt.
    """

    __slots__ = (
        "_known", "accepted_drafts", "beam_width", "cached_before_pause", "chunk", "earlier", "host_reused_tokens",
        "index", "is_sent_on", "loads", "lora_task_id", "max_new_tokens", "name", "num_draft_tokens", "num_drafted",
        "num_sent", "numbers", "options", "order", "original_prompt_len", "output_len", "pauses", "position",
        "prepopulated", "priority",
        "prompt_len", "prompt_tokens", "recomputed_tokens", "remote_len", "request_id", "retention", "reuse",
        "reused_tokens",
        "sampling", "search", "slot", "state", "stop", "table",
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
        self.name: str | None = None
        self.earlier: EarlierAttempts | None = None
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
        self.remote_len = 0
        self.loads: tuple[KvLoad, ...] = ()
        self.is_sent_on = False
        self.search: BeamSearch | None = None
        numbers = options.return_log_probs or options.return_context_logits or options.return_generation_logits
        self.numbers = OutputNumbers(prompt_len) if numbers else None
        self.num_sent = 0
        self.state = RequestState.CONTEXT_INIT
        self.position = self.prepopulated = 0
        self.pauses = self.recomputed_tokens = self.cached_before_pause = 0
        self.reused_tokens = self.host_reused_tokens = 0  # the latter of these, from host memory
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
        if self.table is None:
            return 0
        return int(self.table.generated[self.slot]) + (self.table.deferred_steps if self.in_generation else 0)

    @property
    def num_outputs(self) -> int:
        """Output tokens that exist, those that a pause joined to the prompt included."""
        joined = self.prompt_len - self.original_prompt_len
        if self.table is None:
            return joined
        confirmed = int(self.table.confirmed[self.slot])
        if self.in_generation:
            confirmed += self.table.deferred_confirmed
        return joined + max(confirmed, 0)

    @property
    def is_special(self) -> bool:
        """Whether each new token needs more than to be stored: streaming, beam search, stop sequences, or numbers."""
        return self.options.streaming or self.reads_tokens

    @property
    def reads_tokens(self) -> bool:
        """Whether what a new token is decides something, or it comes with numbers: beam search, stop sequences."""
        return self.beam_width > 1 or bool(self.stop.stop_sequences) or self.numbers is not None

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

    def enter(self, table: "RequestTable", sequence_number: int) -> None:
        """Become active: take a row of `table`. `sequence_number` orders requests of equal priority."""
        self.table = table
        self.slot = table.take_row(self)
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
        appended, num_outputs = len(known.tokens) - self.original_prompt_len, self.num_outputs
        if num_outputs <= appended:
            return known
        if isinstance(known.tokens, SymbolicTokens):
            self._append_symbols(known.tokens, appended, num_outputs)
        elif self.table.makes_tokens:
            known.tokens.append(self.table.outputs(self.slot, appended, num_outputs))
        return known

    def _append_symbols(self, tokens: SymbolicTokens, start: int, stop: int) -> None:
        """Add the symbols of output tokens `start` to `stop` - 1."""
        end = 0
        for first, length in self.reuse.output_runs:
            begin, end = end, end + length
            if start < end:
                tokens.append(first + start - begin, min(stop, end) - start)
                start = min(stop, end)
                if start == stop:
                    return
        tokens.append(self.reuse.output_symbol + start, stop - start)

    def _known_prompt(self) -> KnownTokens | None:
        if self.reuse.runs is not None:
            tokens: TokenIds | SymbolicTokens = SymbolicTokens(self.reuse.runs)
        elif self.prompt_tokens is not None:
            tokens = TokenIds(self.prompt_tokens[: self.original_prompt_len], self.reuse.extra_ids)
        else:
            return None
        return KnownTokens(tokens, (tokens.kind, self.lora_task_id, self.reuse.cache_salt))


class RequestTable:
    """Counters and output tokens of the requests that run. Arrays are [rows] unless stated otherwise.

    With flat arrays, an iteration in which 500 requests each generate a token is a few additions. The row of a request
    is also its sequence slot in the executor and in the KV cache.

    requests: requests by row.
    generated: output tokens scheduled since the prompt (or the resumed prompt) was complete.
    confirmed: how many of the generated tokens the executor has returned: fewer while an iteration is in flight.
        Negative as long as iterations in flight do not count for the request.
    deferred_steps: what `generated` of all generation requests lacks while plans repeat.
    deferred_confirmed: what `confirmed` of all generation requests lacks while plans repeat.
    num_transferring: number of requests that hold blocks while keys and values are sent to or from another engine; they
        do not run.
    reserved: maximum of `generated`.
    stop_after: value of `confirmed` at which the request has all its output tokens.
    draft_tokens: draft tokens of the next generation step.
    step_tokens: tokens that a generation step adds to the batch: beam width + draft tokens.
    any_wide_steps: whether `step_tokens` was ever not 1.
    max_draft_tokens: maximum of `draft_tokens` so far; 0 if no request ever had any.
    original_prompt_len: tokens of the prompt as it arrived.
    joined: output tokens that pauses have joined to the prompt.
    cached_before_pause: tokens of the sequence with keys and values computed before it was paused.
    any_paused: whether any request was ever paused.
    end_tokens: [rows, maximum of any request], token ids that end the request early, padded with -1.
    is_special: whether a new token needs more than to be stored (see `Request.is_special`).
    lora_tasks: LoRA task id, -1 for none.
    started: context requests past their first chunk, by row.
    makes_tokens: whether the executor returns token ids; otherwise output tokens are symbolic.
    shares_outputs: whether another request may go on with the symbolic output of one.
    micro_batch: the micro batch that each request is in until the next turn of that one, -1 for none.
    any_in_flight: whether a request may be in another micro batch than the one that has its turn.
    whole: with attention data parallelism, the table of all ranks, which has the requests of this one too; else None.
    """

    def __init__(self, rows: int, first: int = 0, every: int = 1) -> None:
        """first: the first row that is used.
        every: how many rows further the next one is.
        """
        self.requests: dict[int, Request] = {}
        self.generated = np.zeros(rows, np.int64)
        self.confirmed = np.zeros(rows, np.int64)
        self.deferred_steps = self.deferred_confirmed = self.num_transferring = 0
        self.reserved = np.zeros(rows, np.int64)
        self.stop_after = np.zeros(rows, np.int64)
        self.draft_tokens = np.zeros(rows, np.int64)
        self.step_tokens = np.ones(rows, np.int64)
        self.any_wide_steps = False
        self.max_draft_tokens = 0
        self.original_prompt_len = np.zeros(rows, np.int64)
        self.joined = np.zeros(rows, np.int64)
        self.cached_before_pause = np.zeros(rows, np.int64)
        self.any_paused = False
        # Ids that users give need not fit 32 bits.
        self.end_tokens = np.full((rows, _INITIAL_END_TOKEN_COLUMNS), _NO_TOKEN, np.int64)
        self.any_end_tokens = False
        self.is_special = np.zeros(rows, np.bool_)
        self.num_special = 0
        self.lora_tasks = np.full(rows, -1, np.int64)
        self.started: dict[int, Request] = {}
        self.makes_tokens = self.shares_outputs = False
        self.micro_batch = np.full(rows, NO_MICRO_BATCH, np.int64)
        self.any_in_flight = False
        self.whole: RequestTable | None = None
        self._outputs = np.zeros((rows, _INITIAL_OUTPUT_COLUMNS), np.int32)
        self.free_rows = list(range(first, rows, every))
        self.free_rows.reverse()

    def take_row(self, request: Request) -> int:
        """A free row for `request`. IndexError if there is none, which admission prevents."""
        row = self.free_rows.pop()
        self.requests[row] = request
        if self.whole is not None:
            self.whole.requests[row] = request
            self.whole.num_special += request.is_special
        self.generated[row] = self.confirmed[row] = 0
        self.is_special[row] = request.is_special
        self.num_special += request.is_special
        self.shares_outputs |= len(request.reuse.output_runs) > 0
        return row

    def return_row(self, row: int) -> None:
        """The request in `row` has left."""
        del self.requests[row]
        if self.whole is not None:
            del self.whole.requests[row]
            self.whole.num_special -= int(self.is_special[row])
        self.num_special -= int(self.is_special[row])
        self.micro_batch[row] = NO_MICRO_BATCH
        self.free_rows.append(row)

    def add_rank(self, table: "RequestTable") -> None:
        """Include the requests of a rank, which are in `table`: it has as many rows, uses its own among them, and from
        now on shares the counters."""
        table.whole = self
        table.generated, table.confirmed = self.generated, self.confirmed
        table.reserved, table.stop_after = self.reserved, self.stop_after
        table.draft_tokens, table.step_tokens = self.draft_tokens, self.step_tokens
        table.original_prompt_len, table.joined = self.original_prompt_len, self.joined
        table.cached_before_pause, table.lora_tasks = self.cached_before_pause, self.lora_tasks
        table.is_special, table.micro_batch = self.is_special, self.micro_batch

    def begin_turn(self, micro_batch: int) -> None:
        """The requests of this micro batch can be scheduled again; those of the others are in flight."""
        self.micro_batch[self.micro_batch == micro_batch] = NO_MICRO_BATCH
        self.any_in_flight = self._count_in_flight() > 0

    @property
    def num_in_flight(self) -> int:
        """Requests in flight in another micro batch than the one that has its turn."""
        return self._count_in_flight() if self.any_in_flight else 0

    def _count_in_flight(self) -> int:
        return int(np.count_nonzero(self.micro_batch != NO_MICRO_BATCH))

    def in_other_micro_batch(self, row: int) -> bool:
        """Whether the request in `row` is in flight in a micro batch that has not its turn."""
        return self.any_in_flight and int(self.micro_batch[row]) != NO_MICRO_BATCH

    def write_outputs(self, rows: Rows, columns: Int64Array, tokens: IntArray) -> None:
        """Store one output token for each of `rows`, at the output position in `columns`."""
        width = self._outputs.shape[1]
        if len(columns) and (last := int(columns.max())) >= width:
            self._outputs = np.pad(self._outputs, ((0, 0), (0, max(last + 1 - width, width))))
        self._outputs[rows, columns] = tokens

    def outputs(self, row: int, start: int, stop: int) -> IntArray:
        """Output tokens `start` to `stop - 1` of the request in `row`, a copy."""
        return self._outputs[row, start:stop].copy()

    def set_draft_tokens(self, rows: Rows, counts: Int64Array) -> None:
        """Set the draft tokens of the next step of `rows`, requests with one beam."""
        self.draft_tokens[rows] = counts
        self.step_tokens[rows] = counts + 1
        if len(counts) and (largest := int(counts.max())) > 0:
            self.any_wide_steps, self.max_draft_tokens = True, max(self.max_draft_tokens, largest)

    def set_end_tokens(self, row: int, end_tokens: tuple[int, ...]) -> None:
        if not (end_tokens or self.any_end_tokens):
            return
        if (more := len(end_tokens) - self.end_tokens.shape[1]) > 0:
            self.end_tokens = np.pad(self.end_tokens, ((0, 0), (0, more)), constant_values=_NO_TOKEN)
        self.end_tokens[row] = _NO_TOKEN
        self.end_tokens[row, : len(end_tokens)] = end_tokens
        self.any_end_tokens |= bool(end_tokens)


def computed_tokens(request: Request) -> int:
    """Tokens of the prompt that an engine has computed for a request, and of its output."""
    if request.table is None:
        return 0
    prompt = request.position if request.in_context else request.original_prompt_len
    return max(prompt - request.reused_tokens, 0) + request.num_outputs
