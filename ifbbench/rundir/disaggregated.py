"""The records of a fleet with prefill and decode apart: the line of a request, made of those of two replicas, and the
figures of transfers."""

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ifbbench.rundir.line_types import RequestLine
from ifbbench.rundir.lines import JsonLinesWriter, encode, number, value_of
from ifbbench.rundir.metrics import TRANSFER, WAITING_FOR, WAITING_ITERATION, distribution
from ifbbench.settings.engines import SGLANG
from ifbbench.settings.groups.fleet import BY_LAYER

ROUTER, DECODE_BLOCKS = "router", f"{WAITING_FOR}decode_blocks"
CONCURRENCY = f"{WAITING_FOR}concurrency"
PREFILL, DECODE = "prefill", "decode"
SIDES = (PREFILL, DECODE)


def reserves_first(engine: str, transfer_by: str) -> bool:
    """Whether a decode replica has blocks for a prompt before its prefill begins: keys and values that are sent during
    the prefill need them then."""
    return engine == SGLANG or transfer_by == BY_LAYER


@dataclass(slots=True)
class Passage:
    """The way of a request through a fleet with prefill and decode apart, in seconds.

    index: index in the whole trace.
    submitted_s: when the client sent it: after its arrival where the number of requests at a time is limited.
    prefill, decode: numbers of its replicas; prefill is None if the decode replica computes the prompt, decode if the
        request ends with the first token.
    of_prefill, of_decode: its indices in the traces of the two replicas.
    prefilled_s: when its prompt was computed, and the router had the answer.
    accepted_s: when the decode replica had it.
    taken_s: when the scheduler of the decode replica had it.
    reserved_s: when it had blocks there.
    transfer_s, received_s: when its keys and values left, and came.
    tokens: number of tokens whose keys and values were sent.
    sent_s: when it was sent to these replicas: later than it arrived if others had failed.
    retries: how often it was sent again.
    lost_tokens: tokens that were computed in vain there.

    With `reserves_first`, blocks are reserved before the prefill begins, and prefilled_s is when the prompt was
    complete on the engine.
    """

    index: int
    arrival_s: float
    submitted_s: float
    reserves_first: bool = False
    prefill: int | None = None
    decode: int | None = None
    of_prefill: int = -1
    of_decode: int = -1
    prefilled_s: float = -1.0
    accepted_s: float = -1.0
    taken_s: float = -1.0
    reserved_s: float = -1.0
    transfer_s: float = -1.0
    received_s: float = -1.0
    tokens: int = 0
    sent_s: float = -1.0
    retries: int = 0
    lost_tokens: int = 0

    def line(self, prefilled: RequestLine | None, decoded: RequestLine | None, max_new_tokens: int) -> RequestLine:
        """The line of the whole request. prefilled, decoded: those of its replicas, None where it has none."""
        first, last = prefilled or decoded, decoded or prefilled
        assert first is not None
        assert last is not None
        line = msgspec.structs.replace(
            last, index=self.index, arrival_s=number(self.arrival_s), max_new_tokens=max_new_tokens
        )
        if self.received_s >= 0:
            line.transfer_tokens = self.tokens
            line.transfer_start_s, line.transfer_end_s = number(self.transfer_s), number(self.received_s)
        if last.outcome == "completed":
            line.first_scheduled_s, line.reused_tokens = first.first_scheduled_s, first.reused_tokens
            line.queue_time_s = number(value_of(first.first_scheduled_s) - self.arrival_s)
            line.ttft_s = number(value_of(last.first_token_s) - self.arrival_s)
            line.e2e_s = number(value_of(last.end_s) - self.arrival_s)
            held = {CONCURRENCY: self.submitted_s - self.arrival_s} if self.submitted_s > self.arrival_s else {}
            if self.sent_s > self.submitted_s:
                held[ROUTER] = self.sent_s - self.submitted_s
            reserving = self._before() if self.reserves_first and self.reserved_s >= 0 else {}
            parts = [held, reserving, first.attribution_s]
            if first is not last:
                line.disk_reused_tokens, line.remote_reused_tokens = (
                    first.disk_reused_tokens,
                    first.remote_reused_tokens,
                )
                line.pauses += first.pauses
                line.recomputed_tokens += first.recomputed_tokens
                parts += [self._between(), last.attribution_s]
                if self.reserves_first:
                    parts = [held, self._before(), self._until_complete(first), self._transfer(), last.attribution_s]
            line.attribution_s = _added(*parts)
        self._add_replicas(line)
        ended_at = self.prefill if self.decode is None else self.decode
        assert ended_at is not None
        line.replica = ended_at
        return line

    def failed(self, line: RequestLine, replica: int) -> RequestLine:
        """`line` of a request that was lost with a replica, with what is known of its way."""
        self._add_replicas(line)
        line.replica = replica
        return line

    def _add_replicas(self, line: RequestLine) -> None:
        line.prefill_replica, line.decode_replica = self.prefill, self.decode
        if self.retries:
            line.retries, line.lost_tokens = self.retries, self.lost_tokens

    def _between(self) -> dict[str, float]:
        """Seconds between the answer of the prefill replica and the arrival of keys and values, by what for."""
        return self._reserving(self.prefilled_s) | self._transfer()

    def _before(self) -> dict[str, float]:
        """Seconds until the request goes to its prefill replica, where blocks are reserved first."""
        return self._reserving(self.sent_s)

    def _reserving(self, offered_s: float) -> dict[str, float]:
        return {
            ROUTER: self.accepted_s - offered_s,
            WAITING_ITERATION: self.taken_s - self.accepted_s,
            DECODE_BLOCKS: self.reserved_s - self.taken_s,
        }

    def _until_complete(self, first: RequestLine) -> dict[str, float]:
        """The attribution of the prefill replica, until the prompt was complete: the answer, which reaches the router
        later, does not matter."""
        parts = {name: value_of(seconds) for name, seconds in first.attribution_s.items()}
        parts["recompute" if first.pauses else "context"] -= value_of(first.end_s) - self.prefilled_s
        return parts

    def _transfer(self) -> dict[str, float]:
        return {TRANSFER: self.received_s - self.transfer_s}


