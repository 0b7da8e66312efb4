"""What a request asks for, as far as a router reads it: the model, whether it streams, its prompt and its session."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import DecodeError, Struct, ValidationError
from msgspec.json import Decoder

from ifbbench.endpoint.api import MAX_TOKENS
from ifbbench.fleet.prefix_index import Pieces
from ifbbench.serving.sessions import session_key
from ifbbench.workload.reuse import HASHED_TOKENS
from ifbbench.workload.trace import TraceRequest

# Characters that stand for a token where only the text of a prompt is known.
CHARACTERS = 4
# Bytes of a prefix id: an integer that JSON numbers of other programs hold exactly.
ID_BYTES = 6
Tokens = list[int]


class _Body(Struct):
    """The fields of a completion or a chat that a router reads; of any type, because the server checks them."""

    model: Any = None
    prompt: Any = None
    messages: Any = None
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None


_decode = Decoder(_Body).decode


@dataclass(frozen=True)
class Asked:
    """A request as a router sees it.

    prompt_len: number of tokens: exact for token ids, estimated for a text.
    tokens: tokens of its prompt, if it has token ids.
    pieces: pieces of the prompt, as the router's index of prefixes has them.
    session: see `session_key`.
    """

    model: str = ""
    prompt_len: int = 1
    max_tokens: int | None = None
    tokens: Tokens = field(default_factory=list)
    pieces: Pieces = ()
    session: bytes | None = None

    def row(
        self,
        number: int,
        arrival_s: float,
        prompt_len: int,
        output_len: int,
        has_tokens: bool,
        session: int | None = None,
    ) -> TraceRequest:
        """The row of the trace.

        has_tokens: whether recorded token ids are kept; the text of a prompt never is, but names of its pieces, so that
            a replay finds the prefixes that prompts share.
        session: number of its session; None if no other request has it.
        """
        tokens = tuple(self.tokens) if has_tokens and self.tokens and len(self.tokens) == prompt_len else None
        whole = max(prompt_len, 1) // HASHED_TOKENS if tokens is None else 0  # the estimate may be longer
        named = [(key, length) for key, length in self.pieces[:whole] if isinstance(key, int)]
        return TraceRequest(
            number,
            arrival_s,
            prompt_len,
            max(self.max_tokens or 0, output_len),
            output_len,
            prompt_tokens=tokens,
            prefix_ids=tuple(key for key, _ in named) or None,
            prefix_lens=tuple(length for _, length in named) or None,
            session_id=session,
        )


def read_asked(body: bytes, headers: Mapping[str, str], number: int) -> Asked:
    """What a body asks for. Of one that is no such JSON nothing is known: the server that gets it says what is wrong.
    number: number of the request.
    """
    try:
        found = _decode(body)
    except (DecodeError, ValidationError, RecursionError):
        return Asked(session=session_key(headers, None))
    messages = found.messages if isinstance(found.messages, list) else None
    limit = found.max_completion_tokens if found.max_tokens is None else found.max_tokens
    tokens, text = _prompt(found.prompt if messages is None else messages)
    units = tokens or text
    scale = 1 if tokens else CHARACTERS
    prompt_len = max(len(units) // scale, 1)
    return Asked(
        found.model if isinstance(found.model, str) else "",
        prompt_len,
        limit if type(limit) is int and 0 < limit <= MAX_TOKENS else None,
        tokens,
        _pieces(units, HASHED_TOKENS * scale, prompt_len, number),
        session_key(headers, messages),
    )


def _prompt(prompt: Any) -> tuple[Tokens, str]:
    """The token ids, or the text, of a prompt or of messages; of several prompts, all one after another."""
    if isinstance(prompt, str):
        return [], prompt
    if not isinstance(prompt, list) or not prompt:
        return [], ""
    if all(type(one) is int for one in prompt):
        return prompt, ""
    if all(isinstance(one, list) and all(type(token) is int for token in one) for one in prompt):
        return [token for one in prompt for token in one], ""
    return [], "\n".join(one if isinstance(one, str) else _message_text(one) for one in prompt)


def _message_text(message: Any) -> str:
    if isinstance(message, dict) and isinstance(message.get("content"), str):
        return f"{message.get('role', '')}\n{message['content']}"
    return json.dumps(message, ensure_ascii=False)


def _pieces(units: Sequence[Any], size: int, prompt_len: int, number: int) -> Pieces:
    """Whole pieces of `size` token ids or characters from the beginning, each with a name that depends on all before
    it, and the rest, which is the request's own."""
    found, key = [], b""
    for start in range(0, len(units) - size + 1, size):
        part = units[start : start + size]
        raw = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else msgspec.json.encode(part)
        key = blake2b(key + raw, digest_size=ID_BYTES).digest()
        found.append((int.from_bytes(key, "big"), HASHED_TOKENS))
    own = prompt_len - HASHED_TOKENS * len(found)
    return [*found, (("own", number), own)] if own > 0 else found
