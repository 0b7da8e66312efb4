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
from ifbbench.kv.sequence import ReuseRules
from ifbbench.schedulers.vllm.blocks import BlockPool
from ifbbench.schedulers.vllm.rules import VllmRules
from ifbbench.settings.config import RunConfig
from ifbbench.settings.modes import Overlap
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
