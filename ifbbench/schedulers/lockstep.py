"""Attention data parallelism: a scheduler for each rank, which decide their iterations together, behind one border.

Each rank has a token budget, a batch size, KV blocks and a prefix tree of its own. Engines differ in which rank gets a
request, and in what ranks agree on before an iteration: see `ranks.py` of each engine. The row of a request in the
table of all ranks, which is its sequence slot too, says where it runs: row % ranks.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mypy_extensions import mypyc_attr

from ifbbench.engine.arrays import NO_ROWS, Rows
from ifbbench.engine.batch import NO_OUTPUTS, AdapterUse, Batch, BlockCopy, StepInputs, StepOutputs
from ifbbench.engine.drafts import DraftInputs
from ifbbench.engine.interfaces import NO_LIMIT, KvScheduler, RequestSource, Scheduler
from ifbbench.engine.passes import BatchBuilder
from ifbbench.engine.plan import Plan
from ifbbench.engine.records import CacheState, InFlightIteration, WindowBlocks
from ifbbench.engine.request import Request, RequestTable
from ifbbench.engine.stretch import Growth, Positions
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.refusals import id_in_use

NOT_LIMITED = 2**62


class SubmittedRanks:
    """An iteration in flight, or several equal ones, as the rank at the same index of each list sees it.

    ranks: those with something to run.
    plans: what these run.
    rows: table rows with outputs.
    inputs: what was taken for a batch of each rank alone.
    times: number of iterations that were not collected yet.
    is_repeated: whether `repeat` has submitted it.
    """

    def __init__(self, ranks: list[int], plans: list[Plan], times: int = 1, is_repeated: bool = False) -> None:
        self.ranks, self.plans, self.times, self.is_repeated = ranks, plans, times, is_repeated
        self.rows, self.inputs = list[Rows](), list[StepInputs]()
        self._seen: list[InFlightIteration] | None = None

    def seen(self, iteration: InFlightIteration, builders: Sequence[BatchBuilder]) -> list[InFlightIteration]:
        """`iteration`, which is that of all ranks, as each of them sees it. They share which outputs are dropped.

        builders: those of the batches of each rank; none where the batches of all ranks do.
        """
        if self._seen is None:
            self._seen = []
            for index, plan in enumerate(self.plans):
                rows, batches = NO_ROWS, tuple[Batch, ...]()
                if not self.is_repeated:
                    rows = self.rows[index]
                    if builders:
                        builder = builders[self.ranks[index]]
                        batches = builder.build(iteration.record.iteration, plan, self.inputs[index])
                    elif plan.chunks or len(plan.rows):
                        batches = iteration.batches
                one = InFlightIteration(iteration.record, batches, rows, iteration.dropped, self.is_repeated)
                self._seen.append(one)
        return self._seen

    def outputs(self, all_outputs: Sequence[StepOutputs]) -> list[list[StepOutputs]]:
        """The outputs of each pass of all ranks, as each of them has it in its own passes."""
        found, num_last = list[list[StepOutputs]](), list[int]()
        for plan in self.plans:
            num_last.append(sum([chunk.is_last for chunk in plan.chunks]))
        at_prompt, at_row = 0, sum(num_last)
        has_two = len(all_outputs) > 1
        for index, plan in enumerate(self.plans):
            prompts = np.arange(at_prompt, at_prompt + num_last[index])
            rows = np.arange(at_row, at_row + len(plan.rows))
            at_prompt, at_row = at_prompt + len(prompts), at_row + len(rows)
            of_rank = list[StepOutputs]()
            if has_two:
                if plan.chunks:
                    of_rank.append(_part_of(all_outputs[0], prompts))
                if len(rows):
                    of_rank.append(_part_of(all_outputs[1], rows - sum(num_last)))
            elif plan.chunks or len(rows):
                of_rank.append(_part_of(all_outputs[0], np.concatenate([prompts, rows])))
            found.append(of_rank)
        return found


def _part_of(outputs: StepOutputs, indices: Rows) -> StepOutputs:
    """The outputs at `indices`, of a simulated device."""
    if outputs is NO_OUTPUTS or (outputs.tokens is None and outputs.accepted is None):
        return NO_OUTPUTS
    tokens, accepted = outputs.tokens, outputs.accepted
    return StepOutputs(
        tokens=None if tokens is None else tokens[indices], accepted=None if accepted is None else accepted[indices]
    )


@mypyc_attr(allow_interpreted_subclasses=True)
class LockstepScheduler:
    """A `Scheduler` over one for each rank.

    ranks: these schedulers, made with `BatchingConfig.of_rank`.
    table: table of the requests of all of them.
    """

    def __init__(self, limits: BatchingConfig, ranks: Sequence[Scheduler]) -> None:
        first = ranks[0]
        self.limits, self.ranks, self.num_ranks = limits, list(ranks), len(ranks)
        self.name, self.layout = first.name, first.layout
        self.max_in_flight, self.num_micro_batches = first.max_in_flight, first.num_micro_batches
        self.tables = [rank.table for rank in ranks]
        self.table = RequestTable(limits.num_slots)
        for table in self.tables:
            self.table.add_rank(table)
        self._builders = list[BatchBuilder]()
        if limits.drafts.max_len or self.layout.has_separate_passes:
            self._builders = [BatchBuilder(rank.table, rank.layout) for rank in ranks]
        self._submitted: deque[SubmittedRanks] = deque()
        # The iterations in flight in which each rank has something to run, while it decides.
        self._in_flight = [deque[InFlightIteration]() for _ in ranks]
        # The latest decision: which ranks have something to run, what that is, and what they have taken for it.
        self._running, self._plans, self._inputs = list[int](), list[Plan](), list[StepInputs]()
        self._all_plans: list[Plan] = []

    # What an engine adds.

    def _choose(self, request: Request) -> int:
        """The rank that gets a request which has arrived."""
        raise NotImplementedError

    def _begin(self) -> None:
        """A request has arrived while there was none."""

    def _decide(
        self,
        iteration: int,
        now_s: float,
        in_flight: Sequence[Sequence[InFlightIteration]],
        collect: Callable[[], None],
    ) -> list[Plan]:
        """What each rank runs.

        in_flight: the iterations in flight, of each rank.
        """
        return [rank.schedule(iteration, now_s, in_flight[index], collect) for index, rank in enumerate(self.ranks)]

    # The queues.

    @property
    def waiting(self) -> Sequence[Request]:
        found = list[Request]()
        for rank in self.ranks:
            found += rank.waiting
        return found

    def admit(self, source: RequestSource) -> Sequence[Request]:
        entered = list[Request]()
        while arrived := source.get(NO_LIMIT):
            for request in arrived:
                if self.find(request.request_id) is not None:
                    source.refuse(request, id_in_use(request))
                    continue
                if not self._has_work:
                    self._begin()
                offered = [[request]]

                def take(number: int, offered: list[list[Request]] = offered) -> list[Request]:
                    return offered.pop() if offered else []

                entered += self.ranks[self._choose(request)].admit(RequestSource(take, source.refuse))
        self._count()
        return entered

    @property
    def _has_work(self) -> bool:
        return len(self.table.requests) > 0 or any(len(rank.waiting) > 0 for rank in self.ranks)

    def find(self, request_id: int) -> Request | None:
        for rank in self.ranks:
            if (request := rank.find(request_id)) is not None:
                return request
        return None

    def rank_of(self, request: Request) -> int:
        """The rank that `request` waits or runs in."""
        if request.table is not None:
            return request.slot % self.num_ranks
        return next(index for index, rank in enumerate(self.ranks) if rank.find(request.request_id) is request)

    def remove(self, request: Request) -> None:
        self.ranks[self.rank_of(request)].remove(request)
        self._count()

    def _count(self) -> None:
        """Take in what the tables of the ranks count."""
        table = self.table
        table.num_transferring = sum([one.num_transferring for one in self.tables])
        if not table.any_wide_steps:
            table.any_wide_steps = any(one.any_wide_steps for one in self.tables)

    # Keys and values that are sent to other engines, or come from them, or from stores.

    def keep(self, request: Request) -> None:
        rank = self.ranks[self.rank_of(request)]
        assert isinstance(rank, KvScheduler)
        rank.keep(request)
        self._count()

    def receive(self, requests: Sequence[Request]) -> None:
        by_rank: dict[int, list[Request]] = {}
        for request in requests:
            by_rank.setdefault(self.rank_of(request), []).append(request)
        for index, of_rank in by_rank.items():
            rank = self.ranks[index]
            assert isinstance(rank, KvScheduler)
            rank.receive(of_rank)
        self._count()

    def take_copies(self) -> tuple[BlockCopy, ...]:
        copies = tuple[BlockCopy, ...]()
        for rank in self.ranks:
            assert isinstance(rank, KvScheduler)
            copies += rank.take_copies()
        return copies

    # The decision for one iteration.

    def schedule(
        self, iteration: int, now_s: float, in_flight: Sequence[InFlightIteration], collect: Callable[[], None]
    ) -> Plan:
        index = 0
        for of_rank in self._in_flight:
            of_rank.clear()
        for submitted in self._submitted:
            for rank, seen in zip(submitted.ranks, submitted.seen(in_flight[index], self._builders), strict=True):
                self._in_flight[rank].extend([seen] * submitted.times)
            index += submitted.times
        plans = self._all_plans = self._decide(iteration, now_s, self._in_flight, collect)
        self._running = [rank for rank, plan in enumerate(plans) if not plan.does_nothing]
        self._plans = [plans[rank] for rank in self._running]
        self._count()
        return joined_plan(plans)

    def allocate(self, plan: Plan) -> StepInputs:
        self._inputs = [self.ranks[rank].allocate(self._plans[index]) for index, rank in enumerate(self._running)]
        drafts = joined_drafts(self._plans, self._inputs)
        positions = [one.positions for one in self._inputs]
        copies = tuple[BlockCopy, ...]()
        for one in self._inputs:
            copies += one.copies
        joined = np.concatenate(positions) if positions else NO_ROWS
        return StepInputs(joined, copies, None, drafts, plan.loaded_tokens)

    def advance(self, plan: Plan, iteration: int) -> int:
        recomputed, submitted = 0, SubmittedRanks(self._running, self._plans)
        submitted.inputs = self._inputs
        for index, rank in enumerate(self._running):
            of_rank = self._plans[index]
            submitted.rows.append(of_rank.output_rows())
            recomputed += self.ranks[rank].advance(of_rank, iteration)
        self._submitted.append(submitted)
        return recomputed

    def update(self, iteration: InFlightIteration, outputs: Sequence[StepOutputs]) -> list[Request]:
        if self._submitted[0].is_repeated:  # the loop does not mark those that run nothing
            return self.confirm(1)
        submitted, done = self._submitted.popleft(), list[Request]()
        seen, of_ranks = submitted.seen(iteration, self._builders), submitted.outputs(outputs)
        for index, rank in enumerate(submitted.ranks):
            self._collected(rank, 1)
            done += self.ranks[rank].update(seen[index], of_ranks[index])
        if iteration.record.drafts is not None:
            iteration.record.drafts.draft_s = sum([one.draft_s for one in outputs])
        return done

    def _collected(self, rank: int, count: int) -> None:
        """So many of the oldest iterations in flight were collected, in which this rank had something to run."""
        in_flight = self._in_flight[rank]
        for _ in range(min(count, len(in_flight))):
            in_flight.popleft()

    def lose(self, iteration: InFlightIteration) -> list[Request]:
        submitted, lost = self._submitted.popleft(), list[Request]()
        seen = submitted.seen(iteration, self._builders)
        for index, rank in enumerate(submitted.ranks):
            self._collected(rank, 1)
            lost += self.ranks[rank].lose(seen[index])
        return lost

    # Many iterations.

    def horizon(self, plan: Plan) -> int:
        steps = NOT_LIMITED
        for rank, of_rank in enumerate(self._all_plans):
            scheduler, table = self.ranks[rank], self.tables[rank]
            if not of_rank.does_nothing:
                count = scheduler.horizon(of_rank)
                plan.awaits_in_flight |= of_rank.awaits_in_flight
            elif len(table.requests) > table.num_transferring or len(scheduler.waiting) > 0:
                count = 1
            else:
                continue
            steps = min(steps, count)
            if not steps:
                return 0
        return steps if self._running else 0

    def cycle(self, plan: Plan) -> Sequence[Plan]:
        return [plan]

    def positions(self, plan: Plan) -> tuple[Positions, AdapterUse | None]:
        of_ranks = [
            self.ranks[rank].positions(of_rank)[0] for rank, of_rank in zip(self._running, self._plans, strict=True)
        ]
        of_ranks = [one for one in of_ranks if one.count]
        if len(of_ranks) == 1:
            return of_ranks[0], None
        count, total = sum([one.count for one in of_ranks]), sum([one.total for one in of_ranks])
        if not count:
            return Positions(0, 0, lambda: NO_ROWS), None
        return Positions(
            count, total, lambda: np.concatenate([one.of_each() for one in of_ranks]), slots=plan.rows
        ), None

    def repeat(self, plan: Plan, count: int) -> Growth:
        last, growths = self._states(without=self._running), list[Growth]()
        for rank, of_rank in zip(self._running, self._plans, strict=True):
            growths.append(self.ranks[rank].repeat(of_rank, count))
            last.append(growths[-1].last)
        self._submitted.append(SubmittedRanks(self._running, self._plans, count, is_repeated=True))
        return joined_growth(growths, joined_state(last))

    def confirm(self, count: int) -> list[Request]:
        done = list[Request]()
        while count:
            oldest = self._submitted[0]
            times = min(count, oldest.times)
            for rank in oldest.ranks:
                self._collected(rank, times)
                done += self.ranks[rank].confirm(times)
            oldest.times -= times
            count -= times
            if not oldest.times:
                self._submitted.popleft()
        return done

    def used_blocks_after(self, plan: Plan, count: int) -> int | None:
        used = [state.used_blocks for state in self._states(without=self._running)]
        for rank, of_rank in zip(self._running, self._plans, strict=True):
            used.append(self.ranks[rank].used_blocks_after(of_rank, count))
        return _sum(used)

    # For records, the summary, and conversations.

    def cache_state(self) -> CacheState:
        return joined_state(self._states())

    def _states(self, without: Sequence[int] = ()) -> list[CacheState]:
        return [scheduler.cache_state() for rank, scheduler in enumerate(self.ranks) if rank not in without]

    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for rank in self.ranks:
            _add_figures(found, rank.figures())
        return found

    def truncate(self, conversation: Request, num_tokens: int) -> None:
        for rank in self.ranks:
            rank.truncate(conversation, num_tokens)


def joined_plan(plans: Sequence[Plan]) -> Plan:
    """What all ranks run in an iteration, one rank after the other."""
    joined = Plan([], NO_ROWS)
    rows, heads = [plan.rows for plan in plans if len(plan.rows)], list[Any]()
    if rows:
        joined.rows = np.concatenate(rows)
    entered, receiving, continued = list[Request](), list[Request](), list[tuple[Request, int]]()
    for plan in plans:
        joined.context += plan.context
        joined.held += plan.held
        joined.paused += plan.paused
        joined.blocked += plan.blocked
        joined.chunks += plan.chunks
        entered += plan.entered
        receiving += plan.receiving
        continued += plan.continued
        joined.num_ending += plan.num_ending
        joined.awaits_in_flight |= plan.awaits_in_flight
        # Each rank has a link of its own to the memory of the host.
        joined.loaded_tokens = max(joined.loaded_tokens, plan.loaded_tokens)
        joined.awaits_stores |= plan.awaits_stores
        joined.valid_until_s = min(joined.valid_until_s, plan.valid_until_s)
        heads.append(plan.queue_head)
    joined.entered, joined.receiving, joined.continued = entered, receiving, continued
    joined.queue_head = next((head for head in heads if head is not None), None)
    return joined


def joined_drafts(plans: Sequence[Plan], inputs: Sequence[StepInputs]) -> DraftInputs | None:
    """The draft tokens of all ranks: first those of their prompts, then those of generation."""
    if all(one.drafts is None for one in inputs):
        return None
    counts, tokens, later_counts, later_tokens = [], [], [], []
    for plan, of_rank in zip(plans, inputs, strict=True):
        num_last = sum([chunk.is_last for chunk in plan.chunks])
        drafts = of_rank.drafts
        if drafts is None:
            drafts = DraftInputs(np.zeros(num_last + len(plan.rows), np.int32), np.zeros(0, np.int32))
        border = int(drafts.counts[:num_last].sum())
        counts.append(drafts.counts[:num_last])
        tokens.append(drafts.tokens[:border])
        later_counts.append(drafts.counts[num_last:])
        later_tokens.append(drafts.tokens[border:])
    return DraftInputs(np.concatenate(counts + later_counts), np.concatenate(tokens + later_tokens))


def joined_state(states: Sequence[CacheState]) -> CacheState:
    """The caches of all ranks together."""
    first = states[0]
    windows = [
        WindowBlocks(
            window.size,
            sum([state.windows[index].max_blocks for state in states]),
            sum([state.windows[index].used_blocks for state in states]),
        )
        for index, window in enumerate(first.windows)
    ]
    return CacheState(
        _sum([state.max_blocks for state in states]),
        _sum([state.used_blocks for state in states]),
        first.tokens_per_block,
        _sum([state.allocated_total for state in states]),
        _sum([state.allocated_new for state in states]),
        _sum([state.reused for state in states]),
        sum([state.max_tokens for state in states]),
        sum([state.held_tokens for state in states]),
        sum([state.filled_tokens for state in states]),
        _sum([state.missed for state in states]),
        windows,
    )


def _sum(values: Sequence[int | None]) -> int | None:
    """The sum; None if some value is."""
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def joined_growth(growths: Sequence[Growth], last: CacheState) -> Growth:
    """The caches of all ranks while each of several iterations ran.

    last: the caches while the last one ran.
    """
    if len(growths) == 1:
        first = growths[0]
        joined = Growth(last, first.more_blocks, first.more_tokens, first.more_new, first.more_of_windows)
        joined.more_taken = first.more_taken
    else:
        blocks = _sums([one.more_blocks for one in growths])
        taken = None
        if any(one.more_taken is not one.more_blocks for one in growths):
            taken = _sums([one.more_taken for one in growths])
        windows = [
            _sums([one.more_of_windows[index] for one in growths]) for index in range(len(growths[0].more_of_windows))
        ]
        tokens, new = _sums([one.more_tokens for one in growths]), _sums([one.more_new for one in growths])
        joined = Growth(last, blocks, tokens, new, windows, taken)
    joined.recomputed = sum([one.recomputed for one in growths])
    return joined


def _sums(values: Sequence[list[int]]) -> list[int]:
    if len(values[0]) == 1:
        return [sum([one[0] for one in values])]
    found: list[int] = np.sum(values, axis=0).tolist()
    return found


def _add_figures(found: dict[str, Any], figures: dict[str, Any]) -> None:
    """Add the figures of a rank to those of the others."""
    for name, value in figures.items():
        if isinstance(value, dict):
            _add_figures(found.setdefault(name, {}), value)
        else:
            found[name] = found.get(name, 0) + value
