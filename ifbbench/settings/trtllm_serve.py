"""The command line of `trtllm-serve` (TensorRT-LLM 1.x), and the YAML of arguments of TensorRT-LLM's LLM class."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ifbbench.errors import InputError
from ifbbench.settings.config import settings
from ifbbench.settings.config_file import parse_config_file
from ifbbench.settings.engines import TRTLLM
from ifbbench.settings.fields import boolean, integer, located
from ifbbench.settings.names import setting
from ifbbench.settings.server import (
    ACCEPTANCE,
    Given,
    HasExperts,
    Line,
    Server,
    of_all_ranks,
    of_each_rank,
    uneven_limits,
)

# The settings that `trtllm-serve` has, each with its name there.
OPTIONS: Mapping[str, str] = {
    "max_seq_len": "max-seq-len",
    "max_batch_size": "max-batch-size",
    "max_num_tokens": "max-num-tokens",
    "max_beam_width": "max-beam-width",
    "enable_chunked_context": "enable-chunked-prefill",
    "kv_cache_free_gpu_mem_fraction": "free-gpu-memory-fraction",
    "kv_cache_dtype": "kv-cache-dtype",
    "tp_size": "tp-size",
    "pp_size": "pp-size",
    "ep_size": "ep-size",
}
ARGUMENTS = "extra-llm-api-options"
# Arguments of the LLM class, where a setting has another name.
ARGUMENT_NAMES = {
    "enable_chunked_prefill": "enable_chunked_context",
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "moe_expert_parallel_size": "ep_size",
    "scheduler_config.capacity_scheduler_policy": "policy",
    "scheduler_config.context_chunking_policy": "context_chunking_policy",
    "attention_dp_config.enable_balance": "attention_dp_enable_balance",
    "attention_dp_config.timeout_iters": "attention_dp_time_out_iters",
    "attention_dp_config.batching_wait_iters": "attention_dp_batching_wait_iters",
    "kv_cache_config.dtype": "kv_cache_dtype",
    **{
        f"kv_cache_config.{name}": name
        for name in (
            "enable_block_reuse",
            "free_gpu_memory_fraction",
            "max_tokens",
            "host_cache_size",
            "max_attention_window",
            "sink_token_length",
            "enable_partial_reuse",
            "copy_on_partial_reuse",
            "tokens_per_block",
        )
    },
}
ATTENTION_DP, DRAFTS = "enable_attention_dp", "speculative_config"
# The arguments below it are members of enumerations, which are written in capitals.
OF_ENUMERATIONS = "scheduler_config"
# Limits of each rank with attention data parallelism; ours are those of all ranks.
OF_A_RANK = ("max_batch_size", "max_num_tokens", "max_tokens_in_paged_kvcache")
# How many draft tokens a step has, by names of several versions.
DRAFT_TOKENS = ("num_nextn_predict_layers", "max_draft_len")


class Arguments(NamedTuple):
    """What a YAML file of arguments of the LLM class means.

    ignored: arguments without a setting.
    notes: sentences.
    """

    values: dict[str, Any]
    has_attention_dp: bool
    ignored: list[str]
    notes: list[str]


def read_arguments(path: Path) -> Arguments:
    """The settings in a YAML file of arguments of the LLM class. InputError for drafts that are not simulated."""
    taken = {name: one.name for one in settings() for name in (one.name, *one.aliases)}
    found = Arguments({}, False, [], [])
    drafts = dict[str, Any]()
    with located(str(path)):
        for name, value in _flat(parse_config_file(path)):
            own_name = taken.get(ARGUMENT_NAMES.get(name, name))
            if name.partition(".")[0] == DRAFTS:
                drafts[name.partition(".")[2]] = value
            elif name == "disable_overlap_scheduler":
                found.values["overlap"] = None if boolean(value, name, from_text=True) else "async"
            elif name == ATTENTION_DP:
                found = found._replace(has_attention_dp=boolean(value, name, from_text=True))
            elif own_name is not None and value not in ("auto", "null", ""):
                found.values[own_name] = value
            elif own_name is None:
                found.ignored.append(name)
        if drafts:
            _take_drafts(drafts, found)
    return found


def arguments_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the LLM class, nested, that say these settings; those without an argument are left out."""
    arguments = {setting(own).name: argument for argument, own in ARGUMENT_NAMES.items()}
    found, of_a_rank = dict[str, Any](), dict[str, Any]()
    if (ranks := values.get("attention_dp_size") or 1) > 1:
        found[ATTENTION_DP] = True
        of_a_rank = of_each_rank(values, OF_A_RANK, ranks)
    if values.get("draft_mtp") is not None:
        found[DRAFTS] = {"decoding_type": "MTP", DRAFT_TOKENS[0]: values["draft_mtp"]}
    for name, value in {**values, **of_a_rank}.items():
        section, _, key = arguments.get(name, name if name in OPTIONS else "").rpartition(".")
        if key:
            table = found.setdefault(section, {}) if section else found
            is_member = section == OF_ENUMERATIONS and isinstance(value, str)
            table[key] = value.upper() if is_member else value
    return found


