"""System prompts that many requests share: pools of them, some more popular than others."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ifbbench.workload.distributions import LengthDistribution, require
from ifbbench.workload.prefix import PrefixRun, num_blocks, runs_of
from ifbbench.workload.streams import Stream, generator

NO_POOL = -1
MAX_POOLS = 10_000_000


@dataclass(frozen=True)
class SharedPrefix:
    """`pools` system prompts of lengths drawn from `len`; a prompt begins with one of them with probability `share`.

    The k-th pool, from 1, is chosen in proportion to k to the power of -`skew` (Zipf's law; 0: all alike).
    """

    pools: int
    len: LengthDistribution
    share: float = 1.0
    skew: float = 0.0

    def __post_init__(self) -> None:
        require(1 <= self.pools <= MAX_POOLS, f"pools {self.pools} is not from 1 to {MAX_POOLS}")
        require(0 <= self.share <= 1, f"share {self.share:g} is not from 0 to 1")
        require(self.skew >= 0, f"skew {self.skew:g} is negative")

    def draw_pools(self, seed: int) -> list[list[PrefixRun]]:
        """The tokens of each pool's prompt; their prefix ids are numbered from 0 on, without gaps."""
        lengths = self.len.draw(generator(seed, Stream.POOL_LENGTH), self.pools).tolist()
        pools: list[list[PrefixRun]] = []
        first_id = 0
        for length in lengths:
            next_id = first_id + num_blocks(length)
            pools.append(runs_of(range(first_id, next_id), length))
            first_id = next_id
        return pools

    def draw(self, seed: int, count: int) -> NDArray[np.int64]:
        """The pool of each of `count` requests, from 0; NO_POOL for a request without a shared prefix."""
        weights = np.arange(1, self.pools + 1, dtype=np.float64) ** -self.skew
        bounds = np.cumsum(weights / weights.sum())
        chosen = np.searchsorted(bounds[:-1], generator(seed, Stream.POOL_CHOICE).random(count), side="right")
        shares = generator(seed, Stream.POOL_SHARE).random(count) < self.share
        return np.where(shares, chosen, NO_POOL)
