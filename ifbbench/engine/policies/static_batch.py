"""STATIC_BATCH: a batch runs until all its requests are complete; only then do others start."""

from ifbbench.engine.active import ActiveRequests
from ifbbench.engine.policies.guaranteed_no_evict import GuaranteedNoEvict


class StaticBatch(GuaranteedNoEvict):
    """GUARANTEED_NO_EVICT that looks at context requests only when nothing is in generation."""

    # All members start together, so there is nothing to wait for.
    _delays_for_reuse = False

    def _considers_context(self, active: ActiveRequests) -> bool:
        return not active.generation
