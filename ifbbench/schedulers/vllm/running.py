"""The running requests of vLLM's scheduler, in the order of admission."""

from collections.abc import Iterator

import numpy as np

from ifbbench.engine.arrays import Rows
from ifbbench.engine.request import Request


class RunningRequests:
    """The running requests in the order of admission, and stretches of them that generate.

    A caller that changes the phase of a running request calls `changed`.

    num_ending: number of requests whose last token is in flight.
    numbers: number of each request, by which they are in order.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.num_ending = 0
        self.numbers: dict[Request, int] = {}
        self._num_added = 0
        self._stretches: dict[int, tuple[int, Rows]] | None = None

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def add(self, request: Request) -> None:
        """A request runs from now on, in its context phase."""
        self.requests.append(request)
        self.numbers[request] = self._num_added
        self._num_added += 1

    def remove(self, request: Request) -> None:
        self.requests.remove(request)
        del self.numbers[request]
        self.num_ending -= not (request.in_context or request.in_generation)
        self.changed()

    def finish_scheduling(self, request: Request) -> None:
        """The last token of a running request is in flight."""
        request.finish_scheduling()
        self.num_ending += 1
        self.changed()

    def changed(self) -> None:
        """Requests came or went, or are in another phase."""
        self._stretches = None

    def stretches(self) -> dict[int, tuple[int, Rows]]:
        """By the index of the first, consecutive requests that are past their prompts: how many they are, and the rows
        of those that generate. The others have their last token in flight."""
        if self._stretches is None:
            self._stretches, first, rows = {}, 0, list[int]()
            for index, request in enumerate([*self.requests, None]):
                if request is not None and not request.in_context:
                    if request.in_generation:
                        rows.append(request.slot)
                    continue
                if index > first:
                    self._stretches[first] = index - first, np.array(rows, np.int64)
                first, rows = index + 1, []
        return self._stretches
