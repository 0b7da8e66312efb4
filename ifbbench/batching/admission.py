"""Admission: which requests are refused at once, and which become active when."""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from ifbbench.batching.active import ActiveRequests
from ifbbench.batching.kv_cache.geometry import CacheGeometry
from ifbbench.batching.request import Request

# Fetched beyond the free places, so that a request of higher priority that waits behind others is seen.
LOOK_AHEAD = 8


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """max_seq_len, max_input_len: in tokens. num_blocks: KV cache blocks of the whole pool."""

    max_seq_len: int
    max_input_len: int
    num_blocks: int
    geometry: CacheGeometry

    def refusal(self, request: Request) -> str | None:
        """Why `request` can never run, or None. Clamps its new tokens to what max_seq_len leaves."""
        prompt_len = request.prompt_len
        if prompt_len < 1 or request.max_new_tokens < 1:
            return f"a prompt of {prompt_len} tokens and {request.max_new_tokens} new tokens: both must be at least 1"
        if prompt_len >= self.max_seq_len:
            return f"prompt of {prompt_len} tokens leaves no room for output in max_seq_len {self.max_seq_len}"
        if prompt_len > self.max_input_len:
            return (
                f"prompt of {prompt_len} tokens is longer than max_input_len {self.max_input_len}"
                " (without chunked context at most max_num_tokens)"
            )
        request.clamp_new_tokens(self.max_seq_len - prompt_len)
        needed = self.geometry.blocks_to_completion(prompt_len, request.max_new_tokens, 0, request.beam_width)
        if needed > self.num_blocks:
            return f"needs {needed} KV cache blocks until complete, the pool has {self.num_blocks} (kv_blocks)"
        return None


class Admission:
    """The queue's front: fetches requests, refuses the impossible, lets the others in by priority.

    `get_requests(n)` returns at most n requests that have arrived; `refuse(request, error)` answers for a refused one.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        max_active: int,
        get_requests: Callable[[int], list[Request]],
        refuse: Callable[[Request, str], None],
    ) -> None:
        self._limits = limits
        self._max_active = max_active
        self._get_requests = get_requests
        self._refuse = refuse
        self._waiting: list[Request] = []
        self._ids: set[int] = set()

    @property
    def waiting(self) -> list[Request]:
        """Fetched requests that are not active yet, in order."""
        return self._waiting

    def forget(self, request: Request) -> None:
        """The request had its final response: its id may be used again."""
        self._ids.discard(request.request_id)

    def admit(self, active: ActiveRequests) -> list[Request]:
        """Fetch, and make active what the limits allow; returns the newly active requests."""
        self._fetch(max(0, self._max_active - len(active)) + LOOK_AHEAD - len(self._waiting))
        admitted = []
        while self._waiting and self._may_enter(self._waiting[0], active):
            request = self._waiting.pop(0)
            active.add(request)
            admitted.append(request)
        return admitted

    def _may_enter(self, request: Request, active: ActiveRequests) -> bool:
        last = active.last
        if last is None:
            return True
        if request.beam_width != last.beam_width:
            return False
        if len(active) < self._max_active:
            return True
        # Beyond the limit only what goes before the last active request, while there are sequence slots.
        return request.priority > last.priority and active.table.free_rows > 0

    def _fetch(self, count: int) -> None:
        if count <= 0:
            return
        for request in self._get_requests(count):
            if request.request_id in self._ids:
                self._refuse(request, f"request id {request.request_id} is in use")
            elif error := self._limits.refusal(request):
                self._refuse(request, error)
            else:
                self._ids.add(request.request_id)
                insort(self._waiting, request, key=lambda item: -item.priority)
