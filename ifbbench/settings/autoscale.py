"""The rule of `--autoscale`: how it is written."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.fields import MAX_NUMBER, choice, integer, number
from ifbbench.settings.objectives import UNITS

# What a rule keeps near its target: per replica, requests that wait, requests that are not answered, and the share of
# the KV cache in use; and the mean TTFT.
QUEUE, REQUESTS, KV_USE, TTFT = "queue", "requests", "kv_use", "ttft"
MEASURES = (QUEUE, REQUESTS, KV_USE, TTFT)
SECONDS = ("every", "cool_down")
EXPECTED = "MEASURE=TARGET,max=N, such as queue=4,max=8, requests=32,max=8, kv_use=0.7,max=8 or ttft=1s,max=8"


@dataclass(frozen=True, slots=True)
class AutoscaleRule:
    """How many replicas a fleet has.

    measure, target: see MEASURES; TTFT in seconds.
    minimum, maximum: minimum and maximum number of replicas.
    every_s: interval of decisions.
    cool_down_s: the number falls only to the largest one that was wanted in so many seconds.
    tolerance: share of the target by which the measure may differ from it without a change.
    """

    measure: str
    target: float
    minimum: int = 1
    maximum: int = 0
    every_s: float = 15.0
    cool_down_s: float = 300.0
    tolerance: float = 0.1


@cache
def parse_autoscale(text: str) -> AutoscaleRule:
    """The rule in `MEASURE=TARGET,max=N,min=N,every=S,cool_down=S,tolerance=SHARE`; InputError for another form."""
    rule = AutoscaleRule("", 0.0)
    given = set[str]()
    for part in text.split(","):
        left, equals, value = (one.strip() for one in part.partition("="))
        if not equals:
            raise InputError(f"--autoscale is {text!r}; expected {EXPECTED}.")
        name = choice(left, "--autoscale: the name", (*MEASURES, "min", "max", *SECONDS, "tolerance"))
        if name in given or (name in MEASURES and rule.measure):
            raise InputError(f"--autoscale gives {name if name in given else 'two measures'} twice; expected one.")
        given.add(name)
        rule = replace(rule, **_fields(name, value))
    if not rule.measure or not rule.maximum:
        raise InputError(
            f"--autoscale is {text!r}, without {'max' if rule.measure else 'a measure'}; expected {EXPECTED}."
        )
    if rule.maximum < rule.minimum:
        raise InputError(f"--autoscale: max is {rule.maximum}, below min, which is {rule.minimum}; raise max.")
    return rule


def _fields(name: str, value: str) -> dict[str, Any]:
    """The field of a rule that `name=value` is, and its measure."""
    where = f"--autoscale {name}"
    if name in ("min", "max"):
        return {f"{name}imum": integer(value, where, 1, from_text=True)}
    if name == "tolerance":
        return {name: number(value, where, 0.0, below=1.0, from_text=True)}
    if name in SECONDS:
        if (seconds := _seconds(value, where)) == 0 and name == "every":
            raise InputError(f"{where} is 0; expected a time above 0.")
        return {f"{name}_s": seconds}
    if name == TTFT:
        target = _seconds(value, where)
    else:
        target = number(value, where, 0.0, 1.0 if name == KV_USE else MAX_NUMBER, from_text=True)
    if not target:
        raise InputError(f"{where} is 0; expected a target above 0.")
    return {"measure": name, "target": target}


def _seconds(value: str, where: str) -> float:
    """A time, in seconds unless it has another unit."""
    unit = next((one for one in ("us", "µs", "ms", "s") if value.endswith(one)), "s")
    return number(value.removesuffix(unit).strip(), where, 0.0, unit=unit, from_text=True) * UNITS[unit]
