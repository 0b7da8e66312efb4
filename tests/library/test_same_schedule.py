"""The schedule is the same with the worker thread, without it, and when all requests stream."""

import random
from typing import Any

import pytest

from ifbbench.engine.records import IterationRecord, ScheduleDigest
from ifbbench.serving.library.client import Callbacks
from tests.engine.engine import CheckingExecutor
from tests.library.client import Client
from tests.library.managers import TOKENS_PER_BLOCK, manager_of, request_of

# With chunks, for without them a request that may be paused cannot stream.
PAUSES: dict[str, Any] = {"policy": "max_utilization", "enable_chunked_context": True}
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("V1", {}),
    ("InflightBatching", PAUSES),
    ("InflightFusedBatching", PAUSES),
    ("InflightFusedBatching", {**PAUSES, "enable_trt_overlap": True}),
    ("InflightFusedBatching", {}),
]


class Schedule:
    """The digest of a run and its pauses, taken from the callback of its iterations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.digest = ScheduleDigest()
        self.pauses = 0
        original = Callbacks.iteration

        def iteration(callbacks: Callbacks, record: IterationRecord) -> None:
            for request in record.activated:
                request.index = request.request_id
            self.digest.add(record)
            self.pauses += len(record.paused)
            original(callbacks, record)

        monkeypatch.setattr(Callbacks, "iteration", iteration)


def run(model_type: str, options: dict[str, Any], starts: bool, streaming: bool) -> tuple[list, str, int]:
    """The executor's frames, the schedule's digest and the number of pauses; all requests are there at first."""
    choose = random.Random(8)
    client = Client(
        request_of(index, choose.randint(1, 20), choose.randint(1, 15), streaming=streaming, priority=choose.random())
        for index in range(60)
    )
    executor = CheckingExecutor(TOKENS_PER_BLOCK)
    with pytest.MonkeyPatch.context() as monkeypatch:
        schedule = Schedule(monkeypatch)
        manager_of(
            client, executor, model_type=model_type, start=starts, kv_cache_config={"max_tokens": 60}, **options
        ).close()
    assert [answer.error for answer in client.answers] == [""] * 60
    return executor.frames, schedule.digest.hexdigest(), schedule.pauses


@pytest.mark.parametrize(("model_type", "options"), WAYS)
def test_neither_the_thread_nor_streams_change_the_schedule(model_type, options):
    by_hand = run(model_type, options, starts=False, streaming=False)
    assert run(model_type, options, starts=True, streaming=False) == by_hand
    assert run(model_type, options, starts=True, streaming=True) == by_hand
    assert run(model_type, options, starts=False, streaming=True) == by_hand
    assert (by_hand[2] > 0) == (options.get("policy") == "max_utilization")


def test_the_digest_tells_schedules_apart():
    digests = {run(model_type, options, starts=False, streaming=False)[1] for model_type, options in WAYS}
    assert len(digests) > 2
