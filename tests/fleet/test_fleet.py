"""Fleets: what each replica did is a run of its requests, to the last byte, and all requests are there once."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from ifbbench.build.engines import engine_defaults
from ifbbench.errors import InputError, RunFailed
from ifbbench.fleet.router import Replica, RoutedRequest, Router
from ifbbench.replay.run import run_trace, summarise_run
from ifbbench.rundir.fleet import replica_directories
from ifbbench.rundir.reader import load_run
from ifbbench.settings.config import RunConfig
from ifbbench.settings.groups.fleet import PREFIX_AFFINITY, ROUTERS
from ifbbench.settings.names import from_mapping

FILES = ("iterations.jsonl", "spans.jsonl", "requests.jsonl", "summary.json")
DEVICE: Mapping[str, Any] = {"device": "sim:h100-sxm", "model": "llama-3.1-8b", "quiet": True}
ENGINES = ("trtllm", "vllm", "sglang")
STATEFUL = ("least_requests", "least_tokens", "least_kv", PREFIX_AFFINITY)
# Slow tests of hundreds of seeds have so many each: all are collected in each run of the others, too.
SEEDS_AT_ONCE = 20


def seeds_from(first: int, end: int, path: Path) -> Iterator[tuple[int, Path]]:
    """The seeds of one test, each with a directory of its own."""
    for seed in range(first, min(first + SEEDS_AT_ONCE, end)):
        (path / str(seed)).mkdir()
        yield seed, path / str(seed)


def config_of(**values: Any) -> RunConfig:
    """The settings as the command line takes them, with the defaults of the engine."""
    values = {**DEVICE, **values}
    return from_mapping(engine_defaults(values) | values, command_line=True)


def write_rows(path: Path, draw: Random, count: int, *, sessions: bool = False, priorities: bool = False) -> Path:
    """Requests with shared prefixes, in bursts; some of them later turns of sessions, or of other priorities."""
    rows: list[dict[str, Any]] = []
    arrival_s = 0.0
    for number in range(count):
        arrival_s += draw.choice((0.0, 0.0, 0.004, 0.05, 0.3))
        prefix = [draw.randrange(6) * 10 + depth for depth in range(draw.randrange(4))]
        row: dict[str, Any] = {
            "request_id": number,
            "arrival_s": arrival_s,
            "prompt_len": len(prefix) * 512 + draw.randint(1, 900),
            "output_len": (output_len := draw.choice((1, 2, 5, 40, 90))),
            "max_new_tokens": output_len + draw.randrange(3),
        }
        row |= {"prefix_ids": prefix} if prefix else {}
        if sessions and number and draw.random() < 0.5:
            row |= {"after": draw.randrange(number), "think_s": draw.choice((0.0, 0.01, 0.2))}
        if priorities:
            row["priority"] = draw.choice((0.1, 0.5, 0.9))
        rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_equal_runs(one: Path, other: Path, names: tuple[str, ...] = FILES) -> None:
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def without_routing(path: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in ("replica", "offers")} for row in lines(path)]


@pytest.mark.parametrize("router", ["round_robin", "least_requests", "least_kv", PREFIX_AFFINITY])
def test_one_replica_is_the_run_without_a_router(router: str, tmp_path: Path) -> None:
    trace = str(write_rows(tmp_path / "trace.jsonl", Random(1), 40, sessions=True))
    run_trace(trace, config_of(engine="vllm", output=str(tmp_path / "run")))
    fleet = tmp_path / "fleet"
    run_trace(trace, config_of(engine="vllm", router=router, output=str(fleet)))
    assert_equal_runs(tmp_path / "run", fleet / "replica=0", (*FILES, "trace.jsonl"))
    assert without_routing(fleet / "requests.jsonl") == lines(tmp_path / "run" / "requests.jsonl")
    summary = json.loads((fleet / "summary.json").read_text())
    assert summary.pop("fleet")["replicas"][0]["requests"] == summary["requests"]
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())


@pytest.mark.parametrize("engine", ENGINES)
def test_round_robin_runs_the_share_of_each_replica(engine: str, tmp_path: Path) -> None:
    trace = str(write_rows(tmp_path / "trace.jsonl", Random(2), 40))
    run_trace(trace, config_of(engine=engine, replicas=3, output=str(tmp_path / "fleet")))
    for number in range(3):
        run = tmp_path / f"run-{number}"
        run_trace(trace, config_of(engine=engine, replica=f"{number + 1}/3", output=str(run)))
        assert_equal_runs(tmp_path / "fleet" / f"replica={number}", run, (*FILES, "trace.jsonl"))
        mine, theirs = (json.loads((path / "run.json").read_text()) for path in (replica_of(tmp_path, number), run))
        for one in (mine, theirs):
            del one["name"], one["wall_s"], one["config"]["output"]
        assert mine == theirs


def replica_of(path: Path, number: int) -> Path:
    return path / "fleet" / f"replica={number}"


def test_sessions_stay_together_as_with_the_share_of_a_replica(tmp_path: Path) -> None:
    trace = str(write_rows(tmp_path / "trace.jsonl", Random(3), 40, sessions=True))
    run_trace(trace, config_of(replicas=2, router="session", output=str(tmp_path / "fleet")))
    for number in range(2):
        run = tmp_path / f"run-{number}"
        run_trace(trace, config_of(replica=f"{number + 1}/2", output=str(run)))
        assert_equal_runs(replica_of(tmp_path, number), run, (*FILES, "trace.jsonl"))


SLOWER = [pytest.param(engine, router, marks=pytest.mark.slow) for engine in ENGINES for router in STATEFUL]


@pytest.mark.parametrize(
    ("engine", "router"),
    [("trtllm", "least_requests"), ("vllm", "least_kv"), ("sglang", PREFIX_AFFINITY), *SLOWER],
)
def test_each_replica_is_a_run_of_its_requests(engine: str, router: str, tmp_path: Path) -> None:
    """The requests of a replica that was stepped arrive again, without a router, in one run."""
    check_replicas(write_rows(tmp_path / "trace.jsonl", Random(f"{engine} {router}"), 40), tmp_path, engine, router)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_refused_turn_lets_the_next_one_arrive_in_time(engine: str, tmp_path: Path) -> None:
    """A request is refused within a step. No iteration of that step may start after what its answer lets arrive."""
    for seed in range(3):
        path = tmp_path / str(seed)
        path.mkdir()
        trace = write_rows(path / "trace.jsonl", Random(seed), 40, sessions=True)
        check_replicas(trace, path, engine, "least_requests", max_seq_len=1200)
        assert {row["outcome"] for row in lines(path / "fleet" / "requests.jsonl")} == {"completed", "failed"}


def check_replicas(trace: Path, path: Path, engine: str, router: str, **more: Any) -> None:
    fleet = path / "fleet"
    run_trace(str(trace), config_of(engine=engine, replicas=3, router=router, output=str(fleet), **more))
    own = {name: value for name, value in more.items() if name not in ("concurrency", "router_state_age")}
    for number, replica in enumerate(replica_directories(fleet)):
        run_trace(str(replica), config_of(engine=engine, output=str(path / f"again-{number}"), **own))
        assert_equal_runs(replica, path / f"again-{number}")


def check_conservation(trace: Path, fleet: Path) -> None:
    """Each request ends once, in the replica that its record names, in order of time; and figures add up."""
    asked, ended = lines(trace), lines(fleet / "requests.jsonl")
    assert sorted(row["request_id"] for row in ended) == [row["request_id"] for row in asked]
    of_replicas = [lines(path / "requests.jsonl") for path in replica_directories(fleet)]
    assert sum(map(len, of_replicas)) == len(ended)
    for number, rows in enumerate(of_replicas):
        mine = [row for row in ended if row["replica"] == number]
        assert [row["request_id"] for row in mine] == [row["request_id"] for row in rows]
        replayed = {row["request_id"]: row for row in lines(fleet / f"replica={number}" / "trace.jsonl")}
        for row, own in zip(mine, rows, strict=True):
            whole = asked[row["index"]]
            assert whole["request_id"] == row["request_id"]
            assert replayed[row["request_id"]]["output_len"] == row["output_len"] == whole["output_len"]
            unrouted = {name: value for name, value in row.items() if name not in ("index", "replica", "offers")}
            assert unrouted == {name: value for name, value in own.items() if name != "index"}
            assert row["arrival_s"] <= row["first_scheduled_s"] <= row["first_token_s"] <= row["end_s"]
            assert sum(row["attribution_s"].values()) == pytest.approx(row["e2e_s"])
    ends = [row["end_s"] for row in ended]
    assert ends == sorted(ends)
    summary = json.loads((fleet / "summary.json").read_text())
    assert summary["ttft_s"]["p99"] == pytest.approx(np.percentile([row["ttft_s"] for row in ended], 99))
    assert summary["output_tokens"] == sum(row["output_len"] for row in asked)
    replicas = summary["fleet"]["replicas"]
    assert sum(one["output_tokens"] for one in replicas) == summary["output_tokens"]
    for one in replicas:
        of_replica = json.loads((fleet / f"replica={one['replica']}" / "summary.json").read_text())
        assert one["requests"] == of_replica["requests"]
        assert not of_replica["partial"]


def random_fleet(seed: int, path: Path) -> None:
    """One random fleet, with all that fleets can have."""
    draw = Random(f"fleet {seed}")
    path.mkdir()
    trace = write_rows(
        path / "trace.jsonl", draw, draw.randint(1, 30), sessions=draw.random() < 0.3, priorities=draw.random() < 0.3
    )
    router = draw.choice((*ROUTERS, f"{PREFIX_AFFINITY}:{draw.choice((0, 0.5, 4))}"))
    asked: dict[str, Any] = {
        "engine": draw.choice(ENGINES),
        "replicas": draw.randint(1, 5),
        "router": router,
        "max_batch_size": draw.choice((2, 4, 64)),
        "enable_kv_cache_reuse": True,
    }
    if draw.random() < 0.3:
        asked["concurrency"] = draw.randint(1, 12)
    if router == "least_kv":
        asked["router_state_age"] = draw.choice((0.0, 0.02, 1.0))
    if asked["engine"] == "trtllm":
        asked |= {"max_tokens_in_paged_kvcache": draw.choice((6_000, 100_000)), "policy": "max_utilization"}
        asked["overlap"] = draw.choice((None, "async", "partitioned"))
    config = config_of(**asked)
    run_trace(str(trace), config.with_values(output=str(path / "fleet")))
    check_conservation(trace, path / "fleet")
    again = summarise_run(str(trace), config)
    assert again == json.loads((path / "fleet" / "summary.json").read_text())


@pytest.mark.parametrize("seed", range(4))
def test_random_fleets_lose_nothing(seed: int, tmp_path: Path) -> None:
    random_fleet(seed, tmp_path / "one")


@pytest.mark.slow
def test_many_random_fleets_lose_nothing(tmp_path: Path) -> None:
    for seed in range(100, 600):
        random_fleet(seed, tmp_path / str(seed))


@pytest.mark.parametrize("router", ["round_robin", "least_requests"])
def test_a_null_fleet_runs_on_a_virtual_clock(router: str, tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "trace.jsonl", Random(4), 30)
    for name in ("one", "two"):
        run_trace(str(trace), RunConfig(device="null", replicas=2, router=router, output=str(tmp_path / name)))
    check_conservation(trace, tmp_path / "one")
    assert_equal_runs(tmp_path / "one", tmp_path / "two", ("requests.jsonl", "summary.json"))


class LastReplica(Router):
    """A user's router, which notes what it sees."""

    looks_at = frozenset(("requests",))
    seen: list[list[int]] = []  # noqa: RUF012 (of the class, for the test to read)

    def choose(self, request: RoutedRequest, replicas: Any) -> Replica:
        self.seen.append([one.requests for one in replicas])
        return replicas[-1]


