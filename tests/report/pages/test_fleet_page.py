"""The page of a fleet in a browser, and its trace for Perfetto."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main

APART = ("--engine", "vllm", "--prefill_replicas", "1", "--decode_replicas", "2", "--router", "least_requests")
TOGETHER = ("--replicas", "2", "--router", "least_tokens")
INSTANT, BEGIN = 3, 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A fleet, and one with prefill and decode apart, each with its page and its trace for Perfetto."""
    directory = tmp_path_factory.mktemp("fleets")
    found = {}
    for name, options in (("together", TOGETHER), ("apart", APART)):
        run = directory / name
        words = ["run", "chat", "--device", "h100-sxm", "--model", "llama-3.1-8b", "--max_num_samples", "40"]
        for command in (
            [*words, *options, "--quiet", "--output", str(run)],
            ["plot", str(run), "--html"],
            ["export", str(run), "--format", "perfetto"],
        ):
            done = CliRunner().invoke(main, command)
            assert done.exit_code == 0, done.output
        found[name] = run
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "lanes"), [("together", ["0", "1"]), ("apart", ["0 prefill", "1 decode", "2 decode"])]
)
def test_the_page_shows_each_replica(runs: dict[str, Path], opened: Any, name: str, lanes: list[str]) -> None:
    page = opened(runs[name] / "charts" / "run.html")
    assert "40" in page.locator("#summary .tile").first.inner_text()
    cells = page.locator("#replicas tbody tr td:first-child, #replicas tbody tr th:first-child").all_inner_texts()
    assert cells == lanes
    assert page.locator("#charts img").count() == 3
    assert page.locator("#slowest tbody tr").count() == 15
    if name == "apart":
        assert "transfers moved" in page.locator("#summary").inner_text()
    page.close()


@pytest.mark.parametrize("name", ["together", "apart"])
def test_the_trace_has_a_process_for_each_replica(runs: dict[str, Path], name: str) -> None:
    reason = "the package perfetto, which has the schema, is not installed"
    schema = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason=reason)
    run, trace = runs[name], schema.Trace()
    trace.ParseFromString((run / "export" / "trace.perfetto-trace").read_bytes())
    tracks = [packet.track_descriptor for packet in trace.packet if packet.HasField("track_descriptor")]
    assert len({track.uuid for track in tracks}) == len(tracks)
    processes = {track.process.pid: track.process.process_name for track in tracks if track.HasField("process")}
    replicas = sorted(run.glob("replica=*"))
    named = [f"replica {number}{more}" for number in range(len(replicas)) for more in ("", ": requests")]
    assert list(processes.values()) == ["router least_requests" if name == "apart" else "router least_tokens", *named]
    names = {item.iid: item.name for item in trace.packet[0].interned_data.event_names}
    events = [packet.track_event for packet in trace.packet if packet.track_event.type in (BEGIN, INSTANT)]
    counts = Counter(names[event.name_iid] for event in events)
    requests = lines(run / "requests.jsonl")
    assert counts["routed"] == len(requests)
    assert counts["transfer"] == sum(row.get("transfer_end_s") is not None for row in requests)
    assert counts["iteration"] == sum(len(lines(one / "iterations.jsonl")) for one in replicas)
