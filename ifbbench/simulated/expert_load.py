"""How the tokens of an iteration are divided among experts, and among the devices that hold these."""

import json
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ifbbench.errors import InputError
from ifbbench.settings.fields import located, number

Floats = NDArray[np.float64]
# The seed of the order in which experts with unequal loads are placed.
PLACEMENT_SEED = 0
SUFFIX = ".json"


@dataclass(frozen=True)
class ExpertLoad:
    """The experts of a layer and their shares of the tokens.

    num_experts: number of experts to choose from.
    chosen: number of experts that each token chooses.
    parts: number of parts of the devices, each with as many experts.
    redundant: number of further copies of experts; the tokens of an expert are divided among its copies.
    shares: share of the tokens that each expert gets, in any unit; empty if all get as many.

    Copies are those of the experts with the largest load, one after the other, and are packed into parts by load, the
    largest first, as DeepSeek's EPLB does within a node (`replicate_experts` and `balanced_packing`; only read).
    Without redundant experts parts have experts in a random order.
    """

    num_experts: int
    chosen: int
    parts: int = 1
    redundant: int = 0
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.shares and len(self.shares) != self.num_experts:
            raise InputError(f"--expert_load: {len(self.shares)} loads, and the model has {self.num_experts} experts.")
        if self.redundant % self.parts or (self.redundant and self.num_experts % self.parts):
            raise InputError(
                f"--redundant_experts: {self.num_experts} experts and {self.redundant} more cannot be divided among "
                f"{self.parts} parts of --ep_size evenly; choose a multiple of it."
            )
        if self.redundant > self.num_experts * (self.parts - 1):
            raise InputError(
                f"--redundant_experts: {self.redundant} are more than one copy of each of {self.num_experts} "
                f"experts in each of {self.parts} parts; lower it."
            )

    @property
    def experts_per_part(self) -> int:
        return -(-(self.num_experts + self.redundant) // self.parts)

    def rows(self, tokens: int) -> float:
        """Expected rows of the part with the most, of so many tokens."""
        if self.parts == 1:
            return tokens * self.chosen
        largest, mean, deviation, spread = self._rows_of_token
        # With unequal parts the largest one alone decides: the larger of two bounds counts.
        expected = max(
            tokens * largest,
            tokens * mean + self._quantile * math.hypot(tokens * deviation, spread * math.sqrt(tokens)),
        )
        return min(tokens * self.experts_per_part, expected)

    def hit(self, tokens: int) -> float:
        """Expected experts with a token, of the part with the most."""
        if self.parts == 1 and not self.shares:
            experts, chosen = self.num_experts, self.chosen
            return experts * (1 - (1 - chosen / experts) ** tokens)
        limit = min(self.experts_per_part, tokens * self.chosen)
        if self._common_chance is not None:
            hits, count = 1 - (1 - self._common_chance) ** tokens, self.experts_per_part
            return min(limit, count * hits + self._quantile * math.sqrt(count * hits * (1 - hits)))
        of_copies = 1 - (1 - self._chances) ** tokens
        sums = of_copies.sum(axis=1)
        if self.parts == 1:
            return float(sums[0])
        spread = float(np.sqrt((of_copies * (1 - of_copies)).sum(axis=1)).mean())
        largest, mean = float(sums.max()), float(sums.mean())
        return min(limit, max(largest, mean + self._quantile * math.hypot(float(sums.std()), spread)))

    def parts_of_token(self) -> float:
        """Expected parts with an expert of a token."""
        return self.parts * (1 - (1 - 1 / self.parts) ** self.chosen)

    @cached_property
    def _quantile(self) -> float:
        """How many standard deviations the largest of the sums of all parts is expected above their mean.

        Sums are close to normal; of equal ones this is Blom's quantile ("Statistical Estimates and Transformed
        Beta-Variables", 1958)."""
        from statistics import NormalDist

        return NormalDist().inv_cdf((self.parts - 0.375) / (self.parts + 0.25))

    @cached_property
    def _rows_of_token(self) -> tuple[float, float, float, float]:
        """Rows of one token in a part: the largest and the mean of all parts, and the standard deviations of parts from
        this mean and of draws."""
        chances = self._chances
        sums, variances = chances.sum(axis=1), (chances * (1 - chances)).sum(axis=1)
        return float(sums.max()), float(sums.mean()), float(sums.std()), float(np.sqrt(variances).mean())

    @cached_property
    def _common_chance(self) -> float | None:
        """How likely a token chooses each copy, None if that differs."""
        chances = self._chances
        return float(chances[0, 0]) if (chances == chances[0, 0]).all() and self.parts > 1 else None

    @cached_property
    def _chances(self) -> Floats:
        """[parts, copies], how likely a token chooses each copy; 0 where a part has one expert fewer."""
        shares = np.array(self.shares) if self.shares else np.ones(self.num_experts)
        chances = _at_most_one(shares, self.chosen)
        copies = np.ones(self.num_experts, dtype=np.int64)
        for _ in range(self.redundant):
            open_to_more = np.where(copies < self.parts, chances / copies, -1.0)
            copies[int(open_to_more.argmax())] += 1
        loads = np.repeat(chances / copies, copies)
        found = np.zeros((self.parts, self.experts_per_part))
        if self.redundant:
            counts, sums = np.zeros(self.parts, dtype=np.int64), np.zeros(self.parts)
            for load in np.sort(loads)[::-1].tolist():
                part = int(np.where(counts < self.experts_per_part, sums, np.inf).argmin())
                found[part, counts[part]] = load
                counts[part] += 1
                sums[part] += load
            return found
        np.random.default_rng(PLACEMENT_SEED).shuffle(loads)
        for part, loads_of_part in enumerate(np.array_split(loads, self.parts)):
            found[part, : len(loads_of_part)] = loads_of_part
        return found


def _at_most_one(shares: Floats, chosen: int) -> Floats:
    """Chances in proportion to `shares` whose sum is `chosen`, none above 1: what is beyond goes to the others."""
    is_sure = np.zeros(len(shares), dtype=bool)
    while True:
        chances = np.where(is_sure, 1.0, 0.0)
        chances[~is_sure] = (chosen - is_sure.sum()) * shares[~is_sure] / max(float(shares[~is_sure].sum()), 1e-300)
        above = (chances > 1) & ~is_sure
        if not above.any():
            return chances
        is_sure |= above


@lru_cache(maxsize=16)
def load_shares(given: str | None, num_experts: int) -> tuple[float, ...]:
    """The shares of the experts that `--expert_load` gives: of a power law with this exponent, or from a file with a
    JSON list. Empty for equal ones. InputError for another text or list."""
    if given is None or not num_experts:
        return ()
    if given.endswith(SUFFIX):
        with located(f"--expert_load {given}"):
            try:
                listed = json.loads(Path(given).read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError) as error:
                raise InputError(f"cannot be read as JSON ({error}).") from error
            if not isinstance(listed, list) or len(listed) != num_experts:
                raise InputError(f"expected a list of {num_experts} numbers, one for each expert.")
            shares = tuple(number(value, f"[{index}]", 0.0) for index, value in enumerate(listed))
            if not sum(shares):
                raise InputError("all loads are 0; expected one above 0.")
            return shares
    try:
        exponent = number(float(given), "--expert_load", 0.0, 10.0)
    except ValueError:
        raise InputError(
            f"--expert_load: {given!r} is not valid; expected the exponent of a power law, or a {SUFFIX} file with a "
            "list of loads."
        ) from None
    return tuple((index + 1) ** -exponent for index in range(num_experts)) if exponent else ()