def test_a_router_of_a_user(tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "trace.jsonl", Random(5), 20)
    LastReplica.seen.clear()
    name = f"{__name__}:LastReplica"
    result = run_trace(str(trace), config_of(replicas=3, router=name, output=str(tmp_path / "fleet")))
    assert [one["requests"]["total"] for one in result.summary["fleet"]["replicas"]] == [0, 0, 20]
    rows = sorted(lines(tmp_path / "fleet" / "requests.jsonl"), key=lambda row: row["index"])
    assert [row["offers"]["requests"] for row in rows] == LastReplica.seen
    for row in rows:  # those that were there, and had not ended, when it arrived
        before = [one for one in rows if one["index"] < row["index"] and one["end_s"] >= row["arrival_s"]]
        assert row["offers"]["requests"] == [0, 0, len(before)]


class FailsLate(LastReplica):
    """Chooses the last replica of those that it is given for ten requests."""

    looks_at = frozenset(("requests",))

    def choose(self, request: RoutedRequest, replicas: Any) -> Replica:
        if request.number >= 10:
            raise ValueError("of its own")
        return replicas[-1]


class Leaves(FailsLate):
    def choose(self, request: RoutedRequest, replicas: Any) -> Replica:
        raise SystemExit(0)


class ChoosesANumber(FailsLate):
    def choose(self, request: RoutedRequest, replicas: Any) -> Any:
        return 0


