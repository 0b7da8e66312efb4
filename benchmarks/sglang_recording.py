"""SGLang's scheduler, recorded while it runs: each recorded iteration beside SGLang's own, and the replay beside both.

Runs where SGLang 0.5.23 can be imported, beside this project's dependencies; docs/live.md has the commands. SGLang's
event loops run (`event_loop_normal` and `event_loop_overlap`), with its own plugins: the recorder is found by its entry
point. Replaced are the model, the processes around the scheduler, and what reports (`benchmarks.sglang_oracle`).
`python -m benchmarks.sglang_recording random [--count 100] [--seed 0]` records random workloads with aborts, and
replays each recording; `cost [--running 256]` measures what the recorder adds to an iteration in the engine's process.
Each prints one JSON object; exit status 1 for a difference. `keep FILE` writes the events of some of these workloads,
with SGLang's own decisions, for tests that need no SGLang.
"""

import argparse
import ast
import gzip
import inspect
import json
import logging
import os
import random
import sys
import tempfile
import textwrap
import time
import tomllib
from base64 import b64encode
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.sglang_oracle import Nothing, Original, launch, make_request, publish_settings
from ifbbench.live import notes
from ifbbench.live import sglang as recording
from ifbbench.live.channel import Channel
from ifbbench.live.notes import RECORD
from tests.conformance.sglang import MAX_LEN, MAX_ROUNDS
from tests.conformance.sglang_workloads import draw_case, draw_retractions
from tests.live.recordings import (
    Kept,
    batches,
    decisions,
    difference_of_replay,
    difference_of_why,
    first_difference,
    lines,
)

KEPT_SEEDS = 106, 123, 110, 23, 25


