"""The loop of an engine that sends and receives keys and values, or loads them from stores."""

import math
from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from ifbbench.engine.interfaces import KvScheduler, KvTransfers
from ifbbench.engine.plan import Plan
from ifbbench.engine.predicted_loop import PredictedLoop
from ifbbench.engine.request import Request


@mypyc_attr(allow_interpreted_subclasses=True)
class TransferringLoop(PredictedLoop):
    """A loop that notifies `transfers` of what its scheduler, a `KvScheduler`, reserves and keeps, and the scheduler of
    what has come and was sent, and which requests are to end. It does nothing while requests wait for that only.

    transfers: the transfers, which are set before the first step; None without any.
    """

    transfers: KvTransfers | None = None

    def _admit(self, now_s: float) -> Sequence[Request]:
        if self.transfers is not None:
            for request in self.transfers.take_sent():
                self.scheduler.remove(request)
            for request_id in self.transfers.take_stopped():
                self.stop(request_id)
            if received := self.transfers.take_received():
                self._kv_scheduler.receive(received)
        return super()._admit(now_s)

    def _schedule(self, start_s: float) -> Plan:
        plan = super()._schedule(start_s)
        if self.transfers is not None and (plan.receiving or plan.awaits_stores):
            self.transfers.reserved(plan.receiving, start_s)
            self._quiet_until_s = -math.inf  # they may come earlier than a request
        return plan

    def _num_together(self, plan: Plan) -> int:
        count = super()._num_together(plan)
        return min(count, 1) if plan.receiving or plan.continued else count

    def _remove_complete(self, request: Request) -> None:
        if self.transfers is not None and request.is_sent_on:
            self._leave_in_flight(request)
            self._kv_scheduler.keep(request)
            self.transfers.kept(request, self._clock.now())
        else:
            self._remove(request)

    @property
    def _kv_scheduler(self) -> KvScheduler:
        assert isinstance(self.scheduler, KvScheduler)
        return self.scheduler
