"""Random problems with objectives: what `ifbbench tune` finds, beside the points of a grid that meet the objectives.

python -m benchmarks.tune_objectives
"""

import random
from itertools import product

from ifbbench.settings.names import from_mapping
from ifbbench.studies.tune import Tuner
from ifbbench.studies.tune_candidates import Goal
from ifbbench.studies.tune_runs import Case

PROBLEMS, SEED = 24, 5
BATCH_SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 2048)
NUM_TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16_384)
POLICIES = ("guaranteed_no_evict", "max_utilization")


def problem(draws: random.Random) -> tuple[str, Tuner]:
    """A description and a search that has not begun."""
    source = draws.choice(["chat", "chat", "mixed", "code"])
    gap_ms, gap = draws.choice([15, 20, 25, 35, 50]), draws.choice(["itl.p99", "tpot.p90", "itl.p99"])
    wait_ms, wait = draws.choice([300, 600, 1500, 3000]), draws.choice(["ttft.p90", "ttft.p99"])
    given = {
        "max_num_samples": draws.choice([30, 60, 120]),
        "request_rate": draws.choice([8.0, 15.0, 25.0, 40.0]),
        "device": "sim:h100-sxm",
        "model": "llama-3.1-8b",
        "context_chunking_policy": "first_come_first_served",
    }
    slo = f"{gap}={gap_ms}ms,{wait}={wait_ms}ms"
    base = from_mapping({"quiet": True, "slo": slo, **given}, command_line=True)
    text = f"{source} {given['max_num_samples']} requests {given['request_rate']}/s {slo}"
    return text, Tuner(source, base, frozenset(given), Goal.of(None, slo))


def main() -> None:
    """Print a line for each problem."""
    draws = random.Random(SEED)
    for _ in range(PROBLEMS):
        text, tuner = problem(draws)
        best = tuner.run().best
        assert best is not None
        missed, work = tuner.goal.shortfalls(best.summary), tuner.runs.work / tuner.runs.total
        points = dict.fromkeys(
            tuner.space.point(max_batch_size=size, max_num_tokens=tokens, policy=policy, enable_chunked_context=chunked)
            for size, tokens, policy, chunked in product(BATCH_SIZES, NUM_TOKENS, POLICIES, (True, False))
            if chunked or tokens >= tuner.space.longest_prompt
        )
        runs = [run for run in tuner.runs.run([Case(point) for point in points]) if not run.error]
        meeting = [run.summary[tuner.goal.figure] for run in runs if not tuner.goal.shortfalls(run.summary)]
        found = f"misses {', '.join(missed)}" if missed else "meets the objectives"
        share = f", {best.score / max(meeting):.1%} of the grid's best" if meeting and not missed else ""
        print(f"{text}: {len(meeting)} of {len(points)} points meet; tune {found}{share}, work {work:.0f} runs")


if __name__ == "__main__":
    main()
