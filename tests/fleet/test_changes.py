"""Fleets that change: replicas that fail, drain and start, and autoscalers. Each request ends once, and each replica is
a run of its requests up to its end."""

import json
import math
from collections import deque
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.fleet.autoscaler import Autoscaler
from ifbbench.replay.run import run_trace, summarise_run
from ifbbench.rundir.fleet import replica_directories
from ifbbench.rundir.schema import schema_of
from ifbbench.settings.autoscale import parse_autoscale
from ifbbench.settings.groups.fleet import PREFIX_AFFINITY, ROUTERS
from tests.fleet.test_fleet import ENGINES, assert_equal_runs, config_of, lines, write_rows


def write_events(path: Path, *events: dict[str, float]) -> str:
    path.write_text(json.dumps(events))
    return str(path)


def summary_of(fleet: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((fleet / "summary.json").read_text())
    return summary


def write_load(path: Path, seed: str) -> Path:
    """Requests that keep three replicas busy for two seconds."""
    draw = Random(seed)
    rows = [
        {
            "request_id": number,
            "arrival_s": 0.015 * number,
            "prompt_len": draw.randint(50, 2500),
            "output_len": (output_len := draw.choice((1, 20, 60, 90))),
            "max_new_tokens": output_len,
        }
        for number in range(120)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def end_s(iteration: dict[str, Any]) -> float:
    return float(iteration["ifbbench"]["start_s"] + iteration["ifbbench"]["latency_ms"] / 1000)


def check_replicas_again(fleet: Path, again: Path, **asked: Any) -> None:
    """Each replica ran as one engine with its requests does: all iterations, up to those that a failure ended."""
    for number, one in enumerate(summary_of(fleet)["fleet"]["replicas"]):
        replica = fleet / f"replica={number}"
        if not one["requests"]["total"]:
            continue
        run_trace(str(replica), config_of(**asked, output=str(again / str(number))))
        mine, whole = (path / "iterations.jsonl" for path in (replica, again / str(number)))
        if one.get("ended_by") == "fail":
            before = lines(mine)
            expected = lines(whole)
            assert before == expected[: len(before)]
            assert all(end_s(row) < one["ended_s"] + 1e-6 for row in before)
            assert all(end_s(row) > one["ended_s"] - 1e-6 for row in expected[len(before) :][:1])
            continue
        assert_equal_runs(replica, again / str(number), ("iterations.jsonl", "spans.jsonl"))
        for row, plain in zip(
            *(lines(path / "requests.jsonl") for path in (replica, again / str(number))), strict=True
        ):
            waited_s = row["attribution_s"].pop("router", 0.0)
            assert row["arrival_s"] + waited_s == pytest.approx(plain["arrival_s"])
            assert row["e2e_s"] == pytest.approx(plain["e2e_s"] + waited_s)
            assert row["attribution_s"] == plain["attribution_s"]
            assert row["end_s"] == plain["end_s"]


EVENTS = ({"at": 0.5, "fail": 1}, {"at": 0.7, "start": 1}, {"at": 0.9, "drain": 0}, {"at": 1.2, "replicas": 3})


@pytest.mark.parametrize(
    ("engine", "more"),
    [
        *((engine, {}) for engine in ENGINES),
        pytest.param("trtllm", {"overlap": "partitioned"}, marks=pytest.mark.slow),
        ("trtllm", {"overlap": "async", "enable_chunked_context": True, "max_num_tokens": 300}),
    ],
)
def test_each_replica_is_a_run_of_its_requests_up_to_its_end(engine: str, more: dict[str, Any], tmp_path: Path) -> None:
    trace = write_load(tmp_path / "trace.jsonl", engine)
    events = write_events(tmp_path / "events.json", *EVENTS)
    fleet = tmp_path / "fleet"
    asked = {"engine": engine, **more}
    run_trace(
        str(trace),
        config_of(
            replicas=3, router="least_requests", replica_events=events, replica_start_up=0.1, output=str(fleet), **asked
        ),
    )
    failed = next(one for one in summary_of(fleet)["fleet"]["events"] if one["event"] == "fail")
    assert failed["retried"] > 0
    assert failed["lost_tokens"] > 0
    check_replicas_again(fleet, tmp_path / "again", **asked)


def check_conservation(trace: Path, fleet: Path, retries: int) -> None:
    """Each request ends once, within the time of its replica; what was lost is counted, and figures add up."""
    asked, ended = lines(trace), lines(fleet / "requests.jsonl")
    assert sorted(row["index"] for row in ended) == list(range(len(asked)))
    summary = summary_of(fleet)
    replicas, events = summary["fleet"]["replicas"], summary["fleet"].get("events", [])
    assert summary["requests"]["total"] == len(asked)
    assert summary["requests"]["completed"] == sum(row["outcome"] == "completed" for row in ended)
    assert summary["requests"]["failed"] == sum(row["outcome"] == "failed" for row in ended)
    failures = [one for one in events if one["event"] == "fail"]
    lost_tokens = sum(row.get("lost_tokens", 0) for row in ended if row["outcome"] == "completed")
    assert lost_tokens <= sum(one["lost_tokens"] for one in failures)
    for row in ended:
        whole = asked[row["index"]]
        assert row["request_id"] == whole["request_id"]
        assert row.get("retries", 0) <= retries
        if row["outcome"] != "completed":
            assert "failed at" in row["error"] or "no replica" in row["error"]
            continue
        assert row["output_len"] == whole["output_len"]
        assert sum(row["attribution_s"].values()) == pytest.approx(row["e2e_s"])
        sent_s = row["arrival_s"] + row["attribution_s"].get("router", 0.0)
        one = replicas[row["replica"]]
        if events:
            assert one["started_s"] <= one["ready_s"] <= sent_s + 1e-9
            stops = [
                event["at_s"] for event in events if event["replica"] == one["replica"] and event["event"] == "drain"
            ]
            assert all(sent_s <= at_s for at_s in stops)
            assert row["end_s"] <= one["ended_s"] + (1.0 if one["ended_by"] == "fail" else 1e-9)
    sent_again = [row for row in ended if row.get("retries")]
    if events and all(row["outcome"] == "completed" for row in ended):
        assert sum(row["retries"] for row in sent_again) == sum(one["retried"] for one in failures)
        assert sum(row["lost_tokens"] for row in sent_again) == sum(one["lost_tokens"] for one in failures)
    gpu_s = sum(one["gpus"] * one["up_s"] for one in replicas)
    assert summary["fleet"]["gpu_hours"] == pytest.approx(gpu_s / 3600)
    for path in replica_directories(fleet):
        one = json.loads((path / "summary.json").read_text())
        assert not one["partial"]
        rows = lines(path / "requests.jsonl")
        assert len(rows) == one["requests"]["total"]
        assert len({row["index"] for row in rows}) == len(rows)


def changing_fleet(seed: int, path: Path) -> None:
    """One random fleet that changes, with all that fleets can have."""
    draw = Random(f"changing {seed}")
    path.mkdir()
    trace = write_rows(
        path / "trace.jsonl", draw, draw.randint(5, 40), sessions=draw.random() < 0.3, priorities=draw.random() < 0.3
    )
    replicas = draw.randint(1, 4)
    router = draw.choice((*ROUTERS, f"{PREFIX_AFFINITY}:{draw.choice((0, 0.5, 4))}"))
    asked: dict[str, Any] = {"engine": draw.choice(ENGINES), "replicas": replicas, "router": router}
    asked |= {"max_batch_size": draw.choice((2, 4, 64)), "enable_kv_cache_reuse": True}
    asked["replica_start_up"] = draw.choice((0.0, 0.1, 1.0))
    asked["request_retries"] = draw.choice((0, 1, 5))
    events = list[dict[str, float]]()
    for _ in range(draw.randint(1, 5)):
        kind = draw.choice(("fail", "fail", "drain", "start", "replicas"))
        value = draw.randrange(replicas) if kind in ("fail", "drain") else draw.randint(1, 3)
        events.append({"at": draw.choice((0.0, 0.2, 0.7, 1.5, 4.0, draw.random())), kind: value})
    asked["replica_events"] = write_events(path / "events.json", *events)
    if draw.random() < 0.3:
        asked["concurrency"] = draw.randint(1, 12)
    if draw.random() < 0.4:
        measure = draw.choice(("queue=1", "requests=3", "kv_use=0.01", "ttft=0.05s"))
        asked["autoscale"] = f"{measure},min={draw.randint(1, 3)},max={draw.randint(4, 6)},every=0.2s,cool_down=0.5s"
    if asked["engine"] == "trtllm":
        asked["overlap"] = draw.choice((None, "async", "partitioned"))
    config = config_of(**asked)
    run_trace(str(trace), config.with_values(output=str(path / "fleet")))
    check_conservation(trace, path / "fleet", asked["request_retries"])
    assert summarise_run(str(trace), config) == summary_of(path / "fleet")


@pytest.mark.parametrize("seed", range(4))
def test_random_changes_lose_nothing(seed: int, tmp_path: Path) -> None:
    changing_fleet(seed, tmp_path / "one")


@pytest.mark.slow
def test_many_random_changes_lose_nothing(tmp_path: Path) -> None:
    for seed in range(100, 300):
        changing_fleet(seed, tmp_path / str(seed))


def run_with_events(path: Path, *events: dict[str, float], **asked: Any) -> Path:
    """The run directory of two replicas to which `events` happen."""
    trace = write_rows(path / "trace.jsonl", Random(21), 40)
    given = {"replicas": 2, "replica_events": write_events(path / "events.json", *events), **asked}
    run_trace(str(trace), config_of(**given, output=str(path / "fleet")))
    return path / "fleet"


def test_without_retries_the_requests_of_a_failed_replica_are_lost(tmp_path: Path) -> None:
    fleet = run_with_events(tmp_path, {"at": 0.8, "fail": 0}, request_retries=0)
    lost = [row for row in lines(fleet / "requests.jsonl") if row["outcome"] == "failed"]
    (event,) = summary_of(fleet)["fleet"]["events"]
    assert len(lost) == event["lost"] > 0
    assert event["retried"] == 0
    assert {row["error"] for row in lost} == {"replica 0 failed at 0.8 s"}
    assert all(row["replica"] == 0 and row["arrival_s"] <= 0.8 for row in lost)


def test_requests_wait_while_there_is_no_replica(tmp_path: Path) -> None:
    fleet = run_with_events(tmp_path, {"at": 0.8, "fail": 0}, {"at": 0.8, "fail": 1}, {"at": 2.0, "start": 1})
    rows = lines(fleet / "requests.jsonl")
    assert {row["outcome"] for row in rows} == {"completed"}
    later = [row for row in rows if row["replica"] == 2]
    assert all(row["first_scheduled_s"] >= 2.0 for row in later)
    waited = [row for row in later if row["arrival_s"] < 2.0]
    assert waited
    for row in waited:
        assert row["arrival_s"] + row["attribution_s"]["router"] == pytest.approx(2.0)
    assert any("retries" not in row for row in waited)  # arrived when there was none


def test_requests_that_no_replica_takes_have_failed(tmp_path: Path) -> None:
    fleet = run_with_events(tmp_path, {"at": 0.8, "fail": 0}, {"at": 0.8, "fail": 1})
    rows = lines(fleet / "requests.jsonl")
    lost = [row for row in rows if row["outcome"] == "failed"]
    assert lost
    assert all("replica" not in row and row["error"] == "no replica takes requests" for row in lost)
    assert summary_of(fleet)["requests"] == {"total": 40, "completed": 40 - len(lost), "failed": len(lost)}


def test_a_replica_that_drains_ends_with_its_last_request(tmp_path: Path) -> None:
    fleet = run_with_events(tmp_path, {"at": 0.5, "drain": 1})
    rows = [row for row in lines(fleet / "requests.jsonl") if row["replica"] == 1]
    first, second = summary_of(fleet)["fleet"]["replicas"]
    assert max(row["arrival_s"] for row in rows) < 0.5
    assert second["ended_by"] == "drain"
    assert second["ended_s"] == second["up_s"] == pytest.approx(max(row["end_s"] for row in rows))
    assert first["ended_by"] is None


def test_events_while_the_last_answer_is_delivered_are_no_end(tmp_path: Path) -> None:
    """An engine is done before its server has sent the last tokens."""
    trace = str(write_rows(tmp_path / "trace.jsonl", Random(24), 5))
    plain = summarise_run(trace, config_of(engine="vllm", replicas=2, router="least_requests"))
    run_trace(trace, config_of(engine="vllm", replicas=2, router="least_requests", output=str(tmp_path / "plain")))
    last_s = max(row["end_s"] for row in lines(tmp_path / "plain" / "requests.jsonl"))
    events = [{"at": last_s + 2e-6 * step, "replicas": 2} for step in range(-300, 100)]
    asked = {
        "replicas": 2,
        "router": "least_requests",
        "replica_events": write_events(tmp_path / "events.json", *events),
    }
    assert summarise_run(trace, config_of(engine="vllm", **asked)) == plain


def test_sessions_stay_at_their_replica_while_it_takes_requests(tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "trace.jsonl", Random(23), 80, sessions=True)
    events = write_events(tmp_path / "events.json", {"at": 0.5, "start": 1}, {"at": 1.5, "drain": 0})
    fleet = tmp_path / "fleet"
    run_trace(str(trace), config_of(replicas=2, router="session", replica_events=events, output=str(fleet)))
    asked = lines(trace)
    rows = {row["index"]: row for row in lines(fleet / "requests.jsonl")}
    moved = 0
    for index, row in enumerate(asked):
        if "after" in row:
            before = rows[row["after"]]["replica"]
            if rows[index]["replica"] != before:
                assert before == 0
                assert rows[index]["arrival_s"] >= 1.5
                moved += 1
    assert moved
    assert {row["replica"] for row in rows.values()} == {0, 1, 2}


def literal_autoscaler(rule_text: str, series: list[float | None]) -> list[int]:
    """The rule of the Horizontal Pod Autoscaler, written literally, a decision each second."""
    rule = parse_autoscale(rule_text)
    counts, wanted_before = [2], deque[tuple[int, int]]()
    for second, measured in enumerate(series):
        current = counts[-1]
        if measured is None:
            counts.append(max(rule.minimum, min(rule.maximum, current)))
            continue
        wanted = current
        ratio = (measured if rule.measure == "ttft" else measured / current) / rule.target
        if not 1 - rule.tolerance <= ratio <= 1 + rule.tolerance:
            wanted = math.ceil(round(current * ratio, 6))
        wanted = max(rule.minimum, min(rule.maximum, wanted))
        wanted_before.append((second, wanted))
        window = [count for at, count in wanted_before if at >= second - rule.cool_down_s]
        counts.append(wanted if wanted >= current else min(current, max(window)))
    return counts[1:]


@pytest.mark.parametrize(
    "rule", ["queue=4,max=9,cool_down=3s", "ttft=2s,min=2,max=5,cool_down=0s", "kv_use=0.5,max=30"]
)
def test_an_autoscaler_decides_as_one_that_is_written_literally(rule: str) -> None:
    draw = Random(rule)
    for _ in range(50):
        series = [draw.choice((None, 0.0, round(draw.uniform(0, 12), 3), 4.0, 8.4)) for _ in range(30)]
        autoscaler, current, found = Autoscaler(parse_autoscale(rule)), 2, []
        for second, measured in enumerate(series):
            current = autoscaler.replicas(float(second), current, measured)
            found.append(current)
        assert found == literal_autoscaler(rule, series)


@pytest.mark.parametrize("measure", ["queue=2", "requests=4", "kv_use=0.005", "ttft=100ms"])
def test_an_autoscaled_fleet_grows_with_its_load_and_shrinks_after_it(measure: str, tmp_path: Path) -> None:
    rows = [
        {"request_id": number, "arrival_s": at_s, "prompt_len": 700, "output_len": 60, "max_new_tokens": 60}
        for number, at_s in enumerate([*(0.01 * one for one in range(150)), *(3.0 + 0.5 * one for one in range(20))])
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = config_of(
        engine="vllm",
        max_batch_size=8,
        autoscale=f"{measure},max=5,every=0.25s,cool_down=1s",
        replica_start_up=0.2,
        router="least_requests",
        output=str(tmp_path / "fleet"),
    )
    run_trace(str(tmp_path / "trace.jsonl"), asked)
    summary = summary_of(tmp_path / "fleet")
    events = summary["fleet"]["events"]
    starts = [one for one in events if one["event"] == "start"]
    assert starts
    assert all(one["measured"].startswith(measure.partition("=")[0]) for one in starts)
    assert [one["at_s"] % 0.25 for one in starts] == [0] * len(starts)
    assert any(one["event"] == "drain" for one in events)
    assert max(one["wanted"] for one in events if "wanted" in one) <= 5
    assert 1 < summary["fleet"]["gpus"] <= 5
    fixed = summarise_run(
        str(tmp_path / "trace.jsonl"), asked.with_values(autoscale=None, replica_start_up=0.0, output=None)
    )
    assert summary["ttft_s"]["p99"] < fixed["ttft_s"]["p99"]
    check_conservation(tmp_path / "trace.jsonl", tmp_path / "fleet", 5)


def test_the_minimum_is_there_from_the_beginning_and_after_a_failure(tmp_path: Path) -> None:
    fleet = run_with_events(tmp_path, {"at": 0.4, "fail": 0}, replicas=1, autoscale="queue=50,min=3,max=4,every=0.5s")
    replicas = summary_of(fleet)["fleet"]["replicas"]
    assert [one["started_s"] for one in replicas] == [0.0, 0.0, 0.0, 0.5]


def test_replicas_that_differ_are_runs_with_their_settings(tmp_path: Path) -> None:
    trace = str(write_rows(tmp_path / "trace.jsonl", Random(22), 40))
    (tmp_path / "replicas.yaml").write_text("- count: 2\n- {device: h200, engine: trtllm, max_batch_size: 8}\n")
    file, fleet = str(tmp_path / "replicas.yaml"), tmp_path / "fleet"
    run_trace(trace, config_of(engine="vllm", replica_config=file, output=str(fleet)))
    different: dict[str, Any] = {"device": "sim:h200", "engine": "trtllm", "max_batch_size": 8}
    for number, values in enumerate(({"engine": "vllm"}, {"engine": "vllm"}, different)):
        run_trace(trace, config_of(replica=f"{number + 1}/3", output=str(tmp_path / str(number)), **values))
        assert_equal_runs(fleet / f"replica={number}", tmp_path / str(number), ("iterations.jsonl", "requests.jsonl"))
        mine, theirs = (
            json.loads((path / "run.json").read_text())
            for path in (fleet / f"replica={number}", tmp_path / str(number))
        )
        assert mine["config"] | {"output": None} == theirs["config"] | {"output": None}
    run = json.loads((fleet / "run.json").read_text())
    assert [one["device"] for one in run["replica_settings"]] == ["sim:h100-sxm"] * 2 + ["sim:h200-sxm"]
    assert [one["settings"]["max_batch_size"] for one in summary_of(fleet)["fleet"]["replicas"]] == [1024, 1024, 8]
    stateful = tmp_path / "stateful"
    run_trace(trace, config_of(engine="vllm", replica_config=file, router="least_kv", output=str(stateful)))
    for number, values in enumerate(({"engine": "vllm"}, {"engine": "vllm"}, different)):
        again = tmp_path / f"again-{number}"
        run_trace(str(stateful / f"replica={number}"), config_of(output=str(again), **values))
        assert_equal_runs(stateful / f"replica={number}", again)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("replica_config", "", "expected a list"),
        ("replica_config", "device: h200", "expected a list"),
        ("replica_config", "- {max_batch: 3}", "entry 1: 'max_batch' is not a setting"),
        ("replica_config", "- {max_batch_size: 0}", "max_batch_size"),
        ("replica_config", "- {router: random}", "router is a setting of the whole fleet"),
        ("replica_config", "- {count: 0}", "count is '0'"),
        ("replica_config", "- {count: 3}", "--replicas: 2, and"),
        ("replica_config", "[{device: cpu, model: tiny}, {device: h200}]", "some replicas compute, and others do not"),
        ("replica_config", "- {a: b", "not valid YAML"),
        ("replica_events", "- {fail: 0}", "has no key 'at'"),
        ("replica_events", "- {at: 1}", "no event"),
        ("replica_events", "- {at: 1, fail: 0, drain: 1}", "fail and drain"),
        ("replica_events", "- {at: x, fail: 0}", "at is 'x'"),
        ("replica_events", "- {at: 1, fail: 2}", "replica 2 has not started by 1 s"),
        ("replica_events", "- {at: 1, start: 0}", "start is '0'"),
        ("replica_events", "- {at: 1, start: 1, like: 2}", "like is '2'"),
        ("replica_events", "- {at: 1, fail: 1, like: 1}", "like is of replicas that start"),
    ],
)
def test_files_that_do_not_fit(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(text)
    asked = config_of(replicas=2, output=str(tmp_path / "fleet"), **{name: str(tmp_path / "file.yaml")})
    with pytest.raises(InputError, match=message):
        run_trace(None, asked)
    assert not (tmp_path / "fleet").exists()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("queue", "expected MEASURE=TARGET"),
        ("queue=4", "without max"),
        ("max=4", "without a measure"),
        ("queue=0,max=4", "above 0"),
        ("queue=1,ttft=1,max=4", "two measures"),
        ("queue=1,max=4,max=5", "max twice"),
        ("queue=1,max=2,min=3", "below min"),
        ("kv_use=1.5,max=2", "kv_use"),
        ("load=1,max=2", "load"),
        ("queue=1,max=2,every=0", "every"),
    ],
)
def test_rules_that_are_none(rule: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        config_of(autoscale=rule)


def test_settings_that_do_not_go_together(tmp_path: Path) -> None:
    for values, message in (
        ({"replicas": 5, "autoscale": "queue=1,max=3"}, "the fleet begins with 5"),
        ({"replicas": 2, "replica_start_up": 1.0}, "no replica starts"),
        ({"replicas": 2, "replica_events": str(tmp_path / "none.yaml")}, "cannot be read"),
    ):
        with pytest.raises(InputError, match=message):
            run_trace(None, config_of(**values))


@pytest.mark.slow
def test_tune_compares_routers_by_what_they_cost(tmp_path: Path) -> None:
    trace = write_load(tmp_path / "trace.jsonl", "tune")
    words = [
        "tune",
        str(trace),
        "--device",
        "h100-sxm",
        "--model",
        "llama-3.1-8b",
        "--goal",
        "cost",
        "--quiet",
        "--json",
    ]
    words += ["--slo", "ttft.p99=150ms", "--max_batch_size", "16", "--max_num_tokens", "2048"]
    words += ["--router", "round_robin,least_tokens", "--output", str(tmp_path / "tuned")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    deployments = {one["router"]: one for one in found["deployments"]}
    assert set(deployments) == {"round_robin", "least_tokens"}
    best = found["deployments"][0]
    (command,) = found["recommendation"]["commands"]
    assert f"--router {best['router']}" in command
    assert f"--replicas {best['replicas']}" in command
    again = CliRunner().invoke(
        main, ["run", "--config", str(tmp_path / "tuned" / "run.yaml"), "--quiet", "--output", str(tmp_path / "run")]
    )
    assert again.exit_code == 0, again.output
    assert summary_of(tmp_path / "run")["ttft_s"] == summary_of(tmp_path / "tuned" / "run")["ttft_s"]
    assert summary_of(tmp_path / "run")["slo"]["ttft.p99"]["met"]
    assert summary_of(tmp_path / "run")["fleet"]["router"] == best["router"]


def test_tune_refuses_what_it_decides() -> None:
    done = CliRunner().invoke(
        main, ["tune", "chat", "--device", "h100-sxm", "--model", "llama-3.1-8b", "--replicas", "2"]
    )
    assert done.exit_code == 2
    assert "--replicas: tune finds the number" in done.stderr


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two fleets of a trace, behind different routers, to which the same happens."""
    path = tmp_path_factory.mktemp("changed")
    trace, events = write_load(path / "trace.jsonl", "tools"), write_events(path / "events.json", *EVENTS)
    for router in ("least_requests", "round_robin"):
        asked = {"replicas": 3, "router": router, "replica_events": events, "replica_start_up": 0.1}
        run_trace(str(trace), config_of(engine="vllm", output=str(path / router), **asked))
    return path


def ifbbench(*words: str | Path, status: int = 0) -> str:
    done = CliRunner().invoke(main, list(map(str, words)))
    assert done.exit_code == status, done.output
    return done.stdout if status == 0 else done.stderr


def test_why_says_what_a_failure_cost(changed: Path) -> None:
    fleet = changed / "least_requests"
    text, facts = ifbbench("why", fleet), json.loads(ifbbench("why", fleet, "--json"))
    (failure,) = [one for one in summary_of(fleet)["fleet"]["events"] if one["event"] == "fail"]
    rows = lines(fleet / "requests.jsonl")
    assert f"Replica 1 failed at 0.500 s: {failure['retried']} requests were routed again" in text
    assert facts["changes"]["failures"] == [failure]
    assert facts["changes"]["lost_s"] == pytest.approx(sum(row["attribution_s"].get("router", 0.0) for row in rows))
    waited_s = sum(row["queue_time_s"] - row["attribution_s"].get("router", 0.0) for row in rows)
    assert sum(one["waited_s"] for one in facts["replicas"]) == pytest.approx(waited_s)
    assert "1 drained" in text
    again = next(row for row in rows if row.get("retries"))
    assert "router" in ifbbench("why", fleet, "--request", again["request_id"])


def test_tools_take_a_fleet_that_answered_nothing(tmp_path: Path) -> None:
    fleet = run_with_events(tmp_path, {"at": 0.0, "fail": 0}, {"at": 0.0, "fail": 1})
    assert summary_of(fleet)["requests"]["completed"] == 0
    assert "Replica 1 failed at 0 s" in ifbbench("why", fleet)
    assert json.loads(ifbbench("why", fleet, "--json"))["hits"] is None
    assert "0 of 40" in ifbbench("report", fleet)


def test_waiting_while_a_replica_starts_is_counted_literally(changed: Path) -> None:
    fleet = changed / "round_robin"
    starting = [
        (one["started_s"], one["ready_s"]) for one in summary_of(fleet)["fleet"]["replicas"] if one["started_s"]
    ]
    instants = [(number + 0.5) / 20_000 for number in range(40_000)]
    during = [at_s for at_s in instants if any(since_s <= at_s < until_s for since_s, until_s in starting)]
    rows = lines(fleet / "requests.jsonl")
    waiting = sum(row["arrival_s"] <= at_s < row["first_scheduled_s"] for row in rows for at_s in during)
    facts = json.loads(ifbbench("why", fleet, "--json"))
    assert facts["changes"]["waited_for_start_s"] == pytest.approx(waiting / 20_000, abs=0.01)


@pytest.mark.usefixtures("without_layout")
def test_report_plot_and_compare_take_fleets_that_change(changed: Path, tmp_path: Path) -> None:
    report = ifbbench("report", changed / "round_robin")
    assert "GPU hours" in report
    assert "USD per million output tokens" in report
    ifbbench("plot", changed / "round_robin", "--only", "replicas", "--format", "svg", "--output", tmp_path)
    assert "replicas" in (tmp_path / "replicas.svg").read_text()
    text = ifbbench("compare", changed / "round_robin", changed / "least_requests")
    assert "Routing first differs at request" in text


def test_the_files_of_a_changing_fleet_are_of_their_schema(changed: Path) -> None:
    jsonschema.validate(summary_of(changed / "round_robin"), schema_of("summary.json"))
    jsonschema.validate(json.loads((changed / "round_robin" / "run.json").read_text()), schema_of("run.json"))
    line = jsonschema.Draft202012Validator(schema_of("requests.jsonl"))  # made once, not for each row
    for row in lines(changed / "round_robin" / "requests.jsonl"):
        line.validate(row)
