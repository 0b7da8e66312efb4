"""Admission: which requests are refused at once, and which become active when."""

import math
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ifbbench.engine.active import ActiveRequests
from ifbbench.engine.batching_config import LOOK_AHEAD, BatchingConfig
from ifbbench.engine.kv_cache.attention_window import AttentionWindow
from ifbbench.engine.request import Request

NextChange = Callable[[float], float | None]
"""From the time now to when more requests will have arrived, both in seconds on the run's clock; None if only a
response lets one come, or none does."""


class Refusal(NamedTuple):
    """limit: the setting that decides. text: what is wrong, with the numbers."""

    limit: str
    text: str


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """max_seq_len, max_input_len: in tokens. pools: each attention window and its number of blocks. vocab_size: None
    where no model says. pause_truncates: whether a pause may cost a request tokens that it has made already."""

    max_seq_len: int
    max_input_len: int
    pools: tuple[tuple[AttentionWindow, int], ...]
    max_beam_width: int = 1
    vocab_size: int | None = None
    pause_truncates: bool = False
    reuses_blocks: bool = False

    @classmethod
    def of(cls, config: BatchingConfig, policy_may_pause: bool) -> "AdmissionLimits":
        """What `config` lets in. Without chunks a resumed prompt may be too long, and is cut then."""
        return cls(
            config.max_seq_len, config.max_input_len, config.pools, config.max_beam_width, config.vocab_size,
            pause_truncates=config.chunk_unit is None and policy_may_pause, reuses_blocks=config.reuse.enabled,
        )  # fmt: skip

    def refusal(self, request: Request) -> str | None:
        """Why `request` can never run, or None. Clamps its new tokens to what max_seq_len leaves."""
        prompt_len, max_new_tokens, streaming = request.prompt_len, request.max_new_tokens, request.options.streaming
        if refusal := self.refusal_by_size(prompt_len, max_new_tokens, request.beam_width, streaming):
            return refusal.text
        if error := self._contents(request):
            return error
        request.clamp_new_tokens(self.max_seq_len - prompt_len)
        return None

    def refusal_by_size(
        self, prompt_len: int, max_new_tokens: int, beam_width: int = 1, streaming: bool = False
    ) -> Refusal | None:
        """Why a request of this size can never run, or None. If it can, it can with fewer new tokens as well."""
        if not 1 <= beam_width <= self.max_beam_width:
            text = f"beam width {beam_width}: expected 1 to {self.max_beam_width} (max_beam_width)"
            return Refusal("max_beam_width", text)
        if prompt_len < 1 or max_new_tokens < 1:
            text = f"a prompt of {prompt_len} tokens and {max_new_tokens} new tokens: both must be at least 1"
            return Refusal("prompt_len", text)
        if prompt_len >= self.max_seq_len:
            text = f"prompt of {prompt_len} tokens leaves no room for output in max_seq_len {self.max_seq_len}"
            return Refusal("max_seq_len", text)
        if prompt_len > self.max_input_len:
            return Refusal(
                "max_input_len",
                f"prompt of {prompt_len} tokens is longer than max_input_len {self.max_input_len}"
                " (without chunked context at most max_num_tokens)",
            )
        max_new_tokens = min(max_new_tokens, self.max_seq_len - prompt_len)
        for attention_window, num_blocks in self.pools:
            needed = attention_window.blocks_to_completion(prompt_len, max_new_tokens, 0, beam_width)
            needed += attention_window.more_for_beams(prompt_len, beam_width) if self.reuses_blocks else 0
            if needed > num_blocks:
                text = f"needs {needed} KV cache blocks until complete, the pool has {num_blocks} (kv_blocks)"
                return Refusal("kv_blocks", text)
        return self._refusal_of_stream(prompt_len, max_new_tokens, beam_width) if streaming else None

    def _contents(self, request: Request) -> str | None:
        if not math.isfinite(request.priority):
            return f"priority {request.priority}: expected a finite number"
        tokens = request.prompt_tokens
        if tokens is not None and len(tokens) and self.vocab_size is not None:
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self.vocab_size:
                found = low if low < 0 else high
                return f"token id {found} is not in the vocabulary; expected 0 to {self.vocab_size - 1}"
        return request.sampling.problem(request.beam_width)

    def _refusal_of_stream(self, prompt_len: int, max_new_tokens: int, beam_width: int) -> Refusal | None:
        if beam_width > 1:
            text = "streaming with beams: expected one or the other, for beams are ordered only at the end"
            return Refusal("streaming", text)
        longest = prompt_len + max_new_tokens - 1
        if self.pause_truncates and longest > self.max_input_len:
            return Refusal(
                "streaming",
                f"streaming up to {longest} tokens: a pause could cut tokens already sent, for without chunked context "
                f"a resumed prompt has at most {self.max_input_len} (max_input_len)",
            )
        return None


