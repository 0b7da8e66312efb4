"""The waiting queue of vLLM's scheduler (`FCFSRequestQueue`, `PriorityRequestQueue`)."""

from bisect import insort
from collections import deque
from operator import attrgetter

from ifbbench.engine.request import Request

_ORDER = attrgetter("order")


class WaitingQueue:
    """Waiting requests, the next one first: by arrival, with those that were pre-empted before all others, or by
    `Request.order` (priority, then arrival); and before all of them, those that have received keys and values.

    requests: waiting requests in this order.
    """

    def __init__(self, is_priority: bool) -> None:
        self._is_priority = is_priority
        self.requests: deque[Request] = deque()
        self._received: dict[Request, int] = {}

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def head(self) -> Request:
        return self.requests[0]

    def add(self, request: Request) -> None:
        """A request arrives."""
        if self._is_priority:
            insort(self.requests, request, len(self._received), key=_ORDER)
        else:
            self.requests.append(request)

    def put_back(self, request: Request) -> None:
        """A request was pre-empted, or could not be taken in this iteration."""
        if self._is_priority:
            insort(self.requests, request, len(self._received), key=_ORDER)
        else:
            self.requests.insert(len(self._received), request)

    def add_received(self, request: Request, number: int) -> None:
        """The keys and values of a request have come, the `number`-th that got blocks for them. Such requests go in
        this order, whichever came first."""
        self.requests.insert(sum(other < number for other in self._received.values()), request)
        self._received[request] = number

    def pop(self) -> Request:
        request = self.requests.popleft()
        self._received.pop(request, None)
        return request

    def remove(self, request: Request) -> None:
        self.requests.remove(request)
        self._received.pop(request, None)
