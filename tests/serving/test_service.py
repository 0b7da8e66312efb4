"""The service without HTTP: failing engines, requests stopped in the queue, the paced clock, synthetic tokens."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ifbbench.build.engine import Engine
from ifbbench.engine.batch import Batch, StepOutputs
from ifbbench.engine.passes import NullExecutor
from ifbbench.errors import InputError
from ifbbench.serving.answers import Answer, Choice
from ifbbench.serving.library.batch_manager import BatchManagerFailed
from ifbbench.serving.library.client import Tensors
from ifbbench.serving.library.request import InferenceRequest
from ifbbench.serving.protocol import CompletionRequest
from ifbbench.serving.server import serving_engine
from ifbbench.serving.service import Generation, QueueFull, Service, ServiceEnded, SyntheticTokens
from ifbbench.serving.statistics import ABORT, ERROR, LENGTH, Histogram, LiveStatistics
from ifbbench.serving.texts import Texts
from ifbbench.settings.config import RunConfig
from ifbbench.virtual_clock import MAX_LAG_S, PacedClock

PROMPT = InferenceRequest(0, [1, 2, 3], 6, exclude_input_from_output=True)
NULL = RunConfig(device="null", max_batch_size=2, max_tokens_in_paged_kvcache=4096)


def engine_of(config: RunConfig) -> Engine:
    """One with nothing to be closed."""
    with serving_engine(config) as engine:
        return engine


class Failing(NullExecutor):
    """Fails in every batch, and waits for `may_fail` before."""

    def __init__(self) -> None:
        self.may_fail = False

    def collect(self) -> StepOutputs:
        while not self.may_fail:
            time.sleep(0.001)
        raise RuntimeError("the device is gone")


class Waiting(NullExecutor):
    """Takes a moment for each batch. may_go_on: what it waits for in its third one."""

    def __init__(self, may_go_on: threading.Event | None = None) -> None:
        self._may_go_on, self._batches = may_go_on, 0

    def submit(self, batch: Batch) -> None:
        self._batches += 1
        if self._may_go_on is not None and self._batches == 3:
            assert self._may_go_on.wait(300)
        time.sleep(0.002)


def slow_engine(may_go_on: threading.Event | None = None) -> Engine:
    engine = engine_of(NULL.with_values(max_batch_size=1))
    return replace(engine, executor=SyntheticTokens(Waiting(may_go_on), [65], engine.limits.num_slots))


def run(use: Callable[[Service], Awaitable[None]], engine: Engine, max_queue_size: int = 10) -> LiveStatistics:
    """`use` a service of `engine`, and close it."""
    statistics = LiveStatistics()

    async def main() -> None:
        service = Service(engine, statistics, max_queue_size)
        try:
            await use(service)
        finally:
            await service.close()

    asyncio.run(main())
    return statistics


async def ended(generations: list[Generation]) -> None:
    for _ in range(60_000):
        if all(one.is_done for one in generations):
            return
        await asyncio.sleep(0.005)
    raise AssertionError("requests have not ended")


def test_requests_run_to_their_end() -> None:
    async def use(service: Service) -> None:
        generations = service.submit([PROMPT, replace(PROMPT, streaming=True)])
        await ended(generations)
        whole, streamed = ([token for tokens in one.take() for token in tokens.ids] for one in generations)
        assert bytes(whole) == bytes(streamed) == b"This i"
        assert service.num_live == service.num_queued == 0

    statistics = run(use, engine_of(NULL))
    assert statistics.finished[LENGTH] == 2
    assert statistics.generation_tokens == 12


def test_a_failed_engine_answers_all_and_takes_no_more() -> None:
    executor = Failing()
    engine = replace(engine_of(NULL), executor=executor)

    async def use(service: Service) -> None:
        generations = service.submit([PROMPT] * 20)
        executor.may_fail = True
        while service.is_running:
            await asyncio.sleep(0.005)
        service.fail_queued()
        await ended(generations)
        assert all(one.error for one in generations)
        with pytest.raises(ServiceEnded):
            service.submit([PROMPT])

    with pytest.raises(BatchManagerFailed, match="the device is gone"):
        run(use, engine, max_queue_size=100)


class FullDisk:
    """A recording that cannot write what it has once nothing is active."""

    def arrived(self, request: InferenceRequest, arrival_s: float) -> None:
        pass

    def idle(self) -> None:
        raise OSError("no space left on device")


def test_a_recording_that_cannot_be_written_ends_the_service(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        service = Service(engine_of(NULL), LiveStatistics(), 10, FullDisk())
        while not service.has_failed:
            await asyncio.sleep(0.01)
        with pytest.raises(ServiceEnded):
            service.submit([PROMPT])
        with pytest.raises(BatchManagerFailed, match="no space left on device"):
            await service.close()

    asyncio.run(main())
    assert "Traceback" not in caplog.text


def test_higher_priorities_run_first() -> None:
    """Also before requests that the engine has fetched, and those of one priority in order of arrival."""
    all_are_there = threading.Event()  # before it, the first request does not end
    engine = slow_engine(all_are_there)
    order: list[int] = []

    class Noted(Generation):
        def respond(self, tensors: Tensors, is_final: bool, error: str) -> None:
            super().respond(tensors, is_final, error)
            order.append(self.request.request_id)

    async def use(service: Service) -> None:
        first = service.submit([replace(PROMPT, max_new_tokens=40)], Noted)
        while not service.statistics.latest:
            await asyncio.sleep(0.001)
        # More than the engine fetches in advance.
        low = service.submit([PROMPT] * 20, Noted)
        high = service.submit([replace(PROMPT, priority=0.9)] * 12 + [replace(PROMPT, priority=2.0)], Noted)
        all_are_there.set()
        await ended([*first, *low, *high])

    statistics = run(use, engine, max_queue_size=50)
    assert statistics.finished[LENGTH] == 34
    assert order == [0, 33, *range(21, 33), *range(1, 21)]


def test_requests_stopped_in_the_queue_never_run() -> None:
    engine = slow_engine()

    async def use(service: Service) -> None:
        (running,) = service.submit([replace(PROMPT, max_new_tokens=2000)])
        waiting = service.submit([PROMPT] * 15)
        service.cancel(waiting)
        await ended(waiting)
        assert not running.is_done
        assert all(not one.take() and not one.error for one in waiting)
        service.cancel([running])
        service.cancel([running])
        await ended([running])

    statistics = run(use, engine, max_queue_size=20)
    assert statistics.finished[ABORT] == 16
    assert statistics.finished[ERROR] == statistics.finished[LENGTH] == 0
    assert statistics.num_waiting == 0
    assert sum(statistics.ttft_s.counts) <= 1


def test_closing_stops_what_runs_and_what_waits() -> None:
    engine = slow_engine()
    generations: list[Generation] = []

    async def use(service: Service) -> None:
        generations.extend(service.submit([replace(PROMPT, max_new_tokens=1000)] * 12))

    statistics = run(use, engine, max_queue_size=20)
    assert statistics.finished[ABORT] == 12


def test_a_request_arrives_when_it_was_received_but_after_the_latest_fetch() -> None:
    async def use(service: Service) -> None:
        (first,) = service.submit([PROMPT])
        while not first.is_done:
            await first.changed.wait()
            first.changed.clear()
        received_s = service.real_now()
        await asyncio.sleep(0.002)
        late, too_late = (service.submit([PROMPT], received_s=seconds)[0] for seconds in (received_s, 0.0))
        assert first.arrival_s < received_s <= late.arrival_s + 1e-9
        assert late.arrival_s <= too_late.arrival_s <= service.real_now() + 1e-9

    statistics = run(use, slow_engine())
    assert statistics.delivery_lag_s.num_deliveries > 0
    assert 0 <= statistics.delivery_lag_s.summary()["mean"] <= statistics.delivery_lag_s.summary()["max"]


@pytest.mark.parametrize("num_drafts", [1, 4, 20])
def test_draft_tokens_of_a_client_on_a_device_without_tokens(num_drafts: int) -> None:
    """As Triton's input draft_input_ids. The request and those beside it have the tokens that they have without."""
    config = NULL.with_values(acceptance_rate="0.5")
    drafted = replace(PROMPT, draft_input_ids=[9] * num_drafts, streaming=True, return_log_probs=True)

    async def use(service: Service) -> None:
        generations = service.submit([drafted, PROMPT, drafted])
        await ended(generations)
        for one in generations:
            assert one.error == ""
            assert [token for part in one.take() for token in part.ids] == sample[: PROMPT.max_new_tokens]
        assert service.is_running

    sample = list(b"This is")
    assert run(use, engine_of(config)).finished[LENGTH] == 3


