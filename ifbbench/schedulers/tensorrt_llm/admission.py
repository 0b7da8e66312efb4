"""Admission control: fetches requests, refuses those that can never run, and activates the others by priority."""

import math
from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

from ifbbench.engine.interfaces import NO_LIMIT, RequestSource
from ifbbench.engine.request import Request
from ifbbench.engine.sampling_params import GREEDY
from ifbbench.kv.adapters import AdapterCache
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.schedulers.tensorrt_llm.config import LOOK_AHEAD, BatchingConfig
from ifbbench.schedulers.tensorrt_llm.drafts import draft_problem
from ifbbench.schedulers.tensorrt_llm.policies import CapacityPolicy, find_policy


class Refusal(NamedTuple):
    """limit: the setting that decides. text: what is wrong, with the numbers."""

    limit: str
    text: str


class AdmissionLimits:
    """The refusal rules: which requests can never run. This is the only place where they are written."""

    def __init__(
        self, config: BatchingConfig, policy: CapacityPolicy | None = None, adapters: AdapterCache | None = None
    ) -> None:
        """policy: the one that schedules; None for a new one of the kind that `config` names. adapters: of requests
        with LoRA tasks."""
        if policy is None:
            policy = find_policy(config.effective_policy)(config.max_active)
        self._config = config
        self._pools = config.pools
        self._max_beam_width, self._reuses_blocks = config.max_beam_width, config.reuse.enabled
        self._max_seq_len, self._max_input_len = config.max_seq_len, config.max_input_len
        self.adapters = adapters
        # Without chunked context a pause drops generated tokens that do not fit into a resumed prompt.
        self._pause_truncates = config.chunk_unit is None and getattr(policy, "may_pause", True)

    def refusal(self, request: Request) -> str | None:
        """Why `request` can never run, or None. Clamps its new tokens to what max_seq_len leaves."""
        streaming = request.options.streaming
        if refusal := self.refusal_by_size(request.prompt_len, request.max_new_tokens, request.beam_width, streaming):
            return refusal.text
        if error := self._invalid_field(request):
            return error
        if request.lora_task_id is not None and (error := self._adapter_refusal(request)):
            return error
        request.clamp_new_tokens(self._max_seq_len - request.prompt_len)
        if request.num_draft_tokens:  # as many as the request can use, and an iteration can run
            last_chunk = min(request.prompt_len, self._config.chunk_unit or request.prompt_len)
            room = min(request.max_new_tokens - 1, self._config.token_budget - last_chunk)
            request.set_draft_tokens(max(0, min(request.num_draft_tokens, room)))
        return None

    def refusal_by_size(
        self, prompt_len: int, max_new_tokens: int, beam_width: int = 1, streaming: bool = False
    ) -> Refusal | None:
        """Why a request of this size can never run, or None. If it can run, it can with fewer new tokens as well."""
        if not 1 <= beam_width <= self._max_beam_width:
            text = f"beam width {beam_width}: expected 1 to {self._max_beam_width} (max_beam_width)"
            return Refusal("max_beam_width", text)
        if prompt_len < 1 or max_new_tokens < 1:
            text = f"a prompt of {prompt_len} tokens and {max_new_tokens} new tokens: both must be at least 1"
            return Refusal("prompt_len", text)
        if prompt_len >= self._max_seq_len:
            text = f"prompt of {prompt_len} tokens leaves no room for output in max_seq_len {self._max_seq_len}"
            return Refusal("max_seq_len", text)
        if prompt_len > self._max_input_len:
            return Refusal(
                "max_input_len",
                f"prompt of {prompt_len} tokens is longer than max_input_len {self._max_input_len}"
                " (without chunked context at most max_num_tokens)",
            )
        max_new_tokens = min(max_new_tokens, self._max_seq_len - prompt_len)
        for attention_window, num_blocks in self._pools:
            needed = attention_window.blocks_to_completion(prompt_len, max_new_tokens, 0, beam_width)
            if self._reuses_blocks:
                needed += attention_window.more_for_beams(prompt_len, beam_width)
            if needed > num_blocks:
                text = f"needs {needed} KV cache blocks until complete, the pool has {num_blocks} (kv_blocks)"
                return Refusal("kv_blocks", text)
        if not streaming or beam_width > 1:  # a streamed response of several beams replaces those before it
            return None
        longest = prompt_len + max_new_tokens - 1
        if self._pause_truncates and longest > self._max_input_len:
            return Refusal(
                "streaming",
                f"streaming up to {longest} tokens: a pause could drop tokens already sent, because without chunked "
                f"context a resumed prompt has at most {self._max_input_len} tokens (max_input_len)",
            )
        return None

    def _adapter_refusal(self, request: Request) -> str | None:
        if self.adapters is not None:
            return self.adapters.refusal(request)
        if request.options.lora_weights is not None:
            return "lora_weights: there is no cache for adapters; expected --lora_device_mem_fraction to make one"
        return None

    def _invalid_field(self, request: Request) -> str | None:
        if not math.isfinite(request.priority):
            return f"priority {request.priority}: expected a finite number"
        tokens, options, vocab_size = request.prompt_tokens, request.options, self._config.vocab_size
        if tokens is not None and len(tokens) and vocab_size is not None:
            low, high = int(tokens.min()), int(tokens.max())
            num_ids = vocab_size + options.num_virtual_tokens
            if low < 0 or high >= num_ids:
                found = low if low < 0 else high
                more = f" or of the prompt_embedding_table; expected 0 to {num_ids - 1}"
                return f"token id {found} is not in the vocabulary" + (
                    more if num_ids > vocab_size else f"; expected 0 to {vocab_size - 1}"
                )
        problem = None if request.sampling is GREEDY else request.sampling.problem(vocab_size)
        problem = problem or options.problem(vocab_size, self._config.hidden_size)
        if problem is None and (options.draft_input_ids is not None or options.draft_logits is not None):
            problem = draft_problem(request, vocab_size, self._config.refuses_drafts)
        return problem


