"""The words of each engine for what runs did: its limits, its settings and its pauses, as people read them.

Files have one name for each fact under every engine; tables, charts, pages and sentences ask here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from ifbbench.rundir.metrics import BOUND_BY, WAITING_BEHIND, limit_waited_for
from ifbbench.settings.fields import as_text


class LimitText(NamedTuple):
    """A limit, or another reason to wait.

    waits_for: what a request that it holds waits for.
    short: the text in a cell of the timeline.
    column: the text in a column of a sweep's table.
    setting: the one with the limit's size; empty if none has it.
    """

    name: str
    waits_for: str
    short: str
    column: str = ""
    setting: str = ""


LIMITS = {
    "batch_size": LimitText("batch size", "a batch slot", "slot", "batch", "max_batch_size"),
    "num_tokens": LimitText("token budget", "the token budget", "tok", "tokens", "max_num_tokens"),
    "kv_blocks": LimitText("KV blocks", "KV blocks", "kv", "KV", "max_tokens_in_paged_kvcache"),
    "watermark": LimitText("watermark", "KV blocks above the watermark", "mark", "watermark", "watermark"),
    "full_prompt": LimitText(
        "full prompt reserved", "KV blocks for its full prompt", "full", "full prompt", "scheduler_reserve_full_isl"
    ),
    "prefill": LimitText("prompts first", "an iteration without prompts", "fill", "prompts"),
    "none": LimitText("no limit", "the next iteration", "none"),
    "head_of_line": LimitText("behind another request", "the request before it", "line"),
    "paused": LimitText("paused", "blocks after a pause", "paused"),
    "static_batch": LimitText("end of the static batch", "the static batch to end", "static", "static"),
    "reuse_delay": LimitText("another request's prefix", "another request's prefix", "reuse", "prefix"),
    "attention_dp": LimitText(
        "a prompt in each rank", "a prompt in each rank", "ranks", "ranks", "attention_dp_enable_balance"
    ),
    "lora_pages": LimitText("LoRA pages", "LoRA pages", "lora", "LoRA", "lora_device_mem_fraction"),
    "beam_width": LimitText("a batch of its beam width", "a batch of its beam width", "beam", "beams"),
    "in_flight": LimitText("its iteration in flight", "its iteration in flight", "sent"),
    "decode_blocks": LimitText("decode blocks", "KV blocks of a decode replica", "decode"),
    "not_logged": LimitText("not in the log", "a limit that its log does not name", "log?"),
    "concurrency": LimitText("place under --concurrency", "a place under --concurrency", "conc"),
}
# What is always shown of iterations, `none` last; other reasons are shown where they bound one.
BINDING = BOUND_BY
# Limits of each iteration's batch.
SIZES = ("batch_size", "num_tokens")


@dataclass(frozen=True)
class Words:
    """The words of an engine.

    pause, paused: what happens to a request that loses its KV blocks, as a noun and as a participle.
    skipped: what a request that generates and does not run is in a table, and what it does in a sentence.
    held: the time between its tokens in which it did not generate.
    chunked: word for prompts that are cut into chunks.
    block: what the KV cache is divided into.
    ahead: word for an iteration that is decided while the one before it runs.
    limits: texts of the limits, by their names in files.
    server: the one with the names of settings in its options; empty for ours.
    """

    pause: str = "pause"
    paused: str = "paused"
    skipped: tuple[str, str] = ("skipped", "keeps its blocks and is skipped")
    held: str = "held back, or computed again"
    chunked: str = "chunked context"
    block: str = "block"
    ahead: str = "asynchronous scheduling"
    limits: Mapping[str, LimitText] = field(default_factory=lambda: LIMITS)
    server: str = ""

    @property
    def pauses(self) -> str:
        return f"{self.pause}s"

    def phase(self, phase: str) -> str:
        """A phase of a request, as in a span, in a table or a legend."""
        return {"paused": self.paused, "skipped": self.skipped[0]}.get(phase, phase)

    def blocks(self, tokens_per_block: int | None) -> str:
        """What the KV cache holds, as a plural. A block of one token is that token."""
        return "tokens" if tokens_per_block == 1 else f"{self.block}s"

    def limit_name(self, limit: str) -> str:
        """The limit in a table or a legend. A reason of a user's policy is its own name."""
        return self.limits[limit].name if limit in self.limits else limit

    def waits_for(self, limit: str | None) -> str:
        """What follows "waits for" of a request that `limit` holds."""
        if limit is None:
            return "a decision that is not recorded"
        return self.limits[limit].waits_for if limit in self.limits else limit

    def short(self, limit: str) -> str:
        """The limit in a cell of the timeline."""
        return self.limits[limit].short if limit in self.limits else limit[:4]

    def column(self, limit: str) -> str:
        """The limit in a column of a sweep's table."""
        return (self.limits[limit].column if limit in self.limits else "") or limit

    def setting_name(self, limit: str) -> str:
        """The setting with the size of `limit`, as the engine calls it; empty if none has it."""
        return self.own_name(setting_of(limit))

    def own_name(self, setting: str) -> str:
        """A setting as the engine calls it."""
        return _options_of(self.server).get(setting, setting) if self.server else setting

    def with_values(self, settings: Mapping[str, Any]) -> str:
        """Settings and their values in a sentence."""
        return ", ".join(f"{self.own_name(name)} {as_text(value)}" for name, value in settings.items())

    def part_name(self, part: str) -> str:
        """A part of the attribution of a request's time, in a table."""
        if (limit := limit_waited_for(part)) is None:
            return self.phase(part).replace("_", " ")
        if not part.startswith(WAITING_BEHIND):
            return "waiting for an iteration to begin" if limit == "none" else f"waiting for {self.waits_for(limit)}"
        if limit == "none":
            return "waiting behind another request"
        return f"waiting behind a request that waits for {self.waits_for(limit)}"


