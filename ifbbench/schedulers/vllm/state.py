"""What the parts of vLLM's scheduler share: its requests, and what they hold."""

from ifbbench.engine.arrays import Rows
from ifbbench.engine.request import Request
from ifbbench.kv.tiers import KvTiers
from ifbbench.schedulers.generation import JointGeneration
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.queueing import part
from ifbbench.schedulers.vllm.cache import VllmCache
from ifbbench.schedulers.vllm.in_flight import InFlight
from ifbbench.schedulers.vllm.queue import WaitingQueue
from ifbbench.schedulers.vllm.rules import VllmRules
from ifbbench.schedulers.vllm.running import RunningRequests


class VllmState:
    """The requests of the scheduler, waiting, running and in flight, and the blocks that they hold.

    computed: [rows], number of tokens of each generation request that were computed or scheduled, where they do not run
        jointly.
    num_with_rows: requests in the queue that have a row: pre-empted ones, and those that have received their prompt's
        keys and values.
    transferring: requests whose keys and values are on their way, from here or to here, and how many there had been
        before each.
    tiers: stores beneath the device memory, None without any.
    """

    def __init__(self, limits: BatchingConfig, rules: VllmRules, is_predicted: bool) -> None:
        self.limits, self.rules = limits, rules
        self.table = limits.make_table()
        self.kv_cache = VllmCache(
            rules,
            limits.num_blocks,
            limits.tokens_per_block,
            limits.num_slots,
            limits.max_seq_len,
            limits.reuse.enabled,
            limits.max_tokens_in_flight,
            has_ids=limits.reads_block_tables and not is_predicted,
        )
        self.queue = WaitingQueue(rules.is_priority)
        self.running = RunningRequests()
        self.in_flight = InFlight()
        self.generation = JointGeneration(limits, self.table, self.kv_cache.held)
        self.kv_cache.settle = self.generation.settle
        self.computed = self.generation.computed
        self.num_with_rows = 0
        self.transferring: dict[Request, int] = {}
        self._num_transfers = 0
        self.tiers: KvTiers | None = None
        self.max_running = min(limits.max_batch_size, rules.max_active or limits.max_batch_size)

    def begin_transfer(self, request: Request) -> None:
        """Keys and values of `request` are to be sent, or to come."""
        self.transferring[request] = self._num_transfers
        self._num_transfers += 1
        self.table.num_transferring += 1

    def end_transfer(self, request: Request) -> int:
        """They were sent, or have come; returns how many transfers had begun before this one."""
        self.table.num_transferring -= 1
        return self.transferring.pop(request)

    def computed_by(self, request: Request) -> int:
        """Tokens of a running request that were computed or scheduled."""
        if request.in_context:
            return request.position
        return int(self.computed[request.slot]) + (self.table.deferred_steps if request.in_generation else 0)

    def part(self) -> None:
        """The generation requests do not all run in the next iteration, or what their tokens are decides something."""
        if self.generation.is_active:
            ending = self.generation.end()
            rows = {row for row, request in self.table.requests.items() if request.in_generation}
            part(self.in_flight, rows.union([request.slot for request in ending]), self.table.confirmed)

    def known(self, rows: Rows) -> Rows:
        """[rows], tokens of prompt and output that are known, of generation requests."""
        table = self.table
        known: Rows = table.original_prompt_len[rows] + table.joined[rows] + table.confirmed[rows]
        return known

    def known_of(self, request: Request) -> int:
        """Tokens of prompt and output of a running request that are known."""
        known = request.prompt_len
        if request.in_context:
            return known
        deferred = self.table.deferred_confirmed if request.in_generation else 0
        return known + int(self.table.confirmed[request.slot]) + deferred

    def set_hashes(self, rows: Rows, tokens: Rows) -> None:
        """The blocks that the first `tokens` tokens of each of `rows` fill get their hashes."""
        if not self.limits.reuse.enabled:
            return
        due = tokens // self.kv_cache.tokens_per_block > self.kv_cache.hashed[rows]
        for row, count in zip(rows[due].tolist(), tokens[due].tolist(), strict=True):
            self.kv_cache.set_hashes(self.table.requests[row], count)

    def release(self, request: Request, is_scheduled: bool = False, is_preempted: bool = False) -> None:
        """Release the blocks of a running request. Those that its outputs fill can be found from now on: all that were
        scheduled. is_scheduled: in this very iteration too."""
        if not request.in_context and not self.limits.drafts.max_len:  # drafts: see Planner
            self.kv_cache.set_hashes(request, self.known_of(request) - (0 if is_scheduled else 1))
        if is_preempted:
            self.kv_cache.index_unshared(request)
        self.kv_cache.release(request.slot, self.computed_by(request))
