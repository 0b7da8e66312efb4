"""What `why` says of each request in SGLang's queue, in each iteration, is what the literal transcription of SGLang's
rules (`tests.engine.sglang_reference`) has: the prompt that was cut, or the first of the queue, and its limit."""

import json
import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ifbbench.analysis.recorded import RecordedRun
from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig
from tests.conformance.sglang_workloads import WORKLOADS
from tests.engine.sglang_reference import POLICIES, Batch, Reference, Request
from tests.live.recordings import holders_by_why

END_TOKEN = -1
Holder = tuple[int | None, str]


class Transcribed(Reference):
    """The transcription, of which each round begins when it did in a recorded run. Its outputs are like no prompt."""

    def token(self, request: Request) -> int:
        index = len(request.outputs) + request.pending
        request.pending += 1
        return END_TOKEN if index == request.output_len - 1 else 1000 * (request.number + 1) + index

    def holders(self, given: list[dict[str, Any]], run: RecordedRun) -> Iterator[dict[int, Holder]]:
        """What holds each request of the queue in each iteration of `run`: the request that it waits behind, None for
        none, and the limit; nothing for those that were retracted in it, where no limit held the queue."""
        to_come = deque(given)
        iterations, in_flight = run.iterations, deque[Batch]()
        alive, number, now_s = list[Request](), 0, 0.0
        while number < len(iterations):
            if not alive and not in_flight:
                now_s = max(now_s, to_come[0]["arrival_s"])
            come = [to_come.popleft() for one in list(to_come) if one["arrival_s"] <= now_s]
            for one in sorted(come, key=lambda one: -one["priority"]):  # as the client hands them out
                if not alive:
                    self.ratio = self.initial_ratio
                alive.append(request := self.receive(one))
                self.enter(request)
            batch = self.next_batch()
            if batch is not None:
                assert abs(float(iterations.start_s[number]) - now_s) < 1e-9, number
                self.launch(batch)
                in_flight.append(batch)
                holders = dict[int, Holder]()
                if (held := self.holder()) is not None:
                    first, limit = held
                    holders = {one.number: (None if one is first else first.number, limit) for one in self.queue}
                yield holders
                # With overlap, the next round begins when this batch is submitted and the one before has ended.
                before_s = 0.0 if not self.overlaps or not number else float(iterations.end_s[number - 1])
                submitted_s = float(iterations.start_s[number] + iterations.host_s[number])
                now_s = max(submitted_s, before_s) if self.overlaps else float(iterations.end_s[number])
                number += 1
            elif in_flight:
                now_s = float(iterations.end_s[number - 1])
            if in_flight and (not self.overlaps or self.last is not None):
                self.process(in_flight.popleft())
            self.last = batch
            alive = [request for request in alive if not request.is_finished]


def draw(seed: int) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """Settings of a workload, under the names of the transcription, and its requests with times of arrival."""
    drawn = random.Random(seed)
    case = WORKLOADS[drawn.choice(["mixed", "mixed", "chunks", "retractions"])](seed)
    settings, requests = case["settings"], case["requests"]
    has_priorities = settings["enable_priority_scheduling"]
    settings |= {
        "schedule_policy": drawn.choice([one for one in POLICIES if one != "lpm" or not has_priorities]),
        "disable_priority_preemption": True,
        "retraction_policy": settings["retraction_policy"] if has_priorities else "length",
    }
    if chunk := settings["chunked_prefill_size"]:
        settings["chunked_prefill_size"] = max(chunk // settings["page_size"], 1) * settings["page_size"]
    scale = drawn.choice([1e-5, 1e-4, 1e-3])
    for one in requests:
        one |= {
            "arrival_s": round(one["round"] * scale, 7),
            "priority": one["priority"] / 100 if has_priorities else 0.5,
        }
    return settings, sorted(requests, key=lambda one: (one["arrival_s"], one["id"]))


def simulated(settings: Mapping[str, Any], requests: list[dict[str, Any]], folder: Path) -> RecordedRun:
    rows = [
        {
            "request_id": one["id"],
            "arrival_s": one["arrival_s"],
            "prompt_len": len(one["prompt"]),
            "max_new_tokens": one["max_new_tokens"],
            "output_len": one["output_len"],
            "priority": one["priority"],
            "prefix_ids": one["prompt"],
            "prefix_lens": [1] * len(one["prompt"]),
        }
        for one in requests
    ]
    trace = folder / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chunk = settings["chunked_prefill_size"]
    names = [
        "schedule_policy",
        "schedule_conservativeness",
        "max_prefill_tokens",
        "prefill_max_requests",
        "enable_mixed_chunk",
        "disable_radix_cache",
        "radix_eviction_policy",
        "disable_overlap_schedule",
        "retraction_policy",
        "enable_priority_scheduling",
        "ignore_eos",
    ]
    if settings["enable_priority_scheduling"]:
        names.append("disable_priority_preemption")
    config = RunConfig(
        engine="sglang",
        device="sim:h100-sxm",
        model="tiny",
        max_seq_len=4096,
        max_batch_size=settings["max_running_requests"],
        tokens_per_block=settings["page_size"],
        max_tokens_in_paged_kvcache=settings["num_pages"] * settings["page_size"],
        enable_chunked_context=chunk is not None,
        max_num_tokens=chunk,
        enable_kv_cache_reuse=not settings["disable_radix_cache"],
        output=str(folder / "run"),
        **{name: settings[name] for name in names},
    )
    run_trace(str(trace), config)
    return RecordedRun.load(folder / "run")


@pytest.mark.parametrize("first", [0, *[pytest.param(first, marks=pytest.mark.slow) for first in range(20, 400, 20)]])
def test_each_waiting_request_waits_for_what_holds_the_queue(first: int, tmp_path: Path) -> None:
    seen = Counter[str]()
    for seed in range(first, first + 20):
        settings, requests = draw(seed)
        (tmp_path / str(seed)).mkdir()
        run = simulated(settings, requests, tmp_path / str(seed))
        expected = Transcribed(settings, END_TOKEN).holders(requests, run)
        for number, (found, holders) in enumerate(zip(holders_by_why(run), expected, strict=True)):
            assert {one: found.get(one) for one in holders} == holders, (seed, number)
            seen.update(limit for _, limit in holders.values())
    assert min(seen["num_tokens"], seen["batch_size"], seen["kv_blocks"]) > 100, seen
