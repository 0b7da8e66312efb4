"""`ifbbench import` and `calibrate --from`: the forms in which lines of logs come, and damaged logs.

Lines are made by the formats of vLLM 0.15 to 0.32 (`vllm/v1/metrics/loggers.py`, `vllm/v1/engine/core.py`,
`vllm/logging_utils/formatter.py`) and SGLang 0.5.23 (`metrics_reporter.py`, `configure_logger`), and after lines of
earlier versions of SGLang in its issues.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.studies.log import Log
from ifbbench.studies.sglang_logs import sglang_batches
from tests.live.recordings import lines

COUNT = 40
START = "(EngineCore pid=7) INFO 11-28 08:24:00 [core.py:133] Initializing a V1 LLM engine with config: model='m', "


def vllm_line(number: int, engine: int | None = 0, process: str = "APIServer pid=6") -> str:
    """An iteration. engine: None in versions before 0.28, whose engines log themselves."""
    prefix = "" if engine is None else f"Engine {engine:03}: "
    usage = "" if engine is None else f", GPU KV cache usage: {number % 50}.0%"
    return (
        f"({process}) INFO 11-28 08:24:{number // 4:02} [loggers.py:199] {prefix}Iteration({number}): "
        f"{number % 2} context requests, {number % 2 * 90} context tokens, {1 + number % 7} generation requests, "
        f"{1 + number % 7} generation tokens, iteration elapsed time: 12.50 ms{usage}"
    )


VLLM = [vllm_line(number) for number in range(COUNT)]


def imported(text: str | bytes, folder: Path, *options: str) -> tuple[str, list[dict[str, Any]]]:
    """What `import` prints of a log, and its iterations."""
    (folder / "a.log").write_bytes(text if isinstance(text, bytes) else text.encode())
    output = str(folder / "imported")
    result = CliRunner().invoke(main, ["import", str(folder / "a.log"), "-o", output, "--overwrite", *options])
    assert "Traceback" not in result.output
    if result.exit_code:
        assert result.exit_code == 2
        return result.output, []
    return result.output, lines(folder / "imported", "iterations")


def counts(rows: Sequence[dict[str, Any]]) -> list[tuple[int, ...]]:
    names = ("Context Requests", "Total Context Tokens", "Generation Requests")
    return [tuple(row[name] for name in names) for row in rows]


def in_colours(line: str) -> str:
    """As vLLM's ColoredFormatter writes a line."""
    process, rest = line.split(") ", 1)
    level, date, time, place, message = rest.split(" ", 4)
    grey = f"\x1b[90m{date} {time}\x1b[0m \x1b[90m{place}\x1b[0m"
    return f"\x1b[0;36m{process})\x1b[0;0m \x1b[32m{level}\x1b[0m {grey} {message}"


def as_json(line: str) -> str:
    """As vLLM's JSON formatter writes it."""
    clock, message = line.split(" INFO ")[1].split(" [", 1)[0], line.split("] ", 1)[1]
    return json.dumps({"asctime": f"2026-{clock},123", "levelname": "INFO", "process": 6, "message": message})


FORMS: dict[str, Callable[[str], str]] = {
    "colours": in_colours,
    "docker compose": lambda line: f"vllm-1  | {line}",
    "docker compose, colours": lambda line: f"\x1b[36mvllm-1  | \x1b[0m{in_colours(line)}",
    "kubectl logs --timestamps": lambda line: f"2026-11-28T08:24:00.123456789Z {line}",
    "json": as_json,
    "docker's own file": lambda line: json.dumps({"log": f"{in_colours(line)}\n", "stream": "stdout"}),
    "carriage returns": lambda line: f"{line}\r",
}


@pytest.mark.parametrize("name", FORMS)
def test_what_stands_around_a_line_does_not_matter(name: str, tmp_path: Path) -> None:
    _, expected = imported("\n".join(VLLM), tmp_path)
    output, found = imported("\n".join(map(FORMS[name], VLLM)), tmp_path)
    assert counts(found) == counts(expected)
    assert len(found) == COUNT
    assert "Exact times: time stamps are whole seconds" in output
    if not name.startswith("kubectl"):  # whose own time stamps come first
        assert [row["ifbbench"]["start_s"] for row in found] == [row["ifbbench"]["start_s"] for row in expected]


def test_utf_16_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    text = "\n".join(VLLM)
    assert len(imported(text.encode("utf-16"), tmp_path)[1]) == COUNT  # of PowerShell
    half = "\n".join(VLLM[:20]).encode() + b"\n" + bytes(range(256)) * 9 + b"\n" + "\n".join(VLLM[20:]).encode()
    assert len(imported(half, tmp_path)[1]) == COUNT


