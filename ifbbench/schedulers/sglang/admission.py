"""Which waiting requests a prefill batch takes, and how many tokens of each (`PrefillAdder` and `PrefillBudget` of
SGLang 0.5.23)."""

from bisect import bisect_left
from collections.abc import Callable
from enum import Enum
from operator import itemgetter
from typing import NamedTuple

from ifbbench.kv.attention_window import ceil_div
from ifbbench.schedulers.sglang.rules import SglangRules

# Outputs that a request is expected to have at most (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION).
MAX_EXPECTED = 4096


class Verdict(Enum):
    """Whether further requests are tried: CONTINUE; not, because the cache has no room (NO_TOKEN), or for another
    reason (OTHER)."""

    CONTINUE = "CONTINUE"
    NO_TOKEN = "NO_TOKEN"
    OTHER = "OTHER"


class Need(NamedTuple):
    """What decides whether a waiting request is taken, in tokens.

    new_tokens: tokens of prompt and outputs that are not cached.
    cached: tokens in the tree.
    max_new_tokens: maximum number of outputs.
    outputs: number of outputs that it has.
    ignores_eos: whether it will have all of its outputs.
    loaded: the cached tokens that only the host has, which take pages of the device.
    """

    new_tokens: int
    cached: int
    max_new_tokens: int
    outputs: int = 0
    ignores_eos: bool = False
    loaded: int = 0


class Running(NamedTuple):
    """The requests that decode, [requests]: lengths of their prompts, how many outputs they have and may have, and
    whether they are certain to have all, empty if none is. With a tree, prompts are not read, and of outputs only how
    many more there may be."""

    prompt_len: list[int]
    outputs: list[int]
    max_new_tokens: list[int]
    ignores_eos: list[bool]


NONE_RUNNING = Running([], [], [], [])


