"""Analyses of recorded runs: they agree with the files of the run, and with each other."""

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from ifbbench.analysis.compare import Comparison
from ifbbench.analysis.explain import iteration_facts, request_life
from ifbbench.analysis.figures import Figure, failed_condition
from ifbbench.analysis.findings import Findings
from ifbbench.analysis.pauses import LedgerEntry, PauseLedger, pause_ledger
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.rundir.run_directory import find_iterations
from tests.analysis.runs import SETTINGS, simulate, write_requests


@pytest.fixture(scope="module", params=range(3))
def trace(request, tmp_path_factory) -> Path:
    return write_requests(tmp_path_factory.mktemp("traces") / "trace.jsonl", seed=request.param)


@pytest.fixture(scope="module", params=SETTINGS)
def run(request, trace: Path, tmp_path_factory) -> RecordedRun:
    return simulate(tmp_path_factory.mktemp("runs"), "run", trace, **SETTINGS[request.param])


def test_the_life_of_each_request_adds_up_to_its_time(run: RecordedRun) -> None:
    findings = Findings(run)
    for request_id, row in run.row_of.items():
        if row["outcome"] != "completed":
            continue
        life = request_life(run, findings.heads, request_id)
        assert life.stretches[0].start_s == row["arrival_s"]
        assert life.stretches[-1].end_s == row["end_s"]
        for one, following in zip(life.stretches, life.stretches[1:], strict=False):
            assert one.end_s == following.start_s
        assert sum(life.attribution_s.values()) == pytest.approx(row["e2e_s"], abs=1e-9)
        by_phase: dict[str, float] = defaultdict(float)
        for stretch in life.stretches:
            by_phase[stretch.phase] += stretch.duration_s
        for phase in ("context", "generation", "paused", "recompute", "skipped"):
            assert by_phase[phase] == pytest.approx(life.attribution_s.get(phase, 0.0), abs=1e-9)


def test_waiting_is_charged_once(run: RecordedRun) -> None:
    """The waiting by limit is that of all requests together."""
    findings = Findings(run)
    waited = sum(
        run.iterations.start_of(span.last + 1) - run.iterations.start_of(span.first)
        for spans in run.spans.values()
        for span in spans
        if span.waits_for is not None
    )
    assert sum(findings.waiting_s.values()) == pytest.approx(waited, rel=1e-9)
    exact: dict[str, float] = defaultdict(float)
    for spans in run.spans.values():
        for span in spans:
            if span.waits_for is None:
                continue
            for part in findings.heads.holding(span):
                assert part.limit is not None
                seconds = run.iterations.start_of(part.last + 1) - run.iterations.start_of(part.first)
                exact[part.limit] += seconds
    for limit, seconds in findings.waiting_s.items():
        assert exact[limit] == pytest.approx(seconds, rel=1e-9, abs=1e-9)


def test_a_request_waits_behind_an_earlier_one(run: RecordedRun) -> None:
    heads = Findings(run).heads
    for request_id, spans in run.spans.items():
        for span in spans:
            if span.waits_for is None:
                continue
            for part in heads.holding(span):
                if part.behind is not None:
                    assert run.rank[part.behind] < run.rank[request_id]


def test_the_ledger_accounts_for_every_recomputed_token(run: RecordedRun) -> None:
    ledger = pause_ledger(run)
    assert run.data.summary is not None
    assert len(ledger.entries) == run.data.summary["pauses"]
    assert ledger.tokens_recomputed == run.data.summary["recomputed_tokens"]
    of_victims: Counter[object] = Counter()
    for entry in ledger.entries:
        of_victims[entry.victim] += entry.tokens_recomputed
    for request_id, row in run.row_of.items():
        assert of_victims[request_id] == row["recomputed_tokens"]


def test_the_costliest_pauses_are_those_that_lost_most_time() -> None:
    def pause(iteration: int, tokens: int, lost_s: float) -> LedgerEntry:
        return LedgerEntry(iteration, 0.1 * iteration, "1", "2", "kv_blocks", 3, tokens, lost_s, 0.5, 1)

    many, long, both = pause(3, 900, 0.1), pause(5, 20, 4.0), pause(4, 20, 0.1)
    assert PauseLedger([many, both, long]).costliest() == [long, many, both]


def test_the_ledger_accounts_for_the_tokens_that_policies_differ_by(tmp_path: Path, trace: Path) -> None:
    one = simulate(tmp_path, "one", trace, policy="guaranteed_no_evict")
    other = simulate(tmp_path, "other", trace, policy="max_utilization")
    computed = [sum(span.tokens for spans in run.spans.values() for span in spans) for run in (one, other)]
    assert pause_ledger(one).entries == []
    assert computed[1] - computed[0] == pause_ledger(other).tokens_recomputed > 0