class CannotBeMade(FailsLate):
    def __init__(self, num_replicas: int, seed: int) -> None:
        raise ValueError("not here")


class IsInterrupted(FailsLate):
    def choose(self, request: RoutedRequest, replicas: Any) -> Replica:
        if request.number >= 10:
            raise KeyboardInterrupt
        return replicas[-1]


SIDES_OF_ONE: dict[str, Any] = {"replicas": 1, "prefill_replicas": 1, "decode_replicas": 1}


@pytest.mark.parametrize("fleet", [{"replicas": 2}, {"replicas": 2, "autoscale": "requests=2,max=3"}, SIDES_OF_ONE])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("FailsLate", r"router .*FailsLate failed in choose: ValueError: of its own \(.*test_fleet.py, line \d+\)"),
        ("Leaves", "Leaves failed in choose: SystemExit: 0"),
        ("ChoosesANumber", r"ChoosesANumber: choose\(\) returned 0; expected one of the \d replicas"),
        ("IsInterrupted", ""),
    ],
)
def test_what_was_done_is_kept_when_a_router_fails(
    name: str, words: str, fleet: dict[str, Any], tmp_path: Path
) -> None:
    trace = write_rows(tmp_path / "trace.jsonl", Random(5), 20)
    config = config_of(router=f"{__name__}:{name}", output=str(tmp_path / "fleet"), **fleet)
    with pytest.raises((RunFailed, KeyboardInterrupt)) as failure:
        run_trace(str(trace), config)
    assert re.search(words, str(failure.value))
    run = load_run(tmp_path / "fleet")
    assert run.summary is not None
    assert (run.partial, run.summary["requests"]["total"]) == (True, 20)
    done = len(run.requests)
    assert run.summary["requests"]["completed"] == done
    assert (done > 0) == (name in ("FailsLate", "IsInterrupted"))


