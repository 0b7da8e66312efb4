"""Generation requests of vLLM's and SGLang's schedulers while all of them run together: what they gain is counted
once."""

from itertools import accumulate

import numpy as np

from ifbbench.engine.arrays import Rows
from ifbbench.engine.request import Request, RequestTable
from ifbbench.kv.attention_window import ceil_div
from ifbbench.kv.paged import StepGroup
from ifbbench.schedulers.ends import Ends
from ifbbench.schedulers.limits import BatchingConfig


class JointGeneration:
    """The generation requests while all of them get a token in each iteration that generates, so that such an iteration
    costs the same for one as for a thousand. Only these iterations are counted here.

    held: [rows], blocks of each request. Meanwhile entries of `computed`, `held` and of the table lack the iterations
    since `settle` (`RequestTable.deferred_steps`, `deferred_confirmed`).

    computed: [rows], tokens of each that were computed or scheduled.
    is_active: whether all generation requests run together.
    num_ahead: 1 if the blocks of an iteration are taken that is not scheduled yet, else 0.
    """

    def __init__(self, limits: BatchingConfig, table: RequestTable, held: Rows) -> None:
        self._table, self._max_in_flight = table, limits.max_in_flight
        self._held, self._tokens_per_block = held, limits.tokens_per_block
        self.computed = np.zeros(limits.num_slots, np.int64)
        self.is_active, self.num_ahead = False, 0
        self._ends = Ends(table, limits.is_async)
        # Its tokens are the computed ones. Its steps are the iterations of which the blocks are taken.
        self._group = StepGroup(limits.tokens_per_block)

    @property
    def count(self) -> int:
        return self._group.count

    @property
    def num_tokens(self) -> int:
        """Computed tokens of all of them."""
        return self._group.tokens

    def computed_of(self, rows: Rows) -> Rows:
        """[rows], computed tokens of each of them."""
        computed: Rows = self.computed[rows] + self._table.deferred_steps
        return computed

    def begin(self, requests: list[tuple[int, Request]]) -> None:
        """All generation requests run together from now on; see `Ends.restart`."""
        self.is_active, self._group = True, StepGroup(self._tokens_per_block)
        for _, request in requests:
            self._join(int(self.computed[request.slot]))
        self._ends.restart(requests)

    def end(self) -> list[Request]:
        """They do not any more: all arrays are up to date. Returns the ending requests."""
        self.settle()
        self.is_active, self.num_ahead, self._group.count = False, 0, 0
        return list(self._ends.ending)

    @property
    def num_in_flight(self) -> int:
        """Iterations that were scheduled and not collected."""
        return self._ends.scheduled - self._ends.collected

    def enter(self, request: Request, num_before: int) -> None:
        """The prompt of a request is complete. It generates from the next iteration on, and of those in flight, the
        first `num_before` do not count for it. `follow` it before that."""
        row, table = request.slot, self._table
        self._join(int(self.computed[row]))
        self.computed[row] -= table.deferred_steps
        table.generated[row] -= table.deferred_steps
        table.confirmed[row] = -table.deferred_confirmed - num_before

    def follow(self, order: int, request: Request) -> None:
        """Know from now on when a request that has entered ends. It is scheduled up to here: all its tokens so far are
        in iterations in flight, or before them. order: see `Ends.add`."""
        self._ends.add(order, request)

    def _join(self, computed: int) -> None:
        group = self._group
        group.count += 1
        group.tokens += computed
        group.growing[(group.step - computed) % len(group.growing)] += 1

    def remove(self, request: Request) -> bool:
        """A request does not run again. Returns whether it was in generation; the caller changes that, and its entries
        are up to date from then on."""
        if not request.in_generation:
            self._ends.left(request)
            return False
        row, group, table = request.slot, self._group, self._table
        table.generated[row] += table.deferred_steps
        table.confirmed[row] += table.deferred_confirmed
        self.computed[row] = computed = int(self.computed[row]) + table.deferred_steps
        self._held[row] = ceil_div(computed, self._tokens_per_block)
        group.count -= 1
        group.tokens -= computed
        group.growing[(group.step - computed) % len(group.growing)] -= 1
        return True

    def settle(self) -> None:
        """Bring all arrays up to date."""
        table, ahead = self._table, self.num_ahead
        if table.deferred_steps or table.deferred_confirmed or ahead:
            rows = np.array([row for row, one in table.requests.items() if one.in_generation], np.int64)
            self.computed[rows] = computed = self.computed[rows] + table.deferred_steps
            self._held[rows] = -(-(computed + ahead) // self._tokens_per_block)
            table.generated[rows] += table.deferred_steps
            table.confirmed[rows] += table.deferred_confirmed
            table.deferred_steps = table.deferred_confirmed = 0

    # Iterations.

    @property
    def num_growing(self) -> int:
        """How many of them begin a block with the next token."""
        group = self._group
        return group.growing[group.step % len(group.growing)]

    def take(self) -> None:
        """The blocks of an iteration were taken."""
        self.num_ahead = 1
        self._group.step += 1

    def horizon(self, free: int) -> int:
        """For how many iterations, of which the first has its blocks, they run up to the first end, with so many free
        blocks."""
        steps, size = max(self._ends.steps_to_first(self._max_in_flight), 1), self._tokens_per_block
        if self.count * ceil_div(steps, size) <= free:
            return steps
        for step, blocks in enumerate(accumulate(self._group.starting(min(steps, size * (free + 1)))), start=1):
            if blocks > free:
                return min(step, steps)
        return steps

    def starting(self, count: int) -> list[int]:
        """[count], blocks that they begin in each of the next iterations, but those that are taken."""
        starting = self._group.starting(count - self.num_ahead)
        return [0, *starting] if self.num_ahead else starting

    def advance(self, count: int) -> None:
        """So many iterations are scheduled, with their blocks."""
        group = self._group
        group.step += count - self.num_ahead
        group.tokens += group.count * count
        self.num_ahead = 0
        self._ends.scheduled += count
        self._table.deferred_steps += count

    def finish_scheduling(self) -> list[Request]:
        """The requests that do not run again, because their last token is scheduled."""
        finished = self._ends.finish_scheduling()
        for request in finished:
            self.remove(request)
        return finished

    def collect(self, count: int) -> list[Request]:
        """So many iterations were collected. Returns the requests that they complete."""
        self._table.deferred_confirmed += count
        self._ends.collect(count)
        return self._ends.completed()
