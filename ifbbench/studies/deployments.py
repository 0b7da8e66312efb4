"""Deployments side by side: how many GPUs of which kind serve a trace under its objectives, and at what cost.

Each combination of device, data type, tensor and pipeline parallelism and router gets the fewest replicas that meet the
objectives with the settings that users have without a search; only the cheapest combination of each device is then
searched. A combination that needs many more GPUs than the cheapest one of its device is left out with the reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ifbbench.errors import InputError
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.settings.config import RunConfig
from ifbbench.simulated.hardware import load_hardware
from ifbbench.studies.tune import FAR_OFF, Tuner, Tuning
from ifbbench.studies.tune_candidates import TIE, Candidate, Goal
from ifbbench.workload.load import in_memory, read_source

# The settings that say what a deployment is, in the order of their names in a row.
DEPLOYED = ("device", "dtype", "tp_size", "pp_size", "router")
HOURS_A_MONTH = 730.0


@dataclass
class Deployment:
    """A combination of DEPLOYED settings.

    best: the cheapest candidate; None if it needs many more GPUs than another one of its device (at least `needs`), or
    does not run, for `reason`. spare: see `Tuner.spare_rate`; None if it was not tried. tuning: the search, of those
    that were searched."""

    values: Mapping[str, Any]
    tuner: Tuner | None = None
    best: Candidate | None = None
    needs: int | None = None
    reason: str = ""
    spare: float | None = None
    tuning: Tuning | None = None

    @property
    def gpus(self) -> int:
        return int(self.values["tp_size"] * self.values["pp_size"])

    @property
    def cost(self) -> float:
        """The price of all GPUs for an hour."""
        assert self.tuner is not None
        assert self.best is not None
        return self.best.gpus * self.tuner.judge.price


def compare_deployments(
    source: str | None,
    base: RunConfig,
    choices: Mapping[str, Sequence[Any]],
    fixed: frozenset[str],
    goal: Goal,
    max_gpus: int,
    prices: Mapping[str, float],
    progress: Progress = NO_PROGRESS,
    on_best: Callable[[Deployment], None] = lambda one: None,
) -> list[Deployment]:
    """The cheapest deployment of each device first, then the others, by cost; those that cannot be last.

    choices: values of DEPLOYED settings. max_gpus: of all replicas together. prices: of a GPU hour, by device. on_best:
    is called with each new cheapest one. InputError if no deployment meets the objectives with so many GPUs."""
    trace = in_memory(read_source(source, base, progress))
    combinations = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    combinations = [{name: getattr(base, name) for name in DEPLOYED} | one for one in combinations]
    # Few GPUs first: what they cost bounds what others may.
    combinations.sort(key=lambda one: one["tp_size"] * one["pp_size"])
    found: list[Deployment] = []
    cheapest: dict[str, Deployment] = {}
    progress.stage("comparing deployments")
    for number, values in enumerate(combinations):
        progress.update(number, len(combinations), text_of(values))
        one = Deployment(values)
        found.append(one)
        known = cheapest.get(values["device"])
        most = max_gpus
        if known is not None and known.best is not None:
            most = min(max_gpus, int(FAR_OFF * known.best.gpus))
        if one.gpus > most:
            one.needs = one.gpus
            continue
        try:
            config = base.with_values(**values)
            price = prices[values["device"]]
            one.tuner = Tuner(trace, config, fixed | set(DEPLOYED), goal, max_gpus, price, progress)
            one.best = one.tuner.without_search(most)
        except InputError as error:
            one.reason = str(error)
            continue
        if one.best is None:
            one.needs = (most // one.gpus + 1) * one.gpus
        elif known is None or _order(one) < _order(known):
            cheapest[values["device"]] = one
            if _order(one) <= min(map(_order, cheapest.values())):
                on_best(one)
    if not cheapest:
        if len({one.reason for one in found}) == 1 and found[0].reason:
            raise InputError(found[0].reason)
        reasons = [
            f"{text_of(one.values)}: {one.reason or f'misses the objectives with {max_gpus} GPUs'}" for one in found
        ]
        raise InputError(f"no deployment serves this trace; {'; '.join(reasons)}.")
    for one in cheapest.values():
        _search(one, progress)
    first = sorted(cheapest.values(), key=_order)
    others = [one for one in found if one.best is not None and one not in first]
    return [*first, *sorted(others, key=_order), *(one for one in found if one.best is None)]


def _search(one: Deployment, progress: Progress) -> None:
    """Search the settings of a deployment for fewer replicas, and find how much more traffic it takes."""
    assert one.tuner is not None
    assert one.best is not None
    one.tuner.max_gpus = one.best.gpus
    one.tuning = one.tuner.run()
    found, goal = one.tuning.best, one.tuner.goal
    is_worse = found is None or goal.shortfalls(found.summary) or found.score + TIE * abs(found.score) < one.best.score
    one.tuning.best = one.best = one.best if is_worse else found
    assert one.best is not None
    progress.stage(f"spare rate of {text_of(one.values)}")
    one.spare = one.tuner.spare_rate(one.best)


def _order(one: Deployment) -> tuple[float, float]:
    assert one.best is not None
    return one.cost, -one.best.score


def text_of(values: Mapping[str, Any]) -> str:
    """A deployment in words: `h100-sxm fp8 TP2`."""
    words = [str(values["device"]).removeprefix("sim:"), values["dtype"] or "", f"TP{values['tp_size']}"]
    words += [f"PP{values['pp_size']}" if values["pp_size"] > 1 else "", values["router"] or ""]
    return " ".join(filter(None, words))


def nearest_objective(one: Candidate, goal: Goal) -> tuple[str, float] | None:
    """The objective that is nearest to its limit, and its value as a share of the limit; None without objectives."""
    shares = {
        objective.name: value / objective.target_s
        for objective in goal.objectives
        if (value := one.summary["slo"][objective.name]["value"]) is not None
    }
    return max(shares.items(), key=lambda item: item[1]) if shares else None


def described_deployment(one: Deployment) -> dict[str, Any]:
    """A row of the comparison. Costs of tokens are the price of all GPUs over the tokens of that kind."""
    row: dict[str, Any] = {name: one.values[name] for name in DEPLOYED}
    row["device"] = str(row["device"]).removeprefix("sim:")
    if one.tuner is not None:
        row["dtype"] = one.tuner.base.weight_dtype
    if one.best is None or one.tuner is None:
        return row | {"gpus": None, "needs_gpus": one.needs, "reason": one.reason}
    summary = one.best.summary
    seconds_per_token = summary["duration_s"] / max(summary["prompt_tokens"], 1)
    nearest = nearest_objective(one.best, one.tuner.goal)
    return row | {
        "gpus": one.best.gpus,
        "replicas": one.best.run.case.replicas,
        "price_per_hour": one.cost,
        "price_per_month": one.cost * HOURS_A_MONTH,
        "cost_per_million_input_tokens": one.cost / 3600 * seconds_per_token * 1e6,
        "cost_per_million_output_tokens": -one.best.score,
        "nearest_objective": nearest and {"name": nearest[0], "share_of_limit": nearest[1]},
        "spare_rate": one.spare,
        "is_searched": one.tuning is not None,
        "settings": one.best.settings,
    }


def price_of(device: str, prices: Mapping[str, float]) -> float:
    """The price of a GPU hour of a device: as given, else that of its profile. InputError if neither is known."""
    hardware = load_hardware(device)
    for name in (hardware.name, ""):
        if name in prices:
            return prices[name]
    if hardware.price_per_hour is None:
        raise InputError(
            f"--gpu-hour-price: the price of {hardware.name} is not known; give it, such as "
            f"--gpu-hour-price {hardware.name}=1.5."
        )
    return hardware.price_per_hour
