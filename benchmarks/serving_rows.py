"""Published measurements of servers, row by row: how each is replayed, and what is predicted for it.

A row names engine, version, GPU, degree, model, data type, lengths and load, and has throughput (output tokens/s of all
GPUs), TTFT, ITL and TPOT (ms): the mean, or where there is none the median. ITL is each request's mean gap, and that of
all gaps in a row that has a TPOT too. What a row does not say is taken from the engine's file in
ifbbench/simulated/engines, as its settings come closest to the engine's defaults. A row that cannot be replayed is
NotReplayable, with the reason.

- Rows of vLLM and SGLang are replayed by their own schedulers (`--engine vllm`, `--engine sglang`), with the settings
  that the row names and the defaults of the engine for the rest.
- A closed loop (`concurrency`) of a current engine has REQUESTS_PER_CLIENT, as genai-perf and `vllm bench` send them;
  the first ones arrive together, and all are replayed and counted. Those of AICONFIGURATOR are equal. Its servers are
  started by its own generator (rule_plugin/*.rule). vLLM's have room in an iteration for the prompt, the batch and
  PROMPT_ROOM tokens, which no row says, and no asynchronous scheduling, which was no default of vLLM before 0.14.
- AICONFIGURATOR's servers of SGLang have `--max-prefill-tokens` of the prompt and PROMPT_ROOM tokens and
  `--enable-mixed-chunk`, but for those of SGLANG_DEFAULTS: the generator's template of that version had neither. With
  mixed chunks, gaps grow by `request_s` for each running request, whatever the device takes: so these rows are replayed
  with `--disable_overlap_schedule`, which no server line says. This was found with all rows in view.
- AICONFIGURATOR's rows of TensorRT-LLM (ONE_BY_ONE): measured TTFTs do not depend on the output length. They grow by
  half the time of a prompt for each client in the first round, and are two to three iterations later on: prompts that
  arrive together run one after the other, one an iteration, and so their clients return one an iteration for ever. So
  at most one prompt and a token a client run in an iteration. (The rule of its generator today,
  rule_plugin/benchmark/trtllm.rule, has room for PROMPT_ROOM more; with it TTFT of these rows is predicted worse.)
  Beside quantized weights the generator gives its servers a KV cache of 8 bits (sdk/models/helpers.py, and
  `kv_cache_dtype` of its rules), which no row says.
- With NIM 1.0, load generators send ROUNDS requests a client. The first round and LATER_ROUNDS more are
  replayed, and the means weighted as if there were all. The load generator takes CLIENT_S of a TTFT itself, which is no
  part of the server, and output lengths spread by SPREAD around those of the row, so that clients of equal requests do
  not return together for ever. ROUNDS and SPREAD are fitted, CLIENT_S was set by eye.
- `replicas` are servers that share the load evenly; one of them is replayed with its part, and the throughput is that
  of all.
- Of InferenceX: see inferencex_rows.
- At most MAX_TOKENS tokens of output are replayed.
- An open loop (`rate`) runs up to MAX_REQUESTS requests at constant intervals, or as many Poisson arrivals.
- `all_at_once` offers `num_requests` at the start.
- `distinct_prompts` are repeated in turn, with KV cache reuse. The first request with each of them counts as much as it
  does among all that the source sent.
- `lengths` names pairs of prompt and output length in the file (or is a list of them), which requests take in turn
  instead of `input` and `output`.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.inferencex_rows import is_inferencex, standard_row
from ifbbench.build.engines import engine_defaults
from ifbbench.errors import InputError
from ifbbench.models.named_models import built_in_models
from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig
from ifbbench.settings.dtypes import DTYPE_BYTES
from ifbbench.settings.engines import SGLANG, VLLM
from ifbbench.simulated.engines import overhead_names
from ifbbench.workload.formats import write_trace
from ifbbench.workload.trace import PREFIX_BLOCK, TraceRequest

REQUESTS_PER_CLIENT = 10
ROUNDS, LATER_ROUNDS = 14, 3
MAX_TOKENS = 1_500_000
# With prefill and decode apart an iteration costs more, that of each replica: as many tokens, but rounds at least.
MAX_TOKENS_APART, MIN_ROUNDS, MIN_ROUNDS_APART, MANY_CLIENTS = 150_000, 2, 3, 512
SPREAD = 0.1
CLIENT_S = 0.04
# Draft tokens of a step with multi-token prediction, where a row does not say: those of the engines' own recipes.
MTP_DRAFTS = 3
ONE_BY_ONE = "tensorrt-llm"
AICONFIGURATOR, PROMPT_ROOM = "aiconfigurator-gap", 1500
SGLANG_DEFAULTS = "0.5.1.post1"
MAX_REQUESTS = 1000
METRICS = ("itl", "tpot", "ttft", "throughput")
LATENCIES = ("itl", "tpot", "ttft")
MEAN, MEDIAN = "mean", "p50"
# An ITL above so many times the TPOT is of chunks with several tokens, and is not compared.
MAX_ITL_OVER_TPOT = 1.5
NEEDED = ("engine", "gpu", "model", "dtype")
MILLISECONDS = 1000.0
# Nearest data type here of some names of data types of weights.
NEAREST_DTYPES = {"mxfp4": "int4", "nvfp4": "int4", "w4a16": "int4", "awq": "int4", "fp8_block": "fp8"}
# Models with checkpoints of 8 bits that have a scale for each block of weights.
WITH_BLOCK_SCALES = ("qwen3", "deepseek")
# Overheads of compiled engines behind NIM, by generation of the row.
NIM = {"2024": "tensorrt-llm-nim", "current": "tensorrt-llm-compiled"}
# Versions that have the overhead of another one.
SAME_OVERHEAD = {"tensorrt-llm-1.0": "tensorrt-llm-1.1"}
# Data types of weights beside which AICONFIGURATOR's generator gives servers of TensorRT-LLM a KV cache of 8 bits.
WITH_EIGHT_BIT_CACHE = ("fp8", "fp8_block", "nvfp4")
Row = Mapping[str, Any]
SETTINGS = {field.name for field in dataclasses.fields(RunConfig)}


class NotReplayable(ValueError):
    """Why a row cannot be replayed."""


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
        if is_inferencex(row):
            row = standard_row(row)
        named = row.get("lengths")
        pairs = named if isinstance(named, list) else data.get("lengths", {}).get(named)
        if pairs:
            prompt_lens, output_lens = zip(*pairs, strict=True)
            row = {"input": round(fmean(prompt_lens)), "output": round(fmean(output_lens)), **row, "pairs": pairs}
        found.append(row)
    return found


def engine_name(row: Row) -> str | None:
    """The engine overhead of a row: that of its version, else that of its engine; None without one. Engines of 2024
    have only those of their versions."""
    whole = f"{row['engine']}-{row.get('version') or ''}".lower()
    if whole.startswith("tensorrt-llm-nim"):
        return NIM[str(row.get("generation"))]
    for version, other in SAME_OVERHEAD.items():
        whole = whole.replace(version, other)
    names = [name for name in overhead_names() if whole.startswith(name) and (is_current(row) or name != row["engine"])]
    return max(names, key=len, default=None)


def statistic_of(row: Row, metric: str) -> str | None:
    """The statistic of a latency that is compared; None if the row has neither mean nor median."""
    known = row.get(f"{metric}_ms") or {}
    return next((name for name in (MEAN, MEDIAN) if known.get(name) is not None), None)


def measured_figures(row: Row) -> dict[str, float]:
    """The figures of a row. A closed loop without throughput has that of Little's law from its mean latencies."""
    found = {}
    for metric in LATENCIES:
        statistic = statistic_of(row, metric)
        if statistic and (metric == "ttft" or row["output"] > 1):
            found[metric] = row[f"{metric}_ms"][statistic] / MILLISECONDS
    if "tpot" in found and found.get("itl", 0.0) > MAX_ITL_OVER_TPOT * found["tpot"]:
        del found["itl"]
    if row.get("output_tokens_per_s") is not None:
        found["throughput"] = row["output_tokens_per_s"]
    elif clients_of(row) and statistic_of(row, "itl") == statistic_of(row, "ttft") == MEAN and "itl" in found:
        found["throughput"] = replicas_of(row) * little(row, found)
    return found


