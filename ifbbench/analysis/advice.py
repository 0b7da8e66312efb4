"""Which setting to change, and which would change nothing.

The advice follows from the waiting: the limit that caused most of it is the one to raise, and the figure that this
improves is the mean queue time. A limit is idle if the run shows that no decision depended on it, so that twice as much
changes nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ifbbench.analysis.explain import SETTING_OF
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.analysis.work import STATIC
from ifbbench.api.engine import build_engine
from ifbbench.config import POLICIES
from ifbbench.errors import InputError
from ifbbench.report.limits import waits_for
from ifbbench.settings import from_mapping

LIMITS = ("batch_size", "num_tokens", "kv_blocks", "lora_pages")
STATIC_BATCH = "static_batch"
# Waiting below this share of all requests' time is not worth a change of settings.
NOTABLE_SHARE = 0.02
HOW_TO_RAISE = {
    "batch_size": "raise --max_batch_size",
    "num_tokens": "raise --max_num_tokens",
    "kv_blocks": "give the KV cache more blocks (--max_tokens_in_paged_kvcache or --kv_cache_free_gpu_mem_fraction, a "
    "smaller --kv_cache_dtype, or more GPUs)",
    "lora_pages": "give the adapters more of the device (--lora_device_mem_fraction)",
    STATIC_BATCH: "let requests join a running batch (--type inflight_fused with --policy guaranteed_no_evict)",
}  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """What to change. limit, setting: what to raise; None if nothing holds requests back. Of static batches, `setting`
    is what makes them. figure: of `summary.json`, which that improves. idle: limits of which twice as much changes
    nothing."""

    text: str
    limit: str | None
    setting: str | None
    figure: str | None
    idle: list[str]


def advise(run: RecordedRun, waiting_s: Mapping[str, float], by_time: Mapping[str, float]) -> Advice:
    """waiting_s: request-seconds by the limit that caused them. by_time: share of the time that each limit bound."""
    lost = {limit: waiting_s.get(limit, 0.0) for limit in (*LIMITS, STATIC_BATCH)}
    # A paused request waits for blocks too, and computes again what it lost.
    rows = [row.get("attribution_s") or {} for row in run.row_of.values()]
    lost["kv_blocks"] += sum(row.get("paused", 0.0) + row.get("recompute", 0.0) for row in rows)
    total = sum(sum(row.values()) for row in rows)
    limit = max(lost, key=lost.__getitem__)
    idle = idle_limits(run, waiting_s)
    if not total or lost[limit] < NOTABLE_SHARE * total:
        return Advice(_nothing_to_change(lost, total), None, None, None, idle)
    text = f"Requests waited for {waits_for(limit)} during {lost[limit] / total:.0%} of their time"
    if limit in LIMITS:
        text += f"; this limit bound {by_time.get(limit, 0.0):.0%} of the run's time"
    text += f". To shorten the queue time, {HOW_TO_RAISE[limit]}."
    if idle:
        text += f" Raising {_listed(SETTING_OF[one] for one in idle)} changes nothing: no decision depended on it."
    if limit != "batch_size" and (peak := (run.data.summary or {}).get("peak_scheduled_requests")):
        text += f" At most {peak:,} requests ran at a time, of max_batch_size {run.config.get('max_batch_size')}."
    static = "type" if run.config.get("type") == STATIC else "policy"
    return Advice(text, limit, SETTING_OF.get(limit, static), "queue_time_s.mean", idle)


def idle_limits(run: RecordedRun, waiting_s: Mapping[str, float]) -> list[str]:
    """Limits that no decision depended on, so that with twice as much every request has the same times and causes.

    Limits of requests and tokens also decide how much memory is left for blocks, which prompts are refused, and how
    much of its output a paused request keeps; they are idle only where none of these changes. What a user's policy
    depends on is unknown.
    """
    config, iterations = run.config, run.iterations
    if config.get("policy") not in POLICIES or any(row.get("outcome") == "failed" for row in run.row_of.values()):
        return []
    blocks = int(run.data.run.get("num_kv_blocks") or 0)
    reuses = bool(config.get("enable_kv_cache_reuse"))
    is_chunked = bool(config.get("enable_chunked_context"))
    held = {*waiting_s, *iterations.limits, *(limit for _, limit in iterations.left_out_pairs)}
    is_full = iterations.active.max(initial=0) >= (config.get("max_batch_size") or 0)
    blocks_matter = "kv_blocks" in held or bool(iterations.pauses)
    # With reuse, a request that waits for another's prefix hides one behind it that has its chunk cut.
    room = int(config.get("max_num_tokens") or 0) - int(iterations.budget_used.max(initial=0))
    is_cut = "num_tokens" in held or (reuses and room < (config.get("context_chunk_unit") or 1))
    idle = []
    if "batch_size" not in held and not is_full and _pool_stays(run, "batch_size", blocks):
        idle.append("batch_size")
    if not is_cut and (is_chunked or not (iterations.pauses or reuses)) and _pool_stays(run, "num_tokens", blocks):
        idle.append("num_tokens")
    if blocks and not blocks_matter and not reuses:
        idle.append("kv_blocks")
    return idle


def _pool_stays(run: RecordedRun, limit: str, blocks: int) -> bool:
    """Whether twice the limit leaves as many KV blocks, or more than all requests that were active at a time need.

    Of a simulated device it can be calculated; the memory of a real one is not known here."""
    config, size = run.config, int(run.config.get("tokens_per_block") or 0)
    if not blocks or not size:
        return True
    if not str(config.get("device")).startswith("sim:"):
        return config.get("device") == "null"
    # All that memory has room for: a pool of the run's size that does not fit would be reported to the user.
    changed = {SETTING_OF[limit]: 2 * int(config[SETTING_OF[limit]]), SETTING_OF["kv_blocks"]: None}
    try:
        raised = build_engine(from_mapping(config | changed))
    except InputError:
        return False
    left = min(raised.limits.num_blocks, blocks)
    if left >= blocks or config.get("enable_kv_cache_reuse"):
        return left == blocks
    changes = np.zeros(max(span.last for spans in run.spans.values() for span in spans) + 2, np.int64)
    for request_id, spans in run.spans.items():
        row, planned = run.row_of.get(request_id, {}), run.trace[request_id]
        tokens = int(row.get("prompt_len") or planned.prompt_len) + planned.max_new_tokens
        needed = -(-tokens // size) * int(config.get("max_beam_width") or 1)
        changes[spans[0].first] += needed
        changes[spans[-1].last + 1] -= needed
    return int(changes.cumsum().max()) <= left


def _nothing_to_change(lost: Mapping[str, float], total: float) -> str:
    if not total:
        return "No request was completed: there is nothing to advise from."
    return (
        f"Requests waited for limits during {sum(lost.values()) / total:.1%} of their time: no setting holds them "
        "back. What remains is the time of the device."
    )


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
