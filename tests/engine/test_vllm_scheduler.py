"""vLLM's scheduler in the engine: many iterations at once are single ones, and tokens do not depend on the scheduler.

That each decision is vLLM's own: see tests/conformance."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from ifbbench.build.engine import build_engine, generate
from ifbbench.engine.batch import Batch
from ifbbench.engine.request import Request
from ifbbench.kv.sequence import ReuseRules
from ifbbench.schedulers.tensorrt_llm.config import BatchingConfig
from ifbbench.schedulers.vllm.blocks import BlockPool
from ifbbench.schedulers.vllm.rules import VllmRules
from ifbbench.settings.config import RunConfig
from ifbbench.settings.modes import Overlap
from tests.engine.engine import Loop
from tests.engine.reuse_executor import VOCABULARY, ReuseExecutor, greedy, states_of
from tests.replay.test_fast_forward import config_of, files, run, trace_of

requests = st.lists(
    st.tuples(
        st.one_of(st.just(0), st.integers(0, 4000)),  # arrival, microseconds
        st.integers(1, 49),
        st.integers(1, 29),
        st.sampled_from([0, 0, 0, 3, 8]),
        st.sampled_from([0.5, 0.5, 0.9]),
    ),
    min_size=2,
    max_size=13,
)
rules = st.builds(
    VllmRules,
    is_priority=st.booleans(),
    max_scheduled_tokens=st.sampled_from([None, None, 5]),
    max_active=st.sampled_from([None, None, 2]),
    long_prefill_threshold=st.sampled_from([0, 0, 7]),
    is_threshold_adaptive=st.booleans(),
    reserves_full_prompt=st.booleans(),
    watermark_blocks=st.sampled_from([0, 0, 2]),
)
limits = st.fixed_dictionaries(
    {
        "vllm": rules,
        "max_batch_size": st.integers(1, 8),
        "max_num_tokens": st.sampled_from([8, 16, 33, 64]),
        "overlap": st.sampled_from([None, Overlap.ASYNC]),
        "reuse": st.sampled_from([ReuseRules(), ReuseRules(enabled=True), ReuseRules(enabled=True)]),
    }
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=requests,
    changes=limits,
    size=st.sampled_from([1, 2, 4, 8]),
    share=st.floats(1.05, 4.0),
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
    """share: of the blocks of the longest sequence, so that there are pre-emptions."""
    more = {"tokens_per_block": size, "num_blocks": int(96 / size * share) + 1, "max_input_len": 95}
    config, trace = config_of(engine="vllm", chunk_unit=1, **more, **changes), trace_of(rows)
    folder = tmp_path_factory.mktemp("runs")
    run(trace, config, folder / "apart", together=False, concurrency=concurrency, every=every)
    recorder = run(trace, config, folder / "together", together=True, concurrency=concurrency, every=every)
    event(f"advanced together: {recorder.together > 0}")
    assert files(folder / "together") == files(folder / "apart")


PROMPTS = [[7] * 30 + [number] * 10 for number in range(6)]


def outputs(**changes: Any) -> list[list[int]]:
    config = RunConfig(device="cpu", tokens_per_block=4, max_seq_len=128, warm_up=0, **changes)
    engine = build_engine(config)
    try:
        return [tokens.tolist() for tokens in generate(engine, PROMPTS, 24)]
    finally:
        engine.executor.close()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"async_scheduling": True},
        {"enable_kv_cache_reuse": True, "max_num_tokens": 24},
        {"num_gpu_blocks_override": 40, "scheduler_reserve_full_isl": False},
        {"num_gpu_blocks_override": 40, "async_scheduling": True, "enable_kv_cache_reuse": True},
        {"draft_ngram": 3, "num_gpu_blocks_override": 60},
    ],
)
def test_tokens_are_those_of_any_scheduler(changes: dict[str, Any]) -> None:
    given = {"enable_chunked_context": True, "max_num_tokens": 64, "max_batch_size": 16}
    assert outputs(engine="vllm", **given | changes) == outputs(**given)


def test_the_free_queue_is_that_of_vllm() -> None:
    """Blocks without content are taken first, then the least recently released, tails before heads."""
    pool = BlockPool(6)
    first, second = pool.take(3), pool.take(2)
    assert (first, second) == ([0, 1, 2], [3, 4])
    for block, content in zip(first, (10, 11, 12), strict=True):
        pool.set_hash(block, content)
    pool.set_hash(3, 10)  # the same content as block 0
    pool.release(reversed(first))
    pool.release(reversed(second))
    assert pool.find(10) == 0
    assert pool.take(2) == [4, 5]
    pool.hold([2])
    assert pool.take(1) == [1]
    assert (pool.find(11), pool.find(12)) == (None, 2)
    assert pool.take(2) == [0, 3]
    assert (pool.find(10), pool.num_free) == (None, 0)


def test_blocks_are_counted_as_a_list_would_count_them() -> None:
    """Random operations beside a plain list of free blocks."""
    draw, pool, free = random.Random(3), BlockPool(30), list(range(30))
    content: dict[int, int] = {}
    held: list[list[int]] = []
    for number in range(2000):
        if held and (draw.random() < 0.5 or len(free) < 5):
            blocks = held.pop(draw.randrange(len(held)))
            pool.release(blocks)
            free = [block for block in blocks if block not in content] + free
            free += [block for block in blocks if block in content]
        else:
            taken = pool.take(count := draw.randint(1, 5))
            assert taken == free[:count]
            del free[:count]
            for block in taken:
                content.pop(block, None)
                if draw.random() < 0.6:
                    pool.set_hash(block, content.setdefault(block, number))
            held.append(taken)
        assert pool.num_free == len(free)
        assert all(pool.find(value) is not None for value in content.values())


def test_positions_of_a_drafted_step_are_of_its_first_token(tmp_path: Path) -> None:
    """A run with drafts completes, and counts as many tokens as one without."""
    from ifbbench.replay.run import run_trace

    common: dict[str, Any] = {"device": "sim:h100-sxm", "model": "llama-3.1-8b", "engine": "vllm", "max_num_samples": 9}
    common |= {"enable_chunked_context": True, "max_batch_size": 8}
    drafted = run_trace("chat", RunConfig(acceptance_rate="0.7", draft_len=3, output=str(tmp_path / "a"), **common))
    plain = run_trace("chat", RunConfig(output=str(tmp_path / "b"), **common))
    tokens = [one.summary["output_tokens"] for one in (drafted, plain)]
    assert tokens[0] == tokens[1]
    assert drafted.summary["duration_s"] < plain.summary["duration_s"]
    assert np.isfinite(drafted.summary["tpot_s"]["mean"])


class WritesBeforeReading(ReuseExecutor):
    """All positions of a batch are written before any is read, as in a layer of a model: a prompt may begin with a
    block that a generation request of the same batch fills."""

    def submit(self, batch: Batch) -> None:
        work: list[tuple[int, int, bool]] = []
        for chunk in batch.context:
            slot = chunk.request.slot
            self._tokens[slot] = chunk.request.tokens_between(0, chunk.start + chunk.length).tolist()
            work.append((slot, chunk.start, chunk.is_last))
        for slot, position in zip(batch.slots.tolist(), batch.positions.tolist(), strict=True):
            assert len(self._tokens[slot]) == position + 1
            work.append((slot, position, True))
        held = [
            (position, slot, (int(batch.block_tables[slot, 0, position // self._size]), position % self._size), state)
            for slot, _, _ in work
            for position, state in enumerate(states_of(self._tokens[slot]))
        ]
        starts = {slot: start for slot, start, _ in work}
        for position, slot, index, state in held:
            if position >= starts[slot]:
                self._device[index] = state
        for position, slot, index, state in held:
            assert self._device.get(index) == state, f"position {position} of slot {slot} holds another one's content"
        self._answers.append([self._next(slot) for slot, _, is_last in work if is_last])


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_blocks_hold_what_requests_read(first: int) -> None:
    """Random prompts that go on with what others generate, requests that are stopped, caches that are often short."""
    num_pauses = num_reused = 0
    for seed in range(first, first + 20):
        draw = random.Random(seed)
        size, longest, is_priority = draw.choice([1, 2, 4, 8]), draw.choice([20, 40]), draw.random() < 0.4
        config = BatchingConfig(
            "max_utilization",
            max_batch_size=draw.randint(1, 5),
            max_num_tokens=draw.choice([5, 12, 50]),
            max_seq_len=longest,
            max_input_len=longest - 1,
            tokens_per_block=size,
            num_blocks=-(-longest // size) + draw.randint(0, 30) // size,
            chunk_unit=4,
            reuse=ReuseRules(enabled=draw.random() < 0.85),
            overlap=draw.choice([None, Overlap.ASYNC]),
            engine="vllm",
            vllm=VllmRules(
                is_priority,
                reserves_full_prompt=draw.random() < 0.5,
                long_prefill_threshold=draw.choice([0, 0, 3]),
                watermark_blocks=draw.choice([0, 0, 1]),
            ),
        )
        prompts: list[list[int]] = []
        for _ in range(draw.randint(1, 12)):
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
        loop = Loop(config, arrivals, WritesBeforeReading(size), stops).run(max_steps=4000)
        assert len(loop.completed) == len(arrivals)
        for request in loop.completed:
            if request not in loop.stopped:
                assert loop.tokens(request) == greedy(prompts[request.request_id], wanted[request.request_id])
        assert loop.manager.scheduler.cache_state().used_blocks == 0
        num_pauses += sum(len(record.paused) for record in loop.records)
        num_reused += sum(request.reused_tokens for request in loop.completed)
    assert num_pauses
    assert num_reused
