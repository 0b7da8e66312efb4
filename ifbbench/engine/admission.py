"""Admission control: fetches requests, refuses those that can never run, and activates the others by priority."""

import math
from bisect import insort
from collections.abc import Callable, Sequence

from ifbbench.engine.active import ActiveRequests
from ifbbench.engine.config import LOOK_AHEAD, BatchingConfig
from ifbbench.engine.request import Request

NextChange = Callable[[float], float | None]
"""Takes the time and returns when more requests will have arrived, in seconds on the run's clock; None if only a
response lets one arrive, or none will."""


class AdmissionLimits:
    """The refusal rules: which requests can never run. This is the only place where they are written."""

    def __init__(self, config: BatchingConfig, policy_may_pause: bool) -> None:
        self._config = config
        self._pools = config.pools
        # Without chunked context a pause drops generated tokens that do not fit into a resumed prompt.
        self._pause_truncates = config.chunk_unit is None and policy_may_pause

    def refusal(self, request: Request) -> str | None:
        """Why `request` can never run, or None. Clamps its new tokens to what max_seq_len leaves."""
        return self._invalid_field(request) or self._too_long(request) or self._not_streamable(request)

    def _invalid_field(self, request: Request) -> str | None:
        if not 1 <= request.beam_width <= self._config.max_beam_width:
            return f"beam width {request.beam_width}: expected 1 to {self._config.max_beam_width} (max_beam_width)"
        if not math.isfinite(request.priority):
            return f"priority {request.priority}: expected a finite number"
        tokens, vocab_size = request.prompt_tokens, self._config.vocab_size
        if tokens is not None and len(tokens) and vocab_size is not None:
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= vocab_size:
                found = low if low < 0 else high
                return f"token id {found} is not in the vocabulary; expected 0 to {vocab_size - 1}"
        return request.sampling.problem(request.beam_width)

    def _too_long(self, request: Request) -> str | None:
        max_seq_len, max_input_len = self._config.max_seq_len, self._config.max_input_len
        prompt_len = request.prompt_len
        if prompt_len < 1 or request.max_new_tokens < 1:
            return f"a prompt of {prompt_len} tokens and {request.max_new_tokens} new tokens: both must be at least 1"
        if prompt_len >= max_seq_len:
            return f"prompt of {prompt_len} tokens leaves no room for output in max_seq_len {max_seq_len}"
        if prompt_len > max_input_len:
            return (
                f"prompt of {prompt_len} tokens is longer than max_input_len {max_input_len}"
                " (without chunked context at most max_num_tokens)"
            )
        request.clamp_new_tokens(max_seq_len - prompt_len)
        for attention_window, num_blocks in self._pools:
            needed = attention_window.blocks_to_completion(prompt_len, request.max_new_tokens, 0, request.beam_width)
            if self._config.reuse.enabled:
                needed += attention_window.more_for_beams(prompt_len, request.beam_width)
            if needed > num_blocks:
                return f"needs {needed} KV cache blocks until complete, the pool has {num_blocks} (kv_blocks)"
        return None

    def _not_streamable(self, request: Request) -> str | None:
        if not request.options.streaming:
            return None
        if request.beam_width > 1:
            return "streaming with beams: expected one or the other, because beams are ordered only at the end"
        longest = request.prompt_len + request.max_new_tokens - 1
        if self._pause_truncates and longest > self._config.max_input_len:
            return (
                f"streaming up to {longest} tokens: a pause could drop tokens already sent, because without chunked "
                f"context a resumed prompt has at most {self._config.max_input_len} tokens (max_input_len)"
            )
        return None


class Admission:
    """Fetches up to the free batch slots and a look-ahead, and keeps what cannot become active yet, by priority.

    get_requests(n): returns at most n requests that have arrived. refuse(request, error): answers a refused one.
    next_change: see NextChange. Without it, `get_requests` is called in every iteration.
    waiting: fetched requests that are not active, in order.
    """

    def __init__(
        self, limits: AdmissionLimits, max_active: int, get_requests: Callable[[int], list[Request]],
        refuse: Callable[[Request, str], None], next_change: NextChange | None = None,
    ) -> None:  # fmt: skip
        self.waiting: list[Request] = []
        self._limits = limits
        self._max_active = max_active
        self._get_requests = get_requests
        self._refuse = refuse
        self._next_change = next_change
        # Until then admission has nothing to do, unless a request leaves.
        self._idle_until_s = -math.inf
        self._in_use: dict[int, Request] = {}

    def admit(self, active: ActiveRequests, now_s: float) -> Sequence[Request]:
        """Fetch requests, and add to `active` what the limits allow; returns the newly active requests."""
        if now_s < self._idle_until_s:
            return ()
        self._fetch(max(0, self._max_active - len(active)) + LOOK_AHEAD)
        admitted = []
        while self.waiting and self._may_enter(self.waiting[0], active):
            request = self.waiting.pop(0)
            active.add(request)
            admitted.append(request)
        if self._next_change is not None:
            change_s = self._next_change(now_s)
            self._idle_until_s = math.inf if change_s is None else change_s
        return admitted

    def find(self, request_id: int) -> Request | None:
        """The waiting or active request with this id."""
        return self._in_use.get(request_id)

    def withdraw(self, request: Request) -> None:
        """`request` ends while it waits."""
        self.waiting.remove(request)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """`request` has left: its id may be used again, and its batch slot."""
        self._idle_until_s = -math.inf
        self._in_use.pop(request.request_id, None)

    def _fetch(self, max_waiting: int) -> None:
        """Fetch until `max_waiting` requests wait or no more have arrived. Refused requests take no room: those behind
        them are fetched in the same call, because `admit` may do nothing until the next arrival."""
        num_refused = 1
        while num_refused and (room := max_waiting - len(self.waiting)) > 0:
            num_refused = 0
            for request in self._get_requests(room):
                if error := self._refusal(request):
                    num_refused += 1
                    self._refuse(request, error)
                else:
                    self._in_use[request.request_id] = request
                    insort(self.waiting, request, key=lambda item: -item.priority)

    def _refusal(self, request: Request) -> str | None:
        if request.request_id in self._in_use:
            return f"request id {request.request_id} is in use"
        return self._limits.refusal(request)

    def _may_enter(self, request: Request, active: ActiveRequests) -> bool:
        last = active.last
        if last is not None and request.beam_width != last.beam_width:
            return False
        if len(active) < self._max_active:
            return True
        # Beyond the limit only before the last active request, while there are sequence slots.
        return last is not None and request.priority > last.priority and active.table.free_rows > 0