def _added(*parts: dict[str, float]) -> dict[str, float]:
    """The sums of attributions, in the order in which their names come first."""
    seconds: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            seconds[name] = seconds.get(name, 0.0) + value_of(value)
    return {name: number(value) for name, value in seconds.items()}


def write_lines(directory: Path, recording_format: str, lines: Iterable[RequestLine]) -> None:
    """Write the `requests.jsonl` of the fleet."""
    with closing(JsonLinesWriter(directory / f"requests.{recording_format}")) as writer:
        for line in lines:
            writer.write([encode(line)])


def transfer_figures(lines: Sequence[RequestLine], bytes_per_token: float) -> dict[str, Any]:
    """The entry `transfers` of a fleet's figures: how many there were, their tokens and bytes, how long each took, and
    how long requests waited for blocks of decode replicas. local_requests: those whose prompts were computed there."""
    # Requests of one replica may have tokens that came from stores.
    between = [line for line in lines if line.prefill_replica is not None and line.decode_replica is not None]
    sent = [line for line in between if isinstance(line.transfer_tokens, int)]
    tokens = sum(line.transfer_tokens for line in sent if isinstance(line.transfer_tokens, int))
    waits_s = [value_of(line.attribution_s.get(DECODE_BLOCKS, 0.0)) for line in sent if line.attribution_s]
    return {
        "count": len(sent),
        "tokens": tokens,
        "bytes": tokens * bytes_per_token,
        "local_requests": sum(line.prefill_replica is None for line in lines),
        "transfer_s": distribution([value_of(line.transfer_end_s) - value_of(line.transfer_start_s) for line in sent]),
        "decode_wait_s": distribution(waits_s),
    }
