"""What the tests and benchmarks of recordings read of a run directory."""

import json
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any


def lines(directory: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a file of JSON lines, by its name without suffix."""
    return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


def batches(directory: Path, left_out: Collection[int] = ()) -> list[dict[int, int]]:
    """Tokens of each request in each iteration, without the requests `left_out`."""
    found = defaultdict[int, dict[int, int]](dict)
    for span in lines(directory, "spans"):
        if span["phase"] in ("context", "recompute", "generation") and span["request_id"] not in left_out:
            iterations = range(span["first_iteration"], span["last_iteration"] + 1)
            counts = span.get("chunks") or span.get("steps") or [1] * len(iterations)
            for iteration, count in zip(iterations, counts, strict=True):
                found[iteration][span["request_id"]] = count
    return [found[iteration] for iteration in range(len(lines(directory, "iterations")))]


def decisions(directory: Path) -> list[tuple[Any, ...]]:
    """What each iteration ran and paused, the free blocks, and which request it left out first and why."""
    return [
        (
            line["Scheduled Requests"],
            line["ifbbench"]["budget_used"],
            line["Paused Requests"],
            line["Free KV cache blocks"],
            line["ifbbench"]["first_left_out"],
        )
        for line in lines(directory, "iterations")
    ]
