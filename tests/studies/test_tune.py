"""The search for settings: what it leaves out, what it finds, and its answers where nothing can be found."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from ifbbench.cli.tune_tables import rate_text, recorded_text
from ifbbench.errors import InputError
from ifbbench.rundir.reader import load_run
from ifbbench.settings.config import RunConfig
from ifbbench.settings.names import from_mapping
from ifbbench.studies.points import run_points
from ifbbench.studies.tune import Tuner
from ifbbench.studies.tune_candidates import Candidate, Goal
from ifbbench.studies.tune_certainty import at_risk, is_undecided
from ifbbench.studies.tune_files import UNLESS_DECIDED, answer, decided, pareto, record_best, verdict
from ifbbench.studies.tune_load import ABOVE
from ifbbench.studies.tune_rate import (
    _bracket,
    find_max_rate,
    find_replicas,
    max_runs_for_rate,
    max_runs_for_replicas,
)
from ifbbench.studies.tune_runs import Case, Run, Runs
from ifbbench.studies.tune_search import Tuning
from ifbbench.studies.tune_space import Space, idle_limits
from ifbbench.studies.tune_traffic import TrafficSearch
from ifbbench.workload.load import in_memory, load_trace, read_source
from ifbbench.workload.trace import columns_of

BASE: dict[str, Any] = {"device": "sim:h100-sxm", "model": "llama-3.1-8b", "quiet": True}


pytestmark = pytest.mark.usefixtures("one_process")


def tuner(source: str = "chat", goal: str | None = None, slo: str | None = None, **values) -> Tuner:
    given = {"max_num_samples": 100, **values}
    base = from_mapping({**BASE, "slo": slo, **given}, command_line=True)
    return Tuner(source, base, frozenset(given), Goal.of(goal, slo))


def tune(*args: Any, max_gpus: int | None = None, **values: Any) -> Tuning:
    searching = tuner(*args, **values)
    searching.max_gpus = max_gpus or searching.max_gpus
    return searching.run()


def summary_of(**values: Any) -> dict[str, Any]:
    base = from_mapping({**BASE, "max_num_samples": 60, **values}, command_line=True)
    (result,) = run_points(in_memory(read_source("chat", base)), [base])
    assert not result.error
    return result.summary


def space(**values: Any) -> Space:
    base = from_mapping(BASE | values, command_line=True)
    return Space(base, frozenset(values), longest_prompt=5000, shares_prefixes=False)


# What binds decides which changes run.


def test_limits_that_never_bind_are_idle_and_raising_them_changes_nothing():
    summary = summary_of(request_rate=5)
    assert idle_limits(summary, 2048) == {"batch_size", "num_tokens", "kv_blocks"}
    wider = summary_of(request_rate=5, max_num_tokens=32_768, policy="max_utilization")
    assert wider["schedule_digest"] == summary["schedule_digest"]


def test_moves_leave_out_what_is_certain_to_change_nothing():
    moves = space().moves(space().point(), summary_of(request_rate=5), 2.0)
    assert {name for name, _ in moves} == {"max_batch_size", "max_num_tokens"}
    now = dict(space().point())
    assert all(dict(moved)[name] < now[name] for name, moved in moves)


def test_moves_change_policies_and_chunks_where_blocks_and_tokens_are_short():
    summary = summary_of(time_scale=0, max_tokens_in_paged_kvcache=16_384, max_num_tokens=512)
    names = [name for name, _ in space().moves(space().point(max_num_tokens=512), summary, 2**0.5)]
    assert {"max_num_tokens", "policy", "enable_chunked_context", "tokens_per_block"} <= set(names)


def test_a_given_setting_stays():
    fixed = space(max_batch_size=64, policy="guaranteed_no_evict")
    summary = summary_of(time_scale=0, max_tokens_in_paged_kvcache=16_384, max_num_tokens=512)
    moved = [dict(point) for _, point in fixed.moves(fixed.point(), summary, 2.0)]
    assert moved
    assert {(one["max_batch_size"], one["policy"]) for one in moved} == {(64, "guaranteed_no_evict")}


def test_whole_prompts_are_tried_only_where_the_longest_fits():
    grid = [dict(point) for point in space().grid()]
    whole = {point["max_num_tokens"] for point in grid if not point["enable_chunked_context"]}
    assert whole == {8192, 16_384}


# Runs.


def test_a_case_runs_once_and_its_requests_are_counted():
    searching = tuner()
    point = searching.space.point()
    runs = searching.runs
    first = runs.run([Case(point, 30), Case(point, 30)])
    assert runs.work == 30
    assert runs.run([Case(point, 30)]) == first[:1]
    assert runs.work == 30
    runs.run([Case(point, None, replicas=4)])
    assert runs.work == 130


def test_replicas_share_the_requests_in_turn():
    base = from_mapping({**BASE, "max_num_samples": 100, "request_rate": 10, "enable_exp_delays": True})
    whole = columns_of(load_trace("chat", base).requests)
    shares = [columns_of(load_trace("chat", base.with_values(replica=f"{k}/3")).requests) for k in (1, 2, 3)]
    assert [len(one) for one in shares] == [34, 33, 33]
    for first, share in enumerate(shares):
        assert share.request_id == whole.request_id[first::3]
        assert share.arrival_s == whole.arrival_s[first::3]  # as in the whole trace


@pytest.mark.parametrize("text", ["4/3", "0/2", "1", "1/x", "2000/3000", "1/-2"])
def test_a_replica_is_one_of_several(text):
    with pytest.raises(InputError, match=r"replica is .* expected K/N"):
        RunConfig(replica=text)


def test_a_replica_without_requests_is_refused():
    base = from_mapping({**BASE, "max_num_samples": 2, "replica": "3/3"})
    with pytest.raises(InputError, match="--replica 3/3: no request is left for it, the trace has 2 requests"):
        load_trace("chat", base)


def test_a_faster_rate_is_the_same_as_a_smaller_time_scale():
    searching = tuner()
    (run,) = searching.runs.run([Case(searching.space.point(), rate=4.0)])
    (other,) = tuner(time_scale=0.25).runs.run([Case(searching.space.point())])
    assert run.summary["schedule_digest"] == other.summary["schedule_digest"]


# Goals and ranking.


def test_a_candidate_that_meets_the_objectives_wins_over_a_faster_one():
    goal = Goal.of("output_throughput", "ttft.p99=1s")
    slow, fast = summary_of(request_rate=5, slo="ttft.p99=1s"), summary_of(time_scale=0, slo="ttft.p99=1s")
    assert not goal.shortfalls(slow)
    assert goal.shortfalls(fast)["ttft.p99"] > 1
    assert goal.rank(slow, 1.0) > goal.rank(fast, 10.0)


def test_goodput_needs_an_objective_of_each_request():
    with pytest.raises(InputError, match="--goal output_throughput"):
        Goal.of("goodput", "ttft.p99=1s")
    assert Goal.of(None, "ttft=1s").name == "goodput"
    assert Goal.of(None, "ttft.p99=1s").name == "output_throughput"


def test_failed_requests_are_a_miss_but_for_those_that_no_setting_runs():
    summary = {**summary_of(request_rate=5), "requests": {"total": 60, "completed": 58, "failed": 2}}
    assert "failed requests" in Goal("output_throughput", (), refused=1).shortfalls(summary)
    assert not Goal("output_throughput", (), refused=2).shortfalls(summary)


# The search.


@pytest.fixture(scope="module")
def goodput() -> Tuning:
    return tune(slo="ttft=500ms,tpot=12ms", request_rate=40)


def test_the_search_beats_its_baselines_and_stays_within_its_work(goodput):
    assert goodput.best is not None
    assert goodput.best.run.case.requests is None
    assert all(goodput.best.score >= one.score for one in goodput.baselines)
    assert goodput.runs.work <= 0.1 * len(goodput.space.grid()) * goodput.runs.total


def test_the_search_is_within_two_percent_of_a_grid(goodput):
    runs = goodput.runs.run([Case(point) for point in goodput.space.grid()[::10]])
    assert goodput.best.score >= 0.98 * max(run.summary["goodput_requests_per_s"] for run in runs)


def test_the_answer_has_the_keys_of_the_contract(goodput):
    found = answer(goodput, [], [["ifbbench", "run"]])
    assert {"recommendation", "candidates", "pareto", "binding", "importance"} <= set(found)
    assert {"settings", "figures", "expected_error"} <= set(found["recommendation"])
    config = RunConfig(**BASE, **found["recommendation"]["settings"])
    assert config.max_batch_size == goodput.best.settings["max_batch_size"]
    assert set(found["importance"]) <= set(goodput.space.searched)


def test_the_pareto_front_has_no_beaten_candidate(goodput):
    alike = [one for one in goodput.candidates if one.run.case.requests is None]
    front = pareto(alike, goodput.goal)
    speeds = [one.summary["output_throughput_tokens_per_s"] for one in front]
    assert speeds == sorted(speeds)
    assert max(one.summary["output_throughput_tokens_per_s"] for one in alike) == speeds[-1]


@pytest.mark.parametrize(
    ("source", "slo", "num", "rate"),
    [
        ("chat", "itl.p99=25ms,ttft.p90=1500ms", 30, 25.0),
        ("mixed", "itl.p99=35ms,ttft.p99=3000ms", 60, 8.0),
        pytest.param("chat", "itl.p99=15ms,ttft.p99=600ms", 60, 15.0, marks=pytest.mark.slow),
        pytest.param("chat", "itl.p99=15ms,ttft.p90=3000ms", 30, 25.0, marks=pytest.mark.slow),
    ],
)
def test_objectives_that_some_settings_of_a_grid_meet_are_met(source, slo, num, rate):
    found = tune(
        source, slo=slo, max_num_samples=num, request_rate=rate, context_chunking_policy="first_come_first_served"
    )
    assert found.best is not None
    assert not found.goal.shortfalls(found.best.summary)
    points = [
        found.space.point(max_num_tokens=tokens, max_batch_size=size)
        for tokens in (128, 256, 384, 512, 768, 1024, 2048)
        for size in (16, 32, 256)
    ]
    runs = found.runs.run([Case(point) for point in points])
    meeting = [run.summary["output_throughput_tokens_per_s"] for run in runs if not found.goal.shortfalls(run.summary)]
    assert found.best.score >= 0.97 * max(meeting)


def test_objectives_that_no_setting_meets_are_said_with_the_nearest():
    found = tune(goal="output_throughput", slo="ttft.p99=1us", request_rate=40, max_num_samples=10)
    assert found.best is not None
    assert "No setting that was tried meets the objectives" in verdict(found)
    assert "ttft.p99" in verdict(found)
    misses = answer(found, [], [])["recommendation"]["misses"]
    assert misses["ttft.p99"] == pytest.approx(found.best.summary["ttft_s"]["p99"] / 1e-6)


def test_objectives_that_every_setting_meets_are_said():
    found = tune(slo="ttft=100s", request_rate=5)
    assert "with the same result" in verdict(found)
    assert found.runs.work < 10 * found.runs.total


@pytest.mark.parametrize("goal", ["goodput", "output_throughput", "max_rate", "cost"])
def test_progress_is_that_of_the_whole_search(monkeypatch, goal):
    monkeypatch.setattr("ifbbench.studies.tune_load.ABOVE_RUNS", 16)
    searching = tuner(goal=goal, slo="ttft=2s,tpot=40ms", request_rate=20, max_num_samples=8)
    stages, totals, done = list[str](), list[int](), list[int]()

    class Kept:
        def stage(self, label: str) -> None:
            stages.append(label)

        def update(self, completed: int, total: int | None, text: str) -> None:
            assert total is not None
            assert completed == searching.runs.work
            totals.append(total)
            done.append(completed)

    monkeypatch.setattr(searching, "_progress", Kept())
    searching.run()
    assert stages == ["searching"]  # another one would begin to count anew
    assert done == sorted(done)
    assert done[-1] == searching.runs.work
    # The total is about the most that the search may take, from its first runs on.
    assert max(done) <= 1.2 * totals[0]
    assert all(completed <= total for completed, total in zip(done, totals, strict=True))
    # Work that is left is known after each run, also while a rate is searched.
    assert max(later - before for before, later in pairwise(done)) < searching.runs.work / 2


@pytest.mark.parametrize("is_final", [False, True])
@pytest.mark.parametrize("border", [1 / 60, 0.3, 0.99, 1.0, 1.3, 5.0, 60.0])
@pytest.mark.parametrize("start", [1.0, 0.9, 3.0])
def test_no_search_for_a_rate_takes_more_runs_than_are_counted(monkeypatch, border, start, is_final):
    runs, tried = tuner(goal="max_rate", slo="ttft=2s").runs, list[Case]()

    def run(cases: Sequence[Case]) -> list[Run]:
        tried.extend(case for case in cases if case not in tried)
        return [Run(case, {"meets": case.rate <= border}) for case in cases]

    monkeypatch.setattr(runs, "run", run)
    goal = SimpleNamespace(shortfalls=lambda summary: [] if summary["meets"] else ["ttft"])
    find_max_rate(runs, goal, (), start=start, is_final=is_final)  # type: ignore[arg-type]
    assert len(tried) <= max_runs_for_rate(runs, is_final)


@pytest.mark.parametrize("most", [1, 2, 7, 64])
def test_no_search_for_replicas_takes_more_runs_than_are_counted(monkeypatch, most):
    runs = tuner(goal="cost", slo="ttft=2s").runs
    goal = SimpleNamespace(shortfalls=lambda summary: [] if summary["meets"] else ["ttft"])
    for needed in range(1, most + 2):
        for start in range(1, most + 1):
            tried = set[int]()

            def run(cases: Sequence[Case], needed: int = needed, tried: set[int] = tried) -> list[Run]:
                tried.update(case.replicas for case in cases)
                return [Run(case, {"meets": case.replicas >= needed}) for case in cases]

            monkeypatch.setattr(runs, "run", run)
            find_replicas(runs, goal, (), most, start)  # type: ignore[arg-type]
            assert len(tried) <= max_runs_for_replicas(most)


def test_interrupting_keeps_the_best_so_far(monkeypatch):
    searching = tuner(slo="ttft=500ms,tpot=12ms", request_rate=40)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TrafficSearch, "run", interrupt)
    found = searching.run()
    assert found.best is not None
    assert not found.is_complete
    assert "of the requests meet every objective" in verdict(found)


def test_a_device_that_is_not_simulated_is_refused():
    with pytest.raises(InputError, match="--device cpu: tune simulates"):
        Tuner("chat", RunConfig(device="cpu"), frozenset(), Goal.of(None, None))


# The highest rate and the fewest replicas.


HIGHEST_RATE: dict[str, Any] = {
    "goal": "max_rate",
    "slo": "ttft.p99=300ms,tpot.p99=15ms",
    "max_num_samples": 40,
    "policy": "guaranteed_no_evict",
    "enable_chunked_context": True,
    "tokens_per_block": 32,
}


def test_the_highest_rate_agrees_with_a_fine_scan():
    searching = tuner(**HIGHEST_RATE, max_batch_size=256, max_num_tokens=2048)
    found = searching.run()
    assert found.best is not None
    assert found.best.rate is not None
    low, point = found.best.rate.low, found.best.run.case.settings
    factors = [low * (0.9 + 0.01 * step) for step in range(21)]
    runs = searching.runs.run([Case(point, rate=factor) for factor in factors])
    highest = max(run.case.rate for run in runs if not found.goal.shortfalls(run.summary))
    assert low == pytest.approx(highest, rel=0.02)


@pytest.mark.slow
def test_no_limit_beside_the_best_ones_takes_more_than_the_highest_rate():
    searching = tuner(**HIGHEST_RATE, max_batch_size=48)
    best = searching.run().best
    assert best is not None
    assert best.rate is not None
    case = replace(best.run.case, rate=best.run.case.rate * ABOVE)
    points = searching.space.lattice(case.settings, best.summary)
    assert len({dict(point)["max_num_tokens"] for point in points}) == len(points) > 5
    runs = searching.runs.run([replace(case, settings=point) for point in points])
    assert all(run.error or searching.goal.shortfalls(run.summary) for run in runs)


def test_the_highest_rate_needs_arrivals():
    with pytest.raises(InputError, match="--goal max_rate"):
        tuner(goal="max_rate", slo="ttft.p99=1s", time_scale=0)


def test_the_highest_rate_of_recorded_arrivals_has_no_interval_and_says_how_it_was_reached():
    given: dict[str, Any] = {
        "max_batch_size": 256,
        "max_num_tokens": 2048,
        "policy": "guaranteed_no_evict",
        "enable_chunked_context": True,
        "tp_size": 1,
        "tokens_per_block": 32,
    }
    found = tune(goal="max_rate", slo="ttft.p99=300ms", max_num_samples=30, **given)
    described = answer(found, [], [])["recommendation"]
    figures = described["figures"]
    assert figures["max_rate_interval"] is None
    assert found.goal.figure not in described["intervals_95"]
    assert figures["max_rate_failed_at_requests_per_s"] > figures["max_rate_requests_per_s"]
    verb = "compressed" if figures["time_scale"] < 1 else "stretched"
    assert f"{verb} to that (--time_scale {figures['time_scale']:.4g})" in rate_text(figures, found)
    assert described["rate_from"] == f"recorded arrivals, {verb}"
    drawn = tune(goal="max_rate", slo="ttft.p99=300ms", max_num_samples=30, request_rate=10, **given)
    assert "recorded" not in rate_text(answer(drawn, [], [])["recommendation"]["figures"], drawn)


def test_the_highest_rate_needs_arrivals_that_can_be_scaled():
    with pytest.raises(InputError, match="--arrival and --rate_schedule have rates of their own"):
        tuner(goal="max_rate", slo="ttft.p99=1s", arrival="ramp:5:50:4")


@pytest.mark.parametrize(("border", "low"), [(5.0, 2.5), (0.3, 0.15), (100.0, 40.0)])
def test_a_bracket_holds_the_border(border, low):
    asking = _bracket(1.0, 2.0)
    (factor,), ended = next(asking), None
    while ended is None:
        try:
            (factor,) = asking.send([factor <= border])
        except StopIteration as end:
            ended = end.value
    met, missed = ended
    assert met is not None
    assert low < met <= border
    assert missed is None or missed > border


def test_the_cost_is_that_of_the_fewest_gpus_that_meet_the_objectives():
    found = tune(
        goal="cost",
        slo="ttft.p99=300ms,tpot.p99=12ms",
        request_rate=120,
        tp_size=1,
        max_batch_size=128,
        max_num_tokens=1024,
        policy="guaranteed_no_evict",
        enable_chunked_context=True,
        tokens_per_block=32,
        max_gpus=16,
    )
    best = found.best
    assert best is not None
    assert not found.goal.shortfalls(best.summary)
    case = best.run.case
    assert case.replicas == best.gpus > 1
    (fewer,) = found.runs.run([replace(case, replicas=case.replicas - 1)])
    assert found.goal.shortfalls(fewer.summary)


def test_one_replica_behind_a_router_is_recorded_as_one_engine(tmp_path):
    """Its directory has iterations, which the answer explains."""
    limits: dict[str, Any] = {
        "max_batch_size": 128,
        "max_num_tokens": 1024,
        "tp_size": 1,
        "enable_chunked_context": True,
    }
    asked: dict[str, Any] = {
        "router": "least_requests",
        "request_rate": 5,
        "max_num_samples": 20,
        "policy": "guaranteed_no_evict",
    }
    found = tune(goal="cost", slo="ttft.p99=2s", **limits, **asked)
    assert found.best is not None
    assert found.best.run.case.replicas == 1
    (run,) = record_best(found, tmp_path / "tuned", overwrite=False)
    assert answer(found, [run], [])["binding"]
    summary = load_run(run).summary
    assert summary is not None
    assert summary["schedule_digest"] == found.best.summary["schedule_digest"]


def test_a_candidate_over_more_of_the_trace_replaces_one_over_less():
    searching = tuner(slo="ttft=1s")
    point = searching.space.point()
    runs = searching.runs.run([Case(point, 20), Case(point)])
    short, whole = (searching.judge.candidate(run) for run in runs)
    assert isinstance(short, Candidate)
    assert isinstance(whole, Candidate)
    assert searching.judge.evidence(whole) > searching.judge.evidence(short)


def test_a_run_without_completed_requests_has_no_candidate():
    searching = tuner()
    assert searching.judge.candidate(Run(Case(searching.space.point()), error="every request is refused")) is None
    assert isinstance(searching.runs, Runs)


def test_the_interval_of_the_highest_rate_covers_the_thirds_of_the_trace(monkeypatch):
    monkeypatch.setattr("ifbbench.studies.tune_rate.MIN_STRETCH", 10)
    given: dict[str, Any] = {
        "max_batch_size": 64,
        "max_num_tokens": 2048,
        "policy": "guaranteed_no_evict",
        "enable_chunked_context": True,
        "tokens_per_block": 32,
    }
    found = tune(goal="max_rate", slo="ttft.p99=300ms", max_num_samples=30, **given)
    figures = answer(found, [], [])["recommendation"]["figures"]
    low, high = figures["max_rate_interval"]
    rates = [figures["max_rate_requests_per_s"], *figures["max_rate_by_third"]]
    assert len(rates) == 4
    assert (low, high) == (min(rates), max(rates))
    assert "each third of it" in rate_text(figures, found)


def test_traffic_that_fits_no_device_is_said_with_the_gpus_that_it_needs(monkeypatch):
    given: dict[str, Any] = {
        "max_batch_size": 8,
        "max_num_tokens": 512,
        "policy": "guaranteed_no_evict",
        "enable_chunked_context": True,
        "tokens_per_block": 32,
    }
    found = tune(goal="max_rate", slo="ttft.p99=400ms", max_num_samples=30, time_scale=0.1, **given)
    recorded = answer(found, [], [])["recommendation"]["as_recorded"]
    assert not recorded["fits"]
    assert recorded["gpus"] == recorded["replicas"] > 1
    text = recorded_text(recorded, found)
    assert f"it needs {recorded['gpus']} h100-sxm" in text
    assert "do not fit one h100-sxm under any of these settings" in text


def test_settings_that_gain_nothing_keep_their_default_values():
    found = tune(goal="output_throughput", request_rate=5, max_num_samples=40)
    assert found.best is not None
    assert found.best.run.case.settings == found.space.point()
    assert set(UNLESS_DECIDED) & set(decided(found)) == set()


# How certain the answer is.


def with_error(one: Candidate, share: float, **errors: Any) -> Candidate:
    """A candidate with another score, and an expected error of the simulation."""
    summary = {**one.summary, "expected_error": {"compared": True, **errors}}
    return replace(one, run=replace(one.run, summary=summary), score=one.score * share)


ALL_BUT_LIMITS: dict[str, Any] = {
    "policy": "guaranteed_no_evict",
    "enable_chunked_context": True,
    "tokens_per_block": 32,
    "tp_size": 1,
}


@pytest.mark.parametrize(
    ("goal", "num", "given"),
    [("goodput", 80, {}), ("max_rate", 20, ALL_BUT_LIMITS), ("cost", 60, ALL_BUT_LIMITS)],
)
def test_what_is_said_of_other_settings_was_tried_under_the_same_load(monkeypatch, goal, num, given, tmp_path):
    monkeypatch.setattr("ifbbench.studies.tune_load.ABOVE_RUNS", 16)
    searching = tuner(goal=goal, slo="ttft=1s,tpot=14ms", request_rate=40, max_num_samples=num, **given)
    found = searching.run()
    best = found.best
    assert best is not None
    told = answer(found, record_best(found, tmp_path / "tuned", False), [])["binding"]
    assert told["tried"]
    for one in told["tried"]:
        (name,) = one["changed"]
        case = replace(best.run.case, settings=tuple((best.settings | one["changed"]).items()))
        (again,) = Runs(searching.runs.trace, searching.base.with_values(request_rate=None)).run([case])
        assert found.goal.shortfalls(again.summary) == one["misses"]
        assert f"{name} {str(one['changed'][name]).lower()}" in told["advice"]
        if goal == "goodput":
            assert one["loss"] == pytest.approx(1 - again.summary["goodput_requests_per_s"] / best.score)
    # The limit that most requests waited for comes first.
    first = next(iter(told["waiting_s"]))
    assert {"batch_size": "max_batch_size", "num_tokens": "max_num_tokens"}[first] in told["tried"][0]["changed"]


def test_a_gain_within_the_error_of_the_simulation_is_undecided(goodput):
    best, goal = goodput.best, Goal.of("output_throughput", None)
    known = with_error(best, 1.0, output_throughput_tokens_per_s=[-0.08, 0.08])
    assert is_undecided(known, with_error(best, 0.95), goal)
    assert not is_undecided(known, with_error(best, 0.9), goal)
    assert not is_undecided(replace(best, run=known.run), with_error(best, 0.9), Goal.of(None, "ttft=1s"))
    never = replace(best, run=replace(best.run, summary={**best.summary, "expected_error": {"compared": False}}))
    assert not is_undecided(never, with_error(best, 0.99), goal)


def test_objectives_that_the_error_of_the_simulation_may_break_are_named():
    objectives = Goal.of("output_throughput", "ttft.p99=1s,tpot.p99=50ms,e2e.p99=1s").objectives
    values = {"ttft.p99": 0.6, "tpot.p99": 0.04, "e2e.p99": 0.99}
    summary = {
        "expected_error": {"ttft_s": [-0.3, 1.3], "itl_s": [-0.1, 0.1]},
        "slo": {name: {"value": value} for name, value in values.items()},
    }
    assert at_risk(summary, objectives) == {"ttft.p99": [pytest.approx(0.42), pytest.approx(1.38)]}


@pytest.mark.parametrize(
    ("goal", "options"),
    [
        ("goodput", {"slo": "ttft=300ms", "request_rate": 3}),
        ("output_throughput", {"request_rate": 3}),
        ("cost", {"slo": "ttft.p99=2s", "request_rate": 3, "max_gpus": 2}),
        ("max_rate", {"slo": "ttft.p99=300ms", "request_rate": 20, "max_num_samples": 30, "enable_exp_delays": True}),
    ],
)
def test_the_figure_of_each_goal_has_an_interval(tmp_path, goal, options):
    limits: dict[str, Any] = {
        "max_batch_size": 64,
        "max_num_tokens": 2048,
        "policy": "guaranteed_no_evict",
        "tokens_per_block": 32,
    }
    options = {"max_num_samples": 300, **options}
    found = tune(goal=goal, tp_size=1, enable_chunked_context=True, **limits, **options)
    described = answer(found, record_best(found, tmp_path, overwrite=False), [])["recommendation"]
    assert found.best is not None
    low, high = described["intervals_95"][found.goal.figure]
    assert low <= abs(found.best.score) <= high
    assert high < 3 * low