def test_without_time_stamps(tmp_path: Path) -> None:
    output, found = imported("\n".join(line.split("] ", 1)[1] for line in VLLM), tmp_path)
    assert "- Waits between iterations: the lines have no time stamps" in output
    assert "Exact times" not in output
    assert found[-1]["ifbbench"]["start_s"] == pytest.approx(12.5e-3 * (COUNT - 1))


def test_ranks_of_vllm_are_imported_one_by_one(tmp_path: Path) -> None:
    both = [line for number in range(COUNT) for line in (vllm_line(number, 0), vllm_line(number + 3, 1))]
    output, _ = imported("\n".join(both), tmp_path)
    assert "has iterations of 2 engines (0, 1)" in output
    assert "add --rank" in output
    for rank, shift in (("0", 0), ("1", 3)):
        _, found = imported("\n".join(both), tmp_path, "--rank", rank)
        assert [row[0] for row in counts(found)] == [(number + shift) % 2 for number in range(COUNT)]
    assert (
        "--rank 2: the log has no iteration of it; expected 0, 1"
        in imported("\n".join(both), tmp_path, "--rank", "2")[0]
    )


def test_two_servers_in_one_log_are_refused(tmp_path: Path) -> None:
    """Their numbers stand still, or go back again and again; those of one that was started again, once."""
    for shift in (0, 11):
        both = [line for number in range(COUNT) for line in (vllm_line(number + shift), vllm_line(number))]
        assert "mixes several servers that ran at the same time" in imported("\n".join(both), tmp_path)[0]
    output, found = imported("\n".join([*VLLM, START, *VLLM]), tmp_path)
    assert len(found) == 2 * COUNT
    assert f"started again in line {COUNT + 2}:" in output


def test_damaged_lines_and_missing_iterations_are_said(tmp_path: Path) -> None:
    damaged = [*VLLM[:9], VLLM[9][:140], *VLLM[10:]]
    output, found = imported("\n".join(damaged), tmp_path)
    assert len(found) == COUNT - 1
    assert "- What is damaged is not used: line 10." in output
    assert "- 1 iteration is not in the log, as the numbers of the others say: before line 11." in output
    output, found = imported("\n".join(VLLM[:5] + VLLM[8:]), tmp_path)
    assert "- 3 iterations are not in the log" in output
    output, found = imported("\n".join(VLLM)[:-70] + "\n", tmp_path)  # and a line break behind what was cut
    assert len(found) == COUNT - 1
    assert f"- It is cut in line {COUNT}, which is not used." in output


def test_calibration_reads_ranks_apart(tmp_path: Path) -> None:
    """Lines of vLLM before 0.28 have the engine's number in the name of its process, their summaries have it as 000."""
    from ifbbench.studies.engine_logs import vllm_lines

    summary = "(APIServer pid=6) INFO 11-28 08:24:01 [loggers.py:335] Engine 001: Avg prompt throughput: 9.0 tokens/s, "
    summary += "Avg generation throughput: 5.0 tokens/s, Running: 1 reqs, Waiting: 7 reqs, GPU KV cache usage: 5.0%"
    text = "\n".join([vllm_line(3, None, "EngineCore_DP1 pid=9"), summary])
    assert [line.engine for line in vllm_lines(Log(tmp_path), text)] == ["1", "1"]


def prefill(number: int, usage: str = "token usage: 0.10", rate: bool = True) -> str:
    text = f"Prefill batch, #new-seq: 2, #new-token: {100 + number}, #cached-token: 8, {usage}, #running-req: 1, "
    return text + "#queue-req: 3, " + ("cuda graph: False, input throughput (token/s): 90.00" if rate else "")


def decode(number: int, usage: str = "#token: 900, token usage: 0.20", drafts: str = "") -> str:
    text = f"Decode batch, #running-req: {4 + number % 3}, {usage}, {drafts}cuda graph: True, "
    return text + f"gen throughput (token/s): {100 + number}.00, #queue-req: 1"


def sglang(
    begin: str = "[2026-11-28 10:00:0{0}] ", prompt: Callable[[int], str] = prefill, step: Callable[[int], str] = decode
) -> list[str]:
    """Ten lines of each kind, one a second. begin: of each, with the second."""
    return [begin.format(number) + make(number) for number in range(10) for make in (prompt, step)]


