"""From an iteration's decision to the batches that run it: takes the KV blocks they write to, and packs them."""

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.active import ActiveRequests
from ifbbench.engine.batch import Batch, BeamInputs, ContextChunk
from ifbbench.engine.batching_type import BatchingType
from ifbbench.engine.beam_search import BeamSearch
from ifbbench.engine.kv_cache.blocks import BlockCopy
from ifbbench.engine.kv_cache.interface import KvCache
from ifbbench.engine.request import Request

Rows = NDArray[np.int64]
_NO_ROWS: Rows = np.zeros(0, np.int64)


class BatchBuilder:
    """Builds the passes of an iteration: one, or one for each phase (InflightBatching)."""

    def __init__(self, batching_type: BatchingType, active: ActiveRequests, kv_cache: KvCache) -> None:
        self._passes_apart = batching_type is BatchingType.INFLIGHT
        self._padded = batching_type is BatchingType.V1
        self._active = active
        self._kv_cache = kv_cache

    def build(
        self, iteration: int, context: list[Request], rows: Rows, idle: Rows = _NO_ROWS, now_s: float = 0.0
    ) -> tuple[Batch, ...]:
        """The passes that run the chunks of `context` and a step of the generation requests in `rows`.

        idle: rows of complete requests that a static batch computes on with; they write over their last position. There
        is no pass for them alone."""
        chunks = tuple([self._chunk(request, now_s) for request in context])
        positions = self._kv_cache.registered[rows]
        self._kv_cache.add_tokens(rows)
        if not chunks and not len(rows):
            return ()
        if len(idle):
            positions = np.concatenate([positions, self._kv_cache.registered[idle] - 1])
            rows = np.concatenate([rows, idle])
        if bubble := self._kv_cache.attention_window.bubble:
            positions -= bubble
        copies = self._kv_cache.take_copies()
        if chunks and len(rows) and self._passes_apart:
            return (
                self._pass(iteration, chunks, _NO_ROWS, _NO_ROWS, copies),
                self._pass(iteration, (), rows, positions),
            )
        return (self._pass(iteration, chunks, rows, positions, copies),)

    def _chunk(self, request: Request, now_s: float) -> ContextChunk:
        if request.is_first_chunk:
            reused = self._kv_cache.add_request(request, now_s)
            request.set_prepopulated(reused, self._kv_cache.attention_window.tokens_per_block)
        return ContextChunk(request, request.position, request.chunk)

    def _pass(
        self, iteration: int, chunks: tuple[ContextChunk, ...], rows: Rows, positions: Rows,
        copies: tuple[BlockCopy, ...] = (),
    ) -> Batch:
        tables = self._kv_cache.block_tables
        slots, positions32 = rows.astype(np.int32), positions.astype(np.int32)
        more = self._kv_cache.window_tables
        if tables.shape[1] == 1:
            return Batch(
                iteration, chunks, slots, positions32, tables, padded=self._padded, copies=copies, window_tables=more
            )
        requests = [self._active.by_slot[row] for row in rows.tolist()]
        width = (requests[0] if requests else chunks[0].request).beam_width
        beams = self._beams(requests) if width > 1 else None
        candidates = self._num_candidates()
        return Batch(
            iteration, chunks, slots, positions32, tables, width, beams, candidates, self._padded, copies, more
        )

    def _num_candidates(self) -> int:
        """The same for all passes of an iteration, so that their outputs can be put together."""
        return max(
            BeamSearch.num_candidates(request.beam_width, request.stop) for request in self._active.by_slot.values()
        )

    def _beams(self, requests: list[Request]) -> BeamInputs | None:
        """What the searches of `requests` decided; None without any, and from executors that make no tokens."""
        searches = [request.search for request in requests if request.search is not None]
        if not searches:
            return None
        size = self._kv_cache.attention_window.tokens_per_block
        return BeamInputs(
            tokens=np.stack([search.tokens for search in searches]),
            parents=np.stack([search.parents for search in searches]),
            scores=np.stack([search.scores for search in searches]),
            # The prompt's last block may be there once for each beam, also if it is full.
            private_from=np.array([max(request.prompt_len - size, 0) for request in requests], np.int32),
        )
