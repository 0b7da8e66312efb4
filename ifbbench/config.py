"""Every setting, once: default, unit, range, help text and its names on each surface.

The command line, `run.json`, sweeps and error messages are made from these fields, so a setting that is not here
does not exist. `RunConfig` is what the user asked for, with None where the answer depends on the model or the device;
`ifbbench.replay.resolve` fills these in, and `run.json` holds every resolved value.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ifbbench.errors import InputError

POLICIES = ("guaranteed_no_evict", "max_utilization", "static_batch")
CHUNKING_POLICIES = ("first_come_first_served", "equal_progress")
DTYPES = ("float32", "bf16", "fp16")
DEFAULT_MAX_NUM_TOKENS = 8192
DEFAULT_TOKENS_PER_BLOCK = 32
DEFAULT_PRIORITY = 0.5


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of `RunConfig` as the surfaces see it: its name, type, default, range, help text and aliases."""

    name: str
    type: type
    default: Any
    help: str
    group: str
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: bool = False
    choices: tuple[str, ...] = ()
    open_choices: bool = False
    aliases: tuple[str, ...] = ()

    def check(self, value: Any) -> Any:
        """Return `value` as this setting's type, or raise InputError saying what was expected."""
        if value is None:
            if self.default is None:
                return None
            raise self._error(value)
        try:
            value = _convert(value, self.type)
        except (TypeError, ValueError, KeyError) as error:
            raise self._error(value) from error
        if self.choices and value not in self.choices and not (self.open_choices and ":" in value):
            raise self._error(value)
        if self.minimum is not None and (value < self.minimum or (self.exclusive_minimum and value == self.minimum)):
            raise self._error(value)
        if self.maximum is not None and value > self.maximum:
            raise self._error(value)
        return value

    def expected(self) -> str:
        """What a value must be, in words: `an integer of at least 1 (requests)`."""
        if self.choices:
            named = ", ".join(self.choices)
            return f"one of {named}" + (" or package.module:ClassName" if self.open_choices else "")
        words = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}[self.type]
        if self.minimum is not None:
            words += f" {'above' if self.exclusive_minimum else 'of at least'} {self.minimum:g}"
        if self.maximum is not None:
            words += f"{' and' if self.minimum is not None else ''} at most {self.maximum:g}"
        return words + (f" ({self.unit})" if self.unit else "")

    def _error(self, value: Any) -> InputError:
        return InputError(f"--{self.name}: {value!r} is not valid; expected {self.expected()}.")


