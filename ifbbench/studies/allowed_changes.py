"""The single changes that the settings of a recorded run allow, for the trials of `why`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ifbbench.analysis.words import SIZES, setting_of
from ifbbench.models.named_models import load_model_config
from ifbbench.settings.config import RunConfig
from ifbbench.settings.engines import SGLANG, TRTLLM, VLLM
from ifbbench.settings.groups.scheduling import CHUNKING_POLICIES
from ifbbench.settings.groups.sglang import SCHEDULE_POLICIES
from ifbbench.settings.modes import BatchingType, Overlap
from ifbbench.simulated.hardware import load_hardware
from ifbbench.simulated.shard import Shard, plan_memory
from ifbbench.studies.tune_space import POLICIES, idle_limits, rounded

Settings = dict[str, Any]

# What a smaller batch relieves: the device, which every request in the batch waits for.
DEVICE = "device"
# What SGLang's mixed chunks relieve: requests that generate stand aside for prompts.
ASIDE = "prefill"
FACTORS = (2.0, 0.5, 4.0, 0.25)
HOST_CACHE_BYTES = 16 << 30
MAX_TP_SIZE = 8
MEMORY_FRACTIONS = (0.95, 0.8, 0.5)
MEMORY_UTILIZATIONS = (0.95, 0.97, 0.8)
WATERMARKS = (0.01, 0.05)
MULTIPLE = 256  # of sequence lengths


@dataclass(frozen=True)
class Allowed:
    """The single changes that the settings of a run allow.

    config: settings as asked.
    resolved: each setting as the run had it.
    summary: summary of the run.
    waited_s: request-seconds by limit, DEVICE and ASIDE.
    peak_tokens: maximum number of tokens of an iteration.
    has_prefixes, has_priorities: whether requests of the trace share beginnings, or have several priorities.
    longest: number of tokens of the longest request with its output.
    not_known: settings whose effect on the device is not known.
    """

    config: RunConfig
    resolved: Mapping[str, Any]
    summary: Mapping[str, Any]
    waited_s: Mapping[str, float]
    peak_tokens: int
    has_prefixes: bool
    has_priorities: bool
    longest: int = 0
    not_known: Sequence[str] = ()

    def changes(self) -> list[Settings]:
        """The most promising first: by the waiting for the limit that each relieves, then as listed."""
        total = sum(self.waited_s.values()) or 1.0
        share = {limit: spent / total for limit, spent in self.waited_s.items()}
        found: dict[tuple[tuple[str, Any], ...], tuple[float, Settings]] = {}
        for limit, values in self._listed():
            changed = {name: value for name, value in values.items() if value != self.resolved.get(name)}
            key = tuple(changed.items())
            if changed and key not in found and not changed.keys() & set(self.not_known):
                found[key] = share.get(limit, 0.0), changed
        return [values for _, values in sorted(found.values(), key=lambda one: -one[0])]

    def _listed(self) -> Iterator[tuple[str, Settings]]:
        """Each change with the limit that it relieves; empty for one that relieves none."""
        now, engine = self.resolved, self.config.engine
        is_static = now["type"] == BatchingType.V1
        if is_static:
            for policy in POLICIES:
                yield "static_batch", {"type": BatchingType.INFLIGHT_FUSED.value, "policy": policy}
        elif now["type"] != BatchingType.INFLIGHT_FUSED:
            yield "num_tokens", {"type": BatchingType.INFLIGHT_FUSED.value}
        yield from self._sizes(is_static)
        yield from self._memory()
        if not is_static:
            of_engines = {VLLM: self._of_vllm, SGLANG: self._of_sglang}
            yield from of_engines.get(engine, self._of_trtllm)()
            yield from self._reuse()
        if now.get("draft_len"):
            for factor in FACTORS:
                yield "", {"draft_len": max(round(now["draft_len"] * factor), 1)}
        for size in (now["tp_size"] * 2, now["tp_size"] * 4, now["tp_size"] // 2):
            if 1 <= size <= MAX_TP_SIZE:
                yield "", {"tp_size": size}
        if self.summary.get("overloaded") and self.config.keeps_arrivals:
            slots = min(now["max_batch_size"], self.summary["peak_scheduled_requests"])
            for size in (slots, 4 * slots, max(slots // 4, 1)):
                if size != now.get("max_queue_size"):
                    yield "", {"max_queue_size": size}

    def _sizes(self, is_static: bool) -> Iterator[tuple[str, Settings]]:
        """Limits of a batch. What is not reached is lowered from what was."""
        now, idle = self.resolved, idle_limits(self.summary, self.resolved["max_batch_size"])
        peaks = dict(zip(SIZES, (self.summary["peak_scheduled_requests"], self.peak_tokens), strict=True))
        for limit in SIZES[:1] if is_static else SIZES:
            name = setting_of(limit)
            if (size := now.get(name)) is None:
                continue
            for factor in FACTORS:
                if factor > 1 and limit in idle:
                    continue  # no decision depended on it
                other = round(size * factor)
                if factor < 1 and peaks[limit] < size:
                    other = rounded(peaks[limit] * factor)
                yield limit if factor > 1 else DEVICE, {name: max(other, 1)}
        if emulated := now.get("static_emulated_batch_size"):
            for factor in FACTORS:
                yield "static_batch", {"static_emulated_batch_size": max(round(emulated * factor), 1)}

    def _memory(self) -> Iterator[tuple[str, Settings]]:
        """Size and data type of the KV cache, as far as the memory of the device has room."""
        now = self.resolved
        if (tokens := self.config.max_tokens_in_paged_kvcache) is not None:
            room = self._room_in_tokens
            sizes = [round(tokens * factor) for factor in FACTORS]
            for size in [size for size in sizes if size <= room] + [room] * (room > tokens):
                yield "kv_blocks" if size > tokens else "", {"max_tokens_in_paged_kvcache": size}
        elif (blocks := self.config.num_gpu_blocks_override) is not None:
            room = self._room_in_tokens // now["tokens_per_block"]
            sizes = [round(blocks * factor) for factor in FACTORS]
            for size in [size for size in sizes if 2 <= size <= room] + [room] * (room > blocks):
                yield "kv_blocks" if size > blocks else "", {"num_gpu_blocks_override": size}
        elif (share := self.config.gpu_memory_utilization) is not None:
            for other in MEMORY_UTILIZATIONS:
                yield "kv_blocks" if other > share else "", {"gpu_memory_utilization": other}
        else:
            for other in MEMORY_FRACTIONS:
                is_more = other > now["kv_cache_free_gpu_mem_fraction"]
                yield "kv_blocks" if is_more else "", {"kv_cache_free_gpu_mem_fraction": other}
        for dtype in ("fp8", "bf16"):
            yield "kv_blocks", {"kv_cache_dtype": dtype}

    @cached_property
    def _room_in_tokens(self) -> int:
        """Tokens of KV cache that the device has room for."""
        names = ("max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len", "dtype", "kv_cache_dtype")
        config = self.config.with_values(**{name: self.resolved[name] for name in names})
        model, hardware = load_model_config(config.model), load_hardware(config.hardware or "")
        shard = Shard.of_config(model, config)
        room = int(plan_memory(shard, hardware, config).kv_cache / shard.kv_bytes_per_token)
        blocks = room // config.tokens_per_block - (config.engine == VLLM)  # one is vLLM's null block
        return blocks * config.tokens_per_block

    def _of_trtllm(self) -> Iterator[tuple[str, Settings]]:
        now = self.resolved
        # The memory of several attention windows is divided by their lengths, and the longest is that of a sequence.
        shorter = self.longest // MULTIPLE * MULTIPLE + MULTIPLE
        has_windows = bool(self.summary["kv_blocks"].get("per_window_size"))
        if has_windows and self.longest and max(shorter, 2 * self.longest - 1) < (now["max_seq_len"] or 0):
            yield "kv_blocks", {"max_seq_len": shorter}
        for policy in POLICIES:
            yield "kv_blocks", {"policy": policy}
        yield "num_tokens", {"enable_chunked_context": not now["enable_chunked_context"]}
        for policy in CHUNKING_POLICIES if now["enable_chunked_context"] else ():
            yield "num_tokens", {"context_chunking_policy": policy}
        for overlap in Overlap:
            yield "", {"overlap": overlap.value}
        for name in ("enable_batch_size_tuning", "enable_max_num_tokens_tuning"):
            yield "", {name: not now[name]}

    def _of_vllm(self) -> Iterator[tuple[str, Settings]]:
        now = self.resolved
        for share in WATERMARKS:
            yield "kv_blocks", {"watermark": share}
        yield "kv_blocks", {"scheduler_reserve_full_isl": not now["scheduler_reserve_full_isl"]}
        yield "num_tokens", {"enable_chunked_context": not now["enable_chunked_context"]}
        start = now["long_prefill_token_threshold"] or now["max_num_tokens"]
        for factor in FACTORS:
            if (size := round(start * factor)) < now["max_num_tokens"]:
                yield "num_tokens" if size > start else DEVICE, {"long_prefill_token_threshold": max(size, 1)}
        yield "", {"async_scheduling": not now["async_scheduling"]}
        if self.has_priorities:
            yield "", {"scheduling_policy": "fcfs" if now["scheduling_policy"] == "priority" else "priority"}

    def _of_sglang(self) -> Iterator[tuple[str, Settings]]:
        now = self.resolved
        for factor in FACTORS:
            yield "kv_blocks", {"schedule_conservativeness": now["schedule_conservativeness"] * factor}
        yield ASIDE, {"enable_mixed_chunk": not now["enable_mixed_chunk"]}
        yield "num_tokens", {"max_prefill_tokens": 2 * now["max_prefill_tokens"]}
        yield "", {"disable_overlap_schedule": not now["disable_overlap_schedule"]}
        for policy in SCHEDULE_POLICIES:
            needs_prefixes = policy in ("lpm", "dfs-weight", "hrrn", "shortest-prefill-first")
            if policy != "random" and (self.has_prefixes or not needs_prefixes):
                yield "", {"schedule_policy": policy}

    def _reuse(self) -> Iterator[tuple[str, Settings]]:
        now = self.resolved
        if not self.has_prefixes:
            return
        yield "kv_blocks", {"enable_kv_cache_reuse": not now["enable_kv_cache_reuse"]}
        if now["enable_kv_cache_reuse"] and self.config.engine == TRTLLM:
            yield "kv_blocks", {"kv_host_cache_bytes": 2 * now["kv_host_cache_bytes"] or HOST_CACHE_BYTES}
