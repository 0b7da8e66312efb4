"""The log of a vLLM server (`--iteration_stats_format vllm`): a line for each iteration, and a summary of every 10 s.

Source: vllm/v1/metrics/loggers.py and vllm/v1/utils.py (compute_iteration_details) of vLLM 0.32. By vLLM's definition a
request is one of context until it has an output: a resumed request that computes its prompt again counts as
generation, with all its tokens.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ifbbench.analysis.token_times import output_tokens
from ifbbench.rundir.line_types import RUNNING, TIMESTAMP_FORMAT, Phase
from ifbbench.rundir.reader import RunData

INTERVAL_S = 10.0
# The prefix cache hit rate is that of so many requests that were admitted last.
RECENT_REQUESTS = 1000
Counts = NDArray[np.int64]


def lines(run: RunData) -> Iterator[str]:
    """The lines of a run of which all iterations were recorded; none of a run without iterations."""
    table = run.iterations
    if not len(table):
        return
    begin, start_s = datetime.strptime(table["timestamp"].iloc[0], TIMESTAMP_FORMAT), table["start_s"].to_numpy(float)
    overlap = "enabled" if run.config.get("async_scheduling") else "disabled"
    yield _line(begin, 0.0, f"Asynchronous scheduling is {overlap}.")
    since_s = start_s + table["latency_ms"].to_numpy(float) / 1000 - start_s[0]
    capacity, longest = run.run["kv_cache_capacity"], run.config["max_seq_len"]
    yield _line(
        begin,
        0.0,
        f"GPU KV cache size: {capacity['tokens']:,} tokens, Maximum concurrency for {longest:,} tokens per request: "
        f"{capacity['max_concurrency']:.2f}x",
    )
    contexts, context_tokens, running, held = _batches(run)
    # A request that has ended unnoticed is in one more batch, and in no span.
    generating = table["scheduled_requests"].to_numpy(np.int64) - contexts
    tokens = table["budget_used"].to_numpy(np.int64)
    usage = 100 * table["used_kv_cache_blocks"].to_numpy(float) / table["max_kv_cache_blocks"].to_numpy(float)
    waiting = np.maximum(table["waiting"].to_numpy(np.int64) - held, 0)
    summaries = _Summaries(run, start_s[0], since_s)
    waited_ms = 1000 * (since_s - _submitted_s(table, since_s))
    for row, number in enumerate(table["iteration_counter"].tolist()):
        for at_s, prompts, outputs, pauses, hit_rate in summaries.before(row):
            # The state is that of the last iteration that had ended.
            state = row - 1
            parts = [
                f"Avg prompt throughput: {prompts:.1f} tokens/s",
                f"Avg generation throughput: {outputs:.1f} tokens/s",
                f"Running: {running[state]} reqs",
                f"Waiting: {waiting[state]} reqs",
                *([f"Preemptions: {pauses}"] if pauses else []),
                f"GPU KV cache usage: {usage[state]:.1f}%",
                f"Prefix cache hit rate: {hit_rate:.1f}%",
            ]
            yield _line(begin, at_s, f"Engine 000: {', '.join(parts)}")
        if contexts[row] or generating[row]:
            yield _line(
                begin,
                since_s[row],
                f"Engine 000: Iteration({number}): {contexts[row]} context requests, {context_tokens[row]} context "
                f"tokens, {generating[row]} generation requests, {tokens[row] - context_tokens[row]} generation "
                f"tokens, iteration elapsed time: {waited_ms[row]:.2f} ms, GPU KV cache usage: {usage[row]:.1f}%",
            )


def _line(begin: datetime, since_s: float, text: str) -> str:
    """A line of the log, so many seconds after the first iteration, which began at `begin`."""
    return f"INFO {begin + timedelta(seconds=since_s):%m-%d %H:%M:%S} [loggers.py] {text}"


def _submitted_s(table: pd.DataFrame, since_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """When vLLM begins to wait for each iteration: when it was submitted, and the one before had ended."""
    latency_s, host_s = (table[name].to_numpy(float) / 1000 for name in ("latency_ms", "host_ms"))
    begin_s: NDArray[np.float64] = np.maximum(since_s - latency_s + host_s, np.concatenate([[-np.inf], since_s[:-1]]))
    return begin_s


def _batches(run: RunData) -> tuple[Counts, Counts, Counts, Counts]:
    """Counts of each iteration: context requests and their tokens, running requests after it, and those of these that
    had not run in it."""
    numbers = run.iterations["iteration_counter"].to_numpy(np.int64)
    end = int(max(numbers.max(initial=0), run.spans["last_iteration"].max() if len(run.spans) else 0)) + 2
    contexts, context_tokens, running, held = (np.zeros(end, np.int64) for _ in range(4))
    columns = ("request_id", "phase", "first_iteration", "last_iteration", "chunks", "produced")
    has_output: set[str] = set()
    for request, phase, first, last, chunks, produced in run.spans[list(columns)].itertuples(index=False):
        within = slice(int(first), int(last) + 1)
        if phase in (Phase.CONTEXT, Phase.RECOMPUTE) and request not in has_output:
            contexts[within] += 1
            context_tokens[within] += chunks
        if phase in RUNNING or phase == Phase.SKIPPED:
            running[within] += 1
            held[within] += phase == Phase.SKIPPED
        if produced and produced > 0:
            has_output.add(request)
    ended = run.spans[run.spans["request_id"].isin(run.completed["request_id"])]
    np.subtract.at(running, ended.groupby("request_id")["last_iteration"].max().to_numpy(np.int64), 1)
    return contexts[numbers], context_tokens[numbers], running[numbers], held[numbers]


class _Summaries:
    """The figures of each interval of INTERVAL_S.

    since_s: end of each iteration, from the first one's start.
    """

    def __init__(self, run: RunData, begin_s: float, since_s: NDArray[np.float64]) -> None:
        self._since_s, self._intervals, self._was_idle = since_s, 0, True
        admitted = run.requests.dropna(subset=["first_scheduled_s"]).sort_values("first_scheduled_s", kind="stable")
        self._admitted_s = admitted["first_scheduled_s"].to_numpy(float) - begin_s
        self._queries, self._hits = (_cumulated(admitted[name]) for name in ("prompt_len", "reused_tokens"))
        # vLLM counts the tokens of a prompt when its first output is there, without those found in the cache.
        prompts = run.requests.dropna(subset=["first_token_s"]).sort_values("first_token_s", kind="stable")
        self._first_token_s = prompts["first_token_s"].to_numpy(float) - begin_s
        self._prompts = _cumulated(prompts["prompt_len"] - prompts["reused_tokens"])
        self._outputs, self._pauses = _cumulated(output_tokens(run)), _cumulated(run.iterations["pauses"])

    def before(self, row: int) -> Iterator[tuple[float, float, float, int, float]]:
        """Figures of the intervals that end before iteration `row` does: its end, tokens of prompts and of outputs a
        second, pre-emptions, and the prefix cache hit rate in percent. None of idle intervals after an idle one."""
        while row and self._since_s[row] > (self._intervals + 1) * INTERVAL_S:
            begin_s, end_s = self._intervals * INTERVAL_S, (self._intervals + 1) * INTERVAL_S
            self._intervals += 1
            first, last = np.searchsorted(self._first_token_s, (begin_s, end_s), side="right")
            prompts = (self._prompts[last] - self._prompts[first]) / INTERVAL_S
            first, last = np.searchsorted(self._since_s, (begin_s, end_s), side="right")
            outputs = (self._outputs[last] - self._outputs[first]) / INTERVAL_S
            pauses = int(self._pauses[last] - self._pauses[first])
            is_idle = not prompts and not outputs
            if not (is_idle and self._was_idle):
                last = int(np.searchsorted(self._admitted_s, end_s, side="right"))
                first = max(0, last - RECENT_REQUESTS)
                queries = self._queries[last] - self._queries[first]
                hits = self._hits[last] - self._hits[first]
                yield end_s, prompts, outputs, pauses, 100 * hits / queries if queries else 0.0
            self._was_idle = is_idle


def _cumulated(values: Any) -> NDArray[np.float64]:
    """[n + 1], the sum of the first values up to each."""
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])
