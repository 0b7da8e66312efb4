"""What is lost of the KV cache between turns, held to a run in which nothing is evicted."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.analysis.recorded import RecordedRun
from ifbbench.analysis.turns import Turns
from ifbbench.cli.main import main
from ifbbench.replay.run import run_trace
from tests.fleet.test_fleet import ENGINES, config_of, lines

TURNS, SESSIONS = 4, 12


def write_sessions(path: Path) -> str:
    """Conversations that go on with all that was said before, side by side, with pauses between their turns."""
    rows: list[dict[str, Any]] = []
    for session in range(SESSIONS):
        said: list[tuple[int, int]] = []
        for turn in range(TURNS):
            number = session * TURNS + turn
            said.append((2 * number, 300 + 37 * (number % 5)))  # a message
            prompt_len, output_len = sum(length for _, length in said), 40 + number % 7
            said.append((2 * number + 1, output_len))  # its answer
            rows.append(
                {
                    "request_id": number,
                    "arrival_s": 0.05 * session,
                    "prompt_len": prompt_len,
                    "output_len": output_len,
                    "prefix_ids": [name for name, _ in said],
                    "prefix_lens": [length for _, length in said],
                }
                | ({"after": number - 1, "think_s": 1.0} if turn else {})
            )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def turns_of(path: Path, trace: str, **asked: Any) -> tuple[Turns, dict[Any, dict[str, Any]]]:
    run_trace(trace, config_of(**asked, output=str(path)))
    rows = {row["request_id"]: row for row in lines(path / "requests.jsonl")}
    return Turns(RecordedRun.load(path)), rows


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_lost_is_what_an_ample_cache_would_have_kept(engine: str, tmp_path: Path) -> None:
    trace = write_sessions(tmp_path / "trace.jsonl")
    asked = {"engine": engine, "enable_kv_cache_reuse": True, "tokens_per_block": 16}
    asked |= {"enable_partial_reuse": False} if engine == "trtllm" else {}
    ample, kept = turns_of(tmp_path / "ample", trace, **asked)
    assert len(ample.turns) == SESSIONS * (TURNS - 1)
    assert ample.lost_tokens == 0
    assert ample.text == ""
    assert all(turn.shared_tokens == kept[turn.request_id]["reused_tokens"] for turn in ample.turns)
    small, found = turns_of(tmp_path / "small", trace, **asked, max_tokens_in_paged_kvcache=8_000)
    assert small.lost_tokens > 0
    for turn in small.turns:
        row = found[turn.request_id]
        assert turn.lost_tokens == kept[turn.request_id]["reused_tokens"] - row["reused_tokens"]
        assert 0 <= turn.lost_s <= row["attribution_s"]["context"]
        assert (turn.lost_s > 0) == (turn.lost_tokens > 0)
    said = CliRunner().invoke(main, ["why", str(tmp_path / "small"), "--budget", "0"])
    assert small.text in said.output.replace("\n", " ")


def test_runs_without_sessions_or_without_reuse_lose_nothing(tmp_path: Path) -> None:
    trace = write_sessions(tmp_path / "trace.jsonl")
    found, _ = turns_of(tmp_path / "none", trace, enable_kv_cache_reuse=False)
    assert found.turns == []
    rows = [{name: value for name, value in row.items() if name != "after"} for row in lines(tmp_path / "trace.jsonl")]
    (tmp_path / "alone.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    alone, _ = turns_of(tmp_path / "alone", str(tmp_path / "alone.jsonl"), enable_kv_cache_reuse=True)
    assert alone.turns == []