def test_iterations_are_explained_as_recorded(run: RecordedRun) -> None:
    lines = [json.loads(line) for line in find_iterations(run.data.path).read_text().splitlines()]
    for line in lines[:: max(len(lines) // 40, 1)]:
        facts = iteration_facts(run, line["Iteration Counter"])
        details = line["ifbbench"]
        assert facts.bound_by == details["bound_by"]
        assert facts.left_out == (
            None if details["first_left_out"] is None else tuple(details["first_left_out"].values())
        )
        assert len(facts.contexts) + len(facts.recomputes) == line["Context Requests"]
        assert facts.used["num_tokens"] == details["budget_used"]
        assert [{"request_id": victim, "for": other} for victim, other in facts.paused] == details["paused"]
        if facts.left_out and facts.left_out[1] == "num_tokens" and facts.missing is not None:
            assert facts.missing > 0


def test_a_run_is_identical_to_itself(tmp_path: Path) -> None:
    trace = write_requests(tmp_path / "trace.jsonl", seed=9)
    one, other = simulate(tmp_path, "one", trace), simulate(tmp_path, "other", trace)
    comparison = Comparison(one, other)
    assert comparison.identical
    assert comparison.first_divergence is None
    assert all(figure.a == figure.b for figure in comparison.figures.values())
    assert comparison.changes(5) == ([], [])


def test_policies_diverge_where_the_recorded_decisions_do(tmp_path: Path, trace: Path) -> None:
    one = simulate(tmp_path, "one", trace, policy="guaranteed_no_evict")
    other = simulate(tmp_path, "other", trace, policy="max_utilization")
    comparison = Comparison(one, other)
    divergence = comparison.first_divergence
    assert not comparison.identical
    assert divergence is not None
    compared = ("Scheduled Requests", "Context Requests", "Total Context Tokens", "Paused Requests")
    sides = [
        [
            tuple(json.loads(line)[name] for name in compared)
            for line in find_iterations(run.data.path).read_text().splitlines()
        ]
        for run in (one, other)
    ]
    differ = next(place for place, pair in enumerate(zip(*sides, strict=False)) if pair[0] != pair[1])
    assert divergence.iteration <= differ
    assert sides[0][: divergence.iteration] == sides[1][: divergence.iteration]
    gained, lost = comparison.changes(3)
    for change in (*gained, *lost):
        difference = other.row_of[change.request_id]["e2e_s"] - one.row_of[change.request_id]["e2e_s"]
        assert change.difference_s == pytest.approx(difference)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("ttft_s.p99>+5%", True),
        ("ttft_s.p99>+25%", False),
        ("ttft_s.p99<-5%", False),
        ("pauses>+10", True),
        ("pauses>+100", False),
        ("ttft_s.p99>1.1", True),
        ("ttft_s.p99>2", False),
    ],
)
def test_conditions_of_a_regression_gate(text: str, holds: bool) -> None:
    figures = {"ttft_s.p99": Figure(1.0, 1.2), "pauses": Figure(0.0, 50.0)}
    assert (failed_condition(text, figures) is not None) == holds


@pytest.mark.parametrize("text", ["ttft_s.p99", "ttft_s.p99>x", "nothing>5%", ""])
def test_other_conditions_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--fail-if"):
        failed_condition(text, {})


def test_repeats_are_compared_by_their_means(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = "run chat --device sim:h100-sxm --model llama-3.1-8b --max_num_samples 30 --repeat 3 --quiet --output"
    for name, rate in (("slow", "5"), ("fast", "40")):
        done = CliRunner().invoke(main, [*words.split(), name, "--request_rate", rate])
        assert done.exit_code == 0, done.output
    compared = CliRunner().invoke(main, ["compare", "slow", "fast", "--json"])
    assert compared.exit_code == 0, compared.output
    found = json.loads(compared.output)
    assert found["repeats"] == [3, 3]
    figure = found["figures"]["ttft_s.mean"]
    means = [json.loads((tmp_path / name / "summary.json").read_text())["ttft_s"]["mean"] for name in ("slow", "fast")]
    assert [figure["a"], figure["b"]] == pytest.approx(means)
    low, high = figure["interval_95"]
    assert low < means[1] - means[0] < high
    assert json.loads(CliRunner().invoke(main, ["compare", "slow", "slow", "--json"]).output)["identical"]
    mixed = CliRunner().invoke(main, ["compare", "slow", "fast/repeat-1"])
    assert mixed.exit_code == 2
    assert "repeats are compared with repeats only" in mixed.output


def test_a_difference_within_the_expected_error_is_undecided(tmp_path: Path) -> None:
    trace = write_requests(tmp_path / "trace.jsonl", seed=2)
    one, other = simulate(tmp_path, "one", trace), simulate(tmp_path, "other", trace, max_num_tokens=512)
    for run in (one, other):
        assert run.data.summary is not None
        run.data.summary["expected_error"] = {"compared": True, "ttft_s": [-0.99, 99.0], "itl_s": [0.0, 0.0]}
    figures = Comparison(one, other).figures
    assert figures["ttft_s.mean"].is_undecided
    assert not figures["itl_s.max"].is_undecided or figures["itl_s.max"].difference == 0
    assert not figures["e2e_s.mean"].is_undecided
    assert not any(name.startswith("expected_error") for name in figures)
