"""A trace: the requests of a workload, stored as columns of numbers (36 bytes a request), and what they reserve."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from itertools import accumulate
from math import ceil
from typing import Any, TypeAlias, overload

import numpy as np
from msgspec import Struct, structs
from numpy.typing import ArrayLike

from ifbbench.errors import InputError
from ifbbench.settings.groups.replay import DEFAULT_PRIORITY

PREFIX_BLOCK = 512
MAX_LENGTH = 2**31 - 1
MAX_ID = 2**63 - 1
EPOCH_S = 1e8  # seconds above which a time is a time stamp since 1970, not a time since the start of a recording

PrefixRun: TypeAlias = tuple[int, int]
"""A prefix id, and how many of its first tokens."""


class TraceRequest(Struct, frozen=True, gc=False):
    """One request as recorded or drawn. A struct, because one is made each time that a request is read or asked for.

    arrival_s: seconds from the start of the trace.
    max_new_tokens: output tokens that the client reserves, all that schedulers may see.
    output_len: output tokens that the request makes, known to the stop check alone.
    prompt_tokens: None where the trace records only lengths; such prompts are drawn from the seed when needed.
    stop_ids: token ids that end the request if it makes one before `output_len`.
    prefix_ids: names of the blocks of PREFIX_BLOCK tokens that the prompt begins with. An id names the same tokens in
        every request, without saying what they are.
    prefix_lens: tokens of each block, from its first; None is all, as far as the prompt goes. With more tokens than the
        prompt has, the blocks go on with the output.
    request_class: the class of requests that figures are also given for, such as `chat`; None if there are no classes.
    after: the request_id of the turn before in the session; the request arrives `think_s` seconds after its end.
    added_in, stopped_in: the iteration of a recorded engine before which the request entered its queue, and the one
        before which its client stopped it; None where that is not known, or it was not stopped.
    added_with: iterations that were in flight when the request entered the queue.
    also_after: the request_ids of others whose ends it waits for, such as those of sub-agents; `think_s` counts from
        the last of all ends. Empty without `after`.
    has_next_turn: whether a later turn of its session comes after it, as far as a run with --kv_retention_priority has
        to know.
    session_id: the session that routers see, an integer that its requests have in common; None if it is that of
        `after`. It makes no request wait.
    """

    request_id: int
    arrival_s: float
    prompt_len: int
    max_new_tokens: int
    output_len: int
    prompt_tokens: tuple[int, ...] | None = None
    priority: float = DEFAULT_PRIORITY
    beam_width: int = 1
    lora_task_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    prefix_ids: tuple[int, ...] | None = None
    prefix_lens: tuple[int, ...] | None = None
    request_class: str | None = None
    after: int | None = None
    think_s: float = 0.0
    added_in: int | None = None
    added_with: int = 0
    stopped_in: int | None = None
    also_after: tuple[int, ...] = ()
    has_next_turn: bool = False
    session_id: int | None = None

    @property
    def has_only_numbers(self) -> bool:
        """Whether the request is no more than its id, arrival and lengths."""
        return (
            self.prompt_tokens is None
            and self.prefix_ids is None
            and self.beam_width == 1
            and self.priority == DEFAULT_PRIORITY
            and self.lora_task_id is None
            and not self.stop_ids
            and self.request_class is None
            and self.after is None
            and self.added_in is None
            and not self.has_next_turn
            and self.session_id is None
        )

    def prefix_runs(self) -> list[PrefixRun]:
        """The named tokens of the prompt, from its first token; empty if the trace names none."""
        if self.prefix_ids is None:
            return []
        ids, lens = self.prefix_ids, self.prefix_lens
        if lens is not None:
            ends = accumulate(lens)
            kept = [length - max(end - self.prompt_len, 0) for length, end in zip(lens, ends, strict=True)]
            return [(prefix_id, length) for prefix_id, length in zip(ids, kept, strict=True) if length > 0]
        runs = [(prefix_id, PREFIX_BLOCK) for prefix_id in ids]
        excess = len(ids) * PREFIX_BLOCK - self.prompt_len
        if excess > 0:
            runs[-1] = (ids[-1], PREFIX_BLOCK - excess)
        return runs

    def output_runs(self) -> list[tuple[int, int, int]]:
        """The named tokens of the output, from its first token: (prefix id, first token of it, number of tokens)."""
        if self.prefix_ids is None or self.prefix_lens is None:
            return []
        runs, start = list[tuple[int, int, int]](), -self.prompt_len
        for prefix_id, length in zip(self.prefix_ids, self.prefix_lens, strict=False):
            offset = min(max(-start, 0), length)
            if offset < length:
                runs.append((prefix_id, offset, length - offset))
            start += length
        return runs

    def shortened(self, max_prompt_len: int) -> "TraceRequest":
        """The request with at most the first `max_prompt_len` tokens of its prompt; shared prefixes stay shared."""
        if self.prompt_len <= max_prompt_len:
            return self
        ids, lens = self.prefix_ids, self.prefix_lens
        if lens is not None:
            starts = np.cumsum((0, *lens)).tolist()
            kept = (min(length, max_prompt_len - start) for start, length in zip(starts, lens, strict=False))
            lens = tuple(length for length in kept if length > 0)
        if ids is not None:
            ids = ids[: num_blocks(max_prompt_len) if lens is None else len(lens)]
        tokens = None if self.prompt_tokens is None else self.prompt_tokens[:max_prompt_len]
        return structs.replace(self, prompt_len=max_prompt_len, prompt_tokens=tokens, prefix_ids=ids, prefix_lens=lens)


def num_blocks(num_tokens: int) -> int:
    """Blocks of PREFIX_BLOCK tokens that hold `num_tokens`, the last one perhaps in part."""
    return -(-num_tokens // PREFIX_BLOCK)


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, and where they come from.

    requests: the requests; those of files and specifications are made one by one when asked for.
    sha256: hash of the bytes of the file, or of the canonical text of a specification.
    notes: what a user must know of how the requests were read, such as a rule for the lengths of texts.
    """

    name: str
    requests: Sequence[TraceRequest]
    sha256: str
    source: str
    skipped_rows: int = 0
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)


