"""STATIC_BATCH: a batch runs until all its requests are complete; only then others start."""

from ifbbench.engine.active import ActiveRequests
from ifbbench.engine.policies.guaranteed_no_evict import GuaranteedNoEvict


class StaticBatch(GuaranteedNoEvict):
    """GUARANTEED_NO_EVICT that considers context requests only when no request is in generation."""

    # All members start together, so that none can wait for blocks of another.
    _delays_for_reuse = False

    def _considers_context(self, active: ActiveRequests) -> bool:
        return not active.generation
