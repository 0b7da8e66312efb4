"""Published measurements of servers, row by row: how each is replayed, and what is predicted for it.

A row names engine, version, GPU, degree, model, data type, lengths and load, and has throughput (output tokens/s of all
GPUs), mean TTFT and mean ITL (ms; each request's mean gap). What a row does not say is taken from the engine's file in
ifbbench/simulated/engines, as its settings come closest to the engine's defaults.

- A closed loop (`concurrency`) has equal requests, and the first ones arrive together. With engines in ONE_BY_ONE there
  are REQUESTS_PER_CLIENT, as genai-perf sends for AIConfigurator, all of them replayed and counted. Measured TTFTs do
  not depend on the output length, and grow by half the time of a prompt for each client in the first round, and are
  two to three iterations later on: prompts that arrive together run one after the other, one an iteration, and so
  their clients return one an iteration for ever. So at most one prompt and a token a client run in an iteration.
- With other engines, load generators send ROUNDS requests a client. The first round and LATER_ROUNDS more are replayed,
  and the means weighted as if there were all. Output lengths spread by SPREAD around those of the row, so that clients
  of equal requests do not return together for ever; not those of SGLang 0.5.1 (IN_STEP), which stays in step. A load
  generator with many streaming clients takes CLIENT_S of a TTFT itself, which is no part of the server. Which engine
  has which loop, ROUNDS, SPREAD and CLIENT_S are fitted. At most MAX_TOKENS tokens of output are replayed.
- An open loop (`rate`) runs up to MAX_REQUESTS requests at constant intervals, or as many Poisson arrivals.
- `all_at_once` offers `num_requests` at the start.
- `distinct_prompts` are repeated in turn, with KV cache reuse.
- `lengths` names pairs of prompt and output length in the file, which requests take in turn instead of `input` and
  `output`.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from ifbbench.models.named_models import built_in_models
from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig
from ifbbench.simulated.engines import load_overhead, overhead_names
from ifbbench.workload.formats import write_trace
from ifbbench.workload.trace import PREFIX_BLOCK, TraceRequest

REQUESTS_PER_CLIENT = 10
ROUNDS, LATER_ROUNDS = 14, 3
MAX_TOKENS = 1_500_000
SPREAD = 0.1
CLIENT_S = 0.04
IN_STEP = ("sglang-0.5.1",)
ONE_BY_ONE = ("vllm", "tensorrt-llm")
MAX_REQUESTS = 1000
METRICS = ("itl", "ttft", "throughput")
MILLISECONDS = 1000.0
# Nearest data type here of some names of data types of weights.
DTYPES = {"mxfp4": "int4", "w4a16": "int4", "awq": "int4"}
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Comparison:
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


def rows_of(data: Mapping[str, Any]) -> list[Row]:
    """The rows of a file, each with the `pairs` of lengths that it names, and their means as `input` and `output`."""
    found = []
    for row in data["rows"]:
        pairs = data.get("lengths", {}).get(row.get("lengths"))
        if pairs:
            prompt_lens, output_lens = zip(*pairs, strict=True)
            row = {"input": round(fmean(prompt_lens)), "output": round(fmean(output_lens)), **row, "pairs": pairs}
        found.append(row)
    return found


def half(row: Row) -> str:
    """`fit` or `judge`: the half of the rows that this one is in, by the SHA-256 of what was measured."""
    names = ("source", "engine", "gpu", "num_gpus", "model", "dtype", "input", "output", "concurrency", "rate")
    text = json.dumps([row.get(name) for name in names])
    return "judge" if hashlib.sha256(text.encode()).digest()[0] % 2 else "fit"


def engine_name(row: Row) -> str | None:
    """The engine overhead of a row: that of its version, else that of its engine; None without one. Engines of 2024
    have only those of their versions."""
    whole = f"{row['engine']}-{row['version']}".lower()
    names = [name for name in overhead_names() if whole.startswith(name) and (is_current(row) or name != row["engine"])]
    return max(names, key=len, default=None)


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
        found["throughput"] = little(row, found)
    return found


def config_of(row: Row, model: str) -> RunConfig:
    """The settings of a run like the row's. model: a built-in name, or a file."""
    engine = engine_name(row)
    usual = dict(load_overhead(engine).settings) if engine else {}
    dtype = DTYPES.get(row["dtype"], row["dtype"])
    if dtype not in ("fp8", "int4"):
        usual.pop("kv_cache_dtype", None)
    given = {name: row[name] for name in ("max_num_tokens", "max_batch_size", "kv_cache_dtype") if row.get(name)}
    if row.get("chunked_context") is not None and "enable_chunked_context" not in usual:
        given["enable_chunked_context"] = row["chunked_context"]
    if row.get("concurrency") and engine in ONE_BY_ONE:
        one_prompt = max(prompt_len for prompt_len, _ in _pairs(row)) + row["concurrency"]
        given["max_num_tokens"] = min(one_prompt, given.get("max_num_tokens", one_prompt))
    tp_size = row.get("tp") or row["num_gpus"]
    longest = max(prompt_len + output_len for prompt_len, output_len in _pairs(row))
    return RunConfig(
        device=f"sim:{row['gpu']}",
        model=model,
        dtype=dtype,
        tp_size=tp_size,
        pp_size=max(1, row["num_gpus"] // tp_size),
        engine_overhead=engine,
        max_seq_len=round(longest * (1 + SPREAD)) + 1,
        concurrency=row.get("concurrency"),
        request_rate=row.get("rate"),
        enable_exp_delays=row.get("arrival") == "poisson",
        enable_kv_cache_reuse=bool(row.get("distinct_prompts")),
    ).with_values(**usual | given)


def _pairs(row: Row) -> Sequence[tuple[int, int]]:
    """Prompt and output lengths that the requests of a row take in turn."""
    return row.get("pairs") or [(row["input"], row["output"])]


def requests_of(row: Row) -> list[TraceRequest]:
    """The requests of a row."""
    engine = engine_name(row)
    count, clients, distinct = row["num_requests"], row.get("concurrency"), row.get("distinct_prompts")
    if clients:
        affordable = MAX_TOKENS // row["output"] // clients
        usual = 1 + (LATER_ROUNDS if clients > 2 else ROUNDS)
        count = clients * min(max(affordable, 2), REQUESTS_PER_CLIENT if engine in ONE_BY_ONE else usual)
    elif row.get("rate"):
        count = min(count, MAX_REQUESTS)
    blocks = -(-row["input"] // PREFIX_BLOCK)
    pairs = _pairs(row)
    spread = SPREAD if clients and engine not in IN_STEP + ONE_BY_ONE else 0.0
    lengths, requests = Random(0), []
    for index in range(count):
        prompt_len, output_len = pairs[index % len(pairs)]
        requests.append(
            TraceRequest(
                index,
                0.0,
                prompt_len,
                round(output_len * (1 + spread)),
                max(1, round(output_len * lengths.uniform(1 - spread, 1 + spread))),
                prefix_ids=tuple(range(index % distinct * blocks, (index % distinct + 1) * blocks))
                if distinct
                else None,
            )
        )
    return requests


def predict(row: Row, models: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> dict[str, float]:
    """The figures predicted for a row. models: config.json of models that are not built in. changes: other settings."""
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        model = row["model"]
        if model not in built_in_models():
            model = str(folder / "config.json")
            Path(model).write_text(json.dumps(models[row["model"]]))
        config = config_of(row, model)
        requests = requests_of(row)
        write_trace(iter(requests), folder / "trace.jsonl")
        config = config.with_values(
            output=str(folder / "run"), quiet=True, iteration_stats_every=1_000_000, **changes or {}
        )
        run = run_trace(str(folder / "trace.jsonl"), config)
        if run.failed:
            raise ValueError(f"{run.failed} of {len(requests)} requests failed")
        lines = (folder / "run" / "requests.jsonl").read_text().splitlines()
    return figures_of(row, [json.loads(line) for line in lines])


def figures_of(row: Row, requests: Iterable[Row]) -> dict[str, float]:
    """TTFT and ITL in seconds, the latter of each request's mean gap, and output tokens/s: means over all requests."""
    ordered = sorted(requests, key=lambda request: request["request_id"])
    first = row.get("concurrency") or 0
    rounds, client_s = (REQUESTS_PER_CLIENT, 0.0) if engine_name(row) in ONE_BY_ONE else (ROUNDS, CLIENT_S)
    parts = [(ordered[:first], 1 / rounds), (ordered[first:], 1 - 1 / rounds)] if first else [(ordered, 1.0)]
    found = {}
    for name, field in (("ttft", "ttft_s"), ("itl", "tpot_s")):
        if row["output"] > 1 or name == "ttft":
            found[name] = sum(weight * _mean(request[field] for request in part) for part, weight in parts)
    if first:
        found["ttft"] += client_s
        found["throughput"] = little(row, found)
    elif not row.get("rate"):
        span_s = max(request["arrival_s"] + request["e2e_s"] for request in ordered)
        found["throughput"] = sum(request["output_len"] for request in ordered) / span_s
    return found


def _mean(values: Iterable[float | None]) -> float:
    """The mean of those that are not None; requests of one output token have no gap."""
    return fmean([value for value in values if value is not None] or [0.0])


def little(row: Row, figures: Mapping[str, float]) -> float:
    """Output tokens/s of a closed loop by Little's law, from its latencies."""
    seconds = figures["ttft"] + (row["output"] - 1) * figures.get("itl", 0.0)
    return float(row["concurrency"] * row["output"] / seconds)