def remarks_of_arguments(values: Mapping[str, Any]) -> list[str]:
    """What `arguments_of` these settings does not say, one sentence each."""
    return uneven_limits(values, OF_A_RANK, {name: name for name in OF_A_RANK})


def _take_drafts(given: Mapping[str, Any], found: Arguments) -> None:
    """The layer for multi-token prediction, or the EAGLE head."""
    kind = str(given.get("decoding_type", "")).lower()
    if kind not in ("mtp", "eagle", "eagle3"):
        raise InputError(
            f"{DRAFTS}.decoding_type: {kind or 'nothing'} is not simulated; expected MTP or Eagle. Leave it out, or "
            "see --draft_model and --draft_ngram."
        )
    count = next((given[name] for name in DRAFT_TOKENS if name in given), 1)
    found.values["draft_mtp"] = integer(count, f"{DRAFTS}: draft tokens", 1, from_text=True)
    found.notes.append(f"{DRAFTS}: {ACCEPTANCE}")


def with_attention_dp(values: dict[str, Any], has_attention_dp: bool) -> dict[str, Any]:
    """`values` with the limits of all ranks, where each has requests of its own."""
    ranks = setting("tp_size").check(values.get("tp_size", 1))
    if not has_attention_dp or ranks == 1:
        return values
    return values | {"attention_dp_size": ranks} | of_all_ranks(values, OF_A_RANK, ranks)


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of nested mappings."""
    if not isinstance(value, dict):
        raise InputError("expected a table of arguments, one `name: value` each.")
    for name, entry in value.items():
        if isinstance(entry, dict):
            yield from _flat(entry, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", entry


def _join(given: Given, line: Line, _has_experts: HasExperts) -> None:
    """The arguments in a file win over the options."""
    if (path := given.get(ARGUMENTS)) is None:
        return
    found = read_arguments(Path(str(path)))
    line.values.update({name: setting(name).check(value) for name, value in found.values.items()})
    line.values.update(with_attention_dp(line.values, found.has_attention_dp))
    line.not_simulated.extend(f"{ARGUMENTS}: {name}" for name in found.ignored)
    line.notes.extend(found.notes)
    if found.has_attention_dp:
        line.notes.append(f"{ATTENTION_DP}: limits of requests, tokens and cache are those of the ranks together.")


TRTLLM_SERVE = Server(
    engine=TRTLLM,
    version="1",
    usage="trtllm-serve MODEL",
    starts=(("trtllm-serve", "serve"), ("trtllm-serve",)),
    options=OPTIONS,
    aliases={
        "tensor-parallel-size": "tp-size",
        "pipeline-parallel-size": "pp-size",
        "moe-expert-parallel-size": "ep-size",
        "cp-size": "context-parallel-size",
        "cluster-size": "moe-cluster-parallel-size",
        "kv-cache-free-gpu-memory-fraction": "free-gpu-memory-fraction",
        "config": ARGUMENTS,
    },
    joint=frozenset((ARGUMENTS,)),
    join=_join,
    kv_dtypes={"fp8": "fp8"},
)
