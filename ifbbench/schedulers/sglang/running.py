"""The requests that SGLang decodes, in the order of joining."""

from collections.abc import Iterator, Sequence

import numpy as np

from ifbbench.engine.arrays import NO_ROWS, Rows
from ifbbench.engine.request import Request


class RunningRequests:
    """`running_batch` of SGLang.

    requests: requests in the order in which they joined.
    rows: [requests], row of each in the table.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.rows: Rows = NO_ROWS

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def join(self, requests: Sequence[Request]) -> None:
        """Add requests at the end."""
        if requests:
            self.requests += requests
            self.rows = np.concatenate([self.rows, rows_of(requests)])

    def keep(self, requests: list[Request]) -> None:
        """Only `requests` decode from now on."""
        self.requests, self.rows = requests, rows_of(requests)

    def remove(self, request: Request) -> None:
        self.requests.remove(request)
        self.rows = self.rows[self.rows != request.slot]


def rows_of(requests: Sequence[Request]) -> Rows:
    """[requests], their rows of the table."""
    return np.array([request.slot for request in requests], np.int64)
