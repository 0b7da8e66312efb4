"""What a server counts while it runs: gauges of the latest iteration, counters, and histograms of latencies."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from ifbbench.engine.interfaces import Observer
from ifbbench.engine.records import IterationRecord
from ifbbench.engine.request import Request, computed_tokens
from ifbbench.engine.stretch import Stretch
from ifbbench.serving.library.request import InferenceRequest

LATEST_ITERATIONS = 100
# Upper limits of the buckets of histograms, in seconds and in tokens; wide enough for both slow and fast devices.
SECONDS = tuple(round(scale * 10.0**power, 9) for power in range(-3, 3) for scale in (1, 2, 3, 5, 7.5))
TOKENS = tuple(float(2**power) for power in range(21))
# The limits are those of vLLM.
NUM_CHOICES, NUM_PAUSES = (1.0, 2.0, 5.0, 10.0, 20.0), (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
STOP, LENGTH, ABORT, ERROR = "stop", "length", "abort", "error"


class Histogram:
    """Counts of values in buckets, and their sum.

    limits: ascending upper limits; a last bucket has the rest.
    """

    def __init__(self, limits: Sequence[float]) -> None:
        self.limits = limits
        self.counts = [0] * (len(limits) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.limits, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper limit, how many values up to it) of each bucket, as Prometheus has them."""
        total, buckets = 0, []
        for limit, count in zip((*map(str, self.limits), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((limit, float(total)))
        return buckets


class DeliveryLag:
    """How much later than the recording says responses reach the connections of their clients: the event loop is busy,
    or the host was late to end an iteration of a simulated device. In seconds."""

    def __init__(self) -> None:
        self.num_deliveries = 0
        self.sum_s = self.max_s = 0.0

    def add(self, lag_s: float) -> None:
        self.num_deliveries += 1
        self.sum_s += lag_s
        self.max_s = max(self.max_s, lag_s)

    def summary(self) -> dict[str, float]:
        return {"mean": self.sum_s / max(self.num_deliveries, 1), "max": self.max_s}


class _Progress:
    """The times of one request, in seconds; None before they are known."""

    __slots__ = ("arrival_s", "first_scheduled_s", "first_token_s")

    def __init__(self, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None


class LiveStatistics(Observer):
    """Counts what the batch manager does, and passes it on to `recorder` if there is one: an Observer.

    Written in the batch manager's thread and read in others. A request is counted as prompt when its prompt is
    complete, and as output token by token.

    num_waiting: number of requests that the engine has and never ran.
    finished: number of requests by the reason of their end; ABORT is the client's.
    refused: number of requests answered with status 429, which the engine never had.
    num_choices, longest_output: number of choices of each prompt, and output tokens of the longest; both are written in
        the event loop.
    lost_tokens: that were computed for each request that failed, by id, until they are taken.
    """

    def __init__(self, recorder: Observer | None = None) -> None:
        self.latest: deque[tuple[IterationRecord, str]] = deque(maxlen=LATEST_ITERATIONS)
        self.num_waiting = 0
        self.prompt_tokens = self.generation_tokens = self.reused_tokens = self.pauses = 0
        self.finished = dict.fromkeys((STOP, LENGTH, ABORT, ERROR), 0)
        self.refused = 0
        self.ttft_s, self.itl_s, self.tpot_s = Histogram(SECONDS), Histogram(SECONDS), Histogram(SECONDS)
        self.e2e_s, self.queue_time_s = Histogram(SECONDS), Histogram(SECONDS)
        self.prompt_len, self.output_len = Histogram(TOKENS), Histogram(TOKENS)
        self.reserved_len, self.iteration_len = Histogram(TOKENS), Histogram(TOKENS)
        self.prefill_s, self.decode_s, self.running_s = Histogram(SECONDS), Histogram(SECONDS), Histogram(SECONDS)
        self.computed_prompt_len, self.pauses_of_request = Histogram(TOKENS), Histogram(NUM_PAUSES)
        self.num_choices, self.longest_output = Histogram(NUM_CHOICES), Histogram(TOKENS)
        self.delivery_lag_s = DeliveryLag()
        self._recorder = recorder
        self.lost_tokens: dict[int, int] = {}
        self._progress: dict[int, _Progress] = {}
        self._previous_end_s = 0.0

    def arrived(self, request: InferenceRequest, arrival_s: float) -> None:
        """A request is handed to the engine."""
        self._progress[request.request_id] = _Progress(arrival_s)
        self.num_waiting += 1

    def arrival_s(self, request: Request) -> float:
        """When a request that has not ended arrived."""
        return self._progress[request.request_id].arrival_s

    def iteration(self, record: IterationRecord) -> None:
        if self._recorder is not None:
            self._recorder.iteration(record)
        self.latest.append((record, record.bound_by))
        self.pauses += len(record.paused)
        self.iteration_len.add(record.budget_used)
        for chunk in record.context:
            self._add_context(chunk.request, chunk.is_last, record)
        if record.num_generation:
            self.generation_tokens += record.num_generation
            self.itl_s.add(record.end_s - self._previous_end_s, record.num_generation)
        self._previous_end_s = record.end_s
        for request in record.finished:
            self._finish(request, record.end_s)

    def stretch(self, stretch: Stretch) -> None:
        for record in stretch.records():
            self.iteration(record)

    def left(self, request: Request, error: str | None) -> None:
        """`request` was refused or failed for `error`, or was stopped by its client (None)."""
        if self._recorder is not None:
            self._recorder.left(request, error)
        self.finished[ABORT if error is None else ERROR] += 1
        if error is not None:
            self.lost_tokens[request.request_id] = computed_tokens(request)
        progress = self._progress.pop(request.request_id)
        self.num_waiting -= progress.first_scheduled_s is None

    def answered(self, num_choices: int, longest_outputs: Sequence[int]) -> None:
        """All choices of prompts are complete."""
        for output_len in longest_outputs:
            self.num_choices.add(num_choices)
            self.longest_output.add(output_len)

    def _add_context(self, request: Request, is_last: bool, record: IterationRecord) -> None:
        progress = self._progress[request.request_id]
        if progress.first_scheduled_s is None:
            progress.first_scheduled_s = record.start_s
            self.num_waiting -= 1
            self.queue_time_s.add(progress.first_scheduled_s - progress.arrival_s)
        if not is_last:
            return
        self.generation_tokens += 1
        if progress.first_token_s is None:
            progress.first_token_s = record.end_s
            self.ttft_s.add(record.end_s - progress.arrival_s)
            self.prompt_tokens += request.original_prompt_len
            self.reused_tokens += request.reused_tokens
            self.prompt_len.add(request.original_prompt_len)
            self.reserved_len.add(request.max_new_tokens)
            self.prefill_s.add(record.end_s - progress.first_scheduled_s)

    def _finish(self, request: Request, end_s: float) -> None:
        progress, num_outputs = self._progress.pop(request.request_id), request.num_outputs
        self.e2e_s.add(end_s - progress.arrival_s)
        self.output_len.add(num_outputs)
        self.pauses_of_request.add(request.pauses)
        self.computed_prompt_len.add(request.original_prompt_len - request.reused_tokens)
        if progress.first_scheduled_s is not None and progress.first_token_s is not None:
            self.running_s.add(end_s - progress.first_scheduled_s)
            self.decode_s.add(end_s - progress.first_token_s)
            if num_outputs > 1:
                self.tpot_s.add((end_s - progress.first_token_s) / (num_outputs - 1))
        is_full = num_outputs >= request.original_prompt_len + request.max_new_tokens - request.prompt_len
        self.finished[LENGTH if is_full else STOP] += 1
