"""The waiting queue of vLLM's scheduler (`FCFSRequestQueue`, `PriorityRequestQueue`)."""

from bisect import insort
from collections import deque
from operator import attrgetter

from ifbbench.engine.request import Request

_ORDER = attrgetter("order")


class WaitingQueue:
    """Waiting requests, the next one first: by arrival, with those that were pre-empted before all others, or by
    `Request.order` (priority, then arrival). requests: in this order."""

    def __init__(self, is_priority: bool) -> None:
        self._is_priority = is_priority
        self.requests: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def head(self) -> Request:
        return self.requests[0]

    def add(self, request: Request) -> None:
        """A request arrives."""
        if self._is_priority:
            insort(self.requests, request, key=_ORDER)
        else:
            self.requests.append(request)

    def put_back(self, request: Request) -> None:
        """A request was pre-empted, or could not be taken in this iteration."""
        if self._is_priority:
            insort(self.requests, request, key=_ORDER)
        else:
            self.requests.appendleft(request)

    def pop(self) -> Request:
        return self.requests.popleft()

    def remove(self, request: Request) -> None:
        self.requests.remove(request)
