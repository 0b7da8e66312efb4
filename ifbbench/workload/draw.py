"""Drawing the requests of a workload specification."""

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ifbbench.workload.distributions import ArrivalProcess, Stream, generator
from ifbbench.workload.prompts import runs_of, with_prefix
from ifbbench.workload.spec import Sessions, SharedPrefix, WorkloadSpec
from ifbbench.workload.trace import (
    ID,
    NO_ORIGIN,
    Integers,
    PrefixRun,
    RequestColumns,
    Reserve,
    Trace,
    TraceRequest,
    integers,
    num_blocks,
    seconds,
)

ARRIVAL_DECIMALS = 6
NO_POOL = -1


def draw_trace(spec: WorkloadSpec, seed: int, source: str, max_num_samples: int | None = None) -> Trace:
    """The first `max_num_samples` requests drawn of `spec` (default: all), by arrival; a pure function of (spec, seed).

    Conversations are drawn one after another, each with all its turns; the last may be cut off.
    """
    count = min(spec.num_requests, max_num_samples or spec.num_requests)
    if spec.sessions is None:
        requests = _single_requests(spec, seed, count)
    else:
        requests = _turns(spec, spec.sessions, seed, count)
    sha256 = hashlib.sha256(spec.canonical_text(seed).encode()).hexdigest()
    return Trace(spec.name, requests, sha256, source)


def _single_requests(spec: WorkloadSpec, seed: int, count: int) -> RequestColumns:
    """Requests that have nothing in common but a shared prefix."""
    lengths = _Lengths.draw(spec, seed, count)
    prefixes = _Prefixes(spec.shared_prefix, seed, count)
    prompt_len = integers(np.maximum(lengths.inputs, prefixes.lens + 1))
    ids = np.arange(count)
    return RequestColumns(
        request_id=array(ID, ids.tobytes()),
        arrival_s=seconds(spec.arrival.draw(generator(seed, Stream.ARRIVAL), count).round(ARRIVAL_DECIMALS)),
        prompt_len=prompt_len,
        max_new_tokens=lengths.reserved,
        output_len=lengths.outputs,
        origin=array(ID, np.where(prefixes.pool_of == NO_POOL, NO_ORIGIN, ids).tobytes()),
        recall=partial(_with_shared_prefix, prefixes, prompt_len),
    )


def _with_shared_prefix(prefixes: "_Prefixes", prompt_len: Integers, index: int) -> TraceRequest:
    return with_prefix(_of_prompt_len(index, prompt_len[index]), prefixes.runs(index))


def _of_prompt_len(index: int, prompt_len: int) -> TraceRequest:
    """A request of which only the prompt counts; the other lengths are in the columns."""
    return TraceRequest(index, 0.0, prompt_len, 1, 1)


def _turns(spec: WorkloadSpec, sessions: Sessions, seed: int, count: int) -> RequestColumns:
    """The turns of conversations: each prompt is a shared prefix, the conversation so far, and a new message."""
    lengths = _Lengths.draw(spec, seed, count)
    prompts = _TurnPrompts(_Prefixes(spec.shared_prefix, seed, count), array(ID), array(ID), array(ID))
    arrivals_s = array("d")
    first_id = prompts.prefixes.num_ids
    for index, session in enumerate(draw_sessions(sessions, seed, count, spec.arrival)):
        arrivals_s.extend(session.arrivals_s)
        tokens = 0
        for turn in session.turns:
            tokens += int(lengths.inputs[turn])
            prompts.session.append(index)
            prompts.first_id.append(first_id)
            prompts.tokens.append(tokens)
            tokens += lengths.outputs[turn]
        own = slice(session.turns.start, session.turns.stop)
        first_id += num_blocks(int(lengths.inputs[own].sum() + lengths.drawn_outputs[own].sum()))
    prompt_len = np.asarray(prompts.tokens) + prompts.prefixes.lens[np.asarray(prompts.session)]
    ids = array(ID, np.arange(count).tobytes())
    return RequestColumns(
        request_id=ids,
        arrival_s=seconds(np.round(arrivals_s, ARRIVAL_DECIMALS)),
        prompt_len=integers(prompt_len),
        max_new_tokens=lengths.reserved,
        output_len=lengths.outputs,
        origin=ids,
        recall=prompts.recall,
    ).by_arrival()


