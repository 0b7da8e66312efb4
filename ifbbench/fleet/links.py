"""Transfers of keys and values between the replicas of a fleet, which share the links of their two ends."""

from bisect import insort
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from ifbbench.virtual_clock import tick, to_seconds


class _Flow:
    """A transfer.

    tokens: tokens that were left of it at `since_s`.
    end_s: when its last token has left, unless another one begins or ends before.
    """

    def __init__(self, key: int, source: int, target: int, tokens: float, since_s: float) -> None:
        self.key, self.source, self.target, self.tokens, self.since_s = key, source, target, tokens, since_s
        self.rate, self.end_s = 0.0, inf


class Links:
    """Each replica has a link out, or in. Transfers through a link at the same time have equal shares of it, and each
    is as quick as the smaller of its two shares. Its keys and values are there a latency after they have left.

    out_rates, in_rates: tokens per second of each replica that sends, and that receives; infinite ones take no time.
    Calls of `take` and `cancel` come in order of time, in seconds. A transfer may be sent before it begins: a replica
    with several micro batches knows when a prompt will be complete while others still run before that."""

    def __init__(self, out_rates: Sequence[float], in_rates: Sequence[float], latency_s: float) -> None:
        self._out_rates, self._in_rates, self._latency_s = out_rates, in_rates, latency_s
        self._num_out, self._num_in = [0] * len(out_rates), [0] * len(in_rates)
        self._flows: dict[int, _Flow] = {}
        self._later: list[_Flow] = []  # those that have not begun, in order of time
        self._arriving: list[tuple[float, int]] = []  # those that have left, in order of arrival

    def rate(self, source: int, target: int) -> float:
        """Tokens per second between two replicas that share their links with no other transfer."""
        return min(self._out_rates[source], self._in_rates[target])

    @property
    def next_s(self) -> float:
        """When `take` has something to do next; infinite if nothing is on its way."""
        times_s = [flow.end_s for flow in self._flows.values()]
        times_s += [flow.since_s for flow in self._later[:1]] + [arrival_s for arrival_s, _ in self._arriving[:1]]
        return min(times_s, default=inf)

    def send(self, key: int, source: int, target: int, tokens: float, begin_s: float) -> None:
        """The transfer `key`, which no other one on its way has, begins at `begin_s`, when `take` comes to it."""
        insort(self._later, _Flow(key, source, target, tokens, begin_s), key=lambda flow: flow.since_s)

    def take(self, now_s: float) -> list[int]:
        """The transfers that have arrived by now, in order; those that are due begin, and what has left makes room on
        its links."""
        while self._later and self._later[0].since_s <= now_s:
            flow = self._later.pop(0)
            self._flows[flow.key] = flow
            self._num_out[flow.source] += 1
            self._num_in[flow.target] += 1
            self._share_again(flow.since_s)
        left = sorted([flow for flow in self._flows.values() if flow.end_s <= now_s], key=lambda flow: flow.end_s)
        for flow in left:
            self._leave(flow)
            self._arriving.append((to_seconds(tick(flow.end_s + self._latency_s)), flow.key))
        if left:
            self._share_again(now_s)
        count = sum(arrival_s <= now_s for arrival_s, _ in self._arriving)
        arrived, self._arriving = self._arriving[:count], self._arriving[count:]
        return [key for _, key in arrived]

    def cancel(self, key: int, now_s: float) -> None:
        """Nothing comes of the transfer `key`, if there is one."""
        self._arriving = [one for one in self._arriving if one[1] != key]
        self._later = [flow for flow in self._later if flow.key != key]
        if (flow := self._flows.get(key)) is not None:
            self._leave(flow)
            self._share_again(now_s)

    def _leave(self, flow: _Flow) -> None:
        """Nothing more of this transfer is on its links."""
        del self._flows[flow.key]
        self._num_out[flow.source] -= 1
        self._num_in[flow.target] -= 1

    def _share_again(self, now_s: float) -> None:
        """The number of transfers on some link has changed."""
        for flow in self._flows.values():
            if now_s > flow.since_s:
                flow.tokens = max(0.0, flow.tokens - flow.rate * (now_s - flow.since_s))
                flow.since_s = now_s
            out_rate, in_rate = self._out_rates[flow.source], self._in_rates[flow.target]
            flow.rate = min(out_rate / self._num_out[flow.source], in_rate / self._num_in[flow.target])
            duration_s = flow.tokens / flow.rate if flow.tokens > 0 else 0.0
            flow.end_s = to_seconds(tick(now_s + duration_s))


class MeasuredLinks:
    """`Links` of replicas that compute: keys and values are copied when a transfer begins, and arrive after the time
    that this took. As each was copied alone, one follows another through the link of a replica.

    num_out, num_in: number of replicas that send, and that receive.
    move(key): copies keys and values, and returns the seconds.
    """

    def __init__(self, num_out: int, num_in: int, move: Callable[[int], float]) -> None:
        self._out_s, self._in_s, self._move = [0.0] * num_out, [0.0] * num_in, move
        self._arriving: list[tuple[float, int]] = []

    @property
    def next_s(self) -> float:
        """See Links."""
        return self._arriving[0][0] if self._arriving else inf

    def send(self, key: int, source: int, target: int, tokens: float, now_s: float) -> None:
        """See Links."""
        begin_s = max(now_s, self._out_s[source], self._in_s[target])
        end_s = to_seconds(tick(begin_s + self._move(key)))
        self._out_s[source] = self._in_s[target] = end_s
        heappush(self._arriving, (end_s, key))

    def take(self, now_s: float) -> list[int]:
        """See Links."""
        arrived = list[int]()
        while self._arriving and self._arriving[0][0] <= now_s:
            arrived.append(heappop(self._arriving)[1])
        return arrived

    def cancel(self, key: int, now_s: float) -> None:
        """See Links."""
        self._arriving = [one for one in self._arriving if one[1] != key]
        heapify(self._arriving)


def left_after_prefill(tokens: int, layers: int, rate: float, computing_s: float) -> float:
    """How many of `tokens` tokens' keys and values are left when a prefill of `computing_s` seconds ends, of a transfer
    by layer at `rate` tokens per second: those of the last layer, or more if the link is slower than the prefill.

    A layer leaves once it is computed. The first one is computed after a `layers`-th of the time."""
    return max(tokens / layers, tokens - rate * computing_s * (layers - 1) / layers)
