"""Drawing the requests of a workload specification."""

import hashlib

from ifbbench.workload.prefix import PrefixRun, num_blocks, runs_of, with_prefix
from ifbbench.workload.reserve import Reserve
from ifbbench.workload.sessions import Session, Sessions
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


def _alone(spec: WorkloadSpec, seed: int, count: int) -> list[TraceRequest]:
    """Requests that have nothing in common but a shared prefix."""
    prompt_lens, output_lens = _lengths(spec, seed, count)
    arrivals_s = spec.arrival.draw(generator(seed, Stream.ARRIVAL), count).round(ARRIVAL_DECIMALS).tolist()
    prefixes = _Prefixes(spec, seed, count)
    reserve = Reserve(spec.reserve)
    requests: list[TraceRequest] = []
    for index, (arrival_s, prompt_len, output_len) in enumerate(zip(arrivals_s, prompt_lens, output_lens, strict=True)):
        runs, prefix_len = prefixes.of(index)
        prompt_len = max(prompt_len, prefix_len + 1)
        request = reserve.apply(TraceRequest(index, arrival_s, prompt_len, output_len, output_len))
        requests.append(with_prefix(request, runs) if runs else request)
    return requests


def _in_turns(spec: WorkloadSpec, sessions: Sessions, seed: int, count: int) -> list[TraceRequest]:
    """The turns of conversations: each prompt is a shared prefix, all that was said before, and a new message."""
    message_lens, output_lens = _lengths(spec, seed, count)
    drawn = list(sessions.draw(seed, count, spec.arrival))
    prefixes = _Prefixes(spec, seed, len(drawn))
    reserve = Reserve(spec.reserve)
    first_id, requests = prefixes.num_ids, []
    for index, session in enumerate(drawn):
        turns = slice(session.turns.start, session.turns.stop)
        said = sum(message_lens[turns]) + sum(output_lens[turns])
        ids = list(range(first_id, first_id + num_blocks(said)))
        requests += _turns(session, message_lens, output_lens, prefixes.of(index), ids, reserve)
        first_id += len(ids)
    return sorted(requests, key=lambda request: request.arrival_s)


def _turns(
    session: Session,
    message_lens: list[int],
    output_lens: list[int],
    prefix: tuple[list[PrefixRun], int],
    ids: list[int],
    reserve: Reserve,
) -> list[TraceRequest]:
    """The requests of one conversation, whose blocks after the shared prefix have the names `ids`."""
    runs, prefix_len = prefix
    said, requests = 0, []
    for turn, arrival_s in zip(session.turns, session.arrivals_s, strict=True):
        said += message_lens[turn]
        output_len = output_lens[turn]
        arrival_s = round(arrival_s, ARRIVAL_DECIMALS)
        request = reserve.apply(TraceRequest(turn, arrival_s, prefix_len + said, output_len, output_len))
        requests.append(with_prefix(request, runs + runs_of(ids, said)))
        said += request.output_len
    return requests


def _lengths(spec: WorkloadSpec, seed: int, count: int) -> tuple[list[int], list[int]]:
    """Of prompts, or of a turn's messages, and of outputs."""
    inputs = spec.prompt_len.draw(generator(seed, Stream.INPUT_LENGTH), count).tolist()
    outputs = spec.output_len.draw(generator(seed, Stream.OUTPUT_LENGTH), count).tolist()
    return inputs, outputs


class _Prefixes:
    """The shared prefixes of `count` requests or conversations."""

    def __init__(self, spec: WorkloadSpec, seed: int, count: int) -> None:
        shared = spec.shared_prefix
        self._pools = [] if shared is None else shared.draw_pools(seed)
        self._lens = [sum(length for _, length in runs) for runs in self._pools]
        self._chosen = [None] * count if shared is None else shared.draw(seed, count)
        self.num_ids = sum(map(len, self._pools))

    def of(self, index: int) -> tuple[list[PrefixRun], int]:
        """The prefix of one of them, and its length; nothing if it has none."""
        pool = self._chosen[index]
        return ([], 0) if pool is None else (self._pools[pool], self._lens[pool])
