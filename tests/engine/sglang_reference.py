"""The rules of SGLang's scheduler written down literally and slowly, over plain lists and counts: what
`schedulers/sglang/` is held to.

Numbers in comments are those of the sections of the specification of SGLang's scheduler. All of sections 2 to 5 and 8
are here, with as much of the radix cache (6, host memory included: copies to the host are taken to be done at once) and
of the queue (7: fcfs, lof, lpm) as they need; pre-emption by priority (9) is not. Where SGLang's code has a rule of
which the specification has no words, a comment says so.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

POLICIES = ("fcfs", "lof", "lpm")
CLIP = 4096
Answer = dict[str, Any]


@dataclass(eq=False)
class Node:
    """The end of an edge of the radix tree. tokens: of the edge, in the memories that have them. used, created: numbers
    of operations."""

    parent: "Node | None"
    tokens: list[int]
    used: int
    created: int
    priority: float
    locks: int = 0
    hits: int = 0
    on_device: bool = True
    on_host: bool = False
    children: list["Node"] = field(default_factory=list)

    def path(self) -> list["Node"]:
        """The node and those above it, without the root."""
        return [] if self.parent is None else [self, *self.parent.path()]


class Tree:
    """6. The radix cache, which counts tokens and keeps no slots. host_free: tokens that fit into host memory."""

    def __init__(self, page: int, policy: str, host_tokens: int, write_policy: str) -> None:
        self.page, self.policy, self.time = page, policy, 0
        self.has_host, self.host_free, self.writes_back = host_tokens > 0, host_tokens, write_policy == "write_back"
        self.copies: list[Node] = []  # nodes that came to be in both memories, in this order; some are not any more
        self.min_hits = 1 if write_policy == "write_through" else 2
        self.root = Node(None, [], 0, 0, 0.0)

    def nodes(self) -> list[Node]:
        found, stack = list[Node](), [self.root]
        while stack:
            stack += (node := stack.pop()).children
            found.append(node)
        return found[1:]

    def evictable(self) -> int:
        return sum(len(node.tokens) for node in self.nodes() if not node.locks and node.on_device)

    def match(self, tokens: list[int]) -> tuple[int, Node, int, Node]:
        """How many tokens are on the device, in whole pages, and the node at which they end; the same of those behind
        them that only the host has."""
        found, node = self.walk(self.whole_pages(tokens), None, 0.0)
        device = node
        while device.parent is not None and not device.on_device:
            device = device.parent
        from_host = sum(len(one.tokens) for one in node.path() if not one.on_device)
        return found - from_host, device, from_host, node

    def insert(self, tokens: list[int], inserted: int, priority: float) -> tuple[int, Node]:
        """How many tokens were there before, and the last node. inserted: tokens that the same request had inserted,
        which are no hits."""
        tokens = self.whole_pages(tokens)
        length, node = self.walk(tokens, inserted, priority)
        path = node.path()[::-1]
        found = sum(len(one.tokens) for one in path if one.on_device)
        for one in path:  # the request's own slots hold what only the host had
            self.put_on_device(one)
        if length < len(tokens):
            self.time += 1
            leaf = Node(node, tokens[length:], self.time, self.time, priority)
            node.children.append(leaf)
            path.append(leaf)
            node = leaf
        end = 0
        for one in path:
            end += len(one.tokens)
            if end > inserted and not self.writes_back:
                one.hits += 1
        end = 0
        for one in path:
            end += len(one.tokens)
            if self.has_host and end > inserted and not self.writes_back and one.hits >= self.min_hits:
                for ancestor in one.path()[::-1]:
                    if not ancestor.on_host and not self.store(ancestor):
                        break
        return found, node

    def store(self, node: Node) -> bool:
        """Copy a node to the host, for which host leaves are evicted; whether it has room."""
        missing = len(node.tokens) - self.host_free
        if missing > 0 and self.evict_host(missing) < missing:
            return False
        self.host_free -= len(node.tokens)
        node.on_host = True
        self.has_copy(node)
        return True

    def evict_host(self, num_tokens: int) -> int:
        """With write-back, copies of what the device has go first: those of nodes that it would not evict now, then the
        others. Then leaves that only the host has, in order of the policy."""
        freed = 0
        for spares in (True, False) if self.writes_back else ():
            for node in list(self.copies):
                if freed >= num_tokens:
                    return freed
                if not (node.on_device and node.on_host):
                    self.copies.remove(node)
                elif not (spares and node in self.leaves()):
                    node.on_host = False
                    self.host_free += len(node.tokens)
                    freed += len(node.tokens)
                    self.copies.remove(node)
        while freed < num_tokens:
            leaves = [one for one in self.nodes() if not one.on_device and not one.children and not one.locks]
            if not leaves:
                break
            leaf = min(leaves, key=self.rank)
            self.remove(leaf)
            freed += len(leaf.tokens)
        return freed

    def remove(self, node: Node) -> None:
        """Take a node out of the tree, and those below it."""
        assert node.parent is not None
        for child in list(node.children):
            self.remove(child)
        self.host_free += len(node.tokens) if node.on_host else 0
        node.on_device = node.on_host = False
        node.parent.children.remove(node)

    def load(self, node: Node) -> None:
        """Put the path to a node on the device."""
        for one in node.path():
            self.put_on_device(one)

    def put_on_device(self, node: Node) -> None:
        if not node.on_device:
            node.on_device = True
            self.has_copy(node)

    def has_copy(self, node: Node) -> None:
        """Both memories have the node now."""
        if node not in self.copies:
            self.copies.append(node)

    def walk(self, tokens: list[int], inserted: int | None, priority: float) -> tuple[int, Node]:
        """Go down along `tokens`: every node on the way gets the present time."""
        self.time += 1
        now, node, length = self.time, self.root, 0
        while True:
            page = tokens[length : length + self.page]
            child = next((one for one in node.children if page and one.tokens[: self.page] == page), None)
            if child is None:
                return length, node
            child.used = now
            common = num_common(child.tokens, tokens[length:])
            common -= common % self.page
            length += common
            node = child if common == len(child.tokens) else self.split(child, common)
            if inserted is not None:
                node.priority = max(node.priority, priority)

    def split(self, child: Node, length: int) -> Node:
        """A match that ends inside an edge splits it there; the new node is touched after its child."""
        self.time += 1
        parent = child.parent
        assert parent is not None
        node = Node(parent, child.tokens[:length], self.time, child.created, child.priority, child.locks, child.hits)
        node.on_device, node.on_host = child.on_device, child.on_host
        if node.on_device and node.on_host:
            self.copies.append(node)
        parent.children[parent.children.index(child)] = node
        node.children = [child]
        child.parent, child.tokens = node, child.tokens[length:]
        return node

    def evict(self, num_tokens: int) -> int:
        """Whole unlocked leaves of the device in order of the policy, until they had `num_tokens` tokens; returns how
        many. Those that the host has stay in the tree."""
        freed = 0
        while freed < num_tokens:
            leaves = self.leaves()
            if not leaves:
                break
            leaf = min(leaves, key=self.rank)
            if self.has_host and self.writes_back and not leaf.on_host:
                self.store(leaf)
            freed += len(leaf.tokens)
            leaf.on_device = False
            if not leaf.on_host:
                self.remove(leaf)
        return freed

    def leaves(self) -> list[Node]:
        """What may be evicted from the device."""
        return [
            node
            for node in self.nodes()
            if node.on_device and not node.locks and not any(child.on_device for child in node.children)
        ]

    def rank(self, node: Node) -> tuple[float, ...]:
        ranks: dict[str, tuple[float, ...]] = {
            "lru": (node.used,),
            "lfu": (node.hits, node.used),
            "fifo": (node.created,),
            "mru": (-node.used,),
            "filo": (-node.created,),
            "priority": (node.priority, node.used),
            "slru": (node.hits >= 2, node.used),
        }
        return ranks[self.policy]

    def whole_pages(self, tokens: list[int]) -> list[int]:
        return tokens[: len(tokens) // self.page * self.page]


@dataclass(eq=False)
class Request:
    """1. A request. outputs: those of which the result was processed. pending: how many are in flight. computed: KV
    length, of what was computed or is in flight. allocated: tokens that its pages hold. node, owned: the end of the
    path that it locks in the tree, and how many of its tokens that has. inserted: tokens that it has put there."""

    number: int
    prompt: list[int]
    max_new_tokens: int
    output_len: int
    priority: float
    entered: int = 0
    outputs: list[int] = field(default_factory=list)
    pending: int = 0
    computed: int = 0
    allocated: int = 0
    node: Node | None = None
    owned: int = 0
    inserted: int = 0
    is_finished: bool = False
    is_retracted: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs


@dataclass(eq=False)
class Batch:
    """prefill: requests with the beginning and the length of their chunks. decode: those that run one token.
    results: the requests that get a token, with it, and None where a chunk does not complete its prompt."""

    prefill: list[tuple[Request, int, int]]
    decode: list[Request]
    results: list[tuple[Request, int, int | None]] = field(default_factory=list)


class Reference:
    """SGLang's loop over a workload in the form of the conformance cases."""

    def __init__(self, settings: Mapping[str, Any], end_token: int) -> None:
        self.settings, self.end_token = settings, end_token
        self.page = settings["page_size"]
        self.free = settings["num_pages"] * self.page
        self.tree = None
        if not settings["disable_radix_cache"]:
            host = settings.get("num_host_pages", 0) * self.page, settings.get("hicache_write_policy", "write_through")
            self.tree = Tree(self.page, settings["radix_eviction_policy"], *host)
        self.queue: list[Request] = []
        self.running: list[Request] = []
        self.last: Batch | None = None
        self.chunked: Request | None = None
        self.is_full = False
        self.limit: str | None = None  # why the latest pass ended before a request of the queue
        self.overlaps = not settings["disable_overlap_schedule"]
        self.mixes = settings["enable_mixed_chunk"] and settings["chunked_prefill_size"] is not None
        self.initial_ratio = min(0.7 * settings["schedule_conservativeness"], 1.0)
        self.minimum_ratio = 0.14 * self.initial_ratio
        self.ratio = self.initial_ratio
        self.num_entered = self.num_passes = 0

    def run(self, given: Sequence[Mapping[str, Any]], max_rounds: int) -> list[Answer]:
        """8. The batches of a workload: each round receives, decides, launches, and processes a result."""
        to_come = deque(sorted(given, key=lambda one: (one["round"], one["id"])))
        alive, in_flight, answers = list[Request](), deque[Batch](), list[Answer]()
        for turn in range(max_rounds):
            while to_come and to_come[0]["round"] <= turn:
                if not alive:
                    self.ratio = self.initial_ratio  # 2.6
                alive.append(request := self.receive(to_come.popleft()))
                self.enter(request)
            batch = self.next_batch()
            if batch is not None:
                self.launch(batch)
                in_flight.append(batch)
                answers.append(self.answer(batch))
            # Without overlap the result of this round's batch, with it the one of the round before.
            if in_flight and (not self.overlaps or self.last is not None):
                self.process(in_flight.popleft())
            self.last = batch
            alive = [request for request in alive if not request.is_finished]
            if not alive and not to_come:
                return answers
        raise AssertionError(f"the workload has not ended after {max_rounds} rounds")

    def receive(self, given: Mapping[str, Any]) -> Request:
        priority = float(given["priority"]) if self.settings["enable_priority_scheduling"] else 0.0
        return Request(given["id"], given["prompt"], given["max_new_tokens"], given["output_len"], priority)

    def enter(self, request: Request) -> None:
        """Go to the end of the queue."""
        self.num_entered += 1
        request.entered = self.num_entered
        self.queue.append(request)

    def answer(self, batch: Batch) -> Answer:
        return {
            "prefill": [[request.number, start, length] for request, start, length in batch.prefill],
            "decode": [request.number for request in batch.decode],
            "queue": [request.number for request in self.queue],
            "free": self.free,
            "evictable": 0 if self.tree is None else self.tree.evictable(),
            "new_token_ratio": self.ratio,
        }

    def holder(self) -> tuple[Request, str] | None:
        """What all requests in the queue wait for after a decision, and its limit: the prompt that was cut, which took
        the tokens that the queue lacks; else the first of the queue. None if nothing ended the latest pass."""
        if self.chunked is not None and self.limit in (None, "num_tokens"):
            return self.chunked, "num_tokens"
        return None if self.limit is None or not self.queue else (self.queue[0], self.limit)

    # 2. The next batch.

    def next_batch(self) -> Batch | None:
        if self.chunked is not None:  # 2.1
            self.publish(self.chunked, self.chunked.computed)
        if self.last is not None and self.last.prefill:  # 2.2; those that decoded in a mixed batch are part of it
            members = [request for request, _start, _length in self.last.prefill] + self.last.decode
            rest = [request for request in members if request is not self.chunked and not request.is_finished]
            # SGLang lets the last batch take the place of an empty running batch, and the flag is its own.
            if len(rest) < len(members) or not self.running:
                self.is_full = False
            self.running += rest
        if any(request.is_finished for request in self.running):  # 2.3
            self.running = [request for request in self.running if not request.is_finished]
            self.is_full = False
        return self.prefill() or self.decode()  # 2.5

    # 3. A prefill batch.

    def prefill(self) -> Batch | None:
        if not self.running:  # 3.1
            self.is_full = False
        if (self.is_full or not self.queue) and self.chunked is None:  # 3.2
            return None
        self.limit = None
        allocatable = self.settings["max_running_requests"] - len(self.running)  # 3.4
        if allocatable <= 0 and self.chunked is None:
            self.is_full, self.limit = True, "batch_size"
            return None
        self.order_queue()  # 3.5
        adder = Adder(self)
        chosen = list[tuple[Request, int, int]]()
        if self.chunked is not None:  # 3.6
            request = self.chunked
            length = adder.add_continuing(request)
            chosen.append((request, request.computed, length))
            if request.computed + length == len(request.tokens):
                self.chunked = None
        for request in self.queue:  # 3.7
            if adder.state() == "OTHER":
                self.limit = "num_tokens"
                break
            if len(chosen) >= allocatable:
                self.is_full = True
            if self.is_full:
                self.limit = "batch_size"
                break
            found, node, from_host, host_node = self.match(request)
            self.lock(node)
            result, length = adder.add_waiting(request, found, from_host)
            if length:
                if self.tree is not None and host_node is not None and from_host:  # loaded back at admission
                    self.lock(host_node)
                    self.make_room(from_host)
                    self.free -= from_host
                    self.tree.load(host_node)
                    self.unlock(node)
                    found, node = found + from_host, host_node
                chosen.append((request, found, length))
                request.node, request.owned, request.inserted = node, found, 0
                request.computed = request.allocated = found
                request.is_retracted = False
                if found + length < len(request.tokens):
                    self.chunked = request
            else:
                self.unlock(node)
            if result != "CONTINUE":
                self.limit = "kv_blocks" if result == "NO_TOKEN" else "num_tokens"
                if result == "NO_TOKEN":
                    self.is_full = bool(chosen or self.running)
                break
        if not chosen:
            return None
        starting = [request for request, _start, _length in chosen]
        self.queue = [request for request in self.queue if request not in starting]  # 3.8
        needed = sum(length for _request, _start, length in chosen)
        # SGLang evicts for a further page of each request where pages have several tokens.
        self.make_room(needed + (len(chosen) * self.page if self.page > 1 else 0))
        for request, start, length in chosen:
            request.computed = start + length
            self.allocate(request)
        return Batch(chosen, self.mixed_decode() if self.mixes else [])

    def match(self, request: Request) -> tuple[int, Node | None, int, Node | None]:
        """3.7e, with what only the host has. SGLang does not load fewer than 10 tokens."""
        if self.tree is None:
            return 0, None, 0, None
        found, node, from_host, host_node = self.tree.match(request.tokens[:-1])
        return (found, node, from_host, host_node) if from_host >= 10 else (found, node, 0, node)

    def mixed_decode(self) -> list[Request]:
        """3.9. All running requests, if their slots fit."""
        if self.leave_finishing():
            self.is_full = False
        if not self.running or not self.fits(self.running):
            return []
        decoding, self.running = self.running, []
        self.take_slots(decoding)
        return decoding

    # 7. The queue, as far as it is here.

    def order_queue(self) -> None:
        policy = self.settings["schedule_policy"]
        if policy == "lpm" and self.tree is not None:
            self.order_by_match(self.tree)
            return
        if policy == "lof":
            self.queue.sort(key=lambda request: (-request.priority, -request.max_new_tokens))
        elif self.settings["enable_priority_scheduling"]:
            self.queue.sort(key=lambda request: (-request.priority, request.entered))
        # SGLang touches the prefixes of the first waiting requests in each 32nd pass, the head last.
        if self.tree is not None and self.settings["radix_eviction_policy"] == "lru" and self.queue:
            self.num_passes += 1
            if self.num_passes % 32 == 1:
                for request in reversed(self.queue[:128]):
                    self.tree.match(request.tokens)

    def order_by_match(self, tree: Tree) -> None:
        found = {request: tree.match(request.tokens) for request in self.queue}
        compared, later = list[Request](), set[Request]()
        for request in self.queue:
            if found[request][0] > 32:
                continue
            if any(num_common(request.tokens, other.tokens) >= 32 for other in compared):
                later.add(request)
            else:
                compared.append(request)
        # Those of both memories count, but for the last token.
        lengths = {one: min(found[one][0] + found[one][2], len(one.tokens) - 1) for one in self.queue}
        self.queue.sort(key=lambda request: (request in later, 0 if request in later else -lengths[request]))

    # 5. A decode batch.

    def decode(self) -> Batch | None:
        before = len(self.running)
        num_left_out = self.leave_finishing()  # 5.1
        if not self.running:
            self.is_full = False
            return None
        if self.fits(self.running):
            self.ratio = max(self.ratio - (self.initial_ratio - self.minimum_ratio) / 600, self.minimum_ratio)  # 5.5
        elif num_left_out:  # 5.3
            self.is_full = False
            return None
        else:
            self.retract()
        if len(self.running) < before:
            self.is_full = False
        self.take_slots(self.running)
        return Batch([], list(self.running))

    def leave_finishing(self) -> int:
        """5.1. Requests whose pending result is their last by length are left out; returns how many they are."""
        last = [one for one in self.running if one.pending and len(one.outputs) + one.pending >= one.max_new_tokens]
        if self.overlaps:
            self.running = [request for request in self.running if request not in last]
        return len(last) if self.overlaps else 0

    def retract(self) -> None:
        """5.3. At least one request, until the step fits, and one always remains."""
        by_priority, retracted = self.settings["retraction_policy"] == "priority", list[Request]()
        order = sorted(
            self.running,
            key=lambda one: (one.priority if by_priority else 0, len(one.outputs), -len(one.prompt)),
            reverse=True,
        )
        while len(order) > 1 and (not retracted or not self.fits(order)):
            victim = order.pop()
            self.free += victim.allocated - victim.owned
            self.unlock(victim.node)
            self.make_room(20 * len(order))
            victim.node, victim.owned, victim.computed, victim.allocated, victim.pending = None, 0, 0, 0, 0
            victim.is_retracted = True
            retracted.append(victim)
        assert self.fits(order), "one request alone fits in these workloads"
        self.running = order
        outputs = sum(len(request.outputs) for request in order) + 20 * len(order)
        self.ratio = min(1.0, outputs / (sum(request.max_new_tokens for request in order) + 1))
        for request in retracted:
            self.enter(request)

    def fits(self, requests: list[Request]) -> bool:
        """5.2. Whether the next step has its slots. Cached leaves are evicted for them."""
        return self.make_room(sum(self.page for request in requests if request.computed % self.page == 0))

    def take_slots(self, requests: list[Request]) -> None:
        if self.page > 1:  # SGLang makes room for a page of each request before it takes those that are needed
            self.make_room(len(requests) * self.page)
        for request in requests:
            request.computed += 1
            self.allocate(request)

    # Slots and the tree.

    def available(self) -> int:
        return self.free + (0 if self.tree is None else self.tree.evictable())

    def make_room(self, tokens: int) -> bool:
        if self.tree is not None and tokens > self.free:
            self.free += self.tree.evict(tokens - self.free)
        return tokens <= self.free

    def allocate(self, request: Request) -> None:
        """Take the pages that a request lacks for what it has computed."""
        pages = self.paged(request.computed)
        self.free -= pages - request.allocated
        assert self.free >= 0
        request.allocated = pages

    def lock(self, node: Node | None) -> None:
        for one in [] if node is None else node.path():
            one.locks += 1

    def unlock(self, node: Node | None) -> None:
        for one in [] if node is None else node.path():
            one.locks -= 1

    def publish(self, request: Request, count: int) -> None:
        """6. Put the first tokens into the tree. The request's copies of what was there are freed."""
        if self.tree is None:
            return
        tokens = self.tree.whole_pages(request.tokens[:count])
        found, node = self.tree.insert(tokens, request.inserted, request.priority)
        request.inserted = max(request.inserted, len(tokens))
        prompt = self.tree.whole_pages(request.prompt[: len(tokens)])
        if 0 < len(prompt) < len(tokens):  # the leaf is split at the prompt's end, where outputs are dropped first
            self.tree.insert(prompt, len(prompt), request.priority + 1)
        self.free += found - request.owned
        self.lock(node)
        self.unlock(request.node)
        request.node, request.owned = node, len(tokens)

    def paged(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    # 8. Launch and results.

    def launch(self, batch: Batch) -> None:
        """The tokens of a batch are known when it runs; the scheduler sees them when its result is processed."""
        for request, start, length in batch.prefill:
            end = start + length
            batch.results.append((request, end, self.token(request) if end == len(request.tokens) else None))
        for request in batch.decode:
            batch.results.append((request, request.computed, self.token(request)))

    def token(self, request: Request) -> int:
        index = len(request.outputs) + request.pending
        request.pending += 1
        ends_early = request.output_len < request.max_new_tokens and index == request.output_len - 1
        return self.end_token if ends_early else 10 + (request.number * 7 + index * 13) % 50

    def process(self, batch: Batch) -> None:
        for index, (request, computed, token) in enumerate(batch.results):
            # One that has ended ran one step too many; the output in flight of a retracted one is dropped.
            if token is None or request.is_finished or request.is_retracted:
                continue
            request.outputs.append(token)
            request.pending -= 1
            if token == self.end_token or len(request.outputs) >= request.max_new_tokens:
                request.is_finished = True
                self.publish(request, min(request.computed, len(request.tokens)))
                self.free += request.allocated - request.owned
                self.unlock(request.node)
            elif index < len(batch.prefill):
                self.publish(request, computed)


class Adder:
    """4. The budgets of one pass."""

    def __init__(self, scheduler: Reference) -> None:
        self.scheduler, settings = scheduler, scheduler.settings
        self.ignores_eos, self.page = settings["ignore_eos"], scheduler.page
        self.ratio = 1.0 if self.ignores_eos else scheduler.ratio
        mixed = len(scheduler.running) if scheduler.mixes else 0
        self.total = self.current = float(mixed)
        for request in scheduler.running:
            self.total += min(request.max_new_tokens - len(request.outputs), CLIP) * self.ratio
        self.input = settings["max_prefill_tokens"] - mixed
        self.chunk = settings["chunked_prefill_size"]
        if self.chunk is not None:
            self.chunk -= mixed
        self.num_chosen = 0
        # Tokens left and tokens held of running and chosen requests, for `ignore_eos` without a tree.
        self.states = [
            (request.max_new_tokens - len(request.outputs), len(request.tokens)) for request in scheduler.running
        ]
        self.is_sorted = False

    def state(self) -> str:
        available = self.scheduler.available()
        if available - self.total <= 0 or available - self.current <= 0:
            return "NO_TOKEN"
        return "OTHER" if self.input <= 0 or (self.chunk is not None and self.chunk <= 0) else "CONTINUE"

    def charge(self, tokens: int, expected: int) -> None:
        pages = self.scheduler.paged(tokens)
        self.total += pages + self.page + expected
        self.current += pages + self.page
        self.input -= pages
        if self.chunk is not None:
            self.chunk -= pages
        self.num_chosen += 1

    def add_continuing(self, request: Request) -> int:
        rest = len(request.tokens) - request.computed
        limit = min(self.chunk, int(self.scheduler.available() - self.total))
        tokens = min(rest, limit if limit > 0 else self.chunk)
        self.charge(tokens, min(request.max_new_tokens, CLIP) if tokens == rest else 0)
        self.states.append((request.max_new_tokens - len(request.outputs), len(request.tokens)))
        return tokens

    def add_waiting(self, request: Request, on_device: int, on_host: int) -> tuple[str, int]:
        """What the pass does next, and how many tokens of the request run: 0 if it is not taken. What is on the host is
        not computed, but needs slots."""
        most = self.scheduler.settings["prefill_max_requests"]
        if most is not None and self.num_chosen >= most:
            return "OTHER", 0
        cached = on_device + on_host
        tokens = len(request.tokens) - cached
        is_certain = self.ignores_eos and self.scheduler.tree is None
        if is_certain:
            if not self.ends_fit(request):
                return "NO_TOKEN", 0
        else:
            outputs = min(request.max_new_tokens - len(request.outputs), CLIP)
            if not tokens + on_host + outputs + self.page < self.scheduler.available() - self.total:
                return "NO_TOKEN", 0
            if self.chunk is None and self.num_chosen and self.scheduler.paged(tokens) >= self.input:
                return "OTHER", 0
        expected = min(request.max_new_tokens, CLIP)
        # SGLang compares without pages where outputs are certain, and does not round that cut.
        if self.chunk is not None and (tokens if is_certain else self.scheduler.paged(tokens)) > self.chunk:
            if self.scheduler.chunked is not None:
                return "OTHER", 0
            end = cached + self.chunk // self.page * self.page
            tokens = self.chunk if is_certain else end // self.page * self.page - cached
            expected = 0
            if tokens <= 0:
                return "OTHER", 0
        self.charge(tokens, expected)
        return self.state(), tokens

    def ends_fit(self, request: Request) -> bool:
        """4, `ignore_eos` with `--disable-radix-cache`: at each end, what is free then must exceed what the requests
        that still run take until then."""
        pages = self.scheduler.paged(len(request.tokens)) + self.page
        available = self.scheduler.available()
        if pages > min(available - self.current, available - self.total):
            return False
        entry = request.max_new_tokens - len(request.outputs), len(request.tokens)
        if not self.is_sorted:
            self.is_sorted = True
            self.states = sorted([one for one in [entry, *self.states] if one[0] > 0], key=lambda one: one[0])
        else:
            # SGLang inserts before the first that ends as early, and before the last if there is none.
            later = [index for index, one in enumerate(self.states) if one[0] >= entry[0]]
            self.states.insert(later[0] if later else max(len(self.states) - 1, 0), entry)
        free = available - self.current - pages
        for index, (left, held) in enumerate(self.states):
            still = len(self.states) - index
            if free - left * still <= still:
                return False
            free += held
        return True


def num_common(one: list[int], other: list[int]) -> int:
    """Tokens with which both begin."""
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def answers(case: Mapping[str, Any], end_token: int, max_rounds: int) -> list[Answer]:
    """The batches of a workload."""
    return Reference(case["settings"], end_token).run(case["requests"], max_rounds)