def replicas_of(row: Row) -> int:
    return row.get("replicas") or 1


def degree_of(row: Row) -> int:
    """GPUs of tensor parallelism."""
    return int(row.get("tp") or row["num_gpus"] // replicas_of(row))


def clients_of(row: Row) -> int | None:
    """Clients of one replica; None with other arrivals."""
    clients = row.get("concurrency")
    return clients and -(-clients // replicas_of(row))


def check(row: Row) -> None:
    """NotReplayable if the row is not one deployment, or does not say what is needed."""
    if missing := [name for name in NEEDED if not row.get(name)]:
        raise NotReplayable(f"the row does not say {', '.join(missing)}")
    if row.get("disaggregated") and not row.get("sides"):
        raise NotReplayable(
            "prefill and decode run on different GPUs, and the row does not say which, or its recipe is not known"
        )
    if not (row.get("concurrency") or row.get("rate") or row.get("num_requests")):
        raise NotReplayable("the row has neither clients nor a rate nor a number of requests")
    if not (row.get("pairs") or (row.get("input") and row.get("output"))):
        raise NotReplayable("the row does not say the lengths")


def config_of(row: Row, model: str) -> RunConfig:
    """The settings of a run like the row's. model: a built-in name, or a file."""
    engine, concurrency, replicas = engine_name(row), clients_of(row), replicas_of(row)
    tp_size, rate = degree_of(row), row.get("rate")
    longest_prompt = max(prompt_len for prompt_len, _ in _pairs(row))
    longest = max(prompt_len + output_len for prompt_len, output_len in _pairs(row))
    values: dict[str, Any] = {
        "device": f"sim:{row['gpu']}",
        "model": model,
        "dtype": _dtype(row),
        "tp_size": tp_size,
        "pp_size": max(1, (row.get("num_gpus") or tp_size) // tp_size // replicas),
        "engine_overhead": engine,
        "max_seq_len": round(longest * (1 + SPREAD)) + 1,
        "concurrency": concurrency,
        "request_rate": rate and rate / replicas,
        "enable_exp_delays": row.get("arrival") == "poisson",
        "enable_kv_cache_reuse": bool(row.get("distinct_prompts")),
    }
    values |= _sides(row["sides"]) if row.get("sides") else {}
    values |= _parallelism(row)
    values |= {name: row[name] for name in ("max_num_tokens", "max_batch_size", "kv_cache_dtype") if row.get(name)}
    if engine == VLLM:
        values |= {"engine": VLLM, "gpu_memory_utilization": 0.9, "async_scheduling": row.get("overlap", True)}
        if row.get("source") == AICONFIGURATOR:
            room = longest_prompt + (concurrency or 0) + PROMPT_ROOM
            values |= {"max_num_tokens": room, "async_scheduling": False}
    elif engine == SGLANG:
        values |= {"engine": SGLANG, "reserve_by_ratio": True}
        if row.get("source") == AICONFIGURATOR and row["version"] != SGLANG_DEFAULTS:
            values |= {"max_prefill_tokens": longest_prompt + PROMPT_ROOM, "enable_mixed_chunk": True}
            values["disable_overlap_schedule"] = True
    elif row["engine"] == ONE_BY_ONE and concurrency and row.get("source") == AICONFIGURATOR:
        one_prompt = longest_prompt + concurrency
        values["max_num_tokens"] = min(one_prompt, values.get("max_num_tokens", one_prompt))
        if values["dtype"] in WITH_EIGHT_BIT_CACHE:
            values.setdefault("kv_cache_dtype", "fp8")
    values |= row.get("settings", {})
    usual = engine_defaults(values)
    if values["dtype"] not in ("fp8", "fp8_block", "int4", "nvfp4"):
        usual.pop("kv_cache_dtype", None)
    if row.get("chunked_context") is not None:
        usual.setdefault("enable_chunked_context", row["chunked_context"])
    return RunConfig(**usual | values)


def _dtype(row: Row) -> str:
    """The data type of the weights, or the nearest one that a run can have."""
    dtype = str(row["dtype"]).lower()
    if dtype == "fp8" and str(row["model"]).startswith(WITH_BLOCK_SCALES):
        dtype = "fp8_block"
    return NEAREST_DTYPES.get(dtype, dtype) if dtype not in DTYPE_BYTES else dtype


def _parallelism(row: Row) -> dict[str, Any]:
    """Expert and attention data parallelism, and draft tokens. NotReplayable where a run has no such setting."""
    degree, is_apart = degree_of(row), bool(row.get("sides"))
    wanted = {
        "ep_size": row.get("ep") if (row.get("ep") or 1) > 1 and not is_apart else None,
        "attention_dp_size": degree if row.get("dp_attention") and not is_apart else None,
        "draft_mtp": row.get("num_drafts") or (MTP_DRAFTS if row.get("drafts") == "mtp" else None),
    }
    values = {name: value for name, value in wanted.items() if value}
    if unknown := sorted(values.keys() - SETTINGS):
        raise NotReplayable(f"runs have no {', '.join(unknown)}")
    return values


def _sides(sides: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """The settings of a fleet with prefill and decode apart."""
    found: dict[str, Any] = {"tp_size": 1, "pp_size": 1}
    for side, own in sides.items():
        found[f"{side}_replicas"] = own["workers"]
        found[side] = ",".join(f"{name}={value}" for name, value in own.items() if name != "workers")
    return found


def _pairs(row: Row) -> Sequence[tuple[int, int]]:
    """Prompt and output lengths that the requests of a row take in turn."""
    return row.get("pairs") or [(row["input"], row["output"])]


def requests_of(row: Row) -> list[TraceRequest]:
    """The requests of a row, those of one replica."""
    clients, distinct = clients_of(row), row.get("distinct_prompts")
    count = -(-(row.get("num_requests") or MAX_REQUESTS) // replicas_of(row))
    if clients:
        usual = 1 + (LATER_ROUNDS if clients > 2 else ROUNDS)
        count = clients * min(_affordable_rounds(row, clients), REQUESTS_PER_CLIENT if is_current(row) else usual)
    elif row.get("rate"):
        count = min(count, MAX_REQUESTS)
    blocks = -(-row["input"] // PREFIX_BLOCK)
    pairs = _pairs(row)
    spread = SPREAD if clients and row.get("source") != AICONFIGURATOR and not row.get("pairs") else 0.0
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


def _affordable_rounds(row: Row, clients: int) -> int:
    """Requests of a client that are replayed at most. Throughput and means take the rounds that are left out to be as
    the later ones."""
    is_apart = bool(row.get("sides"))
    least = MIN_ROUNDS_APART if is_apart and clients <= MANY_CLIENTS else MIN_ROUNDS
    return max(int((MAX_TOKENS_APART if is_apart else MAX_TOKENS) // row["output"] // clients), least)


def predict(row: Row, models: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> dict[str, float]:
    """The figures predicted for a row: those of METRICS, and `power_w_per_gpu`. models: config.json of models that are
    not built in. changes: other settings. NotReplayable with the reason."""
    check(row)
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        model = row["model"]
        if model not in built_in_models():
            if model not in models:
                raise NotReplayable(f"model {model} is not known")
            model = str(folder / "config.json")
            Path(model).write_text(json.dumps(models[row["model"]]))
        config = config_of(row, model)
        requests = requests_of(row)
        write_trace(iter(requests), folder / "trace.jsonl")
        config = config.with_values(
            output=str(folder / "run"), quiet=True, iteration_stats_every=1_000_000, **changes or {}
        )
        try:
            run = run_trace(str(folder / "trace.jsonl"), config)
        except InputError as error:
            raise NotReplayable(str(error)) from error
        if run.failed:
            raise NotReplayable(f"{run.failed} of {len(requests)} requests fail")
        lines = (folder / "run" / "requests.jsonl").read_text().splitlines()
    return figures_of(row, [json.loads(line) for line in lines], run.summary)


def figures_of(row: Row, requests: Iterable[Row], summary: Row) -> dict[str, float]:
    """The latencies in seconds in the statistic that the row has, and output tokens/s: over all requests. Those of the
    first round count by their share of all that the source sent. summary: of the run."""
    ordered = sorted(requests, key=lambda request: request["request_id"])
    clients = clients_of(row)
    if clients:
        first, share = clients, 1 / (REQUESTS_PER_CLIENT if is_current(row) else ROUNDS)
    else:
        first = row.get("distinct_prompts") or 0
        share = first / max(row.get("num_requests_published", 0), len(ordered))
    parts = [(ordered[:first], share), (ordered[first:], 1 - share)] if first else [(ordered, 1.0)]
    means, found = {}, {}
    for metric, field in (("ttft", "ttft_s"), ("tpot", "tpot_s"), ("itl", "tpot_s")):
        means[metric] = sum(weight * _mean(request[field] for request in part) for part, weight in parts)
        if row["output"] > 1 or metric == "ttft":
            is_median = statistic_of(row, metric) == MEDIAN
            found[metric] = _median(parts, field) if is_median else means[metric]
    if "itl" in found and statistic_of(row, "tpot"):
        found["itl"] = summary["itl_s"][statistic_of(row, "itl") or MEAN]
    if "energy" in summary:
        found["power_w_per_gpu"] = summary["energy"]["power_w_per_gpu"]
    if clients:
        client_s = row.get("client_s", 0.0 if is_current(row) else CLIENT_S)
        found["ttft"] += client_s
        if "waiting_s" in row:
            found["throughput"] = of_all_rounds(row, ordered)
            return found
        found["throughput"] = replicas_of(row) * little(row, {"ttft": means["ttft"] + client_s, "itl": means["itl"]})
    elif not row.get("rate") or _are_all(row, len(ordered)):
        span_s = max(request["arrival_s"] + request["e2e_s"] for request in ordered)
        found["throughput"] = replicas_of(row) * sum(request["output_len"] for request in ordered) / span_s
    return found


def of_all_rounds(row: Row, requests: Sequence[Row]) -> float:
    """Output tokens/s from the first request to the last answer of all that the source sent, and `waiting_s` of the
    row, in which nothing ran. Rounds that were not replayed take as long as the latest half of the others."""
    clients, later = clients_of(row) or 1, requests[len(requests) // 2 :]
    span_s = max(request["arrival_s"] + request["e2e_s"] for request in requests)
    missing = row["num_requests"] - len(requests)
    tokens = sum(request["output_len"] for request in requests)
    if missing > 0:
        span_s += missing / clients * fmean(request["e2e_s"] for request in later)
        tokens += missing * fmean(request["output_len"] for request in later)
    return float(tokens / (span_s + row["waiting_s"]))


def _are_all(row: Row, count: int) -> bool:
    """Whether as many requests as the source sent are replayed, so that the time of the last ones counts as much."""
    sent = row.get("num_requests_published") or row.get("num_requests")
    return sent is not None and count * replicas_of(row) >= sent


def _mean(values: Iterable[float | None]) -> float:
    """The mean of those that are not None; requests of one output token have no gap."""
    return fmean([value for value in values if value is not None] or [0.0])


def _median(parts: Sequence[tuple[Sequence[Row], float]], field: str) -> float:
    """The value that requests with half of all weight are below. parts: requests, and the weight of them together."""
    weighted = sorted(
        (request[field], weight / len(part)) for part, weight in parts for request in part if request[field] is not None
    )
    half, passed = sum(weight for _, weight in weighted) / 2, 0.0
    for value, weight in weighted:
        passed += weight
        if passed >= half:
            return float(value)
    return 0.0


def little(row: Row, figures: Mapping[str, float]) -> float:
    """Output tokens/s of a closed loop by Little's law, from its mean latencies: of one replica."""
    seconds = figures["ttft"] + (row["output"] - 1) * figures.get("itl", 0.0)
    return float((clients_of(row) or 0) * row["output"] / seconds)