@dataclass(frozen=True)
class _Lengths:
    """In tokens: of prompts or new messages; of answers as drawn; what is reserved for them, and made of them."""

    inputs: NDArray[np.int64]
    drawn_outputs: NDArray[np.int64]
    reserved: Integers
    outputs: Integers

    @classmethod
    def draw(cls, spec: WorkloadSpec, seed: int, count: int) -> "_Lengths":
        inputs = spec.prompt_len.draw(generator(seed, Stream.INPUT_LENGTH), count)
        outputs = spec.output_len.draw(generator(seed, Stream.OUTPUT_LENGTH), count)
        return cls(inputs, outputs, *Reserve(spec.reserve).columns(integers(outputs), integers(outputs)))


@dataclass(frozen=True)
class _TurnPrompts:
    """What the prompts of turns consist of, one element per turn.

    session: the conversation of the turn. first_id: the first of the prefix ids of the conversation's own tokens.
    tokens: of the conversation, up to and with the turn's message; without the shared prefix.
    """

    prefixes: "_Prefixes"
    session: Integers
    first_id: Integers
    tokens: Integers

    def recall(self, turn: int) -> TraceRequest:
        """The turn's request, with the tokens of its prompt by name."""
        session, first_id, tokens = self.session[turn], self.first_id[turn], self.tokens[turn]
        runs = self.prefixes.runs(session) + runs_of(range(first_id, first_id + num_blocks(tokens)), tokens)
        return with_prefix(_of_prompt_len(turn, sum(length for _, length in runs)), runs)


class _Prefixes:
    """The shared prefixes of `count` requests or conversations.

    pool_of: the pool of each one, NO_POOL for none; shape [count]. lens: length of each one's prefix in tokens; shape
        [count]. num_ids: prefix ids of all pools, from 0.
    """

    def __init__(self, shared: SharedPrefix | None, seed: int, count: int) -> None:
        self._pools = [] if shared is None else draw_pools(shared, seed)
        self.pool_of = np.full(count, NO_POOL) if shared is None else draw_pool_choices(shared, seed, count)
        # NO_POOL as an index is the last element.
        self.lens = np.array([*(sum(length for _, length in runs) for runs in self._pools), 0])[self.pool_of]
        self.num_ids = sum(map(len, self._pools))

    def runs(self, index: int) -> list[PrefixRun]:
        """The prefix of one of them; empty if it has none."""
        pool = int(self.pool_of[index])
        return [] if pool == NO_POOL else self._pools[pool]


def draw_pools(shared: SharedPrefix, seed: int) -> list[list[PrefixRun]]:
    """The tokens of each pool's system prompt; prefix ids are numbered from 0 without gaps."""
    pools: list[list[PrefixRun]] = []
    first_id = 0
    for length in shared.len.draw(generator(seed, Stream.POOL_LENGTH), shared.pools).tolist():
        next_id = first_id + num_blocks(length)
        pools.append(runs_of(range(first_id, next_id), length))
        first_id = next_id
    return pools


def draw_pool_choices(shared: SharedPrefix, seed: int, count: int) -> NDArray[np.int64]:
    """The pool of each of `count` requests, from 0; NO_POOL for a request without a shared prefix."""
    weights = np.arange(1, shared.pools + 1, dtype=np.float64) ** -shared.skew
    bounds = np.cumsum(weights / weights.sum())
    chosen = np.searchsorted(bounds[:-1], generator(seed, Stream.POOL_CHOICE).random(count), side="right")
    shares = generator(seed, Stream.POOL_SHARE).random(count) < shared.share
    return np.where(shares, chosen, NO_POOL)


@dataclass(frozen=True)
class Session:
    """One conversation: its turns, as numbers among all turns drawn, and when each of them arrives (s)."""

    turns: range
    arrivals_s: tuple[float, ...]


def draw_sessions(sessions: Sessions, seed: int, num_turns: int, starts: ArrivalProcess) -> Iterator[Session]:
    """Conversations of `num_turns` turns in all, the last perhaps cut off; `starts` draws when they begin. A longer
    drawing begins with the conversations of a shorter one."""
    counts = sessions.turns.draw(generator(seed, Stream.TURNS), num_turns)
    ends = np.minimum(np.cumsum(counts), num_turns)
    ends = ends[: int(np.searchsorted(ends, num_turns)) + 1]
    starts_s = starts.draw(generator(seed, Stream.ARRIVAL), len(ends)).tolist()
    think_s = sessions.think_time.draw(generator(seed, Stream.THINK_TIME), num_turns)
    first_turn = 0
    for start_s, end in zip(starts_s, ends.tolist(), strict=True):
        waits_s = np.concatenate(([start_s], think_s[first_turn + 1 : end]))
        yield Session(range(first_turn, end), tuple(np.cumsum(waits_s).tolist()))
        first_turn = end
