"""How often SGLang receives requests (`SchedulerRecvSkipper` of SGLang 0.5.23)."""

from ifbbench.engine.request import Request


class Receiver:
    """Requests that have arrived and that the scheduler has not received yet.

    It receives them in the iteration behind a prefill batch, else in each `interval`-th one.

    requests: those that have arrived, in this order.
    is_due: whether the next iteration receives them.
    """

    def __init__(self, interval: int) -> None:
        self.requests: list[Request] = []
        self.is_due = True
        self._interval = interval
        self._num_passed = 0  # iterations since it received

    def received(self) -> list[Request]:
        """The requests that the iteration which begins receives: none if it is not due."""
        if not self.is_due or not self.requests:
            return []
        requests, self.requests = self.requests, []
        return requests

    def prefilled(self) -> None:
        """A prefill batch runs."""
        self._num_passed, self.is_due = 0, True

    def passed(self, count: int) -> None:
        """So many iterations run that are no prefill batches, none of which receives a request."""
        self._num_passed = (self._num_passed + count) % self._interval
        self.is_due = not self._num_passed

    def steps_to_receiving(self) -> int | None:
        """Iterations, at least one, before the one that receives; None if no request waits for it."""
        return self._interval - self._num_passed if self.requests else None
