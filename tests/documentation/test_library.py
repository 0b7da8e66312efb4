"""The code of docs/library.md runs, and does what the text around it says."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.engine.policies import CapacityDecision
from ifbbench.serving.library.request_tensors import TENSORS

ROOT = Path(__file__).parents[2]
PAGE, PAGE_ON_RANKS = ROOT / "docs" / "library.md", ROOT / "docs" / "ranks.md"


def code_with(text: str, page: Path = PAGE) -> str:
    """The one Python example of the page that has `text` in it."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    (found,) = (block for block in blocks if text in block)
    return str(found)


def test_the_batch_manager_example_answers_every_request(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(code_with("get_inference_requests"))
    answer = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    lines = answer.stdout.splitlines()
    for request_id, tokens in ((1, 8), (4, 3 + 5)):
        (line,) = (line for line in lines if line.startswith(f"request {request_id} (final): "))
        assert len(json.loads(line.partition(": ")[2])) == tokens
    streamed = [json.loads(line.partition(": ")[2]) for line in lines if line.startswith("request 2")]
    assert [len(piece) for piece in streamed] == [1, 1, 1, 1]
    assert any(line.startswith("request 3 failed: ") for line in lines)


def test_the_example_of_tensors_makes_a_request(capsys) -> None:
    exec(code_with("from_tensors"), {})
    assert capsys.readouterr().out == "((5,), (7, 8))\n"


def test_the_tensors_of_the_page_are_those_that_are_known() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| tensor | type and shape | field |")[2].partition("\n\n")[0]
    names = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(names) == sorted(TENSORS)


def test_the_example_of_load_run_reads_a_run(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--device", "sim:h100-sxm", "--model", "llama-3.1-8b", "--max_batch_size", "8", "--quiet"]
    result = CliRunner().invoke(main, ["run", *options, "--output", "results/chat"])
    assert result.exit_code == 0, result.output
    exec(code_with("ifbbench.load_run"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("guaranteed_no_evict ")
    assert "batch_size" in printed
    assert "iterations were bound by a limit" in printed


def test_the_example_of_a_policy_starts_the_shortest_output_first(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shortest.py").write_text(code_with("ShortestRemainingOutputFirst"))
    lengths = [40, 30, 10, 20, 5]
    rows = [
        {"request_id": index, "arrival_s": 0.0, "prompt_len": 8, "output_len": length, "max_new_tokens": length}
        for index, length in enumerate(lengths)
    ]
    Path("trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Room for one of the longest at a time.
    arguments = ["--device", "null", "--tokens_per_block", "8", "--max_tokens_in_paged_kvcache", "48", "--quiet"]
    policy = ["--policy", "shortest:ShortestRemainingOutputFirst", "--output", "run"]
    result = CliRunner().invoke(main, ["run", "trace.jsonl", *arguments, *policy])
    assert result.exit_code == 0, result.output
    requests = [json.loads(line) for line in Path("run/requests.jsonl").read_text().splitlines()]
    started = sorted(requests, key=lambda row: row["first_scheduled_s"])
    assert [row["output_len"] for row in started] == sorted(lengths)


def test_the_example_of_a_scheduler_starts_the_shortest_prompt_first(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shortest_prompt.py").write_text(code_with("ShortestPromptFirst"))
    lengths = [40, 30, 10, 20, 5]
    rows = [
        {"request_id": index, "arrival_s": 0.0, "prompt_len": length, "output_len": 8, "max_new_tokens": 8}
        for index, length in enumerate(lengths)
    ]
    Path("trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Room for one of the longest at a time.
    common = ["run", "trace.jsonl", "--tokens_per_block", "8", "--max_tokens_in_paged_kvcache", "72", "--quiet"]
    engine = ["--engine", "shortest_prompt:ShortestPromptFirst"]
    for device, settings in (("cpu", engine), ("h100-sxm", engine), ("cpu", [])):
        output = f"{device}{len(settings)}"
        given = ["--device", device, "--model", "tiny", "--output", output]
        given += ["--responses_json", f"{output}.json"] if device == "cpu" else []
        result = CliRunner().invoke(main, [*common, *given, *settings])
        assert result.exit_code == 0, result.output
        requests = [json.loads(line) for line in Path(output, "requests.jsonl").read_text().splitlines()]
        started = sorted(requests, key=lambda row: row["first_scheduled_s"])
        if settings:
            assert [row["prompt_len"] for row in started] == sorted(lengths)
            assert any("kv_blocks" in cause for row in requests for cause in row["attribution_s"])
    tokens = [json.loads(Path(f"cpu{count}.json").read_text()) for count in (2, 0)]
    assert tokens[0] == tokens[1]


EVERYTHING_READ = """
from ifbbench.engine.policies import GuaranteedNoEvict

EXPRESSIONS = {expressions!r}
read = set()


class Reader(GuaranteedNoEvict):
    def schedule(self, active, kv_cache):
        rows = active.generation_rows
        for request in active:
            for text in EXPRESSIONS:
                # Needs of the context phase are those of context requests.
                if request.in_context or not text.endswith(("_need(request)", "_completion(request)")):
                    eval(text, {{"active": active, "request": request, "kv_cache": kv_cache, "rows": rows}})
                    read.add(text)
        plan = kv_cache.plan_release()
        for request in active.generation[:1]:
            plan.release(request.slot)
        assert plan.free_blocks > kv_cache.free_blocks - 1
        return super().schedule(active, kv_cache)
"""


def cells(heading: str) -> list[str]:
    """What is code in the first column of the page's table with this heading."""
    table = PAGE.read_text(encoding="utf-8").partition(heading)[2].partition("\n\n")[0]
    return [text for line in table.splitlines()[2:] for text in re.findall(r"`([^`]+)`", line.split("|")[1])]


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        ("reads_blocks", []),
        ("reads_reuse", ["--enable_kv_cache_reuse"]),
        ("reads_windows", ["--max_attention_window", "16,32"]),
        ("reads_counts", ["--device", "sim:h100-sxm", "--model", "tiny"]),
    ],
)
def test_a_policy_may_read_what_the_page_lists(module: str, settings: list[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    expressions = [*cells("| expression | value |"), "kv_cache.counted(kv_cache.step_needs(rows).sum(axis=0))"]
    assert len(expressions) > 30
    Path(f"{module}.py").write_text(EVERYTHING_READ.format(expressions=expressions))
    command = ["run", "chat", "--device", "null", "--max_num_samples", "6", "--time_scale", "0", "--quiet", *settings]
    result = CliRunner().invoke(main, [*command, "--policy", f"{module}:Reader", "--output", "run"])
    assert result.exit_code == 0, result.output
    assert sys.modules[module].read == set(expressions)


def test_the_fields_of_a_decision_are_those_of_the_page() -> None:
    internal = {"valid_until_next_allocation"}  # of policies that declare is_steady, for the engine's own
    assert cells("| field | value |") == [one.name for one in fields(CapacityDecision) if one.name not in internal]


def test_the_server_of_two_ranks_answers_on_rank_0_alone(tmp_path: Path) -> None:
    """Started as mpirun starts processes."""
    (tmp_path / "server.py").write_text(code_with("Communicator", PAGE_ON_RANKS))
    servers = [
        subprocess.Popen(
            [sys.executable, "server.py"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ)
            | {
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_RANK": str(rank),
            },
        )
        for rank in range(2)
    ]
    printed = [server.communicate(timeout=300)[0].splitlines() for server in servers]
    assert [server.returncode for server in servers] == [0, 0]
    assert printed[1] == []
    answers = [json.loads(line.partition(": ")[2]) for line in sorted(printed[0])]
    assert [answer[:3] for answer in answers] == [[17, 4, number] for number in range(4)]
    assert [len(answer) for answer in answers] == [3 + 8] * 4
