"""The page cache of LoRA adapters, and the engine's decisions by it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from ifbbench.engine.batch import NO_OUTPUTS, AdapterLoad, Batch, StepOutputs
from ifbbench.engine.loop import ExecutorFailed, TokenGenerationLoop
from ifbbench.engine.passes import NullExecutor
from ifbbench.engine.records import IterationRecord
from ifbbench.engine.request import Request
from ifbbench.engine.responses import Response
from ifbbench.engine.sampling_params import OutputOptions
from ifbbench.errors import InputError
from ifbbench.kv.adapters import AdapterCache, AdapterSize, LoraConfig
from ifbbench.schedulers.engines import make_loop
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.tensorrt_llm.policies import POLICY_CLASSES, Limit
from ifbbench.settings.modes import Overlap
from ifbbench.virtual_clock import VirtualClock
from tests.engine.engine import adapters_of

CONFIG = BatchingConfig(
    "guaranteed_no_evict",
    max_batch_size=8,
    max_num_tokens=64,
    max_seq_len=64,
    max_input_len=32,
    tokens_per_block=4,
    num_blocks=200,
)
WEIGHTS = np.zeros((1, 1), np.float32)


def are_on_device(cache: AdapterCache, tasks: Iterable[int]) -> bool:
    return set(tasks) <= set(cache._device)


@dataclass
class FakeSource:
    """Adapters of these numbers of pages; requests bring adapters of `brought_pages`."""

    stored: dict[int, int]
    brought_pages: int = 1
    brought: set[int] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)

    def tasks(self) -> list[int]:
        return list(self.stored)

    def size(self, task_id: int) -> AdapterSize | None:
        if task_id in self.brought:
            return AdapterSize(self.brought_pages, 10 * self.brought_pages, is_stored=False)
        pages = self.stored.get(task_id)
        return None if pages is None else AdapterSize(pages, 10 * pages)

    def add(self, task_id: int, weights: Any, config: Any) -> None:
        if config is None:
            raise InputError("a config is missing")
        self.brought.add(task_id)

    def keep(self, task_id: int) -> None:
        self.calls.append(f"keep {task_id}")

    def drop(self, task_id: int) -> None:
        self.calls.append(f"drop {task_id}")
        self.brought.discard(task_id)


def cache_of(stored: dict[int, int], device_pages: int, host_pages: int = 100, brought_pages: int = 1) -> AdapterCache:
    source = FakeSource(stored, brought_pages)
    return AdapterCache(LoraConfig(source, device_pages, host_pages, page_bytes=40, value_bytes=4))


def request_with(task_id: int | None, index: int = 0, brings: bool = False, **fields: Any) -> Request:
    options = OutputOptions(lora_weights=WEIGHTS, lora_config=np.zeros((1, 1), np.int32)) if brings else OutputOptions()
    return Request(index, 4, 6, index=index, lora_task_id=task_id, options=options, **fields)


def test_the_least_recently_used_adapter_is_evicted_that_the_batch_does_not_need() -> None:
    cache = cache_of({1: 2, 2: 1, 3: 2, 4: 3}, device_pages=5)
    assert [load.task_id for load in cache.use([1, 2, 3])] == [1, 2, 3]
    assert cache.use([1, 2]) == ()
    loads = cache.use([2, 4])
    assert [load.task_id for load in loads] == [4], "3 goes first, then 1"
    assert are_on_device(cache, [2, 4])
    assert not are_on_device(cache, [1])
    assert not are_on_device(cache, [3])
    cache.check_consistency()
    counters = cache.counters
    assert (counters.uses, counters.misses, counters.evictions, counters.loads) == (7, 4, 2, 0)
    assert counters.bytes == 4 * (20 + 10 + 20 + 30)
    assert counters.peak_device_pages == 5
    assert cache.figures()["hit_rate"] == pytest.approx(3 / 7)


def test_pages_of_a_batch_are_its_own() -> None:
    cache = cache_of({task: 1 + task % 3 for task in range(20)}, device_pages=9)
    for number in range(200):
        tasks = sorted({number % 20, (7 * number) % 20, (3 * number + 1) % 20})
        cache.use(tasks)
        assert are_on_device(cache, tasks)
        cache.check_consistency()


def test_adapters_that_are_not_in_host_memory_are_read_again() -> None:
    cache = cache_of({1: 2, 2: 2, 3: 2}, device_pages=2, host_pages=4)
    source = cache.config.source
    assert isinstance(source, FakeSource)
    assert source.calls == ["keep 1", "keep 2"]
    (load,) = cache.use([3])
    assert load == AdapterLoad(3, load.pages, from_host=False, is_kept=True)
    assert source.calls[2:] == ["drop 1"], "the least recently used one"
    assert cache.use([2])[0].from_host
    assert not cache.use([1])[0].from_host
    assert (cache.counters.loads, cache.counters.host_evictions) == (2, 2)
    without_host = cache_of({1: 2}, device_pages=2, host_pages=1)
    assert without_host.use([1])[0] == AdapterLoad(1, (0, 1), from_host=False, is_kept=False)


def test_a_brought_adapter_stays_while_a_request_uses_it() -> None:
    cache = cache_of({}, device_pages=4, host_pages=2)
    first, second, third = (request_with(task, brings=True) for task in (1, 2, 3))
    for request in (first, second):
        assert cache.refusal(request) is None
        cache.hold(request)
    refusal = cache.refusal(third)
    assert refusal is not None
    assert "LoRA task 3 needs 1 pages of host memory, and no adapter can be evicted" in refusal
    cache.use([1])
    cache.release(first)
    assert cache.refusal(third) is None
    unknown = cache.refusal(request_with(1))
    assert unknown is not None
    assert "LoRA task 1 is unknown, or was evicted" in unknown
    assert not are_on_device(cache, [1])
    cache.check_consistency()


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (request_with(9), "LoRA task 9 is unknown"),
        (request_with(7), "LoRA task 7 needs 5 pages of device memory; there are 4"),
        (replace_config := request_with(8, brings=True), "a config is missing"),
    ],
    ids=["unknown", "too large", "invalid"],
)
def test_refusals(request_: Request, error: str) -> None:
    if request_ is replace_config:
        request_.options = replace(request_.options, lora_config=None)
    found = cache_of({7: 5}, device_pages=4).refusal(request_)
    assert found is not None
    assert error in found


class Recording(NullExecutor):
    """Notes the batches; fails in those of `failing`."""

    def __init__(self, failing: Sequence[int] = ()) -> None:
        self.batches: list[Batch] = []
        self._failing = failing

    def submit(self, batch: Batch) -> None:
        if batch.iteration in self._failing:
            raise RuntimeError("no device")
        self.batches.append(batch)


class FailingWhenCollected(Recording):
    """Fails when the iterations of `failing` are collected, while others are in flight."""

    def __init__(self, failing: Sequence[int]) -> None:
        super().__init__()
        self._fails, self._collected = failing, 0

    def collect(self) -> StepOutputs:
        self._collected += 1
        if self.batches[self._collected - 1].iteration in self._fails:
            raise RuntimeError("no memory")
        return NO_OUTPUTS


class Records:
    """An observer that keeps the records."""

    def __init__(self) -> None:
        self.records: list[IterationRecord] = []

    def iteration(self, record: IterationRecord) -> None:
        self.records.append(record)

    def stretch(self, stretch: Any) -> None:
        self.records += stretch.records()

    def left(self, request: Request, error: str | None) -> None: ...


def run(
    config: BatchingConfig, requests: list[Request], lora: LoraConfig, executor: Recording | None = None
) -> tuple[TokenGenerationLoop, Records, dict[int, Response]]:
    waiting, answers, records = list(requests), dict[int, Response](), Records()

    def get_requests(count: int) -> list[Request]:
        taken = waiting[:count]
        del waiting[:count]
        return taken

    loop = make_loop(
        replace(config, lora=lora),
        executor or Recording(),
        VirtualClock(),
        get_requests,
        lambda response: answers.update({response.request.request_id: response}),
        records,
    )
    working = True
    while working:
        try:
            working = loop.step()
        except ExecutorFailed:
            continue
    assert len(answers) == len(requests)
    adapters_of(loop).check_consistency()
    return loop, records, answers


@pytest.mark.parametrize("policy", [*POLICY_CLASSES, "contiguous"])
def test_requests_wait_for_pages(policy: str) -> None:
    """Tasks of 2, 2 and 1 pages on a device of 3: those with the second task wait for the first to end."""
    lora = LoraConfig(FakeSource({0: 2, 1: 2, 2: 1}), 3, 100, 40, 4)
    requests = [request_with(task, index) for index, task in enumerate([0, 1, 0, None, 2, 1])]
    config = replace(CONFIG, policy=policy) if policy != "contiguous" else replace(CONFIG, is_contiguous=True)
    loop, records, answers = run(config, requests, lora)
    assert all(response.error is None for response in answers.values())
    first = records.records[0]
    ran = [chunk.request.request_id for chunk in first.context]
    # The walk of MAX_UTILIZATION ends with the first request that does not fit.
    assert sorted(ran) == ([0] if policy == "max_utilization" else [0, 2, 3, 4])
    assert first.left_out is not None
    assert (first.left_out.request.request_id, first.left_out.limit) == (1, Limit.LORA_PAGES)
    assert adapters_of(loop).counters.evictions > 0


def test_max_utilization_pauses_for_pages() -> None:
    """A request of higher priority with another adapter takes the pages of one that has started."""
    lora = LoraConfig(FakeSource({0: 2, 1: 2}), 2, 100, 40, 4)
    late = request_with(1, 1, priority=0.9)
    requests: list[Request] = [request_with(0, 0)]

    class Late(Recording):
        def submit(self, batch: Batch) -> None:
            super().submit(batch)
            if batch.iteration == 2:
                waiting.append(late)

    waiting, answers, records = requests, list[Response](), Records()
    loop = make_loop(
        replace(CONFIG, policy="max_utilization", lora=lora),
        Late(),
        VirtualClock(),
        lambda count: [waiting.pop(0)] if waiting else [],
        answers.append,
        records,
    )
    while loop.step():
        pass
    (pause,) = [pause for record in records.records for pause in record.paused]
    assert (pause.victim.request_id, pause.limit) == (0, Limit.LORA_PAGES)
    assert [response.request.request_id for response in answers] == [1, 0]


def test_batches_have_their_adapters_and_loads() -> None:
    lora = LoraConfig(FakeSource({5: 1, 6: 1}), 2, 100, 40, 4)
    executor = Recording()
    _, records, _ = run(CONFIG, [request_with(task, index) for index, task in enumerate([6, None, 5])], lora, executor)
    first, second = executor.batches[:2]
    assert first.adapters is not None
    assert [load.task_id for load in first.adapters.loads] == [5, 6]
    assert second.adapters is not None
    assert second.adapters.tasks.tolist() == [-1, 5, 6], "by task id, none first"
    assert second.adapters.loads == ()
    assert [len(record.loads) for record in records.records] == [2, 0, 0, 0, 0, 0]


def test_after_an_error_adapters_are_loaded_again() -> None:
    """What the device holds is unknown then."""
    lora = LoraConfig(FakeSource({5: 1}), 2, 100, 40, 4)
    executor = Recording(failing=[1])
    limits = replace(CONFIG, max_batch_size=1)
    _, _, answers = run(limits, [request_with(5, index) for index in range(2)], lora, executor)
    assert answers[0].error is not None
    assert answers[1].error is None
    loads = [batch.adapters.loads for batch in executor.batches if batch.adapters]
    assert [len(each) for each in loads] == [1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "changes", [{"overlap": Overlap.PARTITIONED}, {"overlap": Overlap.ASYNC}, {"pp_size": 2}], ids=str
)
def test_what_is_in_flight_behind_a_failed_load_fails_too(changes: dict[str, Any]) -> None:
    """Iteration 1 needs the adapter that iteration 0 was to copy."""
    lora = LoraConfig(FakeSource({5: 1}), 2, 100, 40, 4)
    limits = replace(CONFIG, max_batch_size=2, **changes)
    executor = FailingWhenCollected([0])
    _, _, answers = run(limits, [request_with(5, index) for index in range(3 * limits.max_active)], lora, executor)
    failed = [index for index, response in answers.items() if response.error is not None]
    assert failed == list(range(limits.max_active))
    loads = [batch.iteration for batch in executor.batches if batch.adapters and batch.adapters.loads]
    assert loads == [0, 2, 3], "after each failure what the device holds is unknown"
