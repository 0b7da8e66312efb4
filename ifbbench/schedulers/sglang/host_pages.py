"""Pages of SGLang's KV cache in host memory (HiCache): which are free, and what is copied between the memories."""

from ifbbench.engine.arrays import IntArray
from ifbbench.engine.batch import BlockCopy, CopyKind
from ifbbench.schedulers.sglang.free_pages import FreePages

# Insertions of a node after which it is copied to the host, by --hicache_write_policy.
WRITE_THROUGH_HITS = {"write_through": 1, "write_through_selective": 2}


class HostPages:
    """The pages of host memory, `num_pages` of `page_size` tokens.

    keeps_copies: whether an executor makes the copies.
    writes_back: pages are copied to the host when they are evicted from the device; else once they were inserted
        `min_hits` times.
    free: pages that hold nothing.
    stored, loaded, evicted: tokens copied here and to the device, and given up, so far.
    """

    def __init__(self, num_pages: int, page_size: int, write_policy: str, keeps_copies: bool) -> None:
        self.num_pages, self.page_size, self._keeps_copies = num_pages, page_size, keeps_copies
        self.writes_back = write_policy not in WRITE_THROUGH_HITS
        self.min_hits = WRITE_THROUGH_HITS.get(write_policy, 0)
        self.free = FreePages(num_pages)
        self.stored = self.loaded = self.evicted = self._num_taken = 0
        self._copies: list[BlockCopy] = []

    def store(self, pages: IntArray) -> IntArray:
        """Copy pages of the device, for which there is room; returns their pages here."""
        taken = self.free.take(len(pages)).copy()
        self.stored += len(pages) * self.page_size
        self._copy(CopyKind.OFFLOAD, pages, taken)
        return taken

    def load(self, own: IntArray, pages: IntArray) -> None:
        """Copy `own` pages to those of the device."""
        self.loaded += len(own) * self.page_size
        self._copy(CopyKind.ONBOARD, own, pages)

    def release(self, own: IntArray) -> None:
        """These pages hold nothing any more."""
        self.free.give_up(own)
        self.evicted += len(own) * self.page_size

    def take_loaded(self) -> int:
        """Tokens copied to the device since the last call."""
        loaded, self._num_taken = self.loaded - self._num_taken, self.loaded
        return loaded

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies to make before the next batch, in order."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def figures(self) -> dict[str, int]:
        """What `summary.json` has of it."""
        return {
            "pages": self.num_pages,
            "used_pages": self.num_pages - self.free.count,
            "stored_tokens": self.stored,
            "loaded_tokens": self.loaded,
            "evicted_tokens": self.evicted,
        }

    def _copy(self, kind: CopyKind, sources: IntArray, destinations: IntArray) -> None:
        if self._keeps_copies:
            pairs = zip(sources.tolist(), destinations.tolist(), strict=True)
            self._copies += [BlockCopy(kind, source, destination, self.page_size) for source, destination in pairs]
