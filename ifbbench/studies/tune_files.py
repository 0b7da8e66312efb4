"""What `ifbbench tune` hands over: the answer as JSON, ready files for servers, a run directory and a picture."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from ifbbench.analysis.confidence import RunSample
from ifbbench.analysis.findings import Findings
from ifbbench.analysis.number_texts import percent, time_unit
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.build.engines import usual_beside
from ifbbench.compressed import STANDARD_INPUT
from ifbbench.files import check_new_directory, replace_file
from ifbbench.replay.run import run_trace
from ifbbench.report.chart_files import FORMATS
from ifbbench.report.colours import LIMIT, MUTED, SERIES
from ifbbench.report.figure_files import save
from ifbbench.report.style import LIMIT_DASHES, round_ticks, styled, title
from ifbbench.report.sweep_maps import pareto_front
from ifbbench.report.sweep_metrics import LOG_FROM_RATIO
from ifbbench.rundir import run_directory
from ifbbench.rundir.fleet import replica_directories
from ifbbench.rundir.reader import REQUEST_FIELDS
from ifbbench.rundir.rows import read_lines
from ifbbench.rundir.run_directory import find_lines
from ifbbench.settings.config import RunConfig
from ifbbench.settings.engines import SGLANG, VLLM
from ifbbench.settings.fields import as_text
from ifbbench.settings.groups.recording import SIDE_OUTPUTS
from ifbbench.settings.servers import SERVERS, line_remarks, write_line
from ifbbench.settings.trtllm_serve import arguments_of, remarks_of_arguments
from ifbbench.studies.points import SHARES
from ifbbench.studies.sweep import check_free
from ifbbench.studies.tune_candidates import Candidate, Goal, misses_text
from ifbbench.studies.tune_certainty import (
    at_risk,
    interval_of,
    intervals,
    is_undecided,
    loss_of,
    loss_text,
    next_best,
    tried_alone,
)
from ifbbench.studies.tune_runs import sides_of
from ifbbench.studies.tune_search import Tuning
from ifbbench.studies.tune_space import OF_ENGINES, PREFILL_CAP
from ifbbench.workload.trace import columns_of

FIGURES = (
    "request_throughput_per_s",
    "output_throughput_tokens_per_s",
    "goodput_requests_per_s",
    "goodput_share",
    "slo",
    "overloaded",
    "pauses",
    "recomputed_tokens",
    "prefix_hit_rate",
    "peak_scheduled_requests",
    "energy",
)
# Bursts are shown by the requests that arrive within so many seconds.
BURST_S = 10.0
# Settings that files for other servers have only if the search decided them.
UNLESS_DECIDED = (
    "policy",
    "context_chunking_policy",
    "tokens_per_block",
    "enable_kv_cache_reuse",
    *OF_ENGINES[SGLANG],
)
RUN, ANSWER, PICTURE = "run", "tune.json", "pareto"
SERVER_FILES, RUN_CONFIG = ("trtllm-serve.yaml", "gptManagerBenchmark.txt", "vllm.txt"), "run.yaml"
SGLANG_FILE = f"{SGLANG}.txt"
# The settings in the files for gptManagerBenchmark, each with its option, and for vLLM.
GPT_MANAGER = {
    "max_batch_size": "max_batch_size",
    "max_num_tokens": "max_num_tokens",
    "policy": "scheduler_policy",
    "enable_chunked_context": "enable_chunked_context",
    "enable_kv_cache_reuse": "enable_kv_cache_reuse",
}
IN_VLLM = (
    "max_batch_size",
    "max_num_tokens",
    "tp_size",
    "tokens_per_block",
    "enable_chunked_context",
    "enable_kv_cache_reuse",
)
# Given settings that decide what the limits of a server mean, and that a search does not try.
NOT_TRIED = ("attention_dp_size", "ep_size", "redundant_experts", "draft_mtp")
LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_time_s")
STATISTICS = ("mean", "p50", "p90", "p99", "max")


def answer(tuning: Tuning, recorded: Sequence[Path], commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The object of `tune --json`.

    recorded: the runs of the best candidate, one for each replica.
    commands: the words of the command of each replica.
    """
    best, goal = tuning.best, tuning.goal
    assert best is not None
    ranked = [one for one in (*tuning.candidates, *tuning.baselines) if one.run.case.requests == best.run.case.requests]
    runs = [RecordedRun.load(directory) for directory in recorded]
    sample = RunSample(row for run in runs for row in run.row_of.values()) if len(runs) > 1 else None
    sample = runs[0].sample if len(runs) == 1 else sample
    if best.run.case.is_apart:  # the requests of the fleet: each has two replicas
        sample = RunSample(read_lines(find_lines(recorded[0].parent, "requests"), REQUEST_FIELDS))
    found = intervals(tuning, sample) if sample else {}
    lines = [shlex.join(words) for words in commands]
    recommended = described(best, goal)
    if tuning.rates_of_stretches:
        recommended["figures"] |= {
            "max_rate_interval": rate_range(tuning),
            "max_rate_by_third": tuning.rates_of_stretches,
        }
    shown = {one.run.case: described(one, goal) for one in (*tuning.candidates, *tuning.baselines)}
    return {
        "goal": goal.name,
        "slo": {one.name: one.target_s for one in goal.objectives},
        "recommendation": {
            **recommended,
            "intervals_95": found,
            "interval_of": interval_of(sample) if sample else None,
            "expected_error": best.summary.get("expected_error"),
            "rate_from": rate_from(best, tuning.runs.base),
            "rate_interval_of": rate_interval_of(tuning),
            "as_recorded": as_recorded(tuning),
            "at_risk": at_risk(best.summary, goal.objectives),
            "next_best": next_best(best, tuning, found),
            "command": "\n".join(lines),
            "commands": lines,
        },
        "verdict": verdict(tuning),
        "baselines": [
            {
                "name": one.name,
                **described(one, goal),
                "loss": loss_of(one, best),
                "is_undecided": is_undecided(best, one, goal),
            }
            for one in tuning.baselines
        ],
        "candidates": [*shown.values()],
        "pareto": [shown[one.run.case] for one in pareto(ranked, goal)],
        "binding": binding(Findings(runs[0]), tuning) if runs else {},
        "importance": tuning.importance,
        "work": {
            "simulated_requests": tuning.runs.work,
            "trace_requests": tuning.runs.total,
            "runs": len(tuning.runs.done),
            "grid_points": len(tuning.space.grid()),
            "grid_requests": len(tuning.space.grid()) * tuning.runs.total,
            "complete": tuning.is_complete,
        },
    }


def rate_from(best: Candidate, base: RunConfig) -> str | None:
    """Where the arrivals of the highest rate come from; None with another goal."""
    if best.rate is None:
        return None
    if base.request_rate is not None:
        return "--request_rate"
    changed = {True: ", compressed", False: ", stretched"}[best.rate.low > 1] if best.rate.low != 1 else ""
    return f"recorded arrivals{changed}"


def rate_range(tuning: Tuning) -> list[float]:
    """The lowest and the highest of the highest rates of the trace and of each third of it."""
    assert tuning.best is not None
    rates = [tuning.best.score, *tuning.rates_of_stretches]
    return [min(rates), max(rates)]


def rate_interval_of(tuning: Tuning) -> str | None:
    """What the interval of the highest rate is of, or why there is none, in words; None with another goal."""
    best, rates = tuning.best, tuning.rates_of_stretches
    assert best is not None
    if best.rate is None:
        return None
    if best.rate.interval:
        return f"95 % interval of the mean highest rate over {len(best.rate.by_seed)} seeds of the arrivals."
    if rates:
        return (
            "From the lowest to the highest of the rates that the whole trace and each third of it allow with these "
            f"settings; the thirds: {', '.join(f'{rate:.3g}' for rate in rates)} requests/s."
        )
    return "No interval of the highest rate: the trace is too short to be cut into thirds."


def as_recorded(tuning: Tuning) -> dict[str, Any] | None:
    """How many GPUs the traffic needs as it was recorded, with the recommended settings; None with another goal or
    another rate. gpus: None if the most that were tried are not enough."""
    best, base = tuning.best, tuning.runs.base
    assert best is not None
    if best.rate is None or base.request_rate is not None or not best.rate.is_final:
        return None
    found = tuning.as_recorded
    return {
        "rate_requests_per_s": tuning.runs.rate_per_s,
        "fits": best.rate.low >= 1,
        "gpus": found and found.gpus,
        "replicas": found and found.run.case.replicas,
    }


def busiest(tuning: Tuning, factor: float = 1.0) -> int:
    """The most requests that arrive within BURST_S when arrivals come `factor` times as fast as recorded."""
    arrivals_s = np.sort(np.asarray(columns_of(tuning.runs.trace.requests).arrival_s)) / factor
    return int((np.searchsorted(arrivals_s, arrivals_s + BURST_S) - np.arange(len(arrivals_s))).max())


def described(one: Candidate, goal: Goal) -> dict[str, Any]:
    """A candidate: settings, figures of all replicas together, and what it misses. requests: None is all of them."""
    summary, case = one.summary, one.run.case
    figures: dict[str, Any] = {name: summary[name] for name in FIGURES if name in summary}
    figures |= {name: {part: summary[name][part] for part in STATISTICS} for name in LATENCIES}
    figures |= {"gpus": one.gpus, "replicas": case.replicas + case.decode_replicas, **sides_of(case)}
    if goal.name == "max_rate":
        figures["max_rate_requests_per_s"] = one.score if one.rate else None
        if one.rate:
            scale = one.score / one.rate.low if one.rate.low else 0.0
            interval = one.rate.interval
            figures["max_rate_interval"] = interval and [scale * factor for factor in interval]
            figures["max_rate_by_seed"] = [scale * factor for factor in one.rate.by_seed]
            figures["time_scale"] = 1 / one.rate.low if one.rate.low else None
            figures["max_rate_failed_at_requests_per_s"] = None if one.rate.high is None else scale * one.rate.high
    if goal.is_minimised:
        figures[goal.figure] = -one.score
    missed = goal.shortfalls(summary)
    return {
        "settings": one.settings,
        "figures": figures,
        "requests": case.requests,
        "meets_slo": not missed,
        "misses": missed,
    }


def verdict(tuning: Tuning) -> str:
    """In one or two sentences: whether the objectives can be met, and whether the settings matter."""
    best, goal = tuning.best, tuning.goal
    assert best is not None
    missed = goal.shortfalls(best.summary)
    tried = [one for one in (*tuning.candidates, *tuning.baselines) if one.run.case.requests == best.run.case.requests]
    if missed:
        return f"No setting that was tried meets the objectives. The nearest {misses_text(missed)}."
    scores = [one.score for one in tried if not goal.shortfalls(one.summary)]
    largest = max(map(abs, scores), default=0.0)
    spread = (max(scores) - min(scores)) / largest if largest else 0.0
    all_meet = len(scores) == len(tried) > 1 and (goal.name != "goodput" or best.summary["goodput_share"] == 1.0)
    if goal.objectives and all_meet and spread < 0.01 and not goal.needs_stable_queue:
        return (
            "Every setting that was tried meets the objectives, with the same result. --goal max_rate finds how much "
            "more traffic they take."
        )
    if goal.name == "goodput":
        share = best.summary["goodput_share"]
        if not share:
            return "No request meets the objectives with any setting that was tried; " + _nearest(best, goal)
        grows = (
            " The queue grows as long as requests arrive, so that fewer would meet them if it lasted longer: --goal "
            "cost finds how many GPUs are enough."
        )
        text = f"{percent(share, 1)} of the requests meet every objective."
        return text + grows if best.summary.get("overloaded") else text
    return "The objectives are met." if goal.objectives else "There are no objectives; the goal alone decides."


def _nearest(best: Candidate, goal: Goal) -> str:
    parts = [
        f"the smallest {one.name} is {best.summary[one.latency]['min']:.4g} s, its target {one.target_s:.4g} s"
        for one in goal.objectives
        if one.statistic is None and best.summary[one.latency]["min"] is not None
    ]
    return "; ".join(parts) + "."


def pareto(candidates: Sequence[Candidate], goal: Goal) -> list[Candidate]:
    """The candidates that no other one beats in both throughput and the latency of the picture, by latency."""
    indices = pareto_front([(latency(one, goal), throughput(one, goal)) for one in candidates])
    return [candidates[index] for index in indices]


def throughput(one: Candidate, goal: Goal) -> float:
    """Output tokens/s of all replicas; with the goals cost and energy, of a GPU."""
    tokens_per_s = float(one.summary["output_throughput_tokens_per_s"])
    return tokens_per_s / one.gpus if goal.is_minimised else tokens_per_s


def latency(one: Candidate, goal: Goal) -> float:
    """The latency of the first objective, else mean end-to-end latency, in seconds."""
    first = goal.objectives[0] if goal.objectives else None
    value = one.summary[first.latency][first.statistic or "p99"] if first else one.summary["e2e_s"]["mean"]
    return float(value or 0.0)


def binding(findings: Findings, tuning: Tuning) -> dict[str, Any]:
    """What bound the run of the best candidate, of several replicas the first one, and what other settings did."""
    best = tuning.best
    assert best is not None
    text, replicas = findings.waiting_text, best.run.case.replicas
    if replicas > 1:
        text = f"Replica 1 of {replicas}: {text}"
    if best.run.case.is_apart:
        text = f"Prefill replica 1 of {replicas}: {findings.waiting_text}"
    tried = tried_alone(best, tuning, [*findings.waiting_s])
    if tried:
        words = findings.words
        parts = [f"{words.with_values(one['changed'])} {loss_text(one, tuning.goal.name)}" for one in tried]
        text += f" Changed alone under the same load: {'; '.join(parts)}."
    return {"by_time": findings.by_time, "waiting_s": findings.waiting_s, "tried": tried, "advice": text}


# Files.


def check(directory: Path, overwrite: bool) -> None:
    """InputError if `directory` is not empty and `overwrite` is off, or a file or the run could not be written there at
    the end of the search. Nothing is made: a search that is ended early leaves nothing behind."""
    pictures = (f"{PICTURE}.{kind}" for kind in FORMATS)
    check_new_directory(directory, "--output", (ANSWER, RUN_CONFIG, *SERVER_FILES, SGLANG_FILE, *pictures))
    check_free(directory, overwrite)
    run_directory.check(directory / RUN, overwrite=True)


def record_best(tuning: Tuning, directory: Path, overwrite: bool) -> list[Path]:
    """Run the best candidate again into `directory`/run, with everything recorded; of several replicas the first one
    there, and the K-th into run-K; behind a router that was given, or of two sides, the fleet. Returns the runs of
    all replicas. InputError if there is a run and `overwrite` is off."""
    assert tuning.best is not None
    case, runs = tuning.best.run.case, tuning.runs
    runs.work += len(runs.trace_of(case)) if case.requests is None else case.requests
    recorded = []
    if case.is_apart:
        run_trace(runs.trace_of(case), runs.config(case).with_values(output=str(directory / RUN), overwrite=overwrite))
        return replica_directories(directory / RUN)
    if case.replicas > 1 and runs.base.router is not None:
        fleet = runs.config(case).with_values(replicas=case.replicas, output=str(directory / RUN), overwrite=overwrite)
        run_trace(runs.trace_of(case), fleet)
        return replica_directories(directory / RUN)
    for number in range(1, case.replicas + 1):
        path = directory / (RUN if number == 1 else f"{RUN}-{number}")
        # One replica needs no router, whatever was asked for: its run is that of one engine, and is read as such.
        share: dict[str, Any] = {"router": None} if case.replicas == 1 else {"replica": f"{number}/{case.replicas}"}
        run_trace(runs.trace_of(case), runs.config(case).with_values(output=str(path), overwrite=overwrite, **share))
        recorded.append(path)
    return recorded


def settings_of_best(tuning: Tuning) -> dict[str, Any]:
    """The settings with which `ifbbench run` replays the requests of the best candidate, without --replica: what was
    asked for, in place of its defaults, what was found, and the rate."""
    best, asked = tuning.best, tuning.runs.base
    assert best is not None
    usual = usual_beside(asked.with_values(**best.settings))
    left_out = ("output", "overwrite", *SIDE_OUTPUTS, "quiet")
    values = {name: value for name, value in asked.as_dict().items() if value != usual[name] and name not in left_out}
    values |= {"model": asked.model, "device": asked.device} | best.settings
    if best.run.case.requests is not None:  # of a search that was interrupted
        values["max_num_samples"] = best.run.case.requests
    if best.run.case.seed is not None:
        values["seed"] = best.run.case.seed
    if best.run.case.rate != 1.0 and asked.request_rate is not None:
        values["request_rate"] = asked.request_rate * best.run.case.rate
    elif best.run.case.rate != 1.0:
        values["time_scale"] = asked.time_scale / best.run.case.rate
    if best.run.case.replicas == 1 and not best.run.case.is_apart:
        values.pop("router", None)
    return values | sides_of(best.run.case)


def write_run_config(tuning: Tuning, trace: str | None, directory: Path) -> Path:
    """Write `run.yaml`: with it, `ifbbench run --config` replays the requests of the best candidate."""
    import yaml

    assert tuning.best is not None
    replicas = 1 if tuning.best.run.case.is_apart else tuning.best.run.case.replicas
    head: dict[str, Any] = {} if trace in (None, STANDARD_INPUT) else {"trace": trace}
    use = "# ifbbench run --config run.yaml\n"
    if replicas > 1:
        head |= {"replicas": replicas} | ({} if tuning.runs.base.router else {"router": SHARES})
    text = use + yaml.safe_dump(head | settings_of_best(tuning), sort_keys=False)
    replace_file(directory / RUN_CONFIG, text)
    return directory / RUN_CONFIG


def decided(tuning: Tuning) -> dict[str, Any]:
    """The recommended settings, and those of NOT_TRIED, without those of UNLESS_DECIDED that the search left at their
    default because no other value was better, and that were not given."""
    best, space = tuning.best, tuning.space
    assert best is not None
    usual, importance = dict(space.point(tp_size=best.settings["tp_size"])), tuning.importance

    def is_decided(name: str, value: Any) -> bool:
        matters = (importance.get(name) or {}).get("effect")
        return name not in UNLESS_DECIDED or name in space.fixed or value != usual.get(name) or bool(matters)

    found = {name: value for name, value in best.settings.items() if is_decided(name, value)}
    found |= {name: value for name in NOT_TRIED if (value := getattr(space.base, name)) != getattr(RunConfig, name)}
    if space.base.engine in SERVERS:  # the line starts the model, and does not repeat vLLM's own default
        found |= {"engine": space.base.engine, "model": space.base.model}
        found = {name: value for name, value in found.items() if (name, value) != (PREFILL_CAP, 0)}
    return found


