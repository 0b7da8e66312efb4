"""What other settings would have done for a recorded run: its own trace is replayed under each of them.

Every change is one that the settings of the run allow. Those that relieve what the run waited for come first, so that a
budget of time that is too short leaves out the least promising ones; they are named.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ifbbench.analysis.findings import Findings
from ifbbench.analysis.number_texts import percent
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.build.engines import VLLM, engine_defaults
from ifbbench.clock import NO_PROGRESS, Progress, WallClock
from ifbbench.errors import InputError
from ifbbench.models.named_models import load_model_config
from ifbbench.settings.config import CHUNKING_POLICIES, SIMULATED, RunConfig, settings
from ifbbench.settings.fields import as_text, choice
from ifbbench.settings.modes import BatchingType, Overlap
from ifbbench.settings.names import setting, usual_settings
from ifbbench.settings.objectives import parse_objectives
from ifbbench.simulated.hardware import load_hardware
from ifbbench.simulated.shard import Shard, plan_memory
from ifbbench.studies.points import PointResult, in_one_line, run_all, summarise
from ifbbench.studies.tune_runs import APPLIED
from ifbbench.studies.tune_space import POLICIES, idle_limits, rounded
from ifbbench.workload.load import in_memory, read_source
from ifbbench.workload.trace import Trace, columns_of

Settings = dict[str, Any]

DEFAULT_BUDGET_S = 30.0
# The first changes may take this share of the budget; the rest is for second ones on top of the best.
FIRST_SHARE = 0.6
# Less than this is no reason to change a setting.
MIN_GAIN = 0.01
# Seeds that decide where the run draws anything.
SEEDS = 3
FACTORS = (2.0, 0.5, 4.0, 0.25)
HOST_CACHE_BYTES = 16 << 30
MAX_TP_SIZE = 8
MEMORY_FRACTIONS = (0.95, 0.8, 0.5)
MEMORY_UTILIZATIONS = (0.95, 0.97, 0.8)
WATERMARKS = (0.01, 0.05)
GOALS = {
    "ttft.p99": "ttft_s.p99",
    "tpot.p99": "tpot_s.p99",
    "e2e.mean": "e2e_s.mean",
    "output_throughput": "output_throughput_tokens_per_s",
    "goodput": "goodput_requests_per_s",
    "slo": "",
}
LATENCIES = ("ttft_s.p50", "ttft_s.p99", "tpot_s.p99", "e2e_s.mean")
THROUGHPUT, GOODPUT, GOOD_SHARE = "output_throughput_tokens_per_s", "goodput_requests_per_s", "goodput_share"
FAILED = "requests.failed"
HIGHER_IS_BETTER = (THROUGHPUT, GOODPUT, GOOD_SHARE)


@dataclass(frozen=True)
class Goal:
    """What is to improve. path: into `summary.json`. targets: by path, of objectives of which the one that is furthest
    above its target decides; empty where the figure at `path` does. why: how it was chosen."""

    path: str
    why: str = ""
    targets: Mapping[str, float] = field(default_factory=dict)

    def score(self, summary: Mapping[str, Any]) -> float | None:
        """The lower the better; None where the run has no such figure."""
        if self.targets:
            shares = [value / target for path, target in self.targets.items() if (value := at(summary, path))]
            return max(shares, default=None)
        value = at(summary, self.path)
        return value if value is None else -value if self.path in HIGHER_IS_BETTER else value

    @property
    def counts_refusals(self) -> bool:
        """Whether a request that is refused makes the figure worse."""
        return self.path in (GOODPUT, GOOD_SHARE)


@dataclass(frozen=True)
class Effect:
    """A figure with the run's settings and with others. is_noise: there is none, or it is not the same with each
    seed."""

    before: float | None
    after: float | None
    is_noise: bool

    @property
    def change(self) -> float | None:
        """Relative to `before`; None where there is none."""
        return None if self.before is None or self.after is None or not self.before else self.after / self.before - 1


@dataclass(frozen=True)
class Change:
    """Other settings and what they did. gpus: how many it needs; needs_more_gpus: than the run. score: see
    Goal."""

    settings: Settings
    effects: dict[str, Effect]
    command: str
    summary: Mapping[str, Any] = field(repr=False)
    score: float
    gpus: int
    needs_more_gpus: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        effects = {path: vars(effect) for path, effect in self.effects.items()}
        return {
            "settings": self.settings,
            "effects": effects,
            "command": self.command,
            "gpus": self.gpus,
            "needs_more_gpus": self.needs_more_gpus,
        }


@dataclass(frozen=True)
class Outcome:
    """What was tried. changes: the best first. recommended: an index into it; None with the reason in `reason`. then:
    the best second change on top of it. untried: changes that the budget did not reach; refused: those that cannot run,
    with the reason. notes: what the reader must know to judge the figures.
    command: replays the run as it was."""

    goal: Goal
    baseline: dict[str, float | None]
    changes: list[Change]
    recommended: int | None
    reason: str
    then: Change | None
    untried: list[Settings]
    refused: list[tuple[Settings, str]]
    notes: list[str]
    command: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "goal": self.goal.path,
            "goal_chosen": self.goal.why,
            "objectives": dict(self.goal.targets),
            "command": self.command,
            "baseline": self.baseline,
            "changes": [change.as_dict() for change in self.changes],
            "recommended": self.recommended,
            "reason": self.reason or None,
            "then": self.then and self.then.as_dict(),
            "untried": self.untried,
            "refused": [{"settings": values, "reason": reason} for values, reason in self.refused],
            "notes": self.notes,
        }


def at(summary: Mapping[str, Any], path: str) -> float | None:
    """The figure at a path such as ttft_s.p99; None where there is none."""
    found: Any = summary
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return None if found is None else float(found)


def why_not(run: RecordedRun) -> str:
    """Why no other settings can be tried for a run; empty if they can."""
    device = str(run.config.get("device"))
    if run.data.endpoint:
        return "the server at the endpoint has settings of its own, which are not known here"
    if not device.startswith(SIMULATED):
        return f"the run was on device {device}, and only runs of simulated devices (sim:…) are replayed"
    return ""


def base_config(config: Mapping[str, Any], derived: Sequence[str], sessions: bool) -> RunConfig:
    """The settings with which the trace in a run directory is replayed as in the run. config, derived: of its
    `run.json`. sessions: whether later turns arrive after answers."""
    known = {item.name: item for item in settings()}
    values: dict[str, Any] = {
        name: None if name in derived else value
        for name, value in config.items()
        if name in known and known[name].group != "recording"
    }
    values["enable_steady_state"] = config.get("enable_steady_state", False)
    asked = RunConfig(**values)
    is_open = asked.keeps_arrivals
    applied = dict(APPLIED)
    if sessions or not is_open:
        del applied["duration"]  # requests that arrive after an answer may come too late
    # Resolved already: the form of the overlap says it, and of vLLM --async_scheduling does.
    overlap = None if asked.engine == VLLM else config.get("overlap")
    return asked.with_values(
        **applied,
        time_scale=1.0,
        max_num_samples=None,
        skip_bad_rows=False,
        trace_format=None,
        columns=None,
        tokenizer=None,
        default_output_len=None,
        arrival="recorded" if asked.concurrency is not None and is_open else None,
        overlap=overlap,
        enable_trt_overlap=False,
        quiet=True,
    )


def command_of(source: str, config: RunConfig) -> str:
    """The `ifbbench run` that replays the trace of a run directory with these settings."""
    usual = _usual(config)
    words = ["ifbbench", "run", source]
    for item in settings():
        value = getattr(config, item.name)
        if item.name == "quiet" or (item.name not in ("device", "model") and value == usual[item.name]):
            continue
        if value is None and not item.takes_none:
            continue
        words += [f"--{'' if value else 'no_'}{item.name}"] if item.type is bool else [f"--{item.name}", as_text(value)]
    return shlex.join(words)


def unsayable(config: RunConfig) -> list[str]:
    """Settings of a run that no command line gives: they are left out there, and have another value then."""
    usual = _usual(config)
    values = {item.name: getattr(config, item.name) for item in settings() if not item.takes_none}
    return [name for name, value in values.items() if value is None and usual[name] is not None]


def _usual(config: RunConfig) -> dict[str, Any]:
    """Each setting of a command line that names only the engine and the device of `config`."""
    given = {"engine": config.engine, "device": config.device, "engine_overhead": config.engine_overhead}
    return usual_settings(engine_defaults(given))


@dataclass(frozen=True)
class Allowed:
    """The single changes that the settings of a run allow.

    config: as asked. resolved: each setting as the run had it. summary: of the run. waited_s: request-seconds by limit.
    peak_tokens: most tokens of an iteration. has_prefixes, has_priorities: whether requests of the trace share
    beginnings, or have several priorities."""

    config: RunConfig
    resolved: Mapping[str, Any]
    summary: Mapping[str, Any]
    waited_s: Mapping[str, float]
    peak_tokens: int
    has_prefixes: bool
    has_priorities: bool

    def changes(self) -> list[Settings]:
        """The most promising first: by the waiting for the limit that each relieves, then as listed."""
        total = sum(self.waited_s.values()) or 1.0
        share = {limit: spent / total for limit, spent in self.waited_s.items()}
        found: dict[tuple[tuple[str, Any], ...], tuple[float, Settings]] = {}
        for limit, values in self._listed():
            changed = {name: value for name, value in values.items() if value != self.resolved.get(name)}
            key = tuple(changed.items())
            if changed and key not in found:
                found[key] = share.get(limit, 0.0), changed
        return [values for _, values in sorted(found.values(), key=lambda one: -one[0])]

    def _listed(self) -> Iterator[tuple[str, Settings]]:
        """Each change with the limit that it relieves; empty for one that relieves none."""
        now, is_vllm = self.resolved, self.config.engine == VLLM
        is_static = now["type"] == BatchingType.V1
        if is_static:
            for policy in POLICIES:
                yield "static_batch", {"type": BatchingType.INFLIGHT_FUSED.value, "policy": policy}
        elif now["type"] != BatchingType.INFLIGHT_FUSED:
            yield "num_tokens", {"type": BatchingType.INFLIGHT_FUSED.value}
        yield from self._sizes(is_static)
        yield from self._memory(is_vllm)
        if not is_static:
            yield from self._of_vllm() if is_vllm else self._of_trtllm()
            yield from self._reuse(is_vllm)
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
        peaks = {"max_batch_size": self.summary["peak_scheduled_requests"], "max_num_tokens": self.peak_tokens}
        limits = {"max_batch_size": "batch_size"} | ({} if is_static else {"max_num_tokens": "num_tokens"})
        for name, limit in limits.items():
            if (size := now.get(name)) is None:
                continue
            for factor in FACTORS:
                if factor > 1 and limit in idle:
                    continue  # no decision depended on it
                other = round(size * factor)
                if factor < 1 and peaks[name] < size:
                    other = rounded(peaks[name] * factor)
                yield limit if factor > 1 else "", {name: max(other, 1)}
        if emulated := now.get("static_emulated_batch_size"):
            for factor in FACTORS:
                yield "static_batch", {"static_emulated_batch_size": max(round(emulated * factor), 1)}

    def _memory(self, is_vllm: bool) -> Iterator[tuple[str, Settings]]:
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
        return room // config.tokens_per_block * config.tokens_per_block

    def _of_trtllm(self) -> Iterator[tuple[str, Settings]]:
        now = self.resolved
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
                yield "num_tokens", {"long_prefill_token_threshold": max(size, 1)}
        yield "", {"async_scheduling": not now["async_scheduling"]}
        if self.has_priorities:
            yield "", {"scheduling_policy": "fcfs" if now["scheduling_policy"] == "priority" else "priority"}

    def _reuse(self, is_vllm: bool) -> Iterator[tuple[str, Settings]]:
        now = self.resolved
        if not self.has_prefixes:
            return
        yield "kv_blocks", {"enable_kv_cache_reuse": not now["enable_kv_cache_reuse"]}
        if now["enable_kv_cache_reuse"] and not is_vllm:
            yield "kv_blocks", {"kv_host_cache_bytes": 2 * now["kv_host_cache_bytes"] or HOST_CACHE_BYTES}


class WhatIf:
    """The trials of one run. findings: of the run, which must be one that `why_not` allows."""

    def __init__(self, findings: Findings) -> None:
        self._findings, self._run = findings, findings.run
        self.trace = in_memory(read_source(self._run.path, RunConfig(device="null")))
        columns = columns_of(self.trace.requests)
        derived = self._run.data.run.get("derived", [])
        self.config = base_config(self._run.config, derived, columns.after is not None)
        draws = self.config.acceptance_rate is not None or (self.config.num_loras and not columns.names_loras)
        self._gpus = self.config.tp_size * self.config.pp_size
        self._seeds = [self.config.seed + number for number in range(SEEDS if draws else 1)]

    def goal(self, name: str | None) -> Goal:
        """The goal called `name` (see GOALS). By default the objectives of the run, else the figure that is furthest
        from what the device could do. InputError for one that the run does not have."""
        objectives = parse_objectives(self.config.slo) if self.config.slo else ()
        if name in ("slo", "goodput") and not objectives:
            raise InputError(f"--improve {name}: the run has no objectives; run it with --slo, or choose another goal.")
        has_goodput = any(one.statistic is None for one in objectives)
        if name == "goodput" and not has_goodput:
            raise InputError(
                "--improve goodput: the run has no objective of each request, such as ttft=1s; choose another goal."
            )
        if name is not None and name != "slo":
            return Goal(GOALS[choice(name, "--improve", GOALS)])
        if objectives:
            why = "" if name else "the run has objectives"
            if has_goodput:
                return Goal(GOOD_SHARE, why)
            targets = {f"{one.latency}.{one.statistic}": one.target_s for one in objectives}
            summary = self._run.data.summary or {}
            worst = max(targets, key=lambda path: (at(summary, path) or 0.0) / targets[path])
            return Goal(worst, why, targets)
        return self._furthest()

    def _furthest(self) -> Goal:
        summary, bounds = self._run.data.summary or {}, self._findings.bounds
        if isinstance(bounds, str):
            return Goal("e2e_s.mean", "the distance to the best is not known for this run")
        least = bounds.least_figures()
        ratios = {path: (at(summary, path) or 0.0) / value for path, value in least.items() if value}
        if bounds.of_run.least_s:
            ratios[THROUGHPUT] = bounds.of_run.duration_s / bounds.of_run.least_s
        path = max(ratios, key=ratios.__getitem__, default="e2e_s.mean")
        return Goal(path, f"{ratios.get(path, 1.0):,.3g} times what the device could do, the largest distance")

    def try_all(
        self,
        goal: Goal,
        only: Sequence[Settings] = (),
        budget_s: float = DEFAULT_BUDGET_S,
        processes: int | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> Outcome:
        """Try `only`, or all single changes that the settings allow, and second ones on top of the best."""
        clock = WallClock()
        progress.stage("replaying the run")
        before = self._summaries([{}], self.config, None, processes, clock, progress)[0].get(0)
        if isinstance(before, str) or before is None:
            raise InputError(f"{self._run.path}: its settings do not run any more: {before}")
        notes = [] if self._is_same(before[0]) else [self._differs(before[0])]
        allowed = self._allowed(before[0])
        wanted = list(only) or allowed.changes()
        progress.stage("trying changes")
        until_s = None if only else budget_s * FIRST_SHARE
        done, untried = self._summaries(wanted, self.config, until_s, processes, clock, progress)
        changes, refused = self._changes(goal, wanted, done, before, self.config)
        index, reason = self._recommended(goal, changes, before[0], bool(untried))
        then = None
        if index is not None and not only:
            best = changes[index]
            config = self.config.with_values(**best.settings)
            second = replace(
                allowed,
                config=config,
                resolved={**allowed.resolved, **best.settings},
                summary=best.summary,
                waited_s=best.summary["waiting_by_limit"],
            )
            more = [one for one in second.changes() if not one.keys() & best.settings.keys()]
            summaries = done[wanted.index(best.settings)]
            progress.stage("trying second changes")
            done, left_out = self._summaries(more, config, budget_s, processes, clock, progress)
            on_top, _ = self._changes(goal, more, done, summaries, config)
            second_index, _ = self._recommended(goal, on_top, best.summary, bool(left_out))
            if second_index is not None and on_top[second_index].gpus == best.gpus:
                then = on_top[second_index]
            if left_out:
                notes.append(f"{len(left_out)} of {len(more)} second changes were not tried for lack of time.")
        if names := unsayable(self.config):
            notes.append(f"The commands do not repeat the figures: no command line leaves out --{', --'.join(names)}.")
        notes += self._beyond(before[0], changes)
        paths = self._paths(before[0], goal)
        baseline = {path: at(before[0], path) for path in paths}
        command = command_of(str(self._run.path), self.config)
        return Outcome(goal, baseline, changes, index, reason, then, untried, refused, notes, command)

    def _beyond(self, before: Mapping[str, Any], changes: Sequence[Change]) -> list[str]:
        """That the requests are more than any of the settings serves, if they are."""
        own = [one for one in changes if not one.needs_more_gpus and "max_queue_size" not in one.settings]
        offered = at(before, "arrivals.achieved_rate_per_s")
        if not own or not offered or not all(one.summary.get("overloaded") for one in own):
            return []
        if not before.get("overloaded"):
            return []
        highest = max(at(one, "request_throughput_per_s") or 0.0 for one in (before, *(one.summary for one in own)))
        devices = f"{self._gpus} GPU{'s' if self._gpus > 1 else ''}"
        return [
            f"The recorded {offered:.3g} requests/s are more than {devices} served under any of these settings; the "
            f"highest rate was {highest:.3g}."
        ]

    def _is_same(self, summary: Mapping[str, Any]) -> bool:
        return bool(summary["schedule_digest"] == (self._run.data.summary or {}).get("schedule_digest"))

    def _differs(self, summary: Mapping[str, Any]) -> str:
        recorded, now = at(self._run.data.summary or {}, "e2e_s.mean"), at(summary, "e2e_s.mean")
        text = "The replay of its trace decides otherwise than the run did; effects are against that replay"
        return f"{text}, whose mean E2E is {now or 0:.4g} s (recorded: {recorded or 0:.4g} s)."

    def _allowed(self, summary: Mapping[str, Any]) -> Allowed:
        columns = columns_of(self.trace.requests)
        first = columns[: min(len(columns), 1000)]
        return Allowed(
            self.config,
            self._run.config,
            summary,
            self._findings.waiting_s,
            int(np.max(self._run.iterations.budget_used, initial=0)),
            any(request.prefix_ids or request.prompt_tokens for request in first),
            len({request.priority for request in first}) > 1,
        )

    def _summaries(
        self,
        wanted: Sequence[Settings],
        config: RunConfig,
        until_s: float | None,
        processes: int | None,
        clock: WallClock,
        progress: Progress,
    ) -> tuple[dict[int, list[dict[str, Any]] | str], list[Settings]]:
        """By the index in `wanted`: the summaries of all seeds, or why it cannot run; and those that were not reached
        by `until_s`."""
        runs: list[tuple[Trace, RunConfig]] = []
        owner: list[int] = []
        found: dict[int, list[dict[str, Any]] | str] = {}
        for index, values in enumerate(wanted):
            try:
                configs = [config.with_values(**values).with_values(seed=seed) for seed in self._seeds]
            except InputError as error:
                found[index] = in_one_line(error)
                continue
            runs += [(self.trace, one) for one in configs]
            owner += [index] * len(configs)
        ended: dict[int, PointResult] = {}
        results = run_all(summarise, runs, processes)
        for number, result in results:
            ended[number] = result
            progress.update(len(ended), len(runs), "")
            if until_s is not None and clock.now() > until_s:
                break
        results.close()
        for index in dict.fromkeys(owner):
            mine = [ended.get(number) for number, of in enumerate(owner) if of == index]
            if any(one is not None and one.error for one in mine):
                found[index] = next(one.error for one in mine if one is not None and one.error)
            elif all(one is not None for one in mine):
                found[index] = [one.summary for one in mine if one is not None]
        return found, [values for index, values in enumerate(wanted) if index not in found]

    def _paths(self, summary: Mapping[str, Any], goal: Goal) -> list[str]:
        """The figures that are compared."""
        paths = [*LATENCIES, THROUGHPUT]
        if summary.get(GOODPUT) is not None:
            paths += [GOODPUT, GOOD_SHARE]
        return list(dict.fromkeys([*paths, *goal.targets, goal.path, FAILED]))

    def _changes(
        self,
        goal: Goal,
        wanted: Sequence[Settings],
        done: Mapping[int, list[dict[str, Any]] | str],
        before: list[dict[str, Any]] | str,
        config: RunConfig,
    ) -> tuple[list[Change], list[tuple[Settings, str]]]:
        """The changes that ran, the best first, and those that cannot run."""
        changes, refused = [], []
        for index, after in sorted(done.items()):
            values = wanted[index]
            if isinstance(after, str) or isinstance(before, str):
                refused.append((values, str(after)))
                continue
            score = goal.score(after[0])
            if score is None:
                refused.append((values, "no request completes"))
                continue
            effects = {
                path: _effect([at(one, path) for one in before], [at(one, path) for one in after])
                for path in self._paths(before[0], goal)
            }
            changed = config.with_values(**values)
            command = command_of(str(self._run.path), changed)
            gpus = changed.tp_size * changed.pp_size
            changes.append(Change(values, effects, command, after[0], score, gpus, gpus > self._gpus))
        return sorted(changes, key=lambda one: one.score), refused

    def _recommended(
        self, goal: Goal, changes: Sequence[Change], before: Mapping[str, Any], is_cut: bool
    ) -> tuple[int | None, str]:
        """The index of the best change, with which no more requests fail unless the goal counts them, and which needs
        no more GPUs unless nothing else helps; or why there is none."""
        start = goal.score(before)
        failed = at(before, FAILED) or 0
        helping = [
            index
            for index, one in enumerate(changes)
            if start is not None
            and start - one.score >= MIN_GAIN * abs(start)
            and start != one.score
            and not one.effects[goal.path].is_noise
            and (goal.counts_refusals or (at(one.summary, FAILED) or 0) <= failed)
        ]
        if helping:
            return next((index for index in helping if not changes[index].needs_more_gpus), helping[0]), ""
        improves = f"improves {goal.path} by {percent(MIN_GAIN)} or more"
        reason = f"none of the changes that were tried ({len(changes)}) {improves}"
        return None, reason + ("; others were not reached in the time" if is_cut else "")


def _effect(before: Sequence[float | None], after: Sequence[float | None]) -> Effect:
    """The effect with the run's own seed; noise if it does not have the same sign with all seeds."""
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old is not None and new is not None]
    signs = {(new > old) - (new < old) for old, new in pairs}
    return Effect(before[0], after[0], len(signs) != 1 or signs == {0})


def not_tried(reason: str) -> dict[str, Any]:
    """`what_if` of `why --json` where nothing was tried."""
    return {"goal": None, "baseline": {}, "changes": [], "recommended": None, "reason": reason, "then": None}


def parse_change(text: str) -> Settings:
    """The setting and the value in `name=value`; InputError for another form."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--what_if {text}: expected name=value, such as max_batch_size=128.")
    item = setting(name.strip().lstrip("-"))
    if item.group in ("recording", "replay", "endpoint"):
        raise InputError(
            f"--what_if {text}: {item.name} is no setting of the engine; the run's own trace is replayed as it was. "
            "Give a setting of the scheduler, the KV cache or the execution."
        )
    return {item.name: item.check(value.strip())}
