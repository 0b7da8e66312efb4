"""The engine's limits, as `ifbbench.api.resolve` or a researcher's script sets them."""

from dataclasses import dataclass

from ifbbench.batching.admission import LOOK_AHEAD
from ifbbench.batching.batching_type import BatchingType
from ifbbench.batching.kv_cache.geometry import CacheGeometry

MICRO_BATCHES_WITH_OVERLAP = 2
# Static batches leave no choice.
V1_POLICY = "guaranteed_no_evict"


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """The engine's limits, all resolved: tokens, requests and blocks. `chunk_unit` None means no chunked context.

    vocab_size: token ids are checked against it; None where there is no model. enable_overlap: an iteration is
    scheduled and submitted before the tokens of the one before are there.
    """

    policy: str
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_input_len: int
    tokens_per_block: int
    num_blocks: int
    chunk_unit: int | None = None
    chunking_policy: str = "first_come_first_served"
    batching_type: BatchingType = BatchingType.INFLIGHT_FUSED
    max_beam_width: int = 1
    enable_overlap: bool = False
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.enable_overlap and self.max_beam_width > 1:
            raise ValueError("overlap works with beam width 1 only")
        if self.enable_overlap and self.batching_type is BatchingType.V1:
            raise ValueError("static batches (V1) do not overlap")

    @property
    def num_slots(self) -> int:
        """Sequence slots that an executor needs: a full batch and what higher priority may add to it."""
        return self.max_batch_size + LOOK_AHEAD

    @property
    def geometry(self) -> CacheGeometry:
        return CacheGeometry(
            self.tokens_per_block, self.max_seq_len, self.max_seq_len, max_beam_width=self.max_beam_width
        )

    @property
    def num_micro_batches(self) -> int:
        """Iterations that may be under way at once."""
        return MICRO_BATCHES_WITH_OVERLAP if self.enable_overlap else 1