class PrefillPass:
    """The budgets of one prefill batch.

    available(): tokens that are free or can be evicted now.
    running: the requests that decode.
    ratio: share of the rest of their outputs that these are expected to need.
    num_mixed: decode tokens that ride in the batch.
    keeps_prefixes: whether there is a radix tree.
    """

    def __init__(
        self,
        rules: SglangRules,
        page_size: int,
        available: Callable[[], int],
        running: Running,
        ratio: float,
        num_mixed: int = 0,
        keeps_prefixes: bool = True,
    ) -> None:
        self._rules, self._page_size, self._available = rules, page_size, available
        self._ratio, self._keeps_prefixes, self._running = ratio, keeps_prefixes, running
        self._now = float(num_mixed)
        total, outputs, maximum = float(num_mixed), running.outputs, running.max_new_tokens
        certain = [] if rules.reserves_by_ratio else running.ignores_eos
        for index in range(len(outputs)):  # one after the other, as SGLang rounds
            expected = min(maximum[index] - outputs[index], MAX_EXPECTED)
            total += expected if certain and certain[index] else expected * ratio
        self._total = total
        self._input = rules.max_prefill_tokens - num_mixed
        self._chunk = None if rules.chunk_size is None else rules.chunk_size - num_mixed
        self._ends: list[tuple[float, int]] | None = None
        self._chosen: list[Need] = []

    @property
    def num_chosen(self) -> int:
        """Requests in the batch."""
        return len(self._chosen)

    @property
    def left(self) -> float:
        """Tokens that no request has or is expected to need."""
        return self._available() - self._total

    @property
    def chunk(self) -> int | None:
        """Prompt tokens that this batch may still take; None if prompts are not cut."""
        return self._chunk

    def state(self) -> Verdict:
        """Whether a further request may be tried."""
        if self.left <= 0 or self._available() - self._now <= 0:
            return Verdict.NO_TOKEN
        is_spent = self._input <= 0 or (self._chunk is not None and self._chunk <= 0)
        return Verdict.OTHER if is_spent else Verdict.CONTINUE

    def continuing(self, need: Need, limit: int | None = None) -> int:
        """How many of the tokens of the prompt that was cut before run now. limit: at most so many."""
        assert self._chunk is not None
        room = min(self._chunk, int(self.left))
        room = room if room > 0 else self._chunk
        tokens = min(need.new_tokens, room if limit is None else min(room, limit))
        expected = min(need.max_new_tokens, MAX_EXPECTED) if tokens == need.new_tokens else 0
        self._charge(tokens, expected, need)
        return tokens

    def judge(self, need: Need, may_cut: bool = True) -> tuple[Verdict, int]:
        """Whether further requests may be tried, and how many tokens of this one run: 0 if it is not taken. Its cached
        tokens must be in use by now, so that they are not available. may_cut: whether a part of its prompt may run;
        whether the cache has room for it is judged before."""
        if self._rules.prefill_max_requests is not None and self.num_chosen >= self._rules.prefill_max_requests:
            return Verdict.OTHER, 0
        tokens, expected = need.new_tokens, min(need.max_new_tokens, MAX_EXPECTED)
        is_certain = self._is_certain(need)
        if is_certain:
            if not self._ends_fit(need):
                return Verdict.NO_TOKEN, 0
        elif tokens + need.loaded + _outputs_of(need) + self._page_size >= self.left:
            return Verdict.NO_TOKEN, 0
        elif self._chunk is None and self.num_chosen and self._paged(tokens) >= self._input:
            return Verdict.OTHER, 0
        if self._chunk is not None and self._cuts(need):
            if not may_cut:
                return Verdict.OTHER, 0
            end = need.cached + self._chunk - self._chunk % self._page_size
            tokens = self._chunk if is_certain else end - end % self._page_size - need.cached
            expected = 0
            if tokens <= 0:
                return Verdict.OTHER, 0
        self._charge(tokens, expected, need)
        return self.state(), tokens

    def release(self, tokens: float) -> None:
        """A running request that was expected to need so many tokens was pre-empted for this batch."""
        self._total -= tokens

    def missing_for(self, new_tokens: int, max_new_tokens: int) -> float:
        """Tokens that running requests must give up before one with so many tokens and outputs fits."""
        return new_tokens + min(max_new_tokens, MAX_EXPECTED) - self.left

    def expected(self, outputs: int, is_certain: bool) -> float:
        """Tokens that a running request is expected to need still, which may have so many outputs more."""
        expected = min(outputs, MAX_EXPECTED)
        return expected if is_certain and not self._rules.reserves_by_ratio else expected * self._ratio

    def _charge(self, tokens: int, expected: int, chosen: Need) -> None:
        paged = self._paged(tokens)
        self._now += paged + self._page_size
        self._total += paged + self._page_size + expected
        self._input -= paged
        if self._chunk is not None:
            self._chunk -= paged
        self._chosen.append(chosen)

    def _cuts(self, need: Need) -> bool:
        """Whether a request has more tokens than the chunk has left."""
        tokens = need.new_tokens if self._is_certain(need) else self._paged(need.new_tokens)
        return self._chunk is not None and tokens > self._chunk

    def _is_certain(self, need: Need) -> bool:
        """Whether a request is known to need all its outputs, and pages of its own for all its tokens."""
        return need.ignores_eos and not self._keeps_prefixes

    def _ends_fit(self, need: Need) -> bool:
        """Whether the cache holds the running and chosen requests and this one until each has ended, the first to end
        first. Without a tree all outputs are certain to be needed."""
        paged = self._paged(need.new_tokens) + self._page_size
        now = self._available() - self._now
        if paged > min(now, self.left):
            return False
        entry = need.max_new_tokens - need.outputs, need.cached + need.new_tokens
        if self._ends is None:
            ends = [entry, *self._ends_of_running(), *[self._end(one) for one in self._chosen]]
            self._ends = sorted([one for one in ends if one[0] > 0], key=itemgetter(0))
        elif entry[0] > 0:
            # SGLang inserts before the first that ends as early, and at the last index if there is none.
            index = bisect_left(self._ends, entry[0], key=itemgetter(0))
            self._ends.insert(min(index, max(len(self._ends) - 1, 0)), entry)
        freed, left = 0, now - paged
        for index, (tokens_left, held) in enumerate(self._ends):
            count = len(self._ends) - index
            if left + freed - tokens_left * count <= count:
                return False
            freed += held
        return True

    def _ends_of_running(self) -> list[tuple[float, int]]:
        """After how many tokens each running request ends, and how many it holds by then."""
        running, certain, ends = self._running, self._running.ignores_eos, list[tuple[float, int]]()
        for index, outputs in enumerate(running.outputs):
            ratio = 1.0 if certain and certain[index] else self._ratio
            ends.append((running.max_new_tokens[index] * ratio - outputs, running.prompt_len[index] + outputs))
        return ends

    def _end(self, need: Need) -> tuple[float, int]:
        """After how many tokens a chosen request ends, and how many it holds by then."""
        ratio = 1.0 if need.ignores_eos else self._ratio
        return need.max_new_tokens * ratio - need.outputs, need.cached + need.new_tokens

    def _paged(self, tokens: int) -> int:
        return ceil_div(tokens, self._page_size) * self._page_size


def _outputs_of(need: Need) -> int:
    """Outputs that a request is expected to have still."""
    return min(max(need.max_new_tokens - need.outputs, 0), MAX_EXPECTED)
