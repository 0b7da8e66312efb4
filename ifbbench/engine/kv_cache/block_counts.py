"""Numbers of blocks in a cache with several attention windows: one for each."""


class BlockCounts:
    """Blocks in each window. One amount is more than another if it is in any window: then it does not fit.

    Works where a number of blocks does, so that a policy reads the same for one window and for several.
    """

    __slots__ = ("counts",)

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.counts = counts

    def __add__(self, other: "BlockCounts | int") -> "BlockCounts":
        return BlockCounts(tuple(mine + its for mine, its in zip(self.counts, self._of(other), strict=True)))

    __radd__ = __add__

    def __sub__(self, other: "BlockCounts | int") -> "BlockCounts":
        return BlockCounts(tuple(mine - its for mine, its in zip(self.counts, self._of(other), strict=True)))

    def __gt__(self, other: "BlockCounts | int") -> bool:
        return any(mine > its for mine, its in zip(self.counts, self._of(other), strict=True))

    def __le__(self, other: "BlockCounts | int") -> bool:
        return not self > other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockCounts | int) and self.counts == self._of(other)

    def __hash__(self) -> int:
        return hash(self.counts)

    def __repr__(self) -> str:
        return f"BlockCounts{self.counts}"

    def _of(self, other: "BlockCounts | int") -> tuple[int, ...]:
        """A plain number is the same in every window."""
        return other.counts if isinstance(other, BlockCounts) else (other,) * len(self.counts)
