"""Which requests can never run, under the scheduler of any engine."""

import math
from typing import NamedTuple

from ifbbench.engine.request import Request
from ifbbench.engine.sampling_params import GREEDY
from ifbbench.kv.adapters import AdapterCache
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.tensorrt_llm.policies import CapacityPolicy, find_policy


class Refusal(NamedTuple):
    """Why a request can never run.

    limit: the setting that decides.
    text: what is wrong, with the numbers.
    """

    limit: str
    text: str


def id_in_use(request: Request) -> str:
    return f"request id {request.request_id} is in use"


def queue_full(max_queue_size: int) -> str:
    return f"the queue is full (max_queue_size {max_queue_size}); send the request again later"


class AdmissionLimits:
    """The refusal rules: which requests can never run. This is the only place where they are written."""

    def __init__(
        self, config: BatchingConfig, policy: CapacityPolicy | None = None, adapters: AdapterCache | None = None
    ) -> None:
        """policy: the one that schedules; None for a new one of the kind that `config` names.
        adapters: adapters of requests with LoRA tasks.
        """
        config = config.of_any_rank
        if policy is None:
            policy = find_policy(config.effective_policy)(config.max_active)
        self._config = config
        self._max_beam_width = config.max_beam_width
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
        for needed, num_blocks in self._config.blocks_to_completion(prompt_len, max_new_tokens, beam_width):
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
        if problem is None and vocab_size is not None:
            problem = options.problem(vocab_size, self._config.hidden_size)
        if problem is None and (options.draft_input_ids is not None or options.draft_logits is not None):
            problem = draft_problem(request, vocab_size, self._config.refuses_drafts)
        return problem


def draft_problem(request: Request, vocab_size: int | None, refused_because: str | None) -> str | None:
    """Why the drafts that the client brings are invalid, or None. refused_because: why the engine takes none."""
    tokens, logits = request.options.draft_input_ids, request.options.draft_logits
    if tokens is None:
        return None if logits is None else "draft_logits: expected beside draft_input_ids, which are missing"
    if refused_because is None and request.beam_width > 1:
        refused_because = f"a beam width of {request.beam_width}"
    if refused_because is not None:
        return f"draft_input_ids: draft tokens do not work with {refused_because}; leave one of them out"
    if vocab_size is not None and len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        return f"draft_input_ids: a token id is not in the vocabulary; expected 0 to {vocab_size - 1}"
    if logits is not None and vocab_size is not None and logits.shape != (len(tokens), vocab_size):
        return f"draft_logits of shape {list(logits.shape)}: expected {[len(tokens), vocab_size]}, a row for each draft"
    return None