# Requests as columns.

Integers: TypeAlias = "array[int]"
Floats: TypeAlias = "array[float]"
Recall: TypeAlias = Callable[[int], TraceRequest]
"""Makes the request of an origin again."""

NO_TOKEN = NO_ORIGIN = NO_CLASS = NO_REQUEST = NO_ITERATION = NO_SESSION = -1
ID, LENGTH, SECONDS = "q", "i", "d"


def integers(values: ArrayLike) -> Integers:
    """A column of lengths in tokens; InputError for one beyond MAX_LENGTH."""
    lengths = np.asarray(values)
    if lengths.size and (longest := int(lengths.max())) > MAX_LENGTH:
        raise InputError(f"a request has {longest} tokens; expected at most {MAX_LENGTH}. Give smaller lengths.")
    return array(LENGTH, lengths.astype(np.int32).tobytes())


def identifiers(values: ArrayLike) -> Integers:
    """A column of ids, origins or row numbers."""
    return array(ID, np.asarray(values, np.int64).tobytes())


def seconds(values: ArrayLike) -> Floats:
    """A column of times."""
    return array(SECONDS, np.asarray(values, np.float64).tobytes())


def no_recall(origin: int) -> TraceRequest:
    """For columns of requests that are numbers only."""
    raise LookupError(f"no request was recorded at {origin}")


