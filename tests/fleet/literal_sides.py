"""Literal simulations of prefill and decode apart, for a device on which each iteration takes the same time: the rules
of an engine for prompts that share nothing and for keys and values that come, and links with equal shares."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import NamedTuple

from ifbbench.virtual_clock import tick, to_seconds

BLOCK = 16


def nanosecond(seconds: float) -> float:
    """The first whole nanosecond at or after `seconds`."""
    return to_seconds(tick(seconds))


class Job(NamedTuple):
    """A request. output_len: at most the tokens that fit behind the prompt into its last block."""

    arrival_s: float
    prompt_len: int
    output_len: int

    @property
    def blocks(self) -> int:
        return ceil(self.prompt_len / BLOCK)


class Times(NamedTuple):
    """What became of a request; None for what it had not."""

    first_token_s: float
    end_s: float
    reserved_s: float | None
    received_s: float | None


@dataclass
class Sizes:
    """Sizes of one side: replicas, requests at a time, tokens of an iteration, blocks, tokens a second of a link."""

    replicas: int
    requests: int
    tokens: int
    blocks: int
    rate: float


@dataclass
class _Replica:
    free: int
    queue: deque[int] = field(default_factory=deque)
    skipped: list[int] = field(default_factory=list)  # those that wait for keys and values, or have them
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)  # those that are sent, or to which is sent
    busy_until: float | None = None
    began: float = 0.0


class LiteralSides:
    """vLLM. Requests go to the replicas of each side in turn. layers: of the model, of transfers by layer."""

    def __init__(
        self,
        jobs: Sequence[Job],
        iteration_s: float,
        prefill: Sizes,
        decode: Sizes,
        latency_s: float,
        layers: int | None = None,
    ) -> None:
        self.jobs, self.iteration_s, self.latency_s, self.layers = jobs, iteration_s, latency_s, layers
        self.prefill, self.decode = prefill, decode
        self.p = [_Replica(prefill.blocks) for _ in range(prefill.replicas)]
        self.d = [_Replica(decode.blocks) for _ in range(decode.replicas)]
        self.p_of = [number % prefill.replicas for number in range(len(jobs))]
        decoded = [number for number, job in enumerate(jobs) if job.output_len > 1]
        self.d_of = {number: turn % decode.replicas for turn, number in enumerate(decoded)}
        self.computed, self.produced = [0] * len(jobs), [0] * len(jobs)
        self.reserved: dict[int, float] = {}
        self.received: dict[int, float] = {}
        self.first: dict[int, float] = {}
        self.end: dict[int, float] = {}
        self.flows: dict[int, list[float]] = {}  # tokens left, since, end
        self.arriving: list[tuple[float, int]] = []

    def run(self) -> list[Times]:
        arrived = 0
        now = 0.0
        while len(self.end) < len(self.jobs):
            for number, one in enumerate(self.p):
                if one.busy_until == now:
                    self._end_prefill(number, now)
            for one in self.d:
                if one.busy_until == now:
                    self._end_decode(one, now)
            while arrived < len(self.jobs) and self.jobs[arrived].arrival_s <= now:
                self._arrive(arrived)
                arrived += 1
            self._take_transfers(now)
            for one in self.p:
                if one.busy_until is None:
                    self._begin_prefill(one, now)
            for one in self.d:
                if one.busy_until is None:
                    self._begin_decode(one, now)
                    self._begin_reserved(now)
            times = [one.busy_until for one in (*self.p, *self.d) if one.busy_until is not None]
            times += [flow[2] for flow in self.flows.values()] + [time for time, _ in self.arriving]
            if arrived < len(self.jobs):
                times.append(self.jobs[arrived].arrival_s)
            if len(self.end) < len(self.jobs):
                now = max(now, min(times))
        return [
            Times(self.first[number], self.end[number], self.reserved.get(number), self.received.get(number))
            for number in range(len(self.jobs))
        ]

    def _arrive(self, number: int) -> None:
        self.p[self.p_of[number]].queue.append(number)

    def _begin_reserved(self, now: float) -> None:
        """Begin the prefill of what has blocks since this moment, where blocks are reserved before."""

    # Prefill.

    def _begin_prefill(self, one: _Replica, now: float) -> None:
        left, chunks = self.prefill.tokens, 0
        for number in one.running:
            chunk = min(left, self.jobs[number].prompt_len - self.computed[number])
            self._compute(one, number, chunk)
            left -= chunk
            chunks += chunk > 0
        while one.queue and left > 0 and len(one.running) < self.prefill.requests:
            number = one.queue[0]
            if self.jobs[number].blocks > one.free:
                break
            one.queue.popleft()
            one.running.append(number)
            chunk = min(left, self.jobs[number].prompt_len)
            self._compute(one, number, chunk)
            left -= chunk
            chunks += 1
        if chunks:
            one.busy_until = round(now + self.iteration_s, 9)

    def _compute(self, one: _Replica, number: int, tokens: int) -> None:
        before = ceil(self.computed[number] / BLOCK)
        self.computed[number] += tokens
        one.free -= ceil(self.computed[number] / BLOCK) - before

    def _end_prefill(self, replica: int, now: float) -> None:
        one = self.p[replica]
        one.busy_until = None
        for number in list(one.running):
            if self.computed[number] < self.jobs[number].prompt_len:
                continue
            one.running.remove(number)
            if number in self.d_of:
                self.d[self.d_of[number]].queue.append(number)
            else:
                self.first[number] = self.end[number] = now
                one.free += self.jobs[number].blocks

    # Decode.

    def _begin_decode(self, one: _Replica, now: float) -> None:
        for number in list(one.skipped):
            if number in self.received and self._has_room(one):
                one.skipped.remove(number)
                one.running.append(number)
        while one.queue and self._has_room(one):
            number = one.queue[0]
            if self.jobs[number].blocks > one.free:
                break
            one.skipped.append(one.queue.popleft())
            one.free -= self.jobs[number].blocks
            self.reserved[number] = now
            self._change_flows(now, add=number, tokens=float(self.jobs[number].prompt_len))
        if one.running:
            one.busy_until = round(now + self.iteration_s, 9)

    def _has_room(self, one: _Replica) -> bool:
        return len(one.running) < min(self.decode.requests, self.decode.tokens)

    def _end_decode(self, one: _Replica, now: float) -> None:
        one.busy_until = None
        for number in list(one.running):
            self.produced[number] += 1
            if self.produced[number] == 1:
                self.first[number] = now
            if self.produced[number] == self.jobs[number].output_len:
                self.end[number] = now
                one.running.remove(number)
                one.free += self.jobs[number].blocks

    # Transfers.

    def _change_flows(self, now: float, add: int | None = None, tokens: float = 0.0) -> None:
        for number, flow in self.flows.items():
            flow[0] = max(0.0, flow[0] - self._rate(number) * (now - flow[1])) if now > flow[1] else flow[0]
            flow[1] = now
        ended = [(flow[2], number) for number, flow in self.flows.items() if flow[2] <= now and number != add]
        for end, number in sorted(ended):
            del self.flows[number]
            self.arriving.append((nanosecond(end + self.latency_s), number))
        if add is not None:
            self.flows[add] = [tokens, now, inf]
        for number, flow in self.flows.items():
            rate = self._rate(number)
            flow[2] = nanosecond(now + flow[0] / rate)

    def _rate(self, number: int) -> float:
        """Each end of a transfer divides its rate equally."""
        outs = sum(self.p_of[other] == self.p_of[number] for other in self.flows)
        ins = sum(self.d_of[other] == self.d_of[number] for other in self.flows)
        return min(self.prefill.rate / outs, self.decode.rate / ins)

    def _take_transfers(self, now: float) -> None:
        if any(flow[2] <= now for flow in self.flows.values()):
            self._change_flows(now)
        arrived = [number for time, number in self.arriving if time <= now]
        self.arriving = [one for one in self.arriving if one[0] > now]
        for number in arrived:
            self.received[number] = now
            self.p[self.p_of[number]].free += self.jobs[number].blocks


class LiteralTrtllm(LiteralSides):
    """TensorRT-LLM: GUARANTEED_NO_EVICT without chunked context. At most as many requests as the batch has are active;
    on the decode side those that wait for blocks or for keys and values are, too. The first token comes with the keys
    and values."""

    def _begin_prefill(self, one: _Replica, now: float) -> None:
        while one.queue and len(one.skipped) < self.prefill.requests:
            one.skipped.append(one.queue.popleft())  # active
        left, free = self.prefill.tokens, one.free
        for number in list(one.skipped):
            job = self.jobs[number]
            if job.blocks > free or job.prompt_len > left:
                break
            free -= job.blocks
            left -= job.prompt_len
            one.skipped.remove(number)
            one.running.append(number)
            self.computed[number] = job.prompt_len
        one.free = free
        if one.running:
            one.busy_until = round(now + self.iteration_s, 9)

    def _begin_decode(self, one: _Replica, now: float) -> None:
        for number in list(one.waiting):
            if number in self.received:
                one.waiting.remove(number)
                one.running.append(number)
                self.first[number], self.produced[number] = now, 1
        while one.queue and len(one.skipped) + len(one.waiting) + len(one.running) < self.decode.requests:
            one.skipped.append(one.queue.popleft())
        for number in list(one.skipped):
            if self.jobs[number].blocks > one.free:
                break
            one.skipped.remove(number)
            one.waiting.append(number)
            one.free -= self.jobs[number].blocks
            self.reserved[number] = now
            self._change_flows(now, add=number, tokens=float(self.jobs[number].prompt_len))
        if one.running:
            one.busy_until = round(now + self.iteration_s, 9)


class LiteralSglang(LiteralSides):
    """SGLang, without a radix cache: the decode side has pages for a request before its prefill begins. Each side has
    rows for as many requests as run at a time, and a decode side for few of them twice as many more."""

    reserved_tokens = 0

    def _arrive(self, number: int) -> None:
        if number in self.d_of:
            self.d[self.d_of[number]].queue.append(number)
        else:
            super()._arrive(number)

    def _begin_reserved(self, now: float) -> None:
        for one in self.p:
            if one.busy_until is None:
                self._begin_prefill(one, now)

    def _begin_prefill(self, one: _Replica, now: float) -> None:
        while one.queue and len(one.running) + len(one.waiting) < self.prefill.requests:
            number = one.queue.popleft()
            one.running.append(number)
            self.computed[number] = self.jobs[number].prompt_len
            one.free -= self.jobs[number].blocks
        if one.running:
            one.began, one.busy_until = now, round(now + self.iteration_s, 9)

    def _end_prefill(self, replica: int, now: float) -> None:
        one = self.p[replica]
        one.busy_until = None
        for number in one.running:
            job = self.jobs[number]
            if number not in self.d_of:
                self.first[number] = self.end[number] = now
                one.free += job.blocks
                continue
            one.waiting.append(number)
            left = float(job.prompt_len)
            if self.layers is not None:  # all layers but the last have had their part of the iteration to be sent
                rate = min(self.prefill.rate, self.decode.rate)
                sent = rate * (now - one.began) * (self.layers - 1) / self.layers
                left = max(left / self.layers, left - sent)
            self._change_flows(now, add=number, tokens=left)
        one.running = []

    def _begin_decode(self, one: _Replica, now: float) -> None:
        while one.queue and self._fits(one, self.jobs[one.queue[0]]):
            number = one.queue.popleft()
            one.waiting.append(number)
            one.free -= self.jobs[number].blocks
            self.reserved[number] = now
            self.p[self.p_of[number]].queue.append(number)
        for number in list(one.waiting):
            if number in self.received:
                one.waiting.remove(number)
                one.skipped.append(number)
        while one.skipped and len(one.running) < self.decode.requests:
            number = one.skipped.pop(0)
            one.running.append(number)
            self.first[number], self.produced[number] = now, 1
        if one.running:
            one.busy_until = round(now + self.iteration_s, 9)

    def _fits(self, one: _Replica, job: Job) -> bool:
        requests = self.decode.requests
        held = len(one.running) + len(one.waiting) + len(one.skipped)
        if held >= (3 * requests if requests <= 32 else requests):
            return False
        running = [(self.jobs[number], self.produced[number]) for number in one.running]
        may_return = sum(other.prompt_len + produced for other, produced in running)
        longest = [other.prompt_len + other.output_len - may_return for other, _ in running]
        free = one.free * BLOCK - max([self.reserved_tokens * held, *longest])
        return max(job.prompt_len + self.reserved_tokens, job.prompt_len + job.output_len - may_return) <= free

    def _take_transfers(self, now: float) -> None:
        before = set(self.received)
        super()._take_transfers(now)
        for number in self.received.keys() - before:
            self.p[self.p_of[number]].waiting.remove(number)
