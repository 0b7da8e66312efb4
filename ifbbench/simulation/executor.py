"""The simulated executor: it predicts the time of each batch with a cost model, on a virtual clock."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from ifbbench.clock import VirtualClock
from ifbbench.engine.active import Int64Array
from ifbbench.engine.batch import NO_OUTPUTS, Batch, StepOutputs
from ifbbench.engine.kv_cache.attention_window import ceil_div
from ifbbench.simulation.cost_model import CostModel
from ifbbench.simulation.step_work import StepWork


class SimulatedExecutor:
    """A device that executes batches in order, each in the time that `cost_model` predicts.

    Host and device run in parallel: `submit` takes the host's time, and the device starts when both the host and the
    batch before are done. With overlap the host's time is therefore hidden behind the device's.

    With pipeline parallelism a batch passes through the stages in as many micro batches as there are stages, or
    requests if there are fewer. Once the pipeline is full every stage is busy, so an iteration takes as long as one
    micro batch takes through all stages. Filling the pipeline after a pause is not counted.
    """

    def __init__(
        self, cost_model: CostModel, clock: VirtualClock, windows: Sequence[tuple[int | None, float]] = ((None, 1.0),)
    ) -> None:
        """windows: attention windows in tokens (None: all tokens) and the share of the layers with each, 0 to 1."""
        self._cost_model = cost_model
        self._stages = cost_model.shard.pp_size
        self._windows = tuple(windows)
        self._clock = clock
        self._device_free_ns = 0
        self._finish_ns: deque[int] = deque()

    def submit(self, batch: Batch) -> None:
        """Start one batch."""
        requests = len(batch.context) + len(batch.slots)
        work = StepWork.of_windows(batch, self._windows)
        if self._stages > 1:
            work = work.part(min(self._stages, requests))
        self._clock.advance(self._cost_model.host_ns(requests))
        start_ns = max(self._clock.now_ns, self._device_free_ns)
        self._device_free_ns = start_ns + self._cost_model.device_ns(work)
        self._finish_ns.append(self._device_free_ns)

    def generation_times(self, positions: Int64Array, steps: int) -> tuple[int, Int64Array]:
        """Nanoseconds of the host, and of the device in each of the next `steps` iterations, [steps], if these requests
        alone generate. Only with one attention window for all layers."""
        ((window, _),) = self._windows
        count = len(positions)
        parts = min(self._stages, count)
        if window is None:
            kv_tokens = int(np.add.reduce(positions)) + count * np.arange(1, steps + 1)
        else:
            lengths = positions + np.arange(1, steps + 1)[:, None]
            kv_tokens = np.minimum(lengths, window).sum(axis=1)
        device_ns = self._cost_model.generation_ns(ceil_div(count, parts), -(-kv_tokens // parts))
        return self._cost_model.host_ns(count), device_ns

    def collect(self) -> StepOutputs:
        """Advance the clock to the end of the oldest batch in flight. There are no tokens; they stay symbolic."""
        self._clock.wait_until_ns(self._finish_ns.popleft())
        return NO_OUTPUTS

    def close(self) -> None:
        """There is nothing to release."""
