"""How far a run is from the least time that its work takes on the same device, and where the rest of its time went.

The least time of the device is that of the best batching that the KV cache allows: every request needs an iteration for
each of its output tokens, and holds its tokens in the cache in each of them, so that there are at least as many
iterations as the longest output has tokens, and as many as all held blocks fill caches. The work is done in at least so
many iterations, at the cost that `LeastTime` derives from its being convex. A measured device costs what a
linear fit of the run's own iterations says.

No run ends before the work of the requests that arrive last is done after their arrival, nor before any request would
have ended alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ifbbench.analysis.device_costs import Device, MeasuredDevice, SimulatedDevice
from ifbbench.analysis.number_texts import percent
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.analysis.words import TENSORRT_LLM, Words, words_of
from ifbbench.analysis.work import STATIC, RunWork, Windows, read_work
from ifbbench.build.engine import build_engine
from ifbbench.build.resolve import parse_windows
from ifbbench.errors import InputError
from ifbbench.rundir.rows import Id
from ifbbench.rundir.timeline import Floats
from ifbbench.settings.names import from_mapping
from ifbbench.simulated.executor import SimulatedExecutor
from ifbbench.simulated.step_work import StepWork, StepWorks

NO_LIMIT = "none"
# Parts of the duration besides those of limits, in the order in which they are listed.
LEAST, ARRIVALS, HOST, AGAIN, PADDING = "least_device", "arrivals", "host", "recomputation", "padding"
SMALL_BATCHES = "small_batches"
OTHER = "other"
LIMITS = ("kv_blocks", "num_tokens", "batch_size", OTHER, NO_LIMIT)
# Parts that no schedule of the same arrivals changes.
GIVEN = (LEAST, ARRIVALS, f"{SMALL_BATCHES}.{NO_LIMIT}")
# Less of the duration than this is not worth a better schedule.
NOTABLE_SHARE = 0.01
# How many of the latest arrivals and of the requests are tried as the ones that decide the earliest end.
ARRIVALS_TRIED = 32
REQUESTS_TRIED = 32
# An iteration without work takes some time too.
SHORTEST_S = 1e-9


def part_names(words: Words) -> dict[str, str]:
    """The parts of the duration in a table or a sentence."""
    return {
        LEAST: "device, at the best batching",
        ARRIVALS: "no request there",
        HOST: "host",
        AGAIN: f"computed again after {words.pauses}",
        PADDING: "padding and empty slots",
        f"{SMALL_BATCHES}.kv_blocks": f"batches kept small by {words.limit_name('kv_blocks')}",
        f"{SMALL_BATCHES}.num_tokens": f"batches kept small by the {words.limit_name('num_tokens')}",
        f"{SMALL_BATCHES}.batch_size": f"batches kept small by the {words.limit_name('batch_size')}",
        f"{SMALL_BATCHES}.{OTHER}": "batches kept small by other limits",
        f"{SMALL_BATCHES}.{NO_LIMIT}": "small batches: no more requests there",
    }


@dataclass(frozen=True)
class LowerBound:
    """What the duration of a run is made of, and what it could be at the least.

    duration_s: time from the first arrival to the last end.
    device_s: the least time of the device for all the work.
    least_s: the least duration, with arrivals as they were.
    decided_by: "work" or "arrivals", what decides it.
    parts_s: seconds by LEAST, ARRIVALS, HOST, AGAIN, PADDING and "small_batches.LIMIT"; they add up to duration_s.
    words: words of the engine.
    """

    duration_s: float
    device_s: float
    least_s: float
    decided_by: str
    parts_s: dict[str, float]
    words: Words = TENSORRT_LLM

    @property
    def gain_s(self) -> float:
        """The most that a run could be shorter."""
        return max(self.duration_s - self.least_s, 0.0)

    @property
    def sentence(self) -> str:
        """What a better schedule could gain, and what not."""
        of_what = {
            "work": "Its work takes at least {} s on this device with this KV cache",
            "arrivals": "With these arrivals no schedule ends before {} s",
        }[self.decided_by].format(f"{self.least_s:,.3f}")
        text = f"The run took {self.duration_s:,.3f} s. {of_what}"
        share = self.gain_s / self.duration_s if self.duration_s else 0.0
        if share < NOTABLE_SHARE:
            return f"{text}: a better schedule gains less than {percent(NOTABLE_SHARE)}."
        text += f": a better schedule gains at most {self.gain_s:,.3f} s ({percent(share)})."
        parts = {name: spent for name, spent in self.parts_s.items() if name not in GIVEN}
        largest = max(parts, key=parts.__getitem__)
        if parts[largest] >= NOTABLE_SHARE * self.duration_s:
            text += (
                f" The largest part above the least time: {part_names(self.words)[largest]}, {parts[largest]:,.3f} s."
            )
        return text

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        facts = {name: value for name, value in vars(self).items() if name != "words"}
        return facts | {"gain_s": self.gain_s, "summary": self.sentence}


class Bounds:
    """The lower bounds of a run and of its requests. InputError if they cannot be known, with the reason."""

    def __init__(self, run: RecordedRun) -> None:
        self._run = run
        if run.config.get("device") == "null":
            raise InputError("device null computes nothing, so that no time is the least")
        if run.config.get("draft_len"):
            raise InputError("draft tokens make a step yield several tokens, so the least number of steps is unknown")
        if (run.config.get("attention_dp_size") or 1) > 1:
            raise InputError("ranks wait for each other in each layer, so the least time of a schedule is unknown")
        if not run.spans:
            raise InputError(f"{run.data.path}: no request's spans are recorded")
        simulated, self._windows = _simulated(run)
        self.work: RunWork = read_work(run, self._windows)
        # On a real device, the cost of iterations is fitted to their times.
        weights = simulated.times_s(self.work.computed) if simulated else np.ones(len(self.work.computed.outputs))
        self._timeline = _Timeline(run, weights)
        self._device: Device = simulated or MeasuredDevice.fitted(self.work.computed, self._timeline.device_s)
        self._stages = simulated.cost_model.shard.pp_size if simulated else 1

    def predicted_s(self, works: StepWorks) -> Floats:
        """Seconds of the device in each iteration of this work; of all pipeline stages, which it passes through."""
        return self._device.times_s(works)

    @cached_property
    def device_s(self) -> Floats:
        """Seconds of the device in each iteration."""
        if not isinstance(self._device, SimulatedDevice):
            return self._timeline.device_s
        # With overlap, an iteration that the device has done is collected only after the host's next submission.
        return np.minimum(self._timeline.device_s, self.predicted_s(self.work.computed))

    @property
    def begin_s(self) -> float:
        """The first arrival."""
        return self._timeline.begin_s

    @property
    def done_s(self) -> Floats:
        """When each iteration had ended, and all before it."""
        return self._timeline.done_s

    def request_s(self, request_id: Id) -> float | None:
        """A lower bound of the latency of a request: its time alone on the device. None if it did not complete."""
        e2e_s = self._run.row_of.get(request_id, {}).get("e2e_s")
        if e2e_s is None:
            return None
        index = self._index_of.get(request_id)
        if index is None:  # killed before its spans were written
            return None
        return min(self._request_s(index), float(e2e_s))

    @cached_property
    def _index_of(self) -> dict[Id, int]:
        return {request_id: index for index, request_id in enumerate(self.work.ids)}

    def _request_s(self, place: int) -> float:
        context, generation = self.work.needed_by(place)
        steps = max(int(self.work.outputs[place]) - 1, 0)
        return self._device.least_s(context, 1) + self._device.least_s(generation, steps)

    def least_figures(self) -> dict[str, float]:
        """Figures of the completed requests if each were alone on the device, by their path in `summary.json`."""
        first_s, token_s, all_s = [], [], []
        for place, request_id in enumerate(self.work.ids):
            if self._run.row_of.get(request_id, {}).get("e2e_s") is None:
                continue
            context, generation = self.work.needed_by(place)
            steps = max(int(self.work.outputs[place]) - 1, 0)
            first_s.append(self._device.least_s(context, 1))
            generation_s = self._device.least_s(generation, steps)
            all_s.append(first_s[-1] + generation_s)
            if steps:
                token_s.append(generation_s / steps)
        found = {"ttft_s.p99": first_s, "tpot_s.p99": token_s}
        figures = {path: float(np.percentile(values, 99)) for path, values in found.items() if values}
        return figures | ({"e2e_s.mean": float(np.mean(all_s))} if all_s else {})

    def _least_s(self, chosen: "np.ndarray[Any, np.dtype[np.intp]]") -> float:
        """The least time for the work of some requests, by their indices, if all pipeline stages are always busy."""
        work = self.work
        if not len(chosen):
            return 0.0
        iterations = int(work.outputs[chosen].max())
        if blocks := int(self._run.data.run.get("num_kv_blocks") or 0):
            iterations = max(iterations, -int(-work.held_blocks[chosen].sum() // blocks))
        total = StepWork(*(int(column[chosen].sum()) for column in work.needed))
        return self._device.least_s(total, iterations) / self._stages

    @cached_property
    def of_run(self) -> LowerBound:
        timeline, work = self._timeline, self.work
        device_s = self._least_s(np.arange(len(work.ids)))
        computed_s, useful_s = self.predicted_s(work.computed), self.predicted_s(work.useful)
        unpadded_s, measured_s = self.predicted_s(work.unpadded), self.device_s
        # What is predicted is divided as measured: the shares of the device's time in each iteration.
        factor = np.divide(measured_s, computed_s, out=np.zeros_like(measured_s), where=computed_s > 0)
        padding_s = np.clip((computed_s - unpadded_s) * factor, 0.0, measured_s)
        again_s = np.clip((unpadded_s - useful_s) * factor, 0.0, measured_s - padding_s)
        left_s = measured_s - padding_s - again_s
        # By a fit, or by interpolated times of thinned statistics, the bound may be above what was measured in all.
        least_s = min(device_s, float(left_s.sum()))
        excess_s = np.maximum(left_s - self._shares_of(least_s), 0.0)
        small_s = float(left_s.sum()) - least_s
        if excess_s.sum() > 0:
            excess_s *= small_s / excess_s.sum()
        parts = {
            LEAST: least_s,
            ARRIVALS: timeline.arrivals_s,
            HOST: timeline.busy_s - float(measured_s.sum()),
            AGAIN: float(again_s.sum()),
            PADDING: float(padding_s.sum()),
        }
        by_limit = np.bincount(timeline.limit, excess_s, len(LIMITS))
        by_limit[LIMITS.index(OTHER)] += timeline.batching_s
        by_limit[LIMITS.index(NO_LIMIT)] += small_s - excess_s.sum()
        parts |= {f"{SMALL_BATCHES}.{limit}": float(spent) for limit, spent in zip(LIMITS, by_limit, strict=True)}
        by_arrival_s = self._by_arrival_s()
        decided_by = "arrivals" if by_arrival_s > device_s * (1 + 1e-9) else "work"
        least_of_run_s = min(max(device_s, by_arrival_s), timeline.duration_s)
        return LowerBound(
            timeline.duration_s,
            min(device_s, timeline.duration_s),
            least_of_run_s,
            decided_by,
            parts,
            words_of(self._run.config),
        )

    def _shares_of(self, least_s: float) -> Floats:
        """The least time divided among iterations, by the useful work that each did."""
        useful, needed = self.work.useful, self.work.needed
        total = StepWork(*(int(column.sum()) for column in needed))
        steps = int(self.work.outputs.max(initial=1))
        whole_s = self._device.least_s(total, steps)

        def without(**values: int) -> float:
            return max(whole_s - self._device.least_s(total._replace(**values), steps), 0.0)

        pairs_s = without(attention_pairs=0, context_kv_tokens=0)
        keys_s = without(generation_kv_tokens=0)
        tokens = useful.context_tokens + useful.generation_tokens
        weights = (
            tokens * (max(whole_s - pairs_s - keys_s, 0.0) / max(total.num_tokens, 1))
            + useful.attention_pairs * (pairs_s / max(total.attention_pairs, 1))
            + useful.generation_kv_tokens * (keys_s / max(total.generation_kv_tokens, 1))
        )
        summed = float(weights.sum())
        shares: Floats = weights * (least_s / summed if summed else 0.0)
        return shares

    def _by_arrival_s(self) -> float:
        """The least duration with arrivals as they were. Of a client that sends a request when another ends, arrivals
        follow from the schedule and bound nothing."""
        if self._run.config.get("concurrency") or not self.work.ids:
            return 0.0
        arrivals_s = np.array([self._run.arrival_s(one) for one in self.work.ids]) - self._timeline.begin_s
        order = np.argsort(arrivals_s, kind="stable")
        indices = np.unique(np.linspace(0, len(order) - 1, ARRIVALS_TRIED).astype(int))
        least_s = max(float(arrivals_s[order[index]]) + self._least_s(order[index:]) for index in indices)
        one_step_s = self._device.least_s(StepWork(generation_tokens=1, generation_kv_tokens=1, outputs=1), 1)
        latest = np.argsort(arrivals_s + self.work.outputs * one_step_s)[-REQUESTS_TRIED:]
        return max(least_s, *(float(arrivals_s[index]) + self._request_s(int(index)) for index in latest))


def _simulated(run: RecordedRun) -> tuple[SimulatedDevice | None, Windows]:
    """The simulated device of a run, None of a real one, and the attention windows with their share of the layers."""
    config = run.config
    if not str(config.get("device") or "").startswith("sim:"):
        windows = set(parse_windows(config.get("max_attention_window")))
        return None, ((windows.pop() if len(windows) == 1 else None, 1.0),)
    executor = build_engine(from_mapping(config)).executor
    assert isinstance(executor, SimulatedExecutor)
    return SimulatedDevice(executor.cost_model), executor.windows


class _Timeline:
    """The time of a run from its first arrival to its last end, divided among device, host and waiting for arrivals.

    done_s: [iterations], when each had ended, and all before it.
    device_s: [iterations], after submission and after the end of the iteration before.
    arrivals_s: no request was there.
    batching_s: requests waited for a static batch to be full.
    busy_s: the rest, in which host and device work. Between iterations that thinned statistics recorded, times are
        interpolated.
    limit: [iterations], position in LIMITS of what bound each.
    weights: [iterations], how long each iteration is expected to take beside others, by which the time between recorded
        ones is divided.
    """

    def __init__(self, run: RecordedRun, weights: Floats) -> None:
        recorded = run.iterations
        rows = [row for row in run.row_of.values() if row.get("end_s") is not None]
        self.begin_s = min(run.arrival_s(one) for one in {*run.spans, *run.row_of})
        end_s = max((float(row["end_s"]) for row in rows), default=self.begin_s)
        if run.data.partial:
            end_s = max(end_s, float(recorded.end_s[-1]))
        self.duration_s = end_s - self.begin_s
        numbers = np.arange(len(weights))
        # The last iterations recorded may have no work, and have no weight then.
        without_work = max(int(recorded.number.max(initial=0)) + 1 - len(weights), 0)
        after = np.cumsum(np.maximum(np.concatenate((weights, np.zeros(without_work))), SHORTEST_S))
        before = np.concatenate(([0.0], after[:-1]))
        start_s = np.interp(before[numbers], before[recorded.number], recorded.start_s)
        latency_end_s = np.interp(after[numbers], after[recorded.number], recorded.end_s)
        submit_s = start_s + np.interp(numbers, recorded.number, recorded.host_s)
        # With overlap an iteration begins before the one before ends.
        done_s = np.clip(np.maximum.accumulate(latency_end_s), self.begin_s, end_s)
        free_s = np.concatenate(([self.begin_s], done_s[:-1]))
        self.done_s = done_s
        begun_s = np.clip(start_s, free_s, done_s)
        submitted_s = np.clip(submit_s, begun_s, done_s)
        self.device_s = done_s - submitted_s
        gaps_s = begun_s - free_s
        ends_s = [float(row["end_s"]) for row in rows]
        idle_s = _nothing_to_do_s(free_s, begun_s, [run.arrival_s(one) for one in run.spans], ends_s)
        self.arrivals_s = float(idle_s.sum())
        # A static batch is begun when it is full, or after a timeout.
        waits_for_batch = run.config.get("type") == STATIC and run.config.get("static_emulated_batch_size")
        self.batching_s = float((gaps_s - idle_s).sum()) if waits_for_batch else 0.0
        self.busy_s = self.duration_s - self.arrivals_s - self.batching_s
        indices = [LIMITS.index(limit if limit in LIMITS else OTHER) for limit in recorded.limits]
        latest = np.maximum(np.searchsorted(recorded.number, numbers, side="right") - 1, 0)
        self.limit = np.array(indices, np.int64)[recorded.limit[latest]]


def _nothing_to_do_s(free_s: Floats, begun_s: Floats, arrivals_s: Iterable[float], ends_s: Iterable[float]) -> Floats:
    """Seconds of each gap between iterations in which every request that had arrived had ended."""
    arrived, ended = np.sort(np.array([*arrivals_s], np.float64)), np.sort(np.array([*ends_s], np.float64))
    count = np.searchsorted(arrived, free_s, side="right")
    is_empty = count <= np.searchsorted(ended, free_s, side="right")
    next_s = np.append(arrived, np.inf)[count]
    idle: Floats = np.where(is_empty, np.minimum(begun_s, next_s) - free_s, 0.0)
    return np.maximum(idle, 0.0)
