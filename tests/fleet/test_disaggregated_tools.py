"""What the commands say of a fleet with prefill and decode apart."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ifbbench.analysis.sides import SidesFindings
from ifbbench.replay.run import run_trace
from ifbbench.rundir.reader import load_run
from tests.fleet.test_fleet import config_of, lines, write_rows
from tests.fleet.test_fleet_tools import ifbbench


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same requests on two sides (`apart`), with a slow link (`slow`), with few decode blocks (`small`), and on
    replicas that do both (`both`)."""
    path = tmp_path_factory.mktemp("sides")
    trace = str(write_rows(path / "trace.jsonl", Random(21), 40))
    sides: dict[str, Any] = {"prefill_replicas": 1, "decode_replicas": 2}
    small = "max_tokens_in_paged_kvcache=3200,max_batch_size=2"
    given: dict[str, dict[str, Any]] = {
        "apart": sides,
        "slow": sides | {"transfer_bandwidth": 2e8},
        "small": sides | {"decode": small},
        "both": {"replicas": 3},
    }
    for name, values in given.items():
        run_trace(trace, config_of(engine="vllm", output=str(path / name), **values))
    return path


def test_report_has_both_sides_and_the_transfers(runs: Path) -> None:
    text = ifbbench("report", runs / "apart").stdout
    assert "1 prefill + 2 decode × round_robin" in text
    assert "\n0 prefill" in text
    assert "\n2 decode" in text
    transfers = json.loads((runs / "apart" / "summary.json").read_text())["fleet"]["transfers"]
    assert f"{transfers['count']} transfers of" in text


def test_why_adds_up_what_requests_waited_for(runs: Path) -> None:
    facts = json.loads(ifbbench("why", runs / "slow", "--json").stdout)
    rows = lines(runs / "slow" / "requests.jsonl")
    for name, part in (("transfer_s", "transfer"), ("decode_wait_s", "waiting_decode_blocks")):
        assert facts["times"][name] == pytest.approx(sum(row["attribution_s"].get(part, 0.0) for row in rows))
    assert facts["times"]["prefill_queue_s"] == pytest.approx(sum(row["queue_time_s"] for row in rows))
    assert facts["text"] in ifbbench("why", runs / "slow").stdout.replace("\n", " ")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("slow", "The link between the sides holds requests back most"),
        ("small", "The KV caches of the decode side hold requests back most"),
    ],
)
def test_why_names_what_holds_requests_back(runs: Path, name: str, text: str) -> None:
    assert text in SidesFindings(load_run(runs / name)).sentences()[-1]


def test_why_of_a_request_has_all_parts_of_its_time(runs: Path) -> None:
    row = next(row for row in lines(runs / "apart" / "requests.jsonl") if "transfer_tokens" in row)
    facts = json.loads(ifbbench("why", runs / "apart", "--request", row["request_id"], "--json").stdout)
    assert facts["attribution_s"] == pytest.approx(row["attribution_s"])
    places = f"prefill replica {row['prefill_replica']} and then to decode replica {row['decode_replica']}"
    assert places in facts["text"]
    assert "no request 999" in ifbbench("why", runs / "apart", "--request", "999", status=2).stderr


def test_compare_of_both_ways_says_who_gained(runs: Path) -> None:
    text = " ".join(ifbbench("compare", runs / "both", runs / "apart").stdout.split())
    assert "prefill_replicas 0 → 1" in text
    assert "longer for" in text


@pytest.mark.usefixtures("without_layout")
def test_the_chart_has_a_lane_for_transfers(runs: Path) -> None:
    ifbbench("plot", runs / "apart", "--only", "replicas")
    text = (runs / "apart" / "charts" / "replicas.svg").read_text()
    for lane in ("prefill 0", "decode 1", "decode 2", "transfers"):
        assert f"<!-- {lane} -->" in text
