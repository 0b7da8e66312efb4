"""Scenarios for schedulers, written as run-length timelines.

Requests are letters in the order of their making. A timeline is a text of runs, `iterations:what ran`: small letters
ran a context chunk, capital ones made a token, those behind a minus sign were paused. `2:ab 20:AB 1:A-B 39:A` says that
two iterations ran chunks of a and b, that both then made tokens for 20 iterations, that b was paused, and that a went
on alone. Order is that of the active list (of the decision, for pauses). With micro batches each context letter is
followed by the tokens of its chunk, and `.` is an iteration in which nothing ran.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ifbbench.engine.request import Request
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.manager import KvCacheManager
from ifbbench.kv.sequence import ReuseRules
from ifbbench.schedulers.tensorrt_llm.micro_batch import MicroBatchScheduler
from ifbbench.schedulers.tensorrt_llm.policies import POLICY_CLASSES, LoraLimits
from tests.conformance.capacity_loop import CapacityLoop, Decided
from tests.conformance.micro_batch_loop import MicroBatchLoop, Scheduled

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Asks:
    """A request of a scenario: `prompt` tokens in, `new` tokens out, arriving before iteration `at`."""

    prompt: int
    new: int
    at: int = 0
    chunk: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def request(self, request_id: int) -> Request:
        request = Request(request_id, self.prompt, self.new, **self.options)
        if self.chunk is not None:
            request.set_chunk(self.chunk)
        return request


def asks(prompt: int, new: int, *, at: int = 0, chunk: int | None = None, **options: Any) -> Asks:
    """A request; `options` are those of `Request`."""
    return Asks(prompt, new, at, chunk, options)


@dataclass(frozen=True)
class Pool:
    """A KV cache of `blocks` blocks. Windows limit nothing: they are as long as the longest sequence."""

    blocks: int
    tokens_per_block: int = 10
    max_seq_len: int = 90
    sink: int = 0
    reuse: bool = False

    def cache(self, slots: int) -> KvCacheManager:
        attention_window = AttentionWindow(self.tokens_per_block, self.max_seq_len, self.max_seq_len, self.sink)
        return KvCacheManager(attention_window, self.blocks, slots, reuse=ReuseRules(self.reuse))


def capacity_timeline(
    policy: str, limit: int, pool: Pool, requests: Sequence[Asks], lora: LoraLimits | None = None, until: int = 10_000
) -> str:
    """What `policy` with at most `limit` requests makes of the requests, in the first `until` iterations."""
    arrivals: dict[int, list[Request]] = {}
    for request_id, ask in enumerate(requests):
        arrivals.setdefault(ask.at, []).append(ask.request(request_id))
    cache = pool.cache(len(requests))
    loop = CapacityLoop(POLICY_CLASSES[policy](limit, lora or LoraLimits()), cache, arrivals, max_input_len=1000)
    frames = []
    for decided in loop:
        frames.append(_capacity_frame(decided))
        cache.check_consistency()
        if len(frames) == until:
            return _run_lengths(frames)
    assert cache.free_blocks == pool.blocks
    return _run_lengths(frames)


def _capacity_frame(decided: Decided) -> str:
    scheduled = sorted(decided.scheduled, key=lambda request: request.order)
    frame = "".join(_letter(request) for request in scheduled)
    return frame + "".join(f"-{_letter(request).upper()}" for request in decided.paused)


def micro_batch_timeline(
    scheduler: MicroBatchScheduler, requests: Sequence[Asks], iterations: int, num_micro_batches: int = 1
) -> str:
    """What `scheduler` makes of the requests, all active from the start and all fitting the KV cache."""
    made = [ask.request(request_id) for request_id, ask in enumerate(requests)]
    loop = MicroBatchLoop(scheduler, made, num_micro_batches)
    return _run_lengths(_micro_batch_frame(loop.step()) for _ in range(iterations))


def _micro_batch_frame(scheduled: Scheduled) -> str:
    chunks = sorted((LETTERS[request.request_id], size) for request, size in scheduled.context)
    context = "".join(f"{letter}{size}" for letter, size in chunks)
    return context + "".join(LETTERS[request.request_id].upper() for request in scheduled.generation) or "."


def _letter(request: Request) -> str:
    letter = LETTERS[request.request_id]
    return letter if request.in_context else letter.upper()


def _run_lengths(frames: Iterable[str]) -> str:
    return " ".join(f"{len(list(run))}:{frame}" for frame, run in groupby(frames))
