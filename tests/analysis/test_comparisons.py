"""`ifbbench compare`: what it calls a difference, its table, and `--repeat`."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from ifbbench.analysis.compare import Comparison, _in_words
from ifbbench.analysis.figures import Figure
from ifbbench.analysis.number_texts import number_of
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.analysis.repeats import Repeats, RepeatsComparison
from ifbbench.analysis.words import TENSORRT_LLM
from ifbbench.cli.compare import HEADLINES, _print
from ifbbench.cli.main import main
from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig
from ifbbench.studies.repeat import simulate_seeds

BASE = RunConfig(
    device="sim:h100-sxm",
    model="llama-3.1-8b",
    enable_exp_delays=True,
    request_rate=2.0,
    max_num_samples=400,
    recording="summary",
    slo="ttft=100ms",
    quiet=True,
)


def simulate(output: Path, **values) -> RecordedRun:
    run_trace("chat", BASE.with_values(output=str(output), **values))
    return RecordedRun.load(output, or_summary=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[RecordedRun]:
    """Runs with the same settings and other seeds, at little load."""
    path = tmp_path_factory.mktemp("seeds")
    return [simulate(path / str(seed), seed=seed) for seed in range(12)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Runs that differ in the load (idle, busy, overloaded), and one with recorded arrivals."""
    path = tmp_path_factory.mktemp("loads")
    for name, rate in {"idle": 2.0, "busy": 8.0, "overloaded": 60.0}.items():
        simulate(path / name, request_rate=rate, max_num_samples=200, seed=5)
    rows = (
        {"request_id": one, "arrival_s": one / 4, "prompt_len": 50 + one, "output_len": 20, "max_new_tokens": 20}
        for one in range(120)
    )
    (path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recorded = BASE.with_values(request_rate=None, enable_exp_delays=False, slo=None)
    for name in ("recorded", "again"):
        run_trace(str(path / "trace.jsonl"), recorded.with_values(output=str(path / name)))
    null = recorded.with_values(output=str(path / "null"), device="null", time_scale=0.0)
    run_trace(str(path / "trace.jsonl"), null)
    return path


def compare(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, words)])


def test_equal_settings_with_other_seeds_seldom_differ(runs):
    """A bootstrap of single requests calls the mean TPOT of every fourth of these pairs another one."""
    said = defaultdict(list)
    for a, b in combinations(runs, 2):
        for name, figure in Comparison(a, b).figures.items():
            if figure.low is not None:
                said[name].append(not figure.is_noise)
    shares = {name: fmean(values) for name, values in said.items()}

    assert {"ttft_s.mean", "tpot_s.p95", "itl_s.mean", "output_throughput_tokens_per_s", "goodput_share"} <= set(shares)
    assert max(shares.values()) < 0.16, shares
    assert 0.005 < fmean(shares.values()) < 0.08


def test_longer_latencies_are_found(runs):
    found = []
    for a, b in zip(runs[::2], runs[1::2], strict=True):
        assert b.data.summary is not None
        summary = b.data.summary | {"tpot_s": {"mean": 1.05 * b.data.summary["tpot_s"]["mean"]}}
        longer = RecordedRun(replace(b.data, summary=summary))
        found.append(not Comparison(a, longer).figures["tpot_s.mean"].is_noise)
    assert fmean(found) > 0.7


def test_an_overloaded_run_is_too_short_to_tell(directory):
    found = compare(directory / "idle", directory / "overloaded").output

    assert "No intervals" in found
    assert "--repeat 10" in found
    assert "too short to tell chance from a difference; its arrivals last" in found.replace("\n", " ")
    shown = json.loads(compare(directory / "idle", directory / "overloaded", "--json").output)
    assert shown["interval_of"].startswith("No intervals")
    assert not any("interval_95" in figure for figure in shown["figures"].values())


def test_repeats_of_the_same_seeds_are_paired(directory):
    seeds = range(6)
    base = BASE.with_values(max_num_samples=100, request_rate=20.0, enable_chunked_context=True)
    a, b = (
        simulate_seeds("chat", base.with_values(max_num_tokens=tokens), seeds, lambda: None) for tokens in (2048, 256)
    )
    first = Repeats(Path(), seeds, a, [None] * 6)
    paired = RepeatsComparison(first, Repeats(Path(), seeds, b, [None] * 6))
    others = RepeatsComparison(first, Repeats(Path(), range(6, 12), b, [None] * 6))

    assert "differences of equal seeds" in paired.interval_of
    assert "Welch" in others.interval_of
    assert width(paired.figures["e2e_s.mean"]) < 0.5 * width(others.figures["e2e_s.mean"])


def width(figure: Figure) -> float:
    assert figure.low is not None
    assert figure.high is not None
    return figure.high - figure.low


def test_repeat_simulates_each_run_with_the_same_seeds(directory):
    result = compare(directory / "busy", directory / "overloaded", "--repeat", "4", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)["figures"]["ttft_s.mean"]
    config = BASE.with_values(request_rate=8.0, max_num_samples=200)
    means = [one["ttft_s"]["mean"] for one in simulate_seeds("chat", config, range(5, 9), lambda: None)]

    assert means[0] == json.loads((directory / "busy/summary.json").read_text())["ttft_s"]["mean"]
    assert found["a"] == pytest.approx(fmean(means))
    assert found["interval_95"][0] < found["difference"] < found["interval_95"][1]
    assert not found["is_noise"]


@pytest.mark.parametrize(
    ("name", "reason"), [("recorded", "the seed changes nothing in"), ("null", "was not simulated")]
)
def test_runs_that_cannot_be_repeated_are_named(directory, name, reason):
    result = compare(directory / name, directory / name, "--repeat", "3")

    assert result.exit_code == 2
    assert reason in result.output
    assert str(directory / name) in result.output


def printed(directory: Path, width: int, *names: str) -> list[str]:
    runs = [RecordedRun.load(directory / name, or_summary=True) for name in names]
    console = Console(width=width, record=True, highlight=False, color_system=None, force_terminal=False)
    with console.capture() as capture:
        _print([Comparison(runs[0], run) for run in runs[1:]], False, 5, console)
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("names", [("idle", "busy"), ("idle", "busy", "overloaded")])
def test_there_is_one_table_of_all_runs_and_it_fits(directory, width, names):
    lines = printed(directory, width, *names)
    heading = next(line for line in lines if line.startswith("Figure"))
    body = lines[lines.index(heading) + 1 :]
    body = body[: body.index("")]

    assert [line for line in lines if line.startswith("Figure")] == [heading]
    assert max(map(len, body)) <= width
    known = [name for name in HEADLINES if any(line.split()[0] == name for line in body)]
    assert {"output_throughput_tokens_per_s", "ttft_s.p99", "e2e_s.mean"} <= set(known)
    assert [line.split()[0] for line in body if line[0] != " "] == known  # no name is cut or wrapped
    assert not any("…" in line for line in body)
    assert ("c" in heading.split()) == (len(names) == 3)


@pytest.mark.parametrize(("tokens", "text"), [(1, "1 token"), (2, "2 tokens"), (1234, "1,234 tokens"), (0, "0 tokens")])
def test_one_of_something_is_not_called_many(tokens: int, text: str) -> None:
    assert number_of(tokens, "token") == text
    decision = 3, "7", "context", str(tokens)
    assert _in_words(decision, TENSORRT_LLM) == f"request 7 runs {text} of its prompt"