def load_plugins(folder: Path) -> None:
    """Let SGLang load its plugins, ifbbench's among them: from a package description with the entry points of
    pyproject.toml, so that ifbbench need not be installed."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (group, points), *_ = project["entry-points"].items()
    description = folder / "ifbbench_here-0.dist-info"
    description.mkdir()
    (description / "METADATA").write_text("Metadata-Version: 2.1\nName: ifbbench-here\nVersion: 0\n")
    written = "".join(f"{name} = {value}\n" for name, value in points.items())
    (description / "entry_points.txt").write_text(f"[{group}]\n{written}")
    sys.path.append(str(folder))
    from sglang.srt.plugins import load_plugins as load

    load()


class PassEnd:
    """Why SGLang's latest pass over its queue ended, by the line of its source that ended it: a tracer sees the lines
    that run while the context is open.

    limit: None if all requests of the queue were taken. It stays as it is if no pass is begun.
    """

    FUNCTION = "_get_new_batch_prefill_raw"

    def __init__(self) -> None:
        self.limit: str | None = None
        scheduler = Original.__mro__[1]  # SGLang's
        self._file = inspect.getsourcefile(scheduler)
        lines, first = inspect.getsourcelines(inspect.unwrap(getattr(scheduler, self.FUNCTION)))
        tree = ast.parse(textwrap.dedent("".join(lines)))
        breaks = sorted(node.lineno for node in ast.walk(tree) if isinstance(node, ast.Break))
        spent, full, judged = [first - 1 + line for line in breaks]
        begin = next(number for number, line in enumerate(lines, first) if "self.policy.calc_priority(" in line)
        no_slot = next(number for number, line in enumerate(lines, first) if line.endswith(".batch_is_full = True\n"))
        self._at = {begin: None, no_slot: "batch_size", spent: "num_tokens", full: "batch_size", judged: "verdict"}

    def __enter__(self) -> None:
        sys.settrace(self._called)

    def __exit__(self, *_error: Any) -> None:
        sys.settrace(None)

    def _called(self, frame: Any, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        return self._ran if code.co_name == self.FUNCTION and code.co_filename == self._file else None

    def _ran(self, frame: Any, event: str, _argument: Any) -> Any:
        if event == "line" and frame.f_lineno in self._at:
            self.limit = self._at[frame.f_lineno]
            if self.limit == "verdict":
                self.limit = "kv_blocks" if frame.f_locals["res"].name == "NO_TOKEN" else "num_tokens"
        return self._ran


class Served(Original):
    """SGLang's scheduler in its own event loop, with one workload.

    steps: what it ran, seen from `run_batch`: tokens of each request, how many requests had lost their pages, free
    pages with those that can be evicted, the request whose prompt was cut, the queue, and why no more of it was taken.
    """

    def __init__(self, case: dict[str, Any], aborts: Sequence[tuple[int, int]] = (), is_traced: bool = True) -> None:
        from sglang.srt.runtime_context import get_parallel

        settings = case["settings"]
        super().__init__(settings)
        del self.send_abort_output  # SGLang's own
        self.settings, self._given = settings, {one["id"]: one for one in case["requests"]}
        self._to_come = deque(sorted(case["requests"], key=lambda one: (one["round"], one["id"])))
        self._aborts = deque(sorted(aborts))
        self._turn, self._num_lost, self._alive = 0, 0, dict[str, Any]()
        self._pending_chunked_abort_req = self.mm_receiver = None
        self._engine_paused = False
        self.schedule_stream = SimpleNamespace()
        self.device_module = SimpleNamespace(StreamContext=lambda _stream: nullcontext())
        self.server_args = SimpleNamespace(
            enable_pd_role_switch=False, model_path="m", scheduler_recv_interval=1, tp_size=1, pp_size=1, **settings
        )
        self.model_config.context_len = MAX_LEN
        get_parallel().override_permanently(attn_tp_rank=0, attn_cp_rank=0, pp_rank=0)
        for name in ("start_scheduler_time_accounting", "log_batch_result_stats", "update_device_timer"):
            setattr(self.metrics_reporter, name, Nothing())
        self._pass, self._is_traced = PassEnd(), is_traced
        self.steps: list[dict[str, Any]] = []

    def _get_new_batch_prefill_raw(self, *arguments: Any) -> Any:
        with self._pass if self._is_traced else nullcontext():
            return super()._get_new_batch_prefill_raw(*arguments)

    def process_pending_chunked_abort(self) -> None:
        super(Original, self).process_pending_chunked_abort()

    def _record_step_counters(self, batch: Any, result: Any) -> None:
        """Only counts."""

    def publish_load_snapshot(self, force: bool = False) -> None:
        """Only reports."""

    def maybe_send_health_check_signal(self) -> None:
        """Only reports."""

    def on_idle(self) -> None:
        """What decides something in it is done as soon as a request comes: it is not called for a turn or two."""

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        self._num_lost += req.rid in self._alive
        super()._add_request_to_queue(req, is_retracted)

    def ingest_requests(self, stop_at_pause: bool = False) -> list[Any]:
        """The requests of this turn, and those that their clients stop. The loop ends with the last request."""
        from sglang.srt.managers.io_struct import AbortReq

        self._alive = {rid: req for rid, req in self._alive.items() if not req.finished()}
        while self._to_come and self._to_come[0]["round"] <= self._turn:
            one = self._to_come.popleft()
            if not self._alive:
                self.new_token_ratio_tracker.reset()
            request = make_request(one, self.settings)
            self._add_request_to_queue(request)
            self._alive[request.rid] = request
        while self._aborts and self._aborts[0][0] <= self._turn:
            rid = f"{self._aborts.popleft()[1]:06}"
            if rid in self._alive:
                self.abort_request(AbortReq(rid=rid))
        self.gracefully_exit = not (self._alive or self._to_come) or self._turn > MAX_ROUNDS
        self._turn += 1
        return []

    def send_abort_output(self, abort_req: Any, req: Any) -> None:
        super().send_abort_output(abort_req, req)
        self._alive.pop(req.rid, None)

    def run_batch(self, batch: Any) -> Any:
        seen = launch(self, batch, self._given)
        _, result = self.result_queue.pop()
        result.delay_sample_func = None
        tokens = {f"{number:06}": count for number, _, count in seen["prefill"]}
        tokens |= {f"{number:06}": 1 for number in seen["decode"]}
        free = (seen["free"] + seen["evictable"]) // self.page_size
        self.steps.append(
            {
                "tokens": tokens,
                "lost": self._num_lost,
                "free": free,
                "cut": None if self.chunked_req is None else self.chunked_req.rid,
                "queue": [f"{number:06}" for number in seen["queue"]],
                "limit": self._pass.limit,
            }
        )
        self._num_lost = 0
        return result


def draw_recorded(seed: int) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """A workload, and aborts of some of its requests: turn, request. A third of the workloads retracts requests: few
    are expected to need the outputs that all of them have. Of the others, those with
    priorities pre-empt."""
    case, rng = draw_case(seed) if seed % 3 else draw_retractions(seed), random.Random(seed)
    settings, requests = case["settings"], case["requests"]
    if seed % 3 and settings["enable_priority_scheduling"]:
        settings |= {"max_running_requests": 3, "disable_priority_preemption": False, "enable_mixed_chunk": False}
    chosen = rng.sample(requests, rng.randint(0, len(requests) // 5))
    return case, [(one["round"] + rng.randint(0, 30), one["id"]) for one in chosen]


def record(
    case: dict[str, Any], aborts: Sequence[tuple[int, int]], directory: Path, is_traced: bool = True
) -> list[dict[str, Any]]:
    """Run a workload through SGLang's scheduler, recorded in `directory`; returns what was run. is_traced: with
    limits, which takes time."""
    os.environ[RECORD] = str(directory)
    scheduler = Served(case, aborts, is_traced)
    scheduler.run_event_loop()
    return scheduler.steps


def difference_of_recording(directory: Path, steps: list[dict[str, Any]]) -> str | None:
    """The first iteration in which a recording differs from SGLang's own, or None."""
    expected = [(len(step["tokens"]), sum(step["tokens"].values()), step["lost"], step["free"]) for step in steps]
    if (found := first_difference(expected, [line[:4] for line in decisions(directory)])) is not None:
        return found
    names = {row["request_id"]: row["name"] for row in lines(directory, "requests")}
    named = [{names[number]: count for number, count in batch.items()} for batch in batches(directory)]
    # Spans have no step too many of a request that has ended by then.
    known = [
        {name: count for name, count in step["tokens"].items() if name in batch}
        for step, batch in zip(steps, named, strict=True)
    ]
    return first_difference(known, named)


