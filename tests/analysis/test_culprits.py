"""The overview of `why` names a burst, giant prompts and the priority that holds the slots."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from ifbbench.cli.main import main
from tests.analysis.runs import simulate, write_requests


def test_a_burst_giant_prompts_and_a_flood_of_low_priority_are_named(tmp_path: Path) -> None:
    high = [(index, 0.5 * index, 200, 40, 0.9) for index in range(80)]
    low = [(1000 + index, 0.1 * index, 300, 120, 0.1) for index in range(300)]
    burst_of_120 = [(2000 + index, 20 + 0.005 * index, 100, 20, 0.5) for index in range(120)]
    giants = {3000: 30_000, 3001: 45_000, 3002: 60_000}
    giant = [(number, 5.0 + number - 3000, length, 10, 0.5) for number, length in giants.items()]
    names = ("request_id", "arrival_s", "prompt_len", "max_new_tokens", "priority")
    rows = [dict(zip(names, row, strict=True)) for row in (*high, *low, *burst_of_120, *giant)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, sorted(rows, key=lambda row: row["arrival_s"]))) + "\n")
    limits: dict[str, Any] = {"max_batch_size": 6, "max_seq_len": 65_536, "max_tokens_in_paged_kvcache": None}
    directory = simulate(tmp_path, "run", trace, **limits).data.path
    printed = CliRunner().invoke(main, ["why", str(directory), "--budget", "0"]).output
    facts = json.loads(CliRunner().invoke(main, ["why", str(directory), "--budget", "0", "--json"]).output)
    found = {one["kind"]: one for one in facts["culprits"]}

    burst = found["burst"]
    assert 19 <= burst["start_s"] <= 20
    assert 20.5 <= burst["end_s"] <= 22
    assert burst["requests"] >= 120
    assert (burst["priority"], burst["of_priority"]) == ("0.5", 120)
    assert {one["request_id"]: one["prompt_len"] for one in found["giant_prompts"]["requests"]} == giants
    assert found["holds_slots"]["priority"] == "0.1"
    for one in facts["culprits"]:
        assert one["text"] in printed
    assert "3002 (60,000 tokens), 3001 (45,000 tokens), 3000 (30,000 tokens)" in printed


def test_even_traffic_has_no_culprit(tmp_path: Path) -> None:
    trace = write_requests(tmp_path / "trace.jsonl", seed=3)
    directory = simulate(tmp_path, "run", trace).data.path
    facts = json.loads(CliRunner().invoke(main, ["why", str(directory), "--budget", "0", "--json"]).output)
    assert facts["culprits"] == []
