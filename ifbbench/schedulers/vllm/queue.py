"""The waiting queue of vLLM's scheduler (`FCFSRequestQueue`, `PriorityRequestQueue`)."""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from operator import attrgetter

from ifbbench.engine.request import Request

_ORDER = attrgetter("order")


class WaitingQueue:
    """Waiting requests, the next one first: by arrival, with those that were pre-empted before all others, or by
    `Request.order` (priority, then arrival)."""

    def __init__(self, is_priority: bool) -> None:
        self._is_priority = is_priority
        self._requests: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def head(self) -> Request:
        return self._requests[0]

    def add(self, request: Request) -> None:
        """A request arrives."""
        if self._is_priority:
            self._insert(request)
        else:
            self._requests.append(request)

    def put_back(self, request: Request) -> None:
        """A request was pre-empted, or could not be taken in this iteration."""
        if self._is_priority:
            self._insert(request)
        else:
            self._requests.appendleft(request)

    def pop(self) -> Request:
        return self._requests.popleft()

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def _insert(self, request: Request) -> None:
        requests = list(self._requests)
        insort(requests, request, key=_ORDER)
        self._requests = deque(requests)
