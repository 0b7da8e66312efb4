"""How often `compare` calls chance a difference, and how often it finds a real change of 3 %.

`python -m benchmarks.comparisons [--pairs N] [--requests N] [--processes N] [--first_seed N]` prints tables by figure
and load, and one JSON object at the end. Runs are of the bundled workload `chat` on a simulated H100, with Poisson
arrivals. No two runs that are compared differ in their settings, so that each difference that is called real is a
false one; 5 % would be right.

- two seeds: pairs of runs with other requests and arrivals. The runs are paired at random PAIRINGS times, so that 400
  runs make 1,000 pairs.
- same requests: pairs in which each prompt of the second run is a token longer or shorter at random, which disturbs the
  schedule and changes nothing on the average.
- 10 seeds: means of `--repeat 10`, with different seeds on both sides (Welch), or the same ones (paired, disturbed).
- one run: how often the interval of one run, as `tune` prints it, misses the mean over all seeds.

Power: how often the difference is found if all times of the second run are 3 % longer.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from ifbbench.analysis.confidence import RunSample, margins
from ifbbench.analysis.figures import compared_figures, numbers_of
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.analysis.repeats import Repeats, RepeatsComparison
from ifbbench.replay.run import run_trace
from ifbbench.rundir.run_directory import hardware
from ifbbench.settings.config import RunConfig
from ifbbench.workload.load import in_memory, read_source
from ifbbench.workload.trace import Trace, columns_of

DATASETS = Path(__file__).parents[1] / "datasets"
BASE = RunConfig(
    device="sim:h100-sxm",
    model="llama-3.1-8b",
    enable_exp_delays=True,
    recording="summary",
    quiet=True,
    enable_chunked_context=True,
    slo="ttft=200ms",
)
LOADS = {2.0: "nearly idle", 9.0: "half loaded", 15.0: "loaded", 25.0: "overloaded"}
SLOWER, REPEATS, PAIRINGS = 1.03, 10, 5
SHOWN = (
    "request_throughput_per_s",
    "output_throughput_tokens_per_s",
    "total_throughput_tokens_per_s",
    "goodput_requests_per_s",
    "goodput_share",
    "itl_s.mean",
    *(
        f"{name}.{one}"
        for name in ("queue_time_s", "ttft_s", "tpot_s", "e2e_s")
        for one in ("mean", "p50", "p90", "p95", "p99")
    ),
)


@dataclass(frozen=True)
class Sampled:
    """A run: its summary, and its requests."""

    summary: Mapping[str, Any]
    sample: RunSample


def factor_of(name: str) -> float:
    """What a figure is multiplied by where all times are SLOWER times as long."""
    if name.startswith("goodput_share"):
        return 1.0
    return 1 / SLOWER if "per_s" in name else SLOWER


def _flat(summary: Mapping[str, Any]) -> dict[str, float]:
    """The figures of SHOWN by dotted names."""
    return {name: value for name, value in numbers_of(summary) if name in SHOWN}


def slower(summary: Mapping[str, Any]) -> dict[str, float]:
    """The figures of SHOWN where all times are SLOWER times as long."""
    return {name: value * factor_of(name) for name, value in _flat(summary).items()}


def disturbed(trace: Trace, seed: int) -> Trace:
    """`trace` with each prompt a token longer or shorter."""
    columns = columns_of(trace.requests)
    lengths = np.asarray(columns.prompt_len)
    steps = np.random.default_rng(seed).choice((-1, 1), len(lengths))
    prompt_len = type(columns.prompt_len)("i", np.maximum(lengths + steps, 1).astype(np.int32).tobytes())
    return replace(trace, requests=replace(columns, prompt_len=prompt_len))


def simulate(spec: str, rate: float, requests: int, seed: int) -> tuple[Sampled, Sampled]:
    """A run, and the same run disturbed."""
    config = BASE.with_values(request_rate=rate, max_num_samples=requests, seed=seed)
    trace = in_memory(read_source(spec, config))
    found = []
    with TemporaryDirectory() as directory:
        for number, one in enumerate((trace, disturbed(trace, seed))):
            output = Path(directory) / str(number)
            run_trace(one, config.with_values(output=str(output)))
            run = RecordedRun.load(output, or_summary=True)
            assert run.data.summary is not None
            found.append(Sampled(run.data.summary, run.sample))
    return found[0], found[1]


def simulate_all(rate: float, requests: int, seeds: Sequence[int], processes: int) -> list[tuple[Sampled, Sampled]]:
    """`simulate` for each seed."""
    with TemporaryDirectory() as directory:
        spec = Path(directory) / "chat.yaml"
        workload = yaml.safe_load((DATASETS / "chat.yaml").read_text())
        spec.write_text(yaml.safe_dump(workload | {"num_requests": requests}))
        with get_context("fork").Pool(processes) as pool:
            return pool.map(partial(simulate, str(spec), rate, requests), seeds, chunksize=4)


Compare = Callable[[bool], Mapping[str, bool | None]]
"""Whether each figure of a pair is said to differ, None without an interval. Takes whether the second is slower."""


def by_blocks(a: Sampled, b: Sampled) -> Compare:
    """A comparison of two runs."""

    def compare(is_slower: bool) -> Mapping[str, bool | None]:
        # Times that are longer by a factor have logarithms that are larger by an amount, so the margins stay.
        changed = slower if is_slower else _flat
        figures = compared_figures(_flat(a.summary), changed(b.summary), margins(b.sample, a.sample))
        return {name: None if one.low is None else not one.is_noise for name, one in figures.items()}

    return compare


def by_repeats(a: Sequence[Sampled], b: Sequence[Sampled], first_seed: int) -> Compare:
    """A comparison of two sets of runs with the seeds from 0 on, and from `first_seed` on."""

    def compare(is_slower: bool) -> Mapping[str, bool | None]:
        changed = slower if is_slower else _flat
        sides = [_flat(one.summary) for one in a], [changed(one.summary) for one in b]
        repeats = [
            Repeats(Path(), range(first, first + len(side)), side, [None] * len(side))
            for first, side in zip((0, first_seed), sides, strict=True)
        ]
        figures = RepeatsComparison(repeats[0], repeats[1]).figures
        return {name: None if one.low is None else not one.is_noise for name, one in figures.items()}

    return compare


def shares(pairs: Sequence[Compare], is_slower: bool) -> dict[str, tuple[int, float]]:
    """For each figure the number of pairs with an interval, and the share of them that are said to differ."""
    said: defaultdict[str, list[bool]] = defaultdict(list)
    for pair in pairs:
        for name, differs in pair(is_slower).items():
            if differs is not None:
                said[name].append(differs)
    return {name: (len(values), fmean(values)) for name, values in said.items()}


def missed(runs: Sequence[Sampled]) -> dict[str, tuple[int, float]]:
    """For each figure the number of runs with an interval, and the share of them in which it misses the mean."""
    figures = [_flat(run.summary) for run in runs]
    means = {name: fmean(one[name] for one in figures) for name in figures[0]}
    outside: defaultdict[str, list[bool]] = defaultdict(list)
    for run, values in zip(runs, figures, strict=True):
        for name, margin in margins(run.sample).items():
            if name in means:
                low, high = margin.around(values[name])
                outside[name].append(not low <= means[name] <= high)
    return {name: (len(values), fmean(values)) for name, values in outside.items()}


def groups(runs: Sequence[tuple[Sampled, Sampled]], count: int, size: int) -> Iterator[list[tuple[Sampled, Sampled]]]:
    """`count` random groups of `size` different runs."""
    generator = np.random.default_rng(0)
    for _ in range(count):
        yield [runs[index] for index in generator.permutation(len(runs))[:size]]


def study(
    rate: float, pairs: int, requests: int, processes: int, first_seed: int
) -> dict[str, dict[str, tuple[int, float]]]:
    """Shares by figure: false differences of each kind of comparison, and its power."""
    runs = simulate_all(rate, requests, range(first_seed, first_seed + 2 * pairs), processes)
    compared: dict[str, list[Compare]] = {
        "two seeds": [
            by_blocks(order[2 * number][0], order[2 * number + 1][0])
            for order in groups(runs, PAIRINGS, len(runs))
            for number in range(pairs)
        ],
        "same requests": [by_blocks(*runs[number]) for number in range(pairs)],
        "10 seeds each": [
            by_repeats([one for one, _ in group[:REPEATS]], [one for one, _ in group[REPEATS:]], first_seed=REPEATS)
            for group in groups(runs, pairs, 2 * REPEATS)
        ],
        "same 10 seeds": [
            by_repeats([one for one, _ in group], [other for _, other in group], first_seed=0)
            for group in groups(runs, pairs, REPEATS)
        ],
    }
    found = {kind: shares(several, is_slower=False) for kind, several in compared.items()}
    found["one run"] = missed([one for one, _ in runs])
    return found | {f"{kind}, 3 %": shares(several, is_slower=True) for kind, several in compared.items()}


def print_table(
    found: Mapping[float, Mapping[str, Mapping[str, tuple[int, float]]]], kinds: Sequence[str], pairs: int
) -> None:
    """A row for each figure, a column for each of `kinds`, and in a cell the percentages at the loads. A dash where
    fewer than half of the pairs have an interval."""
    print("\n| figure | " + " | ".join(kinds) + " |\n|---|" + "---|" * len(kinds))
    for name in SHOWN:
        cells = []
        for kind in kinds:
            of_loads = [of_load[kind].get(name, (0, 0.0)) for of_load in found.values()]
            cells.append(" · ".join(f"{100 * share:.1f}" if 2 * count >= pairs else "–" for count, share in of_loads))
        print(f"| `{name}` | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--first_seed", type=int, default=20000, help="the intervals were chosen with seeds below 20000"
    )
    asked = parser.parse_args()
    found = {}
    for rate, name in LOADS.items():
        found[rate] = study(rate, asked.pairs, asked.requests, asked.processes, asked.first_seed)
        print(f"{name} ({rate:g} requests/s): done", file=sys.stderr)
    kinds = [*found[next(iter(LOADS))]]
    for is_power in (False, True):
        print_table(found, [kind for kind in kinds if kind.endswith("3 %") == is_power], asked.pairs)
    print(json.dumps({"hardware": hardware(), "pairs": asked.pairs, "requests": asked.requests, "shares": found}))


if __name__ == "__main__":
    main()
