"""Deployments side by side: how many GPUs of which kind serve a trace under its objectives, and at what cost.

Each combination of device, data type, tensor and pipeline parallelism and router gets the fewest replicas that meet the
objectives with the settings that users have without a search; only the cheapest combination of each device is then
searched. A combination that needs many more GPUs than the cheapest one of its device is left out with the reason.
Prefill and decode apart are combinations beside those of replicas that do both; the cheapest of each are searched.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ifbbench.errors import InputError
from ifbbench.fleet.sides import side_values
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.rundir.disaggregated import DECODE, SIDES
from ifbbench.settings.config import SIDE_SETTINGS, RunConfig
from ifbbench.simulated.hardware import load_hardware
from ifbbench.studies.tune import Tuner
from ifbbench.studies.tune_candidates import TIE, Candidate, Goal, nearest_objective
from ifbbench.studies.tune_load import FAR_OFF
from ifbbench.studies.tune_runs import sides_of
from ifbbench.studies.tune_search import Tuning
from ifbbench.studies.tune_sides import SidesTuner, compared_text, time_to_first_token
from ifbbench.workload.load import in_memory, read_source
from ifbbench.workload.trace import Trace

# The settings that say what a deployment is, in the order of their names in a row.
DEPLOYED = ("device", "dtype", "tp_size", "pp_size", "router")
# Whether replicas do both prefill and decode. Those of the latter have DECODE_TP GPUs.
SIDES_OF, TOGETHER, APART, DECODE_TP = "sides", "together", "apart", "decode_tp_size"
HOURS_A_MONTH = 730.0


@dataclass
class Deployment:
    """A combination of DEPLOYED settings; with prefill and decode apart of SIDES_OF and DECODE_TP, too, and the GPUs
    are those of a pair of replicas.

    best: the cheapest candidate; None if it needs many more GPUs than another one of its device (at least `needs`), or
        does not run, for `reason`.
    spare: see `Tuner.spare_rate`; None if it was not tried.
    tuning: the search, of those that were searched.
    """

    values: Mapping[str, Any]
    tuner: Tuner | None = None
    best: Candidate | None = None
    needs: int | None = None
    reason: str = ""
    spare: float | None = None
    tuning: Tuning | None = None

    @property
    def gpus(self) -> int:
        return int((self.values["tp_size"] + self.values.get(DECODE_TP, 0)) * self.values["pp_size"])

    @property
    def is_apart(self) -> bool:
        return self.values.get(SIDES_OF) == APART

    @property
    def kind(self) -> tuple[str, bool]:
        """What deployments have in common of which the cheapest one is searched: the device, and `is_apart`."""
        return str(self.values["device"]), self.is_apart

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
    sides: Sequence[str] = (),
    progress: Progress = NO_PROGRESS,
    on_best: Callable[[Deployment], None] = lambda one: None,
) -> list[Deployment]:
    """The cheapest deployment of each device first, then the others, by cost; those that cannot be last.

    choices: values of DEPLOYED settings.
    max_gpus: maximum number of GPUs of all replicas together.
    prices: prices of a GPU hour, by device.
    sides: TOGETHER, APART, or both; none is TOGETHER.
    on_best: is called with each new cheapest one.

    InputError if no deployment meets the objectives with so many GPUs.
    """
    trace = in_memory(read_source(source, base, progress))
    # Few GPUs first: what they cost bounds what others may.
    found = sorted(_combinations(base, choices, sides or (TOGETHER,)), key=lambda one: one.gpus)
    cheapest: dict[tuple[str, bool], Deployment] = {}
    progress.stage("comparing deployments")
    for number, one in enumerate(found):
        progress.update(number, len(found), text_of(one.values))
        of_device = [other for other in cheapest.values() if other.values["device"] == one.values["device"]]
        most = min([max_gpus, *(int(FAR_OFF * other.best.gpus) for other in of_device if other.best is not None)])
        if one.gpus > most:
            one.needs = one.gpus
            continue
        try:
            one.tuner = _tuner(one, trace, base, fixed, goal, max_gpus, prices, progress)
            one.best = one.tuner.without_search(most)
        except InputError as error:
            one.reason = str(error)
            continue
        if one.best is None:
            one.needs = most + 1 if one.is_apart else (most // one.gpus + 1) * one.gpus
        elif one.kind not in cheapest or _order(one) < _order(cheapest[one.kind]):
            cheapest[one.kind] = one
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


def _combinations(base: RunConfig, choices: Mapping[str, Sequence[Any]], sides: Sequence[str]) -> list[Deployment]:
    """All deployments that are compared. Sides that are apart have each of the TP sizes, but those that are given."""
    found = []
    for values in product(*choices.values()):
        one = {name: getattr(base, name) for name in DEPLOYED} | dict(zip(choices, values, strict=True))
        if TOGETHER in sides:
            found.append(Deployment(one))
        if APART not in sides:
            continue
        given = [side_values(base, side).get("tp_size") for side in SIDES]
        if given[0] is not None:
            one = one | {"tp_size": given[0]}
        sizes = choices.get("tp_size", [base.tp_size]) if given[1] is None else [given[1]]
        apart = [Deployment(one | {SIDES_OF: APART, DECODE_TP: size}) for size in sizes]
        found += [deployment for deployment in apart if deployment not in found]
    return found


def _tuner(
    one: Deployment,
    trace: Trace,
    base: RunConfig,
    fixed: frozenset[str],
    goal: Goal,
    max_gpus: int,
    prices: Mapping[str, float],
    progress: Progress,
) -> Tuner:
    """The search over the settings of a deployment."""
    config = base.with_values(**{name: one.values[name] for name in DEPLOYED})
    if one.is_apart:
        decode_tp = one.values[DECODE_TP]
        if "tp_size" not in side_values(base, DECODE) and decode_tp != config.tp_size:
            config = config.with_values(decode=",".join(filter(None, (base.decode, f"tp_size={decode_tp}"))))
        config = config.with_values(prefill_replicas=1, decode_replicas=1)
    else:
        config = config.without(*SIDE_SETTINGS)
    kind = SidesTuner if one.is_apart else Tuner
    return kind(trace, config, fixed | set(DEPLOYED), goal, max_gpus, prices[one.values["device"]], progress)


def compare_sides(found: Sequence[Deployment], goal: Goal) -> dict[str, Any] | None:
    """Whether prefill and decode apart pay on the cheapest device, of deployments in the order of their cost: `text`,
    and the figures of both forms, with as many GPUs for the other one as the cheaper one needs. None where only one
    form was asked for."""
    first = found[0]
    alike = [one for one in found if one.values["device"] == first.values["device"]]
    forms = {is_apart: [one for one in alike if one.is_apart == is_apart] for is_apart in (False, True)}
    if not all(forms.values()) or first.best is None:
        return None
    together, apart = (next((one.best for one in form if one.best is not None), None) for form in forms.values())
    others = [one for one in forms[not first.is_apart] if one.tuner is not None and not one.reason]
    gpus, at_equal = first.best.gpus, None
    if others and (together is None or apart is None or together.gpus != apart.gpus):
        same = ("dtype", "tp_size", "pp_size", "router")
        others.sort(key=lambda one: sum(one.values[name] != first.values[name] for name in same))
        tuner = others[0].tuner
        assert tuner is not None
        at_equal = tuner.nearest(gpus)
    text = compared_text(together, apart, at_equal, goal)
    named = {"together": together, "apart": apart, "with_equal_gpus": at_equal}
    return {"text": text} | {name: one and _figures(one, goal) for name, one in named.items()}


def _figures(one: Candidate, goal: Goal) -> dict[str, Any]:
    case = one.run.case
    times = time_to_first_token(one) if case.is_apart else {}
    return {
        "gpus": one.gpus,
        **(sides_of(case) or {"replicas": case.replicas}),
        "misses": goal.shortfalls(one.summary),
        **({"mean_s": times} if times else {}),
    }


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
    """A deployment in words: `h100-sxm fp8 TP2`, or `h100-sxm fp8 TP1 + TP2 apart`."""
    words = [str(values["device"]).removeprefix("sim:"), values["dtype"] or "", f"TP{values['tp_size']}"]
    if SIDES_OF in values:
        words[-1] = f"TP{values['tp_size']} + TP{values[DECODE_TP]}"
    words += [f"PP{values['pp_size']}" if values["pp_size"] > 1 else "", values["router"] or ""]
    words += [APART if SIDES_OF in values else ""]
    return " ".join(filter(None, words))


def described_deployment(one: Deployment) -> dict[str, Any]:
    """A row of the comparison. Costs of tokens are the price of all GPUs over the tokens of that kind."""
    row: dict[str, Any] = {name: one.values[name] for name in DEPLOYED}
    row |= {SIDES_OF: TOGETHER} | {name: one.values[name] for name in (SIDES_OF, DECODE_TP) if name in one.values}
    row["device"] = str(row["device"]).removeprefix("sim:")
    if one.tuner is not None:
        is_cpu = load_hardware(one.tuner.base.hardware or "").is_cpu
        row["dtype"] = one.tuner.base.dtype or ("float32" if is_cpu else "bf16")
    if one.best is None or one.tuner is None:
        return row | {"gpus": None, "needs_gpus": one.needs, "reason": one.reason}
    summary = one.best.summary
    seconds_per_token = summary["duration_s"] / max(summary["prompt_tokens"], 1)
    nearest = nearest_objective(one.best, one.tuner.goal)
    return row | {
        "gpus": one.best.gpus,
        "replicas": one.best.run.case.replicas + one.best.run.case.decode_replicas,
        **sides_of(one.best.run.case),
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
