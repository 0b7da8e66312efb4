"""What a recorder knows of the requests of a run: their lines and their part of the summary."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import UNSET

from ifbbench.engine.request import KvLoad, Request
from ifbbench.rundir.line_types import RequestLine
from ifbbench.rundir.lines import number, value_of
from ifbbench.rundir.metrics import Population, by_group, limit_waited_for, slow_ttft_s
from ifbbench.rundir.spans import RequestTimeline
from ifbbench.rundir.traffic import MIN_REQUESTS, NO_TRAFFIC, TRAFFIC_COLUMNS, traffic
from ifbbench.settings.groups.replay import DEFAULT_PRIORITY
from ifbbench.settings.objectives import meets_all, parse_objectives

ClassOf = Callable[[int], str | None]
# A part of an attribution: at the router, and in attempts at replicas that failed.
ROUTER = "router"


class RequestMetrics:
    """Sums and samples of requests, taken in as they end.

    total: number of requests of the run.
    class_of(index): the class of the request at this index of the trace.
    config: the settings `slo` and `concurrency`.
    limits: names of limits that every summary has.
    """

    def __init__(self, total: int, class_of: ClassOf, config: Mapping[str, Any], limits: Sequence[str]) -> None:
        self.total = total
        self.first_arrival_s = float("inf")
        self.last_end_s = 0.0
        self._completed, self._class_of = 0, class_of
        self._objectives = parse_objectives(config["slo"]) if config.get("slo") else ()
        self._has_goodput = any(one.statistic is None for one in self._objectives)
        # With a closed loop or all requests at once, a queue is no sign of overload.
        self._is_closed_loop = config.get("concurrency") is not None
        # By class and priority.
        self._populations: defaultdict[tuple[str | None, float], Population] = defaultdict(Population)
        self._waited_s = dict.fromkeys(limits, 0.0)

    def add_request(self, timeline: RequestTimeline, starts: Sequence[float], ends: Sequence[float]) -> RequestLine:
        """Take in a completed request; returns its line of `requests.jsonl`. starts, ends: [iterations], seconds."""
        request, arrival_s, stretches = timeline.request, timeline.arrival_s, timeline.token_iterations
        attribution = timeline.attribution(starts, ends)
        if request.earlier is not None:
            attribution = {ROUTER: arrival_s - request.earlier.arrival_s} | attribution
            arrival_s = request.earlier.arrival_s
        output_len, first_scheduled_s = timeline.produced, starts[timeline.first_run]
        first_token_s, last_token_s = ends[stretches[0][0]], ends[stretches[-1][1]]
        second_token_s = first_token_s
        if timeline.has_first_token:  # it was there before the first iteration
            first_token_s = first_scheduled_s
        # Later than the last token where a static batch held the request back.
        end_s = ends[timeline.last_iteration]
        queue_time_s, ttft_s, e2e_s = first_scheduled_s - arrival_s, first_token_s - arrival_s, end_s - arrival_s
        tpot_s = (last_token_s - first_token_s) / (output_len - 1) if output_len > 1 else None
        name = self._class_of(request.index)
        population = self._populations[name, request.priority]
        prompt_len, index = request.original_prompt_len, self._completed
        population.add(arrival_s, queue_time_s, ttft_s, tpot_s, e2e_s, prompt_len, output_len, index)
        self._completed += 1
        population.gaps.add(stretches, timeline.every)
        if timeline.has_first_token:
            population.gaps.add_first(second_token_s - first_token_s, stretches[0][0])
        population.reused_tokens += request.reused_tokens
        if arrival_s < self.first_arrival_s:
            self.first_arrival_s = arrival_s
        if end_s > self.last_end_s:
            self.last_end_s = end_s
        attribution_s = dict[str, Any]()
        for part, seconds in attribution.items():
            attribution_s[part] = number(seconds)
            if seconds and (limit := limit_waited_for(part)) is not None:
                self._waited_s[limit] = self._waited_s.get(limit, 0.0) + seconds
        times_s = [
            number(queue_time_s),
            number(ttft_s),
            None if tpot_s is None else number(tpot_s),
            number(e2e_s),
            number(first_scheduled_s),
            number(first_token_s),
            number(end_s),
        ]
        line = request_line(request, arrival_s, output_len, "completed", None, times_s, attribution_s)
        if self._has_goodput:
            latencies = {"queue_time_s": queue_time_s, "ttft_s": ttft_s, "tpot_s": tpot_s, "e2e_s": e2e_s}
            line.slo_met = meets_all(self._objectives, latencies)
        if request.num_drafted:
            line.draft_tokens, line.accepted_draft_tokens = request.num_drafted, request.accepted_drafts
        if request.host_reused_tokens:
            line.host_reused_tokens = request.host_reused_tokens
        load = next((load for load in request.loads if load.tokens), None)
        if load is not None and not load.is_again:
            _add_load(line, load)
        return self._with_group(line, name, request)

    def add_line(self, line: RequestLine) -> None:
        """Take in a request that has ended, as its line says, but for the gaps between its tokens (`add_gaps`)."""
        numbers: Any = line  # as they are written; compiled code would expect floats
        name = line.request_class if isinstance(line.request_class, str) else None
        priority = DEFAULT_PRIORITY if numbers.priority is UNSET else value_of(numbers.priority)
        population, arrival_s = self._populations[name, priority], value_of(numbers.arrival_s)
        self.first_arrival_s = min(self.first_arrival_s, arrival_s)
        if line.outcome != "completed":
            population.failed += line.error is not None
            return
        queue_time_s, ttft_s, e2e_s = value_of(numbers.queue_time_s), value_of(numbers.ttft_s), value_of(numbers.e2e_s)
        tpot_s = None if numbers.tpot_s is None else value_of(numbers.tpot_s)
        place = self._completed
        population.add(arrival_s, queue_time_s, ttft_s, tpot_s, e2e_s, line.prompt_len, line.output_len, place)
        population.reused_tokens += line.reused_tokens
        self._completed += 1
        self.last_end_s = max(self.last_end_s, value_of(numbers.end_s))
        for part, seconds in numbers.attribution_s.items():
            if (limit := limit_waited_for(part)) is not None:
                self._waited_s[limit] = self._waited_s.get(limit, 0.0) + value_of(seconds)
        if self._has_goodput:
            latencies = {"queue_time_s": queue_time_s, "ttft_s": ttft_s, "tpot_s": tpot_s, "e2e_s": e2e_s}
            line.slo_met = meets_all(self._objectives, latencies)

    def forget_failures(self, priorities: Sequence[float]) -> None:
        """Requests of these priorities that have failed count no longer: they were sent again."""
        for priority in priorities:
            self._populations[None, priority].failed -= 1
        self.total -= len(priorities)

    def add_gaps(self, parts: tuple[Any, ...], iterations: int) -> None:
        """Take in only the gaps between tokens of another server, of its `parts`. iterations: see `add_server`."""
        for key, population in parts[-1].items():
            self._populations[key].gaps.extend(Population.of_parts(population).gaps, iterations)

    def add_failure(self, request: Request, arrival_s: float, error: str | None) -> RequestLine:
        """Take in a request that was refused, failed, or was stopped by its client (`error` None); returns its line of
        `requests.jsonl`."""
        name = self._class_of(request.index)
        if request.earlier is not None:
            arrival_s = request.earlier.arrival_s
        self._populations[name, request.priority].failed += error is not None
        self.first_arrival_s = min(self.first_arrival_s, arrival_s)
        # An error that quotes a file name may have characters that UTF-8 has not.
        text = None if error is None else error.encode(errors="backslashreplace").decode()
        outcome = "stopped" if error is None else "failed"
        line = request_line(request, arrival_s, request.num_outputs, outcome, text)
        if self._has_goodput and error is not None:
            line.slo_met = False
        return self._with_group(line, name, request)

    def _with_group(self, line: RequestLine, request_class: str | None, request: Request) -> RequestLine:
        """The line, with the request's class, priority, name and earlier attempts where it has them."""
        if request_class is not None:
            line.request_class = request_class
        if request.priority != DEFAULT_PRIORITY:
            line.priority = number(request.priority)
        if request.name is not None:
            line.name = request.name
        if request.earlier is not None and request.earlier.retries:
            line.retries, line.lost_tokens = request.earlier.retries, request.earlier.lost_tokens
        return line

    def parts(self) -> tuple[Any, ...]:
        """All that it knows, as what another process can be sent."""
        times_s = self.first_arrival_s, self.last_end_s
        populations = {key: population.parts() for key, population in self._populations.items()}
        return self.total, self._completed, times_s, self._waited_s, populations

    def take_parts(self) -> tuple[Any, ...]:
        """`parts` of all requests so far, which it then no longer knows; `add_server(parts, 0)` gives them back."""
        parts = self.total, self._completed, (self.first_arrival_s, self.last_end_s), dict(self._waited_s)
        populations = {key: population.parts() for key, population in self._populations.items()}
        self.total = self._completed = 0
        self._populations.clear()
        for name in self._waited_s:
            self._waited_s[name] = 0.0
        return *parts, populations

    @property
    def num_completed(self) -> int:
        return self._completed

    def add_server(self, parts: tuple[Any, ...], iterations: int) -> None:
        """Take in the requests of another server, its `parts`. iterations: those so far, which its own follow."""
        total, completed, times_s, waited_s, populations = parts
        for key, population in populations.items():
            self._populations[key].add_all(Population.of_parts(population), self._completed, iterations)
        self.total += total
        self._completed += completed
        self.first_arrival_s = min(self.first_arrival_s, times_s[0])
        self.last_end_s = max(self.last_end_s, times_s[1])
        for name, seconds in waited_s.items():
            self._waited_s[name] = self._waited_s.get(name, 0.0) + seconds

    def summary(self, of_iterations: Mapping[str, Any], ends: Sequence[float]) -> dict[str, Any]:
        """The figures of `summary.json`, those of iterations among them. ends: of each iteration, in seconds."""
        whole = Population.merged(list(self._populations.values()))
        span = self.last_end_s - self.first_arrival_s if self._completed else 0.0
        figures = whole.figures(span, ends, self._objectives)
        figures["requests"] |= {"total": self.total}
        found = {
            "requests": figures.pop("requests"),
            "duration_s": span,
            **figures,
            **of_iterations,
            "waiting_by_limit": self._waited_s,
            **NO_TRAFFIC,
        }
        if self._completed >= MIN_REQUESTS and not self._is_closed_loop:
            arrival_s, queue_time_s, ttft_s = (np.asarray(whole.columns[name]) for name in TRAFFIC_COLUMNS)
            found |= traffic(arrival_s, queue_time_s, ttft_s, slow_ttft_s(self._objectives))
        return found | by_group(self._populations, span, ends, self._objectives)


