"""What stands between requests and replicas: a router, what it saw of each replica, and its own counts."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from ifbbench.clock import NANOSECONDS
from ifbbench.fleet.router import PREFILLS, PREFIXES, REQUESTS, STATE, Replica, RoutedRequest, Router


class Sent(NamedTuple):
    """A request that was sent to a replica.

    seen: what the router saw: by name a value for each replica, -1 for those that take no requests.
    prefill_tokens: tokens of its prompt that the replica is not expected to hold.
    """

    replica: Replica
    prompt_len: int
    seen: dict[str, list[float]]
    prefill_tokens: int


class Front:
    """A router with the counts that it keeps of replicas.

    routed: number of requests that it has sent.

    names: names of what it sees, which `requests.jsonl` has as `offers`.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        looks_at = router.looks_at
        self.sees_state, self.sees_prefixes = STATE in looks_at, PREFIXES in looks_at
        self.sees_requests, self.sees_prefills = REQUESTS in looks_at, PREFILLS in looks_at
        names = {"requests": self.sees_requests, "tokens": self.sees_requests, "hit_tokens": self.sees_prefixes}
        names |= {"prefill_tokens": self.sees_prefills, "queued": self.sees_state, "kv_use": self.sees_state}
        self.names = [name for name, is_there in names.items() if is_there]
        self.routed = 0

    def route(self, request: RoutedRequest, views: Sequence[Replica], count: int) -> Sent:
        """Choose the replica of a request, and count it there.

        views: the replicas that take requests.
        count: number of all replicas.
        """
        seen = self._seen(request, views, count)
        chosen = self._router.choose(request, views)
        chosen.requests += 1
        chosen.tokens += request.prompt_len
        prefill_tokens = 0
        if self.sees_prefills:
            prefill_tokens = request.prompt_len - chosen.expected_hit(request)
            chosen.prefill_tokens += prefill_tokens
        if request.pieces:
            chosen.prefixes.add(request.pieces)
        self.routed += 1
        return Sent(chosen, request.prompt_len, seen, prefill_tokens)

    def _seen(self, request: RoutedRequest, views: Sequence[Replica], count: int) -> dict[str, list[float]]:
        seen: dict[str, list[float]] = {name: [-1] * count for name in self.names}
        for one in views:
            number = one.number
            if self.sees_requests:
                seen["requests"][number], seen["tokens"][number] = one.requests, one.tokens
            if self.sees_prefixes:
                seen["hit_tokens"][number] = one.expected_hit(request)
            if self.sees_prefills:
                seen["prefill_tokens"][number] = one.prefill_tokens
            if self.sees_state:
                seen["queued"][number], seen["kv_use"][number] = one.state.queued, one.state.kv_use
        return seen


def offers(seen: dict[str, list[float]]) -> dict[str, list[float | None]]:
    """What a router saw in the form of `offers`: None of replicas that took no requests."""
    return {name: [None if value < 0 else value for value in values] for name, values in seen.items()}


def read_at_ns(time_s: float, age_ns: int) -> int:
    """When the state was read that a router knows at `time_s`: at a multiple of its age, or just then."""
    time_ns = round(time_s * NANOSECONDS)
    return time_ns - time_ns % age_ns if age_ns else time_ns


def is_to_be_read(time_s: float, age_ns: int, read_ns: int) -> bool:
    """Whether states, which were read at `read_ns`, are to be read again before what happens next at `time_s`, although
    no request is known that sees them: an answer may let one arrive."""
    return age_ns > 0 and time_s < inf and read_at_ns(time_s, age_ns) > read_ns