TENSORRT_LLM = Words()
VLLM = Words(
    pause="pre-emption",
    paused="pre-empted",
    chunked="chunked prefill",
    limits=LIMITS
    | {
        "batch_size": LimitText("number of sequences", "a sequence slot", "seqs", "sequences", "max_batch_size"),
        "paused": LimitText("pre-empted", "blocks after a pre-emption", "pre-empted"),
    },
    server="vllm",
)
SGLANG = Words(
    pause="retraction",
    paused="retracted",
    skipped=("standing aside for prompts", "stands aside for prompts"),
    held="standing aside for prompts, or computed again",
    chunked="chunked prefill",
    block="page",
    ahead="overlap schedule",
    limits=LIMITS
    | {
        "batch_size": LimitText("running requests", "a place among the running", "run", "running", "max_batch_size"),
        "num_tokens": LimitText("chunk", "the chunk budget", "tok", "chunk", "max_num_tokens"),
        "kv_blocks": LimitText("KV tokens", "KV tokens", "kv", "KV", "max_tokens_in_paged_kvcache"),
        "paused": LimitText("retracted", "KV tokens after a retraction", "retracted"),
    },
    server="sglang",
)
OF_ENGINES = {"vllm": VLLM, "sglang": SGLANG}


@cache
def _options_of(server: str) -> dict[str, str]:
    """The options of a server by setting. Runs with TensorRT-LLM's words do not import command lines of servers."""
    from ifbbench.settings.servers import SERVERS

    return {name: option.replace("-", "_") for name, option in SERVERS[server].options.items()}


def words_of(*configs: Mapping[str, Any]) -> Words:
    """The words of the engine of these runs; TensorRT-LLM's where they have several engines, or one of a user's.

    configs: the settings of each run, by name.
    """
    engines = {config.get("engine") for config in configs}
    return OF_ENGINES.get(str(engines.pop()), TENSORRT_LLM) if len(engines) == 1 else TENSORRT_LLM


def setting_of(limit: str) -> str:
    """The setting with the size of `limit`, by its name in files; empty if none has it."""
    return LIMITS[limit].setting if limit in LIMITS else ""


def window_name(size: str) -> str:
    """An attention window in a table or a legend. size: its tokens."""
    return f"window of {int(size):,} tokens"