def _add_load(line: RequestLine, load: KvLoad) -> None:
    """What a request loaded from stores before it ran."""
    line.disk_reused_tokens, line.remote_reused_tokens = load.tokens.get("disk", 0), load.tokens.get("remote", 0)
    line.transfer_tokens = line.disk_reused_tokens + line.remote_reused_tokens
    line.transfer_start_s, line.transfer_end_s = number(load.begin_s), number(load.end_s)


def request_line(
    request: Request,
    arrival_s: float,
    output_len: int,
    outcome: str,
    error: str | None = None,
    times_s: Sequence[Any] = (None,) * 7,
    attribution_s: dict[str, Any] | None = None,
) -> RequestLine:
    """The line of a request. times_s: `queue_time_s` to `end_s` of RequestLine; these and attribution_s are numbers to
    be encoded (see `number`)."""
    # A pause appends output tokens to the prompt and lowers max_new_tokens by them.
    requested = request.max_new_tokens + request.prompt_len - request.original_prompt_len
    queue, ttft, tpot, e2e, scheduled, first, end = times_s
    return RequestLine(
        request.request_id,
        request.index,
        number(arrival_s),
        request.original_prompt_len,
        output_len,
        queue,
        ttft,
        tpot,
        e2e,
        scheduled,
        first,
        end,
        requested,
        request.pauses,
        request.recomputed_tokens,
        request.reused_tokens if outcome == "completed" else 0,
        attribution_s or {},
        outcome,
        error,
    )
