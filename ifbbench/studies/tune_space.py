"""The settings that a search may change, and which changes are worth a run.

A limit that no decision of a run depended on is idle: raising it changes nothing, nor does a setting that only matters
where it binds. Such changes are left out, which is where most of the work of a grid goes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ifbbench.errors import InputError
from ifbbench.models.named_models import load_model_config
from ifbbench.settings.config import RunConfig
from ifbbench.settings.engines import SGLANG, TRTLLM, VLLM
from ifbbench.settings.groups.scheduling import DEFAULT_MAX_NUM_TOKENS
from ifbbench.settings.servers import SERVERS
from ifbbench.simulated.hardware import load_hardware
from ifbbench.simulated.shard import kv_memory_bytes
from ifbbench.workload.trace import Trace, columns_of

BATCH_SIZES, NUM_TOKENS = (1, 8192), (64, 65_536)
POLICIES = ("guaranteed_no_evict", "max_utilization")
TOKENS_PER_BLOCK = (16, 32, 64, 128)
# Prompts as a whole, or in chunks: enable_chunked_context and context_chunking_policy.
CONTEXTS = {
    "whole": {"enable_chunked_context": False, "context_chunking_policy": "first_come_first_served"},
    "first_come_first_served": {"enable_chunked_context": True, "context_chunking_policy": "first_come_first_served"},
    "equal_progress": {"enable_chunked_context": True, "context_chunking_policy": "equal_progress"},
}
# The maximum number of prompt tokens of a request in an iteration, as parts of the token budget.
PREFILL_CAP, PREFILL_PARTS = "long_prefill_token_threshold", (2, 4, 8)
# Values of schedule_conservativeness and schedule_policy that are tried.
CONSERVATIVENESS, PREFIX_ORDERS = (0.1, 0.3, 0.6, 1.0, 1.5), ("fcfs", "lpm", "dfs-weight")
# The settings of the scheduler of one engine only. A user's own has those of TensorRT-LLM.
OF_ENGINES: Mapping[str, Sequence[str]] = {
    TRTLLM: ("policy", "enable_chunked_context", "context_chunking_policy"),
    VLLM: (PREFILL_CAP,),
    SGLANG: ("schedule_policy", "schedule_conservativeness", "max_prefill_tokens", "enable_mixed_chunk"),
}
# Settings of small effect are changed in steps below this one only.
MINOR_STEP = 2.0
LIMITS = ("batch_size", "num_tokens", "kv_blocks")
TP_SIZES = (1, 2, 4, 8)
# A grid over the same settings that is neither coarse nor fine: powers of two.
GRID_BATCH_SIZES, GRID_NUM_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048), (512, 1024, 2048, 4096, 8192, 16_384)
# Limits in fine steps: 4, 5, 6, 7, 8, 10, 12 …, and 64, 96, 128, 192 …
LATTICE_BATCH_SIZES = [1, 2, 3, *(part << shift for shift in range(10) for part in (4, 5, 6, 7))]
LATTICE_NUM_TOKENS = [part << shift for shift in range(5, 14) for part in (2, 3)]

Settings = tuple[tuple[str, Any], ...]
"""Names and values of the settings that are searched, in order."""


def idle_limits(summary: Mapping[str, Any], max_batch_size: int) -> set[str]:
    """The limits on which no decision of a run depended."""
    bound, waited = summary["bound_by"], summary["waiting_by_limit"]
    idle = {limit for limit in LIMITS if not bound[limit] and not waited.get(limit)}
    if summary["pauses"]:
        idle.discard("kv_blocks")
    # The first request left out hides others, but no batch was full.
    is_full = summary["peak_scheduled_requests"] >= max_batch_size
    return idle - {"batch_size"} if is_full else idle


@dataclass(frozen=True)
class Space:
    """What candidates may differ in.

    fixed: settings that the user gave, which are not searched.
    longest_prompt: number of tokens of the longest prompt of the trace.
    shares_prefixes: whether reuse of blocks can help.
    """

    base: RunConfig
    fixed: frozenset[str]
    longest_prompt: int
    shares_prefixes: bool

    @classmethod
    def of(cls, base: RunConfig, fixed: frozenset[str], trace: Trace) -> "Space":
        """InputError for a setting that is given and that no candidate can have."""
        if "max_num_tokens" in fixed and base.max_num_tokens is None:
            raise InputError(
                "--max_num_tokens none: candidates have a limit of tokens; give a number, or leave it out "
                "to have it searched."
            )
        columns = columns_of(trace.requests)
        shares = any(request.prefix_ids or request.prompt_tokens for request in columns[: min(len(columns), 1000)])
        return cls(base, fixed, max(columns.prompt_len), shares)

    @property
    def is_server(self) -> bool:
        """Whether the engine starts with defaults and a command line of its own."""
        return self.base.engine in SERVERS

    @property
    def searched(self) -> list[str]:
        """The names of the settings that are searched."""
        return [name for name, _ in self.point()]

    def point(self, **values: Any) -> Settings:
        """The settings of `base`, with some changed."""
        base = self.base
        found = {
            "max_batch_size": base.max_batch_size or 2048,
            "max_num_tokens": base.max_num_tokens or DEFAULT_MAX_NUM_TOKENS,
            **{name: getattr(base, name) for name in OF_ENGINES.get(base.engine, OF_ENGINES[TRTLLM])},
            "tokens_per_block": base.tokens_per_block,
            "enable_kv_cache_reuse": base.enable_kv_cache_reuse,
            "tp_size": base.tp_size,
        }
        if not self.shares_prefixes:
            del found["enable_kv_cache_reuse"]
        if "enable_chunked_context" in found:
            found["enable_chunked_context"] = base.enable_chunked_context is not False
        values = {name: value for name, value in values.items() if name in found and name not in self.fixed}
        return tuple((found | values).items())

    def with_limits(self, tp_size: int, num_tokens: int, batch_size: int | None = None) -> Settings:
        """The settings of `base` with these limits. batch_size: None for that of `base`."""
        batch = {} if batch_size is None else {"max_batch_size": batch_size}
        return self.point(tp_size=tp_size, max_num_tokens=num_tokens, **batch)

    def moves(self, point: Settings, summary: Mapping[str, Any], step: float) -> list[tuple[str, Settings]]:
        """Points that differ from `point` in one setting, with its name; limits by a factor of `step`. Those that are
        certain to run the same schedule are left out.

        summary: summary of the run of `point`.
        """
        now = dict(point)
        idle = idle_limits(summary, now["max_batch_size"])
        changes: list[tuple[str, dict[str, Any]]] = []
        for value in self._batch_sizes(now["max_batch_size"], summary["peak_scheduled_requests"], idle, step):
            changes.append(("max_batch_size", {"max_batch_size": value}))
        for value in self._num_tokens(now, idle, step):
            changes.append(("max_num_tokens", {"max_num_tokens": value}))
        reuses = now.get("enable_kv_cache_reuse", False)
        if "policy" in now and ("kv_blocks" not in idle or reuses):
            changes += [("policy", {"policy": policy}) for policy in POLICIES]
        is_fine = step < MINOR_STEP
        if PREFILL_CAP in now and "num_tokens" not in idle:
            shares = [rounded(now["max_num_tokens"] / parts) for parts in PREFILL_PARTS]
            changes += [(PREFILL_CAP, {PREFILL_CAP: cap}) for cap in (0, *shares)]
        if "enable_chunked_context" in now and ("num_tokens" not in idle or reuses):
            changes += [("enable_chunked_context", context) for context in self._contexts(now, is_fine)]
        if self.base.engine == SGLANG:
            changes += self._of_sglang(now, idle, reuses)
        if reuses or (is_fine and not {"kv_blocks", "num_tokens"} <= idle):
            near = [size for size in TOKENS_PER_BLOCK if 1 / 2 <= size / now["tokens_per_block"] <= 2]
            changes += [("tokens_per_block", {"tokens_per_block": size}) for size in near]
        if self.shares_prefixes:
            changes.append(("enable_kv_cache_reuse", {"enable_kv_cache_reuse": not reuses}))
        found = {}
        for name, change in changes:
            moved = tuple((now | {key: value for key, value in change.items() if key not in self.fixed}).items())
            if moved != point:
                found[moved] = name
        return [(name, moved) for moved, name in found.items()]

    def _batch_sizes(self, now: int, peak: int, idle: set[str], step: float) -> list[int]:
        # Below the peak of a limit that is idle, its effect begins gently.
        below = rounded(peak / step**0.5 if peak < now else now / step)
        above = [] if "batch_size" in idle else [rounded(now * step)]
        return [size for size in (below, *above) if BATCH_SIZES[0] <= size <= BATCH_SIZES[1]]

    def _num_tokens(self, now: Mapping[str, Any], idle: set[str], step: float) -> list[int]:
        tokens = now["max_num_tokens"]
        sizes = [rounded(tokens / step)] + ([] if "num_tokens" in idle else [rounded(tokens * step)])
        return self._possible_budgets(sizes, now, NUM_TOKENS[1])

    def _possible_budgets(self, sizes: Iterable[int], now: Mapping[str, Any], most: int) -> list[int]:
        """The token budgets among `sizes` that are possible with the other settings in `now`, at most `most`."""
        if self.base.engine == SGLANG:  # whole pages
            sizes = [size // now["tokens_per_block"] * now["tokens_per_block"] for size in sizes]
        least = max(NUM_TOKENS[0], self.base.context_chunk_unit or now["tokens_per_block"])
        if not now.get("enable_chunked_context", True):
            least = max(least, min(self.longest_prompt, now["max_num_tokens"]))
        return [size for size in sizes if least <= size <= most]

    def _of_sglang(self, now: Mapping[str, Any], idle: set[str], reuses: bool) -> list[tuple[str, dict[str, Any]]]:
        changes: list[tuple[str, Any]] = [("enable_mixed_chunk", not now["enable_mixed_chunk"])]
        if "kv_blocks" not in idle:
            changes += [("schedule_conservativeness", value) for value in CONSERVATIVENESS]
        if now["max_num_tokens"] > now["max_prefill_tokens"]:
            changes.append(("max_prefill_tokens", now["max_num_tokens"]))
        if reuses and not self.base.enable_priority_scheduling:
            changes += [("schedule_policy", order) for order in PREFIX_ORDERS]
        return [(name, {name: value}) for name, value in changes]

    def _contexts(self, now: Mapping[str, Any], is_fine: bool) -> list[dict[str, Any]]:
        """Without chunks, no prompt may be longer than the token budget."""
        whole, first, equal = CONTEXTS.values()
        return [first] + [whole] * (self.longest_prompt <= now["max_num_tokens"]) + [equal] * is_fine

    def lattice(self, point: Settings, summary: Mapping[str, Any]) -> list[Settings]:
        """Points that differ from `point` in the two limits, with four and two values for each factor of 2 over all of
        their range; but limits that are idle are not raised far. summary: of the run of `point`."""
        now, idle = dict(point), idle_limits(summary, dict(point)["max_batch_size"])
        sizes, tokens = [now["max_batch_size"]], [now["max_num_tokens"]]
        if "max_batch_size" not in self.fixed:
            most = 2 * summary["peak_scheduled_requests"] if "batch_size" in idle else BATCH_SIZES[1]
            sizes += [size for size in LATTICE_BATCH_SIZES if size <= most]
        if "max_num_tokens" not in self.fixed:
            most = tokens[0] if "num_tokens" in idle else NUM_TOKENS[1]
            tokens += self._possible_budgets(LATTICE_NUM_TOKENS, now, most)
        pairs = product(dict.fromkeys(sizes), dict.fromkeys(tokens))
        return [tuple((now | {"max_batch_size": size, "max_num_tokens": budget}).items()) for size, budget in pairs]

    def grid(self) -> list[Settings]:
        """The points of an exhaustive grid with powers of two, where a search needs none."""
        values: dict[str, Sequence[Any]] = {
            "max_batch_size": GRID_BATCH_SIZES,
            "max_num_tokens": GRID_NUM_TOKENS,
            "policy": POLICIES,
            "context": list(CONTEXTS),
            "enable_kv_cache_reuse": (False, True) if self.shares_prefixes else (False,),
        }
        points = []
        for chosen in product(*values.values()):
            point = dict(zip(values, chosen, strict=True))
            context = point.pop("context")
            if context != "whole" or self.longest_prompt <= point["max_num_tokens"]:
                points.append(self.point(**point, **CONTEXTS[context]))
        return list(dict.fromkeys(points))

    def tp_sizes(self, max_gpus: int) -> list[int]:
        """Tensor-parallel degrees up to `max_gpus` with which the model fits the device. InputError if none does."""
        sizes = [self.base.tp_size] if "tp_size" in self.fixed else [size for size in TP_SIZES if size <= max_gpus]
        found, problem = [], None
        model, hardware = load_model_config(self.base.model), load_hardware(self.base.hardware or "")
        for size in sizes:
            dtype = self.base.dtype or ("float32" if hardware.is_cpu else "bf16")
            config = self.base.with_values(tp_size=size, dtype=dtype, max_batch_size=self.base.max_batch_size or 2048)
            try:
                kv_memory_bytes(model, hardware, config)
                found.append(size)
            except InputError as error:
                problem = error
        if not found and problem is not None:
            raise problem
        return found


def rounded(value: float) -> int:
    """A number that reads well: a multiple of 8 from 32 on, of 64 from 512 on."""
    multiple = 64 if value >= 512 else 8 if value >= 32 else 1
    return max(round(value / multiple) * multiple, 1)
