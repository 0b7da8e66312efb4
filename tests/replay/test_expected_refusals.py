"""Before a run, the user reads how many requests it will refuse, why, and which setting admits them."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main

LIMITS = {
    "max_input_len": "is longer than max_input_len",
    "max_seq_len": "leaves no room for output in max_seq_len",
    "kv_blocks": "(kv_blocks)",
    "max_beam_width": "(max_beam_width)",
    "streaming": "streaming up to",
}


def write_trace(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps({"arrival_s": 0.0} | row) + "\n" for row in rows))
    return path


def run(trace: Path, directory: Path, *options: str) -> list[str]:
    """The errors of the run's requests."""
    arguments = [str(trace), "--device", "null", "--quiet", "--output", str(directory), *options]
    result = CliRunner().invoke(main, ["run", *arguments])
    rows = [json.loads(line) for line in (directory / "requests.jsonl").read_text().splitlines()]
    errors = [row["error"] for row in rows if row["error"]]
    assert result.exit_code == (1 if errors else 0), result.output
    return errors


def limit_of(error: str) -> str:
    (limit,) = (limit for limit, words in LIMITS.items() if words in error)
    return limit


@pytest.mark.parametrize("seed", range(12))
def test_as_many_are_announced_as_are_refused(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(seed)
    rows = [
        {
            "prompt_len": draw.choice([1, 8, 20, 40, 90]),
            "max_new_tokens": draw.randint(1, 60),
            "output_len": 3,
            "beam_width": draw.choice([1, 1, 2]) if seed % 3 == 0 else 1,
        }
        for _ in range(40)
    ]
    options = [
        "--max_seq_len",
        "80",
        "--max_tokens_in_paged_kvcache",
        draw.choice(["40", "72", "400"]),
        "--tokens_per_block",
        "4",
        "--max_num_tokens",
        draw.choice(["30", "64"]),
    ]
    options += draw.choice([[], ["--no_enable_chunked_context"], ["--max_input_len", "20"]])
    if seed % 3 == 0:
        options += ["--max_beam_width", draw.choice(["1", "2"])]
    elif seed % 3 == 1:
        options += ["--streaming", "--policy", "max_utilization"]
    trace = write_trace(tmp_path / "t.jsonl", rows)
    refused = Counter(limit_of(error) for error in run(trace, tmp_path / "run", *options))
    announced = Counter({limit_of(text): int(text.split()[0]) for text in caplog.messages if "will be refused" in text})
    assert refused == announced
    assert all("of 40 requests will be refused" in text for text in caplog.messages)


@pytest.mark.parametrize(
    ("row", "options", "advice"),
    [
        ({"prompt_len": 64}, ["--no_enable_chunked_context", "--max_num_tokens", "32"], "--enable_chunked_context"),
        ({"prompt_len": 64}, ["--max_num_tokens", "31"], "A larger --max_num_tokens"),
        ({"prompt_len": 64}, ["--type", "v1", "--max_input_len", "60"], "A larger --max_input_len"),
        ({"prompt_len": 64}, ["--max_input_len", "60"], "A larger --max_input_len"),
        ({"prompt_len": 64}, ["--max_seq_len", "60"], "A larger --max_seq_len"),
        ({"prompt_len": 64}, ["--max_tokens_in_paged_kvcache", "64"], "--max_tokens_in_paged_kvcache"),
        ({"prompt_len": 4, "beam_width": 3}, ["--max_beam_width", "2"], "A larger --max_beam_width"),
    ],
)
def test_the_setting_that_admits_requests_is_named(
    row: dict[str, Any], options: list[str], advice: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [{"output_len": 2} | row, {"prompt_len": 2, "output_len": 2}])
    assert len(run(trace, tmp_path / "run", *options)) == 1
    (text,) = caplog.messages
    assert text.startswith("1 of 2 requests will be refused: ")
    assert advice in text


def test_nothing_is_announced_where_all_requests_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [{"prompt_len": 9000, "output_len": 2}])
    assert run(trace, tmp_path / "run") == []
    assert caplog.messages == []
