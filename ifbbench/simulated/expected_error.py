"""How far a simulated run's figures may be from a real server's, from published measurements of such servers.

The bands are in expected_errors.json, which `python -m benchmarks.serving FILE --bands` writes.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

BANDS = Path(__file__).parent / "expected_errors.json"
# Upper limits of the number of requests at a time that a band is for; None for all above the last.
LOADS = (8, 32, 128, None)
NO_ENGINE = "none"


class Compared(NamedTuple):
    """What decides which measurements a run can be compared with.

    engine: name of its engine overhead, NO_ENGINE without one. hardware: name of its profile. model: name of its
    shape."""

    engine: str
    hardware: str
    model: str
    dtype: str
    tp_size: int
    pp_size: int


def limit_of(requests: float) -> int | None:
    """The entry of LOADS for a number of requests at a time."""
    return next((limit for limit in LOADS if limit is not None and requests <= limit + 0.5), None)


@cache
def expected_error(run: Compared, requests: int) -> dict[str, Any]:
    """The `expected_error` of summary.json: for each figure, [low, high] so that the measured value was between
    (1 + low) and (1 + high) times the predicted one in `coverage` of the measurements that are most like `run`.

    requests: mean number at a time. `compared` is false, with the reason, if nothing like it was ever compared."""
    known = json.loads(BANDS.read_text(encoding="utf-8"))
    found = (one for one in known["setups"] if (one["engine"], one["hardware"]) == (run.engine, run.hardware))
    setup = next(found, None)
    who = "no engine overhead" if run.engine == NO_ENGINE else run.engine
    if setup is None:
        return _never(f"no measurement of {run.hardware} with {who}")
    for name in ("models", "dtypes", "tp_sizes", "pp_sizes"):
        value = getattr(run, name[:-1])
        if value not in setup[name]:
            others = ", ".join(map(str, setup[name]))
            return _never(f"no measurement of {run.hardware} with {who} and {name[:-1]} {value}, only {others}")
    load = limit_of(requests)
    part = next((one for one in setup["loads"] if one["up_to"] == load), setup["all_loads"])
    return {
        "compared": True,
        "rows": part["rows"],
        "coverage": known["coverage"],
        "load": "any" if part is setup["all_loads"] else load_in_words(load),
        **part["bands"],
    }


def load_in_words(load: int | None) -> str:
    """An entry of LOADS as a range of requests at a time."""
    index = LOADS.index(load)
    first = (LOADS[index - 1] or 0) + 1 if index else 1
    return f"over {first - 1}" if load is None else f"{first} to {load}"


def _never(reason: str) -> dict[str, Any]:
    return {"compared": False, "reason": f"never compared: {reason}"}
