"""The requests drawn from a workload specification.

Every stream of numbers (lengths, arrivals, prefixes, …) of every class has a generator of its own, so that a change of
one leaves the others alone and no two are correlated. A longer drawing begins with the requests of a shorter one.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ifbbench.errors import InputError
from ifbbench.settings.groups.replay import DEFAULT_PRIORITY
from ifbbench.workload.distributions import Generator, Lengths, Stream, Times, generator
from ifbbench.workload.prompts import runs_of, with_prefix
from ifbbench.workload.spec import FROM_ANSWER, RequestClass, SharedPrefix, WorkloadSpec
from ifbbench.workload.sub_requests import sub_requests_of, with_sub_requests
from ifbbench.workload.trace import (
    NO_ORIGIN,
    NO_REQUEST,
    PREFIX_BLOCK,
    Integers,
    PrefixRun,
    RequestColumns,
    Reserve,
    Trace,
    TraceRequest,
    identifiers,
    integers,
    num_blocks,
    seconds,
)

Indices: TypeAlias = NDArray[np.int64]
NO_POOL = -1
ARRIVAL_DECIMALS = 6
MAX_NAMED_TOKENS = 2**24


def draw_trace(spec: WorkloadSpec, seed: int, source: str, max_num_samples: int | None = None) -> Trace:
    """The first `max_num_samples` requests drawn from `spec` (default: all), by arrival; a pure function of (spec,
    seed). Conversations are drawn one after another, each with all its turns, and after each turn its sub-requests; the
    last conversation may be cut off."""
    count = min(spec.num_requests, max_num_samples or spec.num_requests)
    classes = spec.request_classes()
    turns = draw_turns(classes, seed, count)
    gaps_s = np.zeros(count)  # since the turn before; of a first turn, since 0
    gaps_s[turns.first_turns] = spec.arrival.draw(generator(seed, Stream.ARRIVAL), len(turns.first_turns))
    all_streams = [_Streams.of_class(seed, number, kind) for number, kind in enumerate(classes)]
    drawn = _draw_classes(classes, all_streams, turns, gaps_s)
    class_of = turns.class_of
    waits_for_answer = [kind.sessions is not None and kind.sessions.think_from == FROM_ANSWER for kind in classes]
    follows = np.array(waits_for_answer)[class_of] & (turns.turn_of > 0)
    think_s = np.round(np.where(follows, gaps_s, 0.0), ARRIVAL_DECIMALS)

    def recall(index: int) -> TraceRequest:
        kind, part, at = classes[class_of[index]], drawn.parts[class_of[index]], int(drawn.position[index])
        # The columns have the arrival and the other lengths.
        request = TraceRequest(
            index,
            0.0,
            int(drawn.prompt_len[index]),
            1,
            1,
            priority=DEFAULT_PRIORITY if kind.priority is None else kind.priority,
            lora_task_id=None if part.task_ids is None else int(part.task_ids[at]),
            request_class=kind.name,
            after=index - 1 if follows[index] else None,
            think_s=float(think_s[index]),
        )
        runs = part.named_tokens(at)
        return with_prefix(request, runs) if runs else request

    priorities = np.array([DEFAULT_PRIORITY if kind.priority is None else kind.priority for kind in classes])
    requests = RequestColumns(
        names_loras=any(kind.lora_task_id is not None for kind in classes),
        request_id=identifiers(np.arange(count)),
        arrival_s=seconds(np.round(_arrivals(gaps_s, turns.first_turns), ARRIVAL_DECIMALS)),
        prompt_len=integers(drawn.prompt_len),
        max_new_tokens=integers(drawn.reserved),
        output_len=integers(drawn.output_len),
        origin=identifiers(drawn.origin),
        recall=recall,
        priority=seconds(priorities[class_of]) if (priorities != DEFAULT_PRIORITY).any() else None,
        class_of=None if spec.classes is None else integers(class_of),
        after=identifiers(np.where(follows, np.arange(count) - 1, NO_REQUEST)) if follows.any() else None,
        think_s=seconds(think_s) if follows.any() else None,
        class_names=tuple(kind.name for kind in classes if kind.name is not None),
    )
    if follows.any() and any(map(sub_requests_of, classes)):

        def system_prompt(index: int) -> list[PrefixRun]:
            runs: list[PrefixRun] = drawn.parts[class_of[index]].system_prompt(int(drawn.position[index]))
            return runs

        of_classes = [streams.of for streams in all_streams]
        requests = with_sub_requests(requests, class_of, turns.turn_of, classes, of_classes, system_prompt)
    sha256 = hashlib.sha256(spec.canonical_text(seed).encode()).hexdigest()
    return Trace(spec.name, requests.by_arrival(), sha256, source)


class _Drawn(NamedTuple):
    """The requests of all classes, in the order of their turns. Arrays are [requests].

    origin: NO_ORIGIN where the columns describe the request completely, else its index.
    position: index of the request in the part of its class.
    parts: what was drawn for each class.
    """

    prompt_len: Indices
    reserved: Indices
    output_len: Indices
    origin: Indices
    position: Indices
    parts: "list[DrawnClass]"


def _draw_classes(
    classes: Sequence[RequestClass], streams: "Sequence[_Streams]", turns: "Turns", gaps_s: NDArray[np.float64]
) -> _Drawn:
    """Draw the requests of each class.

    gaps_s: [requests], seconds since the turn before, to be filled in for later turns.
    """
    count = len(gaps_s)
    prompt_len, reserved, output_len, position = (np.empty(count, np.int64) for _ in range(4))
    drawn = _Drawn(prompt_len, reserved, output_len, np.arange(count), position, [])
    first_id = 0
    for number, (kind, of_class) in enumerate(zip(classes, streams, strict=True)):
        members = np.flatnonzero(turns.class_of == number)
        part = draw_class(kind, of_class, turns.session_of[members], first_id)
        first_id = part.next_id
        drawn.prompt_len[members], drawn.output_len[members] = part.prompt_len, part.output_len
        drawn.reserved[members] = part.reserved
        drawn.position[members] = np.arange(len(members))
        if kind.sessions is not None:
            times_s = kind.sessions.think_time.draw(of_class.of(Stream.THINK_TIME), len(members))
            is_later = turns.turn_of[members] > 0
            gaps_s[members[is_later]] = times_s[is_later]
        elif kind.name is None and kind.priority is None and kind.lora_task_id is None:
            drawn.origin[members[part.pool_of == NO_POOL]] = NO_ORIGIN
        drawn.parts.append(part)
    return drawn


class _Streams(NamedTuple):
    """The generators of one class."""

    seed: int
    key: tuple[int, ...]

    @classmethod
    def of_class(cls, seed: int, number: int, kind: RequestClass) -> "_Streams":
        """The streams of the class at `number`; without a key in a workload without classes."""
        return cls(seed, () if kind.name is None else (number,))

    def of(self, stream: Stream) -> Generator:
        return generator(self.seed, stream, *self.key)


# Classes, conversations and their turns.


class Turns(NamedTuple):
    """What each request is: its class, its conversation and its turn of it, from 0; each of shape [requests]. A request
    of a class without sessions is a conversation of one turn.

    first_turns: the first request of each conversation.
    """

    class_of: Indices
    session_of: Indices
    turn_of: Indices
    first_turns: Indices


def draw_turns(classes: Sequence[RequestClass], seed: int, count: int) -> Turns:
    """The class, conversation and turn of `count` requests. The last conversation may be cut off."""
    if len(classes) == 1:
        class_of_session = np.zeros(count, dtype=np.int64)
    else:
        bounds = np.cumsum([kind.weight for kind in classes])
        chosen = generator(seed, Stream.REQUEST_CLASS).random(count) * bounds[-1]
        class_of_session = np.searchsorted(bounds[:-1], chosen, side="right")
    lengths = np.ones(count, dtype=np.int64)
    for number, kind in enumerate(classes):
        if kind.sessions is not None:
            of_class = np.flatnonzero(class_of_session == number)
            stream = _Streams.of_class(seed, number, kind).of(Stream.TURNS)
            lengths[of_class] = kind.sessions.turns.draw(stream, len(of_class))
    ends = np.minimum(np.cumsum(lengths), count)
    ends = ends[: int(np.searchsorted(ends, count)) + 1]
    first_turns = np.concatenate(([0], ends[:-1]))
    session_of = np.repeat(np.arange(len(ends)), ends - first_turns)
    return Turns(class_of_session[session_of], session_of, np.arange(count) - first_turns[session_of], first_turns)


def _arrivals(gaps_s: Times, first_turns: Indices) -> Times:
    """The arrival of each request: the sums of the gaps of each conversation."""
    arrivals_s = gaps_s.copy()
    ends = np.append(first_turns[1:], len(gaps_s))
    several = ends - first_turns > 1
    for first, end in zip(first_turns[several].tolist(), ends[several].tolist(), strict=True):
        arrivals_s[first:end] = np.cumsum(gaps_s[first:end])
    return arrivals_s


# The requests of one class.


@dataclass(frozen=True)
class DrawnClass:
    """The requests of a class, in the order of their ids; each array is of shape [requests of the class].

    pools: the tokens of each pool; the last, which NO_POOL indexes, has none.
    tokens, first_ids: number of tokens of a conversation up to and with the turn's message, without a shared prefix,
        and the first of their prefix ids; None without sessions.
    next_id: the first prefix id not used.
    """

    prompt_len: Lengths
    output_len: Integers
    reserved: Integers
    pool_of: Indices
    pools: list[list[PrefixRun]]
    tokens: Lengths | None
    first_ids: Indices | None
    task_ids: Indices | None
    next_id: int

    def system_prompt(self, place: int) -> list[PrefixRun]:
        """The shared prefix that the conversation begins with."""
        return self.pools[self.pool_of[place]]

    def named_tokens(self, place: int) -> list[PrefixRun]:
        """The tokens of the prompt that other requests may have too."""
        runs = self.system_prompt(place)
        if self.tokens is None or self.first_ids is None:
            return runs
        length, first_id = int(self.tokens[place]), int(self.first_ids[place])
        return runs + runs_of(range(first_id, first_id + num_blocks(length)), length)


def draw_class(kind: RequestClass, streams: _Streams, session_of: Indices, first_id: int) -> DrawnClass:
    """The requests of `kind`, one for each element of `session_of`, with prefix ids from `first_id`."""
    count, shared = len(session_of), kind.shared_prefix
    inputs = kind.prompt_len.draw(streams.of(Stream.INPUT_LENGTH), count)
    drawn_outputs = kind.output_len.draw(streams.of(Stream.OUTPUT_LENGTH), count)
    reserved, outputs = Reserve(kind.reserve).columns(integers(drawn_outputs), integers(drawn_outputs))
    pools: list[list[PrefixRun]] = [*(draw_pools(shared, streams, first_id) if shared else ()), []]
    next_id = first_id + sum(map(len, pools))
    prefix_len = np.array([sum(length for _, length in runs) for runs in pools])
    pool_of = draw_pool_choices(shared, streams, count) if shared else np.full(count, NO_POOL)
    tokens = first_ids = None
    if kind.sessions is None:
        prompt_len = np.maximum(inputs, prefix_len[pool_of] + 1)
    else:
        _, own_session_of = np.unique(session_of, return_inverse=True)
        pool_of = pool_of[own_session_of]
        tokens, first_ids, num_ids = _conversations_so_far(own_session_of, inputs, np.asarray(outputs), drawn_outputs)
        _check_named(tokens)
        first_ids += next_id
        next_id += num_ids
        prompt_len = tokens + prefix_len[pool_of]
    ids = kind.lora_task_id
    task_ids = None if ids is None else streams.of(Stream.TASK_ID).integers(ids.min, ids.max, count, endpoint=True)
    return DrawnClass(prompt_len, outputs, reserved, pool_of, pools, tokens, first_ids, task_ids, next_id)


def draw_pools(shared: SharedPrefix, streams: _Streams, first_id: int) -> list[list[PrefixRun]]:
    """The tokens of each pool's system prompt; prefix ids are numbered from `first_id` without gaps."""
    pools: list[list[PrefixRun]] = []
    lengths = shared.len.draw(streams.of(Stream.POOL_LENGTH), shared.pools)
    _check_named(lengths)
    for length in lengths.tolist():
        next_id = first_id + num_blocks(length)
        pools.append(runs_of(range(first_id, next_id), length))
        first_id = next_id
    return pools


