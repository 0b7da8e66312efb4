"""The figures of gptManagerBenchmark: lines of text, and a CSV file."""

import csv
import math
from array import array
from collections.abc import Sequence
from contextlib import suppress
from io import StringIO
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import ArrayLike

from ifbbench.files import replace_file
from ifbbench.rundir.checking import decode_request
from ifbbench.rundir.reader import REQUEST_FIELDS, Floats, RunData
from ifbbench.rundir.rows import parse_line, parsed_lines
from ifbbench.rundir.run_directory import find_lines

LATENCIES = ("end_s", "output_len", "accepted_draft_tokens", "e2e_s", "ttft_s", "tpot_s", "queue_time_s")


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
