"""Settings of a replay: which requests, and when they arrive."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from ifbbench.settings.bounds import MAX_BATCH, MAX_BEAMS, MAX_REPLICAS, MAX_SPAN_S, MAX_WAIT_MS
from ifbbench.settings.fields import declare, unexpected
from ifbbench.settings.objectives import parse_objectives

# Families of settings, which are asked for together.
READING, ARRIVALS = "reading", "arrivals"
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
# The value of `arrival` with which requests come in the iterations in which a recorded engine got them.
BY_ITERATION = "iteration"
DEFAULT_PRIORITY = 0.5

_replay = partial(declare, "replay")


def _objectives(value: Any) -> Any:
    """Objectives as one text, checked; also given as a list of texts."""
    if isinstance(value, list | tuple) and value and all(isinstance(one, str) for one in value):
        value = ",".join(value)
    if isinstance(value, str):
        parse_objectives(value)
    return value


def _replica(value: Any) -> Any:
    """A share K/N of the requests, checked."""
    if not isinstance(value, str):
        return value
    number, slash, count = value.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count) <= MAX_REPLICAS):
        raise unexpected("replica", value, f"K/N, such as 1/4, with K from 1 to N and N at most {MAX_REPLICAS}")
    return f"{int(number)}/{int(count)}"


@dataclass(frozen=True)
class ReplaySettings:
    """Settings of a replay: which requests, and when they arrive."""

    max_num_samples: int | None = _replay(
        None,
        "Replay only the first N requests of the trace.",
        minimum=1,
        unit="requests",
        elsewhere="num_requests num_prompts num_samples n_requests limit",
        family=READING,
        is_common=True,
    )
    skip_samples: int = _replay(
        0,
        "Leave out the first N requests of the trace; the next one arrives at 0. --max_num_samples counts from there.",
        minimum=0,
        unit="requests",
        family=READING,
    )
    time_scale: float = _replay(
        1.0, "Multiply recorded arrival times; 0 offers all requests at once.", minimum=0.0, is_common=True
    )
    request_rate: float | None = _replay(
        None,
        "Replace recorded arrivals by this rate.",
        above=0.0,
        unit="requests/s",
        elsewhere="rate qps rps",
        family=ARRIVALS,
        is_common=True,
    )
    enable_exp_delays: bool = _replay(
        False,
        "With --request_rate: exponential gaps (Poisson arrivals) instead of constant ones.",
        family=ARRIVALS,
        is_common=True,
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
        is_common=True,
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
        0,
        "Seed of prompts, arrivals, weights and sampling.",
        minimum=0,
        maximum=2**63 - 1,
        aliases=("random_seed",),
        is_common=True,
    )

    slo: str | None = _replay(
        None,
        "Service level objectives, NAME=TIME,…: a maximum of each request's ttft, tpot, e2e or queue_time "
        "(goodput counts the requests that meet all), or with a statistic (ttft.p99=2s) of the run. May be given "
        "several times.",
        convert=_objectives,
        is_list=True,
        elsewhere="goodput request_goodput",
        is_common=True,
    )
