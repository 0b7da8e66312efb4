"""The order of SGLang's waiting queue (`SchedulePolicy` of SGLang 0.5.23)."""

import random
from operator import attrgetter

import numpy as np

from ifbbench.engine.request import Request
from ifbbench.schedulers.ends import NEVER
from ifbbench.schedulers.sglang.cache import SglangCache
from ifbbench.schedulers.sglang.radix_tree import Match, Node, RadixTree
from ifbbench.schedulers.sglang.rules import SglangRules

# With more waiting requests, they are not matched (lpm and hrrn become fcfs).
MAX_MATCHED = 128
# Requests that match at most so many tokens in the tree are compared with each other (lpm), and one that shares as many
# with an earlier one waits for it.
SHORT_MATCH = 32
# Each so many passes, the prefixes of waiting requests count as used.
REFRESH_INTERVAL = 32
BY_MATCH = ("lpm", "dfs-weight", "hrrn", "shortest-prefill-first")


class QueueOrder:
    """Orders the queue before each prefill pass.

    num_computed: prompt tokens that all requests have computed so far, the clock of hrrn."""

    def __init__(self, rules: SglangRules, cache: SglangCache) -> None:
        self._rules, self._cache, self.num_computed = rules, cache, 0
        policy = rules.schedule_policy
        self.policy = "fcfs" if policy in BY_MATCH and cache.tree is None else policy
        self._random = random.Random(rules.seed)
        self._refreshes = cache.tree is not None and rules.eviction_policy == "lru"
        self._passes = 0
        self._work: dict[Request, int] = {}
        self._arrived_at: dict[Request, int] = {}

    def arrived(self, request: Request) -> None:
        """A request has joined the queue."""
        self._arrived_at[request] = self.num_computed

    def left(self, request: Request) -> None:
        """A request has ended."""
        self._arrived_at.pop(request, None)

    def sort(self, queue: list[Request]) -> None:
        """Bring `queue` into the order in which requests are tried."""
        is_long = self.policy in ("lpm", "hrrn") and len(queue) > MAX_MATCHED
        if self.policy in BY_MATCH and not is_long:
            self._sort_by_match(queue)
            return
        if self.policy == "fcfs" and self._rules.is_priority:
            queue.sort(key=attrgetter("order"))
        elif self.policy == "lof":
            queue.sort(key=lambda request: (request.order[0], -max_outputs(request)))
        elif self.policy == "random":
            self._random.shuffle(queue)
        self._refresh(queue)

    @property
    def passes_to_change(self) -> int:
        """After so many passes, at least 1, the order of a queue that stays the same may change, or its prefixes are
        used again."""
        if self.policy in BY_MATCH or self.policy == "random":
            return 1
        return REFRESH_INTERVAL - (self._passes - 1) % REFRESH_INTERVAL if self._refreshes else NEVER

    def passed(self, count: int) -> None:
        """Count passes that change nothing, and that `sort` is not called for: see `passes_to_change`."""
        self._passes += count

    def chunk_limit(self, rest: int, queue: list[Request], budget: int) -> int | None:
        """shortest-prefill-first: what the prompt that is being cut may have, so that shorter ones fit beside it."""
        page = self._cache.page_size
        if self.policy != "shortest-prefill-first" or budget < 2 * page:
            return None
        reserved = 0
        for request in queue:
            work = self._work[request]
            charge = -(-work // page) * page
            if work >= rest or reserved + charge > budget - page:
                break
            reserved += charge
        return (budget - reserved) // page * page if reserved else None

    def _refresh(self, queue: list[Request]) -> None:
        """The prefixes of the first waiting requests stay in the tree, that of the head longest."""
        if not self._refreshes or not queue:
            return
        self._passes += 1
        if self._passes % REFRESH_INTERVAL == 1:
            for request in reversed(queue[:MAX_MATCHED]):
                self._cache.match(request, request.prompt_len)

    def _sort_by_match(self, queue: list[Request]) -> None:
        matches = {request: self._cache.match(request, request.prompt_len) for request in queue}
        later = _sharing(queue, matches)
        # One token at least is computed.
        matched = {
            request: 0 if match is None else min(match.length + match.host_length, request.prompt_len - 1)
            for request, match in matches.items()
        }
        self._work = {request: max(1, request.prompt_len - matched[request]) for request in queue}
        if self.policy == "lpm":
            queue.sort(key=lambda request: (request in later, 0 if request in later else -matched[request]))
        elif self.policy == "dfs-weight":
            queue[:] = _depth_first(queue, matches)
        elif self.policy == "shortest-prefill-first":
            queue.sort(key=lambda request: (request in later, self._work[request], request.order[1]))
        else:
            queue.sort(
                key=lambda request: (*self._ratio(request, matched[request], request in later), request.request_id)
            )

    def _ratio(self, request: Request, matched: int, is_later: bool) -> tuple[float]:
        """hrrn: how long a request has waited, in tokens of others, by the tokens that it needs."""
        if is_later:
            return (float("inf"),)
        uncached = max(0, request.original_prompt_len - matched)
        waited = self.num_computed - self._arrived_at[request]
        return (-waited / uncached if uncached else -float("inf"),)


def max_outputs(request: Request) -> int:
    """Outputs that a request may have, those included that it has."""
    return request.max_new_tokens + request.prompt_len - request.original_prompt_len


def _sharing(queue: list[Request], matches: dict[Request, Match | None]) -> set[Request]:
    """Requests that match few tokens in the cache and share more with an earlier one of the queue."""
    tree, later = RadixTree(1, lambda pages: None), set[Request]()
    for request in queue:
        known, match = request.known_tokens(), matches[request]
        if known is None or (match is not None and match.length > SHORT_MATCH):
            continue
        if tree.match(known, request.prompt_len).length >= SHORT_MATCH:
            later.add(request)
        else:
            tree.insert(known, np.zeros(request.prompt_len, np.int32))
    return later


def _depth_first(queue: list[Request], matches: dict[Request, Match | None]) -> list[Request]:
    """Requests by the node that they match, those below a node before its own, and first the child below which the most
    requests wait."""
    weights, waiting, root = dict[Node, int](), dict[Node, list[Request]](), None
    for request, match in matches.items():
        if match is None:
            continue
        waiting.setdefault(match.node, []).append(request)
        for node in match.node.path():
            weights[node] = weights.get(node, 0) + 1
            root = node.parent if node.parent is not None and node.parent.parent is None else root
        root = match.node if match.node.parent is None else root
    found: list[Request] = []
    stack = [] if root is None else [(root, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            found += waiting.get(node, [])
            continue
        stack.append((node, True))
        children = sorted(
            [child for child in node.children.values() if child in weights], key=lambda one: -weights[one]
        )
        stack += [(child, False) for child in reversed(children)]
    return found + [request for request in queue if matches[request] is None]
