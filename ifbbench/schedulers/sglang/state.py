"""What the parts of SGLang's scheduler share: its requests, and what they hold."""

from collections import deque
from collections.abc import Sequence

from ifbbench.engine.arrays import NO_ROWS, Rows
from ifbbench.engine.plan import Limit, Pause
from ifbbench.engine.records import InFlightIteration
from ifbbench.engine.request import Request
from ifbbench.schedulers.generation import JointGeneration
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.queueing import part
from ifbbench.schedulers.sglang.cache import SglangCache
from ifbbench.schedulers.sglang.host_pages import HostPages
from ifbbench.schedulers.sglang.in_flight import Scheduled
from ifbbench.schedulers.sglang.order import QueueOrder, max_outputs
from ifbbench.schedulers.sglang.ratio import NewTokenRatio
from ifbbench.schedulers.sglang.receiving import Receiver
from ifbbench.schedulers.sglang.rules import SglangRules
from ifbbench.schedulers.sglang.running import RunningRequests
from ifbbench.schedulers.sglang.storage import Storage


class SglangState:
    """The requests of the scheduler, waiting, running and in flight, and the pages that they hold.

    arrived: requests that the scheduler has not received yet.
    queue: waiting requests.
    running: requests that decode.
    last: requests of the latest prefill batch, which have not joined `running`.
    chunked: the request whose prompt is computed in chunks.
    is_full: whether no request is tried before one has left.
    has_left: whether one has left `running` or `last` since the latest decision.
    has_finishing: whether the last output of some running request may be in flight.
    limit_of_head: why the head of the queue waits, or `left_out` if that is set.
    left_out: the request that waits for `limit_of_head`, if requests that wait for storage stand before it.
    awaits_only: whether all requests in the queue wait for storage.
    judged: number of tokens that each waiting request lacked when it was last judged, or ran.
    kept: complete requests whose pages are being sent to another engine.
    in_host: requests that were retracted to host memory.
    storage: the storage behind the host memory, None without any.
    """

    def __init__(self, limits: BatchingConfig, rules: SglangRules) -> None:
        self.limits, self.rules = limits, rules
        self.table = limits.make_table()
        host = None
        if limits.num_host_blocks:
            policy, size = rules.write_policy, limits.tokens_per_block
            host = HostPages(limits.num_host_blocks, size, policy, limits.reads_block_tables)
        self.kv_cache = SglangCache(
            limits.num_blocks,
            limits.tokens_per_block,
            limits.num_slots,
            limits.max_seq_len + limits.drafts.max_len,
            limits.reuse.enabled,
            rules.eviction_policy,
            host,
        )
        self.generation = JointGeneration(limits, self.table, self.kv_cache.held)
        self.arrived = Receiver(rules.receive_interval)
        self.queue: list[Request] = []
        self.running = RunningRequests()
        self.last: list[Request] = []
        self.chunked: Request | None = None
        self.in_flight: deque[Scheduled] = deque()
        self.is_full = self.has_left = self.has_finishing = False
        self.limit_of_head: Limit | None = None
        self.left_out: Request | None = None
        self.awaits_only = False
        self.ratio = NewTokenRatio(rules.conservativeness)
        self.order = QueueOrder(rules, self.kv_cache)
        self.judged: dict[Request, int] = {}
        self.kept: set[Request] = set()
        self.in_host: list[Request] = []
        self.storage: Storage | None = None
        self._num_queued = self._num_joined = 0

    def join(self, is_joint: bool) -> None:
        """The requests of the latest prefill batch decode from now on. is_joint: whether all of them run jointly."""
        joint, begins = self.generation, is_joint and not self.generation.is_active
        if not is_joint:
            self.part()
        self.running.join(self.last)
        joining = self.running.requests if begins else self.last if is_joint else ()
        numbered = list[tuple[int, Request]]()
        for request in joining:
            if request.in_generation:
                self._num_joined += 1
                numbered.append((self._num_joined, request))
        self.last = []
        if not begins:
            for number, request in numbered:
                joint.follow(number, request)
        elif numbered:
            for _, request in numbered:
                joint.computed[request.slot] = self.computed_by(request)
            joint.begin(numbered)

    def enter_generation(self, requests: Sequence[Request]) -> None:
        """Prompts of the batch that was just submitted are complete."""
        joint = self.generation
        if joint.is_active:
            for request in requests:
                if request.in_generation:
                    joint.computed[request.slot] = request.prompt_len
                    joint.enter(request, joint.num_in_flight)

    def leave_generation(self, request: Request) -> None:
        """A request ends, of which all that is counted is read from now on."""
        if self.generation.is_active and self.generation.remove(request):
            request.finish_scheduling()

    def part(self) -> None:
        """The requests that decode do not run jointly any more."""
        if self.generation.is_active:
            ending = self.generation.end()
            rows = {row for row, request in self.table.requests.items() if request.in_generation}
            part(self.in_flight, rows.union([request.slot for request in ending]), self.table.confirmed)
            for row in rows:
                self.kv_cache.name_pages(row)

    def enqueue(self, request: Request) -> None:
        """Add a request that has arrived or was retracted to the end of the queue."""
        self._num_queued += 1
        request.order = (-request.priority if self.rules.is_priority else 0.0, self._num_queued)
        if self.storage is not None:
            self.storage.look_up(request)
        self.queue.append(request)
        self.order.arrived(request)

    def leave_batches(self, request: Request) -> None:
        """A request is no longer part of the batches."""
        if request in self.running.requests:
            self.running.remove(request)
            self.has_left = True
        if request in self.last:
            self.last.remove(request)
            self.has_left = True
        if request is self.chunked:
            self.chunked = None

    def leave_finishing(self) -> int:
        """Running requests whose last output is in flight do not decode again; returns how many they are."""
        if not self.has_finishing:
            return 0
        before, self.has_finishing = len(self.running), False
        kept = [request for request in self.running.requests if request.in_generation]
        if len(kept) < before:
            self.running.keep(kept)
        return before - len(kept)

    def release(self, request: Request) -> None:
        """A request ends: the tree keeps what it computed."""
        computed = self.computed_by(request)
        self.kv_cache.publish(
            request, min(computed, request.original_prompt_len + request.num_outputs), is_complete=True
        )
        self.kv_cache.release(request.slot, computed)

    def computed_by(self, request: Request) -> int:
        """Tokens of a running request that were computed or are in flight."""
        return request.position if request.in_context else request.prompt_len + request.num_generated - 1

    def computed(self, rows: Rows) -> Rows:
        """[rows], the same of requests that decode."""
        table = self.table
        computed: Rows = table.original_prompt_len[rows] + table.joined[rows] + table.generated[rows]
        return computed + (table.deferred_steps - 1)

    def ignores_eos(self, request: Request) -> bool:
        """Whether a request is certain to have all the outputs that it may have."""
        return self.rules.ignores_eos and request.output_len == max_outputs(request)


class Decision:
    """One decision of the scheduler, while it is made.

    in_flight: the iterations in flight.
    chosen: requests with chunks of their prompts.
    rows: table rows of the generation requests.
    paused, entered, num_ending, receiving: as in a Plan.
    continued: requests that join the running ones without a prefill.
    awaits: whether requests wait for storage while those behind them are tried.
    has_lost: whether a request matches less than before, and is tried in the next iteration.
    aborted: the only running request, if it does not fit.
    is_prefill: whether it is a prefill batch.
    is_held: whether no request decodes because another rank has a prefill batch.
    """

    def __init__(self, in_flight: Sequence[InFlightIteration]) -> None:
        self.in_flight = in_flight
        self.chosen: list[Request] = []
        self.rows: Rows = NO_ROWS
        self.paused: list[Pause] = []
        self.entered: list[Request] = []
        self.receiving: list[Request] = []
        self.continued: list[Request] = []
        self.awaits = False
        self.has_lost = False
        self.aborted: Request | None = None
        self.num_ending = 0
        self.is_prefill = self.is_held = False
