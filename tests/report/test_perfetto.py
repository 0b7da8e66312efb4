"""The Perfetto trace, read back with Perfetto's published schema, and with its trace processor where there is one."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main

BEGIN, END, COUNTER = 1, 2, 4


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run with pauses, and its trace."""
    run = tmp_path_factory.mktemp("perfetto") / "run"
    command = (
        "run chat --device sim:h100-sxm --model llama-3.1-8b --max_num_samples 60 --request_rate 40 "
        "--max_num_tokens 1024 --max_tokens_in_paged_kvcache 30000 --policy max_utilization --quiet --output"
    )
    assert CliRunner().invoke(main, [*command.split(), str(run)]).exit_code == 0
    done = CliRunner().invoke(main, ["export", str(run), "--format", "perfetto"])
    assert done.exit_code == 0, done.output
    return run, Path(done.output.strip())


@pytest.fixture(scope="module")
def trace(exported: tuple[Path, Path]) -> Any:
    """The trace, decoded."""
    reason = "the package perfetto, which has the schema, is not installed"
    schema = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason=reason)
    decoded = schema.Trace()
    decoded.ParseFromString(exported[1].read_bytes())
    return decoded


def track_names(trace: Any) -> dict[int, str]:
    found = (packet.track_descriptor for packet in trace.packet if packet.HasField("track_descriptor"))
    return {track.uuid: track.name for track in found}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_packets_are_those_of_the_published_schema(exported: tuple[Path, Path], trace: Any) -> None:
    run, path = exported
    assert path == run / "export" / "trace.perfetto-trace"
    assert all(packet.trusted_packet_sequence_id == 1 for packet in trace.packet)
    iterations, spans, requests = (lines(run / f"{name}.jsonl") for name in ("iterations", "spans", "requests"))
    names = {item.iid: item.name for item in trace.packet[0].interned_data.event_names}
    begins = [packet for packet in trace.packet if packet.track_event.type == BEGIN]
    counts = Counter(names[packet.track_event.name_iid] for packet in begins)
    assert counts == Counter(span["phase"] for span in spans) + Counter(iteration=len(iterations))
    of_requests = {name for uuid, name in track_names(trace).items() if uuid >= 1000}
    assert of_requests == {f"request {row['request_id']}" for row in requests}
    # Slices of a track follow each other, and lie where the iterations are.
    open_at: dict[int, int] = {}
    for packet in trace.packet:
        event = packet.track_event
        if event.type == BEGIN:
            assert event.track_uuid not in open_at
            open_at[event.track_uuid] = packet.timestamp
        elif event.type == END:
            assert packet.timestamp >= open_at.pop(event.track_uuid)
    assert open_at == {}
    starts = [packet.timestamp for packet in begins if packet.track_event.track_uuid == 3]
    assert starts == pytest.approx([row["ifbbench"]["start_s"] * 1e9 for row in iterations], abs=1)


def test_flows_lead_from_each_pause_to_its_beneficiary(exported: tuple[Path, Path], trace: Any) -> None:
    run, tracks = exported[0], track_names(trace)
    begins = {flow: tracks[p.track_event.track_uuid] for p in trace.packet for flow in p.track_event.flow_ids}
    ends = {flow: tracks[p.track_event.track_uuid] for p in trace.packet for flow in p.track_event.terminating_flow_ids}
    found = Counter((begins[flow], ends[flow]) for flow in begins)
    paused = [(row["request_id"], row["cause"]) for row in lines(run / "spans.jsonl") if row["phase"] == "paused"]
    assert len(paused) > 3
    assert found == Counter((f"request {victim}", f"request {beneficiary}") for victim, beneficiary in paused)


def test_counters_have_the_values_of_the_iterations(exported: tuple[Path, Path], trace: Any) -> None:
    run, tracks = exported[0], track_names(trace)
    iterations = lines(run / "iterations.jsonl")
    known = {
        "KV blocks used": [row["Used KV cache blocks"] for row in iterations],
        "tokens in the batch": [row["ifbbench"]["budget_used"] for row in iterations],
        "context requests": [row["Context Requests"] for row in iterations],
        "generation requests": [row["Generation Requests"] for row in iterations],
        "requests waiting": [row["ifbbench"]["waiting"] for row in iterations],
        "requests queued": [row["ifbbench"]["queued"] for row in iterations],
    }
    starts = [round(row["ifbbench"]["start_s"] * 1e9) for row in iterations]
    for name, values in known.items():
        events = [
            (packet.timestamp, packet.track_event.counter_value)
            for packet in trace.packet
            if packet.track_event.type == COUNTER and tracks[packet.track_event.track_uuid] == name
        ]
        changes = [
            (start, value)
            for place, (start, value) in enumerate(zip(starts, values, strict=True))
            if place == 0 or values[place - 1] != value
        ]
        assert [value for _, value in events[:-1]] == [value for _, value in changes], name
        assert [time for time, _ in events[:-1]] == pytest.approx([time for time, _ in changes], abs=1)


def test_the_trace_processor_counts_the_same(exported: tuple[Path, Path]) -> None:
    processor = pytest.importorskip("perfetto.trace_processor", reason="the package perfetto is not installed")
    binary = shutil.which("trace_processor_shell")
    if binary is None:
        pytest.skip("no trace_processor_shell is on the path, which the package perfetto would download")
    run, path = exported
    with processor.TraceProcessor(trace=str(path), config=processor.TraceProcessorConfig(bin_path=binary)) as opened:
        slices = opened.query("select name, count(*) as count from slice group by name")
        counts = {row.name: row.count for row in slices}
        flows = next(iter(opened.query("select count(*) as count from flow"))).count
    phases = Counter(row["phase"] for row in lines(run / "spans.jsonl"))
    assert {name: counts[name] for name in phases} == phases
    assert counts["iteration"] == len(lines(run / "iterations.jsonl"))
    assert flows == phases["paused"]
