"""A trace of prompts that share prefixes, in tokens and by name, and real runs of it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig
from tests.small_model import CACHE_BYTES_PER_TOKEN

BLOCK = 4
BYTES_PER_BLOCK = CACHE_BYTES_PER_TOKEN * BLOCK  # in runs with the fixture `small_model`
OUTPUT_LENGTHS = [9, 14, 3, 22, 9, 17, 2, 12, 6, 1]
SETTINGS: dict[str, Any] = {
    "tokens_per_block": BLOCK,
    "max_batch_size": 4,
    "max_seq_len": 128,
    "max_tokens_in_paged_kvcache": 640,
    "quiet": True,
}


def prompts() -> list[list[int]]:
    """Two families of prompts: equal ones, ones that go on, that stop within a block, and that part within one."""
    draw = np.random.default_rng(5)
    first, second = draw.integers(0, 4096, (2, 60)).tolist()

    def own(length: int) -> list[int]:
        return [int(token) for token in draw.integers(0, 4096, length)]

    return [
        first[:37],
        first[:37],
        first[:32],
        second[:40],
        [*first[:22], *own(11)],
        second[:18],
        [*first[:37], *own(9)],
        [*second[:40], *own(3)],
        [*second[:6], *own(30)],
        first[:37],
    ]


# The same lengths and equalities without tokens: (family, tokens of it, length of the prompt).
NAMES = [
    (1, 37, 37),
    (1, 37, 37),
    (1, 32, 32),
    (2, 40, 40),
    (1, 22, 33),
    (2, 18, 18),
    (1, 37, 46),
    (2, 40, 43),
    (2, 6, 36),
    (1, 37, 37),
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Requests that are all there from the start, every other one of which reserves more than it makes."""
    with path.open("w") as file:
        for index, (row, length) in enumerate(zip(rows, OUTPUT_LENGTHS, strict=True)):
            reserved = length + 4 * (index % 2)
            json.dump({"arrival_s": 0.0, **row, "output_len": length, "max_new_tokens": reserved}, file)
            file.write("\n")
    return path


@dataclass
class Found:
    """Tokens by request, and what the run directory says."""

    tokens: dict[int, list[int]]
    summary: dict[str, Any]
    iterations: list[dict[str, Any]]

    @property
    def digest(self) -> str:
        return str(self.summary["schedule_digest"])


def run(trace: Path, directory: Path, **settings: Any) -> Found:
    directory.mkdir(parents=True)
    makes_tokens = settings.get("device") != "null"
    responses = directory / "responses.json"
    config = RunConfig(
        **{
            "device": "cpu",
            **SETTINGS,
            "output": str(directory / "run"),
            "responses_json": str(responses) if makes_tokens else None,
            **settings,
        }
    )
    summary = run_trace(str(trace), config).summary
    assert summary["requests"]["failed"] == 0
    rows = json.loads(responses.read_text()) if makes_tokens else []
    lines = (directory / "run/iterations.jsonl").read_text().splitlines()
    tokens = {row["response_id"]: row["response_tokens"] for row in rows}
    return Found(tokens, summary, [json.loads(line) for line in lines])