def _convert(value: Any, kind: type) -> Any:
    if kind is bool:
        if isinstance(value, str):
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        return bool(value)
    if kind is int and isinstance(value, float) and not value.is_integer():
        raise ValueError(value)
    converted = kind(value)
    if kind is float and not math.isfinite(converted):
        raise ValueError("not a finite number")
    return converted


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
    seed: int = _setting(0, "Seed of prompts, arrivals, weights and sampling.", "replay",
                         minimum=0, aliases=("random_seed",))

    # Scheduling.
    policy: str = _setting("guaranteed_no_evict", "Capacity scheduler policy.", "scheduling",
                           choices=POLICIES, aliases=("scheduler_policy",))
    max_batch_size: int | None = _setting(None, "Most requests in one batch. Default: 16 on CPU, else 2048.",
                                          "scheduling", minimum=1, unit="requests")
    max_num_tokens: int = _setting(DEFAULT_MAX_NUM_TOKENS, "Most tokens in one iteration's batch.", "scheduling",
                                   minimum=1, unit="tokens")
    enable_chunked_context: bool = _setting(False, "Split prompts into context chunks that fill the token budget.",
                                            "scheduling")
    context_chunking_policy: str = _setting("first_come_first_served", "How the token budget is split among chunks.",
                                            "scheduling", choices=CHUNKING_POLICIES)
    context_chunk_unit: int | None = _setting(None, "Chunks are multiples of this. Default: tokens_per_block.",
                                              "scheduling", minimum=1, unit="tokens")
    max_seq_len: int | None = _setting(None, "Longest prompt plus output. Default: the model's.", "scheduling",
                                       minimum=2, unit="tokens")
    max_input_len: int | None = _setting(None, "Longest prompt. Default: max_seq_len - 1, and without chunked "
                                               "context at most max_num_tokens.", "scheduling",
                                         minimum=1, unit="tokens")

    # KV cache.
    tokens_per_block: int = _setting(DEFAULT_TOKENS_PER_BLOCK, "Tokens in one KV cache block.", "kv cache",
                                     minimum=1, unit="tokens")
    max_tokens_in_paged_kvcache: int | None = _setting(None, "Size of the paged KV cache. Default: from free memory.",
                                                       "kv cache", minimum=1, unit="tokens")
    kv_cache_free_gpu_mem_fraction: float = _setting(0.9, "Share of free memory that the KV cache may take.",
                                                     "kv cache", minimum=0.0, exclusive_minimum=True, maximum=0.99,
                                                     aliases=("free_gpu_memory_fraction",))

    # Execution.
    device: str = _setting("auto", "auto, cpu, cuda, or null (an executor that answers at once).", "execution",
                           choices=("auto", "cpu", "cuda", "null"))
    model: str = _setting("tiny", "A built-in model (tiny), or a directory with config.json and safetensors.",
                          "execution")
    dtype: str = _setting("float32", "Data type of weights and KV cache.", "execution", choices=DTYPES)
    temperature: float = _setting(0.0, "Sampling temperature; 0 is greedy.", "execution", minimum=0.0)
    top_k: int = _setting(0, "Sample among the k most likely tokens; 0 is all.", "execution", minimum=0)
    top_p: float = _setting(1.0, "Sample among the most likely tokens of this joint probability.", "execution",
                            minimum=0.0, exclusive_minimum=True, maximum=1.0)
    stop_at_end_token: bool = _setting(False, "End a request at the model's end token too, not only at its recorded "
                                              "output length.", "execution")

    # Recording.
    output: str | None = _setting(None, "Run directory. Default: results/<name>.", "recording")
    overwrite: bool = _setting(False, "Replace an existing run directory.", "recording")
    output_csv: str | None = _setting(None, "Also write gptManagerBenchmark's CSV of figures here.", "recording")
    responses_json: str | None = _setting(None, "Also write the generated tokens of each request here.", "recording",
                                          aliases=("responses_json_file",))
    quiet: bool = _setting(False, "No progress line and no tables.", "recording")

    def __post_init__(self) -> None:
        for setting in settings():
            object.__setattr__(self, setting.name, setting.check(getattr(self, setting.name)))

    def with_values(self, **values: Any) -> "RunConfig":
        """A copy with some settings changed; every name must be a setting's own name."""
        return dataclasses.replace(self, **values)

    def as_dict(self) -> dict[str, Any]:
        """Setting name to value, in the order of definition."""
        return dataclasses.asdict(self)


@cache
def settings() -> tuple[Setting, ...]:
    """All settings in the order of `RunConfig`."""
    hints = typing.get_type_hints(RunConfig)
    return tuple(
        Setting(name=item.name, type=_plain_type(hints[item.name]), default=item.default, **item.metadata)
        for item in dataclasses.fields(RunConfig)
    )


def setting(name: str) -> Setting:
    """The setting called `name` (own name or alias, dashes or underscores); InputError lists near names if unknown."""
    wanted = name.replace("-", "_")
    for candidate in settings():
        if wanted in (candidate.name, *candidate.aliases):
            return candidate
    near = difflib.get_close_matches(wanted, [item.name for item in settings()], n=3, cutoff=0.4)
    hint = f" Did you mean {', '.join(near)}?" if near else " See `ifbbench run --help`."
    raise InputError(f"{name!r} is not a setting.{hint}")


def from_mapping(values: Mapping[str, Any]) -> RunConfig:
    """A RunConfig from names (own or alias) and values, texts included."""
    return RunConfig(**{setting(name).name: value for name, value in values.items()})


def _plain_type(hint: Any) -> Any:
    """int for `int | None`, and likewise; plain types as they are."""
    if isinstance(hint, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint
