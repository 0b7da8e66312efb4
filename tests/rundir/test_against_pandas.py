"""Every figure of random runs equals a computation by pandas from `requests`, `spans` and `iterations`, which follows
the formulas of the documentation and shares no code with the recorder."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99_9": 0.999}
LIMITS = ["batch_size", "num_tokens", "kv_blocks", "none"]
SLO = "ttft=20ms,tpot=8ms,ttft.p99=50ms,itl.max=30ms,e2e.mean=1s"
TARGETS = {"ttft": 0.02, "tpot": 0.008, "ttft.p99": 0.05, "itl.max": 0.03, "e2e.mean": 1.0}


def random_run(seed: int, directory: Path) -> None:
    """A run with pauses or a full cache, refused requests, one-token answers, and every other time classes, priorities
    and objectives."""
    draw = random.Random(seed)
    classes, priorities = [(None,), ("chat", "code", None)][seed % 2], [(0.5,), (0.1, 0.5, 0.9)][seed // 2 % 2]
    rate, arrival_s, rows = draw.choice([20.0, 100.0, 1000.0]), 0.0, []
    for index in range(draw.randint(25, 60)):
        arrival_s += draw.expovariate(rate)
        output = draw.choice([1, draw.randint(2, 20), draw.randint(2, 120)])
        row: dict[str, Any] = {
            "request_id": 2 * index + 1,
            "arrival_s": arrival_s,
            "prompt_len": draw.choice([1, 30, 200, 400]),
            "output_len": output,
            "max_new_tokens": output + draw.randint(0, 30),
            "priority": draw.choice(priorities),
        }
        if draw.random() < 0.08:
            row["prompt_len"] = 5_000
        if (name := draw.choice(classes)) is not None:
            row["class"] = name
        if draw.random() < 0.5:
            row |= {"prefix_ids": [draw.randrange(2)], "prefix_lens": [min(row["prompt_len"], 150)]}
        rows.append(row)
    trace = directory / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chunked = draw.random() < 0.5
    run_trace(
        str(trace),
        RunConfig(
            device="sim:h100-sxm",
            model="llama-3.1-8b",
            output=str(directory / "run"),
            policy=["guaranteed_no_evict", "max_utilization"][seed // 4 % 2],
            slo=SLO if seed % 3 else None,
            type=draw.choice(["inflight_fused", "inflight_fused", "inflight"]),
            enable_chunked_context=chunked,
            max_batch_size=draw.choice([3, 8, 64]),
            max_num_tokens=draw.choice([256, 512] if chunked else [1024]),
            max_seq_len=1024,
            tokens_per_block=16,
            enable_kv_cache_reuse=draw.random() < 0.4,
            max_tokens_in_paged_kvcache=draw.choice([1100, 1600, 4000]),
        ),
    )


def table(directory: Path, name: str) -> pd.DataFrame:
    return pd.DataFrame([json.loads(line) for line in (directory / "run" / f"{name}.jsonl").read_text().splitlines()])


def spread(values: pd.Series) -> dict[str, float | None]:
    """mean, min, percentiles and max."""
    values = values.dropna()
    if values.empty:
        return dict.fromkeys(["mean", "min", *QUANTILES, "max"])
    ranks = {name: values.quantile(rank) for name, rank in QUANTILES.items()}
    return {"mean": values.mean(), "min": values.min(), **ranks, "max": values.max()}


class Recorded:
    """The three tables of a run, and what follows from them."""

    def __init__(self, directory: Path) -> None:
        # The cells of a data frame have no type of their own.
        self.requests: Any = table(directory, "requests").set_index("request_id")
        self.spans: Any = table(directory, "spans").sort_values(["request_id", "first_iteration"])
        iterations = table(directory, "iterations")
        details = pd.DataFrame(iterations.pop("ifbbench").tolist())
        self.iterations = pd.concat([iterations, details], axis=1)
        self.start_s = details["start_s"]
        self.end_s = details["start_s"] + details["latency_ms"] / 1000
        self.head = [one["reason"] if one else "none" for one in details["first_left_out"]]
        self.done = self.requests[self.requests["outcome"] == "completed"]
        self.token_s = {request: self.tokens_of(request) for request in self.done.index}
        self.gaps = {request: np.diff(times) for request, times in self.token_s.items()}

    def spans_of(self, request: Any) -> Any:
        return self.spans[self.spans["request_id"] == request]

    def tokens_of(self, request: int) -> list[float]:
        """When each output token came: a span's new ones come in its last iterations."""
        times: list[float] = []
        for span in self.spans_of(request).itertuples():
            produced = 0 if pd.isna(span.produced) else int(span.produced)
            times += self.end_s[span.last_iteration - produced + 1 : span.last_iteration + 1].tolist()
        return times

    def attribution_of(self, request: Any) -> dict[str, float]:
        """Seconds of each phase; waiting by cause, iteration by iteration."""
        parts: dict[str, float] = {}

        def add(name: str, seconds: float) -> None:
            parts[name] = parts.get(name, 0.0) + seconds

        arrival_s, spans = self.requests["arrival_s"][request], self.spans_of(request)
        add("waiting_iteration", self.start_s[spans["first_iteration"].iloc[0]] - arrival_s)
        for span in spans.itertuples():
            is_last = span.last_iteration == spans["last_iteration"].iloc[-1]
            for number in range(span.first_iteration, span.last_iteration + 1):
                until_s = self.end_s[number] if is_last and number == span.last_iteration else self.start_s[number + 1]
                name = span.phase
                if span.phase == "waiting":
                    head, is_behind = self.head[number], span.cause == "head_of_line"
                    is_behind |= span.cause == "batch_size" and head != "batch_size"
                    name = f"waiting_head_of_line_{head}" if is_behind else f"waiting_{span.cause}"
                add(name, until_s - self.start_s[number])
        return parts

    def figures_of(self, chosen: pd.DataFrame, span_s: float, has_slo: bool) -> dict[str, Any]:
        """The figures of these requests; rates over `span_s`."""
        done = chosen[chosen["outcome"] == "completed"]
        prompt, output = int(done["prompt_len"].sum()), int(done["output_len"].sum())
        gaps = [gap for request in done.index for gap in self.gaps[request]]
        found: dict[str, Any] = {
            "requests": {"total": len(chosen), "completed": len(done), "failed": len(chosen) - len(done)},
            "request_throughput_per_s": len(done) / span_s,
            "output_throughput_tokens_per_s": output / span_s,
            "total_throughput_tokens_per_s": (prompt + output) / span_s,
            **{name: spread(done[name].astype(float)) for name in ("queue_time_s", "ttft_s", "tpot_s", "e2e_s")},
            "itl_s": spread(pd.Series(gaps, dtype=float)),
            "per_user_output_speed_tokens_per_s": spread(1 / done["tpot_s"].astype(float)),
            "prefix_hit_rate": done["reused_tokens"].sum() / prompt if prompt else 0.0,
            "prompt_tokens": prompt,
            "output_tokens": output,
        }
        if has_slo:
            ttft_met, tpot_met = done["ttft_s"] <= 0.02, done["tpot_s"].isna() | (done["tpot_s"] <= 0.008)
            values = {
                "ttft": found["ttft_s"]["max"],
                "tpot": found["tpot_s"]["max"],
                "ttft.p99": found["ttft_s"]["p99"],
                "itl.max": found["itl_s"]["max"],
                "e2e.mean": found["e2e_s"]["mean"],
            }
            found["slo"] = {
                name: {"target": TARGETS[name], "value": value, "met": value is None or value <= TARGETS[name]}
                for name, value in values.items()
            }
            found["slo"]["ttft"]["share"] = ttft_met.mean() if len(done) else 0.0
            found["slo"]["tpot"]["share"] = tpot_met.mean() if len(done) else 0.0
            found["goodput_requests_per_s"] = (ttft_met & tpot_met).sum() / span_s
            found["goodput_share"] = (ttft_met & tpot_met).sum() / len(chosen)
        return found


