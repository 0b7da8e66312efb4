"""Published measurements of servers, row by row: how each is replayed, and what is predicted for it.

A row names engine, version, GPU, degree, model, data type, lengths and load, and has throughput (output tokens/s of all
GPUs), mean TTFT and mean ITL (ms; each request's mean gap). What a row does not say is taken from the engine's file in
ifbbench/simulation/engines, as its settings come closest to the engine's defaults.

- A closed loop (`concurrency`) runs WARM_UP_ROUNDS requests a client that are left out of the figures, as load
  generators do, and then MEASURED_ROUNDS, up to MAX_TOKENS tokens of output.
- An open loop (`rate`) runs up to MAX_REQUESTS requests at constant intervals, or as many Poisson arrivals.
- `all_at_once` offers `num_requests` at the start.
- `distinct_prompts` are repeated in turn, with KV cache reuse.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from ifbbench.config import RunConfig
from ifbbench.model.named_models import built_in_models
from ifbbench.replay.run import run_trace
from ifbbench.simulation.engines import load_overhead, overhead_names
from ifbbench.workload.formats import write_trace
from ifbbench.workload.trace import PREFIX_BLOCK, TraceRequest

WARM_UP_ROUNDS, MEASURED_ROUNDS = 2, 3
MAX_TOKENS = 1_500_000
MIN_MEASURED = 10
MAX_REQUESTS = 1000
METRICS = ("itl", "ttft", "throughput")
MILLISECONDS = 1000.0
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of a row, measured and predicted: seconds, or tokens/s for `throughput`."""

    row: Row
    metric: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative, with its sign."""
        return self.predicted / self.measured - 1


def is_current(row: Row) -> bool:
    """Whether the row is of an engine of today: TensorRT-LLM 0.16 or later, vLLM V1, SGLang."""
    return bool(row.get("generation") == "current")


def half(row: Row) -> str:
    """`fit` or `judge`: the half of the rows that this one is in, by the SHA-256 of what was measured."""
    names = ("source", "engine", "gpu", "num_gpus", "model", "dtype", "input", "output", "concurrency", "rate")
    text = json.dumps([row.get(name) for name in names])
    return "judge" if hashlib.sha256(text.encode()).digest()[0] % 2 else "fit"


def engine_name(row: Row) -> str | None:
    """The engine overhead of a row: that of its engine and generation, None without one."""
    name = row["engine"] if is_current(row) else f"{row['engine']}-{row.get('generation', '2024')}"
    return name if name in overhead_names() else None


def measured_figures(row: Row) -> dict[str, float]:
    """The figures of a row. A closed loop without throughput has that of Little's law from its latencies."""
    found = {}
    if "itl_ms" in row and row["output"] > 1:
        found["itl"] = row["itl_ms"]["mean"] / MILLISECONDS
    if "ttft_ms" in row:
        found["ttft"] = row["ttft_ms"]["mean"] / MILLISECONDS
    if "output_tokens_per_s" in row:
        found["throughput"] = row["output_tokens_per_s"]
    elif row.get("concurrency") and {"itl", "ttft"} <= found.keys():
        seconds = found["ttft"] + (row["output"] - 1) * found["itl"]
        found["throughput"] = row["concurrency"] * row["output"] / seconds
    return found


def config_of(row: Row, model: str) -> RunConfig:
    """The settings of a run like the row's. model: a built-in name, or a file."""
    engine = engine_name(row)
    usual = dict(load_overhead(engine).settings) if engine else {}
    if row["dtype"] not in ("fp8", "fp4"):
        usual.pop("kv_cache_dtype", None)
    given = {name: row[name] for name in ("max_num_tokens", "max_batch_size", "kv_cache_dtype") if row.get(name)}
    if row.get("chunked_context") is not None and "enable_chunked_context" not in usual:
        given["enable_chunked_context"] = row["chunked_context"]
    tp_size = row.get("tp") or row["num_gpus"]
    return RunConfig(
        device=f"sim:{row['gpu']}", model=model, dtype=row["dtype"], tp_size=tp_size,
        pp_size=max(1, row["num_gpus"] // tp_size), engine_overhead=engine,
        max_seq_len=row["input"] + row["output"] + 1, concurrency=row.get("concurrency"),
        request_rate=row.get("rate"), enable_exp_delays=row.get("arrival") == "poisson",
        enable_kv_cache_reuse=bool(row.get("distinct_prompts")),
    ).with_values(**usual | given)  # fmt: skip


def requests_of(row: Row) -> tuple[list[TraceRequest], int]:
    """The requests of a row, and how many of the first ones are left out of the figures."""
    warm_up, count = 0, row["num_requests"]
    if clients := row.get("concurrency"):
        measured = max(clients * MEASURED_ROUNDS, MIN_MEASURED)
        affordable = MAX_TOKENS // row["output"] // clients * clients
        warm_up = clients * WARM_UP_ROUNDS
        count = warm_up + min(measured, max(affordable - warm_up, clients))
    elif row.get("rate"):
        count = min(count, MAX_REQUESTS)
    distinct = row.get("distinct_prompts")
    blocks = -(-row["input"] // PREFIX_BLOCK)
    requests = [
        TraceRequest(
            index, 0.0, row["input"], row["output"], row["output"],
            prefix_ids=tuple(range(index % distinct * blocks, (index % distinct + 1) * blocks)) if distinct else None,
        )
        for index in range(count)
    ]  # fmt: skip
    return requests, warm_up


def predict(row: Row, models: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> dict[str, float]:
    """The figures predicted for a row. models: config.json of models that are not built in. changes: other settings."""
    requests, warm_up = requests_of(row)
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        model = row["model"]
        if model not in built_in_models():
            model = str(folder / "config.json")
            Path(model).write_text(json.dumps(models[row["model"]]))
        write_trace(iter(requests), folder / "trace.jsonl")
        config = config_of(row, model).with_values(
            output=str(folder / "run"), quiet=True, iteration_stats_every=1_000_000, **changes or {}
        )
        run = run_trace(str(folder / "trace.jsonl"), config)
        if run.failed:
            raise ValueError(f"{run.failed} of {len(requests)} requests failed")
        lines = (folder / "run" / "requests.jsonl").read_text().splitlines()
    return figures_of([json.loads(line) for line in lines], warm_up)


def figures_of(requests: Iterable[Row], warm_up: int) -> dict[str, float]:
    """Means over the requests after the first `warm_up`, and their throughput."""
    ordered = sorted(requests, key=lambda request: request["request_id"])
    ends = sorted(request["arrival_s"] + request["e2e_s"] for request in ordered)
    kept = ordered[warm_up:]
    found = {"ttft": fmean(request["ttft_s"] for request in kept)}
    gaps = [request["tpot_s"] for request in kept if request["tpot_s"] is not None]
    if gaps:
        found["itl"] = fmean(gaps)
    start_s = ends[warm_up - 1] if warm_up else ordered[0]["arrival_s"]
    # The last requests of a closed loop run alone; throughput is that up to the time when the first client is done.
    found["throughput"] = sum(request["output_len"] for request in kept) / (ends[-1] - start_s)
    return found
