"""What the schedulers of vLLM and SGLang share: all requests that arrive wait in their own queue, one batch runs in an
iteration, and equal iterations in flight are confirmed together."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from mypy_extensions import mypyc_attr

from ifbbench.engine.arrays import Rows
from ifbbench.engine.interfaces import NO_LIMIT, RequestSource
from ifbbench.engine.plan import Plan
from ifbbench.engine.request import Request, RequestTable
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.refusals import AdmissionLimits, id_in_use, queue_full


@mypyc_attr(allow_interpreted_subclasses=True)
class Submitted:
    """An iteration in flight, or several equal ones.

    outputs: rows of the requests that get a token, in batch order.
    times: number of iterations.
    is_joint: whether all generation requests run (see `JointGeneration`).
    """

    def __init__(self, outputs: Rows, times: int, is_joint: bool) -> None:
        self.outputs, self.times, self.is_joint = outputs, times, is_joint


def part(in_flight: Iterable[Submitted], rows: set[int], confirmed: Rows) -> None:
    """The generation requests in `rows` do not run together any more. Their outputs in joint iterations are counted
    one by one from now on: `confirmed` need not make up for those that began before a request any more."""
    for submitted in in_flight:
        if submitted.is_joint:
            rows = rows.difference(submitted.outputs.tolist())
            for row in rows:
                confirmed[row] += submitted.times
            submitted.is_joint = False


@mypyc_attr(allow_interpreted_subclasses=True)
class QueueingScheduler:
    """The part of a `Scheduler` that does not depend on what an iteration runs.

    is_predicted: whether plans may repeat."""

    def __init__(self, name: str, limits: BatchingConfig, table: RequestTable, is_predicted: bool) -> None:
        self.name, self.limits, self.table = name, limits, table
        self.max_in_flight, self.num_micro_batches = limits.max_in_flight, 1
        self._is_async = limits.is_async
        self._refusals = AdmissionLimits(limits)
        self._by_id: dict[int, Request] = {}
        self._num_reading = 0  # requests of which what a token is decides something
        self._is_predicted = is_predicted

    # What an engine adds.

    def _enqueue(self, request: Request) -> None:
        """Put a request that has arrived into the queue."""
        raise NotImplementedError

    def _never_fits(self, request: Request) -> str | None:
        """Why the engine would never start `request`, beside what holds for all engines."""
        return None

    def _has_room_in_queue(self, max_queue_size: int) -> bool:
        raise NotImplementedError

    def _oldest(self) -> Submitted:
        """The oldest iterations in flight."""
        raise NotImplementedError

    def _collected(self, times: int, done: list[Request]) -> list[Request]:
        """So many of the oldest iterations in flight, which are equal, were collected. Returns `done`, the requests
        that they complete."""
        raise NotImplementedError

    # The queue.

    def admit(self, source: RequestSource) -> Sequence[Request]:
        num_refused = 1
        while num_refused:  # others may have arrived then
            num_refused = 0
            for request in source.get(NO_LIMIT):
                if (error := self._refusal(request)) is not None:
                    source.refuse(request, error)
                    num_refused += 1
                else:
                    self._by_id[request.request_id] = request
                    self._num_reading += request.reads_tokens
                    self._enqueue(request)
        return ()

    def _refusal(self, request: Request) -> str | None:
        if request.request_id in self._by_id:
            return id_in_use(request)
        if (error := self._refusals.refusal(request) or self._never_fits(request)) is not None:
            return error
        limit = self.limits.max_queue_size
        return None if limit is None or self._has_room_in_queue(limit) else queue_full(limit)

    def find(self, request_id: int) -> Request | None:
        return self._by_id.get(request_id)

    def _forget(self, request: Request) -> None:
        """`request` has ended: its id may be used again."""
        del self._by_id[request.request_id]
        self._num_reading -= request.reads_tokens

    # Iterations in flight.

    def _last_outputs(self, outputs: Rows) -> list[Request]:
        """The requests that are not scheduled again, because their last output is among `outputs`, in flight. Only
        asynchronous scheduling knows of them."""
        table = self.table
        if not self._is_async:
            return []
        return [table.requests[row] for row in outputs[table.generated[outputs] >= table.reserved[outputs]].tolist()]

    def confirm(self, count: int) -> list[Request]:
        done = list[Request]()
        while count:
            submitted = self._oldest()
            times = min(count, submitted.times)
            done += self._collected(times, self._confirmed(submitted, times))
            count -= times
        return done

    def _confirmed(self, submitted: Submitted, times: int) -> list[Request]:
        """So many of these iterations were collected. Returns the requests that they complete."""
        table, rows = self.table, submitted.outputs
        confirmed = table.confirmed[rows] + times
        table.confirmed[rows] = confirmed
        ended = rows[confirmed == table.stop_after[rows]]
        return [table.requests[row] for row in ended.tolist()]

    def cycle(self, plan: Plan) -> Sequence[Plan]:
        return [plan]

    def figures(self) -> dict[str, Any]:
        return {}

    def truncate(self, conversation: Request, num_tokens: int) -> None:
        """No part of a conversation is forgotten."""
        return None


def steps_to_first_end(limits: BatchingConfig, table: RequestTable, rows: Rows) -> int:
    """After how many further iterations of the generation requests in `rows` the first of them ends, or has its last
    output in flight, one at least."""
    generated = table.generated[rows]
    # The last iteration to be collected completes a request; others may be scheduled behind it.
    steps = int(np.minimum.reduce(table.stop_after[rows] - generated)) + limits.max_in_flight - 1
    if limits.is_async:  # a request whose last token is scheduled does not run again
        steps = min(steps, int(np.minimum.reduce(table.reserved[rows] - generated)))
    return max(steps, 1)
