"""What the commands say of a fleet's run directory."""

import csv
import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ifbbench.analysis.fleet import FleetFindings, expected_hits
from ifbbench.analysis.number_texts import significant
from ifbbench.cli.main import main
from ifbbench.replay.run import run_trace
from ifbbench.report.fleet_charts import lane_of
from ifbbench.rundir.reader import load_run
from ifbbench.settings.config import RunConfig
from ifbbench.workload.load import read_source
from tests.fleet.test_fleet import config_of, lines, write_rows


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of shared prefixes, behind a router by prefixes (`affinity`) and in turn (`turns`)."""
    path = tmp_path_factory.mktemp("fleets")
    trace = str(write_rows(path / "trace.jsonl", Random(11), 80))
    for name, router in (("affinity", "prefix_affinity:0.5"), ("turns", "round_robin")):
        config = config_of(replicas=3, router=router, enable_kv_cache_reuse=True, output=str(path / name))
        run_trace(trace, config)
    return path


def ifbbench(*words: str | Path, status: int = 0) -> Result:
    done = CliRunner().invoke(main, list(map(str, words)))
    assert done.exit_code == status, done.output
    return done


def test_report_has_a_row_for_each_replica(fleets: Path) -> None:
    text = ifbbench("report", fleets / "affinity").stdout
    totals = [len(lines(fleets / "affinity" / f"replica={number}" / "requests.jsonl")) for number in range(3)]
    for number, total in enumerate(totals):
        assert f"\n{number} {total:>17}" in text
    assert "3 replicas behind prefix_affinity:0.5: 3 GPUs" in text
    summary = json.loads(ifbbench("report", fleets / "affinity", "--json").stdout)
    assert summary["fleet"]["gpu_hours"] == pytest.approx(
        3 * max(row["end_s"] for row in lines(fleets / "affinity" / "requests.jsonl")) / 3600
    )


def test_expected_hits_are_those_that_the_router_saw(fleets: Path) -> None:
    rows = sorted(lines(fleets / "affinity" / "requests.jsonl"), key=lambda row: row["index"])
    trace = read_source(fleets / "affinity", RunConfig())
    capacity = json.loads((fleets / "affinity/replica=0/run.json").read_text())["config"]["max_tokens_in_paged_kvcache"]
    found = expected_hits(list(trace), [row["replica"] for row in rows], [capacity] * 3)
    assert found.tolist() == [row["offers"]["hit_tokens"] for row in rows]


@pytest.mark.parametrize("name", ["affinity", "turns"])
def test_why_says_which_hits_were_lost(fleets: Path, name: str) -> None:
    facts = json.loads(ifbbench("why", fleets / name, "--json").stdout)
    rows = lines(fleets / name / "requests.jsonl")
    waited = {row["replica"]: 0.0 for row in rows}
    for row in rows:
        waited[row["replica"]] += row["queue_time_s"]
    assert [one["waited_s"] for one in facts["replicas"]] == pytest.approx([waited[number] for number in range(3)])
    hits = facts["hits"]
    assert hits["lost_tokens"] == hits["best_tokens"] - hits["chosen_tokens"]
    assert (hits["less_load"] is None) == (name == "turns")
    if name == "affinity":
        best = [max(row["offers"]["hit_tokens"]) for row in rows]
        chosen = [row["offers"]["hit_tokens"][row["replica"]] for row in rows]
        assert (hits["best_tokens"], hits["chosen_tokens"]) == (sum(best), sum(chosen))
        assert hits["lost_requests"] == sum(one > other for one, other in zip(best, chosen, strict=True)) > 0
        reused = sum(row["reused_tokens"] for row in rows)
        assert reused == pytest.approx(hits["chosen_tokens"], rel=0.35)  # blocks are shorter than named ones
    text = ifbbench("why", fleets / name).stdout
    assert "lost" in text
    assert "replica=" in text


def test_a_hot_replica_is_named(tmp_path: Path) -> None:
    """All sessions start alike, so that the router by prefixes sends them to one replica however long its queue is."""
    rows = [
        {
            "request_id": number,
            "arrival_s": 0.02 * number,
            "prompt_len": 2100,
            "output_len": 30,
            "max_new_tokens": 30,
            "prefix_ids": [1, 2, 3, 4] if number % 8 else [100 + number],
        }
        for number in range(80)
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(replicas=3, router="prefix_affinity:1000", output=str(tmp_path / "fleet"), max_batch_size=4)
    run_trace(str(tmp_path / "trace.jsonl"), config)
    findings = FleetFindings(load_run(tmp_path / "fleet"))
    ended = lines(tmp_path / "fleet" / "requests.jsonl")
    owner = next(row["replica"] for row in ended if row["index"] == 1)
    assert [one.replica for one in findings.hot] == [owner]
    assert f"Hot: replica {owner} with" in findings.sentences()[0]


def test_why_of_a_request_is_that_of_its_replica(fleets: Path) -> None:
    row = lines(fleets / "affinity" / "requests.jsonl")[5]
    words = ("--request", row["request_id"], "--json")
    of_fleet = json.loads(ifbbench("why", fleets / "affinity", *words).stdout)
    assert of_fleet == json.loads(ifbbench("why", fleets / "affinity" / f"replica={row['replica']}", *words).stdout)
    assert "no request 999" in ifbbench("why", fleets / "affinity", "--request", "999", status=2).stderr


@pytest.mark.parametrize(
    "words",
    [
        ("why", "--iteration", "3"),
        ("why", "--what_if", "max_batch_size=4"),
        ("export",),
        ("plot", "--only", "timeline"),
    ],
)
def test_what_is_of_one_engine_names_a_replica(fleets: Path, words: tuple[str, ...]) -> None:
    assert "replica" in ifbbench(words[0], fleets / "turns", *words[1:], status=2).stderr


def test_why_of_a_killed_fleet_names_its_replicas(fleets: Path, tmp_path: Path) -> None:
    shutil.copytree(fleets / "turns", tmp_path / "killed")
    for name in ("summary.json", "requests.jsonl"):
        (tmp_path / "killed" / name).unlink()
    assert "Name a replica" in ifbbench("why", tmp_path / "killed").stdout
    assert "Requests completed   0 of 80" in ifbbench("report", tmp_path / "killed").stdout


def test_compare_says_where_routing_parts(fleets: Path) -> None:
    facts = json.loads(ifbbench("compare", fleets / "turns", fleets / "affinity", "--json").stdout)
    replicas = [
        {row["index"]: row["replica"] for row in lines(fleets / name / "requests.jsonl")}
        for name in ("turns", "affinity")
    ]
    different = [index for index in range(80) if replicas[0][index] != replicas[1][index]]
    parting = facts["first_routed_differently"]
    assert parting["request_id"] == str(different[0])
    assert parting["different"] == len(different)
    assert parting["replicas"] == [one[different[0]] for one in replicas]
    assert parting["offers"][0] is None
    assert set(parting["offers"][1]) == {"requests", "tokens", "hit_tokens"}
    assert facts["gained"]
    text = ifbbench("compare", fleets / "turns", fleets / "affinity").stdout
    assert f"Routing first differs at request {different[0]}" in text
    assert "identical" in ifbbench("compare", fleets / "turns", fleets / "turns").stdout


@pytest.mark.usefixtures("without_layout")
def test_plot_draws_a_lane_for_each_replica(fleets: Path, tmp_path: Path) -> None:
    drawn = ifbbench("plot", fleets / "turns", "--format", "svg", "--output", tmp_path).stdout.split()
    assert [Path(name).name for name in drawn] == ["latency.svg", "replicas.svg", "ttft.svg"]
    assert "requests waiting (right)" in (tmp_path / "replicas.svg").read_text()
    itl_s = json.loads((fleets / "turns/summary.json").read_text())["itl_s"]
    shown = [f"{mark} {significant(itl_s[mark] * 1e3)}" for mark in ("p50", "p90", "p99")]
    assert " · ".join(shown) in (tmp_path / "latency.svg").read_text()


@pytest.mark.usefixtures("without_layout")
def test_a_replica_without_requests_has_an_empty_lane(tmp_path: Path) -> None:
    trace = str(write_rows(tmp_path / "trace.jsonl", Random(5), 2))
    run_trace(trace, config_of(replicas=3, router="round_robin", output=str(tmp_path / "fleet")))
    ifbbench("plot", tmp_path / "fleet", "--format", "svg", "--output", tmp_path / "charts")
    assert "replica 2" in (tmp_path / "charts/replicas.svg").read_text()
    assert "ITL" in (tmp_path / "charts/latency.svg").read_text()


def test_requests_that_stand_aside_for_prompts_are_not_in_the_queue_of_a_lane(tmp_path: Path) -> None:
    """SGLang runs prompts alone: those that generate meanwhile are left out of the iteration, and wait in no queue."""
    trace = str(write_rows(tmp_path / "trace.jsonl", Random(3), 40))
    all_at_once = config_of(engine="sglang", max_batch_size=6, time_scale=0.0, output=str(tmp_path / "run"))
    run_trace(trace, all_at_once)
    run = load_run(tmp_path / "run")
    in_queue, aside = np.zeros(len(run.iterations)), np.zeros(len(run.iterations))
    span: Any
    for span in run.spans.itertuples():
        counted = {"waiting": in_queue, "paused": in_queue, "skipped": aside}.get(span.phase)
        if counted is not None:
            counted[span.first_iteration : span.last_iteration + 1] += 1
    assert in_queue.any()
    assert aside.any()
    # The first iterations begin before all requests were received.
    assert lane_of(run)[2][10:-1].tolist() == in_queue[10:].tolist()


def test_a_sweep_over_replicas_and_routers(fleets: Path, tmp_path: Path) -> None:
    words: list[str | Path] = [
        "--device",
        "h100-sxm",
        "--model",
        "llama-3.1-8b",
        "--quiet",
        "--output",
        tmp_path / "sweep",
    ]
    over = ["--over", "replicas=1,3", "--over", "router=round_robin,least_requests"]
    ifbbench("sweep", fleets / "trace.jsonl", *over, *words)
    with (tmp_path / "sweep" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["replicas"], row["router"]) for row in rows] == [
        ("1", "round_robin"),
        ("1", "least_requests"),
        ("3", "round_robin"),
        ("3", "least_requests"),
    ]
    assert rows[0]["ttft_s.p99"] == rows[1]["ttft_s.p99"]
    assert float(rows[2]["ttft_s.p99"]) < float(rows[0]["ttft_s.p99"])
    assert np.isclose(float(rows[3]["fleet.gpu_hours"]), 3 * float(rows[3]["duration_s"]) / 3600, rtol=0.01)


def test_a_fleet_is_the_config_file_of_the_same_fleet(fleets: Path, tmp_path: Path) -> None:
    words: list[str | Path] = ["run", "--config", fleets / "affinity", "--quiet", "--output"]
    ifbbench(*words, tmp_path / "again")
    assert (tmp_path / "again/requests.jsonl").read_bytes() == (fleets / "affinity/requests.jsonl").read_bytes()
    ifbbench(*words, tmp_path / "one", "--replica", "2/3")
    assert "fleet" not in json.loads((tmp_path / "one/summary.json").read_text())
