"""The simulated device: an executor that takes the time which a cost model predicts."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from mypy_extensions import mypyc_attr

from ifbbench.clock import NANOSECONDS
from ifbbench.engine.arrays import NO_ROWS, Rows
from ifbbench.engine.batch import NO_OUTPUTS, Batch, StepOutputs
from ifbbench.engine.interfaces import IterationWork, PredictedTimes
from ifbbench.engine.plan import ContextChunk
from ifbbench.engine.stretch import Positions
from ifbbench.simulated.cost_model import CostModel
from ifbbench.simulated.lora_cost import LoraCost
from ifbbench.simulated.step_work import StepWork, WorkDone, draft_passes, mtp_passes
from ifbbench.virtual_clock import VirtualClock


class DeviceState(NamedTuple):
    """A simulated device between two calls of `run`; see SimulatedExecutor."""

    now_ns: int
    free_ns: list[int]
    in_flight: list[tuple[int, int, int]]
    done: WorkDone


@mypyc_attr(allow_interpreted_subclasses=True)
class SimulatedExecutor:
    """A device that executes batches in order, each in the time that `cost_model` predicts.

    Host and device run in parallel: `submit` takes the host's time, and the device starts when both the host and the
    batch before are done. With overlap the host's time is therefore hidden behind the device's.

    With pipeline parallelism a batch passes through the stages one after the other, and each stage runs one batch at a
    time: a batch takes as long as all stages together, and as many batches pass as the slowest stage takes in.
    """

    def __init__(
        self,
        cost_model: CostModel,
        clock: VirtualClock,
        windows: Sequence[tuple[int | None, float]] = ((None, 1.0),),
        lora: LoraCost | None = None,
        draft_model: CostModel | None = None,
        draft_mtp: int = 0,
        hides_host: bool = False,
    ) -> None:
        """windows: see `StepWork.of_windows`.
        lora: the time of adapters.
        draft_model: the model that makes draft tokens.
        draft_mtp: number of draft tokens in a step if `draft_model` is a layer for multi-token prediction, else 0.
        hides_host: whether the host prepares an iteration with draft tokens while the one before runs, although its
            schedule depends on how many of them are accepted: an engine fills that in on the device.
        """
        self._lora = lora
        self.cost_model = cost_model
        self.windows = tuple(windows)
        self._clock = clock
        self.draft_model, self._draft_mtp, self._hides_host = draft_model, draft_mtp, hides_host
        self._parts = cost_model.shard.attention_dp_size
        # The work of the model and of the draft model, which their energy depends on.
        self.done, self.draft_done = WorkDone(), WorkDone()
        self._free_ns = [0] * cost_model.shard.pp_size  # when each stage is free
        # The iteration of each batch, its end, and the draft model's time in it.
        self._in_flight: deque[tuple[int, int, int]] = deque()
        self._device_ns = 0  # of the batch before

    def submit(self, batch: Batch) -> None:
        """Start one batch."""
        if self._parts == 1:
            requests, work = len(batch.context) + len(batch.slots), StepWork.of_windows(batch, self.windows)
        else:
            requests, work = self._largest_of_batch(batch)
        host_ns = self.cost_model.host_ns(requests, work.context_tokens)
        if self._hides_host:
            host_ns = max(0, host_ns - self._device_ns)
        self._clock.advance(host_ns)
        self.done.add(work)
        stages_ns, draft_ns = self.cost_model.stages_ns(work), 0
        if batch.adapters is not None and self._lora is not None:
            more_ns = self._lora.batch_ns(batch, batch.adapters, sum(stages_ns)) - sum(stages_ns)
            stages_ns = [stage_ns + more_ns // len(stages_ns) for stage_ns in stages_ns]
        if batch.loaded_tokens:
            load_ns = self.cost_model.load_ns(batch.loaded_tokens)
            stages_ns = [max(stage_ns, load_ns // len(stages_ns)) for stage_ns in stages_ns]
        if self.draft_model is not None:  # with one stage
            draft_ns = self._draft_ns(self.draft_model, batch)
            stages_ns = [stages_ns[0] + draft_ns]
        self._device_ns = stages_ns[0]
        finish_ns = self._clock.now_ns
        for stage, stage_ns in enumerate(stages_ns):
            self._free_ns[stage] = finish_ns = max(finish_ns, self._free_ns[stage]) + stage_ns
        self._in_flight.append((batch.iteration, finish_ns, draft_ns))

    def _draft_ns(self, draft_model: CostModel, batch: Batch) -> int:
        """Nanoseconds in which draft tokens are proposed."""
        if self._draft_mtp and self._parts > 1:
            passes = self._largest_mtp_passes(draft_model, batch)
        else:
            passes = list(mtp_passes(batch, self._draft_mtp) if self._draft_mtp else draft_passes(batch))
        for one in passes:
            self.draft_done.add(one)
        return sum(map(draft_model.device_ns, passes))

    def run(
        self,
        turns: Sequence[IterationWork],
        steps: int,
        first: int,
        num_in_flight: int = 0,
        max_in_flight: int = 1,
        change_ns: int | None = None,
    ) -> PredictedTimes:
        """See PredictableExecutor."""
        now_ns, in_flight, free_ns, num_turns = self._clock.now_ns, self._in_flight, self._free_ns, len(turns)
        within_ns = None
        if change_ns is not None:
            # Where host and device overlap, an iteration takes at least half of their times. Those of a micro batch
            # do not overlap.
            within_ns = (change_ns - now_ns) * (max_in_flight if num_turns == 1 else 1) + 1
        times = [
            self._step_times(work, (steps - turn + num_turns - 1) // num_turns, within_ns)
            for turn, work in enumerate(turns)
        ]
        for of_turn, (_, device_ns, *_) in zip(turns, times, strict=True):
            if of_turn.loaded_tokens:
                device_ns[0] = max(device_ns[0], self.cost_model.load_ns(of_turn.loaded_tokens))
        start_ns, submit_ns, collect_ns = list[int](), list[int](), list[int]()
        stages, before, one_more = len(free_ns), first - num_in_flight, max_in_flight - 1
        index = turn = 0
        for iteration in range(first, first + steps):
            host_ns, device_ns, outputs, is_empty, _, _ = times[turn]
            if index == len(device_ns):
                break
            start_ns.append(now_ns)
            now_ns += host_ns
            submit_ns.append(now_ns)
            if not is_empty:
                end_ns = now_ns
                if stages == 1:
                    free_ns[0] = end_ns = max(now_ns, free_ns[0]) + device_ns[index]
                else:
                    for stage, stage_ns in enumerate(self.cost_model.divided_ns(device_ns[index], outputs)):
                        free_ns[stage] = end_ns = max(end_ns, free_ns[stage]) + stage_ns
                in_flight.append((iteration, end_ns, 0))
            oldest = iteration - one_more
            if in_flight and in_flight[0][0] == oldest:
                now_ns = max(now_ns, in_flight.popleft()[1])
                collect_ns.append(now_ns)
            elif oldest >= before:  # the turn of a micro batch without requests
                collect_ns.append(submit_ns[oldest - first] if oldest >= first else now_ns)
            if change_ns is not None and now_ns >= change_ns:
                break
            turn += 1
            if turn == num_turns:
                turn, index = 0, index + 1
        self._clock.wait_until_ns(now_ns)
        for turn, (_, _, outputs, is_empty, keys, works) in enumerate(times):
            count = (len(start_ns) - turn + num_turns - 1) // num_turns
            if count <= 0 or is_empty:
                continue
            for work in works[:count]:
                self.done.add(work)
            if not works:
                self.done.add_iterations(outputs, outputs, count)
                self.done.generation_kv_tokens += sum(keys[:count])
        return PredictedTimes(start_ns, submit_ns, collect_ns)

    def state(self) -> DeviceState:
        """See PredictableExecutor."""
        return DeviceState(self._clock.now_ns, list(self._free_ns), list(self._in_flight), self.done.copy())

    def restore(self, state: DeviceState) -> None:
        """See PredictableExecutor. A state is restored once at most, as its parts are used."""
        self._clock.now_ns, self._free_ns, in_flight, self.done = state
        self._in_flight = deque(in_flight)

    def _step_times(
        self, work: IterationWork, steps: int, within_ns: int | None
    ) -> tuple[int, list[int], int, bool, Sequence[int], list[StepWork]]:
        """The host's time in each of the next `steps` iterations with `work`, the device's, [steps], how many rows have
        outputs, and whether there is nothing to run; times in nanoseconds. Then the keys that each reads, if all are in
        generation, else the work of each. within_ns: iterations that start later than that, from now on, may be left
        out."""
        context, positions, adapters, _loaded_tokens = work
        means = list[StepWork]()
        if not (context or positions.count):
            return 0, [0] * steps, 0, True, (), means
        if self._parts > 1:
            return self._step_times_of_parts(work, steps, within_ns)
        requests, keys = positions.count + len(positions.idle), self._generation_keys(positions, steps)
        count = requests * positions.beam_width
        chunks = [(chunk.start, chunk.length, chunk.is_last) for chunk in context]
        outputs = count + sum([is_last for _, _, is_last in chunks])
        host_ns = self.cost_model.host_ns(requests + len(chunks), sum([length for _, length, _ in chunks]))
        if not chunks and len(keys) == 1:
            if within_ns is not None and steps > 1:
                # No iteration is shorter than the first one, because each reads more keys.
                shortest_ns = host_ns + self.cost_model.generation_ns(count, keys[0][:1])[0]
                steps = min(steps, max(within_ns, 0) // max(shortest_ns, 1) + 1)
            device_ns = self.cost_model.generation_ns(count, keys[0][:steps])
        else:
            device_ns, passed_ns = list[int](), 0
            for step in range(steps):
                if within_ns is not None and passed_ns > within_ns:
                    break
                works = [
                    (StepWork.of_sums(chunks, count, of_window[step], window), share)
                    for of_window, (window, share) in zip(keys, self.windows, strict=True)
                ]
                means.append(StepWork.mean(works))
                device_ns.append(self.cost_model.device_ns(means[-1]))
                passed_ns += host_ns + device_ns[-1]
                chunks = [(start + length, length, is_last) for start, length, is_last in chunks]
        if adapters is not None and self._lora is not None:
            lengths = [chunk.length for chunk in context]
            device_ns = self._lora.repeated_ns(adapters, context, lengths, np.array(device_ns)).tolist()
        return host_ns, device_ns, outputs, False, keys[0], means

    def _step_times_of_parts(
        self, work: IterationWork, steps: int, within_ns: int | None
    ) -> tuple[int, list[int], int, bool, Sequence[int], list[StepWork]]:
        """`_step_times` where parts of the devices have requests of their own."""
        cost, parts, positions = self.cost_model, self._parts, work.positions
        cached = positions.of_each() if positions.count else NO_ROWS
        of_part = positions.slots % parts
        by_part = np.bincount(of_part, minlength=parts)
        counts: list[int] = by_part.tolist()
        most, context = max(counts), self._chunks_of_parts(work.context)
        host_ns, outputs = cost.host_ns(most), most
        for part, chunks in context.items():
            of_chunks = cost.host_ns(counts[part] + len(chunks), sum([length for _, length, _ in chunks]))
            host_ns = max(host_ns, of_chunks)
            outputs = max(outputs, counts[part] + sum([is_last for _, _, is_last in chunks]))
        if not context and len(self.windows) == 1:
            window = self.windows[0][0]
            if within_ns is not None and steps > 1:
                first = self._most_keys_of_parts(window, of_part, cached, counts, 1)
                shortest_ns = host_ns + cost.generation_ns(most, first)[0]
                steps = min(steps, max(within_ns, 0) // max(shortest_ns, 1) + 1)
            largest = self._most_keys_of_parts(window, of_part, cached, counts, steps)
            return host_ns, cost.generation_ns(most, largest), outputs, False, largest, []
        # [windows, steps, parts]
        keys = [self._keys_of_parts(window, of_part, cached, counts, steps) for window, _ in self.windows]
        device_ns, passed_ns, largest_works = list[int](), 0, list[StepWork]()
        for step in range(steps):
            if within_ns is not None and passed_ns > within_ns:
                break
            largest_works.append(self._largest_work(context, counts, [of_window[step] for of_window in keys]))
            device_ns.append(cost.device_ns(largest_works[-1]))
            passed_ns += host_ns + device_ns[-1]
            for chunks in context.values():
                chunks[:] = [(start + length, length, is_last) for start, length, is_last in chunks]
        return host_ns, device_ns, outputs, False, (), largest_works

    def _most_keys_of_parts(
        self, window: int | None, of_part: Rows, cached: Rows, counts: list[int], steps: int
    ) -> Sequence[int]:
        """The most keys that generation of one part reads in each of the next `steps` iterations: see
        `_keys_of_parts`."""
        if window is None:
            in_cache: list[float] = np.bincount(of_part, weights=cached, minlength=self._parts).tolist()
            keys, count = max(zip(in_cache, counts, strict=True))
            if count == max(counts):  # this part stays the one with the most
                return range(int(keys) + count, int(keys) + count * steps + 1, max(count, 1))
        return [int(max(of_step)) for of_step in self._keys_of_parts(window, of_part, cached, counts, steps)]

    def _keys_of_parts(
        self, window: int | None, of_part: Rows, cached: Rows, counts: list[int], steps: int
    ) -> list[list[float]]:
        """The keys that generation reads in each of the next `steps` iterations, [steps][parts], in a layer with this
        window.

        of_part, cached: the part of each request, and its tokens in the cache.
        counts: requests by part.
        """
        if window is None:
            in_cache: list[float] = np.bincount(of_part, weights=cached, minlength=self._parts).tolist()
            by_part = list(zip(in_cache, counts, strict=True))
            return [[keys + count * step for keys, count in by_part] for step in range(1, steps + 1)]
        return [
            np.bincount(of_part, weights=np.minimum(cached + step, window), minlength=self._parts).tolist()
            for step in range(1, steps + 1)
        ]

    def _chunks_of_parts(self, context: Sequence[ContextChunk]) -> dict[int, list[tuple[int, int, bool]]]:
        """Start, length and whether it is the last of its prompt, for each chunk, by part."""
        found: dict[int, list[tuple[int, int, bool]]] = {}
        for chunk in context:
            part = chunk.request.slot % self._parts
            found.setdefault(part, []).append((chunk.start, chunk.length, chunk.is_last))
        return found

    def _largest_of_batch(self, batch: Batch) -> tuple[int, StepWork]:
        """The most requests that a part has in `batch`, and `of_largest` of the parts."""
        parts, context = self._parts, self._chunks_of_parts(batch.context)
        of_part = batch.slots % parts
        by_part = np.bincount(of_part, minlength=parts)
        requests: list[int] = by_part.tolist()
        most = max(requests)
        for part, chunks in context.items():
            most = max(most, requests[part] + len(chunks))
        if batch.drafts is not None:  # each one is a token whose key is read, and has logits
            of_generation = batch.drafts.counts[len(batch.drafts.counts) - len(batch.slots) :]
            by_part = by_part + np.bincount(of_part, weights=of_generation, minlength=parts).astype(np.int64)
        keys = list[list[float]]()
        for window, _ in self.windows:
            cached = batch.positions if window is None else np.minimum(batch.positions, window - 1)
            keys.append((np.bincount(of_part, weights=cached, minlength=parts) + by_part).tolist())
        return most, self._largest_work(context, by_part.tolist(), keys)

    def _largest_mtp_passes(self, draft_model: CostModel, batch: Batch) -> list[StepWork]:
        """`mtp_passes` of the parts, `of_largest` of each pass."""
        parts, of_part = self._parts, batch.slots % self._parts
        requests = np.bincount(of_part, minlength=parts)
        keys = np.bincount(of_part, weights=batch.positions, minlength=parts).astype(np.int64)
        verified: list[int] = ((self._draft_mtp + 1) * requests).tolist()
        first_keys: list[list[float]] = [(keys + requests).tolist()]
        context, counts = self._chunks_of_parts(batch.context), requests.tolist()
        passes, most = [self._largest_work(context, counts, first_keys, verified, draft_model)], max(counts)
        for step in range(1, self._draft_mtp if most else 1):
            max_keys = int((keys + requests * (step + 1)).max())
            passes.append(StepWork(generation_tokens=most, generation_kv_tokens=max_keys, outputs=most))
        return passes

    def _largest_work(
        self,
        context: dict[int, list[tuple[int, int, bool]]],
        outputs: list[int],
        keys: list[list[float]],
        tokens: list[int] | None = None,
        draft_model: CostModel | None = None,
    ) -> StepWork:
        """`of_largest` of the parts.

        context: chunks by part.
        outputs: rows of generation that need logits, by part.
        keys: keys that generation reads, by window and part; those of `draft_model` without windows.
        tokens: number of generation tokens by part, if they are not `outputs`.

        Of the parts without chunks, the one with the most keys stands for all.

        Of the parts without chunks, the one with the most keys stands for all.
        """
        alone, max_keys, max_tokens, max_outputs = -1, -1, 0, 0
        listed = list[tuple[int, StepWork]]()
        windows = self.windows if draft_model is None else ((None, 1.0),)
        for part, of_part in enumerate(outputs):
            of_windows = [of_window[part] for of_window in keys]
            chunks = context.get(part)
            if chunks is None:
                max_outputs = max(max_outputs, of_part)
                max_tokens = max(max_tokens, of_part if tokens is None else tokens[part])
                of_keys = self._mean_keys(of_windows)
                if of_keys > max_keys:
                    alone, max_keys = part, of_keys
                continue
            means = [
                (StepWork.of_sums(chunks, of_part, int(of_window), window), share)
                for of_window, (window, share) in zip(of_windows, windows, strict=True)
            ]
            work = StepWork.mean(means)
            listed.append((part, work if tokens is None else work._replace(generation_tokens=tokens[part])))
        works = [work for part, work in listed if part < alone]
        if alone >= 0:
            works.append(StepWork(generation_tokens=max_tokens, generation_kv_tokens=max_keys, outputs=max_outputs))
        works += [work for part, work in listed if part > alone]
        return (draft_model or self.cost_model).of_largest(works)

    def _mean_keys(self, of_windows: list[float]) -> int:
        """The keys of a mean layer from those of each window, as `StepWork.mean` has them."""
        if len(of_windows) == 1:
            return int(of_windows[0])
        return round(sum([int(keys) * share for keys, (_, share) in zip(of_windows, self.windows, strict=True)]))

    def _generation_keys(self, positions: Positions, steps: int) -> list[Sequence[int]]:
        """The keys that generation reads in each of the next `steps` iterations, for each window of the layers."""
        count, width, found = positions.count, positions.beam_width, list[Sequence[int]]()
        for window, _ in self.windows:
            if window is not None:
                after = positions.of_each() + np.arange(1, steps + 1)[:, None]
                of_idle = int(np.minimum(positions.idle + 1, window).sum())
                found.append(((np.minimum(after, window).sum(axis=1) + of_idle) * width).tolist())
            elif count:
                first = positions.total + count
                if len(positions.idle):
                    first += int(positions.idle.sum()) + len(positions.idle)
                found.append(range(first * width, (first + count * (steps - 1)) * width + 1, count * width))
            else:
                found.append([0] * steps)
        return found

    def collect(self) -> StepOutputs:
        """Advance the clock to the end of the oldest batch in flight. There are no tokens; they stay symbolic."""
        _, end_ns, draft_ns = self._in_flight.popleft()
        self._clock.wait_until_ns(end_ns)
        return StepOutputs(draft_s=draft_ns / NANOSECONDS) if draft_ns else NO_OUTPUTS

    def close(self) -> None:
        """There is nothing to release."""
