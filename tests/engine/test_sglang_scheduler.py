"""SGLang's scheduler in the engine: many iterations at once are single ones, and requests read what was written for
them. That each decision is SGLang's own: see test_sglang_conformance."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event
from hypothesis import strategies as st

from ifbbench.engine.batch import Batch, CopyKind
from ifbbench.engine.drafts import DraftSettings
from ifbbench.engine.passes import NullExecutor
from ifbbench.engine.records import IterationRecord
from ifbbench.engine.request import Request
from ifbbench.kv.sequence import ReuseRules
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.sglang.admission import NONE_RUNNING, Need, PrefillPass, Running, Verdict
from ifbbench.schedulers.sglang.rules import SglangRules
from ifbbench.schedulers.sglang.scheduler import SglangScheduler
from ifbbench.settings.groups.sglang import EVICTION_POLICIES, HOST_WRITE_POLICIES, SCHEDULE_POLICIES
from ifbbench.settings.modes import Overlap
from tests.drawing import holds
from tests.engine.engine import Loop
from tests.engine.reuse_executor import VOCABULARY, greedy
from tests.engine.test_vllm_scheduler import WritesBeforeReading, requests
from tests.replay.test_fast_forward import config_of, files, run, trace_of

rules = st.builds(
    SglangRules,
    schedule_policy=st.sampled_from(SCHEDULE_POLICIES),
    conservativeness=st.sampled_from([0.3, 1.0, 2.0]),
    chunk_size=st.sampled_from([None, 8, 16, 64]),
    max_prefill_tokens=st.sampled_from([32, 512]),
    mixes_chunks=st.booleans(),
    eviction_policy=st.sampled_from(EVICTION_POLICIES),
    write_policy=st.sampled_from(HOST_WRITE_POLICIES),
    retracts_by_priority=st.booleans(),
    is_priority=st.booleans(),
    preemption_threshold=st.sampled_from([0.0, 0.3]),
    receive_interval=st.sampled_from([1, 1, 3, 10]),
    ignores_eos=st.booleans(),
    reserves_by_ratio=st.booleans(),
).flatmap(
    lambda rules: st.builds(replace, st.just(rules), preempts=st.booleans() if rules.is_priority else st.just(False))
)
limits = st.fixed_dictionaries(
    {
        "sglang": rules,
        "max_batch_size": st.integers(1, 8),
        "overlap": st.sampled_from([None, Overlap.ASYNC]),
        "num_host_blocks": st.sampled_from([0, 30, 200]),
        "reuse": st.sampled_from([ReuseRules(), ReuseRules(enabled=True), ReuseRules(enabled=True)]),
        "drafts": st.sampled_from(
            [DraftSettings(), DraftSettings(1, 0, (0.6,), 3), DraftSettings(3, 0, (0.9, 0.4), 5)]
        ),
    }
)


@holds(
    30,
    500,
    rows=requests,
    changes=limits,
    size=st.sampled_from([1, 2, 4, 8]),
    share=st.floats(1.2, 4.0),
    concurrency=st.sampled_from([None, None, 3]),
    every=st.sampled_from([1, 1, 4]),
)
def test_together_is_as_one_by_one(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Any],
    changes: dict[str, Any],
    size: int,
    share: float,
    concurrency: int | None,
    every: int,
) -> None:
    """share: of the pages of the longest sequence, so that there are retractions."""
    more: dict[str, Any] = {"tokens_per_block": size, "num_blocks": int(96 / size * share) + 1, "max_input_len": 95}
    if changes["drafts"].max_len:  # drafts do not run with overlap
        more["overlap"] = None
    config, trace = config_of(engine="sglang", **(changes | more)), trace_of(rows)
    folder = tmp_path_factory.mktemp("runs")
    run(trace, config, folder / "apart", together=False, concurrency=concurrency, every=every)
    recorder = run(trace, config, folder / "together", together=True, concurrency=concurrency, every=every)
    event(f"advanced together: {recorder.together > 0}")
    assert files(folder / "together") == files(folder / "apart")


@pytest.mark.parametrize(("by_ratio", "reserved"), [(False, 90 + 40), (True, (90 + 40) * 0.1)])
def test_what_running_requests_that_ignore_the_end_token_reserve(by_ratio: bool, reserved: float) -> None:
    """All of the rest of their outputs, or with `reserve_by_ratio` a share of it: then a further prompt is tried behind
    one of 15 tokens with 60 outputs. In both cases a new request must fit until each other one has ended."""
    running = Running([50, 70], [10, 60], [100, 100], [True, True])
    rules = SglangRules(ignores_eos=True, reserves_by_ratio=by_ratio)

    def judged(available: int, outputs: int) -> Verdict:
        batch = PrefillPass(rules, 1, lambda: available, running, 0.1, keeps_prefixes=False)
        assert batch.left == pytest.approx(available - reserved)
        return batch.judge(Need(15, 0, outputs, ignores_eos=True))[0]

    assert judged(200, 60) is (Verdict.CONTINUE if by_ratio else Verdict.NO_TOKEN)
    assert judged(100, 90) is Verdict.NO_TOKEN


def test_a_second_prompt_is_not_cut_in_a_batch(tmp_path: Path) -> None:
    """Request 5 is cut to whole pages beside a decode token, and leaves one token of the chunk. Request 6 ignores the
    end token, and its cut would not be aligned."""
    one = (0, 1, 1, 0, 0.5)
    rows = [one] * 4 + [(0, 1, 2, 0, 0.5), (0, 7, 1, 3, 0.5), (0, 2, 1, 0, 0.5)] + [one] * 5 + [(0, 5, 3, 0, 0.9)]
    rules = SglangRules(
        conservativeness=0.3,
        chunk_size=8,
        max_prefill_tokens=32,
        mixes_chunks=True,
        is_priority=True,
        ignores_eos=True,
    )
    config = config_of(
        engine="sglang", sglang=rules, max_batch_size=3, tokens_per_block=2, num_blocks=97, max_input_len=95
    )
    run(trace_of(rows), config, tmp_path / "run", together=False)
    assert len(files(tmp_path / "run")["requests.jsonl"].splitlines()) == len(rows)


class WithHostMemory(WritesBeforeReading):
    """Copies what a scheduler says between the memories of device and host, before a batch runs."""

    def __init__(self, tokens_per_block: int) -> None:
        super().__init__(tokens_per_block, [None])
        self._on_host: dict[tuple[int, int], tuple[int, int]] = {}

    def submit(self, batch: Batch) -> None:
        for copy in batch.copies:
            is_load = copy.kind is CopyKind.ONBOARD
            source, destination = (self._on_host, self._contents) if is_load else (self._contents, self._on_host)
            for offset in range(copy.num_tokens):
                destination[copy.destination, offset] = source[copy.source, offset]
        super().submit(batch)


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_pages_hold_what_requests_read(first: int) -> None:
    """Random prompts that go on with what others generate, requests that are stopped, caches that are often short, host
    memory for what they lose."""
    num_pauses = num_reused = num_loaded = 0
    for seed in range(first, first + 20):
        draw = random.Random(seed)
        size, longest, is_priority = draw.choice([1, 2, 4, 8]), draw.choice([20, 40, 80, 80]), draw.random() < 0.4
        config = BatchingConfig(
            "max_utilization",
            max_batch_size=draw.randint(1, 5),
            max_num_tokens=50,
            max_seq_len=longest,
            max_input_len=longest - 1,
            tokens_per_block=size,
            num_blocks=-(-longest // size) + 2 + draw.randint(0, 30) // size,
            num_host_blocks=draw.choice([0, 20, 100]),
            reuse=ReuseRules(enabled=draw.random() < 0.85),
            overlap=draw.choice([None, Overlap.ASYNC]),
            engine="sglang",
            sglang=SglangRules(
                draw.choice(SCHEDULE_POLICIES),
                conservativeness=draw.choice([0.1, 1.0]),
                chunk_size=draw.choice([None, 8, 16]),
                mixes_chunks=draw.random() < 0.4,
                eviction_policy=draw.choice(EVICTION_POLICIES),
                write_policy=draw.choice(HOST_WRITE_POLICIES),
                is_priority=is_priority,
                preempts=is_priority and draw.random() < 0.5,
                preemption_threshold=0.1,
                receive_interval=draw.choice([1, 1, 4]),
            ),
        )
        prompts: list[list[int]] = []
        for _ in range(draw.randint(1, 24)):
            if prompts and draw.random() < 0.6:
                before = draw.choice(prompts)
                prompt = (before + greedy(before, draw.randint(0, 10)))[: longest * 3 // 4]
            else:
                random_part = [draw.randrange(VOCABULARY) for _ in range(draw.randint(0, longest // 4))]
                prompt = [1] * draw.randint(1, longest // 2) + random_part
            prompts.append(prompt)
        arrivals = []
        for number, prompt in enumerate(prompts):
            priority = draw.choice([0.2, 0.5, 0.8]) if is_priority else 0.5
            new_tokens, tokens = draw.randint(1, longest - len(prompt)), np.array(prompt, np.int32)
            request = Request(number, len(prompt), new_tokens, prompt_tokens=tokens, index=number, priority=priority)
            arrivals.append((draw.randint(0, 20), request))
        arrivals.sort(key=lambda arrival: arrival[0])
        wanted = {request.request_id: request.max_new_tokens for _, request in arrivals}
        stops = {draw.randint(1, 30): [draw.randrange(len(arrivals))] for _ in range(draw.choice([0, 0, 2]))}
        loop = Loop(config, arrivals, WithHostMemory(size), stops).run(max_steps=4000)
        assert len(loop.completed) == len(arrivals), seed
        for request in loop.completed:
            if request not in loop.stopped:
                assert loop.tokens(request) == greedy(prompts[request.request_id], wanted[request.request_id]), seed
        scheduler = loop.manager.scheduler
        assert isinstance(scheduler, SglangScheduler)
        assert scheduler.cache_state().used_blocks == 0
        scheduler.kv_cache.check_consistency()
        num_pauses += sum(len(record.paused) for record in loop.records)
        num_reused += sum(request.reused_tokens for request in loop.completed)
        num_loaded += 0 if scheduler.kv_cache.host is None else scheduler.kv_cache.host.loaded
    assert num_pauses
    assert num_reused
    assert num_loaded


@pytest.mark.parametrize(("interval", "entered"), [(1, [0, 1, 4]), (3, [0, 1, 5]), (10, [0, 1, 12])])
def test_requests_are_received_in_each_so_many_decode_batches(interval: int, entered: list[int]) -> None:
    """Request 0 enters an idle engine, request 1 behind a prefill batch. Request 2 arrives before iteration 4;
    iteration 2 is behind a prefill batch, and the first of the decode batches."""
    config = BatchingConfig(
        "max_utilization",
        max_batch_size=4,
        max_num_tokens=50,
        max_seq_len=64,
        max_input_len=63,
        tokens_per_block=1,
        num_blocks=400,
        engine="sglang",
        sglang=SglangRules(receive_interval=interval),
    )
    arrivals = [(step, Request(number, 4, 20, index=number)) for number, step in enumerate((0, 1, 4))]
    loop = Loop(config, arrivals, NullExecutor()).run()
    first = {request.request_id: record.iteration for record in loop.records for request in record.activated}
    assert [first[number] for number in range(3)] == entered


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize(("rates", "per_step"), [((1.0,), 3), ((0.0,), 1), ((1.0, 0.0), 2)])
def test_a_decode_step_with_drafts_yields_the_accepted_ones_and_one_more(
    rates: tuple[float, ...], per_step: int, page: int
) -> None:
    config = BatchingConfig(
        "max_utilization",
        max_batch_size=4,
        max_num_tokens=50,
        max_seq_len=64,
        max_input_len=63,
        tokens_per_block=page,
        num_blocks=400 // page,
        reuse=ReuseRules(enabled=True),
        engine="sglang",
        sglang=SglangRules(),
        drafts=DraftSettings(2, 0, rates),
    )
    loop = Loop(config, [(0, Request(0, 5, 13, index=0))], NullExecutor()).run()
    decoded = [record for record in loop.records if record.num_generation]
    assert sum(yielded(record) for record in loop.records) == 13
    assert len(decoded) == -(-12 // per_step)
    assert {record.num_generation_tokens for record in decoded} == {3}
    cache = loop.manager.scheduler.cache_state()
    assert (cache.used_blocks, cache.filled_tokens) == (0, 0)


def test_caches_that_are_short_hold_requests_with_drafts() -> None:
    num_pauses = 0
    for seed in range(20):
        draw = random.Random(seed)
        size = draw.choice([1, 2, 4])
        config = BatchingConfig(
            "max_utilization",
            max_batch_size=draw.randint(2, 6),
            max_num_tokens=50,
            max_seq_len=60,
            max_input_len=59,
            tokens_per_block=size,
            num_blocks=draw.randint(70, 150) // size,
            engine="sglang",
            sglang=SglangRules(conservativeness=0.1, chunk_size=draw.choice([8, 32])),
            drafts=DraftSettings(draw.randint(1, 3), 0, (draw.random(), draw.random()), seed),
        )
        lengths = [(draw.randint(1, 30), draw.randint(1, 30)) for _ in range(12)]
        arrivals = [(draw.randint(0, 20), Request(number, *pair, index=number)) for number, pair in enumerate(lengths)]
        loop = Loop(config, sorted(arrivals, key=lambda one: one[0]), NullExecutor()).run()
        assert len(loop.completed) == len(lengths)
        assert sum(yielded(record) for record in loop.records) == sum(outputs for _, outputs in lengths)
        scheduler = loop.manager.scheduler
        assert isinstance(scheduler, SglangScheduler)
        cache = scheduler.cache_state()
        assert (cache.used_blocks, cache.filled_tokens) == (0, 0)
        scheduler.kv_cache.check_consistency()
        num_pauses += sum(len(record.paused) for record in loop.records)
    assert num_pauses


def yielded(record: IterationRecord) -> int:
    """Output tokens of an iteration."""
    accepted = record.drafts.accepted if record.drafts is not None else 0
    return record.num_generation + accepted + sum(chunk.is_last for chunk in record.context)


@pytest.mark.parametrize(("available", "verdict"), [(60, Verdict.NO_TOKEN), (200, Verdict.OTHER)])
def test_memory_is_judged_before_a_second_cut_is_refused(available: int, verdict: Verdict) -> None:
    batch = PrefillPass(SglangRules(chunk_size=32), 1, lambda: available, NONE_RUNNING, 1.0)
    assert batch.judge(Need(50, 0, 20), may_cut=False) == (verdict, 0)