def write_server_files(settings: Mapping[str, Any], directory: Path) -> list[Path]:
    """The settings for trtllm-serve, gptManagerBenchmark and vLLM, or for the server of the engine that the search ran.
    What is not among them is left to each server."""
    import yaml

    if (engine := str(settings.get("engine"))) in SERVERS:
        replace_file(path := directory / f"{engine}.txt", write_line(settings, engine) + "\n")
        return [path]
    vllm, given = SERVERS[VLLM], settings.keys()
    gpt_manager = [f"--{option} {as_text(settings[name])}" for name, option in GPT_MANAGER.items() if name in given]
    more, own = vllm.own_words(settings)
    words = [word for name in IN_VLLM for word in (vllm.option(name, own[name]) if name in given else ())] + more
    texts = (
        "# trtllm-serve MODEL --extra_llm_api_options trtllm-serve.yaml\n" + yaml.safe_dump(arguments_of(settings)),
        " ".join(gpt_manager) + "\n",
        " ".join(words) + "\n",
    )
    for name, text in zip(SERVER_FILES, texts, strict=True):
        replace_file(directory / name, text)
    return [directory / name for name in SERVER_FILES]


def server_remarks(settings: Mapping[str, Any]) -> list[str]:
    """What the files of `write_server_files` do not say of these settings, one sentence each."""
    if (engine := str(settings.get("engine"))) in SERVERS:
        return line_remarks(settings, engine)
    of_vllm = {name: settings.get(name) for name in (*IN_VLLM, *NOT_TRIED)}
    return [*remarks_of_arguments(settings), *line_remarks(of_vllm, VLLM)]


def write_answer(content: Mapping[str, Any], directory: Path) -> Path:
    path = directory / ANSWER
    replace_file(path, json.dumps(content, indent=2) + "\n")
    return path


# The picture.


class Point(NamedTuple):
    """A candidate: its latency (s), throughput, and whether it meets the objectives."""

    latency_s: float
    tokens_per_s: float
    meets: bool


def plot_candidates(
    points: Sequence[Point],
    front: Sequence[Point],
    named: dict[str, Point],
    latency_name: str,
    throughput_name: str,
    target_s: float | None,
    subtitle: str,
    directory: Path,
) -> Path:
    """Write `pareto.png` (and .svg).

    front: candidates of the front, in order of latency.
    named: points with a label.
    target_s: objective.
    """
    unit, scale = time_unit([point.latency_s for point in points])
    with styled():
        figure = Figure(figsize=(7.2, 4.4))
        axes = figure.add_subplot()
        for meets, label, colour in ((False, "misses an objective", "#C4C4C4"), (True, "candidate", SERIES[0])):
            some = [point for point in points if point.meets is meets]
            axes.scatter(
                [point.latency_s * scale for point in some],
                [point.tokens_per_s for point in some],
                s=22,
                color=colour,
                label=label if some else None,
                linewidths=0,
            )
        line = [point.latency_s * scale for point in front], [point.tokens_per_s for point in front]
        axes.plot(*line, color=SERIES[0], linewidth=1.2, label="Pareto front")
        for number, (name, point) in enumerate(named.items()):
            at = (point.latency_s * scale, point.tokens_per_s)
            # Rings around the same point are of different size.
            axes.scatter(
                *at,
                s=70 * (1 + 1.2 * number),
                facecolors="none",
                edgecolors=SERIES[number % 3 + 1],
                linewidths=1.6,
                label=name,
            )
        if target_s is not None:
            axes.axvline(target_s * scale, color=LIMIT, linewidth=1, linestyle=LIMIT_DASHES, label="objective")
        axes.set_xlabel(f"{latency_name} ({unit})")
        axes.set_ylabel(throughput_name)
        axes.set_ylim(bottom=0)
        known = [point.latency_s for point in points if point.latency_s > 0]
        if known and max(known) > LOG_FROM_RATIO * min(known):
            axes.set_xscale("log")
        round_ticks(axes.xaxis)
        axes.grid(axis="x", color="#E3E3E3")
        round_ticks(axes.yaxis)
        axes.tick_params(colors=MUTED)
        axes.legend(loc="lower right")
        title(axes, "Throughput against latency of the settings that were tried", subtitle)
        return save(figure, directory, PICTURE)[0]