def check_random(count: int, first_seed: int) -> int:
    """Record and replay random workloads."""
    totals = {"workloads": 0, "iterations": 0, "lost their pages": 0, "stopped": 0, "waiting": 0, "replayed": 0}
    differences = dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first_seed, first_seed + count):
            case, aborts = draw_recorded(seed)
            directory = Path(folder) / str(seed)
            steps = record(case, aborts, directory)
            num_waiting, by_why = difference_of_why(directory, steps)
            found = difference_of_recording(directory, steps) or by_why
            found = found or difference_of_replay(directory, Path(folder) / f"{seed}-replayed", "sglang")
            if found:
                differences[case["name"]] = found
            totals["workloads"] += 1
            totals["iterations"] += len(steps)
            totals["lost their pages"] += sum(step["lost"] for step in steps)
            totals["stopped"] += sum("stopped_in" in row for row in lines(directory, "trace"))
            totals["waiting"] += num_waiting
            totals["replayed"] += 1
            described = {"iterations": len(steps), "lost": sum(step["lost"] for step in steps), "difference": found}
            print(case["name"], json.dumps(described), file=sys.stderr, flush=True)
    print(json.dumps(totals | {"differences": differences}, indent=1))
    return 1 if differences else 0


def keep(target: Path, seeds: Sequence[int]) -> int:
    """Write events and decisions of random workloads as JSON: [{kind, events (base64), steps}]."""
    setattr(notes, Channel.__name__, Kept)
    kept = list[dict[str, Any]]()
    for seed in seeds:
        steps = record(*draw_recorded(seed), target)
        events = b64encode(Kept.latest.frames.getvalue()).decode()
        kept.append({"name": f"sglang-{seed}", "events": events, "steps": steps})
    with gzip.open(target, "wt", encoding="utf-8") as file:
        json.dump(kept, file)
    return 0


def cost_case(running: int, iterations: int) -> dict[str, Any]:
    """`running` requests that generate for so many iterations."""
    case = draw_case(0)
    case["settings"] |= {
        "page_size": 1,
        "num_pages": running * (iterations + 32),
        "max_running_requests": running,
        "chunked_prefill_size": 8192,
        "max_prefill_tokens": 16_384,
        "prefill_max_requests": None,
        "enable_mixed_chunk": False,
        "disable_overlap_schedule": False,
        "disable_radix_cache": False,
        "schedule_policy": "fcfs",
        "enable_priority_scheduling": False,
        "disable_priority_preemption": True,
        "schedule_conservativeness": 1.0,
    }
    case["requests"] = [
        {
            "id": number,
            "round": 0,
            "prompt": [number % 900 + 100] * 16,
            "max_new_tokens": iterations,
            "output_len": iterations,
            "priority": 0,
        }
        for number in range(running)
    ]
    return case


def measure_cost(running: int, iterations: int, rounds: int) -> int:
    """Processor time that the engine's thread spends in notes, an iteration."""
    noted, spent_s, found = recording._Hooks._note, [0.0], list[float]()

    def timed(self: Any, *arguments: Any) -> None:
        begun_s = time.thread_time()
        noted(self, *arguments)
        spent_s[0] += time.thread_time() - begun_s

    setattr(recording._Hooks, noted.__name__, timed)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            spent_s[0] = 0.0
            steps = record(cost_case(running, iterations), (), Path(folder) / str(number), is_traced=False)
            found.append(spent_s[0] / len(steps) * 1e6)
    print(json.dumps({"running": running, "us_per_iteration": [round(value, 1) for value in sorted(found)]}, indent=1))
    return 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("random", "cost", "keep"))
    parser.add_argument("file", type=Path, nargs="?", help="keep: the file to write")
    parser.add_argument("--count", type=int, default=100, help="random: workloads (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="random: seed of the first one (default 0)")
    parser.add_argument("--running", type=int, default=256, help="cost: running requests (default 256)")
    parser.add_argument("--iterations", type=int, default=400, help="cost: iterations of a round (default 400)")
    parser.add_argument("--rounds", type=int, default=5, help="cost: rounds of each (default 5)")
    options = parser.parse_args(arguments)
    logging.disable(logging.INFO)
    logging.getLogger("sglang.srt").setLevel(logging.ERROR)
    publish_settings()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[RECORD] = folder
        load_plugins(Path(folder))
    if options.what == "cost":
        return measure_cost(options.running, options.iterations, options.rounds)
    if options.what == "keep":
        return keep(options.file, KEPT_SEEDS)
    return check_random(options.count, options.seed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
