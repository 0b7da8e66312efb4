"""Random problems: what `ifbbench tune` finds, beside an exhaustive fine grid of both limits.

`python -m benchmarks.tune_exhaustive [SEED [PROBLEMS]]` prints a line for each problem and one JSON object. The grid
has 25 values of max_batch_size by 12 of max_num_tokens. With the goal max_rate, its points run at rates above the one
that was found: a share of 1 means that none of them meets the objectives there.
"""

import json
import random
import sys
from dataclasses import replace
from typing import Any

from ifbbench.clock import WallClock
from ifbbench.rundir.run_directory import hardware
from ifbbench.settings.names import from_mapping
from ifbbench.studies.tune import Tuner
from ifbbench.studies.tune_candidates import Goal
from ifbbench.studies.tune_runs import Case

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
ABOVE = (1.01, 1.02, 1.04, 1.08, 1.15)


def problem(draws: random.Random) -> tuple[str, Tuner]:
    """A description and a search that has not begun."""
    goal = draws.choice(["goodput", "output_throughput", "max_rate"])
    wait, gap = draws.choice([300, 600, 1500, 3000]), draws.choice([12, 15, 20, 30, 50])
    statistic = "" if goal == "goodput" else ".p99"
    slo = f"ttft{statistic}={wait}ms,tpot{statistic}={gap}ms"
    given: dict[str, Any] = {
        "max_num_samples": draws.choice([150, 250]),
        "device": draws.choice(["sim:h100-sxm", "sim:a100-80gb-sxm"]),
        "model": "llama-3.1-8b",
        "policy": "guaranteed_no_evict",
        "enable_chunked_context": True,
        "context_chunking_policy": "first_come_first_served",
        "tokens_per_block": 32,
        "request_rate": draws.choice([8.0, 15.0, 25.0, 40.0]),
        "burstiness": draws.choice([0.3, 1.0]),
        "seed": draws.randrange(1000),
    }
    if goal == "max_rate":  # one seed of the arrivals, so that the grid runs the same ones
        del given["burstiness"]
    source = draws.choice(["chat", "mixed", "code", "agent"])
    base = from_mapping({"quiet": True, "slo": slo, **given}, command_line=True)
    text = f"{source} {given['max_num_samples']} requests, {given['request_rate']}/s, {goal}, {slo}"
    return text, Tuner(source, base, frozenset(given), Goal.of(goal, slo))


def share_of_grid(tuner: Tuner) -> float | None:
    """The figure that was found as a share of the grid's best; None if no point of the grid meets the objectives, and 0
    if one does and the search missed them."""
    best = tuner.found.best
    assert best is not None
    points = [
        tuner.space.point(max_batch_size=size, max_num_tokens=tokens) for size in BATCH_SIZES for tokens in NUM_TOKENS
    ]
    missed = tuner.goal.shortfalls(best.summary)
    if tuner.goal.name == "max_rate" and best.rate is not None:
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
    runs = [run for run in tuner.runs.run([Case(point) for point in points]) if not run.error]
    meeting = [run.summary[tuner.goal.figure] for run in runs if not tuner.goal.shortfalls(run.summary)]
    if not meeting or not max(meeting):
        return None
    return 0.0 if missed else best.score / max(meeting)


def main() -> None:
    """Print a line for each problem."""
    seed, problems = (int(text) for text in (*sys.argv[1:], *("11", "12")[len(sys.argv) - 1 :]))
    draws, found = random.Random(seed), []
    for _ in range(problems):
        text, tuner = problem(draws)
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
