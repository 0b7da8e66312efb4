"""Command lines of `vllm serve`: the settings that one means, and the line of some settings (options of vLLM 0.32)."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ifbbench.errors import InputError
from ifbbench.settings.fields import boolean, did_you_mean, located, number
from ifbbench.settings.names import setting, snake_case

# The settings that `vllm serve` has, each with vLLM's name.
OPTIONS: Mapping[str, str] = {
    "max_seq_len": "max-model-len",
    "max_batch_size": "max-num-seqs",
    "max_num_tokens": "max-num-batched-tokens",
    "max_num_scheduled_tokens": "max-num-scheduled-tokens",
    "max_num_active_seqs": "max-num-active-seqs",
    "max_queue_size": "max-num-queued-reqs",
    "scheduling_policy": "scheduling-policy",
    "enable_chunked_context": "enable-chunked-prefill",
    "long_prefill_token_threshold": "long-prefill-token-threshold",
    "long_prefill_token_threshold_adaptive": "long-prefill-token-threshold-adaptive",
    "scheduler_reserve_full_isl": "scheduler-reserve-full-isl",
    "watermark": "watermark",
    "async_scheduling": "async-scheduling",
    "enable_kv_cache_reuse": "enable-prefix-caching",
    "tokens_per_block": "block-size",
    "gpu_memory_utilization": "gpu-memory-utilization",
    "num_gpu_blocks_override": "num-gpu-blocks-override",
    "kv_cache_dtype": "kv-cache-dtype",
    "dtype": "dtype",
    "tp_size": "tensor-parallel-size",
    "pp_size": "pipeline-parallel-size",
    "seed": "seed",
}
SHORT = {"-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-q": "quantization"}
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float": "float32", "float32": "float32"}
KV_DTYPES = {"fp8": "fp8", "fp8_e4m3": "fp8", "bfloat16": "bf16", "float16": "fp16"}
# What no schedule and no time depends on here: options with a value, and options without.
_IGNORED = (
    "host port api-key served-model-name tokenizer tokenizer-mode revision tokenizer-revision download-dir load-format "
    "chat-template uvicorn-log-level allowed-origins ssl-keyfile ssl-certfile max-logprobs root-path tool-call-parser "
    "reasoning-parser chat-template-content-format distributed-executor-backend max-log-len generation-config hf-token "
    "hf-overrides otlp-traces-endpoint"
)
_IGNORED_FLAGS = (
    "trust-remote-code enable-log-requests no-enable-log-requests disable-log-requests disable-log-stats "
    "enable-auto-tool-choice enable-request-id-headers disable-uvicorn-access-log enforce-eager skip-tokenizer-init "
    "enable-logging-iteration-details disable-custom-all-reduce enable-force-include-usage"
)
NO_EFFECT, NO_EFFECT_FLAGS = frozenset(_IGNORED.split()), frozenset(_IGNORED_FLAGS.split())
FLAGS = frozenset(name for name in OPTIONS if setting(name).type is bool)


class Line(NamedTuple):
    """What a command line means. values: by setting name, with --engine vllm. ignored: options without an effect."""

    values: dict[str, Any]
    ignored: list[str]


def read_line(text: str) -> Line:
    """The settings of a `vllm serve MODEL …` line. InputError for an option that would change what is measured and has
    no counterpart, and for an unknown one."""
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise InputError(f"the command line of vLLM cannot be split into words ({error}); check its quotes.") from error
    if words[:2] == ["vllm", "serve"]:
        words = words[2:]
    elif words[:1] == ["serve"]:
        words = words[1:]
    elif words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]:
        words = words[3:]
    else:
        raise InputError(f"{' '.join(words[:3])!r} is no command line of `vllm serve`; expected `vllm serve MODEL …`.")
    line = Line({"engine": "vllm"}, [])
    for name, value in _options(words):
        with located(f"--{name}" if name != "model" else "vllm serve"):
            _take(name, value, line)
    if "model" not in line.values:
        raise InputError("vllm serve: no model; expected `vllm serve MODEL …`.")
    return line


def write_line(values: Mapping[str, Any]) -> str:
    """The `vllm serve` line of these settings. Those that vLLM does not have are left out."""
    words = ["vllm", "serve", str(values.get("model", "MODEL"))]
    for name, option in OPTIONS.items():
        value = values.get(name)
        if value is None:
            continue
        if name in FLAGS:
            words.append(f"--{'' if value else 'no-'}{option}")
        else:
            words += [f"--{option}", _in_vllm(name, value)]
    return shlex.join(words)


def _options(words: list[str]) -> Iterator[tuple[str, str | bool]]:
    """Name and value of each option, the model among them; True or False of a flag."""
    own = {option: name for name, option in OPTIONS.items()}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            yield "model", word
            continue
        name, equals, value = word.partition("=")
        name = SHORT.get(name, snake_case(name.lstrip("-")).replace("_", "-"))
        positive = name.removeprefix("no-")
        if own.get(positive) in FLAGS or name in NO_EFFECT_FLAGS:
            is_given = bool(equals) or (bool(rest) and rest[0].lower() in ("true", "false"))
            is_on = boolean(value if equals else rest.pop(0), f"--{name}", from_text=True) if is_given else True
            is_setting = own.get(positive) in FLAGS
            yield (positive, is_on == (positive == name)) if is_setting else (name, is_on)
            continue
        if not equals:
            if not rest:
                raise InputError(f"--{name}: the value is missing.")
            value = rest.pop(0)
        yield name, value


def _take(name: str, value: str | bool, line: Line) -> None:
    """Add one option to `line`."""
    own = {option: item for item, option in OPTIONS.items()}
    if name == "model" and "model" not in line.values:
        line.values["model"] = value
    elif name in NO_EFFECT or name in NO_EFFECT_FLAGS:
        line.ignored.append(name)
    elif name in CONVERTED:
        line.values.update(CONVERTED[name](str(value)))
    elif name in own:
        line.values[own[name]] = setting(own[name]).check(value)
    else:
        raise InputError(
            "this option of vLLM has no counterpart here, and may change what is measured; leave it out."
            + did_you_mean(name, list(own))
        )


def _dtype(value: str) -> dict[str, Any]:
    return {} if value == "auto" else {"dtype": DTYPES.get(value, value)}


def _kv_dtype(value: str) -> dict[str, Any]:
    return {} if value == "auto" else {"kv_cache_dtype": KV_DTYPES.get(value, value)}


def _model_len(value: str) -> dict[str, Any]:
    """vLLM takes 8k (8,000) and 8K (8,192), and auto."""
    if value == "auto":
        return {}
    units = {"k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20}
    if value and value[-1] in units:
        return {"max_seq_len": int(number(value[:-1], "--max-model-len", from_text=True) * units[value[-1]])}
    return {"max_seq_len": setting("max_seq_len").check(value)}


def _quantization(value: str) -> dict[str, Any]:
    if value != "fp8":
        raise InputError(f"is {value}; expected fp8. Give the data type of the weights with --dtype.")
    return {"dtype": "fp8"}


def _speculation(value: str) -> dict[str, Any]:
    try:
        given = json.loads(value)
    except ValueError as error:
        raise InputError(f"is not valid JSON ({error}).") from error
    if not isinstance(given, dict) or given.get("method") != "ngram":
        raise InputError("expected an object with the method ngram; other kinds of drafts are not simulated.")
    known = {"num_speculative_tokens": "draft_len", "prompt_lookup_max": "draft_ngram"}
    return {known[name]: value for name, value in given.items() if name in known}


CONVERTED: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "dtype": _dtype,
    "kv-cache-dtype": _kv_dtype,
    "max-model-len": _model_len,
    "quantization": _quantization,
    "speculative-config": _speculation,
}


def _in_vllm(name: str, value: Any) -> str:
    """A value in vLLM's words."""
    if name == "dtype":
        return {"bf16": "bfloat16", "fp16": "float16"}.get(value, str(value))
    if name == "kv_cache_dtype":
        return {"bf16": "bfloat16", "fp16": "float16"}.get(value, str(value))
    return f"{value:g}" if isinstance(value, float) else str(value)
