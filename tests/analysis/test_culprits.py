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


def test_three_giant_prompts_among_few_requests_are_named(tmp_path: Path) -> None:
    rows = [
        {"request_id": number, "arrival_s": 0.1 * number, "prompt_len": 200, "max_new_tokens": 8}
        for number in range(20)
    ]
    for number, length in {4: 9_000, 9: 20_000, 14: 12_000}.items():
        rows[number]["prompt_len"] = length
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)) + "\n")
    limits: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 32_768, "max_tokens_in_paged_kvcache": None}
    directory = simulate(tmp_path, "run", trace, **limits).data.path
    printed = CliRunner().invoke(main, ["why", str(directory), "--budget", "0"]).output
    assert "Giant prompts: 9 (20,000 tokens), 14 (12,000 tokens), 4 (9,000 tokens)" in printed


def test_even_traffic_has_no_culprit(tmp_path: Path) -> None:
    trace = write_requests(tmp_path / "trace.jsonl", seed=3)
    directory = simulate(tmp_path, "run", trace).data.path
    facts = json.loads(CliRunner().invoke(main, ["why", str(directory), "--budget", "0", "--json"]).output)
    assert facts["culprits"] == []


def test_the_slowest_are_by_any_figure_of_a_class_or_of_those_that_miss(tmp_path: Path) -> None:
    rows = [
        {
            "request_id": number,
            "arrival_s": 0.02 * number,
            "prompt_len": 100 + 900 * (number % 3 == 0),
            "max_new_tokens": 20 + number,
            "priority": 0.5 + 0.25 * (number % 2),
            "class": "doc" if number % 3 == 0 else "chat",
        }
        for number in range(30)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)) + "\n")
    directory = simulate(tmp_path, "run", trace, slo="ttft=20ms").data.path
    done = [json.loads(line) for line in (directory / "requests.jsonl").read_text().splitlines()]

    def slowest(*options: str) -> list[int]:
        result = CliRunner().invoke(
            main, ["why", str(directory), "--budget", "0", "--json", "--slowest", "4", *options]
        )
        assert result.exit_code == 0, result.output
        return [one["request_id"] for one in json.loads(result.stdout)["slowest"]]

    def expected(figure: str, chosen: list[dict[str, Any]]) -> list[int]:
        return [row["request_id"] for row in sorted(chosen, key=lambda row: (-row[figure], row["index"]))][:4]

    for name in ("e2e", "ttft", "tpot", "queue_time"):
        assert slowest("--by", name) == expected(f"{name}_s", done)
    assert slowest("--class", "doc", "--by", "tpot") == expected(
        "tpot_s", [one for one in done if one["class"] == "doc"]
    )
    assert slowest("--missed") == expected("e2e_s", [one for one in done if not one["slo_met"]])
    printed = CliRunner().invoke(main, ["why", str(directory), "--budget", "0"]).output
    assert "Class    requests" in printed
    assert "Priority    requests" in printed
    for options, words in (
        (("--class", "none"), "its classes: chat, doc"),
        (("--request", "1", "--missed"), "leave out"),
    ):
        refused = CliRunner().invoke(main, ["why", str(directory), *options])
        assert refused.exit_code == 2
        assert words in refused.stderr