@dataclass(frozen=True, eq=False)
class RequestColumns(Sequence[TraceRequest]):
    """Requests of a trace, each made when it is asked for. A column has one element per request, under the name that
    the field has in TraceRequest.

    origin: what `recall` finds the other fields of a request by (tokens, prefix, priority), NO_ORIGIN if they all have
        their defaults. The columns override what `recall` returns; a prompt longer than `prompt_len` is shortened.
    max_beam_width: an upper bound on the beam width of all requests.
    max_token: an upper bound on the recorded prompt tokens; NO_TOKEN if none is recorded.
    names_loras: whether one may have a LoRA task.
    priority: None if every request has the default.
    class_of: the position of each request's class in `class_names`, NO_CLASS if it has none; None if none has one.
    after: NO_REQUEST for a request that follows no other; with `think_s`, None if there are no sessions.
    added_in, stopped_in: NO_ITERATION where a request has none; with `added_with`, None if no request has one.
    also_after: requests that wait for more than one other, by request_id.
    next_turns: the request_ids of those that have a next turn, where that was asked for.
    session_id: NO_SESSION where a request has none; None if no request has one.
    """

    request_id: Integers = field(default_factory=lambda: array(ID))
    arrival_s: Floats = field(default_factory=lambda: array(SECONDS))
    prompt_len: Integers = field(default_factory=lambda: array(LENGTH))
    max_new_tokens: Integers = field(default_factory=lambda: array(LENGTH))
    output_len: Integers = field(default_factory=lambda: array(LENGTH))
    origin: Integers = field(default_factory=lambda: array(ID))
    recall: Recall = no_recall
    max_beam_width: int = 1
    max_token: int = NO_TOKEN
    names_loras: bool = False
    priority: "Floats | None" = None
    class_of: "Integers | None" = None
    class_names: tuple[str, ...] = ()
    after: "Integers | None" = None
    think_s: "Floats | None" = None
    added_in: "Integers | None" = None
    added_with: "Integers | None" = None
    stopped_in: "Integers | None" = None
    also_after: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    next_turns: frozenset[int] = frozenset()
    session_id: "Integers | None" = None

    def __len__(self) -> int:
        return len(self.request_id)

    def class_at(self, index: int) -> str | None:
        """The class of the request at `index`, without making it."""
        number = NO_CLASS if self.class_of is None else self.class_of[index]
        return None if number == NO_CLASS else self.class_names[number]

    @overload
    def __getitem__(self, index: int) -> TraceRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[TraceRequest]: ...
    def __getitem__(self, index: int | slice) -> TraceRequest | list[TraceRequest]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        origin = self.origin[index]
        if origin == NO_ORIGIN:
            return TraceRequest(
                self.request_id[index],
                self.arrival_s[index],
                self.prompt_len[index],
                self.max_new_tokens[index],
                self.output_len[index],
                has_next_turn=self.request_id[index] in self.next_turns,
            )
        session: dict[str, Any] = {}
        if self.after is not None and self.think_s is not None and self.after[index] != NO_REQUEST:
            session = {"after": self.after[index], "think_s": self.think_s[index]}
        return structs.replace(
            self.recall(origin).shortened(self.prompt_len[index]),
            request_id=self.request_id[index],
            arrival_s=self.arrival_s[index],
            max_new_tokens=self.max_new_tokens[index],
            output_len=self.output_len[index],
            has_next_turn=self.request_id[index] in self.next_turns,
            **session,
        )

    def by_arrival(self) -> "RequestColumns":
        """The requests in order of arrival, equal ones as they are here; moved to start at 0 if they start before, or
        at a time stamp since 1970."""
        if not len(self):
            return self
        arrivals_s = np.asarray(self.arrival_s)
        ordered = self
        if not (arrivals_s[1:] >= arrivals_s[:-1]).all():
            order = np.argsort(arrivals_s, kind="stable")
            columns: dict[str, Any] = {name: value for name, value in vars(self).items() if isinstance(value, array)}
            for name, column in columns.items():
                columns[name] = array(column.typecode, np.asarray(column)[order].tobytes())
            ordered = replace(self, **columns)
        start_s = ordered.arrival_s[0]
        if 0 <= start_s < EPOCH_S:
            return ordered
        return replace(ordered, arrival_s=seconds(np.asarray(ordered.arrival_s) - start_s))