SWA = "#full token: 900, full token usage: 0.20, #swa token: 7, swa token usage: 0.01"
MAMBA = "#full token: 900, full token usage: 0.20, mamba num: 3, mamba usage: 0.30"
SGLANG_FORMS = {
    "ranks": sglang("[2026-11-28 10:00:0{0} TP0 EP0] "),
    "milliseconds": sglang("[2026-11-28 10:00:0{0}.125 ATTN_CP0 TP0] "),
    "a client's progress bar": sglang("  2% 1/64 [00:04<04:51,  4.62s/it][2026-11-28 10:00:0{0}] "),
    "kubectl logs --timestamps": sglang("2026-11-28T09:00:00.5Z [2026-11-28 10:00:0{0}] "),
    "colours": sglang("\x1b[32m[2026-11-28 10:00:0{0}]\x1b[0m "),
    "no throughput of prompts": sglang(prompt=lambda number: prefill(number, rate=False)),
    "full stops": [line.replace(" batch,", " batch.") for line in sglang()],
    "windows": sglang(
        prompt=lambda number: prefill(number, "full token usage: 0.10, swa token usage: 0.02"),
        step=lambda number: decode(number, SWA),
    ),
    "Mamba layers": sglang(
        prompt=lambda number: prefill(number, "full token usage: 0.10, mamba usage: 0.20"),
        step=lambda number: decode(number, MAMBA),
    ),
    "pipeline stages": [
        line
        for pair in zip(sglang("[2026-11-28 10:00:0{0} PP0] "), sglang("[2026-11-28 10:00:0{0} PP1] "), strict=True)
        for line in pair
    ],
}


@pytest.mark.parametrize("name", SGLANG_FORMS)
def test_forms_of_the_lines_of_sglang(name: str, tmp_path: Path) -> None:
    def facts(text: Sequence[str]) -> list[Any]:
        return [
            (type(one), one.running, one.queued, one.tokens, one.usage, one.stamp, one.rank)
            for one in sglang_batches(Log(tmp_path), "\n".join(text))
        ]

    if name == "colours":
        output, found = imported("\n".join(SGLANG_FORMS[name]), tmp_path)
        assert len(found) == 10 + 40 * 10
        assert "Exact times" in output
    else:
        assert facts(SGLANG_FORMS[name]) == facts(sglang())


def test_ranks_of_sglang_are_imported_one_by_one(tmp_path: Path) -> None:
    ranks = [sglang(f"[2026-11-28 10:00:0{{0}} DP{rank} TP{rank}] ") for rank in (0, 1)]
    both = "\n".join(line for pair in zip(*ranks, strict=True) for line in pair)
    assert "has iterations of 2 engines (0, 1)" in imported(both, tmp_path)[0]
    _, expected = imported("\n".join(sglang()), tmp_path)
    assert counts(imported(both, tmp_path, "--rank", "1")[1]) == counts(expected)


def test_drafts_of_sglang(tmp_path: Path) -> None:
    drafts = "accept len: 2.50, accept rate: 0.40, "
    text = "\n".join(sglang(step=lambda number: decode(number, drafts=drafts)))
    _, found = imported(text, tmp_path)
    generation = next(row for row in found if row["Generation Requests"] == 4)
    assert generation["ifbbench"]["budget_used"] == 10
    command = ["calibrate", "--from", str(tmp_path / "a.log"), "--gpu", "h100-sxm", "--model", "llama-3.1-8b"]
    result = CliRunner().invoke(main, [*command, "-o", str(tmp_path / "a.toml")])
    assert (result.exit_code, "line 2: speculative decoding is not simulated" in result.output) == (2, True)


def test_ranks_of_tensorrt_llm_and_iterations_that_were_not_fetched(tmp_path: Path) -> None:
    """Attention data parallelism has a row for each rank; /metrics keeps the last iterations only."""

    def row(number: int, rank: int) -> dict[str, Any]:
        batch = {"numContextRequests": 0, "numCtxTokens": 0, "numGenRequests": 1 + rank, "numPausedRequests": 0}
        stamp = f"11-28-2026 10:00:{number:02}.000000"
        return {
            "iter": number,
            "timestamp": stamp,
            "iterLatencyMS": 9.0,
            "attentionDpRank": rank,
            "inflightBatchingStats": batch,
        }

    rows = [row(number, rank) for number in (*range(10), *range(15, 20)) for rank in (0, 1)]
    text = json.dumps(rows)
    assert "add --rank with the number of one" in imported(text, tmp_path)[0]
    for rank in (0, 1):
        output, found = imported(text, tmp_path, "--rank", str(rank))
        assert {one["Generation Requests"] for one in found} == {1 + rank}
        assert "- 5 iterations are not in the log" in output
