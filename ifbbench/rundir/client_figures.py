"""The figures of a run against an endpoint, read again from its files."""

from typing import Any

import numpy as np
from msgspec import UNSET, convert

from ifbbench.rundir.client_side import ClientMetrics, ClientRequestLine
from ifbbench.rundir.reader import REQUEST_FIELDS, Floats, RunData
from ifbbench.rundir.rows import read_lines
from ifbbench.rundir.run_directory import METRICS, find_lines
from ifbbench.rundir.traffic import Window

# Parts of the names of the gauges of a server's load: of vLLM, SGLang, TensorRT-LLM's Triton backend and text
# generation inference, and of trtllm-serve's iterations.
LOAD_GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "nv_trt_llm_request_metrics{",
    "nv_trt_llm_kv_cache_block_metrics{",
    "tgi_queue_size",
    "tgi_batch_current_size",
    "numActiveRequests",
    "numQueuedRequests",
)


def client_figures(run: RunData, window: Window | None = None) -> dict[str, Any]:
    """The figures of summary.json from the other files. window: of the requests and gaps that ended in it."""
    lines = [convert(row, ClientRequestLine) for row in read_lines(find_lines(run.path, "requests"), REQUEST_FIELDS)]
    if window is not None:
        lines = [one for one in lines if window.start_s <= (one.end_s or one.arrival_s) <= window.end_s]
    classes = {one.index: one.request_class for one in lines if one.request_class is not UNSET}
    spans = run.spans[run.spans["phase"] == "generation"]
    columns = (spans[name].tolist() for name in ("request_id", "chunk_s", "chunks")) if len(spans) else ((), (), ())
    chunks = {request: (times_s, tokens) for request, times_s, tokens in zip(*columns, strict=True)}
    metrics = ClientMetrics(lambda index: classes.get(index), run.config)
    for line in lines:
        times_s, tokens = chunks.get(str(line.request_id), ((), ()))
        if line.ttft_s is None or times_s:  # a killed run may have written a request and not its spans
            metrics.add(line, times_s, tokens)
    total = len(lines) if window else int((run.run.get("trace") or {}).get("requests") or len(lines))
    found, summary = metrics.summary(total, run.partial, window), run.summary or {}
    if "arrivals" in summary:  # in no other file, and of the whole run
        found["arrivals"] = summary["arrivals"]
        found["endpoint"] = {**summary["endpoint"], **found["endpoint"]}
    return found


def load_gauges(run: RunData) -> dict[str, tuple[Floats, Floats]]:
    """The gauges of load in the server's metrics by name: when they were read (s), and their values. Empty if they were
    not polled."""
    values: dict[str, list[tuple[float, float]]] = {}
    for row in read_lines(find_lines(run.path, METRICS), ("at_s",)):
        latest = row.get("values") or {}
        if row.get("iterations"):
            last = row["iterations"][-1]
            latest = {name: value for name, value in last.items() if isinstance(value, int | float)}
        for name, value in latest.items():
            if any(part in name for part in LOAD_GAUGES):
                values.setdefault(name, []).append((row["at_s"], value))
    series = {name: np.array(pairs, float).T for name, pairs in values.items()}
    return {name: (times_s, found) for name, (times_s, found) in series.items()}