class ColumnsBuilder:
    """Gathers requests into columns, one after another."""

    def __init__(self) -> None:
        self._columns = RequestColumns()
        self._max_beam_width, self._max_token, self._names_loras = 1, NO_TOKEN, False
        self._priority: Floats | None = None
        self._class_of: Integers | None = None
        self._classes: dict[str, int] = {}
        self._after: Integers | None = None
        self._think_s: Floats = array(SECONDS)
        self._also_after: dict[int, tuple[int, ...]] = {}
        self._next_turns = set[int]()
        self._session_id: Integers | None = None
        self._added_in: Integers | None = None
        self._stopped_in: Integers = array(ID)
        self._added_with: Integers = array(LENGTH)

    def __len__(self) -> int:
        return len(self._columns)

    def append(self, request: TraceRequest, origin: int) -> None:
        """Add `request`. `recall` must find it by `origin`, unless it has only numbers."""
        columns = self._columns
        columns.request_id.append(request.request_id)
        columns.arrival_s.append(request.arrival_s)
        columns.prompt_len.append(request.prompt_len)
        columns.max_new_tokens.append(request.max_new_tokens)
        columns.output_len.append(request.output_len)
        if self._priority is None and request.priority != DEFAULT_PRIORITY:
            self._priority = seconds([DEFAULT_PRIORITY]) * (len(columns) - 1)
        if self._priority is not None:
            self._priority.append(request.priority)
        if self._class_of is None and request.request_class is not None:
            self._class_of = integers([NO_CLASS]) * (len(columns) - 1)
        if self._class_of is not None:
            name = request.request_class
            self._class_of.append(NO_CLASS if name is None else self._classes.setdefault(name, len(self._classes)))
        if self._after is None and request.after is not None:
            self._after = identifiers([NO_REQUEST]) * (len(columns) - 1)
            self._think_s = seconds([0.0]) * (len(columns) - 1)
        if self._after is not None:
            self._after.append(NO_REQUEST if request.after is None else request.after)
            self._think_s.append(request.think_s)
        if request.also_after:
            self._also_after[request.request_id] = request.also_after
        if request.has_next_turn:
            self._next_turns.add(request.request_id)
        if self._session_id is None and request.session_id is not None:
            self._session_id = identifiers([NO_SESSION]) * (len(columns) - 1)
        if self._session_id is not None:
            self._session_id.append(NO_SESSION if request.session_id is None else request.session_id)
        if self._added_in is None and request.added_in is not None:
            self._added_in, self._stopped_in = (identifiers([NO_ITERATION]) * (len(columns) - 1) for _ in range(2))
            self._added_with = integers([0]) * (len(columns) - 1)
        if self._added_in is not None:
            self._added_in.append(NO_ITERATION if request.added_in is None else request.added_in)
            self._stopped_in.append(NO_ITERATION if request.stopped_in is None else request.stopped_in)
            self._added_with.append(request.added_with)
        if request.has_only_numbers:
            columns.origin.append(NO_ORIGIN)
            return
        columns.origin.append(origin)
        self._max_beam_width = max(self._max_beam_width, request.beam_width)
        self._names_loras |= request.lora_task_id is not None
        if request.prompt_tokens is not None:
            self._max_token = max(self._max_token, max(request.prompt_tokens))

    def columns(self, recall: Recall) -> RequestColumns:
        """The columns of all requests appended so far."""
        return replace(
            self._columns,
            recall=recall,
            max_beam_width=self._max_beam_width,
            max_token=self._max_token,
            priority=self._priority,
            class_of=self._class_of,
            class_names=tuple(self._classes),
            after=self._after,
            think_s=None if self._after is None else self._think_s,
            also_after=self._also_after,
            next_turns=frozenset(self._next_turns),
            session_id=self._session_id,
            added_in=self._added_in,
            stopped_in=None if self._added_in is None else self._stopped_in,
            added_with=None if self._added_in is None else self._added_with,
            names_loras=self._names_loras,
        )


def columns_of(requests: Iterable[TraceRequest]) -> RequestColumns:
    """`requests` as columns. If they are not columns yet, they are kept in a list, for the fields without a column."""
    if isinstance(requests, RequestColumns):
        return requests
    listed, builder = list(requests), ColumnsBuilder()
    for index, request in enumerate(listed):
        builder.append(request, index)
    return builder.columns(listed.__getitem__)


# Reserved tokens.

RESERVE_RULES = "trace, actual, factor:F (a number above 0) or fixed:N (an integer of at least 1)"


class Reserve:
    """The rule that sets the reserved tokens: `trace`, `actual`, `factor:1.5`, `fixed:256` or the like.

    InputError for any other text.
    """

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
            if not 0 < self._factor <= MAX_LENGTH:
                raise ValueError(text)
        except (ValueError, ZeroDivisionError):
            raise InputError(f"reserve {text!r} is not valid; expected {RESERVE_RULES}.") from None

    def tokens(self, max_new_tokens: int, output_len: int) -> int:
        """What a request of these lengths reserves, at least 1."""
        if self._kind == "trace":
            return max_new_tokens
        if self._kind == "fixed":
            return int(self._factor)
        return min(ceil(self._factor * output_len), MAX_LENGTH)

    def apply(self, request: TraceRequest) -> TraceRequest:
        """`request` with its reservation; its output is cut off there."""
        reserved = self.tokens(request.max_new_tokens, request.output_len)
        return structs.replace(request, max_new_tokens=reserved, output_len=min(request.output_len, reserved))

    def columns(self, max_new_tokens: Integers, output_len: Integers) -> tuple[Integers, Integers]:
        """`apply` for many requests: the columns `max_new_tokens` and `output_len`."""
        reserved = max_new_tokens
        if self._kind != "trace":
            # Cached because lengths repeat and exact arithmetic is slow.
            reserved = array(LENGTH, map(cache(lambda length: self.tokens(0, length)), output_len))
        return reserved, integers(np.minimum(reserved, output_len))
