"""What the tests and benchmarks of recordings read of a run directory."""

import json
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from click.testing import CliRunner

from ifbbench.analysis.explain import iteration_facts, request_life
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.analysis.waiting import HeadsOfLine
from ifbbench.cli.main import main
from ifbbench.live.events import Begin, End, Event, write
from ifbbench.rundir.rows import Id

# The limits that `allocate_slots` of vLLM may fail for, of which its answer does not say which.
BLOCKS = ("kv_blocks", "watermark", "full_prompt")


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
    """What each iteration ran and paused, the free blocks, which request it left out first and why, and how many
    requests were active, were in the queue and waited."""
    return [
        (
            line["Scheduled Requests"],
            line["ifbbench"]["budget_used"],
            line["Paused Requests"],
            line["Free KV cache blocks"],
            line["ifbbench"]["first_left_out"],
            line["Active Request Count"],
            line["ifbbench"]["queued"],
            line["ifbbench"]["waiting"],
        )
        for line in lines(directory, "iterations")
    ]


class Holder(NamedTuple):
    """What holds a request in an iteration: the request that it waits behind (None: itself is the first), and the
    limit. expected: by vLLM's own queue; found: what `why` says."""

    iteration: int
    request: str
    expected: tuple[str | None, str]
    found: tuple[str | None, str]


def holders_of(
    directory: Path, seen: Sequence[dict[str, Any]], max_num_seqs: int, budget: int, count: int, seed: int
) -> list[Holder]:
    """What holds a random waiting request in `count` random iterations, by `why` of a recording and by what a wrapper
    saw after each call of vLLM's `schedule`: its queue, `waiting`, how many were `running`, and which of these got only
    a part of what they have to compute, `cut`.

    Literally: all wait for a running request that was cut, whose rest took the budget. Else vLLM stops at the first
    request of its queue that it cannot start. It looks at none after a pre-emption (blocks), as soon as `max_num_seqs`
    run, or when no token of the budget is left; else `allocate_slots` failed."""
    names = {row["name"]: row["request_id"] for row in lines(directory, "requests")}
    of_id, run = {number: name for name, number in names.items()}, RecordedRun.load(directory)
    heads, rng, found = HeadsOfLine(run), random.Random(seed), list[Holder]()
    waiting = [number for number, step in enumerate(seen) if step["waiting"]]
    for number in rng.sample(waiting, min(count, len(waiting))):
        step = seen[number]
        name, first = rng.choice(step["waiting"]), [*step["cut"], *step["waiting"]][0]
        limit = "blocks"
        if step["cut"]:
            limit = "num_tokens"
        elif not step["preempted"] and step["running"] >= max_num_seqs:
            limit = "batch_size"
        elif not step["preempted"] and sum(tokens for _, tokens, _ in step["scheduled"]) >= budget:
            limit = "num_tokens"
        holder, why = held_by(run, heads, number, names[name])
        behind = None if holder is None else of_id[holder]
        why = "blocks" if why in BLOCKS else str(why)
        found.append(Holder(number, name, (None if name == first else first, limit), (behind, why)))
    return found


def held_by(run: RecordedRun, heads: HeadsOfLine, number: int, request: Id) -> tuple[Id | None, str | None]:
    """What `why` says of a request that waits in an iteration: the request that it waits behind (None: itself is the
    first), and the limit."""
    stretches = request_life(run, heads, request).stretches
    one = next(part for part in stretches if part.first <= number <= part.last and part.phase != "arrival")
    if one.phase != "paused":
        return one.behind, one.limit
    # A pre-empted request is in the queue again, and its span has another cause.
    facts = iteration_facts(run, number)
    head = facts.queue_head or facts.left_out
    assert head is not None
    return None if head[0] == request else head[0], head[1]


def holders_by_why(run: RecordedRun) -> list[dict[Any, tuple[Any, str | None]]]:
    """As `held_by`, for every request that waits in an iteration: a dictionary for each iteration. A request that lost
    its blocks waits, too, and for what the iteration says."""
    heads, found = HeadsOfLine(run), list[dict[Any, tuple[Any, str | None]]]({} for _ in run.iterations.number)
    facts = [iteration_facts(run, number) for number in run.iterations.number.tolist()]
    for request in run.row_of:
        for stretch in request_life(run, heads, request).stretches:
            for number in range(stretch.first, stretch.last + 1):
                if stretch.phase == "waiting":
                    found[number][request] = stretch.behind, stretch.limit
                elif stretch.phase == "paused" and (head := facts[number].queue_head or facts[number].left_out):
                    found[number][request] = None if head[0] == request else head[0], head[1]
    return found


def difference_of_why(directory: Path, steps: Sequence[dict[str, Any]]) -> tuple[int, str | None]:
    """The number of waiting requests of all iterations of SGLang, and the first of which `why` of a recording says
    something else than SGLang's own queue, or None.

    steps: of each iteration, the queue after the decision, `cut`, the request whose prompt was cut, and `limit`, why
    SGLang looked no further in its queue. Literally: all wait for the prompt that was cut, which took the tokens that
    the queue lacks, else for the first of the queue. A queue that nothing holds has only requests that have just lost
    their pages. Requests that were stopped before they ran have no spans."""
    rows, count = lines(directory, "requests"), 0
    ids = {row["name"]: row["request_id"] for row in rows}
    ran = {row["name"] for row in rows if row["first_scheduled_s"] is not None}
    for number, (found, step) in enumerate(zip(holders_by_why(RecordedRun.load(directory)), steps, strict=True)):
        holder = (step["queue"] or [None])[0]
        limit = step["limit"]
        if step["cut"] and limit in (None, "num_tokens"):
            holder, limit = step["cut"], "num_tokens"
        if limit is None:
            assert len(step["queue"]) <= step["lost"]
            continue
        expected = {name: (None if name == holder else ids[holder], limit) for name in step["queue"] if name in ran}
        count += len(expected)
        if (said := {name: found.get(ids[name]) for name in expected}) != expected:
            return count, f"iteration {number}: why says {said}, expected {expected}"
    return count, None


def first_difference(expected: Iterable[Any], found: Iterable[Any]) -> str | None:
    """The first iteration in which `found` is not what is expected, or None."""
    expected, found = list(expected), list(found)
    for number, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return f"iteration {number}: {other}, expected {one}"
    return None if len(expected) == len(found) else f"{len(found)} iterations, expected {len(expected)}"


def difference_of_replay(directory: Path, replayed: Path, engine: str) -> str | None:
    """The first iteration in which the replay of a recording decides something else, or None."""
    arguments = ["run", str(directory), "--engine", engine, "--output", str(replayed), "--quiet"]
    result = CliRunner().invoke(main, arguments)
    if result.exit_code:
        return f"the replay failed: {result.output}"
    if "recorded schedule" in result.output:
        return str(result.output)
    # What was in flight when a client stopped its request is in the lines, and not in the spans of a replay.
    stopped = {row["request_id"] for row in lines(directory, "trace") if "stopped_in" in row}
    one, other = (zip(decisions(path), batches(path, stopped), strict=True) for path in (directory, replayed))
    return first_difference(one, other)


class Kept:
    """A `Channel` to memory."""

    latest: "Kept"
    is_open = True

    def __init__(self, directory: Path, begin: Begin) -> None:
        self.frames = BytesIO()
        Kept.latest = self
        self.put(begin)

    def put(self, event: Event) -> bool:
        write(self.frames, event)
        return True

    def close(self, end: End) -> None:
        self.put(end)
