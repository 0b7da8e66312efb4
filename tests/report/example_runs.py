"""Run directories made from timelines that can be read: the cells that the chart shall draw are what is written down.

A timeline maps a request id to its cells from iteration 0 on: `C5` context of 5 tokens, `R5` recompute, `G2` second
generation step, `P` paused, `w` waiting, `s` skipped, `.` not in the system.
"""

import json
import random
from collections.abc import Iterable, Mapping
from itertools import groupby, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ifbbench.rundir.figures import figures
from ifbbench.rundir.reader import load_run

PHASES = {"C": "context", "R": "recompute", "G": "generation", "P": "paused", "w": "waiting", "s": "skipped"}
COMPUTING = ("context", "recompute", "generation")
TOKENS_PER_BLOCK = 4

Timeline = Mapping[str, list[str]]


def timeline(*rows: str) -> dict[str, list[str]]:
    """A timeline from texts: a request id and its cells, with blanks between them."""
    return {request: cells for request, *cells in map(str.split, rows)}


# Five requests, at most 4 in a batch and 12 tokens in an iteration, chunked context, and a pause.
DOCUMENTATION = timeline(
    "0  C5 G1 G2 G3 .  .  .  .  .  .  .  . ",
    "1  C5 G1 G2 P  P  R7 G3 G4 .  .  .  . ",
    "2  C2 C5 C4 G1 G2 G3 G4 G5 G6 G7 .  . ",
    "3  w  C4 G1 G2 G3 G4 G5 .  .  .  .  . ",
    "4  w  w  w  C8 C1 s  G1 G2 G3 G4 G5 G6",
)


def write_documentation_run(directory: Path, **changes: Any) -> Path:
    """The five-request example; `changes` go into its settings."""
    config = {"policy": "max_utilization", "max_batch_size": 4, "max_num_tokens": 12, "enable_chunked_context": True}
    return write_run(directory, DOCUMENTATION, config | changes, max_blocks=12)


def write_large_run(directory: Path, requests: int = 100, iterations: int = 800) -> Path:
    """A generated run with a queue, chunked prompts, a full KV cache and pauses."""
    config = {"policy": "max_utilization", "max_batch_size": 48, "max_num_tokens": 512, "enable_chunked_context": True}
    return write_run(directory, _busy_timeline(requests, iterations), config, max_blocks=4100)