class Admission:
    """The queue's front: fetches requests, refuses the impossible, lets the others in by priority.

    `get_requests(n)` returns at most n requests that have arrived; `refuse(request, error)` answers for a refused one.
    `next_priority()`: the highest priority among those that have arrived and were not fetched, None if there are none.
    With it, and a `get_requests` that returns the highest priorities first, no look-ahead hides a higher priority.
    `next_change(now_s)`: when it may return others, unless somebody leaves before; None for never. Without it that may
    be at any time.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        max_active: int,
        get_requests: Callable[[int], list[Request]],
        refuse: Callable[[Request, str], None],
        next_change: NextChange | None = None,
        next_priority: Callable[[], float | None] | None = None,
    ) -> None:
        self._limits = limits
        self._max_active = max_active
        self._get_requests = get_requests
        self._refuse = refuse
        self._next_change = next_change
        self._next_priority = next_priority
        self._nothing_before_s = -math.inf
        self._waiting: list[Request] = []
        self._in_use: dict[int, Request] = {}

    @property
    def waiting(self) -> list[Request]:
        """Fetched requests that are not active yet, in order."""
        return self._waiting

    def forget(self, request: Request) -> None:
        """The request had its final response: its id may be used again, and its place."""
        self._nothing_before_s = -math.inf
        self._in_use.pop(request.request_id, None)

    def find(self, request_id: int) -> Request | None:
        """The request, waiting or active, that this id belongs to now."""
        return self._in_use.get(request_id)

    def withdraw(self, request: Request) -> None:
        """It will not become active: it was stopped, or the loop ends."""
        self._waiting.remove(request)
        self.forget(request)

    def admit(self, active: ActiveRequests, now_s: float) -> Sequence[Request]:
        """Fetch, and make active what the limits allow; returns the newly active requests."""
        if now_s < self._nothing_before_s:
            return ()
        self._fetch(max(0, self._max_active - len(active)) + LOOK_AHEAD)
        admitted = []
        while self._waiting and self._may_enter(self._waiting[0], active):
            request = self._waiting.pop(0)
            active.add(request)
            admitted.append(request)
        if self._next_change is not None:
            change_s = self._next_change(now_s)
            self._nothing_before_s = math.inf if change_s is None else change_s
        return admitted

    def _may_enter(self, request: Request, active: ActiveRequests) -> bool:
        last = active.last
        if last is not None and request.beam_width != last.beam_width:
            return False
        if len(active) < self._max_active:
            return True
        # Beyond the limit only what goes before the last active request, while there are sequence slots.
        return last is not None and request.priority > last.priority and active.table.free_rows > 0

    def _fetch(self, max_waiting: int) -> None:
        """Fetch until `max_waiting` requests wait or no more have arrived. Refused requests take no room: those behind
        them are fetched in the same call, for `admit` may not be called again until something changes."""
        while (room := max_waiting - len(self._waiting)) > 0:
            if self._take(self._get_requests(room)) == 0:
                break
        if self._next_priority is None:
            return
        # Whoever goes before the last of the first `max_waiting` is fetched beyond them.
        while (priority := self._next_priority()) is not None and (
            len(self._waiting) < max_waiting or priority > self._waiting[max_waiting - 1].priority
        ):
            self._take(self._get_requests(1))

    def _take(self, requests: list[Request]) -> int:
        """Put `requests` among the waiting ones, or refuse them. Returns how many were refused."""
        num_refused = 0
        for request in requests:
            if error := self._refusal(request):
                num_refused += 1
                self._refuse(request, error)
            else:
                self._in_use[request.request_id] = request
                insort(self._waiting, request, key=lambda item: -item.priority)
        return num_refused

    def _refusal(self, request: Request) -> str | None:
        if request.request_id in self._in_use:
            return f"request id {request.request_id} is in use"
        return self._limits.refusal(request)