class Admission:
    """Fetches up to the free batch slots and a look-ahead, and keeps what cannot become active yet, by priority.

    max_queue_size: maximum number of requests that wait. With it all that have arrived are fetched, and those that find
        the queue full are refused.
    waiting: fetched requests that are not active, in order.
    """

    def __init__(self, limits: AdmissionLimits, max_active: int, max_queue_size: int | None = None) -> None:
        self.waiting: list[Request] = []
        self._limits = limits
        self._max_active = max_active
        self._max_queue_size = max_queue_size
        self._in_use: dict[int, Request] = {}

    def admit(self, active: ActiveRequests, source: RequestSource) -> Sequence[Request]:
        """Fetch requests, and add to `active` what the limits allow; returns the newly active requests."""
        admitted: list[Request] = []
        if self._max_queue_size is None:
            self._fetch(source, max(0, self._max_active - len(active)) + LOOK_AHEAD)
            self._activate(active, admitted)
        else:
            while self._fetch_all(source, self._max_queue_size, active, admitted):
                pass
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
        self._in_use.pop(request.request_id, None)
        if self._limits.adapters is not None:
            self._limits.adapters.release(request)

    def _activate(self, active: ActiveRequests, admitted: list[Request]) -> None:
        while self.waiting and self._may_enter(self.waiting[0], active):
            request = self.waiting.pop(0)
            active.add(request)
            admitted.append(request)

    def _fetch_all(
        self, source: RequestSource, max_queue_size: int, active: ActiveRequests, admitted: list[Request]
    ) -> int:
        """Fetch all requests that have arrived, activate what the limits allow, and refuse those that find the queue
        full: of the new ones the last by priority and arrival. Returns how many were refused; more may have arrived
        then."""
        arrived = source.get(NO_LIMIT)
        num_refused = self._add(source, arrived)
        self._activate(active, admitted)
        surplus = len(self.waiting) - max_queue_size
        if surplus <= 0:
            return num_refused
        new = set(map(id, arrived))
        for request in [request for request in reversed(self.waiting) if id(request) in new][:surplus]:
            self.withdraw(request)
            source.refuse(request, f"the queue is full (max_queue_size {max_queue_size}); send the request again later")
        return num_refused + surplus

    def _fetch(self, source: RequestSource, max_waiting: int) -> None:
        """Fetch until `max_waiting` requests wait or no more have arrived. Refused requests take no room: those behind
        them are fetched in the same call, because `admit` may do nothing until the next arrival."""
        while (room := max_waiting - len(self.waiting)) > 0 and self._add(source, source.get(room)):
            pass
        if source.next_priority is None:
            return
        # Beyond them, those that go before the last of the first `max_waiting`.
        while (priority := source.next_priority()) is not None and (
            len(self.waiting) < max_waiting or priority > self.waiting[max_waiting - 1].priority
        ):
            self._add(source, source.get(1))

    def _add(self, source: RequestSource, requests: list[Request]) -> int:
        """Add `requests` to the waiting ones, or refuse them. Returns how many were refused."""
        num_refused = 0
        for request in requests:
            is_in_use = request.request_id in self._in_use
            if error := f"request id {request.request_id} is in use" if is_in_use else self._limits.refusal(request):
                num_refused += 1
                source.refuse(request, error)
            else:
                self._in_use[request.request_id] = request
                if self._limits.adapters is not None:
                    self._limits.adapters.hold(request)
                if not self.waiting or self.waiting[-1].priority >= request.priority:
                    self.waiting.append(request)
                else:
                    insort(self.waiting, request, key=lambda item: -item.priority)
        return num_refused

    def _may_enter(self, request: Request, active: ActiveRequests) -> bool:
        last = active.last
        if last is not None and request.beam_width != last.beam_width:
            return False
        if len(active) < self._max_active:
            return True
        # Beyond the limit only before the last active request, while there are sequence slots.
        return last is not None and request.priority > last.priority and len(active.table.free_rows) > 0