def _check_named(lengths: Lengths) -> None:
    """InputError if prompts have more than MAX_NAMED_TOKENS in common: each names its blocks, which takes minutes."""
    if (longest := int(lengths.max(initial=0))) > MAX_NAMED_TOKENS:
        raise InputError(
            f"a shared prefix or a conversation has {longest:,} tokens; expected at most "
            f"{MAX_NAMED_TOKENS:,}. Give smaller lengths, or fewer turns."
        )


def draw_pool_choices(shared: SharedPrefix, streams: _Streams, count: int) -> Indices:
    """The pool of each of `count` requests, from 0; NO_POOL for a request without a shared prefix."""
    weights = np.arange(1, shared.pools + 1, dtype=np.float64) ** -shared.skew
    bounds = np.cumsum(weights / weights.sum())
    chosen = np.searchsorted(bounds[:-1], streams.of(Stream.POOL_CHOICE).random(count), side="right")
    shares = streams.of(Stream.POOL_SHARE).random(count) < shared.share
    return np.where(shares, chosen, NO_POOL)


def _conversations_so_far(
    session_of: Indices, inputs: Lengths, outputs: NDArray[np.int32], drawn_outputs: Lengths
) -> tuple[Lengths, Indices, int]:
    """The tokens of each turn's conversation up to and with the turn's message, without a shared prefix, and the
    first of the prefix ids, from 0, of that conversation, each of shape [turns]; and the number of prefix ids."""
    if not len(session_of):
        return np.zeros(0, np.int64), np.zeros(0, np.int64), 0
    first_turns = np.flatnonzero(np.diff(session_of, prepend=-1))
    ends = np.cumsum(inputs + outputs)
    tokens = ends - outputs - (ends - outputs - inputs)[first_turns][session_of]
    # The ids do not depend on the reserved tokens, which may cut outputs off.
    blocks = -(-np.add.reduceat(inputs + drawn_outputs, first_turns) // PREFIX_BLOCK)
    return tokens, (np.cumsum(blocks) - blocks)[session_of], int(blocks.sum())
