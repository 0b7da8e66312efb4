"""What the trials of `why` found: the goal, each change with its effects, and the recommended one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ifbbench.studies.allowed_changes import Settings
from ifbbench.studies.trace_window import Window

LATENCIES = ("ttft_s.p50", "ttft_s.p99", "tpot_s.p99", "e2e_s.mean")
THROUGHPUT, GOODPUT, GOOD_SHARE = "output_throughput_tokens_per_s", "goodput_requests_per_s", "goodput_share"
HIGHER_IS_BETTER = (THROUGHPUT, GOODPUT, GOOD_SHARE)


@dataclass(frozen=True)
class Goal:
    """What is to improve.

    path: into `summary.json`.
    why: how it was chosen.
    targets: targets by path, of objectives of which the one that is furthest above its target decides; empty where the
        figure at `path` does.
    """

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
    """A figure with the run's settings and with others.

    is_noise: whether there is no difference, it is not the same with each seed, or it is smaller than the error of the
        prediction.
    """

    before: float | None
    after: float | None
    is_noise: bool

    @property
    def change(self) -> float | None:
        """Relative to `before`; None where there is none."""
        return None if self.before is None or self.after is None or not self.before else self.after / self.before - 1


@dataclass(frozen=True)
class Change:
    """Other settings and what they did.

    command: repeats it.
    real_command: runs it on the device of the run; empty if that is simulated.
    score: see Goal.
    gpus: how many it needs.
    needs_more_gpus: than the run.
    """

    settings: Settings
    effects: dict[str, Effect]
    command: str
    real_command: str
    summary: Mapping[str, Any] = field(repr=False)
    score: float
    gpus: int
    needs_more_gpus: bool
    loses_more: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        effects = {path: vars(effect) for path, effect in self.effects.items()}
        return {
            "settings": self.settings,
            "effects": effects,
            "command": self.command,
            **({"real_command": self.real_command} if self.real_command else {}),
            "gpus": self.gpus,
            "needs_more_gpus": self.needs_more_gpus,
            "loses_more": self.loses_more,
        }


@dataclass(frozen=True)
class Outcome:
    """What was tried.

    changes: the best first.
    recommended: an index into it; None with the reason in `reason`.
    milder: where that loses more than it gains, the index of the best change that does not; None if all that help do.
    on_all: recommended change of a window, on all requests; None if there was no time.
    then: the best second change on top of it.
    untried: changes that the budget did not reach.
    refused: those that cannot run, with the reason.
    notes: what the reader must know to judge the figures.
    command: replays the run as it was.
    engine: engine of the run, whose names its settings have.
    recorded, replayed: figures of a run on a real device or against an endpoint, and those of the replay of all of its
        requests, by path; empty for others.
    errors: errors of predicted differences, as shares, by path.
    window: what was replayed, if not all.
    """

    goal: Goal
    baseline: dict[str, float | None]
    changes: list[Change]
    recommended: int | None
    reason: str
    milder: int | None
    on_all: Change | None
    then: Change | None
    untried: list[Settings]
    refused: list[tuple[Settings, str]]
    notes: list[str]
    command: str
    engine: str
    recorded: dict[str, float | None]
    replayed: dict[str, float | None]
    errors: dict[str, float]
    window: Window | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "goal": self.goal.path,
            "goal_chosen": self.goal.why,
            "objectives": dict(self.goal.targets),
            "engine": self.engine,
            "command": self.command,
            "baseline": self.baseline,
            "recorded": self.recorded or None,
            "replayed": self.replayed or None,
            "errors": self.errors,
            "window": self.window and self.window.as_dict(),
            "changes": [change.as_dict() for change in self.changes],
            "recommended": self.recommended,
            "reason": self.reason or None,
            "milder": self.milder,
            "on_all": self.on_all and self.on_all.as_dict(),
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


def loses_more(goal: Goal, effects: Mapping[str, Effect]) -> bool:
    """Whether another figure gets worse by a larger factor than that of `goal` gets better. Never with objectives,
    which say what is good enough."""
    if goal.targets or goal.counts_refusals:
        return False
    gain = _times_better(goal.path, effects[goal.path])
    others = (path for path, one in effects.items() if path in (*LATENCIES, THROUGHPUT) and not one.is_noise)
    return gain > 1 and any(1 / _times_better(path, effects[path]) > gain for path in others)


def _times_better(path: str, effect: Effect) -> float:
    """The factor by which a figure gets better, below 1 where it gets worse; 1 where there is none."""
    if not effect.before or not effect.after:
        return 1.0
    ratio = effect.after / effect.before
    return ratio if path in HIGHER_IS_BETTER else 1 / ratio


def effect_of(before: Sequence[float | None], after: Sequence[float | None], error: float | None) -> Effect:
    """The effect with the run's own seed; noise if it does not have the same sign with all seeds, or is not larger than
    `error`, a share of it."""
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old is not None and new is not None]
    signs = {(new > old) - (new < old) for old, new in pairs}
    effect = Effect(before[0], after[0], len(signs) != 1 or signs == {0})
    is_small = error is not None and effect.change is not None and abs(effect.change) <= error
    return replace(effect, is_noise=True) if is_small else effect


def not_tried(reason: str) -> dict[str, Any]:
    """`what_if` of `why --json` where nothing was tried."""
    return {"goal": None, "baseline": {}, "changes": [], "recommended": None, "reason": reason, "then": None}
