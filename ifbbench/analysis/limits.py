"""The limits that bind iterations and hold requests: how each is named in tables, charts and sentences."""

from typing import NamedTuple

from ifbbench.rundir.metrics import BOUND_BY, WAITING_BEHIND, limit_waited_for


class LimitText(NamedTuple):
    """A limit, or another reason to wait. waits_for: what a request that it holds waits for. short: in a cell. setting:
    the one with the limit's size; empty if none has it."""

    name: str
    waits_for: str
    short: str
    setting: str = ""


LIMITS = {
    "batch_size": LimitText("batch size", "a batch slot", "slot", "max_batch_size"),
    "num_tokens": LimitText("token budget", "the token budget", "tok", "max_num_tokens"),
    "kv_blocks": LimitText("KV blocks", "KV blocks", "kv", "max_tokens_in_paged_kvcache"),
    "none": LimitText("no limit", "no limit", "none"),
    "head_of_line": LimitText("behind another request", "the request before it", "line"),
    "paused": LimitText("paused", "blocks after a pause", "paused"),
    "static_batch": LimitText("end of the static batch", "the static batch to end", "static"),
    "reuse_delay": LimitText("another request's prefix", "another request's prefix", "reuse"),
    "lora_pages": LimitText("LoRA pages", "LoRA pages", "lora", "lora_device_mem_fraction"),
    "beam_width": LimitText("a batch of its beam width", "a batch of its beam width", "beam"),
    "in_flight": LimitText("its iteration in flight", "its iteration in flight", "sent"),
    "concurrency": LimitText("place under --concurrency", "a place under --concurrency", "conc"),
}
# What is always shown of iterations, `none` last; other reasons are shown where they bound one.
BINDING = BOUND_BY
# Limits of each iteration's batch.
SIZES = ("batch_size", "num_tokens")


def limit_name(limit: str) -> str:
    """The limit in a table or a legend. A reason of a user's policy is its own name."""
    return LIMITS[limit].name if limit in LIMITS else limit


def waits_for(limit: str | None) -> str:
    """What follows "waits for" of a request that `limit` holds."""
    return LIMITS[limit].waits_for if limit in LIMITS else limit or "a decision that is not recorded"


def setting_of(limit: str) -> str:
    """The setting with the size of `limit`; empty if none has it."""
    return LIMITS[limit].setting if limit in LIMITS else ""


def window_name(size: str) -> str:
    """An attention window in a table or a legend. size: its tokens."""
    return f"window of {int(size):,} tokens"


def part_name(part: str) -> str:
    """A part of the attribution of a request's time, in a table."""
    if (limit := limit_waited_for(part)) is None:
        return part.replace("_", " ")
    if not part.startswith(WAITING_BEHIND):
        return "waiting for an iteration to begin" if limit == "none" else f"waiting for {waits_for(limit)}"
    if limit == "none":
        return "waiting behind another request"
    return f"waiting behind a request that waits for {waits_for(limit)}"
