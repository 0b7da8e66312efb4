"""Sessions of live requests: by what a client says, else by how a conversation begins."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import count
from typing import Any

from msgspec.json import encode

# The header with which a client names a session.
SESSION_HEADER = "x-session-id"
MAX_NAME = 256
# As many sessions are remembered; the ones used least recently are forgotten.
MAX_SESSIONS = 100_000


def session_key(headers: Mapping[str, str], messages: Sequence[Any] | None) -> bytes | None:
    """What the requests of a session have in common: its name in the header, else the messages of a conversation up to
    the first one of the user; None without either."""
    if name := headers.get(SESSION_HEADER, "")[:MAX_NAME]:
        return b"name " + name.encode("utf-8", "surrogateescape")
    if not messages:
        return None
    digest = blake2b(digest_size=16)
    for message in messages:
        digest.update(encode(message))
        role = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
        if role == "user":
            break
    return digest.digest()


class Sessions:
    """Numbers of sessions in the order in which they start. A request without a key is a session of its own."""

    def __init__(self, maximum: int = MAX_SESSIONS) -> None:
        self._numbers, self._maximum = count(), maximum
        self._known: OrderedDict[bytes, int] = OrderedDict()

    def number(self, key: bytes | None) -> int:
        """The number of the session of a request."""
        if key is None:
            return next(self._numbers)
        known = self._known
        if (number := known.get(key)) is None:
            number = known[key] = next(self._numbers)
            if len(known) > self._maximum:
                known.popitem(last=False)
        else:
            known.move_to_end(key)
        return number
