"""The figures of a run: those of summary.json, those of gptManagerBenchmark, and when each output token came.

Of a killed run, the figures of summary.json are computed from what it had written. Token times are not recorded: they
follow from spans and iterations.
"""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import UNSET
from numpy.typing import ArrayLike, NDArray

from ifbbench.files import replace_file
from ifbbench.rundir.checking import decode_request
from ifbbench.rundir.reader import (
    REQUEST_FIELDS,
    Floats,
    RunData,
    covering,
    delivered_s,
    once_a_run,
    parse_line,
    parsed_lines,
    producing_spans,
)
from ifbbench.rundir.run_directory import find_lines

if TYPE_CHECKING:  # it takes a third of a second to import, and a run that prints its report reads no table
    import pandas as pd

Integers = NDArray[np.int64]
SECONDS_OF_A_CLIENT = 10_001
LATENCIES = ("end_s", "output_len", "accepted_draft_tokens", "e2e_s", "ttft_s", "tpot_s", "queue_time_s")


def figures(run: RunData) -> dict[str, Any]:
    """The figures of summary.json. Where it is missing they cover the requests completed before the run was killed."""
    if run.summary is not None:
        return run.summary
    from ifbbench.report.recorded import recorded_figures

    return recorded_figures(run)


@dataclass(frozen=True)
class IterationClock:
    """Iteration number to seconds from run start. Iterations that were not recorded are interpolated.

    delivered_s: when the tokens of an iteration reached their clients, which a serving process delays.
    """

    numbers: Floats
    start_s: Floats
    end_s: Floats
    delivered_s: Floats

    @classmethod
    @once_a_run
    def of(cls, run: RunData) -> IterationClock:
        """The clock of `run`. Against an endpoint, spans have seconds in the place of iterations."""
        if run.endpoint:
            seconds = np.linspace(0.0, max(float(run.spans["last_iteration"].max()), 1e-3), SECONDS_OF_A_CLIENT)
            return cls(seconds, seconds, seconds, seconds)
        start = run.iterations["start_s"].to_numpy(dtype=float)
        end = start + run.iterations["latency_ms"].to_numpy(dtype=float) / 1000
        numbers = run.iterations["iteration_counter"].to_numpy(dtype=float)
        return cls(numbers, start, end, delivered_s(run.iterations))

    def starts(self, iterations: ArrayLike) -> Floats:
        """When these iterations started, in seconds."""
        return np.asarray(np.interp(np.asarray(iterations, dtype=float), self.numbers, self.start_s))

    def ends(self, iterations: ArrayLike) -> Floats:
        """When these iterations ended, in seconds."""
        return np.asarray(np.interp(np.asarray(iterations, dtype=float), self.numbers, self.end_s))

    def tokens(self, iterations: ArrayLike) -> Floats:
        """When the output tokens of these iterations reached their clients, in seconds."""
        return np.asarray(np.interp(np.asarray(iterations, dtype=float), self.numbers, self.delivered_s))


def span_ends(run: RunData) -> pd.Series[float]:
    """When each of `run.spans` ends: when the next one of its request begins, if that is in the next iteration; else
    with its last iteration. An engine without requests may wait long between the two."""
    spans, clock = run.spans, IterationClock.of(run)
    following = spans.groupby("request_id", sort=False)["first_iteration"].shift(-1) == spans["last_iteration"] + 1
    starts, ends = clock.starts(spans["last_iteration"] + 1), clock.ends(spans["last_iteration"])
    import pandas as pd

    return pd.Series(np.where(following, np.maximum(starts, ends), ends), spans.index)


def token_iterations(run: RunData) -> dict[str, Integers]:
    """Request id to the iterations that produced its output tokens, in order. Failed requests are left out.

    A span's tokens come in its last iterations: one in each of generation, one at the end of context or recompute.
    """
    spans = producing_spans(run)
    every, stretches = run.num_micro_batches, dict[str, list[Integers]]()
    columns = (spans[name].tolist() for name in ("request_id", "last_iteration", "produced"))
    for request, last, produced in zip(*columns, strict=True):
        stretches.setdefault(request, []).append(np.arange(last - (int(produced) - 1) * every, last + 1, every))
    return {request: np.concatenate(parts) for request, parts in stretches.items()}


@dataclass(frozen=True)
class TokenGaps:
    """Every gap between consecutive output tokens of a request, of all requests pooled.

    end_s: when the later token came. over_pause: whether the request was paused in it.
    """

    seconds: Floats
    end_s: Floats
    over_pause: NDArray[np.bool_]

    @classmethod
    @once_a_run
    def of(cls, run: RunData) -> TokenGaps:
        """The gaps of `run`."""
        if run.endpoint:
            times = list(token_times(run).values())
            gaps, ends_s = (
                np.concatenate([np.empty(0), *parts])
                for parts in ([np.diff(one) for one in times], [one[1:] for one in times])
            )
            return cls(gaps, ends_s, np.zeros(len(gaps), bool))
        spans, clock = producing_spans(run), IterationClock.of(run)
        counts = spans["produced"].to_numpy(dtype=np.int64)
        last = spans["last_iteration"].to_numpy(dtype=np.int64)
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        iterations = np.repeat(last, counts) - run.num_micro_batches * (np.repeat(ends - 1, counts) - np.arange(total))
        times_s = clock.tokens(iterations)
        import pandas as pd

        request = np.repeat(pd.factorize(spans["request_id"])[0], counts)
        begins = np.zeros(total, bool)
        begins[(ends - counts)[counts > 0]] = True
        recomputes = np.repeat((spans["phase"] == "recompute").to_numpy(), counts) & begins
        same = request[1:] == request[:-1]
        return cls(np.diff(times_s)[same], times_s[1:][same], recomputes[1:][same])