def test_a_router_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    config = config_of(replicas=2, router=f"{__name__}:CannotBeMade", output=str(tmp_path / "fleet"))
    with pytest.raises(InputError, match="CannotBeMade' cannot be made: ValueError: not here"):
        run_trace("documentation", config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"router_state_age": 0.5}, "reads no state of replicas"),
        ({"replica": "1/2"}, "--replica: a fleet replays all requests"),
        ({"enable_steady_state": True}, "--enable_steady_state"),
        ({"router": "least_request"}, "--router is 'least_request'"),
        ({"router": "prefix_affinity:x"}, "the weight"),
        ({"router": "json:JSONDecoder"}, "method 'choose'"),
        ({"router": "no_such_module:Router"}, "cannot be imported"),
        ({"report_json": "report.json"}, "--report_json: its figures of a GPU"),
        ({"result_format": "vllm"}, "--result_format"),
        ({"iteration_stats_format": "vllm", "engine": "vllm"}, "not built for a fleet"),
    ],
)
def test_settings_that_a_fleet_cannot_have(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        run_trace(None, config_of(**{"replicas": 2, "output": str(tmp_path / "fleet"), **settings}))
    assert not (tmp_path / "fleet").exists()


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"router_state_age": 0.5}, "--replicas N"),
        ({"replica_start_up": 3.0}, "--replica_events or --autoscale"),
        ({"prefill": "tp_size=2"}, "--prefill_replicas and --decode_replicas"),
        ({"decode_router": "random"}, "--prefill_replicas and --decode_replicas"),
        ({"transfer_by": "layer"}, "--prefill_replicas and --decode_replicas"),
    ],
)
def test_settings_of_a_fleet_without_one(settings: dict[str, Any], needed: str, tmp_path: Path) -> None:
    """They would not be used."""
    with pytest.raises(InputError, match=f"--{next(iter(settings))}: is for a fleet.*add {needed}"):
        run_trace(None, config_of(output=str(tmp_path / "run"), **settings))
    with pytest.raises(InputError, match="is for a fleet"):
        summarise_run(None, config_of(**settings))
    assert not (tmp_path / "run").exists()


def test_a_fleet_is_overwritten_as_a_whole(tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "trace.jsonl", Random(6), 20)
    config = config_of(replicas=4, output=str(tmp_path / "fleet"))
    run_trace(str(trace), config)
    with pytest.raises(InputError, match="already holds results"):
        run_trace(str(trace), config)
    run_trace(str(trace), config.with_values(replicas=2, overwrite=True))
    assert [path.name for path in replica_directories(tmp_path / "fleet")] == ["replica=0", "replica=1"]
    run_trace(str(trace), config.of_one_replica(overwrite=True))
    assert not replica_directories(tmp_path / "fleet")