def write_run(
    directory: Path,
    timeline: Timeline,
    config: Mapping[str, Any],
    max_blocks: int,
    failed: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write a run directory that recorded `timeline`; `failed` maps further requests, refused at once, to errors."""
    directory.mkdir(parents=True)
    iterations = _iterations(timeline, max_blocks)
    trace = {"name": "example", "requests": len(timeline) + len(failed)}
    run = {"name": directory.name, "config": dict(config), "trace": trace, "partial": False}
    requests = [_request(index, request, cells, iterations) for index, (request, cells) in enumerate(timeline.items())]
    refused = {"index": len(timeline), "arrival_s": 0.0, "prompt_len": 99, "outcome": "failed"}
    requests += [{"request_id": request, "error": error, **refused} for request, error in failed.items()]
    spans = [span for request, cells in timeline.items() for span in _spans(request, cells)]
    (directory / "run.json").write_text(json.dumps(run))
    _write_lines(directory / "iterations.jsonl", iterations)
    _write_lines(directory / "spans.jsonl", sorted(spans, key=lambda span: span["last_iteration"]))
    _write_lines(directory / "requests.jsonl", requests)
    return directory


def finish(directory: Path) -> Path:
    """Give a run directory the summary.json of a run that reached its end."""
    known = figures(load_run(directory)) | {"partial": False, "schedule_digest": "0" * 64}
    (directory / "summary.json").write_text(json.dumps(known))
    return directory


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _tokens(cell: str) -> int:
    return int(cell[1:]) if cell[0] in "CR" else int(cell[0] == "G")


def _iterations(timeline: Timeline, max_blocks: int) -> list[dict[str, Any]]:
    """An iteration takes 10 ms and half a millisecond a token."""
    held = dict.fromkeys(timeline, 0)
    start_s, rows = 0.0, []
    for number, column in enumerate(zip(*timeline.values(), strict=True)):
        cells = dict(zip(timeline, column, strict=True))
        for request, cell in cells.items():
            held[request] = 0 if cell[0] in ".P" else held[request] + _tokens(cell)
        row = _iteration(number, cells, held, max_blocks)
        row["ifbbench"] |= {"start_s": start_s, "latency_ms": 10 + 0.5 * row["ifbbench"]["budget_used"]}
        row["ifbbench"]["paused"] = [
            {"request_id": request, "for": "2"}
            for request, others in timeline.items()
            if others[number] == "P" and (number == 0 or others[number - 1] != "P")
        ]
        start_s += row["ifbbench"]["latency_ms"] / 1000
        rows.append(row)
    return rows


def _iteration(number: int, cells: Mapping[str, str], held: Mapping[str, int], max_blocks: int) -> dict[str, Any]:
    kinds = [cell[0] for cell in cells.values()]
    used = sum(-(-tokens // TOKENS_PER_BLOCK) for tokens in held.values())
    context = sum(_tokens(cell) for cell in cells.values() if cell[0] in "CR")
    bound_by = "kv_blocks" if "P" in kinds else "num_tokens" if "w" in kinds else "none"
    return {
        "Timestamp": "11-14-2023 22:13:20",
        "Iteration Counter": number,
        "Active Request Count": len(kinds),
        "Max Request Count": 48,
        "Max KV cache blocks": max_blocks,
        "Free KV cache blocks": max_blocks - used,
        "Used KV cache blocks": used,
        "Tokens per KV cache block": TOKENS_PER_BLOCK,
        "Scheduled Requests": sum(kind in "CRG" for kind in kinds),
        "Context Requests": sum(kind in "CR" for kind in kinds),
        "Generation Requests": kinds.count("G"),
        "Total Context Tokens": context,
        "MicroBatch ID": 0,
        "Paused Requests": kinds.count("P"),
        "ifbbench": {
            "host_ms": 1.0,
            "device_ms": 9.0,
            "queued": kinds.count("w"),
            "bound_by": bound_by,
            "first_left_out": {"request_id": "4", "reason": bound_by} if bound_by != "none" else None,
            "tokens_recomputed": sum(_tokens(cell) for cell in cells.values() if cell[0] == "R"),
            "budget_used": context + kinds.count("G"),
            "kv_fragmentation": 0.1,
        },
    }


def _spans(request: str, cells: list[str]) -> Iterable[dict[str, Any]]:
    outputs = 0
    span: dict[str, Any]
    for kind, group in groupby(enumerate(cells), key=lambda item: item[1][0]):
        if kind == ".":
            continue
        numbered = list(group)
        phase = PHASES[kind]
        chunks = [_tokens(cell) for _, cell in numbered]
        span = {
            "request_id": request,
            "phase": phase,
            "first_iteration": numbered[0][0],
            "last_iteration": numbered[-1][0],
            "tokens": sum(chunks),
            "cause": None,
        }
        if kind in "CR":
            span |= {"chunks": chunks, "produced": int(_completes(cells[numbered[-1][0] + 1 :], outputs))}
        if kind == "G":
            span |= {"first_output": int(numbered[0][1][1:]), "produced": len(numbered)}
        outputs += span.get("produced", 0)
        yield span


def _completes(later: list[str], outputs: int) -> bool:
    """Whether a context that these cells follow, and `outputs` tokens preceded, was run to its end and made a token.

    One that a pause cut short was not: the number of the next generation step then misses its token."""
    then = next((cell[0] for cell in later if cell[0] not in "ws"), ".")
    next_step = next((int(cell[1:]) for cell in later if cell[0] == "G"), outputs + 1)
    return then in ".G" or (then == "P" and next_step > outputs + 1)


def _request(index: int, request: str, cells: list[str], iterations: list[dict[str, Any]]) -> dict[str, Any]:
    ends = [row["ifbbench"]["start_s"] + row["ifbbench"]["latency_ms"] / 1000 for row in iterations]
    seen = [number for number, cell in enumerate(cells) if cell != "."]
    generated = [number for number in seen if cells[number][0] == "G"]
    working = [number for number in seen if cells[number][0] != "w"]
    resumed = [number for number, later in pairwise(working) if cells[number][0] == "R" != cells[later][0]]
    first_token = max(number for number in seen if cells[number][0] == "C")
    tokens = sorted([first_token, *resumed, *generated])
    arrival = iterations[seen[0]]["ifbbench"]["start_s"]
    scheduled = iterations[next(number for number in seen if cells[number][0] == "C")]["ifbbench"]["start_s"]
    return {
        "request_id": request,
        "index": index,
        "arrival_s": arrival,
        "prompt_len": sum(_tokens(cells[number]) for number in seen if cells[number][0] == "C"),
        "output_len": len(tokens),
        "max_new_tokens": len(tokens),
        "queue_time_s": scheduled - arrival,
        "ttft_s": ends[tokens[0]] - arrival,
        "tpot_s": (ends[tokens[-1]] - ends[tokens[0]]) / (len(tokens) - 1) if len(tokens) > 1 else None,
        "e2e_s": ends[tokens[-1]] - arrival,
        "pauses": len(resumed),
        "recomputed_tokens": 0,
        "reused_tokens": 0,
        "attribution_s": {},
        "outcome": "completed",
        "error": None,
        "first_scheduled_s": scheduled,
        "first_token_s": ends[tokens[0]],
        "end_s": ends[tokens[-1]],
    }


class _Client:
    """One request of the generated run: its sizes and how far it is."""

    def __init__(self, dice: random.Random, arrival: int) -> None:
        self.arrival = arrival
        self.prompt, self.outputs = dice.randint(30, 900), dice.randint(20, 420)
        self.to_compute, self.cached, self.steps, self.paused = self.prompt, 0, 0, False

    @property
    def done(self) -> bool:
        return self.steps >= self.outputs

    def run(self, budget: int) -> str:
        if self.to_compute:
            chunk = min(self.to_compute, max(budget, 0))
            letter = "R" if self.paused else "C"
            self.to_compute -= chunk
            self.cached += chunk
            return f"{letter}{chunk}" if chunk else self.wait()
        self.steps += 1
        self.cached += 1
        self.paused = False
        return f"G{self.steps}"

    def wait(self) -> str:
        return "P" if self.paused and not self.cached else "w"

    def pause(self) -> str:
        self.to_compute, self.cached, self.paused = self.prompt + self.steps, 0, True
        return "P"


def _busy_timeline(requests: int, iterations: int, pool: int = 15000, batch: int = 48) -> dict[str, list[str]]:
    """First come, first served; the running request that came last is paused when the KV cache is full."""
    dice = random.Random(1)
    arrivals = sorted(dice.randrange(iterations * 4 // 5) for _ in range(requests))
    clients = [_Client(dice, arrival) for arrival in arrivals]
    timeline: dict[str, list[str]] = {f"r{number:03}": [] for number in range(requests)}
    while not all(client.done for client in clients):
        budget, now = 512, len(timeline["r000"])
        here = [client for client in clients if client.arrival <= now and not client.done][:batch]
        free = pool - sum(client.cached for client in here)
        running = [client for client in here if client.cached and not client.to_compute]
        victim = running[-1] if running and free < len(here) else None
        for client, cells in zip(clients, timeline.values(), strict=True):
            if client.done or client.arrival > now:
                cell = "."
            elif client not in here or (client.to_compute and client.to_compute + 250 > free):
                cell = client.wait()
            elif client is victim:
                cell = client.pause()
            else:
                cell = client.run(budget)
                budget -= _tokens(cell)
                free -= client.to_compute + _tokens(cell)
            cells.append(cell)
    return timeline
