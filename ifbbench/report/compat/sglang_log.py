"""The log of an SGLang server (`--iteration_stats_format sglang`): each prefill batch, and each 40th decode batch.

Source: managers/scheduler_components/metrics_reporter.py of SGLang 0.5.23 (report_prefill_stats, report_decode_stats).
Lines are written when the result of the batch is there. Decode batches are taken to run as CUDA graphs.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

import numpy as np
from numpy.typing import NDArray

from ifbbench.rundir.line_types import TIMESTAMP_FORMAT, Phase
from ifbbench.rundir.reader import RunData

DECODE_LOG_INTERVAL = 40
Counts = NDArray[np.int64]


def lines(run: RunData) -> Iterator[str]:
    """The lines of a run of which all iterations were recorded; none of a run without iterations."""
    table, config = run.iterations, run.config
    if not len(table):
        return
    begin, start_s = datetime.strptime(table["timestamp"].iloc[0], TIMESTAMP_FORMAT), table["start_s"].to_numpy(float)
    since_s = start_s + table["latency_ms"].to_numpy(float) / 1000 - start_s[0]
    rank = " TP0" if config["tp_size"] > 1 else ""
    page, pages = config["tokens_per_block"], table["used_kv_cache_blocks"].to_numpy(np.int64)
    capacity = int(table["max_kv_cache_blocks"].iloc[0]) * page

    def line(at_s: float, text: str) -> str:
        return f"[{begin + timedelta(seconds=at_s):%Y-%m-%d %H:%M:%S}{rank}] {text}"

    yield line(
        0.0,
        f"max_total_num_tokens={capacity}, chunked_prefill_size={config['max_num_tokens'] or -1}, "
        f"max_prefill_tokens={config['max_prefill_tokens']}, max_running_requests={config['max_batch_size']}, "
        f"context_len={config['max_seq_len']}",
    )
    usage = pages * page / capacity
    prompts, scheduled = (table[name].to_numpy(np.int64) for name in ("context_requests", "scheduled_requests"))
    running = table["active_request_count"].to_numpy(np.int64) - prompts
    new_tokens, queued = (table[name].to_numpy(np.int64) for name in ("total_context_tokens", "queued"))
    cached = np.diff(table["reused_kv_cache_blocks"].to_numpy(np.int64), prepend=0) * page
    pending = _pending_tokens(run)
    decode_steps = generated = 0
    prefill_s = decode_s = 0.0
    for row, at_s in enumerate(since_s.tolist()):
        if prompts[row]:
            gap_s, prefill_s = at_s - prefill_s, at_s
            yield line(
                at_s,
                f"Prefill batch, #new-seq: {prompts[row]}, #new-token: {new_tokens[row]}, "
                f"#cached-token: {cached[row]}, "
                f"token usage: {usage[row]:.2f}, #running-req: {running[row]}, #queue-req: {queued[row]}, "
                f"#pending-token: {pending[row]}, cuda graph: False, "
                f"input throughput (token/s): {new_tokens[row] / gap_s if gap_s > 0 else 0.0:.2f}",
            )
        elif scheduled[row]:
            decode_steps, generated = decode_steps + 1, generated + int(scheduled[row])
            if decode_steps % DECODE_LOG_INTERVAL == 0:
                gap_s, decode_s = at_s - decode_s, at_s
                yield line(
                    at_s,
                    f"Decode batch, #running-req: {scheduled[row]}, #token: {pages[row] * page}, "
                    f"token usage: {usage[row]:.2f}, cuda graph: True, "
                    f"gen throughput (token/s): {generated / gap_s if gap_s > 0 else 0.0:.2f}, "
                    f"#queue-req: {queued[row]}",
                )
                generated = 0


def _pending_tokens(run: RunData) -> Counts:
    """Tokens of each iteration that wait: those of queued requests, with their outputs before a retraction, and what is
    left of the prompt that is cut."""
    numbers = run.iterations["iteration_counter"].to_numpy(np.int64)
    end = int(max(numbers.max(initial=0), run.spans["last_iteration"].max() if len(run.spans) else 0)) + 2
    pending = np.zeros(end, np.int64)
    lengths = dict(zip(run.requests["request_id"], run.requests["prompt_len"], strict=True))
    outputs: dict[str, int] = {}
    columns = ("request_id", "phase", "first_iteration", "last_iteration", "chunks", "tokens", "produced")
    for request, phase, first, last, chunks, tokens, produced in run.spans[list(columns)].itertuples(index=False):
        within = slice(int(first), int(last) + 1)
        if phase in (Phase.WAITING, Phase.PAUSED):
            pending[within] += int(lengths[request]) + outputs.get(request, 0)
        elif phase in (Phase.CONTEXT, Phase.RECOMPUTE):
            pending[within] += int(tokens) - np.cumsum(chunks)
        if produced and produced > 0:
            outputs[request] = outputs.get(request, 0) + int(produced)
    found: Counts = pending[numbers]
    return found
