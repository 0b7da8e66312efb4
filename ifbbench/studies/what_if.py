"""What other settings would have done for a recorded run: its own trace is replayed under each of them.

Every change is one that the settings of the run allow. Those that relieve what the run waited for come first, so that a
budget of time that is too short leaves out the least promising ones; they are named.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from ifbbench.analysis.findings import Findings
from ifbbench.analysis.generation_time import HELD, PROMPTS
from ifbbench.analysis.number_texts import percent, significant
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.build.engines import engine_defaults
from ifbbench.clock import WallClock
from ifbbench.errors import InputError
from ifbbench.processes import TimeIsUp, run_within, usable_cores
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.rundir.what_if import FAILED
from ifbbench.settings.config import RunConfig, settings
from ifbbench.settings.fields import CLIENT_GROUPS, choice
from ifbbench.settings.names import from_mapping, setting
from ifbbench.settings.objectives import parse_objectives
from ifbbench.simulated.expected_error import difference_errors
from ifbbench.simulated.hardware import load_hardware
from ifbbench.studies.allowed_changes import ASIDE, DEVICE, Allowed, Settings
from ifbbench.studies.fitted_run import NOT_FITTED, REPLAY, fit_device, replay_endpoint, replayed_config
from ifbbench.studies.points import PointResult, in_one_line, run_all, summarise
from ifbbench.studies.replayed_settings import base_config, command_of, trace_of, unsayable
from ifbbench.studies.trace_window import MIN_REQUESTS, Window, window_of
from ifbbench.studies.what_if_outcome import (
    GOOD_SHARE,
    GOODPUT,
    LATENCIES,
    THROUGHPUT,
    Change,
    Goal,
    Outcome,
    at,
    effect_of,
    loses_more,
)
from ifbbench.workload.trace import Trace, columns_of

DEFAULT_BUDGET_S = 30.0
# Changes of a run without a summary, which was killed.
USUAL_CHANGES = 25
# The first changes may take this share of the budget; the rest is for second ones on top of the best.
FIRST_SHARE = 0.6
# Trials of a window may take this share; after them, the best are tried on all requests, if there is time for that.
WINDOW_SHARE = 0.4
# Less than this is no reason to change a setting.
MIN_GAIN = 0.01
# Seeds that decide where the run draws anything.
SEEDS = 3
GOALS = {
    "ttft.p99": "ttft_s.p99",
    "tpot.p99": "tpot_s.p99",
    "e2e.mean": "e2e_s.mean",
    "output_throughput": "output_throughput_tokens_per_s",
    "goodput": "goodput_requests_per_s",
    "slo": "",
}
# Not all of the time that is left is planned for, because replays under other settings may take longer.
PLANNED_SHARE = 0.8
# A trace is cut if the budget reaches less than this share of the changes with all of it.
MIN_REACHED = 0.5
# So many changes at most that help in a window are tried on all requests.
MAX_ON_ALL = 4


class WhatIf:
    """The trials of one run.

    findings: findings of the run, which must be one that `why_not` allows.

    InputError for a run on a real device that the cost model cannot be fitted to.

    endpoint: a run against an endpoint, of whose requests `findings` are a replay on a simulated device.
    slower: that was made so many times slower.
    fit_s: a fit of the cost model may take so many seconds; TimeIsUp if it takes longer.
    """

    def __init__(
        self, findings: Findings, endpoint: RecordedRun | None = None, slower: float = 1.0, fit_s: float = inf
    ) -> None:
        self._findings, self._run = findings, findings.run
        self._measured, self._slower = endpoint or findings.run, slower
        self._source = str(self._measured.path)
        self.trace = trace_of(self._run)
        columns = columns_of(self.trace.requests)
        has_sessions, derived = columns.after is not None, self._run.data.run.get("derived", [])
        self._asked = self.config = base_config(self._run.config, derived, has_sessions)
        self._is_fitted = self._is_real = self.config.hardware is None
        if endpoint is not None:
            self._is_fitted = True
        if self._is_real:
            device = run_within(lambda: fit_device(self._run), fit_s)
            self.config = base_config(replayed_config(self._run, device), [], has_sessions)
        draws_loras = self.config.num_loras and not columns.names_loras
        draws = self.config.acceptance_rate is not None or draws_loras or self.config.schedule_policy == "random"
        self._gpus = self.config.tp_size * self.config.pp_size
        self._seeds = [self.config.seed + number for number in range(SEEDS if draws else 1)]
        self._window: Window | None = None
        # Where a window is replayed: the summaries of the run's settings over all requests, and how long that takes.
        self._of_all = [self._run.data.summary] * len(self._seeds) if self._run.data.summary else []
        self._all_s = 0.0
        self._recorded: dict[str, float | None] = {}
        self._replayed: dict[str, float | None] = {}
        self._errors: dict[str, float] = {}
        self._clock, self._processes, self._progress = WallClock(), 1, NO_PROGRESS
        self._answered = 0

    @classmethod
    def of_endpoint(cls, run: RecordedRun, server: Mapping[str, Any], fit_s: float = inf) -> "WhatIf":
        """The trials of a run against an endpoint: its requests are replayed on a simulated device that is fitted to
        its mean latency.

        server: the settings of the server, and the device.
        fit_s: see WhatIf.

        InputError: see `replay_endpoint`.
        """
        trace = trace_of(run)
        config = from_mapping({**engine_defaults(server), **server}, command_line=True).as_dict()
        known = {item.name: item.group for item in settings()}
        config |= {name: value for name, value in run.config.items() if known.get(name) == "replay"}
        has_sessions = columns_of(trace.requests).after is not None
        asked = base_config(config, [], has_sessions)
        slower = run_within(lambda: replay_endpoint(run, trace, asked), fit_s)
        return cls(Findings(RecordedRun.load(run.path / REPLAY)), run, slower)

    def goal(self, name: str | None) -> Goal:
        """The goal called `name` (see GOALS). By default the objectives of the run, else the figure that is furthest
        from what the device could do. InputError for one that the run does not have."""
        check_goal(name, self.config.slo)
        objectives = parse_objectives(self.config.slo) if self.config.slo else ()
        has_goodput = any(one.statistic is None for one in objectives)
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
        return Goal(path, f"{significant(ratios.get(path, 1.0))} times what the device could do, the largest distance")

    def try_all(
        self,
        goal: Goal,
        only: Sequence[Settings] = (),
        budget_s: float = DEFAULT_BUDGET_S,
        processes: int | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> Outcome:
        """Try `only`, or all single changes that the settings allow, and second ones on top of the best. TimeIsUp if
        the budget is over before the run's own settings have been replayed."""
        self._clock, self._processes, self._progress = WallClock(), processes or usable_cores(), progress
        progress.stage("replaying the run")
        before = self._baseline(goal, None if only else budget_s)
        notes = self._notes(before[0])
        allowed = self._allowed(before[0], goal)
        wanted = list(only) or allowed.changes()
        progress.stage("trying changes")
        is_affordable = self._all_s * len(self._seeds) <= budget_s * (1 - WINDOW_SHARE)
        until_s = None if only else budget_s * (WINDOW_SHARE if self._window and is_affordable else FIRST_SHARE)
        begin_s = self._clock.now()
        done, untried = self._summaries(wanted, self.config, until_s)
        if self._window and done:  # replays that run beside each other may take longer than that of the run's settings
            of_window_s = (self._clock.now() - begin_s) * self._processes / len(done) / len(self._seeds)
            self._all_s = max(self._all_s, of_window_s * self._window.of / self._window.requests)
        changes, refused = self._changes(goal, wanted, done, before, self.config, {})
        index, reason = self._recommended(goal, changes, before[0], bool(untried), refused)
        on_all, tried = None, list[Change]()
        if self._window and index is not None:
            tried = self._best_on_all(goal, changes, before[0], budget_s)
            if not tried:
                notes.append(f"No change was tried on all requests: each takes about {self._all_s:,.0f} s (--budget).")
            elif helping := self._helping(goal, tried, self._of_all[0]):
                on_all = tried[helping[0]]
                index = next(number for number, one in enumerate(changes) if one.settings == on_all.settings)
            else:
                index, reason = None, f"on all requests, none of the best {len(tried)} changes of the window does"
        is_costly = index is not None and (on_all or changes[index]).loses_more
        milder = self._milder(goal, changes, before[0]) if is_costly else None
        then = None
        if index is not None and not only:
            best = changes[index]
            then, left_out = self._second(goal, allowed, best, done[wanted.index(best.settings)], budget_s)
            notes += [left_out] if left_out else []
        if names := unsayable(self.config):
            notes.append(f"The commands do not repeat the figures: no command line leaves out --{', --'.join(names)}.")
        if not self._window:
            notes += self._beyond(before[0], changes)
        elif tried:
            notes += self._beyond(self._of_all[0], tried)
        paths = self._paths(before[0], goal)
        baseline = {path: at(before[0], path) for path in paths}
        return Outcome(
            goal,
            baseline,
            changes,
            index,
            reason,
            milder,
            on_all,
            then,
            untried,
            refused,
            notes,
            command_of(self._source, self.config),
            self.config.engine,
            self._recorded,
            self._replayed,
            self._errors,
            self._window,
        )

    def _second(
        self,
        goal: Goal,
        allowed: Allowed,
        best: Change,
        summaries: list[dict[str, Any]] | str,
        budget_s: float,
    ) -> tuple[Change | None, str]:
        """The best change on top of `best` that needs no more GPUs, if one helps; and a note on those that were not
        tried. summaries: of the runs with `best`."""
        second = replace(
            allowed,
            config=self.config.with_values(**best.settings),
            resolved={**allowed.resolved, **best.settings},
            summary=best.summary,
            waited_s=best.summary["waiting_by_limit"] | self._device_s(goal),
        )
        wanted = [one for one in second.changes() if not one.keys() & best.settings.keys()]
        self._progress.stage("trying second changes")
        done, untried = self._summaries(wanted, second.config, budget_s)
        changes, _ = self._changes(goal, wanted, done, summaries, self.config, best.settings)
        index, _ = self._recommended(goal, changes, best.summary, bool(untried), ())
        note = f"{len(untried)} of {len(wanted)} second changes were not tried for lack of time." if untried else ""
        return (changes[index] if index is not None and changes[index].gpus == best.gpus else None), note

    def _baseline(self, goal: Goal, budget_s: float | None) -> list[dict[str, Any]]:
        """The summaries of the run's own settings. If a replay of all requests takes too long to try enough changes
        within the budget, they are of a window, which all later replays are of, too. budget_s: None for all the time
        that it takes."""
        begin_s, limit_s = self._clock.now(), inf
        if budget_s is not None:
            # About as many changes are allowed whatever the summary says.
            number = (
                len(self._allowed(self._run.data.summary, goal).changes()) if self._run.data.summary else USUAL_CHANGES
            )
            affordable_s = budget_s * WINDOW_SHARE * PLANNED_SHARE * self._processes / (number * len(self._seeds))
            limit_s = affordable_s * FIRST_SHARE / WINDOW_SHARE / MIN_REACHED
        # The replay of a run on a real device shows how near it comes to all of the run.
        before = self._own(budget_s if self._is_fitted else begin_s + limit_s)
        if self._is_fitted and before is None:
            raise TimeIsUp
        taken_s = self._clock.now() - begin_s
        if self._is_fitted and before is not None:
            paths = self._paths(before[0], goal)
            self._recorded = {path: at(self._measured.data.summary or {}, path) for path in paths}
            self._replayed = {path: at(before[0], path) for path in paths}
            self._of_all = before
        if taken_s > limit_s:
            answered = len(self.trace) if before else self._answered / min(len(self._seeds), self._processes)
            size = max(int(answered * affordable_s / taken_s), MIN_REQUESTS)
            if size < len(self.trace):
                self._all_s = taken_s * len(self.trace) / max(answered, 1)
                ids = columns_of(self.trace.requests).request_id.tolist()
                self._window = window_of(self._run, ids, goal.path, size)
                requests = {"skip_samples": self._window.first, "max_num_samples": self._window.requests}
                self.config = self.config.with_values(**requests)
            if self._window or before is None:
                before = self._own(None if self._window else budget_s)
        if before is None:
            raise TimeIsUp
        self._errors = self._errors_of(before[0], goal)
        return before

    def _own(self, until_s: float | None) -> list[dict[str, Any]] | None:
        """The summaries of the run's own settings; None if there was no time. InputError if they do not run."""
        found = self._summaries([{}], self.config, until_s)[0].get(0)
        if isinstance(found, str):
            raise InputError(f"{self._run.path}: its settings do not run any more: {found}")
        return found

    def _errors_of(self, before: Mapping[str, Any], goal: Goal) -> dict[str, float]:
        """By path, the share by which a predicted difference may be wrong. Of a run on a real device, what the replay
        misses the run by; of a simulated one, what is known of such predictions."""
        if not self._is_fitted:
            return difference_errors(before.get("expected_error") or {}, self._paths(before, goal))
        found = {}
        for path, was in self._recorded.items():
            if path != FAILED and was and (now := self._replayed[path]):
                found[path] = max(now / was, was / now) - 1
        return found

    def _notes(self, before: Mapping[str, Any]) -> list[str]:
        """That the replay of the run's own settings decides otherwise, if it does; or how these are known."""
        if imported := self._run.data.run.get("imported"):
            names = ", ".join(f"--{name}" for name in imported["settings"]) or "none"
            return [f"Of the server's settings the log names {names}. The others are defaults, which it need not have."]
        if self._is_fitted:
            return [self._fit_text] if self._measured is not self._run else []
        return [] if self._window or self._is_same(before) else [self._differs(before)]

    @property
    def _fit_text(self) -> str:
        """How the device was fitted to a run against an endpoint."""
        changed = f"{max(self._slower, 1 / self._slower):.2f} times {'slower' if self._slower > 1 else 'faster'}"
        replay = self._run.path
        return (
            f"The simulated device was made {changed} than its profile, so that the mean E2E is that of the run. "
            f"`ifbbench why {replay}` explains the replay, and `ifbbench compare {self._source} {replay}` compares it "
            "with the run."
        )

    def _beyond(self, before: Mapping[str, Any], changes: Sequence[Change]) -> list[str]:
        """That the requests are more than any of the settings serves, if they are. before, changes: of all requests."""
        own = [one for one in changes if not one.needs_more_gpus and "max_queue_size" not in one.settings]
        summaries = [before, *(one.summary for one in own)]
        offered = at(before, "arrivals.achieved_rate_per_s")
        if not own or not offered or not all(one.get("overloaded") for one in summaries):
            return []
        highest = max(at(one, "request_throughput_per_s") or 0.0 for one in summaries)
        name = "such device" if self._is_fitted else load_hardware(self.config.hardware or "").name
        devices = f"one {name}" if self._gpus == 1 else f"{self._gpus} {name}{'s' if self._is_fitted else ''}"
        which = f"the {len(own)} that were tried on all requests" if self._window else "these settings"
        return [
            f"The recorded {significant(offered)} requests/s do not fit {devices} under any of {which}; the highest "
            f"rate was {significant(highest)}."
        ]

    def _is_same(self, summary: Mapping[str, Any]) -> bool:
        return bool(summary["schedule_digest"] == (self._run.data.summary or {}).get("schedule_digest"))

    def _differs(self, summary: Mapping[str, Any]) -> str:
        recorded, now = at(self._run.data.summary or {}, "e2e_s.mean"), at(summary, "e2e_s.mean")
        text = "The replay of its trace decides otherwise than the run did; effects are against that replay"
        return f"{text}, whose mean E2E is {now or 0:.4g} s (recorded: {recorded or 0:.4g} s)."

    def _allowed(self, summary: Mapping[str, Any], goal: Goal) -> Allowed:
        columns = columns_of(self.trace.requests)
        first = columns[: min(len(columns), 1000)]
        return Allowed(
            self.config,
            self._run.config,
            summary,
            self._findings.waiting_s | self._device_s(goal),
            int(np.max(self._run.iterations.budget_used, initial=0)),
            any(request.prefix_ids or request.prompt_tokens for request in first),
            len({request.priority for request in first}) > 1,
            int(np.max(np.asarray(columns.prompt_len) + np.asarray(columns.max_new_tokens), initial=0)),
            NOT_FITTED if self._is_fitted else (),
        )

    def _device_s(self, goal: Goal) -> dict[str, float]:
        """The request-seconds that prompts took of the time between tokens, which a first token does not wait for: of
        batches with both, and while requests that generate stood aside."""
        generation = self._findings.generation
        if generation is None or goal.path.startswith(("ttft_s", "queue_time_s")):
            return {}
        return {DEVICE: generation.of_run[PROMPTS], ASIDE: generation.of_run[HELD]}

    def _summaries(
        self,
        wanted: Sequence[Settings],
        config: RunConfig,
        until_s: float | None,
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

        def check_time(answered: int = 0) -> None:
            self._answered = max(self._answered, answered)
            if until_s is not None and self._clock.now() > until_s:
                raise TimeIsUp

        results = run_all(summarise, runs, self._processes, check_time)
        with suppress(TimeIsUp):
            check_time()
            for number, result in results:
                ended[number] = result
                self._progress.update(len(ended), len(runs), "")
                check_time()
        results.close()
        for index in dict.fromkeys(owner):
            mine = [ended.get(number) for number, of in enumerate(owner) if of == index]
            if any(one is not None and one.error for one in mine):
                found[index] = next(one.error for one in mine if one is not None and one.error)
            elif all(one is not None for one in mine):
                found[index] = [one.summary for one in mine if one is not None]
        return found, [values for index, values in enumerate(wanted) if index not in found]

    def _paths(self, summary: Mapping[str, Any], goal: Goal) -> list[str]:
        """The figures that are compared, with those of the objectives."""
        paths = [*LATENCIES, THROUGHPUT]
        if summary.get(GOODPUT) is not None:
            paths += [GOODPUT, GOOD_SHARE]
        objectives = parse_objectives(self.config.slo) if self.config.slo else ()
        paths += [f"{one.latency}.{one.statistic}" for one in objectives if one.statistic]
        return list(dict.fromkeys([*paths, *goal.targets, goal.path, FAILED]))

    def _changes(
        self,
        goal: Goal,
        wanted: Sequence[Settings],
        done: Mapping[int, list[dict[str, Any]] | str],
        before: list[dict[str, Any]] | str,
        base: RunConfig,
        on_top_of: Settings,
    ) -> tuple[list[Change], list[tuple[Settings, str]]]:
        """The changes that ran, the best first, and those that cannot run. base, on_top_of: of the run in `before`."""
        changes, refused, errors = [], [], self._errors
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
                path: effect_of([at(one, path) for one in before], [at(one, path) for one in after], errors.get(path))
                for path in self._paths(before[0], goal)
            }
            both = {**on_top_of, **values}
            changed = base.with_values(**both)
            command = command_of(self._source, changed)
            real_command = command_of(self._source, self._asked.with_values(**both)) if self._is_real else ""
            gpus = changed.tp_size * changed.pp_size
            more, loses = gpus > self._gpus, loses_more(goal, effects)
            changes.append(Change(values, effects, command, real_command, after[0], score, gpus, more, loses))
        return sorted(changes, key=lambda one: one.score), refused

    def _helping(self, goal: Goal, changes: Sequence[Change], before: Mapping[str, Any]) -> list[int]:
        """The indices of changes that improve the goal, with which no more requests fail unless the goal counts them;
        the best first, those that need more GPUs last."""
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
        return sorted(helping, key=lambda index: changes[index].needs_more_gpus)

    def _recommended(
        self,
        goal: Goal,
        changes: Sequence[Change],
        before: Mapping[str, Any],
        is_cut: bool,
        refused: Sequence[tuple[Settings, str]],
    ) -> tuple[int | None, str]:
        """The index of the best change that helps; or why there is none."""
        if not changes and is_cut:
            return None, "no change was reached in the time"
        if not changes:
            return None, f"none of the changes can run{': ' + refused[0][1].rstrip('.?') if len(refused) == 1 else ''}"
        if helping := self._helping(goal, changes, before):
            return helping[0], ""
        improves = f"improves {goal.path} by {percent(MIN_GAIN)} or more"
        reason = f"none of the changes that were tried ({len(changes)}) {improves}"
        if error := self._errors.get(goal.path):
            reason += f" and by more than {percent(error)}, the error of such predictions"
        return None, reason + ("; others were not reached in the time" if is_cut else "")

    def _milder(self, goal: Goal, changes: Sequence[Change], before: Mapping[str, Any]) -> int | None:
        """The index of the best change that helps, needs no more GPUs, and makes no other figure worse by more."""
        for index in self._helping(goal, changes, before):
            if not changes[index].loses_more and not changes[index].needs_more_gpus:
                return index
        return None

    def _best_on_all(
        self, goal: Goal, changes: Sequence[Change], before: Mapping[str, Any], budget_s: float
    ) -> list[Change]:
        """The changes that help most in the window, tried on all requests, the best first; as many as there is time
        for."""
        rounds = max(int((budget_s - self._clock.now()) / (self._all_s * len(self._seeds))), 0)
        chosen = self._helping(goal, changes, before)[: min(rounds * self._processes, MAX_ON_ALL)]
        if not chosen or not self._of_all:
            return []
        self._progress.stage("trying the best on all requests")
        wanted = [changes[index].settings for index in chosen]
        config = self.config.with_values(skip_samples=0, max_num_samples=None)
        done, _ = self._summaries(wanted, config, budget_s)
        return self._changes(goal, wanted, done, self._of_all, config, {})[0]


def check_goal(name: str | None, slo: str | None) -> None:
    """InputError if a run with the objectives `slo` does not have the goal called `name`."""
    objectives = parse_objectives(slo) if slo else ()
    if name in ("slo", "goodput") and not objectives:
        raise InputError(f"--improve {name}: the run has no objectives; run it with --slo, or choose another goal.")
    if name == "goodput" and all(one.statistic for one in objectives):
        raise InputError(
            "--improve goodput: the run has no objective of each request, such as ttft=1s; choose another goal."
        )


def parse_change(text: str) -> Settings:
    """The setting and the value in `name=value`; InputError for another form."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--what_if {text}: expected name=value, such as max_batch_size=128.")
    item = setting(name.strip().lstrip("-"))
    if item.group in CLIENT_GROUPS:
        raise InputError(
            f"--what_if {text}: {item.name} is no setting of the engine; the run's own trace is replayed as it was. "
            "Give a setting of the scheduler, the KV cache or the execution."
        )
    return {item.name: item.check(value.strip())}
