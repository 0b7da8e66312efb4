"""The result file of `vllm bench serve`, with its names, units and formulas.

Source: vllm/benchmarks/serve.py of vLLM. Deviations are those of the population (numpy's std), percentiles interpolate
linearly, and TPOT is (latency - TTFT) / (tokens - 1).
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ifbbench.analysis.token_times import IterationClock, token_iterations, token_times
from ifbbench.files import replace_file
from ifbbench.rundir.figures import figures
from ifbbench.rundir.reader import Floats, RunData

NAME = "ifbbench"


def write_result(run: RunData, path: Path, detailed: bool) -> None:
    """Write the result of `run`. detailed: see `result`."""
    replace_file(path, json.dumps(result(run, detailed), allow_nan=False) + "\n")


def result(run: RunData, detailed: bool = False) -> dict[str, Any]:
    """The content of a result file. detailed: also a list with an entry for each request that ended, in the order of
    the trace, as with `--save-detailed`.

    Gaps between tokens are unknown where statistics were thinned: then `itls` is left out, and the deviation is None.
    """
    known, config, done = figures(run), run.config, run.completed
    gaps = _gaps(run)
    rate = config.get("request_rate")
    return {
        "date": datetime.fromtimestamp((run.path / "run.json").stat().st_mtime).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": NAME,
        "backend": NAME,
        "label": run.name,
        "model_id": config.get("model"),
        "tokenizer_id": None,
        "num_prompts": known["requests"]["total"],
        "request_rate": "inf" if rate is None else rate,
        "burstiness": _burstiness(config),
        "max_concurrency": config.get("concurrency"),
        "duration": known["duration_s"],
        "completed": known["requests"]["completed"],
        "failed": known["requests"]["failed"],
        "total_input_tokens": known["prompt_tokens"],
        "total_output_tokens": known["output_tokens"],
        "request_throughput": known["request_throughput_per_s"],
        "request_goodput": known.get("goodput_requests_per_s"),
        "output_throughput": known["output_throughput_tokens_per_s"],
        "total_token_throughput": known["total_throughput_tokens_per_s"],
        **(_lists(run, gaps) if detailed else {}),
        "max_output_tokens_per_s": _max_tokens_per_second(done, gaps),
        "max_concurrent_requests": _max_concurrent(done),
        "rtfx": 0.0,
        **_distribution("ttft", done["ttft_s"]),
        **_distribution("tpot", ((done["e2e_s"] - done["ttft_s"]) / (done["output_len"] - 1))[done["output_len"] > 1]),
        **(_thinned(known["itl_s"]) if gaps is None else _distribution("itl", np.concatenate([[], *gaps.values()]))),
        **_distribution("e2el", done["e2e_s"]),
    }


def _burstiness(config: dict[str, Any]) -> float | str:
    """1 is a Poisson process, and the default; constant gaps are infinitely regular."""
    kind, _, shape = str(config.get("arrival") or "").partition(":")
    given = shape if kind == "gamma" else config.get("burstiness")
    if given:
        return float(given)
    is_constant = config.get("request_rate") and not config.get("enable_exp_delays") and kind in ("", "constant")
    return "inf" if is_constant else 1.0


def _gaps(run: RunData) -> dict[str, Floats] | None:
    """Request id to its gaps between tokens, in seconds, of the requests that completed; None where they are unknown,
    because statistics were thinned or, of a killed run, no iteration was written yet."""
    if run.recorded_every > 1 or (run.endpoint is None and run.iterations.empty):
        return None
    if run.endpoint:
        return {request: np.diff(times_s) for request, times_s in token_times(run).items()}
    clock = IterationClock.of(run)
    completed = set(run.completed["request_id"])
    return {
        request: np.diff(clock.tokens(produced))
        for request, produced in token_iterations(run).items()
        if request in completed
    }


def _distribution(name: str, seconds: pd.Series | Floats) -> dict[str, float]:
    """Statistics of `seconds`, in ms; 0 if there are none."""
    values = np.asarray(seconds, dtype=float) * 1000 if len(seconds) else np.zeros(1)
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        f"p99_{name}_ms": float(np.percentile(values, 99)),
    }


def _thinned(itl_s: dict[str, float | None]) -> dict[str, float | None]:
    """The statistics of ITL that summary.json has."""
    names = {"mean": "mean", "median": "p50", "std": "", "p99": "p99"}
    known = {key: itl_s.get(name) for key, name in names.items()}
    return {f"{key}_itl_ms": None if value is None else value * 1000 for key, value in known.items()}


def _lists(run: RunData, gaps: dict[str, Floats] | None) -> dict[str, list[Any]]:
    """What `--save-detailed` adds. A request that failed has no tokens and latencies of 0.

    Texts are empty: token ids are not decoded. start_times: arrivals, in seconds from the start of the run."""
    table = run.requests
    done = table["outcome"] == "completed"
    latencies = {name: table[name].where(done, 0.0).tolist() for name in ("ttft_s", "e2e_s")}
    errors = [str(error or "stopped") for error in table["error"].where(~done, "-")]
    none = np.empty(0)
    itls = {"itls": [gaps.get(request, none).tolist() for request in table["request_id"]]} if gaps is not None else {}
    return {
        "input_lens": table["prompt_len"].fillna(0).astype(int).tolist(),
        "output_lens": table["output_len"].where(done, 0).astype(int).tolist(),
        "ttfts": latencies["ttft_s"],
        **itls,
        "latencies": latencies["e2e_s"],
        "start_times": table["arrival_s"].tolist(),
        "queue_times": [0.0] * len(table),
        "generated_texts": [""] * len(table),
        "errors": ["" if completed else error for completed, error in zip(done, errors, strict=True)],
    }


def _max_tokens_per_second(done: pd.DataFrame, gaps: dict[str, Floats] | None) -> float | None:
    """Output tokens in the fullest second, counted from the first start in whole seconds; None if it is unknown."""
    if gaps is None:
        return None
    if not len(done):
        return 0.0
    firsts = dict(zip(done["request_id"], done["first_token_s"] - done["arrival_s"].min(), strict=True))
    none = np.empty(0)  # of a killed run, the spans of a request may be missing
    times = [first + np.concatenate([[0.0], gaps.get(request, none).cumsum()]) for request, first in firsts.items()]
    return float(np.bincount(np.concatenate(times).astype(np.int64)).max())


def _max_concurrent(done: pd.DataFrame) -> int:
    """The maximum number of requests between arrival and end."""
    starts, ends = done["arrival_s"].to_numpy(dtype=float), done["end_s"].to_numpy(dtype=float)
    # One that ends when another one starts does not overlap it.
    order = np.lexsort((np.repeat([1, 0], len(done)), np.concatenate([starts, ends])))
    steps = np.repeat([1, -1], len(done))[order]
    return int(steps.cumsum().max(initial=0))