def equal(found: Any, expected: Any, where: str = "") -> None:
    """Compare nested figures, naming the first that differs."""
    if isinstance(expected, dict):
        assert list(found) == list(expected) or set(found) == set(expected), where
        for name, value in expected.items():
            equal(found[name], value, f"{where}.{name}")
    elif expected is None or isinstance(expected, bool | np.bool_):
        assert found == expected, where
    else:
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9), where


@pytest.mark.parametrize("seed", range(20))
def test_figures_of_a_random_run(seed: int, tmp_path: Path) -> None:
    random_run(seed, tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    run = Recorded(tmp_path)
    requests, done, iterations = run.requests, run.done, run.iterations
    has_slo = bool(seed % 3)

    # The columns of requests follow from spans and iterations.
    for request, row in done.iterrows():
        times, spans, arrival_s = run.token_s[request], run.spans_of(request), row["arrival_s"]
        first_run = spans[spans["phase"] == "context"]["first_iteration"].iloc[0]
        assert row["queue_time_s"] == pytest.approx(run.start_s[first_run] - arrival_s, abs=1e-9)
        assert row["ttft_s"] == pytest.approx(times[0] - arrival_s, abs=1e-9)
        assert row["e2e_s"] == pytest.approx(run.end_s[spans["last_iteration"].iloc[-1]] - arrival_s, abs=1e-9)
        assert len(times) == row["output_len"]
        if len(times) == 1:
            assert pd.isna(row["tpot_s"])
        else:
            assert row["tpot_s"] == pytest.approx((times[-1] - times[0]) / (len(times) - 1), abs=1e-9)
        equal(row["attribution_s"], run.attribution_of(request), f"attribution of {request}")
        assert sum(row["attribution_s"].values()) == pytest.approx(row["e2e_s"], abs=1e-9)
        if has_slo:
            assert row["slo_met"] == (row["ttft_s"] <= 0.02 and not row["tpot_s"] > 0.008)
    if has_slo:
        assert not requests["slo_met"][requests["outcome"] == "failed"].any()

    # The figures of requests: of all, of each class, and of each priority.
    span_s = done["end_s"].max() - requests["arrival_s"].min()
    assert summary["duration_s"] == pytest.approx(span_s)
    for name, value in run.figures_of(requests, span_s, has_slo).items():
        equal(summary[name], value, name)
    for title, column in (("by_class", "class"), ("by_priority", "priority")):
        has_groups = seed % 2 if column == "class" else seed // 2 % 2
        assert (title in summary) == bool(has_groups)
        if not has_groups:
            continue
        groups = dict(list(requests.fillna({"priority": 0.5}).groupby(column)))
        assert set(summary[title]) == set(map(str, groups))
        for name, chosen in groups.items():
            of_group = chosen[chosen["outcome"] == "completed"]
            expected = run.figures_of(chosen, span_s, has_slo)
            speed = of_group["output_len"].sum() / of_group["e2e_s"].sum() if len(of_group) else 0.0
            equal(summary[title][str(name)], expected | {"output_tokens_per_request_s": speed}, f"{title}.{name}")
    if seed % 2:
        speeds = np.array([group["output_tokens_per_request_s"] for group in summary["by_class"].values()])
        assert summary["fairness_index"] == pytest.approx(speeds.sum() ** 2 / (len(speeds) * (speeds**2).sum()))

    # The figures of iterations.
    assert summary["iterations"] == len(iterations)
    assert summary["pauses"] == iterations["Paused Requests"].sum() == requests["pauses"].sum()
    assert summary["recomputed_tokens"] == iterations["tokens_recomputed"].sum()
    share = iterations["tokens_recomputed"].sum() / iterations["budget_used"].sum()
    assert summary["recomputed_share"] == pytest.approx(share)
    assert summary["kv_blocks"] == {
        "max": iterations["Max KV cache blocks"].max(),
        "tokens_per_block": 16,
        "peak_used": iterations["Used KV cache blocks"].max(),
    }
    assert summary["peak_scheduled_requests"] == iterations["Scheduled Requests"].max()
    limits = dict.fromkeys(LIMITS, 0.0)
    counted = iterations["bound_by"].value_counts(normalize=True)
    equal(summary["bound_by"], limits | counted.to_dict(), "bound_by")
    by_time = iterations.groupby("bound_by")["latency_ms"].sum() / iterations["latency_ms"].sum()
    equal(summary["bound_by_time"], limits | by_time.to_dict(), "bound_by_time")
    waited = dict(limits)
    for parts in done["attribution_s"]:
        for name, seconds in parts.items():
            if name.startswith("waiting_"):
                limit = name.removeprefix("waiting_").removeprefix("head_of_line_").replace("iteration", "none")
                waited[limit] = waited.get(limit, 0.0) + seconds
    equal(summary["waiting_by_limit"], waited, "waiting_by_limit")


def test_the_random_runs_reach_what_they_are_for(tmp_path: Path) -> None:
    """Pauses, failures, one-token answers, waiting for several limits, and requests that miss their objectives."""
    seen = set()
    for seed in range(8):
        folder = tmp_path / str(seed)
        folder.mkdir()
        random_run(seed, folder)
        summary = json.loads((folder / "run" / "summary.json").read_text())
        requests = table(folder, "requests")
        seen |= {name for name, seconds in summary["waiting_by_limit"].items() if seconds}
        seen |= {"pauses"} if summary["pauses"] else set()
        seen |= {"failures"} if summary["requests"]["failed"] else set()
        seen |= {"one token"} if (requests["output_len"] == 1).any() else set()
        seen |= {"missed"} if 0 < (summary.get("goodput_share") or 0) < 1 else set()
    assert seen >= {"pauses", "failures", "one token", "missed", "num_tokens", "kv_blocks", "batch_size"}