def test_an_answer_whose_generation_begins_again_has_the_tokens_of_its_last_attempt_only() -> None:
    async def use() -> dict[str, Any]:
        tokenizer, body = Texts("tiny", 4096).tokenizer, CompletionRequest(prompt="a", return_token_ids=True)
        generation = Generation(PROMPT, 0.0, asyncio.Event())
        choice = Choice(0, generation, tokenizer, body, 6)
        answer = Answer(body, "tiny", "1", 0, [choice], 3, [], lambda stopped: None, lambda number, outputs: None)
        asked = asyncio.create_task(answer.complete())
        for begins_again, text, is_final in ((0, "He", False), (1, "Hel", False), (1, "lo!", True)):
            if begins_again > generation.restarts:
                generation.restart(PROMPT, 1.0)
            ids = np.array([[tokenizer.encode(text, add_special_tokens=False)]])
            length = np.array([[ids.shape[2]]])
            tensors = {"output_ids": ids, "sequence_length": length, "reused_tokens": np.array([[0]])}
            generation.respond(tensors, is_final, "")
            await asyncio.sleep(0)  # the answer takes it
            await asyncio.sleep(0)
        return await asked

    answer = asyncio.run(use())
    assert answer["choices"][0]["text"] == "Hello!"
    assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"] == 6


