"""How far a simulated run's figures may be from a real server's, from published measurements of such servers.

The bands are in expected_errors.json, which `python -m benchmarks.serving FILE --bands` writes.
"""

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ifbbench.settings.engines import ENGINES, TRTLLM

BANDS = Path(__file__).parent / "expected_errors.json"
# Upper limits of the number of requests at a time that a band is for; None for all above the last.
LOADS = (8, 32, 128, None)
NO_ENGINE, NO_DRAFTS = "none", "none"
# In COVERAGE of the pairs of measurements that differ in the degree of tensor parallelism only, the ratio of the two is
# predicted with at most this error (docs/measured/simulation-accuracy.md, "Ratios").
COVERAGE = 0.8
DIFFERENCE_ERRORS = {"ttft_s": 0.33, "itl_s": 0.07, "output_throughput_tokens_per_s": 0.08}
# Figures without measurements of their own, with one whose error they share.
ITL, THROUGHPUT = "itl_s", "output_throughput_tokens_per_s"
ERROR_OF = {
    "tpot_s": ITL,
    "cost_per_million_output_tokens": THROUGHPUT,
    "max_rate_requests_per_s": THROUGHPUT,
    "goodput_requests_per_s": THROUGHPUT,
}


class Compared(NamedTuple):
    """What decides which measurements a run can be compared with.

    engine: name of its engine overhead, NO_ENGINE without one.
    scheduler: its --engine.
    hardware: name of its profile.
    model: name of its shape.
    draft: what proposes draft tokens, NO_DRAFTS without them.
    """

    engine: str
    scheduler: str
    hardware: str
    model: str
    dtype: str
    tp_size: int
    pp_size: int
    draft: str = NO_DRAFTS


def limit_of(requests: float) -> int | None:
    """The entry of LOADS for a number of requests at a time."""
    return next((limit for limit in LOADS if limit is not None and requests <= limit + 0.5), None)


@cache
def expected_error(run: Compared, requests: int) -> dict[str, Any]:
    """The `expected_error` of summary.json: for each figure, [low, high] so that the measured value was between
    (1 + low) and (1 + high) times the predicted one in `coverage` of the servers that are most like `run`: those `of`
    an engine, a GPU and a load, or where there are too few of them (`too_few`), of a larger regime.

    requests: mean number at a time. `compared` is false, with the reason, if nothing like it was ever compared."""
    known = json.loads(BANDS.read_text(encoding="utf-8"))
    engine = engine_of(run.engine)
    found = (one for one in known["setups"] if (one["engine"], one["hardware"]) == (engine, run.hardware))
    setup = next(found, None)
    who = "no engine overhead" if run.engine == NO_ENGINE else run.engine
    # Rows of an engine whose scheduler is built in are replayed by it.
    scheduler = run.engine if run.engine in ENGINES else TRTLLM
    if run.scheduler != scheduler:
        return _never(f"no measurement with {who} and --engine {run.scheduler}, only {scheduler}")
    if setup is None:
        return _never(f"no measurement of {run.hardware} with {who}")
    for name in ("models", "dtypes", "tp_sizes", "pp_sizes", "drafts"):
        value = getattr(run, name[:-1])
        if value not in setup[name]:
            others = ", ".join(map(str, setup[name]))
            return _never(f"no measurement of {run.hardware} with {who} and {name[:-1]} {value}, only {others}")
    load = limit_of(requests)
    part = next((one for one in setup["loads"] if one["up_to"] == load), setup["all_loads"])
    own = regime_in_words(engine, run.hardware, *([str(load)] if setup["loads"] else []))
    is_of_load = part["of"] == own and setup["loads"]
    return {
        "compared": True,
        "rows": part["rows"],
        "curves": part["curves"],
        "coverage": known["coverage"],
        "load": load_in_words(load) if is_of_load else "any",
        "of": part["of"],
        **({} if part["of"] == own else {"too_few": own}),
        **part["bands"],
    }


def engine_of(overhead: str) -> str:
    """The engine that an engine overhead is a version of: tensorrt-llm for tensorrt-llm-1.1. Versions have one range
    together, made of rows that are predicted with the overhead of their own version."""
    return re.sub(r"-\d+\.\d+$", "", overhead)


def regime_in_words(engine: str = "", gpus: str = "", load: str = "") -> str:
    """An engine, a GPU or a generation of them, and an entry of LOADS; without a load those under any, and so on."""
    if not engine:
        return "all engines"
    words = "TensorRT-LLM's throughput tables" if engine == NO_ENGINE else engine
    words += f" on {gpus or 'all GPUs'}"
    if load:
        words += f" with {load_in_words(None if load == str(None) else int(load))} requests at a time"
    return words


def difference_errors(expected: Mapping[str, Any], paths: Iterable[str]) -> dict[str, float]:
    """The share by which a predicted ratio of two settings of one device may be wrong, for each of `paths` into
    summary.json that `expected`, the `expected_error` of a run, has. It is smaller than the error of each of the two
    predictions, which have most of it in common."""
    found = {}
    for path in paths:
        figure = ERROR_OF.get(latency := path.partition(".")[0], latency)
        if figure in expected and figure in DIFFERENCE_ERRORS:
            found[path] = DIFFERENCE_ERRORS[figure]
    return found


def load_in_words(load: int | None) -> str:
    """An entry of LOADS as a range of requests at a time."""
    index = LOADS.index(load)
    first = (LOADS[index - 1] or 0) + 1 if index else 1
    return f"over {first - 1}" if load is None else f"{first} to {load}"


def _never(reason: str) -> dict[str, Any]:
    return {"compared": False, "reason": f"never compared: {reason}"}
