"""The tokens of a request as the KV cache's reuse tree wants them: prompt and output, growing as output is made."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.kv_cache.token_keys import KnownTokens, SymbolicTokens, TokenIds

if TYPE_CHECKING:
    from ifbbench.engine.request import Request


@dataclass(frozen=True, slots=True)
class ReuseIdentity:
    """What beside token ids decides whether two requests may share blocks.

    extra_ids: [prompt length], one with each prompt token. cache_salt: requests with different ones share nothing.
    runs: the prompt as runs of symbolic tokens, (first number, length), where nobody has spelt it out; its output then
        is the run that starts with `output_symbol`.
    """

    extra_ids: NDArray[np.int64] | None = None
    cache_salt: Hashable = None
    runs: Sequence[tuple[int, int]] | None = None
    output_symbol: int = 0


NO_IDENTITY = ReuseIdentity()


class ReuseTokens:
    """The known tokens of one request, made when first asked for. Output is appended once it is there."""

    __slots__ = ("_identity", "_known", "_request")

    def __init__(self, request: "Request", identity: ReuseIdentity) -> None:
        self._request = request
        self._identity = identity
        self._known: KnownTokens | None = None

    @property
    def num_known(self) -> int:
        """How many tokens of the sequence, from its first on, can be told."""
        known = self.known()
        return 0 if known is None else len(known.tokens)

    def known(self) -> KnownTokens | None:
        """Prompt and output so far; None where the prompt has neither tokens nor symbols."""
        if self._known is None:
            self._known = self._start()
        if self._known is not None:
            self._append_output(self._known)
        return self._known

    def _start(self) -> KnownTokens | None:
        request, identity = self._request, self._identity
        if identity.runs is not None:
            tokens: TokenIds | SymbolicTokens = SymbolicTokens(identity.runs)
        elif request.prompt_tokens is not None:
            prompt = request.prompt_tokens[: request.original_prompt_len]
            tokens = TokenIds(prompt, identity.extra_ids)
        else:
            return None
        return KnownTokens(tokens, (tokens.kind, request.lora_task_id, identity.cache_salt))

    def _append_output(self, known: KnownTokens) -> None:
        request = self._request
        have = len(known.tokens) - request.original_prompt_len
        if request.table is None or request.beam_width > 1 or request.num_outputs <= have:
            return
        if isinstance(known.tokens, SymbolicTokens):
            known.tokens.append(self._identity.output_symbol + have, request.num_outputs - have)
        elif request.table.makes_tokens:
            known.tokens.append(request.table.outputs(request.slot, have, request.num_outputs))
