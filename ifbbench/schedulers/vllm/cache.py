"""vLLM's KV cache manager: the blocks of each request, taken as its tokens are scheduled, and found by prefix
(`KVCacheManager.allocate_slots` and `get_computed_blocks`)."""

from collections.abc import Sequence

import numpy as np

from ifbbench.engine.arrays import Rows
from ifbbench.engine.plan import Limit
from ifbbench.engine.records import CacheState
from ifbbench.engine.request import Request
from ifbbench.kv.attention_window import ceil_div
from ifbbench.schedulers.vllm.blocks import BlockPool
from ifbbench.schedulers.vllm.rules import VllmRules


class VllmCache:
    """The blocks of each running request, by table row. docs/engines.md, Blocks and Prefix cache.

    held: [rows], blocks of each request. hashed: [rows], how many of them have a hash. block_tables: [rows, 1, blocks
    per sequence], the ids; entries beyond `held` are meaningless.
    """

    def __init__(
        self, rules: VllmRules, num_blocks: int, tokens_per_block: int, rows: int, max_seq_len: int, reuses: bool
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.tokens_per_block = tokens_per_block
        self.held, self.hashed = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self.block_tables = np.zeros((rows, 1, ceil_div(max_seq_len, tokens_per_block)), np.int32)
        self.filled_tokens = 0
        self._rules, self._max_seq_len, self._reuses = rules, max_seq_len, reuses
        self._blocks: dict[int, list[int]] = {}
        # Hashes of the first blocks of requests, each that of the block, its predecessors and their identity.
        self._hashes: dict[Request, list[int]] = {}

    @property
    def num_used(self) -> int:
        """Blocks with references."""
        return self.pool.num_blocks - self.pool.num_free

    def holds(self, row: int) -> bool:
        return row in self._blocks

    def lookup(self, request: Request) -> list[int]:
        """The blocks that hold the first tokens of a waiting request, up to the first that is missing. At least one
        token is left to compute."""
        if not self._reuses or request.options.return_context_logits:
            return []
        found: list[int] = []
        count = (request.prompt_len - 1) // self.tokens_per_block
        for block_hash in self._hashes_of(request, count)[:count]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def limit_of_start(
        self, request: Request, hits: Sequence[int], tokens: int, is_alone: bool
    ) -> tuple[Limit | None, int]:
        """What keeps a waiting request from starting with `hits` and `tokens` more tokens, or None; and how many blocks
        others may take before that becomes another limit.

        is_alone: no request runs, so that no watermark is kept."""
        size = self.tokens_per_block
        free = self.pool.num_free - sum([self.pool.is_free(block) for block in hits])
        needed = ceil_div(min(len(hits) * size + tokens, self._max_seq_len), size) - len(hits)
        if needed > free:
            return Limit.KV_BLOCKS, self.pool.num_free
        watermark = 0 if is_alone else self._rules.watermark_blocks
        if needed + watermark > free:
            return Limit.WATERMARK, free - needed
        whole = ceil_div(min(request.prompt_len, self._max_seq_len), size) - len(hits)
        if self._rules.reserves_full_prompt and whole + watermark > free:
            return Limit.FULL_PROMPT, free - needed - watermark
        return None, 0

    def may_be_hit_next(self, request: Request, hits: Sequence[int], running: Sequence[Request]) -> bool:
        """Whether the next block that one of `running` fills may be the first one that the waiting `request` lacks:
        both follow the same block."""
        before = self._hash_before(request, len(hits))
        return any(self._hash_before(one, int(self.hashed[one.slot])) == before for one in running)

    def start(self, request: Request, hits: list[int]) -> None:
        """A waiting request enters with the blocks in `hits`."""
        row, count = request.slot, len(hits)
        self.pool.hold(hits)
        self._blocks[row] = list(hits)
        self.block_tables[row, 0, :count] = hits
        self.held[row] = self.hashed[row] = count
        self.pool.counters.reused += count
        self.pool.counters.missed += max(0, (request.prompt_len - 1) // self.tokens_per_block - count)
        self.filled_tokens += count * self.tokens_per_block

    def missing(self, row: int, tokens: int) -> int:
        """Blocks that the request in `row` lacks for its first `tokens` tokens."""
        return max(0, ceil_div(min(tokens, self._max_seq_len), self.tokens_per_block) - int(self.held[row]))

    def grow(self, row: int, count: int) -> None:
        """Take `count` blocks for the request in `row`. The caller has checked that they are free."""
        taken, held = self.pool.take(count), int(self.held[row])
        self._blocks[row] += taken
        self.block_tables[row, 0, held : held + count] = taken
        self.held[row] = held + count

    def grow_each(self, rows: Rows) -> None:
        """Take a block for each of `rows`, in this order."""
        taken = self.pool.take(len(rows))
        for row, block in zip(rows.tolist(), taken, strict=True):
            self._blocks[row].append(block)
        self.block_tables[rows, 0, self.held[rows]] = taken
        self.held[rows] += 1

    def set_hashes(self, request: Request, tokens: int) -> None:
        """The full blocks of the first `tokens` tokens of a running request get their hashes, computed or not."""
        row = request.slot
        first, full = int(self.hashed[row]), tokens // self.tokens_per_block
        if not self._reuses or full <= first:
            return
        hashes, blocks = self._hashes_of(request, full), self._blocks[row]
        full = min(full, len(hashes))
        for index in range(first, full):
            self.pool.set_hash(blocks[index], hashes[index])
        self.hashed[row] = max(first, full)

    def release(self, row: int, tokens: int) -> None:
        """Release the blocks of the request in `row`, which has `tokens` tokens in them, the last ones first."""
        self.pool.release(reversed(self._blocks.pop(row)))
        self.held[row] = self.hashed[row] = 0
        self.filled_tokens -= tokens

    def forget_content(self, row: int) -> None:
        """What the blocks of the request in `row` hold was never computed."""
        self.pool.forget(self._blocks[row])
        self.hashed[row] = 0

    def forget(self, request: Request) -> None:
        """`request` has left."""
        self._hashes.pop(request, None)

    def state(self) -> CacheState:
        pool, size = self.pool, self.tokens_per_block
        used, counters = self.num_used, pool.counters
        return CacheState(
            pool.num_blocks,
            used,
            size,
            counters.allocated_total,
            counters.allocated_new,
            counters.reused,
            pool.num_blocks * size,
            used * size,
            self.filled_tokens,
            counters.missed,
        )

    def check_consistency(self) -> None:
        """Raise AssertionError unless every block is free or held, never both, and all counts agree."""
        references = [0] * self.pool.num_blocks
        for row, blocks in self._blocks.items():
            assert len(blocks) == self.held[row], f"row {row} has another number of blocks"
            assert self.block_tables[row, 0, : len(blocks)].tolist() == blocks, f"the table of row {row} is out of date"
            for block in blocks:
                references[block] += 1
        for block, count in enumerate(references):
            assert self.pool.is_free(block) == (count == 0), f"block {block} is held {count} times"
        assert self.pool.num_free == references.count(0), "the number of free blocks is wrong"

    def _hash_before(self, request: Request, block: int) -> int | None:
        """The hash that the hash of this block continues; None where tokens are not known."""
        known = request.known_tokens()
        if known is None:
            return None
        return self._hashes_of(request, block)[block - 1] if block else hash(known.identity)

    def _hashes_of(self, request: Request, count: int) -> list[int]:
        """Hashes of the first full blocks: of `count` or more of them, or fewer where tokens are not known."""
        hashes = self._hashes.get(request)
        if hashes is None:
            hashes = self._hashes[request] = []
        if len(hashes) < count and (known := request.known_tokens()) is not None:
            size, previous = self.tokens_per_block, hashes[-1] if hashes else hash(known.identity)
            for key in known.tokens.block_keys(len(hashes), min(count, len(known.tokens) // size), size):
                previous = hash((previous, key))
                hashes.append(previous)
        return hashes
