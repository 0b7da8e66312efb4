"""Static batching's rule (V1): nobody leaves the batch before all its members are complete."""

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.active import ActiveRequests
from ifbbench.engine.request import Request


class Lockstep:
    """Holds complete members of the batch back until the last one is complete too.

    Until then they are computed on with: outputs are padded to the longest. That nobody joins in between is what the
    scheduler sees to. (TensorRT-LLM's `TrtGptModelV1`, which runs a batch's whole generation in one call; here each
    step is an iteration, so that token times are known.)
    """

    def __init__(self, active: ActiveRequests) -> None:
        self._active = active
        self._complete: list[Request] = []

    @property
    def complete(self) -> list[Request]:
        """Members that wait for the others."""
        return list(self._complete)

    @property
    def idle_rows(self) -> NDArray[np.int64]:
        """Their table rows."""
        return np.array([request.slot for request in self._complete], np.int64)

    def hold_back(self, done: list[Request]) -> list[Request]:
        """`done` have all their tokens now. Returns the whole batch if it is complete with them, else nobody."""
        self._complete += done
        if len(self._complete) < len(self._active.generation):
            return []
        finished, self._complete = self._complete, []
        return finished

    def forget(self, request: Request) -> None:
        """It was stopped, or failed."""
        self._complete = [other for other in self._complete if other is not request]
