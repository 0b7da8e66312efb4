"""Admission control: fetches requests, refuses those that can never run, and activates the others by priority."""

from bisect import insort
from collections.abc import Sequence

from ifbbench.engine.interfaces import NO_LIMIT, RequestSource
from ifbbench.engine.request import Request
from ifbbench.schedulers.limits import LOOK_AHEAD
from ifbbench.schedulers.refusals import AdmissionLimits, id_in_use, queue_full
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests


class Admission:
    """Fetches up to the free batch slots and a look-ahead, and keeps what cannot become active yet, by priority.

    max_queue_size: maximum number of requests that wait. With it all that have arrived are fetched, and those that find
        the queue full are refused.
    waiting: fetched requests that are not active, in order.
    """

    def __init__(self, limits: AdmissionLimits, max_active: int, max_queue_size: int | None = None) -> None:
        self.waiting: list[Request] = []
        self._limits = limits
        self._max_active = max_active
        self._max_queue_size = max_queue_size
        self._in_use: dict[int, Request] = {}

    def admit(self, active: ActiveRequests, source: RequestSource) -> Sequence[Request]:
        """Fetch requests, and add to `active` what the limits allow; returns the newly active requests."""
        admitted: list[Request] = []
        if self._max_queue_size is None:
            self._fetch(source, max(0, self._max_active - len(active)) + LOOK_AHEAD)
            self._activate(active, admitted)
        else:
            while self._fetch_all(source, self._max_queue_size, active, admitted):
                pass
        return admitted

    def find(self, request_id: int) -> Request | None:
        """The waiting or active request with this id."""
        return self._in_use.get(request_id)

    def withdraw(self, request: Request) -> None:
        """`request` ends while it waits."""
        self.waiting.remove(request)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """`request` has left: its id may be used again, and its batch slot."""
        self._in_use.pop(request.request_id, None)
        if self._limits.adapters is not None:
            self._limits.adapters.release(request)

    def _activate(self, active: ActiveRequests, admitted: list[Request]) -> None:
        while self.waiting and self._may_enter(self.waiting[0], active):
            request = self.waiting.pop(0)
            active.add(request)
            admitted.append(request)

    def _fetch_all(
        self, source: RequestSource, max_queue_size: int, active: ActiveRequests, admitted: list[Request]
    ) -> int:
        """Fetch all requests that have arrived, activate what the limits allow, and refuse those that find the queue
        full: the last of the new ones by priority and arrival. Returns how many were refused; more may have arrived
        then."""
        arrived = source.get(NO_LIMIT)
        num_refused = self._add(source, arrived)
        self._activate(active, admitted)
        surplus = len(self.waiting) - max_queue_size
        if surplus <= 0:
            return num_refused
        new = set(map(id, arrived))
        for request in [request for request in reversed(self.waiting) if id(request) in new][:surplus]:
            self.withdraw(request)
            source.refuse(request, queue_full(max_queue_size))
        return num_refused + surplus

    def _fetch(self, source: RequestSource, max_waiting: int) -> None:
        """Fetch until `max_waiting` requests wait or no more have arrived. Refused requests take no room: those behind
        them are fetched in the same call, because `admit` may do nothing until the next arrival."""
        while (room := max_waiting - len(self.waiting)) > 0 and self._add(source, source.get(room)):
            pass
        if source.next_priority is None:
            return
        # Fetch further requests only if they go before the last of the first `max_waiting`.
        while (priority := source.next_priority()) is not None and (
            len(self.waiting) < max_waiting or priority > self.waiting[max_waiting - 1].priority
        ):
            self._add(source, source.get(1))

    def _add(self, source: RequestSource, requests: list[Request]) -> int:
        """Add `requests` to the waiting ones, or refuse them. Returns how many were refused."""
        num_refused = 0
        for request in requests:
            is_in_use = request.request_id in self._in_use
            if error := id_in_use(request) if is_in_use else self._limits.refusal(request):
                num_refused += 1
                source.refuse(request, error)
            else:
                self._in_use[request.request_id] = request
                if self._limits.adapters is not None:
                    self._limits.adapters.hold(request)
                if not self.waiting or self.waiting[-1].priority >= request.priority:
                    self.waiting.append(request)
                else:
                    insort(self.waiting, request, key=lambda item: -item.priority)
        return num_refused

    def _may_enter(self, request: Request, active: ActiveRequests) -> bool:
        last = _last(active)
        if last is not None and request.beam_width != last.beam_width:
            return False
        if len(active) < self._max_active:
            return len(active.table.free_rows) > 0  # those of requests that are being sent are taken
        # Beyond the limit, a request enters only before the last active one, and while there are sequence slots.
        return last is not None and request.priority > last.priority and len(active.table.free_rows) > 0


def _last(active: ActiveRequests) -> Request | None:
    """The last active request that can be scheduled, in their order."""
    if not active.context or not active.generation:
        requests = active.context or active.generation
        return requests[-1] if requests else None
    context, generation = active.context[-1], active.generation[-1]
    return generation if context.goes_before(generation) else context
