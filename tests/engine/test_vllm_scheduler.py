"""vLLM's scheduler in the engine: many iterations at once are single ones, and tokens do not depend on the scheduler.

That each decision is vLLM's own: see tests/conformance."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event
from hypothesis import strategies as st

from ifbbench.build.engine import build_engine, generate
from ifbbench.engine.batch import Batch
from ifbbench.engine.passes import NullExecutor
from ifbbench.engine.request import Request, RequestTable, ReuseIdentity
from ifbbench.engine.sampling_params import StopConditions
from ifbbench.kv.sequence import ReuseRules
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.vllm.blocks import BlockPool
from ifbbench.schedulers.vllm.cache import VllmCache
from ifbbench.schedulers.vllm.rules import VllmRules
from ifbbench.settings.config import RunConfig
from ifbbench.settings.modes import Overlap
from ifbbench.workload.trace import TraceRequest
from tests.drawing import holds
from tests.engine.engine import Loop
from tests.engine.reuse_executor import VOCABULARY, ReuseExecutor, greedy, states_of
from tests.replay.test_fast_forward import config_of, files, run, trace_of, without_tokens

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
    spares_single=st.booleans(),
    takes_new_first=st.booleans(),
    reserves_full_prompt=st.booleans(),
    watermark_blocks=st.sampled_from([0, 0, 2]),
    windows=st.sampled_from([(None,), (None,), (5,), (None, 9), (None, 6, 6), (4, 30)]),
    retention_interval=st.sampled_from([0, 8, None]),
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


@holds(
    40,
    500,
    rows=requests,
    changes=limits,
    size=st.sampled_from([1, 2, 4, 8]),
    share=st.floats(1.05, 4.0),
    concurrency=st.sampled_from([None, None, 3]),
    every=st.sampled_from([1, 1, 4]),
    prompts=st.lists(
        st.tuples(st.sampled_from([0, 0, 5, 12]), st.integers(1, 2), st.sampled_from([False] * 9 + [True])),
        min_size=13,
        max_size=13,
    ),
    says_shared=st.booleans(),
)
def test_together_is_as_one_by_one(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Any],
    changes: dict[str, Any],
    size: int,
    share: float,
    concurrency: int | None,
    every: int,
    prompts: list[tuple[int, int, bool]],
    says_shared: bool,
) -> None:
    """share: of the blocks of the longest sequence, so that there are pre-emptions. prompts: of each request, how many
    first tokens it has in common with others, with which, and whether its end depends on what its tokens are.

    Iterations that run one by one have ids of blocks from the start, those that run together where one can be found."""

    def make(index: int, row: TraceRequest) -> Request:
        common, number, reads_tokens = prompts[index]
        common, own = min(common, row.prompt_len - 1), -1000 * (index + 1)
        runs = [(1000 * number, common), (own, row.prompt_len - common)][common == 0 :]
        reuse = ReuseIdentity(runs=runs, output_symbol=own + 500, num_shared=common if says_shared else None)
        return without_tokens(index, row, reuse=reuse, stop=StopConditions((), ((3, 4),) * reads_tokens))

    num_blocks = len(changes["vllm"].windows) * (int(96 / size * share) + 2)
    more = {"tokens_per_block": size, "num_blocks": num_blocks, "max_input_len": 95}
    config, trace = config_of(engine="vllm", chunk_unit=1, **more, **changes), trace_of(rows)
    folder = tmp_path_factory.mktemp("runs")
    run(trace, config, folder / "apart", together=False, concurrency=concurrency, every=every, make=make)
    recorder = run(trace, config, folder / "together", together=True, concurrency=concurrency, every=every, make=make)
    event(f"advanced together: {recorder.together > 0}")
    assert files(folder / "together") == files(folder / "apart")


def test_requests_beyond_the_budget_are_recorded_as_held(tmp_path: Path) -> None:
    """Once a request has left, the share of a long prompt grows, so that one that generates gets no token."""
    rules = VllmRules(max_scheduled_tokens=12, long_prefill_threshold=1, is_threshold_adaptive=True)
    config = config_of(engine="vllm", vllm=rules, max_num_tokens=40, max_input_len=95, chunk_unit=1)
    run(trace_of([(0, 90, 3, 0, 0.5), *[(0, 1, 20, 0, 0.5)] * 3, (0, 1, 3, 0, 0.5)]), config, tmp_path, together=True)
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {line["request_id"]: line["output_len"] for line in lines} == {0: 3, 1: 20, 2: 20, 3: 20, 4: 3}
    assert "skipped" in lines[-1]["attribution_s"]


PROMPTS = [[7] * 30 + [number] * 10 for number in range(6)]


def outputs(**changes: Any) -> list[list[int]]:
    config = RunConfig(device="cpu", tokens_per_block=4, max_seq_len=128, warm_up=0, **changes)
    engine = build_engine(config)
    try:
        return [tokens.tolist() for tokens in generate(engine, PROMPTS, 24)]
    finally:
        engine.executor.close()


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"async_scheduling": True},
        {"enable_kv_cache_reuse": True, "max_num_tokens": 24},
        {"num_gpu_blocks_override": 40, "scheduler_reserve_full_isl": False},
        {"num_gpu_blocks_override": 40, "async_scheduling": True, "enable_kv_cache_reuse": True},
        {"draft_ngram": 3, "num_gpu_blocks_override": 60},
        {"max_attention_window": "12"},
        {"max_attention_window": "12,16384", "enable_kv_cache_reuse": True, "max_num_tokens": 24},
        {"max_attention_window": "8,8,8,16384", "num_gpu_blocks_override": 160, "async_scheduling": True},
        {"max_attention_window": "8,20,16384", "draft_ngram": 3, "prefix_cache_retention_interval": None},
        {"max_attention_window": "30,16384", "prefix_cache_retention_interval": 8, "num_gpu_blocks_override": 70},
    ],
)
def test_tokens_are_those_of_any_scheduler(changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {"enable_chunked_context": True, "max_num_tokens": 64, "max_batch_size": 16}
    windows = {"max_attention_window": changes.get("max_attention_window"), "window_mode": "linear"}
    assert outputs(engine="vllm", **given | changes) == outputs(**given | windows)


def test_the_free_queue_is_that_of_vllm() -> None:
    """Blocks without content are taken first, then the least recently released, tails before heads."""
    pool = BlockPool(6)
    pool.give_ids([], [])
    (first, _), (second, _) = pool.take(3), pool.take(2)
    assert (first.tolist(), second.tolist()) == ([0, 1, 2], [3, 4])
    pool.set_hashes(first, [10, 11, 12])
    pool.set_hashes(second[:1], [10])  # the same content as block 0
    pool.release(first[::-1])
    pool.release(second[::-1])
    assert pool.find(10) == 0
    assert pool.take(2)[0].tolist() == [4, 5]
    pool.hold(np.array([2]))
    taken, num_new = pool.take(1)
    assert (taken.tolist(), num_new) == ([1], 0)
    assert (pool.find(11), pool.find(12)) == (None, 2)
    assert pool.take(2)[0].tolist() == [0, 3]
    assert (pool.find(10), pool.num_free) == (None, 0)


@pytest.mark.parametrize("takes_new_first", [True, False])
def test_blocks_are_those_of_a_plain_list(takes_new_first: bool) -> None:
    """Random operations beside a plain list of free blocks, the contents of each block in the order in which they came,
    and the references of each."""
    draw, pool, free, num_new = random.Random(3), BlockPool(30, takes_new_first), list(range(30)), 0
    pool.give_ids([], [])
    content: dict[int, int] = {}
    references = [0] * 30
    held: list[list[int]] = []
    for number in range(4000):
        if held and (draw.random() < 0.45 or len(free) < 5):
            blocks = held.pop(draw.randrange(len(held)))
            pool.release(np.array(blocks))
            for block in blocks:
                references[block] -= 1
            released = [block for block in blocks if not references[block]]
            if takes_new_first:
                free = [block for block in released if block not in content] + free
                released = [block for block in released if block in content]
            free += released
        elif content and draw.random() < 0.3:
            blocks = draw.sample(list(content), draw.randint(1, min(4, len(content))))
            pool.hold(np.array(blocks))
            for block in blocks:
                references[block] += 1
            free = [block for block in free if block not in blocks]
            held.append(blocks)
        else:
            blocks = free[: draw.randint(1, 5)]
            del free[: len(blocks)]
            taken, new = pool.take(len(blocks))
            assert taken.tolist() == blocks
            is_new = [block not in content for block in blocks]
            assert new == sum(is_new)
            assert not takes_new_first or is_new == [index < new for index in range(len(blocks))]
            num_new += new
            for block in blocks:
                references[block] = 1
                content.pop(block, None)
            hashed, shared = draw.randint(0, len(blocks)), draw.sample(range(6), 5)
            values = [draw.choice([10 * number + 10, 0]) + shared[index] for index in range(hashed)]
            pool.set_hashes(taken[:hashed], values)
            content.update(zip(blocks, values, strict=False))
            held.append(blocks)
        assert pool.num_free == len(free)
        assert {value: pool.find(value) for value in content.values()} == {
            value: block for block, value in reversed(content.items())
        }
    pool.check_consistency(np.array(references))
    assert pool.counters.allocated_new == num_new


@pytest.mark.parametrize("lengths", [[40], [16, 24], [5, 35], [4, 4, 32], [1] * 40])
def test_hashes_of_blocks_do_not_depend_on_when_they_are_made(lengths: list[int]) -> None:
    """Of prompts of symbolic tokens that have all their tokens at once, or that go on with what follows later."""
    runs = [(1000 * number, length) for number, length in enumerate(lengths)]
    cache, table = VllmCache(VllmRules(), 60, 4, 4, 128, reuses=True, max_in_flight=64), RequestTable(4)
    first = Request(0, 40, 8, reuse=ReuseIdentity(runs=runs))
    first.enter(table, 0)
    cache.start(first, cache.lookup(first))
    cache.grow(first.slot, 10)
    for tokens in (3, 9, 21, 22, 40):
        cache.set_hashes(first, tokens)
    for count in range(1, 41):
        kept, left = [], count
        for number, length in runs:
            if left > 0:
                kept.append((number, min(length, left)))
                left -= length
        other = Request(count, count + 1, 8, reuse=ReuseIdentity(runs=[*kept, (-7, 1)]))
        assert cache.lookup(other).num_blocks == count // 4


def test_content_that_is_not_shared_needs_no_index() -> None:
    """Requests that say which tokens only they have run as if all had hashes; pre-empted ones find their own blocks."""
    num_resumed_with_blocks = 0
    for seed in range(12):
        records = _records_with_shared_prefixes(seed, says_shared=True)
        assert records == _records_with_shared_prefixes(seed, says_shared=False)
        paused = {victim for _, victims, _ in records for victim in victims}
        num_resumed_with_blocks += sum(start > 12 for chunks, _, _ in records for row, start in chunks if row in paused)
    assert num_resumed_with_blocks


def _records_with_shared_prefixes(seed: int, says_shared: bool) -> list[Any]:
    """Each iteration has its chunks, the pre-empted requests, and the blocks."""
    draw = random.Random(seed)
    size = draw.choice([1, 2, 4])
    config = BatchingConfig(
        "max_utilization",
        max_batch_size=5,
        max_num_tokens=draw.choice([12, 50]),
        max_seq_len=40,
        max_input_len=39,
        tokens_per_block=size,
        num_blocks=(48 + draw.randint(0, 40)) // size,
        chunk_unit=4,
        reuse=ReuseRules(enabled=True),
        overlap=draw.choice([None, Overlap.ASYNC]),
        engine="vllm",
        vllm=VllmRules(reserves_full_prompt=False),
    )
    arrivals = []
    for number in range(12):
        shared, own, first_own = draw.choice([0, 5, 12]), draw.randint(1, 12), -1000 * (number + 1)
        runs = [(1000 * draw.randint(1, 2), shared), (first_own, own)]
        reuse = ReuseIdentity(runs=runs, output_symbol=first_own + 500, num_shared=shared if says_shared else None)
        request = Request(number, shared + own, draw.randint(1, 16), index=number, reuse=reuse)
        arrivals.append((draw.randint(0, 20), request))
    arrivals.sort(key=lambda arrival: arrival[0])
    return [
        (
            [(chunk.request.request_id, chunk.start) for chunk in record.context],
            [pause.victim.request_id for pause in record.paused],
            (record.cache.used_blocks, record.cache.allocated_new, record.cache.reused),
        )
        for record in Loop(config, arrivals, NullExecutor()).run(max_steps=4000).records
    ]


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
    """All positions of a batch are written before any that a query sees is read, as in a layer of a model: a prompt may
    begin with a block that a generation request of the same batch fills. Layers of all groups have one memory."""

    def __init__(self, tokens_per_block: int, windows: Sequence[int | None]) -> None:
        super().__init__(tokens_per_block)
        self._windows = windows
        self._contents: dict[tuple[int, int], tuple[int, int]] = {}

    def submit(self, batch: Batch) -> None:
        work: list[tuple[int, int, bool]] = []
        for chunk in batch.context:
            slot = chunk.request.slot
            self._tokens[slot] = chunk.request.tokens_between(0, chunk.start + chunk.length).tolist()
            work.append((slot, chunk.start, chunk.is_last))
        for slot, position in zip(batch.slots.tolist(), batch.positions.tolist(), strict=True):
            assert len(self._tokens[slot]) == position + 1
            work.append((slot, position, True))
        starts = {slot: start for slot, start, _ in work}
        tables = (batch.block_tables, *batch.window_tables)
        for group, (window, table) in enumerate(zip(self._windows, tables, strict=True)):
            held = [
                (position, slot, (int(table[slot, 0, position // self._size]), position % self._size), (group, state))
                for slot, start, _ in work
                for position, state in enumerate(states_of(self._tokens[slot]))
                if window is None or position > start - window
            ]
            for position, slot, index, state in held:
                if position >= starts[slot]:
                    self._contents[index] = state
            for position, slot, index, state in held:
                assert self._contents.get(index) == state, f"position {position} of slot {slot} holds other content"
        self._answers.append([self._next(slot) for slot, _, is_last in work if is_last])


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_blocks_hold_what_requests_read(first: int) -> None:
    """Random prompts that go on with what others generate, requests that are stopped, caches that are often short."""
    num_pauses = num_reused = 0
    for seed in range(first, first + 20):
        draw = random.Random(seed)
        size, longest, is_priority = draw.choice([1, 2, 4, 8]), draw.choice([20, 40]), draw.random() < 0.4
        windows = draw.choice([(None,), (None,), (None, 3), (7,), (2, None, 9, 2)])
        config = BatchingConfig(
            "max_utilization",
            max_batch_size=draw.randint(1, 5),
            max_num_tokens=draw.choice([5, 12, 50]),
            max_seq_len=longest,
            max_input_len=longest - 1,
            tokens_per_block=size,
            num_blocks=len(windows) * (-(-longest // size) + 1 + draw.randint(0, 30) // size),
            chunk_unit=4,
            reuse=ReuseRules(enabled=draw.random() < 0.85),
            overlap=draw.choice([None, Overlap.ASYNC]),
            engine="vllm",
            vllm=VllmRules(
                is_priority,
                reserves_full_prompt=draw.random() < 0.5,
                long_prefill_threshold=draw.choice([0, 0, 3]),
                watermark_blocks=draw.choice([0, 0, 1]),
                windows=windows,
                retention_interval=draw.choice([0, 2 * size, None]),
                takes_new_first=seed % 4 > 0,
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
        loop = Loop(config, arrivals, WritesBeforeReading(size, windows), stops).run(max_steps=4000)
        assert len(loop.completed) == len(arrivals)
        for request in loop.completed:
            if request not in loop.stopped:
                assert loop.tokens(request) == greedy(prompts[request.request_id], wanted[request.request_id])
        assert loop.manager.scheduler.cache_state().used_blocks == 0
        num_pauses += sum(len(record.paused) for record in loop.records)
        num_reused += sum(request.reused_tokens for request in loop.completed)
    assert num_pauses
    assert num_reused
