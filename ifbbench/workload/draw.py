"""Drawing the requests of a workload specification."""

import hashlib
from array import array
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ifbbench.workload.columns import ID, NOTHING_MORE, Integers, RequestColumns, integers, seconds
from ifbbench.workload.prefix import PrefixRun, num_blocks, runs_of, with_prefix
from ifbbench.workload.reserve import Reserve
from ifbbench.workload.sessions import Sessions
from ifbbench.workload.shared_prefix import NO_POOL
from ifbbench.workload.spec import WorkloadSpec
from ifbbench.workload.streams import Stream, generator
from ifbbench.workload.trace import Trace, TraceRequest

ARRIVAL_DECIMALS = 6


def draw_trace(spec: WorkloadSpec, seed: int, source: str, max_num_samples: int | None = None) -> Trace:
    """The first `max_num_samples` requests drawn of `spec` (default: all), by arrival; a pure function of (spec, seed).

    Conversations are drawn one after another, each with all its turns; the last may be cut off.
    """
    count = min(spec.num_requests, max_num_samples or spec.num_requests)
    requests = _alone(spec, seed, count) if spec.sessions is None else _in_turns(spec, spec.sessions, seed, count)
    sha256 = hashlib.sha256(spec.canonical_text(seed).encode()).hexdigest()
    return Trace(spec.name, requests, sha256, source)


def _alone(spec: WorkloadSpec, seed: int, count: int) -> RequestColumns:
    """Requests that have nothing in common but a shared prefix."""
    lengths = _Lengths.draw(spec, seed, count)
    prefixes = _Prefixes(spec, seed, count)
    prompt_len = integers(np.maximum(lengths.inputs, prefixes.lens + 1))
    ids = np.arange(count)
    return RequestColumns(
        request_id=array(ID, ids.tobytes()),
        arrival_s=seconds(spec.arrival.draw(generator(seed, Stream.ARRIVAL), count).round(ARRIVAL_DECIMALS)),
        prompt_len=prompt_len,
        max_new_tokens=lengths.reserved,
        output_len=lengths.outputs,
        origin=array(ID, np.where(prefixes.pool_of == NO_POOL, NOTHING_MORE, ids).tobytes()),
        recall=partial(_with_shared_prefix, prefixes, prompt_len),
    )


def _with_shared_prefix(prefixes: "_Prefixes", prompt_len: Integers, index: int) -> TraceRequest:
    return with_prefix(_of_prompt_len(index, prompt_len[index]), prefixes.of(index))


def _of_prompt_len(index: int, prompt_len: int) -> TraceRequest:
    """A request of which only the prompt counts; the other lengths are in the columns."""
    return TraceRequest(index, 0.0, prompt_len, 1, 1)


def _in_turns(spec: WorkloadSpec, sessions: Sessions, seed: int, count: int) -> RequestColumns:
    """The turns of conversations: each prompt is a shared prefix, all that was said before, and a new message."""
    lengths = _Lengths.draw(spec, seed, count)
    turns = _Turns(_Prefixes(spec, seed, count), array(ID), array(ID), array(ID))
    arrivals_s = array("d")
    first_id = turns.prefixes.num_ids
    for index, session in enumerate(sessions.draw(seed, count, spec.arrival)):
        arrivals_s.extend(session.arrivals_s)
        said = 0
        for turn in session.turns:
            said += int(lengths.inputs[turn])
            turns.add(index, first_id, said)
            said += lengths.outputs[turn]
        own = slice(session.turns.start, session.turns.stop)
        first_id += num_blocks(int(lengths.inputs[own].sum() + lengths.drawn_outputs[own].sum()))
    prompt_len = np.asarray(turns.said) + turns.prefixes.lens[np.asarray(turns.session)]
    ids = array(ID, np.arange(count).tobytes())
    return RequestColumns(
        request_id=ids,
        arrival_s=seconds(np.round(arrivals_s, ARRIVAL_DECIMALS)),
        prompt_len=integers(prompt_len),
        max_new_tokens=lengths.reserved,
        output_len=lengths.outputs,
        origin=ids,
        recall=turns.recall,
    ).by_arrival()


@dataclass(frozen=True)
class _Lengths:
    """In tokens: of prompts, or of a turn's messages; of answers as drawn, and of what is reserved and made of them."""

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
class _Turns:
    """What prompts of turns are made of, one element a turn: the conversation that it belongs to, the first of the ids
    that name the conversation's own blocks, and how many tokens were said up to and with the turn's message."""

    prefixes: "_Prefixes"
    session: Integers
    first_id: Integers
    said: Integers

    def add(self, session: int, first_id: int, said: int) -> None:
        """Take in the next turn."""
        self.session.append(session)
        self.first_id.append(first_id)
        self.said.append(said)

    def recall(self, turn: int) -> TraceRequest:
        """The turn's request, with the tokens of its prompt by name."""
        session, first_id, said = self.session[turn], self.first_id[turn], self.said[turn]
        runs = self.prefixes.of(session) + runs_of(range(first_id, first_id + num_blocks(said)), said)
        return with_prefix(_of_prompt_len(turn, sum(length for _, length in runs)), runs)


class _Prefixes:
    """The shared prefixes of `count` requests or conversations.

    pool_of: which one each has, NO_POOL for none. lens: how many tokens that is. Both of shape [count].
    """

    def __init__(self, spec: WorkloadSpec, seed: int, count: int) -> None:
        shared = spec.shared_prefix
        self._pools = [] if shared is None else shared.draw_pools(seed)
        self.pool_of = np.full(count, NO_POOL) if shared is None else shared.draw(seed, count)
        # NO_POOL, as an index, is the last one.
        self.lens = np.array([*(sum(length for _, length in runs) for runs in self._pools), 0])[self.pool_of]
        self.num_ids = sum(map(len, self._pools))

    def of(self, index: int) -> list[PrefixRun]:
        """The prefix of one of them; empty if it has none."""
        pool = int(self.pool_of[index])
        return [] if pool == NO_POOL else self._pools[pool]
