"""Random problems: what `ifbbench tune` finds, beside an exhaustive fine grid of both limits.

`python -m benchmarks.tune_exhaustive [SEED [PROBLEMS [TRACE ...]]]` prints a line for each problem and one JSON object.
The problems are drawn from bundled traces, and from stretches of the given ones (Azure, Mooncake). The grid has 25
values of max_batch_size by 12 of max_num_tokens. With the goal max_rate, its points run at rates above the one that was
found: a share of 1 means that none of them meets the objectives there. With the goal cost they run with as many
replicas as were found, and with one less.
"""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ifbbench.build.engines import engine_defaults
from ifbbench.clock import WallClock
from ifbbench.rundir.run_directory import hardware
from ifbbench.settings.config import RunConfig
from ifbbench.settings.names import from_mapping
from ifbbench.studies.tune import Tuner
from ifbbench.studies.tune_candidates import Goal
from ifbbench.studies.tune_rate import MAX_FACTOR
from ifbbench.studies.tune_runs import Case
from ifbbench.workload.load import in_memory, read_source, stretch_of
from ifbbench.workload.trace import Trace

BATCH_SIZES = (
    2,
    4,
    6,
    8,
    12,
    16,
    20,
    24,
    32,
    40,
    48,
    64,
    80,
    96,
    128,
    160,
    192,
    256,
    320,
    384,
    512,
    768,
    1024,
    1536,
    2048,
)
NUM_TOKENS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16_384)
BUNDLED = ("chat", "mixed", "code", "agent")
ABOVE = (1.01, 1.02, 1.04, 1.08, 1.15)


def problem(draws: random.Random, traces: Sequence[Trace]) -> tuple[str, Tuner]:
    """A description and a search that has not begun. traces: recorded ones, of which stretches are taken."""
    goal = draws.choice(["goodput", "output_throughput", "max_rate", "cost"])
    statistic = "" if goal == "goodput" else ".p99"
    count = draws.choice([120, 200])
    given: dict[str, Any] = {
        "device": draws.choice(["sim:h100-sxm", "sim:a100-80gb-sxm", "sim:l40s"]),
        "model": "llama-3.1-8b",
        "engine": draws.choice(["trtllm", "vllm"]),
        "enable_kv_cache_reuse": True,
        "seed": draws.randrange(1000),
    }
    if given["engine"] == "vllm":
        given |= {"tokens_per_block": 16, "long_prefill_token_threshold": 0}
    else:
        given |= {
            "tokens_per_block": 32,
            "policy": "guaranteed_no_evict",
            "enable_chunked_context": True,
            "context_chunking_policy": "first_come_first_served",
        }
    sources: list[str | Trace] = [*BUNDLED, *traces, *traces, *traces]
    trace = source = draws.choice(sources)
    if isinstance(trace, Trace):
        stretches = len(trace) // count
        number, given["time_scale"] = draws.randrange(stretches), draws.choice([0.1, 0.3, 1.0])
        text = f"{trace.name} {number + 1}/{stretches}, arrivals x{1 / given['time_scale']:.3g}"
        source = stretch_of(trace, number, stretches)
    else:
        given |= {"max_num_samples": count, "request_rate": draws.choice([8.0, 15.0, 25.0, 40.0])}
        if goal != "max_rate":  # one seed of the arrivals, so that the grid runs the same ones
            given["burstiness"] = draws.choice([0.3, 1.0])
        text = f"{trace} {count} requests, {given['request_rate']}/s"
    wait = draws.choice([2000, 5000, 20_000] if "mooncake" in text else [600, 1500, 3000, 6000])
    slo = f"ttft{statistic}={wait}ms,tpot{statistic}={draws.choice([15, 20, 30, 50, 80])}ms"
    base = from_mapping({"quiet": True, "slo": slo, **engine_defaults(given), **given}, command_line=True)
    text += f", {given['device']}, {given['engine']}, {goal}, {slo}"
    return text, Tuner(source, base, frozenset(given), Goal.of(goal, slo))


def share_of_grid(tuner: Tuner) -> float | None:
    """The figure that was found as a share of the grid's best (of a cost the inverse); None if no point of the grid
    meets the objectives, and 0 if one does and the search missed them."""
    best = tuner.found.best
    assert best is not None
    points = [
        tuner.space.point(max_batch_size=size, max_num_tokens=tokens) for size in BATCH_SIZES for tokens in NUM_TOKENS
    ]
    missed = tuner.goal.shortfalls(best.summary)
    if tuner.goal.name == "max_rate" and best.rate is None:
        runs = tuner.runs.run([Case(point, rate=1 / MAX_FACTOR) for point in points])
        is_met = any(not run.error and not tuner.goal.shortfalls(run.summary) for run in runs)
        return 0.0 if is_met else None
    if best.rate is not None:
        highest, left = 1.0, points
        for above in ABOVE:
            runs = tuner.runs.run(
                [replace(best.run.case, settings=point, rate=best.rate.low * above) for point in left]
            )
            left = [run.case.settings for run in runs if not run.error and not tuner.goal.shortfalls(run.summary)]
            if not left:
                break
            highest = above
        return 1 / highest
    replicas = {best.run.case.replicas, max(best.run.case.replicas - 1, 1)} if tuner.goal.name == "cost" else {1}
    found = tuner.runs.run([Case(point, None, count) for count in replicas for point in points])
    candidates = [tuner.judge.candidate(run) for run in found]
    scores = [one.score for one in candidates if one is not None and not tuner.goal.shortfalls(one.summary)]
    if not scores or not max(scores):
        return None
    return 0.0 if missed else best.score / max(scores) if best.score > 0 else max(scores) / best.score


def main() -> None:
    """Print a line for each problem."""
    seed, problems = (int(text) for text in (*sys.argv[1:3], *("11", "12")[len(sys.argv[1:3]) :]))
    traces = [in_memory(read_source(Path(name), RunConfig(device="null"))) for name in sys.argv[3:]]
    draws, found = random.Random(seed), []
    for _ in range(problems):
        text, tuner = problem(draws, traces)
        clock = WallClock()
        best = tuner.run().best
        assert best is not None
        took_s, work = clock.now(), tuner.runs.work / tuner.runs.total
        share = share_of_grid(tuner)
        shown = "no point meets" if share is None else f"{share:.1%} of the grid's best"
        limits = {name: best.settings[name] for name in ("max_batch_size", "max_num_tokens")}
        print(f"{text}: {shown}, {limits}, work {work:.0f} runs, {took_s:.0f} s", flush=True)
        found.append({"problem": text, "share": share, "work": work, "took_s": took_s, **limits})
    print(json.dumps({"machine": hardware(), "seed": seed, "problems": found}))


if __name__ == "__main__":
    main()