def test_limits() -> None:
    async def use(service: Service) -> None:
        with pytest.raises(QueueFull, match="--max_queue_size is 2"):
            service.submit([PROMPT] * 3)
        with pytest.raises(InputError, match="max_input_len"):
            service.check(replace(PROMPT, input_ids=[1] * 9000))

    assert run(use, engine_of(NULL.with_values(max_seq_len=20_000)), max_queue_size=2).finished[LENGTH] == 0


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The real time, which only sleeping and the test move on."""
    now = [100.0]
    monkeypatch.setattr("ifbbench.clock.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("ifbbench.clock.time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_a_paced_clock_waits_for_real_time_and_keeps_to_its_own(wall: list[float]) -> None:
    clock = PacedClock()
    clock.advance(3_000_000)
    assert clock.real_now() == 0.0, "the time of the host is not waited for"
    clock.wait_until_ns(10_000_000)
    assert clock.real_now() == pytest.approx(0.01)
    wall[0] += 0.004  # the host needs time
    clock.wait_until_ns(20_000_000)
    assert clock.real_now() == pytest.approx(0.02), "a host that is quick enough does not delay the device"
    assert clock.now_ns == 20_000_000


def test_a_paced_clock_moves_on_when_the_host_is_too_late(wall: list[float]) -> None:
    clock = PacedClock()
    wall[0] += MAX_LAG_S / 2
    clock.wait_until_ns(1_000_000)
    assert clock.now_ns == 1_000_000
    wall[0] += MAX_LAG_S
    clock.wait_until_ns(2_000_000)
    assert clock.now() == pytest.approx(clock.real_now())
    assert clock.num_skips == 1
    assert clock.skipped_ns == pytest.approx(1.5 * MAX_LAG_S * 1e9 - 2_000_000)
    clock.restart()
    assert clock.num_skips == clock.skipped_ns == 0


def test_buckets_of_a_histogram_are_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.add(value)
    histogram.add(2.0, times=3)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 6.0), ("+Inf", 7.0)]
    assert histogram.sum == pytest.approx(16.0)