def token_times(run: RunData) -> dict[str, Floats]:
    """Request id to the times of its output tokens (s), of a run against an endpoint. Failed requests are left out."""
    spans = run.spans[(run.spans["phase"] == "generation") & run.spans["request_id"].isin(run.completed["request_id"])]
    if spans.empty:  # no request has a token, so that no line has the columns of chunks
        return {}
    columns = (spans[name].tolist() for name in ("request_id", "chunk_s", "chunks"))
    return {request: np.repeat(times_s, tokens) for request, times_s, tokens in zip(*columns, strict=True)}


def inter_token_gaps(run: RunData) -> Floats:
    """Every gap between consecutive output tokens of a request, of all requests pooled, in seconds."""
    return TokenGaps.of(run).seconds


def output_tokens(run: RunData) -> Floats:
    """Output tokens produced in each row of `run.iterations`, those of requests that were still running included."""
    numbers = run.iterations["iteration_counter"].to_numpy(dtype=np.int64)
    spans = producing_spans(run)
    last = spans["last_iteration"]
    end = int(max(numbers.max(initial=0), last.max() if len(last) else 0))
    every = run.num_micro_batches
    of_all: Floats = covering(last - (spans["produced"] - 1) * every, last, end, every)
    return np.asarray(of_all[numbers])


def benchmark_figures(run: RunData, with_queue: bool = False) -> dict[str, float]:
    """gptManagerBenchmark's figures: name (with unit) to value, in its order.

    Percentiles are its own nearest rank, not the interpolated ones of summary.json. As there, figures of single tokens
    are given for streaming runs only; with_queue: and the time in the queue. Latencies are NaN where no request
    completed.
    """
    done, num_failed, first_s = _latencies(run)
    num_done = len(done["e2e_s"])
    total_s = float(done["end_s"].max() - first_s) if num_done else math.nan
    output_tokens = int(np.nansum(done["output_len"]))
    # Without draft tokens each decoding step of a request yields exactly one token.
    decoding_steps = output_tokens - int(np.nansum(done["accepted_draft_tokens"]))
    overall = {
        "num_samples": num_done,
        "num_error_samples": num_failed,
        "total_latency(ms)": total_s * 1000,
        "seq_throughput(seq/sec)": num_done / total_s,
        "token_throughput(token/sec)": output_tokens / total_s,
        **_spread("sequence_latency(ms)", done["e2e_s"] * 1000),
        "avg_acceptance_rate(tokens/decoding steps)": output_tokens / decoding_steps if output_tokens else 0.0,
    }
    if not run.config.get("streaming"):
        return overall
    per_token_ms = done["tpot_s"][~np.isnan(done["tpot_s"])] * 1000
    queue_ms = done["queue_time_s"] * 1000 if with_queue and not run.endpoint else None
    return overall | {
        **_spread("time_to_first_token(ms)", done["ttft_s"] * 1000),
        **_spread("inter_token_latency(ms)", per_token_ms),
        **_spread("user_tokens_per_second(tokens/sec/user)", 1000 / per_token_ms[per_token_ms > 0]),
        **({} if queue_ms is None else _spread("request_queueing_latency(ms)", queue_ms)),
    }


def benchmark_lines(run: RunData) -> list[str]:
    """`[BENCHMARK] <name> <value>` for each figure: counts as integers, the others with two decimals.

    As there, streaming runs also have the time in the queue, which the CSV does not have."""
    return [
        f"[BENCHMARK] {name} {value if isinstance(value, int) else format(value, '.2f')}"
        for name, value in benchmark_figures(run, with_queue=True).items()
    ]


def write_benchmark_csv(run: RunData, path: Path) -> None:
    """Write a header and one row of `benchmark_figures` to `path`."""
    values = benchmark_figures(run)
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows([values.keys(), values.values()])
    replace_file(path, text.getvalue())


def _latencies(run: RunData) -> tuple[dict[str, Floats], int, float]:
    """LATENCIES of the requests that have all their tokens, each [requests], the number of the others, and the first
    arrival. Read alone, they take a quarter of the time and memory of the table of requests."""
    path, fields_of = find_lines(run.path, "requests"), attrgetter("outcome", "arrival_s", *LATENCIES)

    def fields(line_number: int, line: bytes) -> Sequence[Any]:
        with suppress(ValueError, RecursionError):
            found: tuple[Any, ...] = fields_of(decode_request(line))
            return found
        row = parse_line(path, line_number, line, REQUEST_FIELDS)
        return [row.get(name) for name in ("outcome", "arrival_s", *LATENCIES)]

    columns, num_others, first_s = {name: array("d") for name in LATENCIES}, 0, math.inf
    for outcome, arrival_s, *values in parsed_lines(path, fields):
        first_s = min(first_s, math.inf if arrival_s is None else arrival_s)
        if outcome != "completed":
            num_others += 1
            continue
        for column, value in zip(columns.values(), values, strict=True):
            column.append(math.nan if value is None or value is UNSET else value)
    return {name: np.asarray(column) for name, column in columns.items()}, num_others, first_s


def _spread(name: str, values: ArrayLike) -> dict[str, float]:
    """Mean, extremes and percentiles by nearest rank: the smallest value with at least so many percent up to it."""
    ordered = np.sort(np.asarray(values, dtype=float))
    keys = ("avg", "max", "min", "p99", "p90", "p50")
    if not ordered.size:
        return {f"{key}_{name}": math.nan for key in keys}
    ranks = [ordered[math.ceil(percent / 100 * len(ordered)) - 1] for percent in (99, 90, 50)]
    spread = [ordered.mean(), ordered[-1], ordered[0], *ranks]
    return {f"{key}_{name}": float(value) for key, value in zip(keys, spread, strict=True)}
